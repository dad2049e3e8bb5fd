"""Where a case runs: on the accelerator, or in the interpreter with the matrix unit's numerics emulated."""

from __future__ import annotations

import ctypes
import gc
import importlib
import itertools
import os
import platform
import re
import sys
from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from parity.backends.devices import torch_build
from parity.guard import Ended
from parity.op import Backend, Inputs, outputs
from parity.words import nearest

EMULATED = "emulated"
"""The device kind of everything that no accelerator computed."""

INTERPRETED = " ".join(
    [
        "--xla_backend_optimization_level=0",
        "--xla_cpu_parallel_codegen_split_count=1",
        "--xla_backend_extra_options=xla_cpu_disable_new_fusion_emitters",
        *(["--xla_cpu_max_isa=AVX"] if platform.machine() == "x86_64" else []),  # without FMA
    ]
)
"""XLA's flags where Pallas kernels are interpreted. Each runs a few times, so most of the time goes to compiling, half
of it to XLA's fusion emitters. Where a processor has FMAs, XLA makes them of some products and sums whatever its
level; no TPU has any: libtpu's code is vmul.f32 and vadd.f32."""

MAPPINGS = 30_000
"""Memory mappings of a process from which on compiled programs are let go: Linux allows 65,530."""
EVERY = 8
"""Calls of `free_compiled_programs` between two looks at the mappings, each of which takes a millisecond or more: so
many tests compile no 300 programs."""
GROWTH = 150_000_000
"""Bytes that a process may grow by before compiled programs and unreachable cycles are freed. Python's collector counts
objects and not bytes: a few that hold large arrays do not wake it."""
KEPT_MEMORY = {"MALLOC_TRIM_THRESHOLD_": (-1, 2**27), "MALLOC_MMAP_THRESHOLD_": (-3, 2**25)}
"""glibc's variables, each with its option of mallopt(3) and the bytes set here. An array above the second, the most
that glibc takes, is mapped anew each time."""
_LOOKS = itertools.count()
_kept = 0  # bytes that this process had after the last collection here


class Runner(Protocol):
    """Runs kernels of one backend."""

    name: Backend
    real: bool
    """Whether an accelerator computes; else everything is emulated on the CPU."""

    @property
    def device_kind(self) -> str:
        """What its framework calls the device, or `EMULATED`."""

    def describe(self) -> str:
        """The device and, where emulated, the model of it, in a few words."""

    def run(self, kernel: Callable[..., Any], inputs: Inputs, arguments: Mapping[str, Any]) -> Any:
        """The kernel's result, with every array brought back as NumPy, bit for bit.

        Raises Ended of a kernel that wrote into its inputs, and whatever the kernel raises.
        """


@cache
def runner(name: Backend) -> Runner:
    """The runner of a backend. Imports its framework; raises ImportError where that is missing."""
    module = importlib.import_module(f"parity.backends.{name}")
    found: Runner = module.make_runner()
    return found


def is_here(name: Backend, *, real: bool) -> bool:
    """Whether this process can run kernels of a backend on an accelerator (`real`), or emulated."""
    try:
        return runner(name).real == real
    except ImportError:
        return False


def device_kind(name: Backend) -> str:
    """What the framework of a backend calls the device of this process; `EMULATED`, unloaded, where there is none."""
    there = has_tpu() if name == "tpu" else has_cuda()
    try:
        return runner(name).device_kind if there else EMULATED
    except ImportError:
        return EMULATED


def load_kernel(target: str) -> Callable[..., Any]:
    """The function called `"module:function"`.

    Raises LookupError where there is no such module or function, and what importing the module raises.
    """
    name, colon, function = target.partition(":")
    if not name:
        raise LookupError(f"a kernel must be called 'module:function', got {target!r}")
    try:
        module = importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name and f"{name}.".startswith(f"{error.name}."):
            raise LookupError(f"a kernel must be called 'module:function', got {target!r}: no module {name}") from None
        raise
    if not colon or not hasattr(module, function):
        lacks = f"{name} has no {function!r}{nearest(vars(module), function)}"
        raise LookupError(f"a kernel must be called 'module:function', got {target!r}: {lacks}")
    kernel: Callable[..., Any] = getattr(module, function)
    return kernel


def to_numpy_tree(result: Any, convert: Callable[[Any], np.ndarray]) -> Any:
    """A copy of a kernel's result (an array, or a NamedTuple or dict of arrays and None) through `convert`.

    A kernel that returns the same buffer every time would otherwise change what an earlier run has returned. Raises
    OutputsError for outputs without names.
    """
    copies = {name: np.array(convert(x)) for name, x in outputs(result).items()}
    if hasattr(result, "_asdict"):
        return type(result)(*map(copies.get, result._fields))
    return copies if isinstance(result, Mapping) else copies["out"]


def check_unwritten(inputs: Inputs, given: Mapping[str, Any], convert: Callable[[Any], np.ndarray]) -> None:
    """Raises Ended where arrays that a kernel was `given` are no longer the inputs that they were made from.

    One that the kernel donated, and JAX has deleted, says nothing.
    """
    for name, x in given.items():
        before = inputs[name]
        if before is None or getattr(x, "is_deleted", bool)():
            continue
        now = convert(x)
        if now.shape != before.shape or not np.array_equal(_bytes(now), _bytes(before)):
            raise Ended("DIRTY", f"wrote into its input {name}")


def _bytes(x: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(x).reshape(-1).view(np.uint8)


def prepare_environment() -> None:
    """Set what the frameworks read when they load: call it before importing any of them.

    Without a TPU, JAX is kept on its CPU backend (a libtpu that is only there to compile would search for chips);
    without a CUDA device, Triton interprets. Variables that are set already stay as they are; XLA_FLAGS gets
    `INTERPRETED` before what is there, which counts where both name a flag. glibc keeps freed memory for the next
    arrays.
    """
    defaults = {
        # Triton 3.10 flips this default, which changes results.
        "TRITON_DEFAULT_FP_FUSION": "1",
        "TF_CPP_MIN_LOG_LEVEL": "2",
        # Read by pytest-xdist's workers, which share the cores among themselves.
        "OPENBLAS_NUM_THREADS": "1",
        "OMP_NUM_THREADS": "1",
    }
    if not has_tpu():
        defaults |= {"JAX_PLATFORMS": "cpu", "TPU_SKIP_MDS_QUERY": "1"}
        flags = os.environ.get("XLA_FLAGS", "")
        os.environ["XLA_FLAGS"] = flags if INTERPRETED in flags else f"{INTERPRETED} {flags}".strip()
    if not has_cuda():
        defaults |= {"TRITON_INTERPRET": "1"}
    for name, value in defaults.items():
        os.environ.setdefault(name, value)
    if (count := os.environ["OPENBLAS_NUM_THREADS"]).isdecimal():
        _limit_threads(int(count))
    _keep_freed_memory()


@cache
def _limit_threads(count: int) -> None:
    """Tell the OpenBLAS that NumPy and SciPy have loaded, which reads its variable when it is, how many threads to use.

    Of matrices as small as a case's the others only wait, and take as much of a processor as those that compute.
    """
    for library in set(re.findall(r"\S*openblas\S*\.so\S*", _maps())):
        for name in ("scipy_openblas_set_num_threads64_", "scipy_openblas_set_num_threads"):
            if limit := getattr(ctypes.CDLL(library), name, None):
                limit(count)


@cache
def _keep_freed_memory() -> None:
    """Tell glibc to keep the memory of freed arrays for the next ones (`KEPT_MEMORY`); variables that are set win.

    Mapped anew, each page is zeroed when it is first written: a rounding of 2¹⁸ values took four times as long.
    """
    if set_option := _of_libc("mallopt"):
        for variable, (option, size) in KEPT_MEMORY.items():
            if variable not in os.environ:
                set_option(option, size)


def _of_libc(name: str) -> Any:
    """A function of Linux's C library; None where it has none of that name."""
    return getattr(ctypes.CDLL(None), name, None) if sys.platform == "linux" else None


def free_compiled_programs(*, finished: bool) -> None:
    """Free what JAX has compiled where its users have `finished`, this process has many programs, or it grew.

    Each program that XLA compiles for the CPU maps memory (a Pallas kernel in interpret mode about 110 times), and
    beyond the `vm.max_map_count` of a process its compiler crashes. Their memory goes back to the system.
    """
    global _kept
    grown = _resident() > _kept + GROWTH
    if not (finished or grown or (next(_LOOKS) % EVERY == 0 and _mapped() > MAPPINGS)):
        return
    if jax := sys.modules.get("jax"):
        jax.clear_caches()
    if grown:
        gc.collect()
    if trim := _of_libc("malloc_trim"):
        trim(0)  # glibc keeps what is freed: a third of a process that has compiled twenty scans
    if grown:
        _kept = _resident()


def _resident() -> int:
    """Bytes of memory that this process has; 0 where the system is not Linux."""
    try:
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:
        return 0


def _mapped() -> int:
    return _maps().count("\n")


def _maps() -> str:
    """A line for each memory mapping of this process; none where the system is not Linux."""
    try:
        return Path("/proc/self/maps").read_text()
    except OSError:
        return ""


def has_tpu() -> bool:
    """Whether a TPU's device files are there, without loading a framework."""
    return any(Path("/dev").glob("accel[0-9]*")) or any(Path("/dev/vfio").glob("[0-9]*"))


def has_cuda() -> bool:
    """Whether kernels run on what torch calls a CUDA device, without loading a framework: its files are there and
    visible, and Triton is not told to interpret kernels.

    NVIDIA's, or AMD's where torch is built for ROCm: the graphics of a laptop's processor are no reason not to emulate.
    """
    if os.environ.get("TRITON_INTERPRET") == "1":
        return False
    there = any(Path("/dev").glob("nvidia[0-9]*")) or (Path("/dev/kfd").exists() and torch_build() == "hip")
    return there and os.environ.get("CUDA_VISIBLE_DEVICES", "0") not in ("", "-1")
