"""Bad input to functions of the three packages: the same exception with the same words in each."""

import importlib
from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from parity.interop import to_jax, to_torch
from tests.support.functions import public

PACKAGES: dict[str, Callable[[Any], Any]] = {
    "cpu_golden": lambda x: x, "tpu_kernels": to_jax, "gpu_reference": to_torch,
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


def with_values(*values):
    x = f32(8, 64)
    x[0, : len(values)] = values
    return x


def call(package, function, arguments):
    """A function of a package, given NumPy arrays as its framework's; of a module "…:" where it is not public."""
    pytest.importorskip(FRAMEWORKS.get(package, "numpy"))
    convert = PACKAGES[package]
    converted = {
        name: convert(np.asarray(x)) if isinstance(x, np.ndarray | np.generic) else x for name, x in arguments.items()
    }
    module, _, name = function.rpartition(":")
    found = vars(importlib.import_module(f"{package}.{module}")) if module else public(package)
    return found[name](**converted)


def check_refused(package, function, arguments, error, message):
    with pytest.raises(error) as refused:
        call(package, function, arguments)
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
