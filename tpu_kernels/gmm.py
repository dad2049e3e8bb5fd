"""Grouped matrix multiplication (MoE layers) on the TPU. The operations are defined in `cpu_golden/gmm.py`.

Both kernels walk a list of *visits*: pairs of a group and a row tile that holds rows of it. A tile that straddles
groups is visited once for each, so group sizes need no alignment. The list is made on the device by a small kernel
of its own and steers the main kernel by scalar prefetch, as in MegaBlocks (Gale et al. 2022, arXiv:2211.15841) and
JAX's megablox.

A tile that lies within one group is multiplied whole; of any other, only the blocks of rows that the group has part in
are. `quantized_gmm` shares the visits and what reads them: everything here without a leading underscore.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from op_arguments import Tiling, resolve_tiling
from op_arguments.debug import Debug
from op_arguments.gmm import GroupMetadata, Problem, check_gmm, check_group_metadata, check_tgmm
from tpu_kernels.hardware import is_tpu, tpu_generation

Interpret = bool | pltpu.InterpretParams | None
Tile = tuple[int, int, int]

NEWEST = 7  # the generation that an interpreted kernel is traced for
LANES = 128
SUBLANES = 16  # of a packed 16-bit register; a multiple of float32's 8
BLOCK = 256  # the width of the matrix unit on v6e and tpu7x; fewer rows cost no less than loading its weights
COPY_ROWS = 32  # of a masked copy at a time: one packed 8-bit register, two 16-bit ones


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
    debug: Debug = None,
) -> jax.Array:
    """Rows of each group times that group's matrix: `out[m] = lhs[m] @ rhs[group of m - group_offset]`.

    lhs [M, K]; rhs [G, K, N], or [G, N, K] with transpose_rhs; both float32, bfloat16 or float16. group_sizes [E]
    int32, >= 0, sum <= M. group_offset: int or int32 scalar, may be traced. Returns [M, N] in preferred_element_type
    (float32, bfloat16 or float16; default lhs's): rows of no active group are zero, or existing_out's rows where it
    is given (active rows overwrite it). Sums are float32, of exact bfloat16 products or of float32 products in six
    bfloat16 passes (float16 is widened), rounded once.
    tiling: (tm, tk, tn) or a look-up (m, k, n) -> (tm, tk, tn), capped to the problem and rounded up to whole
    registers; default: `_gmm_tiles`. interpret: as `pl.pallas_call`; None interprets where there is no TPU. debug: see
    `op_arguments.debug`, of the sums at partial and acc; None leaves nothing of it.
    `jax.shard_map` takes it with check_vma=False.
    Raises ValueError or TypeError as `op_arguments.gmm.check_gmm`; values are checked outside tracing only.
    """
    group_offset = static_scalar(group_offset)
    p = check_gmm(
        lhs,
        rhs,
        group_sizes,
        group_offset=group_offset,
        existing_out=existing_out,
        transpose_rhs=transpose_rhs,
        preferred_element_type=preferred_element_type,
        sizes=concrete_values(group_sizes),
    )
    small = is_small(existing_out, p.out_dtype)
    tile = resolve_tiling(tiling, partial(_gmm_tiles, lhs.dtype, small), p.m, p.k, p.n)
    return _gmm(
        lhs,
        rhs,
        group_sizes,
        as_vector(group_offset, p.experts - p.groups),
        existing_out,
        problem=p,
        tile=fit_tile(tile, p),
        transpose_rhs=bool(transpose_rhs),
        interpret=resolve_interpret(interpret),
        debug=debug,
    )


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
    debug: Debug = None,
) -> jax.Array:
    """The weight gradient of `gmm`: `out[g] = lhs[rows of g].T @ rhs[rows of g]`.

    lhs [M, K] and rhs [M, N]: float32, bfloat16 or float16. group_sizes [E] int32, >= 0, sum <= M. Returns [G, K, N]
    in preferred_element_type (default lhs's), G = num_actual_groups (default E): an empty group's block is zero;
    existing_out [G, K, N] is added, in float32. Precision, group_offset, tiling (default: `_tgmm_tiles`),
    interpret and debug as `gmm`.
    Raises ValueError or TypeError as `op_arguments.gmm.check_tgmm`; values are checked outside tracing only.
    """
    group_offset = static_scalar(group_offset)
    p = check_tgmm(
        lhs,
        rhs,
        group_sizes,
        group_offset=group_offset,
        num_actual_groups=num_actual_groups,
        existing_out=existing_out,
        preferred_element_type=preferred_element_type,
        sizes=concrete_values(group_sizes),
    )
    small = is_small(existing_out, p.out_dtype)
    tile = resolve_tiling(tiling, partial(_tgmm_tiles, lhs.dtype, small), p.m, p.k, p.n)
    return _tgmm(
        lhs,
        rhs,
        group_sizes,
        as_vector(group_offset, p.experts - p.groups),
        existing_out,
        problem=p,
        tile=fit_tile(tile, p),
        interpret=resolve_interpret(interpret),
        debug=debug,
    )


def make_group_metadata(
    group_sizes: jax.Array,
    *,
    m: int,
    tm: int,
    group_offset: int | jax.Array = 0,
    num_groups: int,
    cover: Literal["tiles", "groups"],
    interpret: Interpret = None,
) -> GroupMetadata:
    """The (group, row tile) pairs that a kernel with row tiles of `tm` visits; see `GroupMetadata`.

    Every pair of a non-empty active group and a tile that holds rows of it, in row order. `cover="tiles"` (gmm)
    adds the tiles without active rows, once each: leading ones as group 0, trailing ones as the last non-empty
    group (0 if none), so that no further weights are fetched for them. `cover="groups"` (tgmm) adds each empty
    active group, once, at the tile its start falls in (the last tile where that is beyond the rows).
    Raises ValueError or TypeError as `op_arguments.gmm.check_group_metadata`; values outside tracing only.
    """
    group_offset = static_scalar(group_offset)
    check_group_metadata(
        group_sizes,
        m=m,
        tm=tm,
        group_offset=group_offset,
        num_groups=num_groups,
        cover=cover,
        sizes=concrete_values(group_sizes),
    )
    return group_metadata(
        group_sizes,
        as_vector(group_offset, group_sizes.shape[0] - num_groups),
        m=m,
        tm=tm,
        num_groups=num_groups,
        cover=cover,
        interpret=resolve_interpret(interpret),
    )


# ---------------------------------------------------------------------------------------------------- arguments


def concrete_values(group_sizes: Any) -> list[int] | None:
    """The values of group_sizes, or None where it is traced (or not the vector it should be: the check says so)."""
    if isinstance(group_sizes, jax.core.Tracer) or len(getattr(group_sizes, "shape", ())) != 1:
        return None
    return [int(size) for size in np.asarray(group_sizes)]


def static_scalar(value: Any) -> Any:
    """The int in a concrete integer scalar ([] or [1]); anything else as it is, for the check to judge."""
    concrete = isinstance(value, jax.Array | np.ndarray | np.integer) and not isinstance(value, jax.core.Tracer)
    return int(value.reshape(())) if concrete and value.size == 1 and value.dtype.kind == "i" else value


def as_vector(group_offset: int | jax.Array, most: int) -> jax.Array:
    """group_offset as the kernels read it: int32 [1], clipped where a traced one could not be checked."""
    if not isinstance(group_offset, int):
        group_offset = jnp.clip(group_offset, 0, most)
    return jnp.asarray(group_offset, jnp.int32).reshape(1)


def resolve_interpret(interpret: Interpret) -> bool | pltpu.InterpretParams:
    """interpret, or where it is None whether there is no TPU."""
    return not is_tpu() if interpret is None else interpret


def is_small(existing_out: jax.Array | None, out_dtype: str) -> bool:
    """Whether a result takes so little memory that there is room for a larger tile: 16 bits, and none to add to."""
    return existing_out is None and jnp.dtype(out_dtype).itemsize == 2


def _gmm_tiles(dtype: Any, small: bool, m: int, k: int, n: int) -> Tile:
    """All of K in a step where it fits, so that nothing is added up in memory and a group's weights stay.

    A step costs some 350 cycles beyond its products, for which v6e makes it twice as long; tpu7x hides most of them.
    Where K does not fit, HBM is the limit, and of large tiles those whose operands are fetched least often come first.
    Twice buffered the blocks fit the VMEM that a kernel has by default: 16 MiB on v5e, 32 MiB from v6e on.
    """
    if jnp.dtype(dtype) != jnp.bfloat16:
        return 256, 512, 512
    generation = tpu_generation() or NEWEST
    tm = {6: 1024, 7: 512}.get(generation, 256)
    small = small and generation >= 6
    if k <= 2048:
        weights, longest = (2**21, 2048 if k <= 512 else 1024) if small else (2**20, 2048)
        return tm, max(k, 1), even_step(n, min(max(weights // max(k, 512) // 512 * 512, 512), longest))
    if k <= 3072:
        return max(tm // 2, BLOCK), k, 512
    if small and n > 1024:
        return 1024, 512, even_step(n, 2048)
    return (tm, 1024, 1024) if generation >= 6 else (512, 1024, 512)


def _tgmm_tiles(dtype: Any, small: bool, m: int, k: int, n: int) -> Tile:
    """As `_gmm_tiles`, and the shorter side to lhs, which the kernel transposes."""
    if jnp.dtype(dtype) != jnp.bfloat16:
        return 256, 512, 512
    generation = tpu_generation() or NEWEST
    if small and generation >= 6 and min(k, n) > 512:
        return 1024, even_step(k, 1024), even_step(n, 1024)
    tk, tn = (512, 1024) if n >= 1024 else (1024, 512)
    return (1024 if generation >= 6 and k % tk == 0 and n % tn == 0 else 512), tk, tn


def even_step(size: int, longest: int, unit: int = BLOCK) -> int:
    """Of the fewest steps along an axis the most even ones, of whole units; the matrix unit multiplies all of each."""
    steps = pl.cdiv(max(size, 1), longest)
    return max(size, 1) if steps == 1 else pl.cdiv(pl.cdiv(size, steps), unit) * unit


def fit_tile(tile: Tile, p: Problem) -> Tile:
    """The tile, capped to the problem; what is left smaller is rounded up to whole registers, as Mosaic asks."""

    def fit(size: int, unit: int, whole: int) -> int:
        return min(pl.cdiv(size, unit) * unit, whole)

    tm, tk, tn = tile
    return fit(tm, SUBLANES, p.m), fit(tk, LANES, p.k), fit(tn, LANES, p.n)


def kernel_operand(x: jax.Array) -> jax.Array:
    """x as Mosaic can load it: it has no float16."""
    return x.astype(jnp.float32) if x.dtype == jnp.float16 else x


def kernel_dtype(name: str) -> Any:
    """The dtype in which the kernel stores an output that XLA hands over as dtype `name`."""
    return jnp.dtype("float32" if name == "float16" else name)


# ---------------------------------------------------------------------------------------------------------- gmm


@partial(jax.jit, static_argnames=("problem", "tile", "transpose_rhs", "interpret", "debug"))
def _gmm(
    lhs: jax.Array,
    rhs: jax.Array,
    group_sizes: jax.Array,
    group_offset: jax.Array,
    existing_out: jax.Array | None,
    *,
    problem: Problem,
    tile: Tile,
    transpose_rhs: bool,
    interpret: bool | pltpu.InterpretParams,
    debug: Debug,
) -> jax.Array:
    m, k, n, groups, _, out_dtype = problem
    if m == 0 or n == 0 or groups == 0:
        return jnp.zeros((m, n), out_dtype) if existing_out is None else existing_out
    tm, tk, tn = tile
    if k == 0:  # a sum over nothing is a sum over one zero
        k = tk = 1
        lhs = jnp.zeros((m, 1), lhs.dtype)
        rhs = jnp.zeros((groups, n, 1) if transpose_rhs else (groups, 1, n), rhs.dtype)

    tiles_m, tiles_k, tiles_n = pl.cdiv(m, tm), pl.cdiv(k, tk), pl.cdiv(n, tn)
    metadata = group_metadata(
        group_sizes, group_offset, m=m, tm=tm, num_groups=groups, cover="tiles", interpret=interpret
    )

    def lhs_block(n_i: Any, visit: Any, k_i: Any, group_ids: Any, tile_ids: Any, *_: Any) -> Any:
        return tile_ids[visit], k_i

    def rhs_block(n_i: Any, visit: Any, k_i: Any, group_ids: Any, tile_ids: Any, *_: Any) -> Any:
        return (group_ids[visit], n_i, k_i) if transpose_rhs else (group_ids[visit], k_i, n_i)

    def out_block(n_i: Any, visit: Any, k_i: Any, group_ids: Any, tile_ids: Any, *_: Any) -> Any:
        return tile_ids[visit], n_i

    in_specs = [
        pl.BlockSpec((tm, tk), lhs_block),
        pl.BlockSpec((None, tn, tk) if transpose_rhs else (None, tk, tn), rhs_block),
        pl.BlockSpec((tm, tn), out_block),
    ]
    operands = [kernel_operand(x) for x in (lhs, rhs, existing_out) if x is not None]
    out_shape = jax.ShapeDtypeStruct((m, n), kernel_dtype(out_dtype))
    # A block is fetched anew when its index changes: with a single step over K, only at a new tile or a new group.
    visits = tiles_m + groups - 1
    lhs_rows, rhs_blocks = (m, groups) if tiles_k == 1 else (visits * tm, visits)
    cost = pl.CostEstimate(
        flops=2 * m * k * n,
        transcendentals=0,
        bytes_accessed=tiles_n * lhs_rows * k * operands[0].dtype.itemsize
        + rhs_blocks * k * n * operands[1].dtype.itemsize
        + (1 if existing_out is None else 2) * m * n * out_shape.dtype.itemsize,
    )

    out = pl.pallas_call(
        partial(_gmm_kernel, k=k, transpose_rhs=transpose_rhs, debug=debug),
        out_shape=out_shape,
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=4,
            grid=(tiles_n, metadata.num_visits[0], tiles_k),
            in_specs=in_specs[: len(operands)],
            out_specs=pl.BlockSpec((tm, tn), out_block),
            scratch_shapes=[pltpu.VMEM((tm, tn), jnp.float32)],
        ),
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel", "arbitrary", "arbitrary")),
        cost_estimate=cost,
        interpret=interpret,
        name="gmm",
    )(metadata.group_ids, metadata.tile_ids, metadata.group_offsets, group_offset, *operands)
    return out.astype(out_dtype)


def _gmm_kernel(
    group_ids: Any,
    tile_ids: Any,
    group_offsets: Any,
    group_offset: Any,
    lhs: Any,
    rhs: Any,
    *refs: Any,
    k: int,
    transpose_rhs: bool,
    debug: Debug,
) -> None:
    *existing_out, out, acc = refs
    visit, step, last_step = pl.program_id(1), pl.program_id(2), pl.num_programs(2) - 1
    (tm, tk), tn = lhs.shape, out.shape[1]
    start, end = rows_of_visit(visit, group_ids, tile_ids, group_offsets, group_offset, tm)
    whole = (start == 0) & (end == tm)
    one_step = tk == k
    rest = k % tk or tk  # of K, in the last step; the block holds garbage beyond it, and 0 * NaN is NaN

    def watched(site: str, rows: Any, sums: jax.Array) -> jax.Array:
        deep = min(tk, dot_depth())
        if debug is None or tk % deep:
            return sums
        return debug(site, sums, is_own_row(rows.start, sums.shape, start, end), tiling=(1, deep, 1))

    def store(rows: Any, columns: Any, sums: jax.Array, masked: bool) -> None:
        result = sums.astype(out.dtype)
        if masked:
            own = is_own_row(rows.start, result.shape, start, end)
            result = jnp.where(own, result, out[rows, columns])
        out[rows, columns] = result

    def multiply(rows: Any, depth: int, masked: bool) -> None:
        for columns in blocks(tn, BLOCK):
            for part in blocks(depth, dot_depth()):
                weights = rhs[columns, part] if transpose_rhs else rhs[part, columns]
                sums = dot(lhs[rows, part], weights, contract=(1, 1 if transpose_rhs else 0))
                sums = watched("partial", rows, sums)
                if part.start > 0:
                    sums += acc[rows, columns]
                elif not one_step:
                    sums += jnp.where(step == 0, 0.0, acc[rows, columns])
                sums = watched("acc", rows, sums)
                if one_step and part.start + part.size == k:
                    store(rows, columns, sums, masked)
                else:
                    acc[rows, columns] = sums

    def multiply_step(rows: Any, masked: bool) -> None:
        if rest == tk:
            multiply(rows, tk, masked)
        else:
            pl.when(step < last_step)(lambda: multiply(rows, tk, masked))
            pl.when(step == last_step)(lambda: multiply(rows, rest, masked))
        if not one_step:
            pl.when(step == last_step)(lambda: store(rows, slice(None), acc[rows, :], masked))

    def multiply_own() -> None:
        # Consecutive visits of a tile share its output block: the first one fills the rows that are not its own.
        first_of_tile = (visit == 0) | (tile_ids[jnp.maximum(visit - 1, 0)] != tile_ids[visit])

        @pl.when(~whole & first_of_tile & (step == last_step))
        def _() -> None:
            out[...] = existing_out[0][...] if existing_out else jnp.zeros_like(out)

        for_row_blocks(start, end, tm, partial(multiply_step, masked=True))

    if row_block(tm) == tm:  # the masks cost less than a second program
        multiply_own()
    else:
        pl.when(whole)(lambda: multiply_step(pl.ds(0, tm), masked=False))
        pl.when(~whole)(multiply_own)


# --------------------------------------------------------------------------------------------------------- tgmm


@partial(jax.jit, static_argnames=("problem", "tile", "interpret", "debug"))
def _tgmm(
    lhs: jax.Array,
    rhs: jax.Array,
    group_sizes: jax.Array,
    group_offset: jax.Array,
    existing_out: jax.Array | None,
    *,
    problem: Problem,
    tile: Tile,
    interpret: bool | pltpu.InterpretParams,
    debug: Debug,
) -> jax.Array:
    m, k, n, groups, _, out_dtype = problem
    if 0 in (m, k, n, groups):
        return jnp.zeros((groups, k, n), out_dtype) if existing_out is None else existing_out

    tm, tk, tn = tile
    tiles_k, tiles_n = pl.cdiv(k, tk), pl.cdiv(n, tn)
    metadata = group_metadata(
        group_sizes, group_offset, m=m, tm=tm, num_groups=groups, cover="groups", interpret=interpret
    )

    def lhs_block(n_i: Any, k_i: Any, visit: Any, group_ids: Any, tile_ids: Any, *_: Any) -> Any:
        return tile_ids[visit], k_i

    def rhs_block(n_i: Any, k_i: Any, visit: Any, group_ids: Any, tile_ids: Any, *_: Any) -> Any:
        return tile_ids[visit], n_i

    def out_block(n_i: Any, k_i: Any, visit: Any, group_ids: Any, tile_ids: Any, *_: Any) -> Any:
        return group_ids[visit], k_i, n_i

    in_specs = [
        pl.BlockSpec((tm, tk), lhs_block),
        pl.BlockSpec((tm, tn), rhs_block),
        pl.BlockSpec((None, tk, tn), out_block),
    ]
    operands = [kernel_operand(x) for x in (lhs, rhs, existing_out) if x is not None]
    out_shape = jax.ShapeDtypeStruct((groups, k, n), kernel_dtype(out_dtype))
    cost = pl.CostEstimate(
        flops=2 * m * k * n,
        transcendentals=0,
        bytes_accessed=(tiles_n * m * k + tiles_k * m * n) * operands[0].dtype.itemsize
        + (1 if existing_out is None else 2) * groups * k * n * out_shape.dtype.itemsize,
    )

    out = pl.pallas_call(
        partial(_tgmm_kernel, debug=debug),
        out_shape=out_shape,
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=4,
            grid=(tiles_n, tiles_k, metadata.num_visits[0]),
            in_specs=in_specs[: len(operands)],
            out_specs=pl.BlockSpec((None, tk, tn), out_block),
            scratch_shapes=[
                pltpu.VMEM((tk, tn), jnp.float32),
                pltpu.VMEM((row_block(tm), tk), operands[0].dtype),
                pltpu.VMEM((row_block(tm), tn), operands[1].dtype),
            ],
        ),
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel", "parallel", "arbitrary")),
        cost_estimate=cost,
        interpret=interpret,
        name="tgmm",
    )(metadata.group_ids, metadata.tile_ids, metadata.group_offsets, group_offset, *operands)
    return out.astype(out_dtype)


def _tgmm_kernel(
    group_ids: Any, tile_ids: Any, group_offsets: Any, group_offset: Any, lhs: Any, rhs: Any, *refs: Any, debug: Debug
) -> None:
    *existing_out, out, acc, own_lhs, own_rhs = refs
    visit, last_visit = pl.program_id(2), pl.num_programs(2) - 1
    tm = rhs.shape[0]
    start, end = rows_of_visit(visit, group_ids, tile_ids, group_offsets, group_offset, tm)
    whole = (start == 0) & (end == tm)
    group = group_ids[visit]
    first_of_group = (visit == 0) | (group_ids[jnp.maximum(visit - 1, 0)] != group)

    def multiply(lhs: Any, rhs: Any, first: Any) -> None:
        for part in blocks(lhs.shape[0], dot_depth(changed=True)):
            for columns in blocks(rhs.shape[1], 2 * BLOCK):
                for rows in blocks(lhs.shape[1], 2 * BLOCK):
                    before = acc[rows, columns]
                    if part.start == 0:
                        before = jnp.where(first, 0.0, before)
                    sums = dot(lhs[part, rows], rhs[part, columns], contract=(0, 0))
                    if debug and row_block(tm) == tm == part.size:
                        sums = debug("partial", sums, tiling=(tm, 1, 1), aligned=True)
                    acc[rows, columns] = before + sums

    def multiply_own(rows: Any) -> None:
        copy_own_rows(((lhs, own_lhs), (rhs, own_rhs)), rows, start, end)
        multiply(own_lhs, own_rhs, first_of_group & (rows.start <= start))

    pl.when(whole)(lambda: multiply(lhs, rhs, first_of_group))
    pl.when(~whole)(lambda: for_row_blocks(start, end, tm, multiply_own))

    @pl.when((visit == last_visit) | (group_ids[jnp.minimum(visit + 1, last_visit)] != group))
    def _() -> None:
        total = jnp.where(start < end, acc[...], 0.0)  # an empty group has one visit, without rows
        if debug:
            total = debug("acc", total, jnp.full(total.shape, start < end))
        if existing_out:
            total += existing_out[0][...].astype(jnp.float32)
        out[...] = total.astype(out.dtype)


# ------------------------------------------------------------------------------------------------------- visits


def rows_of_visit(
    visit: Any, group_ids: Any, tile_ids: Any, group_offsets: Any, group_offset: Any, tm: int
) -> tuple[Any, Any]:
    """The rows [start, end) of the visit's tile that belong to its group; start >= end where none do."""
    group = group_offset[0] + group_ids[visit]
    first_row = tile_ids[visit] * tm
    start, end = group_offsets[group] - first_row, group_offsets[group + 1] - first_row
    return jnp.maximum(start, 0), jnp.minimum(end, tm)


def row_block(tm: int) -> int:
    """How many of a tile's tm rows are multiplied at a time where the tile is not one group's alone."""
    return tm if tm % BLOCK else BLOCK


def for_row_blocks(start: Any, end: Any, tm: int, body: Callable[[Any], None]) -> None:
    """body(rows) for each block of `row_block(tm)` rows that has part in rows [start, end) of a tile, in order."""
    height = row_block(tm)

    @pl.when(start < end)
    def _() -> None:
        if height == tm:
            body(pl.ds(0, tm))
        else:
            first, last = lax.div(start, height), lax.div(end - 1, height)
            lax.fori_loop(first, last + 1, lambda i, _: body(pl.ds(pl.multiple_of(i * height, height), height)), None)


def is_own_row(first_row: Any, shape: tuple[int, ...], start: Any, end: Any) -> jax.Array:
    """Which elements of a block of `shape`, the first row of which is first_row, are in rows [start, end)."""
    row = first_row + lax.broadcasted_iota(jnp.int32, shape, 0)
    return (start <= row) & (row < end)


def copy_own_rows(copies: Sequence[tuple[Any, Any]], rows: Any, start: Any, end: Any) -> None:
    """Copy `rows` of each (tile, block) of `copies`, with zeros for those not in [start, end).

    The others may hold NaN or infinities, and 0 * NaN is NaN: both operands of a sum over rows need it. A loop and
    memory of its own, as masks made between the products need more registers than there are.
    """
    height = COPY_ROWS if rows.size % COPY_ROWS == 0 else rows.size

    def copy(first: Any) -> None:
        for tile, block in copies:
            x = tile[pl.ds(rows.start + first, height), :]
            own = is_own_row(rows.start + first, x.shape, start, end)
            block[pl.ds(first, height), :] = jnp.where(own, x, jnp.zeros_like(x))

    if height == rows.size:
        copy(0)
    else:
        lax.fori_loop(0, rows.size // height, lambda i, _: copy(pl.multiple_of(i * height, height)), None)


# ----------------------------------------------------------------------------------------------------- products


def blocks(size: int, width: int) -> list[Any]:
    """The slices of `width`, the last one maybe less, that make up an axis of `size`.

    A dot over a whole tile needs more registers than there are, and spills.
    """
    return [pl.ds(first, min(width, size - first)) for first in range(0, size, width)]


def dot_depth(changed: bool = False) -> int:
    """How deep a dot may be, where an operand is changed in registers (transposed, widened) or not.

    The matrix unit of tpu7x adds up what it multiplies. Those before it leave that to registers, which run out: the
    sums go through memory as often as keeps them from spilling.
    """
    if (tpu_generation() or NEWEST) >= 7:
        return 2**20  # more than any tile has
    return 2 * BLOCK if tpu_generation() == 6 and not changed else BLOCK


def dot(a: jax.Array, b: jax.Array, contract: tuple[int, int]) -> jax.Array:
    """float32 sums over axis `contract[0]` of a and `contract[1]` of b."""
    if contract == (1, 1) and b.shape[0] == 1:
        # Pallas takes a bfloat16 product with a single row for a matrix-vector one, and fails to lower that to float32.
        a, b = a.astype(jnp.float32), b.astype(jnp.float32)
    # bfloat16 products are exact in one pass, and Mosaic refuses HIGHEST for them; float32 takes six.
    precision = lax.Precision.HIGHEST if a.dtype == jnp.float32 else lax.Precision.DEFAULT
    axes = (((contract[0],), (contract[1],)), ((), ()))
    return lax.dot_general(a, b, axes, precision=precision, preferred_element_type=jnp.float32)


# ------------------------------------------------------------------------------------------------ group metadata


@partial(jax.jit, static_argnames=("m", "tm", "num_groups", "cover", "interpret"))
def group_metadata(
    group_sizes: jax.Array,
    group_offset: jax.Array,
    *,
    m: int,
    tm: int,
    num_groups: int,
    cover: str,
    interpret: bool | pltpu.InterpretParams,
) -> GroupMetadata:
    """`make_group_metadata` of checked arguments; group_offset as `as_vector` gives it."""
    (experts,) = group_sizes.shape
    tiles = pl.cdiv(m, tm)
    lengths = GroupMetadata(experts + 1, tiles + num_groups, tiles + num_groups, 1)
    if tiles == 0:
        return GroupMetadata(*(jnp.zeros(length, jnp.int32) for length in lengths))
    if experts == 0:
        group_sizes = jnp.zeros(1, jnp.int32)  # an operand in SMEM cannot be empty
    smem = pl.BlockSpec(memory_space=pltpu.SMEM)
    return GroupMetadata(
        *pl.pallas_call(
            partial(_group_metadata_kernel, m=m, tm=tm, num_groups=num_groups, experts=experts, cover=cover),
            out_shape=[jax.ShapeDtypeStruct((length,), jnp.int32) for length in lengths],
            in_specs=[smem, smem],
            out_specs=[smem] * len(lengths),
            cost_estimate=pl.CostEstimate(flops=0, transcendentals=0, bytes_accessed=4 * (1 + experts + sum(lengths))),
            interpret=interpret,
            name="group_metadata",
        )(group_offset, group_sizes)
    )


def _group_metadata_kernel(
    group_offset: Any,
    group_sizes: Any,
    group_offsets: Any,
    group_ids: Any,
    tile_ids: Any,
    num_visits: Any,
    *,
    m: int,
    tm: int,
    num_groups: int,
    experts: int,
    cover: str,
) -> None:
    tiles = pl.cdiv(m, tm)

    def add_size(expert: Any, end: Any) -> Any:
        # Bad sizes go unseen under tracing; clipped, they give wrong numbers, but no write beyond the lists.
        end += jnp.clip(group_sizes[expert], 0, m - end)
        group_offsets[expert + 1] = end
        return end

    group_offsets[0] = 0
    lax.fori_loop(0, experts, add_size, 0)
    offset = group_offset[0]

    def add_visits(group: Any, first_tile: Any, end_tile: Any, visit: Any) -> Any:
        def add(tile: Any, visit: Any) -> Any:
            group_ids[visit] = group
            tile_ids[visit] = tile
            return visit + 1

        return lax.fori_loop(first_tile, end_tile, add, visit)

    def add_group(group: Any, carry: Any) -> Any:
        visit, last_group = carry
        start, end = group_offsets[offset + group], group_offsets[offset + group + 1]
        first_tile = jnp.minimum(start // tm, tiles - 1)
        empty_tiles = 1 if cover == "groups" else 0
        end_tile = jnp.where(start < end, pl.cdiv(end, tm), first_tile + empty_tiles)
        return add_visits(group, first_tile, end_tile, visit), jnp.where(start < end, group, last_group)

    active_start, active_end = group_offsets[offset], group_offsets[offset + num_groups]
    any_active = active_start < active_end
    leading = jnp.where(any_active, active_start // tm, tiles) if cover == "tiles" else 0
    visit = add_visits(0, 0, leading, 0)
    visit, last_group = lax.fori_loop(0, num_groups, add_group, (visit, 0))
    if cover == "tiles":
        trailing = jnp.where(any_active, pl.cdiv(active_end, tm), tiles)
        visit = add_visits(last_group, trailing, tiles, visit)
    num_visits[0] = visit

    def repeat_last(index: Any, _: Any) -> Any:
        last = jnp.maximum(visit - 1, 0)
        group_ids[index] = jnp.where(visit > 0, group_ids[last], 0)
        tile_ids[index] = jnp.where(visit > 0, tile_ids[last], 0)

    lax.fori_loop(visit, tiles + num_groups, repeat_last, None)
