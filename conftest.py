"""Sets the environment before any framework loads, and frees what it compiled, file by file."""

import sys

import pytest

from parity.backends import prepare_environment

prepare_environment()


def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> None:
    """Every program that XLA compiles for the CPU maps memory; beyond `vm.max_map_count` its compiler crashes."""
    if "jax" in sys.modules and (nextitem is None or nextitem.path != item.path):
        sys.modules["jax"].clear_caches()
