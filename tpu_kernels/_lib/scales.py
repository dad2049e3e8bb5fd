"""Block scales: how they are laid out for a grouped matmul, and how sums are multiplied by those in float32.

Each scale becomes [..., parts, columns] with the tile's index along the axis that is summed over, and others, in front:
a tile has a row of scales for each of its parts, or a single one that multiplies the finished sums. MXFP8's powers of
two multiply the operands before the dot instead (`_lib/powers.py`).
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from op_arguments.quantized_gmm import QuantizedProblem
from tpu_kernels._lib.call import Block
from tpu_kernels._lib.chip import LANES
from tpu_kernels._lib.grids import Grid, Operands
from tpu_kernels._lib.narrow import product_path, scales_in_units
from tpu_kernels._lib.powers import gmm_powers, is_power, tgmm_powers
from tpu_kernels._lib.products import held_back, over_rows, repeated_row
from tpu_kernels._lib.visits import OwnRows


class Scales(NamedTuple):
    """What there is of each operand's scales, None for nothing."""

    lhs: Any
    rhs: Any


class Changes(NamedTuple):
    """Whether each operand's scales change along the axis that is summed over."""

    lhs: bool
    rhs: bool

    def of_parts(self, lhs: Any, rhs: Any) -> Scales:
        """The scales that change: those of a tile's parts."""
        return Scales(lhs if self.lhs else None, rhs if self.rhs else None)

    def of_all(self, lhs: Any, rhs: Any) -> Scales:
        """The scales that do not: those of the finished sums."""
        return Scales(None if self.lhs else lhs, None if self.rhs else rhs)


class Plan(NamedTuple):
    """What is static in a matmul of operands with scales."""

    grid: Grid[QuantizedProblem]
    changes: Changes
    transposed: bool = False  # sums are [columns, rows]


@dataclass(frozen=True)
class ScaledTile:
    """A tile in a kernel: what it multiplies, and its rows that are the group's own; masked: it has others too.

    scratch: the kernel's, with its sums at `acc` and, where lhs is widened, room for it at `wide_lhs`.
    """

    operands: Operands
    out: Any
    scratch: Any
    plan: Plan
    own: OwnRows
    masked: bool = field(default=False, kw_only=True)

    @property
    def acc(self) -> Any:
        return self.scratch.acc

    @property
    def is_widened(self) -> bool:
        return self.scratch.wide_lhs is not None

    @property
    def multiplies_fp8(self) -> bool:
        """Whether the matrix unit multiplies both operands as they are, in fp8: faster than their sums are scaled."""
        return product_path(self.operands.lhs, self.operands.rhs) == "fp8"

    def held_back(self, x: jax.Array, dots: Sequence[jax.Array], registers: int) -> jax.Array:
        """x as `products.held_back` returns it: a tile that is multiplied has rows, which the compiler cannot know."""
        return held_back(x, dots, registers, self.own.end > 0)


def scaled_blocks(operands: Operands, grid: Grid[QuantizedProblem]) -> tuple[Operands, Changes]:
    """The blocks of the operands and of their scales, and which of these change along the axis that is summed over."""
    blocks = grid.blocks(operands)
    if is_power(operands.lhs_scale) or is_power(operands.rhs_scale):
        powers = tgmm_powers if grid.contracting else gmm_powers
        return blocks._replace(**powers(operands, grid)), Changes(False, False)
    of_lhs, of_rhs = (_tgmm_lhs, _tgmm_rhs) if grid.contracting else (_gmm_lhs, _gmm_rhs)
    lhs_scale, rhs_scale = scales_in_units(operands)
    lhs, lhs_changes = (None, False) if lhs_scale is None else of_lhs(lhs_scale, grid)
    rhs, rhs_changes = (None, False) if rhs_scale is None else of_rhs(rhs_scale, grid)
    return blocks._replace(lhs_scale=lhs, rhs_scale=rhs), Changes(lhs_changes, rhs_changes)


def _gmm_lhs(scale: jax.Array, grid: Grid[QuantizedProblem]) -> tuple[Block, bool]:
    """As [tiles of K, tiles of M, parts, tm]."""
    m, tm = grid.problem.m, grid.tile[0]
    tiles = pl.cdiv(m, tm)
    parts, changes = _by_parts(_repeated(scale, 0, m), 1, grid)
    rows = _padded(parts.transpose(1, 2, 0), 2, tiles * tm)
    rows = rows.reshape(*rows.shape[:2], tiles, tm).swapaxes(1, 2)
    return grid.block(rows, "km--" if changes else "-m--", (None, None, rows.shape[2], tm)), changes


def _gmm_rhs(scale: jax.Array, grid: Grid[QuantizedProblem]) -> tuple[Block, bool]:
    """As [G, tiles of K, parts, N]."""
    by_columns = scale.swapaxes(1, 2) if grid.transpose_rhs else scale
    by_columns = _repeated(_repeated(by_columns, 0, grid.problem.groups), 2, grid.problem.n)
    parts, changes = _by_parts(by_columns, 1, grid)
    return grid.block(parts, "gk-n" if changes else "g--n", (None, None, parts.shape[2], grid.tile[2])), changes


def _tgmm_lhs(scale: jax.Array, grid: Grid[QuantizedProblem]) -> tuple[Block, bool]:
    """As [tiles of M, parts, K]."""
    parts, changes = _by_parts(_repeated(scale, 1, grid.problem.k), 0, grid)
    return grid.block(parts, "m-k" if changes else "--k", (None, parts.shape[1], grid.tile[1])), changes


def _tgmm_rhs(scale: jax.Array, grid: Grid[QuantizedProblem]) -> tuple[Block, bool]:
    """As [tiles of M, parts, N]."""
    parts, changes = _by_parts(_repeated(scale, 1, grid.problem.n), 0, grid)
    return grid.block(parts, "m-n" if changes else "--n", (None, parts.shape[1], grid.tile[2])), changes


def _by_parts(scale: jax.Array, axis: int, grid: Grid[QuantizedProblem]) -> tuple[jax.Array, bool]:
    """scale with the axis that is summed over as (tiles, parts of a tile): (1, 1), and False, if it does not change."""
    (size, tile), part = grid.summed, grid.part
    changes = scale.shape[axis] > 1
    tiles, parts = (pl.cdiv(size, tile), tile // part) if changes else (1, 1)
    if changes:
        scale = _padded(_repeated(scale, axis, size // part), axis, tiles * parts)
    return scale.reshape(*scale.shape[:axis], tiles, parts, *scale.shape[axis + 1 :]), changes


def _repeated(scale: jax.Array, axis: int, size: int) -> jax.Array:
    """scale with `size` elements along an axis, each repeated."""
    return scale if scale.shape[axis] == size else jnp.repeat(scale, size // scale.shape[axis], axis)


def _padded(x: jax.Array, axis: int, size: int) -> jax.Array:
    widths = [(0, 0)] * x.ndim
    widths[axis] = (0, size - x.shape[axis])
    return jnp.pad(x, widths)


def are_in_range(lhs_scale: Any, rhs_scale: Any) -> jax.Array:
    """Whether each product of two scales, one of each operand in its units, is 0 or a normal number, as int32 [1].

    Scales that are not finite are left out.
    """

    def ends(scale: Any) -> tuple[jax.Array, jax.Array]:
        size = jnp.where(jnp.isfinite(scale) & (scale != 0), jnp.abs(scale), 1)
        return jnp.min(size), jnp.max(size)

    (least_a, most_a), (least_b, most_b) = map(ends, (lhs_scale, rhs_scale))
    in_range = (least_a * least_b >= jnp.finfo(jnp.float32).tiny) & jnp.isfinite(most_a * most_b)
    return in_range.astype(jnp.int32)[None]


# ------------------------------------------------------------------------------------------------- within a kernel


def row_of(scale: Any | None, part: Any, columns: Any) -> jax.Array | None:
    """The scales of a part of a tile, a `repeated_row` [8, columns]; None where there are none."""
    return None if scale is None else repeated_row(scale, part, columns)


def as_columns(row: jax.Array | None) -> jax.Array | None:
    """A `repeated_row` [8, I] of scales, if any, as a column in every lane [I, 128]: taken so none is broadcast."""
    return None if row is None else over_rows(row, LANES).T


def scaled(sums: jax.Array, columns: jax.Array | None, row: jax.Array | None) -> jax.Array:
    """sums [I, J] in float32, times a column of scales, in every lane [I, 128], and a `repeated_row` [8, J] of them."""
    sums = sums.astype(jnp.float32)
    if columns is not None:
        width = sums.shape[1]
        sums *= jnp.concatenate([columns] * pl.cdiv(width, LANES), axis=1)[:, :width]
    if row is not None:
        sums *= over_rows(row, sums.shape[0])
    return sums


def added(total: jax.Array | None, sums: jax.Array) -> jax.Array:
    """total + sums, or sums alone where there is no total so far."""
    return sums if total is None else total + sums
