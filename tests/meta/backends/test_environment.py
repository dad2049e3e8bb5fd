"""What frameworks read when they load is said to those that are loaded already; what they leave is let go."""

import ctypes
import platform
import re
import subprocess
import sys
import weakref
from pathlib import Path

import numpy as np
import pytest

from parity import backends
from parity.backends import INTERPRETED, free_compiled_programs, has_cuda, prepare_environment
from tests.support.interpreter import interpreted

BLAS = np.show_config(mode="dicts")["Build Dependencies"]["blas"]["name"]


CPU = Path("/proc/cpuinfo")
NEEDS_FMA = pytest.mark.skipif(
    not CPU.exists() or not re.search(r"^flags\b.* fma\b", CPU.read_text(), re.MULTILINE),
    reason="a processor without fused multiply-adds has nothing to warn of; Linux on x86 says which has them",
)


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


FAULTS = """
import ctypes, resource
import numpy as np
from parity.backends import prepare_environment
prepare_environment()
ctypes.CDLL(None).prctl(41, 1, 0, 0, 0)  # PR_SET_THP_DISABLE: a huge page would count as one
for n in range(51):
    if n == 1:
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    arrays = [np.ones(2**18) for _ in range(8)]
    del arrays
faults = resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
print(faults * resource.getpagesize() / (50 * 8 * 2**21))
"""
"""Prints how much of the memory of 50 times eight arrays was mapped anew."""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="only glibc has mallopt, and its variables")
@pytest.mark.parametrize("chosen", [False, True])
def test_memory_of_freed_arrays_is_used_again(monkeypatch, chosen):
    """Less than 5 % is mapped anew; more than half, where a user asked for that."""
    for variable in ("MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_"):
        monkeypatch.delenv(variable, raising=False)
        if chosen:
            monkeypatch.setenv(variable, "131072")
    done = subprocess.run([sys.executable, "-c", FAULTS], capture_output=True, text=True, check=True)
    mapped_anew = float(done.stdout)
    assert mapped_anew > 0.5 if chosen else mapped_anew < 0.05


@pytest.mark.parametrize(("flags", "warned"), [(INTERPRETED, False), pytest.param("", True, marks=NEEDS_FMA)])
def test_an_emulated_tpu_that_fuses_products_is_warned_of(monkeypatch, flags, warned):
    """As where JAX was used before the flags were there: then a residue of a sum is lost that no TPU loses."""
    monkeypatch.setenv("XLA_FLAGS", flags)
    ask = "from parity.backends import runner; runner('tpu')"
    done = subprocess.run([sys.executable, "-c", ask], capture_output=True, text=True, check=True)
    assert ("RuntimeWarning: TPU kernels are emulated with fused multiply-adds" in done.stderr) is warned


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


@pytest.mark.parametrize(
    ("name", "value"), [("CUDA_VISIBLE_DEVICES", ""), ("CUDA_VISIBLE_DEVICES", "-1"), ("TRITON_INTERPRET", "1")]
)
def test_a_gpu_that_is_hidden_or_not_compiled_for_is_none(name, value, monkeypatch):
    """What is interpreted beside a GPU is not the GPU's result."""
    monkeypatch.setattr(Path, "glob", lambda folder, pattern: iter([folder / "nvidia0"] if "nvidia" in pattern else []))
    for variable in ("CUDA_VISIBLE_DEVICES", "TRITON_INTERPRET"):
        monkeypatch.delenv(variable, raising=False)
    assert has_cuda()
    monkeypatch.setenv(name, value)
    assert not has_cuda()


@interpreted
def test_an_interpreted_kernel_is_emulated_beside_a_gpu_too(monkeypatch):
    torch = pytest.importorskip("torch")
    pytest.importorskip("triton")
    from parity.backends.gpu import make_runner

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert (make_runner().real, make_runner().device_kind) == (False, backends.EMULATED)
