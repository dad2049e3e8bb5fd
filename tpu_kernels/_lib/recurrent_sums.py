"""Sums over rows and lanes of registers, in an order that does not depend on where a step happens to lie."""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import tpu as pltpu

from tpu_kernels._lib.chip import LANES
from tpu_kernels._lib.recurrent_layout import GROUP


def sum_rows(x: jax.Array) -> jax.Array:
    """[..., R, K] -> [..., 1, K], pairwise; the few that an odd factor of R leaves one by one."""
    while x.shape[-2] > 1 and x.shape[-2] % 2 == 0:
        half = x.shape[-2] // 2
        x = x[..., :half, :] + x[..., half:, :]
    return sum((x[..., n : n + 1, :] for n in range(1, x.shape[-2])), start=x[..., :1, :])


def sum_lanes(products: Any) -> jax.Array:
    """[GROUP, R, LANES] -> [R, GROUP], pairwise: the sums of the n-th matrix along its lanes are column n.

    Two matrices at a time are made into one, in which they take turns: a lane whose number has a 0 as that bit has the
    sum of the first's lane and of the lane after it, the other the same of the second. What a sum adds first must not
    depend on n, the row of a group that a step happens to have.
    """
    lane = lax.broadcasted_iota(jnp.int32, products.shape[1:], 1)
    sums = [products[n] for n in range(GROUP)]
    distance = 1
    while len(sums) > 1:
        first = lane & distance == 0
        sums = [
            jnp.where(first, a, b) + jnp.where(first, pltpu.roll(a, LANES - distance, 1), pltpu.roll(b, distance, 1))
            for a, b in zip(sums[::2], sums[1::2], strict=True)
        ]
        distance *= 2
    (total,) = sums
    while distance < LANES:
        total += pltpu.roll(total, distance, 1)
        distance *= 2
    return total[:, :GROUP]


def sum_keys(x: jax.Array) -> jax.Array:
    """[R, K] -> [R, 1], pairwise."""
    total, distance = fold_lanes(x), 1
    while distance < LANES:
        total += pltpu.roll(total, distance, 1)
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
    return jnp.sum(jnp.where(_is_column(n), x, 0.0), axis=1, keepdims=True)


def with_column(x: jax.Array, n: Any, column: jax.Array) -> jax.Array:
    """x [R, GROUP] with its column n replaced."""
    return jnp.where(_is_column(n), column, x)


def _is_column(n: Any) -> jax.Array:
    return lax.broadcasted_iota(jnp.int32, (1, GROUP), 1) == n
