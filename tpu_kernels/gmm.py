"""Grouped matrix multiplication (MoE layers) on the TPU. The operations are defined in `cpu_golden/gmm.py`.

Both kernels walk a list of *visits*: pairs of a group and a row tile that holds rows of it. A tile that straddles
groups is visited once for each, so group sizes need no alignment. The list is made on the device by a small kernel
of its own and steers the main kernel by scalar prefetch, as in MegaBlocks (Gale et al. 2022, arXiv:2211.15841) and
JAX's megablox.

A tile that lies within one group is multiplied whole; of any other, only the blocks of rows that the group has part in
are.
"""

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from op_arguments import Tiling, resolve_tiling
from op_arguments.gmm import Problem, check_gmm, check_tgmm
from op_arguments.options import options_of
from op_arguments.probe import active, probe
from tpu_kernels._lib import chip
from tpu_kernels._lib.arguments import GmmOptions, Interpret, groups_of, resolve_interpret, shard_of
from tpu_kernels._lib.chip import MXU
from tpu_kernels._lib.grids import Grid, Listed, Operands, grouped_matmul
from tpu_kernels._lib.products import blocks, dot, dot_depth, for_depth
from tpu_kernels._lib.tiles import Tile, even_step, fit_tile, is_small
from tpu_kernels._lib.visits import Visits, row_block


def gmm(
    lhs: jax.Array,
    rhs: jax.Array,
    group_sizes: jax.Array,
    *,
    group_offset: int | jax.Array = 0,
    existing_out: jax.Array | None = None,
    transpose_rhs: bool = False,
    preferred_element_type: Any = None,
    tiling: Tiling | None = None,
    interpret: Interpret = None,
) -> jax.Array:
    """Rows of each group times that group's matrix: [M, N] in preferred_element_type (default lhs's dtype).

    Arguments, result and errors as `cpu_golden.gmm.gmm`; here: lhs and rhs float32, bfloat16 or float16; group_offset
    an int or an int32 scalar, traced or not. Values are checked outside tracing only; where they could not be, they
    are clipped. Sums are float32, of exact bfloat16 products or of float32 products in six bfloat16 passes (float16
    is widened), rounded once.
    tiling: (tm, tk, tn) or a look-up (m, k, n) -> (tm, tk, tn), capped to the problem and rounded up to whole
    registers; default: `_gmm_tiles`. interpret: as `pl.pallas_call`; None interprets where there is no TPU.
    `jax.shard_map` takes it with check_vma=False. Sites for a probe: partial and acc.
    """
    return gmm_onto(
        None,
        lhs,
        rhs,
        group_sizes,
        group_offset=group_offset,
        existing_out=existing_out,
        transpose_rhs=transpose_rhs,
        preferred_element_type=preferred_element_type,
        tiling=tiling,
        interpret=interpret,
    )


@options_of(GmmOptions)
def gmm_onto(
    addend: jax.Array | None, lhs: jax.Array, rhs: jax.Array, group_sizes: jax.Array, **options: Any
) -> jax.Array:
    """`gmm` that adds addend [M, N] float32, or nothing, to its sums before they are rounded; options: `gmm`'s."""
    o = GmmOptions(**options)
    groups = groups_of(group_sizes, o.group_offset)
    p = check_gmm(lhs, rhs, groups, o.existing_out, o.transpose_rhs, o.preferred_element_type)
    table = partial(_gmm_tiles, lhs.dtype, is_small(p.out_dtype, o.existing_out, addend))
    tile = fit_tile(resolve_tiling(o.tiling, table, p.m, p.k, p.n), p, jnp.bfloat16)
    grid = Grid(p, tile, resolve_interpret(o.interpret, lhs), transpose_rhs=bool(o.transpose_rhs))
    return _gmm(Operands(lhs, rhs, existing_out=o.existing_out, addend=addend), shard_of(groups, p), grid=grid)


def tgmm(
    lhs: jax.Array,
    rhs: jax.Array,
    group_sizes: jax.Array,
    *,
    group_offset: int | jax.Array = 0,
    num_actual_groups: int | None = None,
    existing_out: jax.Array | None = None,
    preferred_element_type: Any = None,
    tiling: Tiling | None = None,
    interpret: Interpret = None,
) -> jax.Array:
    """The weight gradient of `gmm`: [G, K, N] in preferred_element_type (default lhs's dtype).

    Arguments, result and errors as `cpu_golden.gmm.tgmm`; precision, group_offset, tiling (default: `_tgmm_tiles`),
    interpret and sites as `gmm`. existing_out is added in float32.
    """
    groups = groups_of(group_sizes, group_offset)
    p = check_tgmm(lhs, rhs, groups, num_actual_groups, existing_out, preferred_element_type)
    table = partial(_tgmm_tiles, lhs.dtype, is_small(p.out_dtype, existing_out))
    tile = fit_tile(resolve_tiling(tiling, table, p.m, p.k, p.n), p, jnp.bfloat16)
    grid = Grid(p, tile, resolve_interpret(interpret, lhs), contracting=True)
    return _tgmm(Operands(lhs, rhs, existing_out=existing_out), shard_of(groups, p), grid=grid)


def _gmm_tiles(dtype: Any, small: bool, m: int, k: int, n: int) -> Tile:
    """All of K in a step where it fits, so that nothing is added up in memory and a group's weights stay.

    A step costs some 350 cycles beyond its products, for which v6e makes it twice as long; tpu7x hides most of them.
    Where K does not fit, HBM is the limit, and of large tiles those whose operands are fetched least often come first.
    Twice buffered the blocks fit the VMEM that a kernel has by default: 16 MiB on v5e, 32 MiB from v6e on.
    """
    if jnp.dtype(dtype) != jnp.bfloat16:
        return 256, 512, 512
    generation = chip.generation()
    tm = {6: 1024, 7: 512}.get(generation, 256)
    small = small and generation >= 6
    if k <= 2048:
        weights, longest = (2**21, 2048 if k <= 512 else 1024) if small else (2**20, 2048)
        return tm, max(k, 1), even_step(n, min(max(weights // max(k, 512) // 512 * 512, 512), longest))
    if k <= 3072:
        return max(tm // 2, MXU), k, 512
    if small and n > 1024:
        return 1024, 512, even_step(n, 2048)
    return (tm, 1024, 1024) if generation >= 6 else (512, 1024, 512)


def _tgmm_tiles(dtype: Any, small: bool, m: int, k: int, n: int) -> Tile:
    """As `_gmm_tiles`, and the shorter side to lhs, which the kernel transposes."""
    if jnp.dtype(dtype) != jnp.bfloat16:
        return 256, 512, 512
    generation = chip.generation()
    if small and generation >= 6 and min(k, n) > 512:
        return 1024, even_step(k, 1024), even_step(n, 1024)
    tk, tn = (512, 1024) if n >= 1024 else (1024, 512)
    return (1024 if generation >= 6 and k % tk == 0 and n % tn == 0 else 512), tk, tn


# ---------------------------------------------------------------------------------------------------------- gmm


@grouped_matmul
def _gmm(operands: Operands, listed: Listed, *, grid: Grid[Problem]) -> jax.Array:
    tm, _, tn = grid.tile
    return grid.call(
        partial(_gmm_kernel, k=grid.problem.k, transpose_rhs=grid.transpose_rhs),
        name="gmm",
        listed=listed,
        operands=grid.blocks(operands),
        scratch=pltpu.VMEM((tm, tn), jnp.float32),
    )


def _gmm_kernel(visits: Visits, operands: Operands, out: Any, acc: Any, *, k: int, transpose_rhs: bool) -> None:
    lhs, rhs, existing_out = operands.lhs, operands.rhs, operands.existing_out
    visit, step, last_step = pl.program_id(1), pl.program_id(2), pl.num_programs(2) - 1
    (tm, tk), tn = lhs.shape, out.shape[1]
    own = visits.own_rows(visit, tm)
    whole = own.are_all()
    one_step = tk == k

    def shown(site: str, rows: Any, sums: Any) -> Any:
        deep = min(tk, dot_depth())
        if active() is None or tk % deep:
            return sums
        return probe(site, sums, own.mask(rows.start, sums.shape), depth=deep)

    def store(rows: Any, columns: Any, sums: jax.Array, masked: bool) -> None:
        if operands.addend is not None:
            sums += operands.addend[rows, columns]
        result = sums.astype(out.dtype)
        if masked:
            own.store(out, rows, columns, result)
        else:
            out[rows, columns] = result

    def multiply(rows: Any, depth: int, masked: bool) -> None:
        for columns in blocks(tn, MXU):
            for part in blocks(depth, dot_depth()):
                weights = rhs[columns, part] if transpose_rhs else rhs[part, columns]
                sums = dot(lhs[rows, part], weights, contract=(1, 1 if transpose_rhs else 0))
                sums = shown("partial", rows, sums)
                if part.start > 0:
                    sums += acc[rows, columns]
                elif not one_step:
                    sums += jnp.where(step == 0, 0.0, acc[rows, columns])
                sums = shown("acc", rows, sums)
                if one_step and part.start + part.size == k:
                    store(rows, columns, sums, masked)
                else:
                    acc[rows, columns] = sums

    def multiply_step(rows: Any, masked: bool) -> None:
        for_depth(k, tk, step, last_step, lambda depth: multiply(rows, depth, masked))
        if not one_step:
            pl.when(step == last_step)(lambda: store(rows, slice(None), acc[rows, :], masked))

    def multiply_own() -> None:
        # Consecutive visits of a tile share its output block: the first one fills the rows that are not its own.
        @pl.when(~whole & visits.is_first_of_tile(visit) & (step == last_step))
        def _() -> None:
            out[...] = jnp.zeros_like(out) if existing_out is None else existing_out[...]

        own.for_blocks(partial(multiply_step, masked=True))

    if row_block(tm) == tm:  # the masks cost less than a second program
        multiply_own()
    else:
        pl.when(whole)(lambda: multiply_step(pl.ds(0, tm), masked=False))
        pl.when(~whole)(multiply_own)


# --------------------------------------------------------------------------------------------------------- tgmm


@grouped_matmul
def _tgmm(operands: Operands, listed: Listed, *, grid: Grid[Problem]) -> jax.Array:
    (tm, tk, tn), specs = grid.tile, grid.blocks(operands)
    scratch = _Sums(
        pltpu.VMEM((tk, tn), jnp.float32),
        pltpu.VMEM((row_block(tm), tk), specs.lhs.array.dtype),
        pltpu.VMEM((row_block(tm), tn), specs.rhs.array.dtype),
    )
    return grid.call(_tgmm_kernel, name="tgmm", listed=listed, operands=specs, scratch=scratch)


class _Sums(NamedTuple):
    """A group's sums, and rows of lhs and rhs with zeros for those that are another group's."""

    acc: Any
    own_lhs: Any
    own_rhs: Any


def _tgmm_kernel(visits: Visits, operands: Operands, out: Any, sums: _Sums) -> None:
    lhs, rhs, existing_out = operands.lhs, operands.rhs, operands.existing_out
    acc, own_lhs, own_rhs = sums
    visit, last_visit = pl.program_id(2), pl.num_programs(2) - 1
    tm = rhs.shape[0]
    own = visits.own_rows(visit, tm)
    whole = own.are_all()
    first_of_group, last_of_group = visits.ends_of_group(visit, last_visit)

    def multiply(lhs: Any, rhs: Any, first: Any) -> None:
        for part in blocks(lhs.shape[0], dot_depth(changed=True)):
            for columns in blocks(rhs.shape[1], 2 * MXU):
                for rows in blocks(lhs.shape[1], 2 * MXU):
                    before = acc[rows, columns]
                    if part.start == 0:
                        before = jnp.where(first, 0.0, before)
                    sums = dot(lhs[part, rows], rhs[part, columns], contract=(0, 0))
                    if row_block(tm) == tm == part.size:
                        sums = probe("partial", sums, depth=tm, aligned=True)
                    acc[rows, columns] = before + sums

    def multiply_own(rows: Any) -> None:
        own.copy(((lhs, own_lhs), (rhs, own_rhs)), rows)
        multiply(own_lhs, own_rhs, first_of_group & (rows.start <= own.start))

    pl.when(whole)(lambda: multiply(lhs, rhs, first_of_group))
    pl.when(~whole)(lambda: own.for_blocks(multiply_own))

    @pl.when(last_of_group)
    def _() -> None:
        has_rows = own.start < own.end  # an empty group has one visit, without rows
        total = jnp.where(has_rows, acc[...], 0.0)
        if active():
            total = probe("acc", total, jnp.full(total.shape, has_rows))
        if existing_out is not None:
            total += existing_out[...].astype(jnp.float32)
        out[...] = total.astype(out.dtype)
