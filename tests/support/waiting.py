"""Waiting for what another process does."""

import time


def until(happened, seconds=120):
    end = time.monotonic() + seconds
    while not happened():
        assert time.monotonic() < end
        time.sleep(0.1)
