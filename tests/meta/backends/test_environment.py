"""What frameworks read when they load is said to those that are loaded already; what they leave is let go."""

import ctypes
import re
import sys
import weakref
from pathlib import Path

import numpy as np
import pytest

from parity import backends
from parity.backends import free_compiled_programs, prepare_environment

BLAS = np.show_config(mode="dicts")["Build Dependencies"]["blas"]["name"]


@pytest.mark.skipif(
    (sys.platform, BLAS) != ("linux", "scipy-openblas"), reason=f"NumPy's BLAS is {BLAS} on {sys.platform}"
)
def test_a_loaded_openblas_is_told_how_many_threads_to_use(monkeypatch):
    libraries = set(re.findall(r"\S*scipy_openblas64_\S*\.so\S*", Path("/proc/self/maps").read_text()))
    (library,) = map(ctypes.CDLL, libraries)
    before = library.scipy_openblas_get_num_threads64_()
    monkeypatch.setenv("OPENBLAS_NUM_THREADS", str(before + 1))
    try:
        prepare_environment()
        assert library.scipy_openblas_get_num_threads64_() == before + 1
    finally:
        library.scipy_openblas_set_num_threads64_(before)


class Ring:
    """An object that only Python's collector frees."""

    def __init__(self) -> None:
        self.itself = self


@pytest.mark.parametrize("grown", [False, True])
def test_a_process_that_grew_lets_go_of_what_it_does_not_use(monkeypatch, grown):
    monkeypatch.setattr(backends, "GROWTH", -(1 << 60) if grown else 1 << 60)
    left = weakref.ref(Ring())
    free_compiled_programs(finished=False)
    assert (left() is None) is grown
