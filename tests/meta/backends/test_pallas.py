"""Pallas's interpreter, shortened: what a kernel does not touch is not put back, and results are those of NumPy."""

import numpy as np
import pytest

jax = pytest.importorskip("jax")

from jax import lax  # noqa: E402
from jax import numpy as jnp  # noqa: E402
from jax.experimental import pallas as pl  # noqa: E402

from parity.backends.emulation import mxu  # noqa: E402

pytestmark = pytest.mark.tpu
X = np.arange(4 * 8 * 128, dtype=np.float32).reshape(4, 8, 128)


def in_steps(kernel, *operands, out=X.shape):
    """The array that a kernel fills, one row of the first axis in each step."""
    block = pl.BlockSpec((None, 8, 128), lambda i: (i, 0, 0))
    call = pl.pallas_call(
        kernel, jax.ShapeDtypeStruct(out, jnp.float32), grid=(4,), in_specs=[block] * len(operands), out_specs=block,
        interpret=True,
    )  # fmt: skip
    return call(*operands)


def add(x, y, out):
    out[...] = x[...] + y[...]


def test_a_block_that_is_only_read_is_not_put_back():
    with mxu.emulated():
        lowered = jax.jit(lambda x, y: in_steps(add, x, y)).lower(X, X).as_text()
        np.testing.assert_array_equal(in_steps(add, X, X), X + X)
    assert lowered.count("stablehlo.dynamic_update_slice") == 1


def test_a_block_that_is_written_is_put_back_whatever_it_is():
    """An operand that a kernel writes to, in a step of its own, has what was written in the next one."""

    def kernel(x, out):
        @pl.when(pl.program_id(0) == 0)
        def _():
            x[...] = 2 * x[...]

        out[...] = x[...]

    whole = pl.BlockSpec(X.shape, lambda i: (0, 0, 0))
    call = pl.pallas_call(
        kernel, jax.ShapeDtypeStruct(X.shape, jnp.float32), grid=(2,), in_specs=[whole], out_specs=whole, interpret=True
    )
    with mxu.emulated():
        np.testing.assert_array_equal(call(X), 2 * X)


def test_slices_begin_where_they_are_told():
    def kernel(x, out):
        i = pl.program_id(0)
        out[...] = jnp.zeros_like(out)
        out[pl.ds(i, 1), :] = x[pl.ds(7 - i, 1), :]

    expected = np.zeros_like(X)
    for i in range(4):
        expected[i, i] = X[i, 7 - i]
    with mxu.emulated():
        np.testing.assert_array_equal(in_steps(kernel, X), expected)


def test_outside_of_a_kernel_a_start_may_be_negative():
    with mxu.emulated():
        taken = jax.jit(lambda x, n: lax.dynamic_slice(x, (n, 0, 0), (1, 8, 128)))(X, -1)
    np.testing.assert_array_equal(taken[0], X[-1])
