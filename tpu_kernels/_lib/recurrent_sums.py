"""Sums over rows and lanes of registers, in an order that does not depend on where a step happens to lie."""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import tpu as pltpu

from tpu_kernels._lib.activations import fold_rows
from tpu_kernels._lib.chip import LANES, sublanes
from tpu_kernels._lib.recurrent_layout import GROUP

SUBLANES = sublanes(jnp.float32)


def sum_rows(x: jax.Array) -> jax.Array:
    """[..., R, K] -> [..., 1, K], pairwise; the few that an odd factor of R leaves one by one."""
    while x.shape[-2] > 1 and x.shape[-2] % 2 == 0:
        half = x.shape[-2] // 2
        x = x[..., :half, :] + x[..., half:, :]
    return sum((x[..., n : n + 1, :] for n in range(1, x.shape[-2])), start=x[..., :1, :])


def fold_registers(x: jax.Array) -> jax.Array:
    """[R, K] -> [SUBLANES, K]: the sum of the registers that hold R rows, pairwise."""
    return fold_rows(x, SUBLANES)


def sum_folded(parts: Any) -> jax.Array:
    """[GROUP, SUBLANES, K] in memory -> [GROUP, K], pairwise: rows of registers are loaded apart, not moved."""
    sums = [parts[:, n, :] for n in range(SUBLANES)]
    while len(sums) > 1:
        sums = [a + b for a, b in zip(sums[::2], sums[1::2], strict=True)]
    return sums[0]


def sum_keys_of(parts: Any, slab: Any, n: Any, products: jax.Array) -> None:
    """Leave the sums over K of a slab's products [R, K] at step n in `parts`, for `sums_of_keys`.

    Transposed first: along lanes every sum would take one register by itself.
    """
    parts[slab.start // products.shape[0], n] = fold_registers(products.T)


def sums_of_keys(parts: Any) -> jax.Array:
    """[slabs, GROUP, SUBLANES, R] in memory -> [GROUP, V]."""
    return jnp.concatenate([sum_folded(parts.at[n]) for n in range(parts.shape[0])], axis=1)


def sum_keys(x: jax.Array) -> jax.Array:
    """[R, K] -> [R, 1], pairwise: each lane takes what lies above it, so that lane 0 has pairs that begin at it."""
    total, distance = fold_lanes(x), 1
    while distance < LANES:
        total += pltpu.roll(total, LANES - distance, 1)
        distance *= 2
    return total[:, :1]


def fold_lanes(x: jax.Array) -> jax.Array:
    """[R, K] -> [R, LANES], sums over K in steps of LANES."""
    parts = [x[:, first : first + LANES] for first in range(0, x.shape[1], LANES)]
    while len(parts) > 1:
        parts = [parts[n] + parts[n + 1] if n + 1 < len(parts) else parts[n] for n in range(0, len(parts), 2)]
    return parts[0]


def column_of(x: jax.Array, n: Any) -> jax.Array:
    """Column n of x [R, GROUP]."""
    if isinstance(n, int):
        return x[:, n : n + 1]
    return jnp.sum(jnp.where(_is_column(n), x, 0.0), axis=1, keepdims=True)


def with_column(x: jax.Array, n: Any, column: jax.Array) -> jax.Array:
    """x [R, GROUP] with its column n replaced."""
    return jnp.where(_is_column(n), column, x)


def _is_column(n: Any) -> jax.Array:
    return lax.broadcasted_iota(jnp.int32, (1, GROUP), 1) == n
