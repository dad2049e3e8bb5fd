"""Grouped matrix multiplication of MXFP8 operands on the GPU, in Triton.

The operation is defined in `cpu_golden/quantized_gmm.py`; groups, visits and grids are those of `gpu_reference/gmm.py`.
Scales, which are powers of two, are multiplied by the matrix unit itself, or into bfloat16 operands.
"""
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators
# (kernel arguments are what Triton makes of them; every host function below is annotated)

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from gpu_reference._lib.formats import BLOCK, as_codes, mxfp8_values
from gpu_reference._lib.hardware import (
    architecture,
    bfloat16_as_float32_where_interpreted,
    block_scaled_tile,
    check_devices,
    computes_bfloat16,
)
from gpu_reference._lib.launch import Launch, launch_options
from gpu_reference._lib.operands import on_device, only_tensor, scalar, strides, values
from gpu_reference._lib.tiles import Tile, block_of, first_filled, fitted
from gpu_reference._lib.visits import make_group_metadata
from gpu_reference.gmm import (
    BAND,
    TGMM_TILES,
    gmm,
    output_tile_of_program,
    rows_of_group,
    rows_of_visit,
    store_rows,
    tgmm,
    visit_of_program,
)
from op_arguments import Tiling, dtype_name, resolve_tiling
from op_arguments.debug import Debug
from op_arguments.gmm import GroupMetadata, Problem
from op_arguments.grouped_gemm import Support, check_grouped_gemm, check_mxfp8_tile, check_strict, mxfp8_dot_dtype
from op_arguments.mxfp8 import MX_BLOCK, SWIZZLED_COLUMNS, SWIZZLED_ROWS

GROUPED_GEMM_TILES: dict[int, tuple[Tile, ...]] = {
    1: ((128, 128, 128), (64, 128, 128), (32, 128, 128), (16, 128, 128)),
    2: ((128, 32, 128), (64, 64, 128), (32, 64, 128), (16, 128, 128)),
    4: ((32, 32, 128), (16, 64, 128)),
}
GROUPED_WGRAD_TILES: dict[int, tuple[Tile, ...]] = {
    1: ((128, 128, 128), (64, 128, 128), (64, 64, 128)),
    2: TGMM_TILES[2],
    4: ((32, 64, 64),),
}
"""As GMM_TILES and TGMM_TILES, by bytes per element of what the dot multiplies. A step holds whole blocks of 32, which
are widened in registers but for 1 byte each."""

TILE_LINES = tl.constexpr(SWIZZLED_ROWS)
TILE_BLOCKS = tl.constexpr(SWIZZLED_COLUMNS)

Pair = tuple[Tensor, Tensor | None]
"""An operand and its scale."""


def grouped_gemm(
    lhs: Tensor,
    rhs: Tensor,
    group_sizes: Tensor,
    *,
    lhs_scale: Tensor | None = None,
    rhs_scale: Tensor | None = None,
    ragged: str = "lhs",
    group_offset: int | Tensor = 0,
    num_actual_groups: int | None = None,
    existing_out: Tensor | None = None,
    transpose_rhs: bool = False,
    scale_layout: str = "plain",
    preferred_element_type: torch.dtype | None = None,
    tiling: Tiling | None = None,
    strict: bool = False,
    debug: Debug = None,
) -> Tensor:
    """Grouped matmul of MXFP8 operands: forward and the data's gradient (ragged="lhs"), the weights' ("contracting").

    ragged="lhs" is `gmm`: lhs [M, K], rhs [G, K, N] (or [G, N, K] with transpose_rhs), out [M, N], summed over K.
    ragged="contracting" is `tgmm`: lhs [M, K], rhs [M, N], out [G, K, N] of num_actual_groups groups, summed over each
    group's rows. An operand is float32 or bfloat16 (both alike where neither is quantised), with None for its scale,
    or fp8 (e4m3fn, e5m2, mixed or not) with a float8_e8m0fnu for every 32 elements of the axis that is summed over, as
    `mxfp8_quantize` along that axis gives them: K, or for "contracting" all M rows, where a group that begins inside
    32 rows uses their scale for its part of them, whatever its size. scale_layout="swizzled": both scales are
    `swizzle_scales` of these, with the axis of the blocks moved to the end. All of any strides.
    group_sizes, group_offset, existing_out, rows and groups without data, and errors as `gmm` and `tgmm`;
    preferred_element_type: float32, bfloat16 or float16 (default: the unquantised lhs's dtype, else bfloat16). A
    `tiling` whose step along the sum (tk, or tm for "contracting") cuts a block of 32 is refused; tiles as `gmm`.

    Which path computes it, and why: `grouped_gemm_support`. "block_scaled": the matrix unit takes codes and scales;
    tiles are no smaller than it needs. "bfloat16" (or "float32", beside such an operand): codes are multiplied by their
    scales in registers, which is exact but at the ends of the dtype's exponents: 2^128 and beyond is ±inf there, and
    below 2^-126 are subnormals, of as many bits as bfloat16 has for them. Sums are float32. strict=True raises
    ValueError, with the reason, where the path is a fallback: "bfloat16" of two MXFP8 operands. debug as in
    `gmm_quantized`.
    """
    group_offset = scalar(group_offset)
    p = check_grouped_gemm(
        lhs,
        rhs,
        group_sizes,
        lhs_scale=lhs_scale,
        rhs_scale=rhs_scale,
        ragged=ragged,
        group_offset=group_offset,
        num_actual_groups=num_actual_groups,
        existing_out=existing_out,
        transpose_rhs=transpose_rhs,
        scale_layout=scale_layout,
        preferred_element_type=preferred_element_type,
        sizes=values(group_sizes),
    )
    operands = {"lhs": lhs, "lhs_scale": lhs_scale, "rhs": rhs, "rhs_scale": rhs_scale}
    tensors = operands | {"group_sizes": group_sizes, "existing_out": existing_out}
    device = check_devices(tensors | only_tensor("group_offset", group_offset))
    support = _support(lhs.dtype, rhs.dtype, architecture(device))
    check_strict(support, strict)
    out_dtype = getattr(torch, p.out_dtype)
    if transpose_rhs:
        rhs = rhs.transpose(1, 2)
        if rhs_scale is not None and scale_layout == "plain":
            rhs_scale = rhs_scale.transpose(1, 2)
    shared: dict[str, Any] = {
        "group_offset": group_offset,
        "existing_out": existing_out,
        "tiling": tiling,
        "debug": debug,
    }
    if support.path == "unquantised" and ragged == "contracting":
        shared |= {"num_actual_groups": num_actual_groups, "preferred_element_type": out_dtype}
        return tgmm(lhs, rhs, group_sizes, **shared)
    if support.path == "unquantised":
        return gmm(lhs, rhs, group_sizes, preferred_element_type=out_dtype, **shared)
    multiply = _grouped_wgrad if ragged == "contracting" else _grouped_gemm
    pairs = (lhs, lhs_scale), (rhs, rhs_scale)
    swizzled = scale_layout == "swizzled"
    return multiply(p, *pairs, swizzled, group_sizes, group_offset, existing_out, tiling, debug, out_dtype)


@bfloat16_as_float32_where_interpreted()
def _grouped_gemm(
    p: Problem,
    lhs: Pair,
    rhs: Pair,
    swizzled: bool,
    group_sizes: Tensor,
    group_offset: int | Tensor,
    existing_out: Tensor | None,
    tiling: Tiling | None,
    debug: Debug,
    out_dtype: torch.dtype,
) -> Tensor:
    """`grouped_gemm` with ragged="lhs" of checked arguments: rhs and its plain scale as of [G, K, N]."""
    device = lhs[0].device
    tile, dot = _tile_and_dot(p, lhs, rhs, "lhs", tiling)
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
        grouped_gemm_launch(p, tile, dot, lhs, rhs, swizzled, existing_out, out, metadata, offset, debug).run(device)
    return out


@bfloat16_as_float32_where_interpreted()
def _grouped_wgrad(
    p: Problem,
    lhs: Pair,
    rhs: Pair,
    swizzled: bool,
    group_sizes: Tensor,
    group_offset: int | Tensor,
    existing_out: Tensor | None,
    tiling: Tiling | None,
    debug: Debug,
    out_dtype: torch.dtype,
) -> Tensor:
    """`grouped_gemm` with ragged="contracting" of checked arguments."""
    device = lhs[0].device
    tile, dot = _tile_and_dot(p, lhs, rhs, "contracting", tiling)
    out = torch.empty(p.groups, p.k, p.n, dtype=out_dtype, device=device)
    if out.numel():
        offset = on_device(group_offset, device)
        grouped_wgrad_launch(p, tile, dot, lhs, rhs, swizzled, existing_out, out, group_sizes, offset, debug).run(
            device
        )
    return out


def _tile_and_dot(p: Problem, lhs: Pair, rhs: Pair, ragged: str, tiling: Tiling | None) -> tuple[Tile, str]:
    """The tile of `grouped_gemm`, and what its dot multiplies: a path, or float32 where kernels have no bfloat16."""
    device = lhs[0].device
    target = architecture(device)
    path = _support(lhs[0].dtype, rhs[0].dtype, target).path
    return grouped_gemm_tile(p, path, ragged, tiling, target), path if computes_bfloat16(device) else "float32"


def grouped_gemm_support(
    lhs: torch.dtype, rhs: torch.dtype, *, scale_layout: str = "plain", target: str | None = None
) -> Support:
    """How `grouped_gemm` multiplies operands of these dtypes on `target`, whatever their shapes, and why.

    target: see `gpu_reference._lib.hardware`; default: the device at hand. A pure function.
    Kernels read scales of either layout where they are. Raises TypeError for two unlike dtypes neither of which is
    quantised.
    """
    return _support(lhs, rhs, target or architecture())


def grouped_gemm_tile(p: Problem, path: str, ragged: str, tiling: Tiling | None, target: str | None) -> Tile:
    """(tm, tk, tn) of `grouped_gemm` on a path: as `gmm_tile` and `tgmm_tile`, no step shorter than a block of 32, and
    for "block_scaled" no tile smaller than the matrix unit of `target` takes.

    Raises ValueError where the caller's step along the sum is neither a multiple nor a divisor of 32.
    """
    rows, depth = (_least_tile(target) if path == "block_scaled" else None) or (16, MX_BLOCK)
    if ragged == "contracting":
        default = GROUPED_WGRAD_TILES[_mxfp8_dot_bytes(path)][0]
        tile = resolve_tiling(tiling, lambda m, k, n: default, p.m, p.k, p.n)
        check_mxfp8_tile("tm", tile[0], p.m)
        tm, tk, tn = fitted(tile, p)
        return max(tm, depth), max(tk, rows), tn
    tile = resolve_tiling(tiling, first_filled(GROUPED_GEMM_TILES[_mxfp8_dot_bytes(path)], p), p.m, p.k, p.n)
    check_mxfp8_tile("tk", tile[1], p.k)
    tm, tk, tn = fitted(tile, p)
    return max(tm, rows), max(tk, depth), tn


def grouped_gemm_launch(
    p: Problem,
    tile: Tile,
    dot: str,
    lhs: Pair,
    rhs: Pair,
    swizzled: bool,
    existing_out: Tensor | None,
    out: Tensor,
    metadata: GroupMetadata,
    group_offset: Tensor,
    debug: Debug = None,
) -> Launch:
    """The main kernel of `grouped_gemm` with ragged="lhs": rhs and its plain scale as of [G, K, N], group_offset on the
    device; dot is what it multiplies, as the paths of `grouped_gemm_support`."""
    tm, tk, tn = tile
    arguments = {
        **_mxfp8_arguments("lhs", *lhs, "mk", "mk", swizzled),
        **_mxfp8_arguments("rhs", *rhs, "gkn", "gnk" if swizzled else "gkn", swizzled),
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
        "SWIZZLED": swizzled,
        "DOT": dot,
        "TM": tm,
        "TK": tk,
        "TN": tn,
        "EVEN_K": p.k % tk == 0,
        "BAND_SIZE": BAND,
        "DEBUG": debug,
    }
    bands = triton.cdiv(triton.cdiv(p.m, tm) + p.groups, BAND)
    grid = (bands * BAND * triton.cdiv(p.n, tn),)
    return Launch(_grouped_gemm_kernel, grid, arguments, _mxfp8_options(tm, tk, tn, dot))


def grouped_wgrad_launch(
    p: Problem,
    tile: Tile,
    dot: str,
    lhs: Pair,
    rhs: Pair,
    swizzled: bool,
    existing_out: Tensor | None,
    out: Tensor,
    group_sizes: Tensor,
    group_offset: Tensor,
    debug: Debug = None,
) -> Launch:
    """The kernel of `grouped_gemm` with ragged="contracting"; arguments as `grouped_gemm_launch`."""
    tm, tk, tn = tile
    arguments = {
        **_mxfp8_arguments("lhs", *lhs, "mk", "km" if swizzled else "mk", swizzled),
        **_mxfp8_arguments("rhs", *rhs, "mn", "nm" if swizzled else "mn", swizzled),
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
        "SWIZZLED": swizzled,
        "DOT": dot,
        "TM": tm,
        "TK": tk,
        "TN": tn,
        "EXPERTS_BLOCK": block_of(p.experts),
        "DEBUG": debug,
    }
    grid = (p.groups * triton.cdiv(p.k, tk) * triton.cdiv(p.n, tn),)
    return Launch(_grouped_wgrad_kernel, grid, arguments, _mxfp8_options(tk, tm, tn, dot))


@triton.jit
def _grouped_gemm_kernel(
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
    rhs_stride_g,
    rhs_stride_k,
    rhs_stride_n,
    rhs_scale_stride_g,
    rhs_scale_stride_k,
    rhs_scale_stride_n,
    existing_stride_m,
    existing_stride_n,
    LHS_FORMAT: tl.constexpr,
    RHS_FORMAT: tl.constexpr,
    SWIZZLED: tl.constexpr,
    DOT: tl.constexpr,
    TM: tl.constexpr,
    TK: tl.constexpr,
    TN: tl.constexpr,
    EVEN_K: tl.constexpr,
    BAND_SIZE: tl.constexpr,
    DEBUG: tl.constexpr,
):
    """As `_gmm_kernel`, of MXFP8 operands, which have a FORMAT; strides of swizzled scales are those of their tiles."""
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
    a_tile = lhs + row_offset * lhs_stride_m + along_k.to(tl.int64) * lhs_stride_k
    b_tile = rhs + nth * rhs_stride_g + down_k.to(tl.int64) * rhs_stride_k + column_offset * rhs_stride_n
    a_step = whole_tile * lhs_stride_k
    b_step = whole_tile * rhs_stride_k
    b_scale = rhs_scale
    if rhs_scale is not None:
        b_scale += nth * rhs_scale_stride_g

    sums = tl.full((TM, TN), 0.0, tl.float32)
    has_rows = tl.maximum(start, first_row) < tl.minimum(end, first_row + TM)
    end_k = tl.where(has_rows, k, 0)
    for first_k in range(0, end_k, TK):
        if EVEN_K:
            a = tl.load(a_tile, mask=in_group, other=0)
            b = tl.load(b_tile, mask=in_columns, other=0)
        else:
            a = tl.load(a_tile, mask=in_group & (along_k < k - first_k), other=0)
            b = tl.load(b_tile, mask=in_columns & (down_k < k - first_k), other=0)
        block = first_k // BLOCK + tl.arange(0, TK // BLOCK)
        is_block = block * BLOCK < k
        sums = _mxfp8_added(
            sums,
            a,
            b,
            row,
            column,
            in_group,
            in_columns,
            block,
            is_block,
            lhs_scale,
            lhs_scale_stride_m,
            lhs_scale_stride_k,
            b_scale,
            rhs_scale_stride_n,
            rhs_scale_stride_k,
            LHS_FORMAT,
            RHS_FORMAT,
            SWIZZLED,
            DOT,
        )
        a_tile += a_step
        b_tile += b_step

    if DEBUG is not None:
        sums = DEBUG("acc", sums, in_group & in_columns)
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
def _grouped_wgrad_kernel(
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
    rhs_stride_m,
    rhs_stride_n,
    rhs_scale_stride_m,
    rhs_scale_stride_n,
    existing_stride_g,
    existing_stride_k,
    existing_stride_n,
    LHS_FORMAT: tl.constexpr,
    RHS_FORMAT: tl.constexpr,
    SWIZZLED: tl.constexpr,
    DOT: tl.constexpr,
    TM: tl.constexpr,
    TK: tl.constexpr,
    TN: tl.constexpr,
    EXPERTS_BLOCK: tl.constexpr,
    DEBUG: tl.constexpr,
):
    """As `_tgmm_kernel`, of operands as in `_grouped_gemm_kernel`; steps are counted from row 0, as blocks are."""
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

    sums = tl.full((TK, TN), 0.0, tl.float32)
    for step_row in range(first_row, tl.where(start < end, end, first_row), TM):
        row_along = step_row + along_rows
        row_down = step_row + down_rows
        a = tl.load(a_tile, mask=in_k & (row_along >= start) & (row_along < end), other=0)
        b = tl.load(b_tile, mask=(row_down >= start) & (row_down < end) & in_columns, other=0)
        # A block without rows of the group may have a scale of NaN, and NaN times the zeros here is NaN.
        block = step_row // BLOCK + tl.arange(0, TM // BLOCK)
        is_block = (block * BLOCK + BLOCK > start) & (block * BLOCK < end)
        sums = _mxfp8_added(
            sums,
            a,
            b,
            at_k,
            column,
            in_k,
            in_columns,
            block,
            is_block,
            lhs_scale,
            lhs_scale_stride_k,
            lhs_scale_stride_m,
            rhs_scale,
            rhs_scale_stride_n,
            rhs_scale_stride_m,
            LHS_FORMAT,
            RHS_FORMAT,
            SWIZZLED,
            DOT,
        )
        a_tile += a_step
        b_tile += b_step

    in_out = in_k & in_columns
    if DEBUG is not None:
        sums = DEBUG("acc", sums, in_out & (start < end))
    nth = group.to(tl.int64)
    if existing_out is not None:
        existing_group = existing_out + nth * existing_stride_g
        existing_tile = existing_group + k_offset * existing_stride_k + column_offset * existing_stride_n
        sums += tl.load(existing_tile, mask=in_out, other=0).to(tl.float32)
    out_tile = out + (nth * k + k_offset) * n + column_offset
    tl.store(out_tile, sums.to(out.dtype.element_ty), mask=in_out)


@triton.jit
def _mxfp8_added(
    sums,
    a,
    b,
    row,
    column,
    in_rows,
    in_columns,
    block,
    is_block,
    lhs_scale,
    lhs_stride_line,
    lhs_stride_block,
    rhs_scale,
    rhs_stride_line,
    rhs_stride_block,
    LHS_FORMAT: tl.constexpr,
    RHS_FORMAT: tl.constexpr,
    SWIZZLED: tl.constexpr,
    DOT: tl.constexpr,
):
    """sums + a @ b of tiles as they are loaded, times the scales of their rows, columns and blocks along the sum.

    Scales are read in_rows, in_columns and where it is_block; the matrix unit takes those of b as [columns, blocks].
    """
    along, down = block[None, :], block[:, None]
    a_read = in_rows & is_block[None, :]
    a_scales = _scales(lhs_scale, row, along, a_read, lhs_stride_line, lhs_stride_block, SWIZZLED)
    if DOT == "block_scaled":
        b_read = in_columns.trans() & is_block[None, :]
        b_scales = _scales(rhs_scale, column.trans(), along, b_read, rhs_stride_line, rhs_stride_block, SWIZZLED)
        A: tl.constexpr = tl.constexpr("e4m3" if LHS_FORMAT == "float8_e4m3fn" else "e5m2")
        B: tl.constexpr = tl.constexpr("e4m3" if RHS_FORMAT == "float8_e4m3fn" else "e5m2")
        sums = tl.dot_scaled(a, a_scales, A, b, b_scales, B, sums)
    else:
        b_read = in_columns & is_block[:, None]
        b_scales = _scales(rhs_scale, column, down, b_read, rhs_stride_line, rhs_stride_block, SWIZZLED)
        a = _mxfp8_operand(a, a_scales, 1, LHS_FORMAT, DOT)
        b = _mxfp8_operand(b, b_scales, 0, RHS_FORMAT, DOT)
        sums = tl.dot(a, b, sums, input_precision="ieee")
    return sums


@triton.jit
def _scales(scale, line, block, is_read, stride_line, stride_block, SWIZZLED: tl.constexpr):
    """The scales of blocks of lines (rows of lhs, columns of rhs), in bytes; 1 where none is read, or there is none."""
    line = line.to(tl.int64)
    block = block.to(tl.int64)
    if scale is None:
        scales = tl.full(is_read.shape, 127, tl.uint8)
    else:
        if SWIZZLED:
            in_tile = line % 32 * 16 + line % TILE_LINES // 32 * TILE_BLOCKS + block % TILE_BLOCKS
            offset = line // TILE_LINES * stride_line + block // TILE_BLOCKS * stride_block + in_tile
        else:
            offset = line * stride_line + block * stride_block
        scales = tl.load(scale + offset, mask=is_read, other=127)
    return scales


@triton.jit
def _mxfp8_operand(tile, scales, AXIS: tl.constexpr, FORMAT: tl.constexpr, DOT: tl.constexpr):
    """A tile as the dot multiplies it: codes of a FORMAT times their scales along AXIS, or ready but for its dtype."""
    if FORMAT != "":
        tile = mxfp8_values(tile, scales, AXIS, FORMAT)
    return tile.to(tl.bfloat16 if DOT == "bfloat16" else tl.float32)


def _support(lhs: torch.dtype, rhs: torch.dtype, target: str | None) -> Support:
    """`grouped_gemm_support`, with None for a target where kernels are interpreted."""
    dtype = mxfp8_dot_dtype(lhs, rhs)
    if {dtype_name(lhs), dtype_name(rhs)} == {dtype}:
        return Support("unquantised", f"gmm and tgmm multiply {dtype}", fallback=False)
    if dtype != "mxfp8":
        return Support(dtype, f"codes times scales are {dtype} as the operand beside them", fallback=False)
    if _least_tile(target) is None:
        reason = f"the matrix unit of {target} takes no block scales; bfloat16 holds every code times its scale"
        return Support("bfloat16", reason, fallback=True)
    if target is None:
        return Support("block_scaled", "interpreted, as on a matrix unit that takes block scales", fallback=False)
    return Support("block_scaled", f"the matrix unit of {target} takes codes and their block scales", fallback=False)


def _least_tile(target: str | None) -> tuple[int, int] | None:
    """As `block_scaled_tile`; interpreted: any tile of whole blocks."""
    return (16, MX_BLOCK) if target is None else block_scaled_tile(target)


def _mxfp8_dot_bytes(dot: str) -> int:
    """Bytes per element of what the dot multiplies."""
    return 1 if dot == "block_scaled" else int(getattr(torch, dot).itemsize)


def _mxfp8_options(rows: int, depth: int, columns: int, dot: str) -> dict[str, Any]:
    """As `launch_options`, with warps for the sums, and for float32's chains of FMAs, which a step of 32 makes long."""
    warps = 8 if dot == "float32" else max(4, min(rows * columns // 2048, 8))
    return launch_options(rows, depth, columns, _mxfp8_dot_bytes(dot)) | {"num_warps": warps}


def _mxfp8_arguments(
    name: str, operand: Tensor, scale: Tensor | None, axes: str, scale_axes: str, swizzled: bool
) -> dict[str, Any]:
    """An operand with `axes` and its scale with `scale_axes` (swizzled: of its tiles), as the kernels take them."""
    if scale is not None:
        scale = scale.view(torch.uint8)
        scale = scale.contiguous() if swizzled else scale
    lead = None if scale is None else scale[..., 0, 0] if swizzled else scale
    return {
        name: operand if scale is None else as_codes(operand),
        f"{name}_scale": scale,
        **strides(name, operand, axes),
        **strides(f"{name}_scale", lead, scale_axes),
        f"{name.upper()}_FORMAT": "" if scale is None else dtype_name(operand.dtype),
    }
