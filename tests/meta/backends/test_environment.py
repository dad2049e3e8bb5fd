"""What frameworks read when they load is said to those that are loaded already."""

import ctypes
import re
from pathlib import Path

import pytest

from parity.backends import prepare_environment


def test_a_loaded_openblas_is_told_how_many_threads_to_use(monkeypatch):
    maps = Path("/proc/self/maps")
    libraries = set(re.findall(r"\S*scipy_openblas64_\S*\.so\S*", maps.read_text())) if maps.exists() else set()
    if not libraries:
        pytest.skip("NumPy has another BLAS here")
    (library,) = map(ctypes.CDLL, libraries)
    before = library.scipy_openblas_get_num_threads64_()
    monkeypatch.setenv("OPENBLAS_NUM_THREADS", str(before + 1))
    try:
        prepare_environment()
        assert library.scipy_openblas_get_num_threads64_() == before + 1
    finally:
        library.scipy_openblas_set_num_threads64_(before)
