"""Bad input to functions of the three packages: the same exception with the same words in each."""

import contextlib
import importlib
from collections.abc import Callable
from functools import partial
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from parity.interop import to_jax, to_torch
from tests.support.functions import public
from tests.support.interpreter import DEVICE

PACKAGES: dict[str, Callable[[Any], Any]] = {
    "cpu_golden": lambda x: x, "tpu_kernels": to_jax, "gpu_reference": partial(to_torch, device=DEVICE),
}  # fmt: skip
FRAMEWORKS = {"tpu_kernels": "jax", "gpu_reference": "triton"}
E4M3, E5M2, E8M0 = ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e5m2, ml_dtypes.float8_e8m0fnu


def f32(*shape):
    return np.ones(shape, np.float32)


def f16(*shape):
    return np.ones(shape, np.float16)


def fp8(*shape, dtype=E4M3):
    return np.ones(shape, dtype)


def e8m0(*shape):
    return np.ones(shape, E8M0)


def i8(*shape):
    return np.ones(shape, np.int8)


def i32(*values):
    return np.array(values, np.int32)


def bf16(*shape):
    return np.ones(shape, ml_dtypes.bfloat16)


OF_SCANS = [
    (dict(q=[1.0]), TypeError, "q must be an array [B, T, H, K], got list"),
    (dict(k=None), TypeError, "k must be an array [B, T, H, K], got NoneType"),
    (dict(q=f32(8, 1, 4)), ValueError, "q must have rank 4 [B, T, H, K], got shape [8, 1, 4]"),
    (dict(q=f16(2, 8, 1, 4)), TypeError, "q must be float32 or bfloat16, got float16"),
    (dict(k=i8(2, 8, 1, 4)), TypeError, "k must be float32 or bfloat16, got int8"),
    (dict(k=bf16(2, 8, 1, 4)), TypeError, "k must have q's dtype float32, got bfloat16"),
    (dict(k=f32(2, 8, 1, 6)), ValueError, "k must have shape [B, T, H, K] = [2, 8, 1, 4], got [2, 8, 1, 6]"),
    (dict(k=f32(2, 7, 1, 4)), ValueError, "k must have shape [B, T, H, K] = [2, 8, 1, 4], got [2, 7, 1, 4]"),
    (dict(scale="1"), TypeError, "scale must be a float, got str"),
    (dict(scale=True), TypeError, "scale must be a float, got bool"),
    (dict(scale=float("nan")), ValueError, "scale must be finite, got nan"),
    (dict(scale=float("inf")), ValueError, "scale must be finite, got inf"),
    (dict(cu_seqlens=i32(0, 8)), ValueError, "q must have B = 1 with cu_seqlens, got 2 (shape [2, 8, 1, 4])"),
]
"""The same of q and k [2, 8, 1, 4], whose heads and channels a scan shares with no other tensor."""

OFFSETS = [
    (dict(cu_seqlens=[0, 3, 8]), TypeError, "cu_seqlens must be an array [N + 1], got list"),
    (dict(cu_seqlens=i32(0, 3, 3, 8)[None]), ValueError, "cu_seqlens must have rank 1 [N + 1], got shape [1, 4]"),
    (dict(cu_seqlens=np.array([0, 3, 3, 8], np.int16)), TypeError, "cu_seqlens must be int32, got int16"),
    (dict(cu_seqlens=i32()), ValueError, "cu_seqlens must have N + 1 >= 1 entries, got 0"),
    (dict(cu_seqlens=i32(1, 3, 3, 8)), ValueError, "cu_seqlens must start at 0, got 1"),
    (dict(cu_seqlens=i32(0, 5, 3, 8)), ValueError, "cu_seqlens must not decrease, got 3 after 5 at index 2"),
    (dict(cu_seqlens=i32(0, -1, 3, 8)), ValueError, "cu_seqlens must not decrease, got -1 after 0 at index 1"),
    (dict(cu_seqlens=i32(0, 3, 9, 8)), ValueError, "cu_seqlens must not decrease, got 8 after 9 at index 3"),
    (dict(cu_seqlens=i32(0, 3, 3, 7)), ValueError, "cu_seqlens must end at T = 8, got 7"),
    (dict(cu_seqlens=i32(0, 3, 3, 9)), ValueError, "cu_seqlens must end at T = 8, got 9"),
]  # fmt: skip
"""Of sequences that are packed in T = 8 steps: what is refused, with which error and words."""


def with_values(*values):
    x = f32(8, 64)
    x[0, : len(values)] = values
    return x


def call(package, function, arguments, convert=None):
    """A function of a package, given NumPy arrays as its framework's; of a module "…:" where it is not public."""
    pytest.importorskip(FRAMEWORKS.get(package, "numpy"))
    convert = convert or PACKAGES[package]
    converted = {
        name: convert(np.asarray(x)) if isinstance(x, np.ndarray | np.generic) else x for name, x in arguments.items()
    }
    module, _, name = function.rpartition(":")
    found = vars(importlib.import_module(f"{package}.{module}")) if module else public(package)
    return found[name](**converted)


def on_the_host_first(package, function, arguments):
    """`call` of what is to be refused. Values are judged where the host can read them at once, in tensors that no
    compiled kernel takes: what those are not refused for is judged on the device."""
    if package == "gpu_reference" and DEVICE != "cpu":
        with contextlib.suppress(RuntimeError):
            return call(package, function, arguments, to_torch)
    return call(package, function, arguments)


def check_refused(package, function, arguments, error, message):
    with pytest.raises(error) as refused:
        on_the_host_first(package, function, arguments)
    assert str(refused.value) == message
    assert type(refused.value) is error


def refusals(good, bad):
    """The two tests of a family's file: the `good` arguments of each function are, and each change of `bad` is not.

    good: arguments by function. bad: (function, what is changed in them, the exception, its words).
    """

    @pytest.mark.parametrize("package", PACKAGES)
    @pytest.mark.parametrize("function", good)
    def the_good_arguments_are_good(package, function):
        assert call(package, function, good[function]) is not None

    @pytest.mark.parametrize("package", PACKAGES)
    @pytest.mark.parametrize(("function", "change", "error", "message"), bad, ids=[f"{b[0]}-{b[3]}" for b in bad])
    def bad_arguments_are_refused_in_the_same_words(package, function, change, error, message):
        check_refused(package, function, good[function] | change, error, message)

    return the_good_arguments_are_good, bad_arguments_are_refused_in_the_same_words
