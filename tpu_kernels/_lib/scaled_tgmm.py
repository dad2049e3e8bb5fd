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
from tpu_kernels._lib import grids
from tpu_kernels._lib.arguments import kernel_dtype, kernel_operand
from tpu_kernels._lib.call import Block, call, jit
from tpu_kernels._lib.chip import LANES, MXU
from tpu_kernels._lib.grids import Operands
from tpu_kernels._lib.narrow import of_units, product, product_path, sum_dtype, widen, widen_whole, widened_to
from tpu_kernels._lib.powers import is_power, powers_in_rows, times_rows
from tpu_kernels._lib.products import blocks, dot, dot_depth, for_blocks
from tpu_kernels._lib.scales import Changes, as_columns, of_parts_and_of_all, row_of, scaled, tgmm_scales
from tpu_kernels._lib.tiles import Tile
from tpu_kernels._lib.visits import COPY_ROWS, OwnRows, Visits, list_visits, row_block

STRIPS = 4  # of 128 rows, that are stored in straight-line code
TALL = 896  # rows of a dot that the matrix unit adds up by itself: of multiples of 128 the fastest in tgmm on tpu7x


class Plan(NamedTuple):
    """What is static in a call."""

    part: int  # how deep a dot is where scales change: no scale does within it
    changes: Changes


class Scratch(NamedTuple):
    """A group's sums; rows of its own, with zeros for another group's; and both operands widened."""

    acc: Any
    own_lhs: Any
    own_rhs: Any
    wide_lhs: Any = None
    wide_rhs: Any = None


@jit("problem", "tile", "interpret")
def scaled_tgmm(
    lhs: jax.Array,
    lhs_scale: jax.Array | None,
    rhs: jax.Array,
    rhs_scale: jax.Array | None,
    group_sizes: jax.Array,
    group_offset: jax.Array,
    existing_out: jax.Array | None,
    *,
    problem: QuantizedProblem,
    tile: Tile,
    interpret: bool | pltpu.InterpretParams,
) -> jax.Array:
    """[G, K, N] of checked arguments; group_offset as `as_vector` gives it."""
    p = problem
    if 0 in (p.m, p.k, p.n, p.groups):
        return jnp.zeros((p.groups, p.k, p.n), p.out_dtype) if existing_out is None else existing_out

    tm, tk, tn = tile
    visits, num_visits = list_visits(
        group_sizes, group_offset, m=p.m, tm=tm, num_groups=p.groups, cover="groups", interpret=interpret
    )
    operands, changes = Operands(kernel_operand(lhs), kernel_operand(rhs)), Changes(False, False)
    in_powers = is_power(lhs_scale) or is_power(rhs_scale)
    if in_powers:
        powers = (None if s is None else powers_in_rows(s[None], interpret)[0] for s in (lhs_scale, rhs_scale))
        operands = operands._replace(**dict(zip(("lhs_powers", "rhs_powers"), powers, strict=True)))
    else:
        path = product_path(lhs, rhs)
        lhs_scale, rhs_scale = of_units(lhs_scale, lhs, path), of_units(rhs_scale, rhs, path)
        lhs_rows, rhs_rows, changes = tgmm_scales(lhs_scale, rhs_scale, p, tile)
        operands = operands._replace(lhs_scale=lhs_rows, rhs_scale=rhs_rows)
    if existing_out is not None:
        operands = operands._replace(existing_out=kernel_operand(existing_out))
    specs = _blocks(operands, tile, changes)
    out = Block(jax.ShapeDtypeStruct((p.groups, p.k, p.n), kernel_dtype(p.out_dtype)), (None, tk, tn), grids.tgmm_out)
    scratch = Scratch(
        pltpu.VMEM((tk, tn), sum_dtype(lhs, rhs, any(changes))),
        pltpu.VMEM((row_block(tm), tk), operands.lhs.dtype),
        pltpu.VMEM((row_block(tm), tn), operands.rhs.dtype),
    )
    wide = jnp.dtype(jnp.bfloat16) if in_powers else widened_to(lhs, rhs)
    if wide is not None:
        scratch = scratch._replace(wide_lhs=pltpu.VMEM((row_block(tm), tk), wide), wide_rhs=pltpu.VMEM((tm, tn), wide))
    return call(
        partial(_kernel, plan=Plan(min(p.block, tm), changes)),
        name="tgmm_quantized",
        grid=(pl.cdiv(p.n, tn), pl.cdiv(p.k, tk), num_visits),
        parallel=2,
        scalars=(visits,),
        operands=specs,
        out=out,
        scratch=scratch,
        cost=grids.tgmm_cost(p, tile, specs, out),
        interpret=interpret,
    ).astype(p.out_dtype)


# ------------------------------------------------------------------------------------------------------- blocks


def _lhs_scale(changes: bool, n_i: Any, k_i: Any, visit: Any, visits: Visits, *_: Any) -> Any:
    return visits.tile_ids[visit] if changes else 0, 0, k_i


def _rhs_scale(changes: bool, n_i: Any, k_i: Any, visit: Any, visits: Visits, *_: Any) -> Any:
    return visits.tile_ids[visit] if changes else 0, 0, n_i


def _blocks(arrays: Operands, tile: Tile, changes: Changes) -> Operands:
    """The arrays with their blocks."""
    tm, tk, tn = tile
    found = Operands(Block(arrays.lhs, (tm, tk), grids.tgmm_lhs), Block(arrays.rhs, (tm, tn), grids.tgmm_rhs))
    if (scale := arrays.lhs_scale) is not None:
        index = partial(_lhs_scale, changes.lhs)
        found = found._replace(lhs_scale=Block(scale, (None, scale.shape[1], tk), index))
    if (scale := arrays.rhs_scale) is not None:
        index = partial(_rhs_scale, changes.rhs)
        found = found._replace(rhs_scale=Block(scale, (None, scale.shape[1], tn), index))
    if arrays.lhs_powers is not None:
        found = found._replace(lhs_powers=Block(arrays.lhs_powers, (tm // MX_BLOCK, tk), grids.tgmm_lhs))
    if arrays.rhs_powers is not None:
        found = found._replace(rhs_powers=Block(arrays.rhs_powers, (tm // MX_BLOCK, tn), grids.tgmm_rhs))
    if arrays.existing_out is not None:
        found = found._replace(existing_out=Block(arrays.existing_out, (None, tk, tn), grids.tgmm_out))
    return found


# ------------------------------------------------------------------------------------------------------- kernel


def _kernel(visits: Visits, operands: Operands, out: Any, scratch: Scratch, *, plan: Plan) -> None:
    visit, last_visit = pl.program_id(2), pl.num_programs(2) - 1
    tm, tk = operands.lhs.shape
    own = visits.own_rows(visit, tm)
    whole = own.are_all()
    first_of_group, last_of_group = visits.ends_of_group(visit, last_visit)
    tile = _Tile(operands, out, scratch, plan, own, first_of_group)

    @pl.when(whole)
    def _() -> None:
        if tile.is_widened:
            tile.multiply_widened()
        else:
            tile.multiply(operands.lhs, operands.rhs, 0, first_of_group)

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
        if tile.lhs_whole is None:
            for_blocks(tk, MXU, tile.store)
        else:
            for_blocks(tk, STRIPS * LANES, tile.store_strips)


@dataclass(frozen=True)
class _Tile:
    """A visit's tile: what it multiplies, and its rows that are the group's own; masked: it has others too."""

    operands: Operands
    out: Any
    scratch: Scratch
    plan: Plan
    own: OwnRows
    first_of_group: Any
    masked: bool = False

    @property
    def acc(self) -> Any:
        return self.scratch.acc

    @property
    def is_widened(self) -> bool:
        return self.scratch.wide_lhs is not None

    @property
    def in_powers(self) -> bool:
        return self.operands.lhs_powers is not None or self.operands.rhs_powers is not None

    @cached_property
    def depth_of_dot(self) -> int:
        return self.plan.part if any(self.plan.changes) else dot_depth(changed=True)

    @property
    def lhs_parts(self) -> Any | None:
        return of_parts_and_of_all(self.operands.lhs_scale, self.plan.changes.lhs)[0]

    @property
    def rhs_parts(self) -> Any | None:
        return of_parts_and_of_all(self.operands.rhs_scale, self.plan.changes.rhs)[0]

    @property
    def lhs_whole(self) -> Any | None:
        return of_parts_and_of_all(self.operands.lhs_scale, self.plan.changes.lhs)[1]

    @property
    def rhs_whole(self) -> Any | None:
        return of_parts_and_of_all(self.operands.rhs_scale, self.plan.changes.rhs)[1]

    # ---- sums

    def row_of_part(self, scale: Any | None, first_row: Any, columns: Any) -> jax.Array | None:
        """The scales of the part of the tile that first_row is in."""
        part = self.plan.part
        i = first_row // part if isinstance(first_row, int) else lax.div(first_row, part)
        row = row_of(scale, i, columns)
        if row is None or not self.masked:
            return row
        # A block without rows of the group may have NaN for a scale.
        return jnp.where((self.own.start < (i + 1) * part) & (i * part < self.own.end), row, 0.0)

    def multiply(self, lhs: Any, rhs: Any, first_row: Any, first: Any) -> None:
        """Add the products of rows of the tile from first_row on; first: whether no sums of the group are before."""
        changes = any(self.plan.changes)
        height = TALL if self.depth_of_dot > self.operands.lhs.shape[0] and not self.is_widened else MXU
        multiply = dot if self.is_widened else product

        def multiply_part(inner: Any) -> None:
            for rows in blocks(lhs.shape[1], height):
                column = as_columns(self.row_of_part(self.lhs_parts, first_row + inner.start, rows))
                for columns in blocks(rhs.shape[1], 4 * MXU):
                    row = self.row_of_part(self.rhs_parts, first_row + inner.start, columns)
                    zero = jnp.zeros((), self.acc.dtype)
                    before = jnp.where(first & (inner.start == 0), zero, self.acc[rows, columns])
                    sums = multiply(lhs[inner, rows], rhs[inner, columns], contract=(0, 0))
                    if changes:
                        sums = scaled(sums, column, row)
                    self.acc[rows, columns] = before + sums

        if changes:
            for_blocks(lhs.shape[0], min(self.plan.part, lhs.shape[0]), multiply_part)
        else:  # few, and no loop: the end of one overlaps with the start of the next
            for inner in blocks(lhs.shape[0], self.depth_of_dot):
                multiply_part(inner)

    def multiply_own(self, rows: Any) -> None:
        """Add the products of the group's rows among these, one block of rows."""
        lhs, rhs = self.scratch.own_lhs, self.scratch.own_rhs
        self.own.copy(((self.operands.lhs, lhs), (self.operands.rhs, rhs)), rows)
        if self.is_widened:
            lhs, rhs = self.widen_own(rows.start // MX_BLOCK)
        self.multiply(lhs, rhs, rows.start, self.first_of_group & (rows.start <= self.own.start))

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
            for columns in blocks(tn, 2 * MXU):
                wide_rhs[inner, columns] = self.widened(self.operands.rhs, self.operands.rhs_powers, inner, columns)
            for rows in blocks(tk, MXU if changes or self.in_powers else 2 * MXU):
                lhs = self.widened(self.operands.lhs, self.operands.lhs_powers, inner, rows)
                column = as_columns(self.row_of_part(self.lhs_parts, inner.start, rows))
                for columns in blocks(tn, 2 * MXU):
                    before = self.acc[rows, columns]
                    if inner.start == 0:
                        before = jnp.where(self.first_of_group, 0.0, before)
                    sums = dot(lhs, wide_rhs[inner, columns], contract=(0, 0))
                    if changes:
                        sums = scaled(sums, column, self.row_of_part(self.rhs_parts, inner.start, columns))
                    self.acc[rows, columns] = before + sums

    def widened(self, narrow: Any, powers: Any, inner: Any, columns: Any) -> jax.Array:
        if powers is None:
            return widen(narrow[inner, columns], self.scratch.wide_rhs.dtype)
        return times_rows(widen_whole(narrow[inner, columns]), powers, inner.start // MX_BLOCK, columns)

    # ---- results

    def row_of_all(self, scale: Any | None, columns: Any) -> jax.Array | None:
        row = row_of(scale, 0, columns)
        return (
            None if row is None else jnp.where(self.own.start < self.own.end, row, 0.0)
        )  # an empty group's is 0, not 0 * NaN

    def store(self, rows: Any) -> None:
        column = as_columns(self.row_of_all(self.lhs_whole, rows))
        for columns in blocks(self.out.shape[1], 2 * MXU):
            total = scaled(self.acc[rows, columns], column, self.row_of_all(self.rhs_whole, columns))
            if active():
                total = probe("acc", total, jnp.full(total.shape, self.own.start < self.own.end))
            if self.operands.existing_out is not None:
                total += self.operands.existing_out[rows, columns].astype(jnp.float32)
            self.out[rows, columns] = total.astype(self.out.dtype)

    def store_strips(self, rows: Any) -> None:
        """Strip by strip: a strip's column of scales is made while the strip before is stored."""
        for strip in blocks(rows.size, LANES):
            self.store(pl.ds(rows.start + strip.start, strip.size))
