"""Grouped matrix multiplication of MXFP8 operands on the GPU, in Triton.

The operation is defined in `cpu_golden/grouped_gemm.py`; groups, visits and grids are those of `gpu_reference/gmm.py`.
Scales, which are powers of two, are multiplied by the matrix unit itself, or into bfloat16 operands.
"""
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators
# (kernel arguments are what Triton makes of them; every host function below is annotated)

from functools import partial
from typing import Any, NamedTuple

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
from gpu_reference._lib.operands import Operand, operand, scalar, values
from gpu_reference._lib.probe import INTERPRETED, probe
from gpu_reference._lib.products import (
    arguments_of_groups,
    arguments_of_rows,
    first_tiles,
    grid_of_groups,
    grid_of_rows,
    load_step,
    load_visit,
    product_of_groups,
    product_of_rows,
    region_of_program,
    region_of_visit,
    store_group,
    store_rows,
    visit_of_program,
)
from gpu_reference._lib.tiles import Candidate, Tile, first_filled, fitted
from gpu_reference.gmm import TGMM_TILES, gmm, tgmm
from op_arguments import Tiling, dtype_name, resolve_tiling
from op_arguments.gmm import GroupMetadata, Problem
from op_arguments.grouped_gemm import Support, check_grouped_gemm, check_mxfp8_tile, check_strict, mxfp8_dot_dtype
from op_arguments.mxfp8 import MX_BLOCK, SWIZZLED_COLUMNS, SWIZZLED_ROWS

GROUPED_GEMM_TILES: dict[int, tuple[Candidate, ...]] = {
    1: ((128, 128, 128), (64, 128, 128), (32, 128, 128), (16, 128, 128)),
    2: ((128, 32, 128), (64, 64, 128), (32, 64, 128), (16, 128, 128)),
    4: ((32, 32, 128), (16, 64, 128)),
}
GROUPED_WGRAD_TILES: dict[int, tuple[Candidate, ...]] = {
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


class Scaling(NamedTuple):
    """How a kernel multiplies MXFP8 operands, known when it is compiled.

    dot: a path of `grouped_gemm_support`, or float32 where kernels have no bfloat16. Of each operand the fp8 format, ""
    of one that is not quantised. swizzled: whether strides of scales are those of their tiles.
    """

    dot: str
    lhs_format: str
    rhs_format: str
    swizzled: bool


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
) -> Tensor:
    """Grouped matmul of MXFP8 operands: forward and the data's gradient (ragged="lhs"), the weights' ("contracting").

    Arguments, result and errors as `cpu_golden.grouped_gemm.grouped_gemm`, strides, tiling and further errors as `gmm`;
    here: which path computes it, and why: `grouped_gemm_support`. "block_scaled": the matrix unit takes codes and
    scales; tiles are no smaller than it needs. "bfloat16" (or "float32", beside such an operand): codes are multiplied
    by their scales in registers, which is exact but at the ends of the dtype's exponents: 2^128 and beyond is ±inf
    there, and below 2^-126 are subnormals, of as many bits as bfloat16 has for them. Sums are float32. strict=True
    raises ValueError, with the reason, where the path is a fallback: "bfloat16" of two MXFP8 operands. Probes as in
    `gmm_quantized`.
    """
    group_offset, sizes = scalar(group_offset), values(group_sizes)
    p = check_grouped_gemm(
        lhs, rhs, group_sizes, lhs_scale, rhs_scale, ragged, group_offset, num_actual_groups, existing_out,
        transpose_rhs, scale_layout, preferred_element_type, sizes,
    )  # fmt: skip
    tensors = {"lhs": lhs, "lhs_scale": lhs_scale, "rhs": rhs, "rhs_scale": rhs_scale, "group_sizes": group_sizes}
    device = check_devices(tensors | {"existing_out": existing_out, "group_offset": group_offset})
    support = _support(lhs.dtype, rhs.dtype, architecture(device))
    check_strict(support, strict)
    out_dtype = getattr(torch, p.out_dtype)
    if transpose_rhs:
        rhs = rhs.transpose(1, 2)
        if rhs_scale is not None and scale_layout == "plain":
            rhs_scale = rhs_scale.transpose(1, 2)
    shared: dict[str, Any] = {"group_offset": group_offset, "existing_out": existing_out, "tiling": tiling}
    if support.path == "unquantised" and ragged == "contracting":
        shared |= {"num_actual_groups": num_actual_groups, "preferred_element_type": out_dtype}
        return tgmm(lhs, rhs, group_sizes, **shared)
    if support.path == "unquantised":
        return gmm(lhs, rhs, group_sizes, preferred_element_type=out_dtype, **shared)
    multiply = _grouped_wgrad if ragged == "contracting" else _grouped_gemm
    pairs = (lhs, lhs_scale), (rhs, rhs_scale)
    swizzled = scale_layout == "swizzled"
    return multiply(p, *pairs, swizzled, group_sizes, group_offset, existing_out, tiling, out_dtype)


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
    out_dtype: torch.dtype,
) -> Tensor:
    """`grouped_gemm` with ragged="lhs" of checked arguments: rhs and its plain scale as of [G, K, N]."""
    tile, dot = _tile_and_dot(p, lhs, rhs, "lhs", tiling)
    launch = partial(grouped_gemm_launch, p, tile, dot, lhs, rhs, swizzled, existing_out)
    return product_of_rows(p, tile.m, group_sizes, group_offset, existing_out, out_dtype, launch)


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
    out_dtype: torch.dtype,
) -> Tensor:
    """`grouped_gemm` with ragged="contracting" of checked arguments."""
    tile, dot = _tile_and_dot(p, lhs, rhs, "contracting", tiling)
    launch = partial(grouped_wgrad_launch, p, tile, dot, lhs, rhs, swizzled, existing_out)
    return product_of_groups(p, group_sizes, group_offset, out_dtype, launch)


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
        default = GROUPED_WGRAD_TILES[_dot_bytes(path)][0]
        tile = resolve_tiling(tiling, lambda m, k, n: default, p.m, p.k, p.n)
        check_mxfp8_tile("tm", tile[0], p.m)
        tm, tk, tn = fitted(tile, p)
        return Tile(max(tm, depth), max(tk, rows), tn)
    tile = resolve_tiling(tiling, first_filled(GROUPED_GEMM_TILES[_dot_bytes(path)], p), p.m, p.k, p.n)
    check_mxfp8_tile("tk", tile[1], p.k)
    tm, tk, tn = fitted(tile, p)
    return Tile(max(tm, rows), max(tk, depth), tn)


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
) -> Launch:
    """The main kernel of `grouped_gemm` with ragged="lhs": rhs and its plain scale as of [G, K, N], group_offset on the
    device; dot is what it multiplies, as the paths of `grouped_gemm_support`."""
    arguments = {
        "lhs": _operand(*lhs, swizzled, of_rows=True),
        "rhs": _operand(*rhs, swizzled, of_rows=False),
        **arguments_of_rows(p, tile, existing_out, out, metadata, group_offset),
        "SCALING": Scaling(dot, _format(*lhs), _format(*rhs), swizzled),
    }
    options = _options(tile.m, tile.k, tile.n, dot)
    return Launch(_grouped_gemm_kernel, grid_of_rows(p, tile), arguments, options)


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
) -> Launch:
    """The kernel of `grouped_gemm` with ragged="contracting"; arguments as `grouped_gemm_launch`."""
    arguments = {
        "lhs": _operand(*lhs, swizzled, of_rows=True, transposed=True),
        "rhs": _operand(*rhs, swizzled, of_rows=False),
        **arguments_of_groups(p, tile, existing_out, out, group_sizes, group_offset),
        "SCALING": Scaling(dot, _format(*lhs), _format(*rhs), swizzled),
    }
    options = _options(tile.k, tile.m, tile.n, dot)
    return Launch(_grouped_wgrad_kernel, grid_of_groups(p, tile), arguments, options)


@triton.jit
def _grouped_gemm_kernel(
    lhs,
    rhs,
    existing_out,
    out,
    metadata,
    shard,
    sizes,
    TILE: tl.constexpr,
    EVEN_K: tl.constexpr,
    SCALING: tl.constexpr,
):
    """As `gpu_reference.gmm._gmm_kernel`."""
    nth, tile_n = visit_of_program(sizes.n, TILE.n)
    if nth >= tl.load(metadata.num_visits):
        return
    visit = load_visit(nth, metadata, shard)
    region = region_of_visit(visit, tile_n, sizes, TILE)
    a_tile, b_tile, a_step, b_step = first_tiles(lhs, rhs, region, 0, TILE.k)
    sums = tl.full((TILE.m, TILE.n), 0.0, tl.float32)
    for first_k in range(0, region.end, TILE.k):
        a, b = load_step(a_tile, b_tile, region, first_k, TILE.k, True, EVEN_K)
        block = first_k // BLOCK + tl.arange(0, TILE.k // BLOCK)
        sums = _added(sums, a, b, lhs, rhs, region, block, block * BLOCK < sizes.k, SCALING)
        a_tile += a_step
        b_tile += b_step

    if INTERPRETED:
        sums = probe("acc", sums, region.in_rows & region.in_columns)
    store_rows(sums, out, existing_out, visit, region, sizes, shard)


@triton.jit
def _grouped_wgrad_kernel(
    lhs,
    rhs,
    existing_out,
    out,
    group_sizes,
    shard,
    sizes,
    TILE: tl.constexpr,
    EXPERTS_BLOCK: tl.constexpr,
    SCALING: tl.constexpr,
):
    """As `gpu_reference.gmm._tgmm_kernel`, but steps are counted from row 0 as the scale blocks are."""
    region = region_of_program(group_sizes, sizes, shard, TILE, EXPERTS_BLOCK)
    has_rows = region.start < region.end
    first_row = region.start // TILE.m * TILE.m
    # lhs is read transposed by its addresses: tl.trans next to a wgmma has been miscompiled (Triton before 3.7.1).
    a_tile, b_tile, a_step, b_step = first_tiles(lhs, rhs, region, first_row.to(tl.int64), TILE.m)
    sums = tl.full((TILE.k, TILE.n), 0.0, tl.float32)
    for step_row in range(first_row, tl.where(has_rows, region.end, first_row), TILE.m):
        a, b = load_step(a_tile, b_tile, region, step_row, TILE.m, False, False)
        # A block without rows of the group may have a scale of NaN, and NaN times the zeros here is NaN.
        block = step_row // BLOCK + tl.arange(0, TILE.m // BLOCK)
        is_block = (block * BLOCK + BLOCK > region.start) & (block * BLOCK < region.end)
        sums = _added(sums, a, b, lhs, rhs, region, block, is_block, SCALING)
        a_tile += a_step
        b_tile += b_step

    if INTERPRETED:
        sums = probe("acc", sums, region.in_rows & region.in_columns & has_rows)
    store_group(sums, out, existing_out, region, sizes)


@triton.jit
def _added(sums, a, b, lhs, rhs, region, block, is_block, SCALING: tl.constexpr):
    """sums + a @ b of tiles as they are loaded, times the scales of their rows, columns and blocks along the sum.

    Scales are read in the region and where it is_block; the matrix unit takes those of b as [columns, blocks].
    """
    along, down = block[None, :], block[:, None]
    a_read = region.in_rows & is_block[None, :]
    a_scales = _scales(lhs.scale, region.group, region.row, along, a_read, True, SCALING.swizzled)
    if SCALING.dot == "block_scaled":
        b_read = region.in_columns.trans() & is_block[None, :]
        b_scales = _scales(rhs.scale, region.group, region.column.trans(), along, b_read, False, SCALING.swizzled)
        A: tl.constexpr = tl.constexpr("e4m3" if SCALING.lhs_format == "float8_e4m3fn" else "e5m2")
        B: tl.constexpr = tl.constexpr("e4m3" if SCALING.rhs_format == "float8_e4m3fn" else "e5m2")
        sums = tl.dot_scaled(a, a_scales, A, b, b_scales, B, sums)
    else:
        b_read = region.in_columns & is_block[:, None]
        b_scales = _scales(rhs.scale, region.group, region.column, down, b_read, False, SCALING.swizzled)
        a = _mxfp8_operand(a, a_scales, 1, SCALING.lhs_format, SCALING.dot)
        b = _mxfp8_operand(b, b_scales, 0, SCALING.rhs_format, SCALING.dot)
        sums = tl.dot(a, b, sums, input_precision="ieee")
    return sums


@triton.jit
def _scales(scale, group, line, block, is_read, OF_ROWS: tl.constexpr, SWIZZLED: tl.constexpr):
    """The scales of blocks of a group's lines (OF_ROWS of lhs, or columns of rhs), in bytes; 1 where none is read, or
    there is none."""
    line = line.to(tl.int64)
    block = block.to(tl.int64)
    if scale is None:
        scales = tl.full(is_read.shape, 127, tl.uint8)
    else:
        first = scale.data
        if scale.group is not None:
            first += group.to(tl.int64) * scale.group
        stride_line = scale.row if OF_ROWS else scale.column
        stride_block = scale.column if OF_ROWS else scale.row
        if SWIZZLED:
            in_tile = line % 32 * 16 + line % TILE_LINES // 32 * TILE_BLOCKS + block % TILE_BLOCKS
            offset = line // TILE_LINES * stride_line + block // TILE_BLOCKS * stride_block + in_tile
        else:
            offset = line * stride_line + block * stride_block
        scales = tl.load(first + offset, mask=is_read, other=127)
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


def _dot_bytes(dot: str) -> int:
    """Bytes per element of what the dot multiplies."""
    return 1 if dot == "block_scaled" else int(getattr(torch, dot).itemsize)


def _options(rows: int, depth: int, columns: int, dot: str) -> dict[str, Any]:
    """As `launch_options`, with warps for the sums, and for float32's chains of FMAs, which a step of 32 makes long."""
    warps = 8 if dot == "float32" else max(4, min(rows * columns // 2048, 8))
    return launch_options(rows, depth, columns, _dot_bytes(dot)) | {"num_warps": warps}


def _operand(
    values: Tensor, scale: Tensor | None, swizzled: bool, *, of_rows: bool, transposed: bool = False
) -> Operand:
    """An operand and its scale, swizzled or not, which has lines of rows (lhs) or of columns."""
    if scale is None:
        return operand(values, transposed=transposed)
    scale = scale.view(torch.uint8)
    if swizzled:  # strides are those of tiles, of which the lines come first
        scale = scale.contiguous()
        scales = operand(scale.select(-1, 0).select(-1, 0), transposed=not of_rows)._replace(data=scale)
    else:
        scales = operand(scale, transposed=transposed)
    return operand(as_codes(values), transposed=transposed, scale=scales)


def _format(values: Tensor, scale: Tensor | None) -> str:
    """The fp8 format of an operand, "" of one that is not quantised."""
    return "" if scale is None else dtype_name(values.dtype)
