"""What frameworks read when they load is said to those that are loaded already."""

import ctypes
import re
import sys
from pathlib import Path

import numpy as np
import pytest

from parity.backends import prepare_environment

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
