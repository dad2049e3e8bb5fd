"""Block scales in float32: how a kernel finds those of a tile, and multiplies sums by them.

Each scale becomes [..., parts, columns] with the tile's index along the axis that is summed over, and others, in front:
a tile has a row of scales for each of its parts, or a single one that multiplies the finished sums.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from op_arguments.quantized_gmm import QuantizedProblem
from tpu_kernels._lib.chip import LANES
from tpu_kernels._lib.tiles import Tile


class Changes(NamedTuple):
    """Whether each operand's scales change along the axis that is summed over."""

    lhs: bool
    rhs: bool


def repeated(scale: jax.Array, axis: int, size: int) -> jax.Array:
    """scale with `size` elements along an axis, each repeated."""
    return scale if scale.shape[axis] == size else jnp.repeat(scale, size // scale.shape[axis], axis)


def padded(x: jax.Array, axis: int, size: int) -> jax.Array:
    widths = [(0, 0)] * x.ndim
    widths[axis] = (0, size - x.shape[axis])
    return jnp.pad(x, widths)


def by_parts(scale: jax.Array, axis: int, size: int, tile: int, part: int) -> tuple[jax.Array, bool]:
    """scale with an axis of `size` split into (tiles, parts of a tile); (1, 1), and False, where it has one for all."""
    changes = scale.shape[axis] > 1
    tiles, parts = (pl.cdiv(size, tile), tile // part) if changes else (1, 1)
    if changes:
        scale = padded(repeated(scale, axis, size // part), axis, tiles * parts)
    return scale.reshape(*scale.shape[:axis], tiles, parts, *scale.shape[axis + 1 :]), changes


def gmm_scales(
    lhs_scale: jax.Array | None, rhs_scale: jax.Array | None, p: QuantizedProblem, tile: Tile, transpose_rhs: bool
) -> tuple[jax.Array | None, jax.Array | None, Changes]:
    """The scales of lhs [tiles of K, tiles of M, parts, tm] and those of rhs [G, tiles of K, parts, N]."""
    tm, tk, _ = tile
    part, tiles_m = min(p.block, tk), pl.cdiv(p.m, tm)
    lhs_changes = rhs_changes = False
    if lhs_scale is not None:
        lhs_scale, lhs_changes = by_parts(repeated(lhs_scale, 0, p.m), 1, p.k, tk, part)
        rows = padded(lhs_scale.transpose(1, 2, 0), 2, tiles_m * tm)
        lhs_scale = rows.reshape(*rows.shape[:2], tiles_m, tm).swapaxes(1, 2)
    if rhs_scale is not None:
        by_columns = rhs_scale.swapaxes(1, 2) if transpose_rhs else rhs_scale
        by_columns = repeated(repeated(by_columns, 0, p.groups), 2, p.n)
        rhs_scale, rhs_changes = by_parts(by_columns, 1, p.k, tk, part)
    return lhs_scale, rhs_scale, Changes(lhs_changes, rhs_changes)


def tgmm_scales(
    lhs_scale: jax.Array | None, rhs_scale: jax.Array | None, p: QuantizedProblem, tile: Tile
) -> tuple[jax.Array | None, jax.Array | None, Changes]:
    """The scales of lhs [tiles of M, parts, K] and those of rhs [tiles of M, parts, N]."""
    tm = tile[0]
    part = min(p.block, tm)
    lhs_changes = rhs_changes = False
    if lhs_scale is not None:
        lhs_scale, lhs_changes = by_parts(repeated(lhs_scale, 1, p.k), 0, p.m, tm, part)
    if rhs_scale is not None:
        rhs_scale, rhs_changes = by_parts(repeated(rhs_scale, 1, p.n), 0, p.m, tm, part)
    return lhs_scale, rhs_scale, Changes(lhs_changes, rhs_changes)


def of_parts_and_of_all(scale: Any | None, changes: bool) -> tuple[Any | None, Any | None]:
    """An operand's scales as those of a tile's parts, or as those of the whole axis that is summed over."""
    return (scale, None) if changes else (None, scale)


def row_of(scale: Any | None, part: Any, columns: Any) -> jax.Array | None:
    """The scales [1, columns] of a part of a tile; None where there are none."""
    return None if scale is None else scale[pl.ds(part, 1), columns]


def are_in_range(a: jax.Array, b: jax.Array) -> jax.Array:
    """Whether each product of two scales, of a and of b, is 0 or a normal number; without those that are not finite."""

    def ends(scale: jax.Array) -> tuple[jax.Array, jax.Array]:
        size = jnp.where(jnp.isfinite(scale) & (scale != 0), jnp.abs(scale), 1)
        return jnp.min(size), jnp.max(size)

    (least_a, most_a), (least_b, most_b) = ends(a), ends(b)
    return (least_a * least_b >= jnp.finfo(jnp.float32).tiny) & jnp.isfinite(most_a * most_b)


def as_columns(row: jax.Array | None) -> jax.Array | None:
    """A row of scales [1, I], if any, as a column, in every lane [I, 128]: taken from there, none is broadcast."""
    return None if row is None else jnp.broadcast_to(row, (LANES, row.shape[1])).T


def scaled(sums: jax.Array, columns: jax.Array | None, row: jax.Array | None) -> jax.Array:
    """sums [I, J] in float32, times a column of scales, given in every lane [I, 128], and a row [1, J] of them."""
    sums = sums.astype(jnp.float32)
    if columns is not None:
        width = sums.shape[1]
        sums *= jnp.concatenate([columns] * pl.cdiv(width, LANES), axis=1)[:, :width]
    if row is not None:
        sums *= row
    return sums
