"""Emulated sums are those of a model of the vector unit, bit for bit, inside alone."""

import jax
import numpy as np
import pytest
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from parity.backends.emulation import mxu

SHAPE = (3, 20, 200)


def values(shape=SHAPE):
    return np.random.default_rng(shape).standard_normal(shape).astype(np.float32)


def model(x, axis, width):
    """Registers of `width` along an axis added one after the other, and then halved."""
    x = np.moveaxis(x, axis, -1)
    width = min(width, 1 << (x.shape[-1] - 1).bit_length())
    x = np.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, -x.shape[-1] % width)])
    total = x[..., :width]
    for n in range(width, x.shape[-1], width):
        total = total + x[..., n : n + width]
    while total.shape[-1] > 1:
        total = total[..., : total.shape[-1] // 2] + total[..., total.shape[-1] // 2 :]
    return total[..., 0]


def summed(x, axes, where="jit"):
    """The sum over axes by a function that JAX has not seen before."""
    out = jax.ShapeDtypeStruct([n for axis, n in enumerate(x.shape) if axis not in axes], x.dtype)

    def kernel(x, out):
        out[...] = x[...].sum(axes)

    def call(x):
        interpret = pltpu.InterpretParams() if where == "InterpretParams" else True
        return x.sum(axes) if where == "jit" else pl.pallas_call(kernel, out_shape=out, interpret=interpret)(x)

    return np.asarray(jax.jit(call)(x))


@pytest.mark.parametrize("where", ["jit", "interpret", "InterpretParams"])
@pytest.mark.parametrize(("axis", "width"), [(0, 1), (1, 8), (2, 128)])
def test_a_sum_adds_registers_and_then_halves_them(axis, width, where):
    x = values()
    with mxu.emulated():
        got = summed(x, (axis,), where)
    np.testing.assert_array_equal(got, model(x, axis, width))


def test_leading_axes_are_summed_first():
    x = values()
    with mxu.emulated():
        got = summed(x, (0, 2))
    np.testing.assert_array_equal(got, model(model(x, 0, 1), 1, 128))


@pytest.mark.parametrize("size", [0, 1, 2, 5, 128, 129])
def test_sums_of_every_length_add_all_of_it(size):
    x = values((2, size))
    with mxu.emulated():
        got = summed(x, (1,))
    np.testing.assert_array_equal(got, model(x, 1, 128) if size else np.zeros(2))


def test_a_sum_is_its_own_outside_and_in_other_dtypes():
    x = values()
    with mxu.emulated():
        inside = summed(x, (2,))
        integers = summed(np.arange(24, dtype=np.int32).reshape(2, 12), (1,))
    assert (summed(x, (2,)) != inside).any()
    np.testing.assert_array_equal(integers, [66, 210])
