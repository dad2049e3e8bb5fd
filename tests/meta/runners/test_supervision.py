"""The process that waits for a command's child passes on what a user does to it, and survives it."""

import subprocess
import sys

COMMAND = """
import os, signal, time
from types import SimpleNamespace

signal.sigtimedwait = lambda *_: SimpleNamespace(si_signo=2**20, si_code=0)

from parity.runners import supervision

found = supervision.split()
if isinstance(found, supervision.End):
    os._exit(found.code)
time.sleep(0.1)
found.finish(0)
"""


def test_a_run_goes_on_that_was_stopped_for_longer_than_a_wait():
    """By Ctrl-Z and fg, or by a profiler that attaches: CPython's wait then returns what its memory held."""
    assert subprocess.run([sys.executable, "-c", COMMAND], timeout=60).returncode == 0
