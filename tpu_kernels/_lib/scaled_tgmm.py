"""tgmm of operands with scales: the kernel behind `tgmm_quantized` and the weight gradient of `grouped_gemm`.

Blocks of scales lie along M, which is summed over: a tile holds whole ones, or lies in one. Each is a dot of its own in
the narrow type, or both operands are widened first, once; sums are scaled as in `_lib/scaled_gmm.py`.
"""

from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from op_arguments.mxfp8 import MX_BLOCK
from op_arguments.probe import active, probe
from op_arguments.quantized_gmm import QuantizedProblem
from tpu_kernels._lib.chip import LANES, MXU
from tpu_kernels._lib.grids import Grid, Listed, Operands, grouped_matmul
from tpu_kernels._lib.narrow import product, sum_dtype, widen, widen_whole, widened_to
from tpu_kernels._lib.powers import times_rows
from tpu_kernels._lib.products import blocks, dot, dot_depth, for_blocks
from tpu_kernels._lib.scales import Plan, ScaledTile, Scales, added, as_columns, row_of, scaled, scaled_blocks
from tpu_kernels._lib.visits import COPY_ROWS, Visits, row_block

PARTS, PARTS_IN_FP8 = 2, 8  # of a tile that are added up before sums are stored
DOTS = 192  # of 128 rows in straight-line code: a loop's first sums are there 270 bundles after it begins
DOTS_OF_ONLY = 512  # where a group has no other tile
IN_FLIGHT = 300  # registers of sums on their way: 9 dots idle, 11 spill, see `products.held_back`
STRIPS = 8  # of 128 rows, that are stored in straight-line code
TALL = 896  # rows of a dot that the matrix unit adds up by itself: of multiples of 128 the fastest in tgmm on tpu7x


class Scratch(NamedTuple):
    """A group's sums; rows of its own, with zeros for another group's; and both operands widened."""

    acc: Any
    own_lhs: Any
    own_rhs: Any
    wide_lhs: Any = None
    wide_rhs: Any = None


@grouped_matmul
def scaled_tgmm(operands: Operands, listed: Listed, *, grid: Grid[QuantizedProblem]) -> jax.Array:
    """[G, K, N] of checked operands with scales, of float32 or MXFP8's."""
    specs, changes = scaled_blocks(operands, grid)
    plan = Plan(grid, changes)
    scratch = _scratch(specs, plan)
    return grid.call(partial(_kernel, plan=plan), name="tgmm_quantized", listed=listed, operands=specs, scratch=scratch)


def _scratch(specs: Operands, plan: Plan) -> Scratch:
    (tm, tk, tn), lhs, rhs = plan.grid.tile, specs.lhs.array, specs.rhs.array
    scratch = Scratch(
        pltpu.VMEM((tk, tn), sum_dtype(lhs, rhs, any(plan.changes))),
        pltpu.VMEM((row_block(tm), tk), lhs.dtype),
        pltpu.VMEM((row_block(tm), tn), rhs.dtype),
    )
    wide = jnp.dtype(jnp.bfloat16) if specs.in_powers else widened_to(lhs, rhs)
    if wide is None:
        return scratch
    return scratch._replace(wide_lhs=pltpu.VMEM((row_block(tm), tk), wide), wide_rhs=pltpu.VMEM((tm, tn), wide))


# ------------------------------------------------------------------------------------------------------- kernel


def _kernel(visits: Visits, operands: Operands, out: Any, scratch: Scratch, *, plan: Plan) -> None:
    visit, last_visit = pl.program_id(2), pl.num_programs(2) - 1
    tm, tk = operands.lhs.shape
    own = visits.own_rows(visit, tm)
    whole = own.are_all()
    first_of_group, last_of_group = visits.ends_of_group(visit, last_visit)
    tile = _Tile(operands, out, scratch, plan, own, first_of_group)

    def add() -> None:
        pl.when(whole)(tile.multiply_whole)

        @pl.when(~whole)
        def _() -> None:
            own.for_blocks(replace(tile, masked=True).multiply_own)

            @pl.when(own.start >= own.end)  # an empty group has one visit, without rows
            def _() -> None:
                def clear(rows: Any) -> None:
                    scratch.acc[rows, :] = jnp.zeros((rows.size, out.shape[1]), scratch.acc.dtype)

                for_blocks(tk, COPY_ROWS, clear)

        @pl.when(last_of_group)
        def _() -> None:
            if tile.whole.lhs is None:
                for_blocks(tk, MXU, tile.store_sums)
            else:
                for_blocks(tk, STRIPS * LANES, tile.store_strips)

    if tile.sums_at_once:
        only = whole & first_of_group & last_of_group
        pl.when(only)(replace(tile, first=True, only=True).multiply_whole)
        pl.when(~only)(add)
    else:
        add()


@dataclass(frozen=True)
class _Tile(ScaledTile):
    """A visit's tile.

    first: whether it is the first of its group, a bool where that is known. only: whether it is whole and the group's
    only one: its sums are results, and are not kept.
    """

    first: Any
    only: bool = False

    @cached_property
    def depth_of_dot(self) -> int:
        return self.plan.grid.part if any(self.plan.changes) else dot_depth(changed=True)

    @property
    def parts(self) -> Scales:
        return self.plan.changes.of_parts(self.operands.lhs_scale, self.operands.rhs_scale)

    @property
    def whole(self) -> Scales:
        return self.plan.changes.of_all(self.operands.lhs_scale, self.operands.rhs_scale)

    @property
    def width(self) -> int:
        """How many rows of parts are added up in registers."""
        return (PARTS_IN_FP8 if self.multiplies_fp8 else PARTS) * self.plan.grid.part

    @property
    def sums_at_once(self) -> bool:
        """Whether a whole tile's sums end in straight-line code, where their results can be stored."""
        return self.is_widened or not any(self.plan.changes) or self.operands.lhs.shape[0] <= self.width

    # ---- sums

    def multiply_whole(self) -> None:
        """Add the products of all rows."""
        if self.is_widened:
            self.multiply_widened()
        else:
            self.multiply(self.operands.lhs, self.operands.rhs, 0, self.first)

    def row_of_part(self, scale: Any | None, first_row: Any, columns: Any) -> jax.Array | None:
        """The scales of the part of the tile that first_row is in."""
        part = self.plan.grid.part
        i = first_row // part if isinstance(first_row, int) else lax.div(first_row, part)
        row = row_of(scale, i, columns)
        if row is None or not self.masked:
            return row
        # A block without rows of the group may have NaN for a scale.
        return jnp.where((self.own.start < (i + 1) * part) & (i * part < self.own.end), row, 0.0)

    def multiply(self, lhs: Any, rhs: Any, first_row: Any, first: Any) -> None:
        """Add the products of rows of the tile from first_row on; first: whether no sums of the group are before."""
        depth = lhs.shape[0]
        if any(self.plan.changes):
            for_blocks(depth, min(self.width, depth), partial(self.multiply_parts, lhs, rhs, first_row, first))
            return
        height = TALL if self.depth_of_dot > self.operands.lhs.shape[0] and not self.is_widened else MXU
        for inner in blocks(depth, self.depth_of_dot):  # few, and no loop: the end of one overlaps the next one's start
            last = inner.start + inner.size == depth
            for rows in blocks(lhs.shape[1], height):
                column = self.column_of_all(rows) if last else None
                for columns in blocks(rhs.shape[1], 4 * MXU):
                    before = self.before(rows, columns, first & (inner.start == 0))
                    sums = self.product(lhs[inner, rows], rhs[inner, columns], (0, 0))
                    self.keep(rows, columns, added(before, sums), column, last)

    def multiply_parts(self, lhs: Any, rhs: Any, first_row: Any, first: Any, inner: Any) -> None:
        """Add the products of the parts at `inner`, each times its scales; sums go through memory once for all."""
        parts = [pl.ds(inner.start + part.start, part.size) for part in blocks(inner.size, self.plan.grid.part)]
        strips = max((DOTS_OF_ONLY if self.only else DOTS) // (len(parts) * len(blocks(rhs.shape[1], MXU))), 1)
        height = pl.cdiv(strips * LANES, MXU) * MXU
        first &= inner.start == 0
        for_blocks(lhs.shape[1], height, partial(self.multiply_strips, lhs, rhs, first_row, first, parts))

    def multiply_strips(self, lhs: Any, rhs: Any, first_row: Any, first: Any, parts: list[Any], rows: Any) -> None:
        """Add them for these rows of the result, strip by strip.

        Scales of lhs become columns, and lhs is transposed, once for all columns of the result.
        """
        of_lhs = [self.row_of_part(self.parts.lhs, first_row + part.start, rows) for part in parts]
        dots: list[jax.Array] = []
        for block in blocks(rows.size, LANES if self.multiplies_fp8 else MXU):
            end = block.start + block.size
            scales = [as_columns(None if row is None else row[:, block.start : end]) for row in of_lhs]
            strip = pl.ds(rows.start + block.start, block.size)
            transposed = [lhs[part, strip].T for part in parts]
            of_all = self.column_of_all(strip)
            for columns in blocks(rhs.shape[1], MXU):
                total = self.before(strip, columns, first)
                for part, column, x in zip(parts, scales, transposed, strict=True):
                    row = self.row_of_part(self.parts.rhs, first_row + part.start, columns)
                    x = self.held_back(x, dots, IN_FLIGHT) if self.multiplies_fp8 else x
                    total = added(total, scaled(self.product(x, rhs[part, columns], (1, 0)), column, row))
                    dots.append(total)
                self.keep(strip, columns, total, of_all)

    def product(self, a: Any, b: Any, contract: tuple[int, int]) -> jax.Array:
        return dot(a, b, contract) if self.is_widened else product(a, b, contract)

    def before(self, rows: Any, columns: Any, first: Any) -> Any:
        """The sums so far, None if there are none for certain; first: whether there are none, for certain if a bool."""
        if isinstance(first, bool):
            return None if first else self.acc[rows, columns]
        return jnp.where(first, jnp.zeros((), self.acc.dtype), self.acc[rows, columns])

    def keep(self, rows: Any, columns: Any, total: jax.Array, column: Any, last: bool = True) -> None:
        """Keep the sums in memory; those of an only visit are results at last, and stored. column: `column_of_all`.

        last: whether nothing of the tile is left to add.
        """
        if self.only and last:
            self.store(rows, columns, total, column)
        else:
            self.acc[rows, columns] = total

    def multiply_own(self, rows: Any) -> None:
        """Add the products of the group's rows among these, one block of rows."""
        lhs, rhs = self.scratch.own_lhs, self.scratch.own_rhs
        self.own.copy(((self.operands.lhs, lhs), (self.operands.rhs, rhs)), rows)
        if self.is_widened:
            lhs, rhs = self.widen_own(rows.start // MX_BLOCK)
        self.multiply(lhs, rhs, rows.start, self.first & (rows.start <= self.own.start))

    def widen_own(self, first_block: Any) -> tuple[Any, Any]:
        """The group's rows, widened once and not for each block of the result; first_block: of their powers."""
        height = self.scratch.own_lhs.shape[0]
        for narrow, wide, powers in (
            (self.scratch.own_lhs, self.scratch.wide_lhs, self.operands.lhs_powers),
            (self.scratch.own_rhs, self.scratch.wide_rhs, self.operands.rhs_powers),
        ):

            def copy(rows: Any, narrow: Any = narrow, wide: Any = wide, powers: Any = powers) -> None:
                own = narrow[rows, :]
                if powers is None:
                    wide[rows, :] = widen(own, wide.dtype)
                else:
                    of_rows = first_block + rows.start // MX_BLOCK
                    wide[rows, :] = times_rows(widen_whole(own), powers, of_rows, slice(None), self.is_own_block)

            for_blocks(height, COPY_ROWS, copy)
        return self.scratch.wide_lhs.at[pl.ds(0, height)], self.scratch.wide_rhs.at[pl.ds(0, height)]

    def is_own_block(self, block: Any) -> jax.Array:
        """Whether the group has rows in a block of MXFP8's scales."""
        return (self.own.start < (block + 1) * MX_BLOCK) & (block * MX_BLOCK < self.own.end)

    def multiply_widened(self) -> None:
        """Products with both operands widened under them: lhs as it is used, rhs under the products before."""
        (tm, tk), tn = self.operands.lhs.shape, self.operands.rhs.shape[1]
        changes, wide_rhs = any(self.plan.changes), self.scratch.wide_rhs
        for inner in blocks(tm, self.depth_of_dot):
            last = inner.start + inner.size == tm
            for columns in blocks(tn, 2 * MXU):
                wide_rhs[inner, columns] = self.widened(self.operands.rhs, self.operands.rhs_powers, inner, columns)
            for rows in blocks(tk, MXU if self.operands.in_powers else 2 * MXU):
                lhs = self.widened(self.operands.lhs, self.operands.lhs_powers, inner, rows)
                column = as_columns(self.row_of_part(self.parts.lhs, inner.start, rows))
                of_all = self.column_of_all(rows) if last else None
                for columns in blocks(tn, 2 * MXU):
                    before = self.before(rows, columns, self.first if inner.start == 0 else False)
                    sums = dot(lhs, wide_rhs[inner, columns], contract=(0, 0))
                    if changes:
                        sums = scaled(sums, column, self.row_of_part(self.parts.rhs, inner.start, columns))
                    self.keep(rows, columns, added(before, sums), of_all, last)

    def widened(self, narrow: Any, powers: Any, inner: Any, columns: Any) -> jax.Array:
        if powers is None:
            return widen(narrow[inner, columns], self.scratch.wide_rhs.dtype)
        return times_rows(widen_whole(narrow[inner, columns]), powers, inner.start // MX_BLOCK, columns)

    # ---- results

    def row_of_all(self, scale: Any | None, columns: Any) -> jax.Array | None:
        row = row_of(scale, 0, columns)
        if row is None or self.only:
            return row
        return jnp.where(self.own.start < self.own.end, row, 0.0)  # an empty group's is 0, not 0 * NaN

    def column_of_all(self, rows: Any) -> jax.Array | None:
        """The scales of lhs for these rows of the result, where sums are stored."""
        return as_columns(self.row_of_all(self.whole.lhs, rows))

    def store(self, rows: Any, columns: Any, total: jax.Array, column: jax.Array | None) -> None:
        """Store the result of these sums; column: `column_of_all`."""
        total = scaled(total, column, self.row_of_all(self.whole.rhs, columns))
        if active():
            total = probe("acc", total, jnp.full(total.shape, self.own.start < self.own.end))
        if self.operands.existing_out is not None:
            total += self.operands.existing_out[rows, columns].astype(jnp.float32)
        self.out[rows, columns] = total.astype(self.out.dtype)

    def store_sums(self, rows: Any) -> None:
        """Store the results of the sums that were kept."""
        column = self.column_of_all(rows)
        for columns in blocks(self.out.shape[1], 2 * MXU):
            self.store(rows, columns, self.acc[rows, columns], column)

    def store_strips(self, rows: Any) -> None:
        """Strip by strip: a strip's column of scales is made while the strip before is stored."""
        for strip in blocks(rows.size, LANES):
            self.store_sums(pl.ds(rows.start + strip.start, strip.size))
