"""Bad input to functions of the three packages: the same exception with the same words in each."""

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
    """A function of a package by name, given NumPy arrays as its framework's."""
    convert = PACKAGES[package]
    converted = {
        name: convert(np.asarray(x)) if isinstance(x, np.ndarray | np.generic) else x for name, x in arguments.items()
    }
    return public(package)[function](**converted)


def check_refused(package, function, arguments, error, message):
    with pytest.raises(error) as refused:
        call(package, function, arguments)
    assert str(refused.value) == message
    assert type(refused.value) is error
