"""Grouped matrix multiplication of block-scaled operands on the GPU, in Triton.

The operations are defined in `cpu_golden/quantized_gmm.py`; groups, visits and grids are those of
`gpu_reference/gmm.py`. A step of the sum never crosses a scale block: where scales change along the contraction, each
step's products are summed by the tensor core on their own, multiplied by the scales and added to float32 sums.
Other scales multiply the whole sum, once. Sums of int8 products are int32 as long as no scale changes.
"""
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators
# (kernel arguments are what Triton makes of them; every host function below is annotated)

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from gpu_reference._lib.formats import as_codes, decoded
from gpu_reference._lib.hardware import (
    architecture,
    bfloat16_as_float32_where_interpreted,
    check_devices,
    computes_bfloat16,
    sums_fp8_in_float32,
    supports_matmul,
)
from gpu_reference._lib.launch import Launch, launch_options
from gpu_reference._lib.operands import on_device, only_tensor, scalar, strides, values
from gpu_reference._lib.tiles import Tile, block_of, first_filled, fitted
from gpu_reference._lib.visits import make_group_metadata
from gpu_reference.gmm import (
    BAND,
    GMM_TILES,
    TGMM_TILES,
    output_tile_of_program,
    rows_of_group,
    rows_of_visit,
    store_rows,
    visit_of_program,
)
from op_arguments import Tiling, dtype_name, resolve_tiling
from op_arguments.debug import Debug
from op_arguments.gmm import GroupMetadata
from op_arguments.quantize import NARROW
from op_arguments.quantized_gmm import (
    QuantizedProblem,
    check_gmm_quantized,
    check_tgmm_quantized,
    check_tile,
    dot_dtype,
)

GMM_QUANTIZED_TILES: dict[int, tuple[Tile, ...]] = {
    1: ((128, 128, 128), (64, 128, 128), (32, 128, 128), (16, 128, 128)),
    2: GMM_TILES[2],
    4: ((64, 16, 128), (32, 32, 128), (16, 64, 128)),
}
TGMM_QUANTIZED_TILES: dict[int, tuple[Tile, ...]] = {
    1: ((128, 128, 128), (64, 128, 128), (64, 64, 128)),
    2: TGMM_TILES[2],
    4: ((16, 64, 128), (32, 64, 64), (16, 64, 64)),
}
"""As GMM_TILES and TGMM_TILES, by bytes per element of what the dot multiplies. A step is a scale block at most."""

Pair = tuple[Tensor, Tensor | None]
"""An operand and its scale."""

LEAST_DEPTH = 32  # of a dot of 8-bit operands
INT32_PRODUCTS = 2**31 // 128**2 - 1  # products of int8 that an int32 sum holds, whatever they are


class DotPath(NamedTuple):
    """What a dot multiplies, "fp8", "int8" or the dtype that both operands are widened to, and why."""

    dtype: str
    reason: str


def gmm_quantized(
    lhs: Tensor,
    lhs_scale: Tensor | None,
    rhs: Tensor,
    rhs_scale: Tensor | None,
    group_sizes: Tensor,
    *,
    group_offset: int | Tensor = 0,
    existing_out: Tensor | None = None,
    transpose_rhs: bool = False,
    preferred_element_type: torch.dtype | None = None,
    tiling: Tiling | None = None,
    debug: Debug = None,
) -> Tensor:
    """`gmm` of operands with block scales: `out[m] = Σ_b (lhs[m, b] @ rhs[g, b]) · lhs_scale[m, b] · rhs_scale[g, b]`.

    lhs [M, K] and rhs [G, K, N] (or [G, N, K] with transpose_rhs) are fp8 (e4m3fn, e5m2, mixed or not), int8, or one
    of them float32, bfloat16 or float16, with None for its scale. Scales are float32 of the operand's rank, each axis
    dividing the operand's; along K their blocks are 32, 64, 128, 256, 512 or the whole axis, each operand's own.
    All of any strides. Returns [M, N] of preferred_element_type: float32, bfloat16 or float16 (default: the
    unquantised lhs's dtype, else bfloat16). group_sizes, group_offset, existing_out and errors as `gmm`, with
    `op_arguments.quantized_gmm.check_gmm_quantized`; a `tiling` whose tk cuts a block is refused. What the dot
    multiplies on which GPU, and why: `dot_path`. debug: see `op_arguments.debug`, of the finished sums at acc.
    """
    group_offset = scalar(group_offset)
    p = check_gmm_quantized(
        lhs,
        lhs_scale,
        rhs,
        rhs_scale,
        group_sizes,
        group_offset=group_offset,
        existing_out=existing_out,
        transpose_rhs=transpose_rhs,
        preferred_element_type=preferred_element_type,
        sizes=values(group_sizes),
    )
    operands = {"lhs": lhs, "lhs_scale": lhs_scale, "rhs": rhs, "rhs_scale": rhs_scale}
    tensors = operands | {"group_sizes": group_sizes, "existing_out": existing_out}
    check_devices(tensors | only_tensor("group_offset", group_offset))
    if transpose_rhs:
        rhs, rhs_scale = rhs.transpose(1, 2), None if rhs_scale is None else rhs_scale.transpose(1, 2)
        block_g, block_n, block_k = p.rhs_blocks
        p = p._replace(rhs_blocks=(block_g, block_k, block_n))
    pairs = (lhs, lhs_scale), (rhs, rhs_scale)
    out_dtype = getattr(torch, p.out_dtype)
    return _gmm_quantized(p, *pairs, group_sizes, group_offset, existing_out, tiling, debug, out_dtype)


def tgmm_quantized(
    lhs: Tensor,
    lhs_scale: Tensor | None,
    rhs: Tensor,
    rhs_scale: Tensor | None,
    group_sizes: Tensor,
    *,
    group_offset: int | Tensor = 0,
    num_actual_groups: int | None = None,
    existing_out: Tensor | None = None,
    preferred_element_type: torch.dtype | None = None,
    tiling: Tiling | None = None,
    debug: Debug = None,
) -> Tensor:
    """`tgmm` of operands with block scales: `out[g] = Σ_b (lhs[b].T @ rhs[b]) · lhs_scale[b] · rhs_scale[b]`.

    lhs [M, K] and rhs [M, N] and their scales as in `gmm_quantized`, blocks of the contraction now along M. Blocks
    are those of all M rows: a group that begins inside one uses that block's scale for its part of it. existing_out
    [G, K, N] is added to the float32 sums. debug as in `gmm_quantized`. Everything else as `tgmm`; a `tiling` whose
    tm cuts a block is refused.
    """
    group_offset = scalar(group_offset)
    p = check_tgmm_quantized(
        lhs,
        lhs_scale,
        rhs,
        rhs_scale,
        group_sizes,
        group_offset=group_offset,
        num_actual_groups=num_actual_groups,
        existing_out=existing_out,
        preferred_element_type=preferred_element_type,
        sizes=values(group_sizes),
    )
    operands = {"lhs": lhs, "lhs_scale": lhs_scale, "rhs": rhs, "rhs_scale": rhs_scale}
    tensors = operands | {"group_sizes": group_sizes, "existing_out": existing_out}
    check_devices(tensors | only_tensor("group_offset", group_offset))
    pairs = (lhs, lhs_scale), (rhs, rhs_scale)
    out_dtype = getattr(torch, p.out_dtype)
    return _tgmm_quantized(p, *pairs, group_sizes, group_offset, existing_out, tiling, debug, out_dtype)


@bfloat16_as_float32_where_interpreted()
def _gmm_quantized(
    p: QuantizedProblem,
    lhs: Pair,
    rhs: Pair,
    group_sizes: Tensor,
    group_offset: int | Tensor,
    existing_out: Tensor | None,
    tiling: Tiling | None,
    debug: Debug,
    out_dtype: torch.dtype,
) -> Tensor:
    """`gmm_quantized` of checked arguments: rhs, its scale and its blocks as of [G, K, N]."""
    device = lhs[0].device
    path = dot_path(lhs[0].dtype, rhs[0].dtype, out_dtype, architecture(device))
    tile = gmm_quantized_tile(p, path, tiling)
    if p.groups == 0:
        return (
            torch.zeros(p.m, p.n, dtype=out_dtype, device=device)
            if existing_out is None
            else existing_out.clone(memory_format=torch.contiguous_format)
        )
    out = torch.empty(p.m, p.n, dtype=out_dtype, device=device)
    if out.numel():
        offset = on_device(group_offset, device)
        metadata = make_group_metadata(
            group_sizes, m=p.m, tm=tile[0], group_offset=offset, num_groups=p.groups, cover="tiles"
        )
        gmm_quantized_launch(p, tile, path, lhs, rhs, existing_out, out, metadata, offset, debug).run(device)
    return out


@bfloat16_as_float32_where_interpreted()
def _tgmm_quantized(
    p: QuantizedProblem,
    lhs: Pair,
    rhs: Pair,
    group_sizes: Tensor,
    group_offset: int | Tensor,
    existing_out: Tensor | None,
    tiling: Tiling | None,
    debug: Debug,
    out_dtype: torch.dtype,
) -> Tensor:
    """`tgmm_quantized` of checked arguments."""
    device = lhs[0].device
    path = dot_path(lhs[0].dtype, rhs[0].dtype, out_dtype, architecture(device))
    tile = tgmm_quantized_tile(p, path, tiling)
    out = torch.empty(p.groups, p.k, p.n, dtype=out_dtype, device=device)
    if out.numel():
        offset = on_device(group_offset, device)
        tgmm_quantized_launch(p, tile, path, lhs, rhs, existing_out, out, group_sizes, offset, debug).run(device)
    return out


def dot_path(lhs: torch.dtype, rhs: torch.dtype, out: torch.dtype, target: str | None) -> DotPath:
    """What the dot of two operand dtypes multiplies on `target` (see `gpu_reference._lib.hardware`), and why."""
    dtype = dot_dtype(lhs, rhs)
    if dtype == "int8":
        return DotPath(dtype, "int8 products and their int32 sums are exact")
    if dtype != "fp8":
        return DotPath(dtype, f"{dtype} holds every value of the narrow operand beside it")
    if target is None:
        if computes_bfloat16(torch.device("cpu")):
            return DotPath(dtype, "interpreted, as on a tensor core that multiplies fp8")
        return DotPath("float16", "Triton's own interpreter takes the NaN of e4m3 for a number")
    if not (supports_matmul(lhs, target) and supports_matmul(rhs, target)):
        return DotPath("float16", f"the matrix unit of {target} has no fp8; float16 holds every fp8 value")
    if out == torch.float32 and not sums_fp8_in_float32(target):
        return DotPath(
            "float16", f"the tensor cores of {target} keep 13 bits of an fp8 sum, too few for float32 results"
        )
    return DotPath(
        dtype, f"the matrix unit of {target} multiplies fp8; each step is added to float32 sums outside of it"
    )


def gmm_quantized_tile(p: QuantizedProblem, path: DotPath, tiling: Tiling | None = None) -> Tile:
    """(tm, tk, tn) of `gmm_quantized`: as `gmm_tile`, tk no longer than a scale block.

    Raises ValueError where the caller's tk is neither a multiple nor a divisor of the block.
    """
    table = first_filled(GMM_QUANTIZED_TILES[_dot_bytes(path)], p)
    tile = resolve_tiling(tiling, table, p.m, p.k, p.n)
    check_tile("tk", tile[1], p.block, p.k)
    tm, tk, tn = fitted(tile, p)
    return tm, _step(tk, path, p.block, p.k), tn


def tgmm_quantized_tile(p: QuantizedProblem, path: DotPath, tiling: Tiling | None = None) -> Tile:
    """(tm, tk, tn) of `tgmm_quantized`: as `tgmm_tile`, tm no longer than a scale block; raises for tm as it for tk."""
    default = TGMM_QUANTIZED_TILES[_dot_bytes(path)][0]
    tile = resolve_tiling(tiling, lambda m, k, n: default, p.m, p.k, p.n)
    check_tile("tm", tile[0], p.block, p.m)
    tm, tk, tn = fitted(tile, p)
    return _step(tm, path, p.block, p.m), tk, tn


def gmm_quantized_launch(
    p: QuantizedProblem,
    tile: Tile,
    path: DotPath,
    lhs: Pair,
    rhs: Pair,
    existing_out: Tensor | None,
    out: Tensor,
    metadata: GroupMetadata,
    group_offset: Tensor,
    debug: Debug = None,
) -> Launch:
    """The main kernel of `gmm_quantized`: rhs, its scale and its blocks as of [G, K, N], group_offset on the device."""
    tm, tk, tn = tile
    arguments = {
        **_operand_arguments("lhs", *lhs, p.lhs_blocks, "mk", "k", path),
        **_operand_arguments("rhs", *rhs, p.rhs_blocks, "gkn", "k", path),
        "existing_out": existing_out,
        "out": out,
        **metadata._asdict(),
        "group_offset": group_offset,
        "m": p.m,
        "k": p.k,
        "n": p.n,
        "experts": p.experts,
        "groups": p.groups,
        **strides("existing", existing_out, "mn"),
        "DOT": path.dtype,
        "IN_INT32": _sums_in_int32(path, p.block, p.k),
        "TM": tm,
        "TK": tk,
        "TN": tn,
        "EVEN_K": p.k % tk == 0,
        "BAND_SIZE": BAND,
        "DEBUG": debug,
    }
    bands = triton.cdiv(triton.cdiv(p.m, tm) + p.groups, BAND)
    grid = (bands * BAND * triton.cdiv(p.n, tn),)
    return Launch(_gmm_quantized_kernel, grid, arguments, _options(tm, tk, tn, path))


def tgmm_quantized_launch(
    p: QuantizedProblem,
    tile: Tile,
    path: DotPath,
    lhs: Pair,
    rhs: Pair,
    existing_out: Tensor | None,
    out: Tensor,
    group_sizes: Tensor,
    group_offset: Tensor,
    debug: Debug = None,
) -> Launch:
    """The kernel of `tgmm_quantized`, group_offset on the device."""
    tm, tk, tn = tile
    arguments = {
        **_operand_arguments("lhs", *lhs, p.lhs_blocks, "mk", "m", path),
        **_operand_arguments("rhs", *rhs, p.rhs_blocks, "mn", "m", path),
        "existing_out": existing_out,
        "out": out,
        "group_sizes": group_sizes.contiguous(),
        "group_offset": group_offset,
        "m": p.m,
        "k": p.k,
        "n": p.n,
        "experts": p.experts,
        "groups": p.groups,
        **strides("existing", existing_out, "gkn"),
        "DOT": path.dtype,
        "IN_INT32": _sums_in_int32(path, p.block, p.m),
        "TM": tm,
        "TK": tk,
        "TN": tn,
        "EXPERTS_BLOCK": block_of(p.experts),
        "DEBUG": debug,
    }
    grid = (p.groups * triton.cdiv(p.k, tk) * triton.cdiv(p.n, tn),)
    return Launch(_tgmm_quantized_kernel, grid, arguments, _options(tk, tm, tn, path))


@triton.jit
def _gmm_quantized_kernel(
    lhs,
    lhs_scale,
    rhs,
    rhs_scale,
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
    lhs_scale_stride_m,
    lhs_scale_stride_k,
    lhs_block_m,
    rhs_stride_g,
    rhs_stride_k,
    rhs_stride_n,
    rhs_scale_stride_g,
    rhs_scale_stride_k,
    rhs_scale_stride_n,
    rhs_block_g,
    rhs_block_n,
    existing_stride_m,
    existing_stride_n,
    LHS_BLOCK: tl.constexpr,
    RHS_BLOCK: tl.constexpr,
    LHS_FORMAT: tl.constexpr,
    RHS_FORMAT: tl.constexpr,
    DOT: tl.constexpr,
    IN_INT32: tl.constexpr,
    TM: tl.constexpr,
    TK: tl.constexpr,
    TN: tl.constexpr,
    EVEN_K: tl.constexpr,
    BAND_SIZE: tl.constexpr,
    DEBUG: tl.constexpr,
):
    """As `_gmm_kernel`. LHS_BLOCK and RHS_BLOCK are blocks along K, 0 for a scale that does not change along it."""
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
    nth = group.to(tl.int64)

    along_k = tl.arange(0, TK)[None, :]
    down_k = tl.arange(0, TK)[:, None]
    whole_tile = tl.full((), TK, tl.int64)
    at_k = tl.full((), 0, tl.int64)
    a_tile = lhs + row_offset * lhs_stride_m + along_k.to(tl.int64) * lhs_stride_k
    b_tile = rhs + nth * rhs_stride_g + down_k.to(tl.int64) * rhs_stride_k + column_offset * rhs_stride_n
    a_step = whole_tile * lhs_stride_k
    b_step = whole_tile * rhs_stride_k
    a_scales = lhs_scale
    b_scales = rhs_scale
    if lhs_scale is not None:
        a_scales += row_offset // lhs_block_m * lhs_scale_stride_m
    if rhs_scale is not None:
        b_scales += nth // rhs_block_g * rhs_scale_stride_g + column_offset // rhs_block_n * rhs_scale_stride_n

    sums = tl.full((TM, TN), 0, tl.int32 if IN_INT32 else tl.float32)
    has_rows = tl.maximum(start, first_row) < tl.minimum(end, first_row + TM)
    for first_k in range(0, tl.where(has_rows, k, 0), TK):
        if EVEN_K:
            a = tl.load(a_tile, mask=in_group, other=0.0)
            b = tl.load(b_tile, mask=in_columns, other=0.0)
        else:
            a = tl.load(a_tile, mask=in_group & (along_k < k - first_k), other=0.0)
            b = tl.load(b_tile, mask=in_columns & (down_k < k - first_k), other=0.0)
        a = _dot_operand(a, LHS_FORMAT, DOT)
        b = _dot_operand(b, RHS_FORMAT, DOT)
        if LHS_BLOCK or RHS_BLOCK:
            partial = _dot_of_step(a, b, DOT)
            if LHS_BLOCK:
                partial *= tl.load(a_scales + at_k // LHS_BLOCK * lhs_scale_stride_k, mask=in_group, other=0)
            if RHS_BLOCK:
                partial *= tl.load(b_scales + at_k // RHS_BLOCK * rhs_scale_stride_k, mask=in_columns, other=0)
            sums += partial
        else:
            sums = _added(sums, a, b, DOT, IN_INT32)
        a_tile += a_step
        b_tile += b_step
        at_k += TK

    total = sums.to(tl.float32)
    if lhs_scale is not None and LHS_BLOCK == 0:
        total *= tl.load(a_scales, mask=in_group, other=0)
    if rhs_scale is not None and RHS_BLOCK == 0:
        total *= tl.load(b_scales, mask=in_columns, other=0)
    if DEBUG is not None:
        total = DEBUG("acc", total, in_group & in_columns)
    result = total.to(out.dtype.element_ty)
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
def _tgmm_quantized_kernel(
    lhs,
    lhs_scale,
    rhs,
    rhs_scale,
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
    lhs_scale_stride_m,
    lhs_scale_stride_k,
    lhs_block_k,
    rhs_stride_m,
    rhs_stride_n,
    rhs_scale_stride_m,
    rhs_scale_stride_n,
    rhs_block_n,
    existing_stride_g,
    existing_stride_k,
    existing_stride_n,
    LHS_BLOCK: tl.constexpr,
    RHS_BLOCK: tl.constexpr,
    LHS_FORMAT: tl.constexpr,
    RHS_FORMAT: tl.constexpr,
    DOT: tl.constexpr,
    IN_INT32: tl.constexpr,
    TM: tl.constexpr,
    TK: tl.constexpr,
    TN: tl.constexpr,
    EXPERTS_BLOCK: tl.constexpr,
    DEBUG: tl.constexpr,
):
    """As `_tgmm_kernel`, but steps are counted from row 0 as the scale blocks are. LHS_BLOCK and RHS_BLOCK are blocks
    along M, 0 for a scale that does not change along it."""
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
    first_row = start // TM * TM
    at_row = first_row.to(tl.int64)
    whole_tile = tl.full((), TM, tl.int64)
    # lhs is read transposed by its addresses: tl.trans next to a wgmma has been miscompiled (Triton before 3.7.1).
    a_tile = lhs + (at_row + along_rows) * lhs_stride_m + k_offset * lhs_stride_k
    b_tile = rhs + (at_row + down_rows) * rhs_stride_m + column_offset * rhs_stride_n
    a_step = whole_tile * lhs_stride_m
    b_step = whole_tile * rhs_stride_m
    a_scales = lhs_scale
    b_scales = rhs_scale
    if lhs_scale is not None:
        a_scales += k_offset // lhs_block_k * lhs_scale_stride_k
    if rhs_scale is not None:
        b_scales += column_offset // rhs_block_n * rhs_scale_stride_n

    sums = tl.full((TK, TN), 0, tl.int32 if IN_INT32 else tl.float32)
    has_rows = start < end
    for step_row in range(first_row, tl.where(has_rows, end, first_row), TM):
        row_along = step_row + along_rows
        row_down = step_row + down_rows
        a = tl.load(a_tile, mask=in_k & (row_along >= start) & (row_along < end), other=0.0)
        b = tl.load(b_tile, mask=(row_down >= start) & (row_down < end) & in_columns, other=0.0)
        a = _dot_operand(a, LHS_FORMAT, DOT)
        b = _dot_operand(b, RHS_FORMAT, DOT)
        if LHS_BLOCK or RHS_BLOCK:
            partial = _dot_of_step(a, b, DOT)
            if LHS_BLOCK:
                partial *= tl.load(a_scales + at_row // LHS_BLOCK * lhs_scale_stride_m, mask=in_k, other=0)
            if RHS_BLOCK:
                partial *= tl.load(b_scales + at_row // RHS_BLOCK * rhs_scale_stride_m, mask=in_columns, other=0)
            sums += partial
        else:
            sums = _added(sums, a, b, DOT, IN_INT32)
        a_tile += a_step
        b_tile += b_step
        at_row += TM

    # A scale may be NaN for a group without rows, whose sums are zero.
    total = sums.to(tl.float32)
    if lhs_scale is not None and LHS_BLOCK == 0:
        total *= tl.load(a_scales, mask=at_k < tl.where(has_rows, k, 0), other=0)
    if rhs_scale is not None and RHS_BLOCK == 0:
        total *= tl.load(b_scales, mask=column < tl.where(has_rows, n, 0), other=0)
    in_out = in_k & in_columns
    if DEBUG is not None:
        total = DEBUG("acc", total, in_out & has_rows)
    nth = group.to(tl.int64)
    if existing_out is not None:
        existing_group = existing_out + nth * existing_stride_g
        existing_tile = existing_group + k_offset * existing_stride_k + column_offset * existing_stride_n
        total += tl.load(existing_tile, mask=in_out, other=0).to(tl.float32)
    out_tile = out + (nth * k + k_offset) * n + column_offset
    tl.store(out_tile, total.to(out.dtype.element_ty), mask=in_out)


@triton.jit
def _dot_operand(tile, FORMAT: tl.constexpr, DOT: tl.constexpr):
    """A tile as the dot multiplies it: of a FORMAT to be decoded, or ready as it is ("")."""
    if FORMAT != "":
        tile = decoded(tile, FORMAT)
        if DOT == "float32":
            tile = tile.to(tl.float32)
        elif DOT == "bfloat16":
            tile = tile.to(tl.bfloat16)
        else:
            tile = tile.to(tl.float16)
    return tile


@triton.jit
def _dot_of_step(a, b, DOT: tl.constexpr):
    """The products of one step, summed by the tensor core (int8: in int32) and handed over in float32."""
    partial = tl.dot(a, b, input_precision="ieee", out_dtype=tl.int32 if DOT == "int8" else tl.float32)
    return partial.to(tl.float32)


@triton.jit
def _added(sums, a, b, DOT: tl.constexpr, IN_INT32: tl.constexpr):
    """sums + a @ b. Sums of fp8 products stay outside of the tensor core, which may not keep all bits of float32."""
    if DOT == "fp8" or (DOT == "int8" and not IN_INT32):
        sums += _dot_of_step(a, b, DOT)
    else:
        sums = tl.dot(a, b, sums, input_precision="ieee", out_dtype=sums.dtype)
    return sums


def _dot_bytes(path: DotPath) -> int:
    """Bytes per element of what the dot multiplies."""
    return 1 if path.dtype in ("fp8", "int8") else int(getattr(torch, path.dtype).itemsize)


def _options(rows: int, depth: int, columns: int, path: DotPath) -> dict[str, Any]:
    """As `launch_options`, with warps for two float32 tiles: the sums, and what a step adds to them."""
    element_size = _dot_bytes(path)
    warps = max(4, min(rows * columns * max(element_size, 2) // 4096, 8))
    return launch_options(rows, depth, columns, element_size) | {"num_warps": warps}


def _step(tile: int, path: DotPath, block: int, size: int) -> int:
    """A tile of the contraction axis: deep enough for the dot, and no longer than a block of scales (32 or more)."""
    step = max(tile, LEAST_DEPTH) if _dot_bytes(path) == 1 else tile
    return min(step, block) if block < size else step


def _operand_arguments(
    name: str,
    operand: Tensor,
    scale: Tensor | None,
    blocks: tuple[int, ...],
    axes: str,
    contraction: str,
    path: DotPath,
) -> dict[str, Any]:
    """An operand with `axes` and its scale, as the kernels take them."""
    nth = axes.index(contraction)
    if operand.shape[nth] == 0:
        scale = None  # it may be as empty
    is_decoded = path.dtype not in ("fp8", "int8") and dtype_name(operand.dtype) in NARROW
    return {
        name: as_codes(operand) if is_decoded else operand,
        f"{name}_scale": scale,
        **strides(name, operand, axes),
        **strides(f"{name}_scale", scale, axes),
        **{f"{name}_block_{axis}": block for axis, block in zip(axes, blocks, strict=True) if axis != contraction},
        f"{name.upper()}_BLOCK": blocks[nth] if scale is not None and scale.shape[nth] > 1 else 0,
        f"{name.upper()}_FORMAT": dtype_name(operand.dtype) if is_decoded else "",
    }


def _sums_in_int32(path: DotPath, block: int, size: int) -> bool:
    """Whether sums over a contraction axis of `size` are int32: no scale changes, and they cannot overflow."""
    return path.dtype == "int8" and block >= size and size <= INT32_PRODUCTS
