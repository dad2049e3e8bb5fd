"""The order of additions of the TPU's vector unit, emulated where Pallas kernels run interpreted on a CPU.

XLA's CPU code sums along an axis one value after the other, or as many at a time as the host's vectors are wide. The
TPU holds the last two axes in registers of 8 rows of 128 lanes. It adds the registers that lie along a summed axis one
after the other, and halves what is left: value i and value i + n/2, until there is one. Sums over leading axes take one
value after the other. That lanes are halved is an assumption: the order within the cross-lane unit is not published.
"""

from math import prod
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.interpreters import mlir

REGISTER = (8, 128)
"""Rows and lanes of a register."""


def lower(original: Any, ctx: Any, x: Any, **params: Any) -> Any:
    """Lowering rule of `reduce_sum` of float32 values; `original` is that of everything else."""
    (of,) = ctx.avals_in
    axes = params["axes"]
    if of.dtype != jnp.float32 or not prod(of.shape[axis] for axis in axes) > 1:
        return original(ctx, x, **params)
    bare = ctx.replace(avals_in=[jax.core.ShapedArray(of.shape, of.dtype)])
    return mlir.lower_fun(lambda x: total(x, axes), multiple_results=False)(bare, x)


def total(x: jax.Array, axes: tuple[int, ...]) -> jax.Array:
    """The sum of x, not empty, over its axes, leading ones first, each in the vector unit's order."""
    for axis in sorted(axes):
        x = _along(x, axis)
    # Without the barrier XLA adds up anew for every element of what the sum is broadcast to.
    return lax.optimization_barrier(x.reshape([n for axis, n in enumerate(x.shape) if axis not in axes]))


def _along(x: jax.Array, axis: int) -> jax.Array:
    """The sum of x over an axis, which stays with length 1."""
    size = x.shape[axis]
    width = REGISTER[axis - x.ndim] if x.ndim - axis <= len(REGISTER) else 1
    width = min(width, 1 << (size - 1).bit_length())
    if size % width:
        x = jnp.pad(x, [(0, -size % width if n == axis else 0) for n in range(x.ndim)])
    registers = [lax.slice_in_dim(x, n, n + width, axis=axis) for n in range(0, size, width)]
    x = registers[0]
    for register in registers[1:]:
        x = x + register
    while width > 1:
        width //= 2
        x = lax.slice_in_dim(x, 0, width, axis=axis) + lax.slice_in_dim(x, width, 2 * width, axis=axis)
    return x
