"""What frameworks read when they load is said to those that are loaded already."""

import ctypes
import re
from pathlib import Path

import pytest

from parity import backends


def test_a_loaded_openblas_is_told_how_many_threads_to_use():
    maps = Path("/proc/self/maps")
    libraries = set(re.findall(r"\S*scipy_openblas64_\S*\.so\S*", maps.read_text())) if maps.exists() else set()
    if not libraries:
        pytest.skip("NumPy has another BLAS here")
    (library,) = map(ctypes.CDLL, libraries)
    before = library.scipy_openblas_get_num_threads64_()
    try:
        for count in (2, 1):
            backends._limit_threads.__wrapped__(count)
            assert library.scipy_openblas_get_num_threads64_() == count
    finally:
        library.scipy_openblas_set_num_threads64_(before)
