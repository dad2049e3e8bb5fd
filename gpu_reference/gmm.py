"""Grouped matrix multiplication (MoE layers) on the GPU, in Triton; the operations are defined in `cpu_golden/gmm.py`.

Nothing is read back from the device: `group_sizes` and `group_offset` stay where they are, the grid is sized by the
host for the worst case, and the calls can be captured in a CUDA graph. The values of CUDA tensors are therefore not
checked; sizes that are negative or too large are clamped inside the kernels and reach no memory outside the tensors.
Sums are float32 (operands in full precision: no TF32) and are rounded once, when they are stored.
"""
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators
# (kernel arguments are what Triton makes of them; every host function below is annotated)

import torch
import triton
import triton.language as tl
from torch import Tensor

from gpu_reference._lib.hardware import bfloat16_as_float32_where_interpreted, check_devices
from gpu_reference._lib.launch import Launch, launch_options
from gpu_reference._lib.operands import on_device, only_tensor, scalar, strides, values
from gpu_reference._lib.tiles import Tile, block_of, first_filled, fitted
from gpu_reference._lib.visits import make_group_metadata
from op_arguments import Tiling, resolve_tiling
from op_arguments.debug import Debug
from op_arguments.gmm import GroupMetadata, Problem, check_gmm, check_tgmm

GMM_TILES: dict[int, tuple[Tile, ...]] = {
    2: ((128, 64, 128), (64, 64, 128), (32, 64, 128), (16, 128, 128)),
    4: ((128, 16, 128), (64, 32, 128), (32, 32, 128), (16, 64, 128)),
}
"""(tm, tk, tn) by bytes per operand element, largest first: the candidates of an autotuner. 16-bit operands run on
tensor cores, float32 as a chain of FMAs, whose unrolled steps must stay short to fit the registers of sm_80: no
tile spills more than a few words on sm_80 to sm_120. The default is the first whose tm an average group fills."""

TGMM_TILES: dict[int, tuple[Tile, ...]] = {
    2: ((64, 128, 128), (32, 64, 128), (32, 64, 64)),
    4: ((16, 128, 128), (32, 64, 64), (16, 64, 64)),
}
"""As GMM_TILES; here tm is the step of the sum over a group's rows, tk x tn the tile of the output."""

BAND = 8  # visits whose output columns are computed together, so that weights are fetched once for all of them


def gmm(
    lhs: Tensor,
    rhs: Tensor,
    group_sizes: Tensor,
    *,
    group_offset: int | Tensor = 0,
    existing_out: Tensor | None = None,
    transpose_rhs: bool = False,
    preferred_element_type: torch.dtype | None = None,
    tiling: Tiling | None = None,
    debug: Debug = None,
) -> Tensor:
    """Rows of each group times that group's matrix: `out[m] = lhs[m] @ rhs[group of m - group_offset]`.

    lhs [M, K]; rhs [G, K, N], or [G, N, K] with transpose_rhs; both float32, bfloat16 or float16, of any strides.
    group_sizes [E] int32, >= 0, sum <= M. Returns [M, N] of preferred_element_type (default: lhs's dtype), contiguous:
    rows of no active group are zero, or existing_out's rows where it is given (active rows overwrite it).
    tiling is (tm, tk, tn), or a function (m, k, n) -> (tm, tk, tn): a look-up table or an autotuner over GMM_TILES.
    Each of the three becomes a power of two from 16 to 128. debug: see `op_arguments.debug`, of the sums at acc; None
    leaves nothing of it.
    Raises ValueError or TypeError as `op_arguments.gmm.check_gmm`, ValueError for tensors on several devices, and
    RuntimeError for CPU tensors where Triton's interpreter is off.
    """
    group_offset = scalar(group_offset)
    p = check_gmm(
        lhs,
        rhs,
        group_sizes,
        group_offset=group_offset,
        existing_out=existing_out,
        transpose_rhs=transpose_rhs,
        preferred_element_type=preferred_element_type,
        sizes=values(group_sizes),
    )
    tensors = {"lhs": lhs, "rhs": rhs, "group_sizes": group_sizes, "existing_out": existing_out}
    check_devices(tensors | only_tensor("group_offset", group_offset))
    weights = rhs.transpose(1, 2) if transpose_rhs else rhs
    out_dtype = getattr(torch, p.out_dtype)
    return _gmm(p, lhs, weights, group_sizes, group_offset, existing_out, tiling, debug, out_dtype)


def tgmm(
    lhs: Tensor,
    rhs: Tensor,
    group_sizes: Tensor,
    *,
    group_offset: int | Tensor = 0,
    num_actual_groups: int | None = None,
    existing_out: Tensor | None = None,
    preferred_element_type: torch.dtype | None = None,
    tiling: Tiling | None = None,
    debug: Debug = None,
) -> Tensor:
    """The weight gradient of `gmm`: `out[g] = lhs[rows of g].T @ rhs[rows of g]`.

    lhs [M, K] and rhs [M, N]: float32, bfloat16 or float16, of any strides. group_sizes [E] int32, >= 0, sum <= M.
    Returns [G, K, N] of preferred_element_type (default: lhs's dtype), contiguous, G = num_actual_groups (default E):
    an empty group's block is zero; existing_out [G, K, N] is added to the float32 sums. tiling and debug as in `gmm`.
    Raises as `gmm`, with `op_arguments.gmm.check_tgmm`.
    """
    group_offset = scalar(group_offset)
    p = check_tgmm(
        lhs,
        rhs,
        group_sizes,
        group_offset=group_offset,
        num_actual_groups=num_actual_groups,
        existing_out=existing_out,
        preferred_element_type=preferred_element_type,
        sizes=values(group_sizes),
    )
    tensors = {"lhs": lhs, "rhs": rhs, "group_sizes": group_sizes, "existing_out": existing_out}
    check_devices(tensors | only_tensor("group_offset", group_offset))
    return _tgmm(p, lhs, rhs, group_sizes, group_offset, existing_out, tiling, debug, getattr(torch, p.out_dtype))


@bfloat16_as_float32_where_interpreted()
def _gmm(
    p: Problem,
    lhs: Tensor,
    rhs: Tensor,
    group_sizes: Tensor,
    group_offset: int | Tensor,
    existing_out: Tensor | None,
    tiling: Tiling | None,
    debug: Debug,
    out_dtype: torch.dtype,
) -> Tensor:
    """`gmm` of checked arguments: rhs as [G, K, N] whatever its layout."""
    if p.groups == 0:
        return (
            lhs.new_zeros(p.m, p.n, dtype=out_dtype)
            if existing_out is None
            else existing_out.clone(memory_format=torch.contiguous_format)
        )
    out = lhs.new_empty(p.m, p.n, dtype=out_dtype)
    if out.numel():
        tile = gmm_tile(p, lhs.element_size(), tiling)
        offset = on_device(group_offset, lhs.device)
        metadata = make_group_metadata(
            group_sizes, m=p.m, tm=tile[0], group_offset=offset, num_groups=p.groups, cover="tiles"
        )
        gmm_launch(p, tile, lhs, rhs, existing_out, out, metadata, offset, debug).run(lhs.device)
    return out


@bfloat16_as_float32_where_interpreted()
def _tgmm(
    p: Problem,
    lhs: Tensor,
    rhs: Tensor,
    group_sizes: Tensor,
    group_offset: int | Tensor,
    existing_out: Tensor | None,
    tiling: Tiling | None,
    debug: Debug,
    out_dtype: torch.dtype,
) -> Tensor:
    """`tgmm` of checked arguments."""
    out = lhs.new_empty(p.groups, p.k, p.n, dtype=out_dtype)
    if out.numel():
        tile = tgmm_tile(p, lhs.element_size(), tiling)
        offset = on_device(group_offset, lhs.device)
        tgmm_launch(p, tile, lhs, rhs, existing_out, out, group_sizes, offset, debug).run(lhs.device)
    return out


def gmm_tile(p: Problem, element_size: int, tiling: Tiling | None = None) -> Tile:
    """(tm, tk, tn) of `gmm`: the caller's, else the first of GMM_TILES whose tm an average group fills."""
    table = first_filled(GMM_TILES[element_size], p)
    return fitted(resolve_tiling(tiling, table, p.m, p.k, p.n), p)


def tgmm_tile(p: Problem, element_size: int, tiling: Tiling | None = None) -> Tile:
    """(tm, tk, tn) of `tgmm`: the caller's, else the first of TGMM_TILES, its output tile no larger than the output."""
    tile = TGMM_TILES[element_size][0]
    return fitted(resolve_tiling(tiling, lambda m, k, n: tile, p.m, p.k, p.n), p)


def gmm_launch(
    p: Problem,
    tile: Tile,
    lhs: Tensor,
    rhs: Tensor,
    existing_out: Tensor | None,
    out: Tensor,
    metadata: GroupMetadata,
    group_offset: Tensor,
    debug: Debug = None,
) -> Launch:
    """The main kernel of `gmm`: rhs as [G, K, N] whatever its layout, group_offset on the device."""
    tm, tk, tn = tile
    arguments = {
        "lhs": lhs,
        "rhs": rhs,
        "existing_out": existing_out,
        "out": out,
        **metadata._asdict(),
        "group_offset": group_offset,
        "m": p.m,
        "k": p.k,
        "n": p.n,
        "experts": p.experts,
        "groups": p.groups,
        **strides("lhs", lhs, "mk"),
        **strides("rhs", rhs, "gkn"),
        **strides("existing", existing_out, "mn"),
        "TM": tm,
        "TK": tk,
        "TN": tn,
        "EVEN_K": p.k % tk == 0,
        "BAND_SIZE": BAND,
        "DEBUG": debug,
    }
    bands = triton.cdiv(triton.cdiv(p.m, tm) + p.groups, BAND)
    grid = (bands * BAND * triton.cdiv(p.n, tn),)
    return Launch(_gmm_kernel, grid, arguments, launch_options(tm, tk, tn, lhs.element_size()))


def tgmm_launch(
    p: Problem,
    tile: Tile,
    lhs: Tensor,
    rhs: Tensor,
    existing_out: Tensor | None,
    out: Tensor,
    group_sizes: Tensor,
    group_offset: Tensor,
    debug: Debug = None,
) -> Launch:
    """The kernel of `tgmm`, group_offset on the device."""
    tm, tk, tn = tile
    arguments = {
        "lhs": lhs,
        "rhs": rhs,
        "existing_out": existing_out,
        "out": out,
        "group_sizes": group_sizes.contiguous(),
        "group_offset": group_offset,
        "m": p.m,
        "k": p.k,
        "n": p.n,
        "experts": p.experts,
        "groups": p.groups,
        **strides("lhs", lhs, "mk"),
        **strides("rhs", rhs, "mn"),
        **strides("existing", existing_out, "gkn"),
        "TM": tm,
        "TK": tk,
        "TN": tn,
        "EXPERTS_BLOCK": block_of(p.experts),
        "DEBUG": debug,
    }
    grid = (p.groups * triton.cdiv(p.k, tk) * triton.cdiv(p.n, tn),)
    return Launch(_tgmm_kernel, grid, arguments, launch_options(tk, tm, tn, lhs.element_size()))


@triton.jit
def _gmm_kernel(
    lhs,
    rhs,
    existing_out,
    out,
    group_offsets,
    group_ids,
    tile_ids,
    num_visits,
    group_offset,
    m,
    k,
    n,
    experts,
    groups,
    lhs_stride_m,
    lhs_stride_k,
    rhs_stride_g,
    rhs_stride_k,
    rhs_stride_n,
    existing_stride_m,
    existing_stride_n,
    TM: tl.constexpr,
    TK: tl.constexpr,
    TN: tl.constexpr,
    EVEN_K: tl.constexpr,
    BAND_SIZE: tl.constexpr,
    DEBUG: tl.constexpr,
):
    """One program per (visit, column tile), in bands. It stores its group's rows of the row tile; the first visit of a
    tile also stores the rows of no active group, so that every row is stored exactly once."""
    visit, tile_n = visit_of_program(n, TN, BAND_SIZE)
    if visit >= tl.load(num_visits):
        return
    group, start, end, tile_m, is_first_visit, shard_offsets = rows_of_visit(
        visit, group_offsets, group_ids, tile_ids, group_offset, experts, groups
    )

    first_row = tile_m * TM
    row = (first_row + tl.arange(0, TM))[:, None]
    column = (tile_n * TN + tl.arange(0, TN))[None, :]
    in_group = (row >= start) & (row < end)
    in_columns = column < n
    row_offset = row.to(tl.int64)
    column_offset = column.to(tl.int64)

    along_k = tl.arange(0, TK)[None, :]
    down_k = tl.arange(0, TK)[:, None]
    whole_tile = tl.full((), TK, tl.int64)
    a_tile = lhs + row_offset * lhs_stride_m + along_k.to(tl.int64) * lhs_stride_k
    b_tile = rhs + group.to(tl.int64) * rhs_stride_g + down_k.to(tl.int64) * rhs_stride_k + column_offset * rhs_stride_n
    a_step = whole_tile * lhs_stride_k
    b_step = whole_tile * rhs_stride_k
    sums = tl.full((TM, TN), 0.0, tl.float32)
    has_rows = tl.maximum(start, first_row) < tl.minimum(end, first_row + TM)
    for first_k in range(0, tl.where(has_rows, k, 0), TK):
        if EVEN_K:
            a = tl.load(a_tile, mask=in_group, other=0)
            b = tl.load(b_tile, mask=in_columns, other=0)
        else:
            a = tl.load(a_tile, mask=in_group & (along_k < k - first_k), other=0)
            b = tl.load(b_tile, mask=in_columns & (down_k < k - first_k), other=0)
        sums = tl.dot(a, b, sums, input_precision="ieee")
        if DEBUG is not None:
            sums = DEBUG("acc", sums, in_group & in_columns, tiling=(1, TK, 1))
        a_tile += a_step
        b_tile += b_step

    result = sums.to(out.dtype.element_ty)
    store_rows(
        result,
        out,
        existing_out,
        shard_offsets,
        is_first_visit,
        row,
        column,
        in_group,
        m,
        n,
        groups,
        existing_stride_m,
        existing_stride_n,
    )


@triton.jit
def _tgmm_kernel(
    lhs,
    rhs,
    existing_out,
    out,
    group_sizes,
    group_offset,
    m,
    k,
    n,
    experts,
    groups,
    lhs_stride_m,
    lhs_stride_k,
    rhs_stride_m,
    rhs_stride_n,
    existing_stride_g,
    existing_stride_k,
    existing_stride_n,
    TM: tl.constexpr,
    TK: tl.constexpr,
    TN: tl.constexpr,
    EXPERTS_BLOCK: tl.constexpr,
    DEBUG: tl.constexpr,
):
    """One program per (group, output tile): the sum over the group's rows, in steps from its first row."""
    group, tile_k, tile_n = output_tile_of_program(k, n, TK, TN)
    start, end = rows_of_group(group, group_sizes, group_offset, m, experts, groups, EXPERTS_BLOCK)

    at_k = (tile_k * TK + tl.arange(0, TK))[:, None]
    column = (tile_n * TN + tl.arange(0, TN))[None, :]
    in_k = at_k < k
    in_columns = column < n
    k_offset = at_k.to(tl.int64)
    column_offset = column.to(tl.int64)

    along_rows = tl.arange(0, TM)[None, :]
    down_rows = tl.arange(0, TM)[:, None]
    first_row = start.to(tl.int64)
    whole_tile = tl.full((), TM, tl.int64)
    # lhs is read transposed by its addresses: tl.trans next to a wgmma has been miscompiled (Triton before 3.7.1).
    a_tile = lhs + (first_row + along_rows) * lhs_stride_m + k_offset * lhs_stride_k
    b_tile = rhs + (first_row + down_rows) * rhs_stride_m + column_offset * rhs_stride_n
    a_step = whole_tile * lhs_stride_m
    b_step = whole_tile * rhs_stride_m
    sums = tl.full((TK, TN), 0.0, tl.float32)
    for rows_before in range(0, end - start, TM):
        rows_left = end - start - rows_before
        a = tl.load(a_tile, mask=in_k & (along_rows < rows_left), other=0)
        b = tl.load(b_tile, mask=(down_rows < rows_left) & in_columns, other=0)
        sums = tl.dot(a, b, sums, input_precision="ieee")
        if DEBUG is not None:
            sums = DEBUG("acc", sums, in_k & in_columns, tiling=(TM, 1, 1))
        a_tile += a_step
        b_tile += b_step

    in_out = in_k & in_columns
    nth = group.to(tl.int64)
    if existing_out is not None:
        existing_group = existing_out + nth * existing_stride_g
        existing_tile = existing_group + k_offset * existing_stride_k + column_offset * existing_stride_n
        sums += tl.load(existing_tile, mask=in_out, other=0).to(tl.float32)
    out_tile = out + (nth * k + k_offset) * n + column_offset
    tl.store(out_tile, sums.to(out.dtype.element_ty), mask=in_out)


@triton.jit
def visit_of_program(n, TN: tl.constexpr, BAND_SIZE: tl.constexpr):
    """This program's visit and column tile: all columns of a band of visits before the next band."""
    tiles_n = (n + TN - 1) // TN
    in_band = tl.program_id(0) % (BAND_SIZE * tiles_n)
    visit = tl.program_id(0) // (BAND_SIZE * tiles_n) * BAND_SIZE + in_band % BAND_SIZE
    return visit, in_band // BAND_SIZE


@triton.jit
def rows_of_visit(visit, group_offsets, group_ids, tile_ids, group_offset, experts, groups):
    """A visit's group, that group's first row and the first after it, the row tile, whether this is the first visit of
    the tile, and where the offsets of the shard's groups are."""
    tile_m = tl.load(tile_ids + visit)
    is_first_visit = tl.load(tile_ids + visit - 1, mask=visit > 0, other=-1) != tile_m
    group = tl.load(group_ids + visit)
    shard_offsets = group_offsets + tl.minimum(tl.maximum(tl.load(group_offset).to(tl.int32), 0), experts - groups)
    start = tl.load(shard_offsets + group)
    end = tl.load(shard_offsets + group + 1)
    return group, start, end, tile_m, is_first_visit, shard_offsets


@triton.jit
def store_rows(
    result,
    out,
    existing_out,
    shard_offsets,
    is_first_visit,
    row,
    column,
    in_group,
    m,
    n,
    groups,
    existing_stride_m,
    existing_stride_n,
):
    """Store a visit's rows, and in the first visit of a tile its rows of no active group: zero, or existing_out's."""
    in_columns = column < n
    row_offset = row.to(tl.int64)
    column_offset = column.to(tl.int64)
    is_inactive = (row < tl.load(shard_offsets)) | (row >= tl.load(shard_offsets + groups))
    is_unclaimed = is_inactive & (row < tl.where(is_first_visit, m, 0))
    # Selects, since 0 * inf of a weight leaves NaN in the sums of rows outside the group.
    if existing_out is None:
        result = tl.where(in_group, result, 0.0)
    else:
        existing_tile = existing_out + row_offset * existing_stride_m + column_offset * existing_stride_n
        result = tl.where(in_group, result, tl.load(existing_tile, mask=is_unclaimed & in_columns, other=0))
    tl.store(out + row_offset * n + column_offset, result, mask=(in_group | is_unclaimed) & in_columns)


@triton.jit
def output_tile_of_program(k, n, TK: tl.constexpr, TN: tl.constexpr):
    """The group and the output tile of a program of `tgmm`: all tiles of a group before the next."""
    tiles_n = (n + TN - 1) // TN
    tiles = (k + TK - 1) // TK * tiles_n
    return tl.program_id(0) // tiles, tl.program_id(0) % tiles // tiles_n, tl.program_id(0) % tiles_n


@triton.jit
def rows_of_group(group, group_sizes, group_offset, m, experts, groups, EXPERTS_BLOCK: tl.constexpr):
    """The first row of the shard's `group`, and the first after it."""
    expert = tl.arange(0, EXPERTS_BLOCK)
    sizes = tl.maximum(tl.load(group_sizes + expert, mask=expert < experts, other=0), 0).to(tl.int64)
    this = tl.minimum(tl.maximum(tl.load(group_offset).to(tl.int32), 0), experts - groups) + group
    start = tl.minimum(tl.sum(tl.where(expert < this, sizes, 0)), m).to(tl.int32)
    end = tl.minimum(tl.sum(tl.where(expert <= this, sizes, 0)), m).to(tl.int32)
    return start, end
