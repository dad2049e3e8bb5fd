"""gmm of operands with scales: the kernel behind `gmm_quantized` and the forward pass of `grouped_gemm`.

A tile holds whole blocks of scales along K, or lies in one. Each block is a dot of its own, in the narrow type, and its
float32 sums are multiplied by its scales as they are added up; a scale that is the same for all of K multiplies the
finished sums, once. If one weight scale covers 128 columns, the accumulator is the transposed tile: the scale is then
a row and multiplies all lanes at once. Powers of two multiply the operands before the dot (`_lib/powers.py`).
"""

import math
from collections.abc import Callable, Iterator, Sequence
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
from tpu_kernels._lib import chip
from tpu_kernels._lib.chip import LANES, MXU
from tpu_kernels._lib.grids import Grid, Listed, Operands, grouped_matmul
from tpu_kernels._lib.narrow import (
    EXACT_SUMS,
    are_narrow,
    product,
    product_path,
    scales_in_units,
    sum_dtype,
    widen,
    widen_whole,
)
from tpu_kernels._lib.powers import tiles_of_register, times_lanes, times_rows
from tpu_kernels._lib.products import blocks, dot, dot_depth, for_blocks, for_depth, over_rows, repeated_row
from tpu_kernels._lib.scales import (
    Changes,
    Plan,
    ScaledTile,
    Scales,
    added,
    are_in_range,
    as_columns,
    row_of,
    scaled,
    scaled_blocks,
)
from tpu_kernels._lib.visits import Visits

IN_FLIGHT = 480  # registers of sums on their way: 496 spill, see `products.held_back`
WIDENED_ROWS = 64  # at a time, so that they stay in registers
WIDENING, WIDENING_POWERS = 3, 5  # blocks of columns whose products hide, on v6e, that lhs is widened; with powers


class Scratch(NamedTuple):
    acc: Any
    lhs_columns: Any = None  # scales of lhs, a column in every lane for each part
    wide_lhs: Any = None  # [K / 128, tm, 128]: of more columns the halves of a register lie apart


@grouped_matmul
def scaled_gmm(operands: Operands, listed: Listed, *, grid: Grid[QuantizedProblem]) -> jax.Array:
    """[M, N] of checked operands with scales, of float32 or MXFP8's."""
    specs, changes = scaled_blocks(operands, grid)
    plan, in_range = Plan(grid, changes, _sums_are_transposed(operands, changes, grid)), None
    if plan.transposed:  # lhs's scales as they are laid out, in whole registers; rhs's before they are repeated
        in_range = are_in_range(specs.lhs_scale.array, list(scales_in_units(operands))[1])
    return grid.call(
        partial(_kernel, plan=plan),
        name="gmm_quantized",
        listed=listed,
        scalars=(in_range,),
        operands=specs,
        scratch=_scratch(specs, plan),
    )


def _sums_are_transposed(operands: Operands, changes: Changes, grid: Grid[QuantizedProblem]) -> bool:
    """Whether each scale of rhs covers whole registers of columns: two operations for each sum then, and not three."""
    (tm, _, tn), columns = grid.tile, grid.problem.rhs_blocks[1 if grid.transpose_rhs else 2]
    are_whole = not (columns % LANES or tm % LANES or tn % LANES)
    return all(changes) and are_narrow(operands.lhs, operands.rhs) and are_whole


def _scratch(specs: Operands, plan: Plan) -> Scratch:
    (tm, tk, tn), lhs, rhs = plan.grid.tile, specs.lhs.array, specs.rhs.array
    scratch = Scratch(pltpu.VMEM((tn, tm) if plan.transposed else (tm, tn), sum_dtype(lhs, rhs, any(plan.changes))))
    if specs.lhs_scale is not None and not plan.transposed:
        parts = tk // plan.grid.part if plan.changes.lhs else 1
        scratch = scratch._replace(lhs_columns=pltpu.VMEM((parts, tm, LANES), jnp.float32))
    if specs.lhs_powers is not None or (are_narrow(lhs, rhs) and product_path(lhs, rhs) == "bfloat16"):
        scratch = scratch._replace(wide_lhs=pltpu.VMEM((pl.cdiv(tk, LANES), tm, LANES), jnp.bfloat16))
    return scratch


# ------------------------------------------------------------------------------------------------------- kernel


def _kernel(visits: Visits, in_range: Any, operands: Operands, out: Any, scratch: Scratch, *, plan: Plan) -> None:
    visit, step, last_step = pl.program_id(1), pl.program_id(2), pl.num_programs(2) - 1
    tm, tk = operands.lhs.shape
    own = visits.own_rows(visit, tm)
    whole = own.are_all()
    tile = _Tile(operands, out, scratch, plan, own, step)
    if plan.transposed:
        tile = replace(tile, in_range=in_range[0] != 0)

    def multiply_step(tile: _Tile, for_rows: Callable[[Callable[[Any], None]], None]) -> None:
        def multiply_to(depth: int) -> None:
            for_rows(lambda rows: tile.multiply(rows, depth))

        def store_all(rows: Any) -> None:
            tile.for_columns(lambda columns: tile.store(rows, columns, tile.acc[tile.at(rows, columns)]))

        for_depth(plan.grid.problem.k, tk, step, last_step, multiply_to)
        if not tile.one_step:
            pl.when(step == last_step)(lambda: for_rows(store_all))

    unmasked = whole & tile.in_range if plan.transposed else whole

    @pl.when(unmasked)
    def _() -> None:
        multiply_step(tile, tile.for_passes)

    @pl.when(~unmasked)
    def _() -> None:
        # Consecutive visits of a tile share its output block: the first one fills the rows that are not its own.
        @pl.when(visits.is_first_of_tile(visit) & (step == last_step))
        def _() -> None:
            out[...] = jnp.zeros_like(out) if operands.existing_out is None else operands.existing_out[...]

        masked = replace(tile, masked=True)
        own.for_blocks(lambda rows: multiply_step(masked, lambda body: body(rows)))


@dataclass(frozen=True)
class _Tile(ScaledTile):
    """A step's tile; rows that are masked are not stored.

    in_range: whether all products of two scales are normal numbers, where sums are transposed.
    """

    step: Any
    in_range: Any = None

    @property
    def depth(self) -> int:
        """How much of K a tile has."""
        return int(self.operands.lhs.shape[1])

    @property
    def one_step(self) -> bool:
        return self.depth == self.plan.grid.problem.k

    @cached_property
    def depth_of_dot(self) -> int:
        depth = dot_depth(changed=self.is_widened)
        depth = min(depth, EXACT_SUMS) if self.acc.dtype == jnp.int32 else depth
        return self.plan.grid.part if any(self.plan.changes) else depth

    @cached_property
    def waits(self) -> bool:
        """Whether dots wait for sums; where rhs is not transposed that takes 1% longer at three of four shapes."""
        return self.plan.transposed and self.plan.grid.transpose_rhs and self.multiplies_fp8

    # ---- operands

    def lhs(self, rows: Any, inner: Any) -> jax.Array:
        """lhs as it is multiplied."""
        wide = self.scratch.wide_lhs
        if wide is None:
            return self.operands.lhs[rows, inner]
        return jnp.concatenate([wide[tile, rows, lanes] for tile, lanes in by_lanes(inner)], axis=1)

    def widen_lhs(self, rows: Any, inner: Any) -> None:
        """Widen lhs here, for `lhs`."""
        x, first = self.widened_lhs(rows, inner), 0
        for tile, lanes in by_lanes(inner):
            self.scratch.wide_lhs[tile, rows, lanes] = x[:, first : first + lanes.size]
            first += lanes.size

    def widened_lhs(self, rows: Any, inner: Any) -> jax.Array:
        narrow = self.operands.lhs[rows, inner]
        if self.operands.lhs_powers is None:
            return widen(narrow, self.scratch.wide_lhs.dtype)
        return times_lanes(widen_whole(narrow), self.operands.lhs_powers, rows, inner.start, self.tile_lane)

    @property
    def tile_lane(self) -> Any:
        """The lane at which the E8M0 scales of this step's tile begin in their register."""
        shared = tiles_of_register(self.plan.grid.problem.k, self.depth)
        return 0 if shared == 1 else lax.rem(self.step, shared) * (self.depth // MX_BLOCK)

    def weights(self, inner: Any, columns: Any) -> jax.Array:
        """rhs as it is multiplied."""
        transposed = self.plan.grid.transpose_rhs
        weights = self.operands.rhs[columns, inner] if transposed else self.operands.rhs[inner, columns]
        powers = self.operands.rhs_powers
        if powers is None:
            return weights
        wide = widen_whole(weights)
        if transposed:
            return times_lanes(wide, powers, columns, inner.start, self.tile_lane)
        first, of_step = inner.start // MX_BLOCK, self.depth // MX_BLOCK
        if not self.one_step and (of_step % 8 or powers.shape[0] % of_step):
            first += self.step * of_step
        elif not self.one_step:  # whole registers in each step, in which each row's place is known
            powers = powers.at[pl.ds(pl.multiple_of(self.step * of_step, of_step), of_step)]
        return times_rows(wide, powers, first, columns)

    def prepare(self, rows: Any, parts: int) -> None:
        """Make once what every block of columns needs: lhs as it is multiplied, and its scales as columns.

        Without masks lhs is widened part by part, each under the products of the part before.
        """
        if self.is_widened and self.masked:
            height = WIDENED_ROWS if rows.size % WIDENED_ROWS == 0 else rows.size

            def widen_rows(i: Any, carry: None) -> None:
                some = pl.ds(pl.multiple_of(rows.start + i * height, height), height)
                self.widen_lhs(some, pl.ds(0, self.depth))

            lax.fori_loop(0, rows.size // height, widen_rows, None)
        if self.scratch.lhs_columns is not None:
            for block in blocks(rows.size, LANES):
                some = pl.ds(rows.start + block.start, block.size)
                for i in range(parts if self.plan.changes.lhs else 1):
                    self.scratch.lhs_columns[i, some, :] = as_columns(row_of(self.operands.lhs_scale, i, some))

    # ---- loops over rows and columns

    def for_columns(self, body: Callable[[Any], None]) -> None:
        """body(columns) for each block of columns; with masks, as a loop: they leave too few registers for two."""
        tn = self.out.shape[1]
        if self.masked:
            for_blocks(tn, MXU, body)
        else:
            for columns in blocks(tn, 2 * MXU if self.plan.transposed and tn == 2 * MXU else MXU):
                body(columns)

    def for_passes(self, body: Callable[[Any], None]) -> None:
        """body(rows) for the rows of a tile that are multiplied at a time.

        Where blocks of scales are long this is no loop: the sums of a pass are scaled under the products of the next.
        Shorter ones are too much code for that.
        """
        tm, part = self.operands.lhs.shape[0], self.plan.grid.part
        if self.is_widened or not are_narrow(
            self.operands.lhs, self.operands.rhs
        ):  # what is widened in registers is widened once
            body(pl.ds(0, tm))
        elif part >= 2 * MXU:
            for rows in blocks(tm, MXU):
                body(rows)
        else:
            for_blocks(tm, 2 * MXU if self.plan.transposed or part >= MXU else MXU, body)

    # ---- sums

    def at(self, rows: Any, columns: Any) -> tuple[Any, Any]:
        """Where sums are."""
        return (columns, rows) if self.plan.transposed else (rows, columns)

    def before(self, rows: Any, columns: Any) -> Any:
        """The sums of the steps before this one, None where it is the only one."""
        if self.one_step:
            return None
        return jnp.where(self.step == 0, jnp.zeros((), self.acc.dtype), self.acc[self.at(rows, columns)])

    def add(self, i: int, inner: Any, rows: Any, columns: Any, total: Any, dots: Sequence[jax.Array] = ()) -> jax.Array:
        """total, and the products of part i, which lies at `inner` of K; dots: the sums that these may wait for."""
        x, weights = self.lhs(rows, inner), self.weights(inner, columns)
        if self.waits:
            x = self.held_back(x, dots, IN_FLIGHT)
        contract = (1, 1 if self.plan.grid.transpose_rhs else 0)
        multiply = dot if self.operands.in_powers else product
        sums = multiply(weights, x, contract[::-1]) if self.plan.transposed else multiply(x, weights, contract)
        if self.plan.transposed:
            sums = self.scaled_transposed(sums, i, rows, columns)
        elif any(self.plan.changes):
            parts = self.plan.changes.of_parts(self.scratch.lhs_columns, self.operands.rhs_scale)
            sums = scaled_by(parts, i, sums, rows, columns)
        sums = sums.astype(self.acc.dtype)
        return added(total, sums)

    def scaled_transposed(self, sums: jax.Array, i: int, rows: Any, columns: Any) -> jax.Array:
        """Sums [columns, rows] times the scales of part i.

        With masks one by one, where a product of two is no normal number.
        """
        by_load = chip.generation() != 6  # 2% fewer cycles on tpu7x, 0.3% more on v6e
        of_rows, found = repeated_row(self.operands.lhs_scale, i, rows, by_load), []
        for tile in blocks(columns.size, LANES):
            same = repeated_row(self.operands.rhs_scale, i, pl.ds(columns.start + tile.start, LANES))
            of_columns = jnp.concatenate([same] * (rows.size // LANES), axis=1)
            both = of_rows * of_columns
            one_by_one = jnp.where(self.in_range, both, of_rows), jnp.where(self.in_range, 1.0, of_columns)
            times = one_by_one if self.masked else (both,)
            each = [over_rows(factor, LANES) for factor in times]
            found.append(math.prod(each, start=sums[tile.start : tile.start + LANES].astype(jnp.float32)))
        return jnp.concatenate(found, axis=0)

    def keep(self, rows: Any, columns: Any, total: jax.Array, last: bool) -> None:
        """Store the sums where they are finished; last: whether no part of the step is left."""
        if self.one_step and last:
            self.store(rows, columns, total)
        else:
            self.acc[self.at(rows, columns)] = total

    def store(self, rows: Any, columns: Any, sums: jax.Array) -> None:
        addend = self.operands.addend
        if self.plan.transposed:
            total = (sums.astype(self.out.dtype) if addend is None and not active() else sums).T
        else:
            whole = self.plan.changes.of_all(self.scratch.lhs_columns, self.operands.rhs_scale)
            total = scaled_by(whole, 0, sums, rows, columns)
        if active():
            total = probe("acc", total, self.own.mask(rows.start, total.shape))
        if addend is not None:
            total += addend[rows, columns]
        result = total.astype(self.out.dtype)
        if self.masked:
            self.own.store(self.out, rows, columns, result)
        else:
            self.out[rows, columns] = result

    # ---- a step

    def multiply(self, rows: Any, depth: int) -> None:
        """Multiply `depth` of K for these rows and all columns."""
        self.prepare(rows, pl.cdiv(depth, self.plan.grid.part))
        parts = blocks(depth, self.depth_of_dot)
        if not self.is_widened or self.masked:
            dots: list[jax.Array] = []  # with masks columns are a loop, and a value in a loop is not seen outside
            self.for_columns(lambda columns: self.multiply_columns(parts, rows, columns, [] if self.masked else dots))
            return
        columns_of, hiding = blocks(self.out.shape[1], MXU), WIDENING_POWERS if self.operands.in_powers else WIDENING
        if self.plan.transposed:  # its other columns are multiplied in turns, each of which widens rhs anew
            hiding = len(columns_of)
        for i, inner in enumerate(parts):
            self.widen_lhs(rows, inner)
            for columns in columns_of[:hiding]:
                before = self.acc[self.at(rows, columns)] if i else self.before(rows, columns)
                total = self.add(i, inner, rows, columns, before)
                self.keep(rows, columns, total, last=i == len(parts) - 1)
        for columns in columns_of[hiding:]:
            self.multiply_columns(parts, rows, columns, [])

    def multiply_columns(self, parts: list[Any], rows: Any, columns: Any, dots: list[jax.Array]) -> None:
        """Multiply these columns; dots: the sums so far in straight-line code, to which these are appended."""
        turns = [pl.ds(rows.start + block.start, block.size) for block in blocks(rows.size, MXU)]
        for some in turns if self.plan.transposed and len(turns) > 1 else [rows]:
            total = self.before(some, columns)
            for i, inner in enumerate(parts):
                total = self.add(i, inner, some, columns, total, dots)
                dots.append(total)
            self.keep(some, columns, total, last=True)


def scaled_by(scales: Scales, part: int, sums: jax.Array, rows: Any, columns: Any) -> jax.Array:
    """Sums [rows, columns] times the scales of a part: of lhs as columns in every lane, of rhs as rows."""
    column = None if scales.lhs is None else scales.lhs[part, rows, :]
    return scaled(sums, column, row_of(scales.rhs, part, columns))


def by_lanes(columns: Any) -> Iterator[tuple[int, Any]]:
    """The tiles of 128 columns that these are in, each with its lanes."""
    first, end = columns.start, columns.start + columns.size
    while first < end:
        tile, lane = divmod(first, LANES)
        size = min(LANES - lane, end - first)
        yield tile, pl.ds(lane, size)
        first += size
