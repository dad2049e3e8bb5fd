"""Grouped matrix multiplication (MoE layers) on the TPU. The operations are defined in `cpu_golden/gmm.py`.

Both kernels walk a list of *visits*: pairs of a group and a row tile that holds rows of it. A tile that straddles
groups is visited once for each, so group sizes need no alignment. The list is made on the device by a small kernel
of its own and steers the main kernel by scalar prefetch, as in MegaBlocks (Gale et al. 2022, arXiv:2211.15841) and
JAX's megablox.
"""

from functools import partial
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from op_arguments import Tiling, resolve_tiling
from op_arguments.gmm import Problem, check_gmm, check_group_metadata, check_tgmm
from tpu_kernels.hardware import is_tpu

Interpret = bool | pltpu.InterpretParams | None
Tile = tuple[int, int, int]

LANES = 128
SUBLANES = 16  # of a packed 16-bit register; a multiple of float32's 8
BLOCK = 256  # the width of the matrix unit on v6e and tpu7x


class GroupMetadata(NamedTuple):
    """Which (group, row tile) pairs a kernel visits, in order. All int32.

    group_offsets [E + 1]: first row of each group, then the end of the last. group_ids [V], tile_ids [V]: the
    shard-local group and the row tile of each visit, V = ceil(m / tm) + num_groups; only the first num_visits [1]
    count, later entries repeat the last of them (0 where there is none).
    """

    group_offsets: Any
    group_ids: Any
    tile_ids: Any
    num_visits: Any


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
    """Rows of each group times that group's matrix: `out[m] = lhs[m] @ rhs[group of m - group_offset]`.

    lhs [M, K]; rhs [G, K, N], or [G, N, K] with transpose_rhs; both float32, bfloat16 or float16. group_sizes [E]
    int32, >= 0, sum <= M. group_offset: int or int32 scalar, may be traced. Returns [M, N] in preferred_element_type
    (float32, bfloat16 or float16; default lhs's): rows of no active group are zero, or existing_out's rows where it
    is given (active rows overwrite it). Sums are float32, of exact bfloat16 products or of float32 products in six
    bfloat16 passes (float16 is widened), rounded once.
    tiling: (tm, tk, tn) or a look-up (m, k, n) -> (tm, tk, tn), capped to the problem and rounded up to whole
    registers; default: `_gmm_tiles`. interpret: as `pl.pallas_call`; None interprets where there is no TPU.
    `jax.shard_map` takes it with check_vma=False.
    Raises ValueError or TypeError as `op_arguments.gmm.check_gmm`; values are checked outside tracing only.
    """
    group_offset = _static_scalar(group_offset)
    p = check_gmm(
        lhs,
        rhs,
        group_sizes,
        group_offset=group_offset,
        existing_out=existing_out,
        transpose_rhs=transpose_rhs,
        preferred_element_type=preferred_element_type,
        sizes=_values(group_sizes),
    )
    tile = resolve_tiling(tiling, partial(_gmm_tiles, lhs.dtype), p.m, p.k, p.n)
    return _gmm(
        lhs,
        rhs,
        group_sizes,
        _as_vector(group_offset, p.experts - p.groups),
        existing_out,
        problem=p,
        tile=_fit(tile, p),
        transpose_rhs=bool(transpose_rhs),
        interpret=_resolve_interpret(interpret),
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
) -> jax.Array:
    """The weight gradient of `gmm`: `out[g] = lhs[rows of g].T @ rhs[rows of g]`.

    lhs [M, K] and rhs [M, N]: float32, bfloat16 or float16. group_sizes [E] int32, >= 0, sum <= M. Returns [G, K, N]
    in preferred_element_type (default lhs's), G = num_actual_groups (default E): an empty group's block is zero;
    existing_out [G, K, N] is added, in float32. Precision, group_offset, tiling (default: `_tgmm_tiles`) and
    interpret as `gmm`.
    Raises ValueError or TypeError as `op_arguments.gmm.check_tgmm`; values are checked outside tracing only.
    """
    group_offset = _static_scalar(group_offset)
    p = check_tgmm(
        lhs,
        rhs,
        group_sizes,
        group_offset=group_offset,
        num_actual_groups=num_actual_groups,
        existing_out=existing_out,
        preferred_element_type=preferred_element_type,
        sizes=_values(group_sizes),
    )
    tile = resolve_tiling(tiling, partial(_tgmm_tiles, lhs.dtype), p.m, p.k, p.n)
    return _tgmm(
        lhs,
        rhs,
        group_sizes,
        _as_vector(group_offset, p.experts - p.groups),
        existing_out,
        problem=p,
        tile=_fit(tile, p),
        interpret=_resolve_interpret(interpret),
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
    group_offset = _static_scalar(group_offset)
    check_group_metadata(
        group_sizes,
        m=m,
        tm=tm,
        group_offset=group_offset,
        num_groups=num_groups,
        cover=cover,
        sizes=_values(group_sizes),
    )
    return _group_metadata(
        group_sizes,
        _as_vector(group_offset, group_sizes.shape[0] - num_groups),
        m=m,
        tm=tm,
        num_groups=num_groups,
        cover=cover,
        interpret=_resolve_interpret(interpret),
    )


# ---------------------------------------------------------------------------------------------------- arguments


def _values(group_sizes: Any) -> list[int] | None:
    """The values of group_sizes, or None where it is traced (or not the vector it should be: the check says so)."""
    if isinstance(group_sizes, jax.core.Tracer) or len(getattr(group_sizes, "shape", ())) != 1:
        return None
    return [int(size) for size in np.asarray(group_sizes)]


def _static_scalar(value: Any) -> Any:
    """The int in a concrete integer scalar ([] or [1]); anything else as it is, for the check to judge."""
    concrete = isinstance(value, jax.Array | np.ndarray | np.integer) and not isinstance(value, jax.core.Tracer)
    return int(value.reshape(())) if concrete and value.size == 1 and value.dtype.kind == "i" else value


def _as_vector(group_offset: int | jax.Array, most: int) -> jax.Array:
    """group_offset as the kernels read it: int32 [1], clipped where a traced one could not be checked."""
    if not isinstance(group_offset, int):
        group_offset = jnp.clip(group_offset, 0, most)
    return jnp.asarray(group_offset, jnp.int32).reshape(1)


def _resolve_interpret(interpret: Interpret) -> bool | pltpu.InterpretParams:
    return not is_tpu() if interpret is None else interpret


def _gmm_tiles(dtype: Any, m: int, k: int, n: int) -> Tile:
    """The largest that fit, twice buffered, the 16 MiB of VMEM that a kernel has by default on v5e."""
    return (512, 1024, 512) if jnp.dtype(dtype) == jnp.bfloat16 else (256, 512, 512)


def _tgmm_tiles(dtype: Any, m: int, k: int, n: int) -> Tile:
    """As `_gmm_tiles`, and the shorter side to lhs, which the kernel transposes."""
    if jnp.dtype(dtype) == jnp.bfloat16:
        return (512, 512, 1024) if n >= 1024 else (512, 1024, 512)
    return (256, 512, 512)


def _fit(tile: Tile, p: Problem) -> Tile:
    """The tile, capped to the problem; what is left smaller is rounded up to whole registers, as Mosaic asks."""

    def fit(size: int, unit: int, whole: int) -> int:
        return min(pl.cdiv(size, unit) * unit, whole)

    tm, tk, tn = tile
    return fit(tm, SUBLANES, p.m), fit(tk, LANES, p.k), fit(tn, LANES, p.n)


def _kernel_operand(x: jax.Array) -> jax.Array:
    """x as Mosaic can load it: it has no float16."""
    return x.astype(jnp.float32) if x.dtype == jnp.float16 else x


def _kernel_dtype(name: str) -> Any:
    """The dtype in which the kernel stores an output that XLA hands over as dtype `name`."""
    return jnp.dtype("float32" if name == "float16" else name)


# ---------------------------------------------------------------------------------------------------------- gmm


@partial(jax.jit, static_argnames=("problem", "tile", "transpose_rhs", "interpret"))
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
    metadata = _group_metadata(
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
    operands = [_kernel_operand(x) for x in (lhs, rhs, existing_out) if x is not None]
    out_shape = jax.ShapeDtypeStruct((m, n), _kernel_dtype(out_dtype))
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
        partial(_gmm_kernel, k=k, transpose_rhs=transpose_rhs),
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
) -> None:
    *existing_out, out, acc = refs
    visit, step, last_step = pl.program_id(1), pl.program_id(2), pl.num_programs(2) - 1
    (tm, tk), tn = lhs.shape, out.shape[1]
    start, end = _rows_of_visit(visit, group_ids, tile_ids, group_offsets, group_offset, tm)
    rest = k % tk or tk  # of K, in the last step; the block holds garbage beyond it, and 0 * NaN is NaN

    def accumulate(depth: int) -> None:
        for columns in _blocks(tn):
            weights = rhs[columns, :depth] if transpose_rhs else rhs[:depth, columns]
            partial_sum = _dot(lhs[:, :depth], weights, contract=(1, 1 if transpose_rhs else 0))
            acc[:, columns] = jnp.where(step == 0, 0.0, acc[:, columns]) + partial_sum

    if rest == tk:
        pl.when(start < end)(lambda: accumulate(tk))
    else:
        pl.when((start < end) & (step < last_step))(lambda: accumulate(tk))
        pl.when((start < end) & (step == last_step))(lambda: accumulate(rest))

    whole = (start == 0) & (end == tm)

    @pl.when((step == last_step) & whole)
    def _() -> None:
        out[...] = acc[...].astype(out.dtype)

    @pl.when((step == last_step) & ~whole)
    def _() -> None:
        # Consecutive visits of a tile share its output block: the first one fills the rows that are not its own.
        first_of_tile = (visit == 0) | (tile_ids[jnp.maximum(visit - 1, 0)] != tile_ids[visit])
        rows = lax.broadcasted_iota(jnp.int32, acc.shape, 0)
        fill = existing_out[0][...] if existing_out else jnp.zeros_like(out)
        others = jnp.where(first_of_tile, fill, out[...])
        out[...] = jnp.where((start <= rows) & (rows < end), acc[...].astype(out.dtype), others)


# --------------------------------------------------------------------------------------------------------- tgmm


@partial(jax.jit, static_argnames=("problem", "tile", "interpret"))
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
) -> jax.Array:
    m, k, n, groups, _, out_dtype = problem
    if 0 in (m, k, n, groups):
        return jnp.zeros((groups, k, n), out_dtype) if existing_out is None else existing_out

    tm, tk, tn = tile
    tiles_k, tiles_n = pl.cdiv(k, tk), pl.cdiv(n, tn)
    metadata = _group_metadata(
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
    operands = [_kernel_operand(x) for x in (lhs, rhs, existing_out) if x is not None]
    out_shape = jax.ShapeDtypeStruct((groups, k, n), _kernel_dtype(out_dtype))
    cost = pl.CostEstimate(
        flops=2 * m * k * n,
        transcendentals=0,
        bytes_accessed=(tiles_n * m * k + tiles_k * m * n) * operands[0].dtype.itemsize
        + (1 if existing_out is None else 2) * groups * k * n * out_shape.dtype.itemsize,
    )

    out = pl.pallas_call(
        _tgmm_kernel,
        out_shape=out_shape,
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=4,
            grid=(tiles_n, tiles_k, metadata.num_visits[0]),
            in_specs=in_specs[: len(operands)],
            out_specs=pl.BlockSpec((None, tk, tn), out_block),
            scratch_shapes=[pltpu.VMEM((tk, tn), jnp.float32)],
        ),
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel", "parallel", "arbitrary")),
        cost_estimate=cost,
        interpret=interpret,
        name="tgmm",
    )(metadata.group_ids, metadata.tile_ids, metadata.group_offsets, group_offset, *operands)
    return out.astype(out_dtype)


def _tgmm_kernel(
    group_ids: Any, tile_ids: Any, group_offsets: Any, group_offset: Any, lhs: Any, rhs: Any, *refs: Any
) -> None:
    *existing_out, out, acc = refs
    visit, last_visit = pl.program_id(2), pl.num_programs(2) - 1
    tm = rhs.shape[0]
    start, end = _rows_of_visit(visit, group_ids, tile_ids, group_offsets, group_offset, tm)
    group = group_ids[visit]
    first_of_group = (visit == 0) | (group_ids[jnp.maximum(visit - 1, 0)] != group)

    def own(block: jax.Array) -> jax.Array:
        # On both operands: rows of other groups may hold NaN or infinities, and 0 * NaN is NaN.
        rows = lax.broadcasted_iota(jnp.int32, block.shape, 0)
        return jnp.where((start <= rows) & (rows < end), block, jnp.zeros_like(block))

    def accumulate(masked: bool) -> None:
        b = own(rhs[...]) if masked else rhs[...]
        for columns in _blocks(lhs.shape[1]):
            a = own(lhs[:, columns]) if masked else lhs[:, columns]
            acc[columns, :] = jnp.where(first_of_group, 0.0, acc[columns, :]) + _dot(a, b, contract=(0, 0))

    whole = (start == 0) & (end == tm)
    pl.when(whole)(lambda: accumulate(masked=False))
    pl.when((start < end) & ~whole)(lambda: accumulate(masked=True))

    @pl.when((visit == last_visit) | (group_ids[jnp.minimum(visit + 1, last_visit)] != group))
    def _() -> None:
        total = jnp.where(start < end, acc[...], 0.0)  # an empty group has one visit, without rows
        if existing_out:
            total += existing_out[0][...].astype(jnp.float32)
        out[...] = total.astype(out.dtype)


def _rows_of_visit(
    visit: Any, group_ids: Any, tile_ids: Any, group_offsets: Any, group_offset: Any, tm: int
) -> tuple[Any, Any]:
    """The rows [start, end) of the visit's tile that belong to its group; start >= end where none do."""
    group = group_offset[0] + group_ids[visit]
    first_row = tile_ids[visit] * tm
    start, end = group_offsets[group] - first_row, group_offsets[group + 1] - first_row
    return jnp.maximum(start, 0), jnp.minimum(end, tm)


def _blocks(size: int) -> list[Any]:
    """Slices of BLOCK. A dot over a whole tile needs more registers than there are, and spills."""
    return [pl.ds(first, min(BLOCK, size - first)) for first in range(0, size, BLOCK)]


def _dot(a: jax.Array, b: jax.Array, contract: tuple[int, int]) -> jax.Array:
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
def _group_metadata(
    group_sizes: jax.Array,
    group_offset: jax.Array,
    *,
    m: int,
    tm: int,
    num_groups: int,
    cover: str,
    interpret: bool | pltpu.InterpretParams,
) -> GroupMetadata:
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
