"""Grouped matrix multiplication of MXFP8 operands on the GPU, in Triton.

The operation is defined in `cpu_golden/grouped_gemm.py`; groups, visits and grids are those of `gpu_reference/gmm.py`.
Scales, which are powers of two, are multiplied by the matrix unit itself, or into bfloat16 operands.
"""
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators
# (kernel arguments are what Triton makes of them; every host function below is annotated)

from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from gpu_reference._lib.formats import BLOCK, as_codes, mxfp8_values
from gpu_reference._lib.hardware import architecture, block_scaled_tile, computes_bfloat16
from gpu_reference._lib.launch import launch_options
from gpu_reference._lib.operands import Operand, groups_of, operand
from gpu_reference._lib.plans import Given, OfGroups, OfRows, product
from gpu_reference._lib.products import multiply_groups, multiply_rows
from gpu_reference._lib.tiles import Candidate, Tile, chosen, first_filled, fitted, step_of
from gpu_reference.gmm import TGMM_TILES, gmm, tgmm
from op_arguments import Tiling, dtype_name
from op_arguments.gmm import Problem
from op_arguments.grouped_gemm import GroupedGemmOptions, Support, check_grouped_gemm, check_strict
from op_arguments.mxfp8 import MX_BLOCK, SWIZZLED_COLUMNS, SWIZZLED_ROWS, check_mxfp8_tile, mxfp8_dot_dtype
from op_arguments.options import options_of

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


class Scaling(NamedTuple):
    """How a kernel multiplies MXFP8 operands, known when it is compiled.

    dot: a path of `grouped_gemm_support`, or float32 where kernels have no bfloat16. Of each operand the fp8 format, ""
    of one that is not quantised. swizzled: whether strides of scales are those of their tiles.
    """

    dot: str
    lhs_format: str
    rhs_format: str
    swizzled: bool


@dataclass(frozen=True, kw_only=True)
class _Options(GroupedGemmOptions):
    strict: bool = False


@options_of(_Options)
def grouped_gemm(lhs: Tensor, rhs: Tensor, group_sizes: Tensor, **options: Any) -> Tensor:
    """Grouped matmul of MXFP8 operands: forward and the data's gradient (ragged="lhs"), the weights' ("contracting").

    Arguments, result and errors as `cpu_golden.grouped_gemm.grouped_gemm`, strides, tiling and further errors as `gmm`;
    here: which path computes it, and why: `grouped_gemm_support`. "block_scaled": the matrix unit takes codes and
    scales; tiles are no smaller than it needs. "bfloat16" (or "float32", beside such an operand): codes are multiplied
    by their scales in registers, which is exact but at the ends of the dtype's exponents: 2^128 and beyond is ±inf
    there, and below 2^-126 are subnormals, of as many bits as bfloat16 has for them. Sums are float32. strict=True
    raises ValueError, with the reason, where the path is a fallback: "bfloat16" of two MXFP8 operands. Probes as in
    `gmm_quantized`.
    """
    o = _Options(**options)
    p = check_grouped_gemm(lhs, rhs, groups_of(group_sizes, o.group_offset), o)
    target = architecture(lhs.device)
    support = _support(lhs.dtype, rhs.dtype, target)
    check_strict(support, o.strict)
    rhs_scale = o.rhs_scale
    if o.transpose_rhs:
        rhs = rhs.transpose(1, 2)
        if rhs_scale is not None and not o.swizzled:
            rhs_scale = rhs_scale.transpose(1, 2)
    if support.path == "unquantised":
        shared: dict[str, Any] = {"group_offset": o.group_offset, "existing_out": o.existing_out, "tiling": o.tiling}
        shared["preferred_element_type"] = getattr(torch, p.out_dtype)
        if o.contracting:
            return tgmm(lhs, rhs, group_sizes, num_actual_groups=o.num_actual_groups, **shared)
        return gmm(lhs, rhs, group_sizes, **shared)
    operands = {"lhs": lhs, "lhs_scale": o.lhs_scale, "rhs": rhs, "rhs_scale": rhs_scale}
    plan = partial(grouped_gemm_plan, ragged=o.ragged, swizzled=o.swizzled, target=target)
    return product(plan, p, operands, Given(group_sizes, o.group_offset, o.existing_out, o.tiling))


def grouped_gemm_plan(
    p: Problem,
    lhs: Tensor,
    lhs_scale: Tensor | None,
    rhs: Tensor,
    rhs_scale: Tensor | None,
    *,
    ragged: str,
    swizzled: bool,
    target: str | None,
    tiling: Tiling | None = None,
) -> OfRows | OfGroups:
    """`grouped_gemm` on `target`: for ragged="lhs" rhs and its plain scale as of [G, K, N]. Raises as
    `grouped_gemm_tile`."""
    contracting = ragged == "contracting"
    path = _support(lhs.dtype, rhs.dtype, target).path
    tile = grouped_gemm_tile(p, path, ragged, tiling, target)
    dot = path if computes_bfloat16(lhs.device) else "float32"
    arguments = {
        "lhs": _operand(lhs, lhs_scale, swizzled, of_rows=True, transposed=contracting),
        "rhs": _operand(rhs, rhs_scale, swizzled, of_rows=False),
        "SCALING": Scaling(dot, _format(lhs, lhs_scale), _format(rhs, rhs_scale), swizzled),
    }
    if contracting:
        return OfGroups(_grouped_wgrad_kernel, tile, arguments, _options(tile.k, tile.m, tile.n, dot))
    return OfRows(_grouped_gemm_kernel, tile, arguments, _options(tile.m, tile.k, tile.n, dot))


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
    """(tm, tk, tn) of `grouped_gemm` on a path: by default from the tables, as for `gmm` and `tgmm`.

    No step is shorter than a block of 32, for "block_scaled" no tile smaller than the matrix unit of `target` takes.
    Raises ValueError where the caller's step along the sum is neither a multiple nor a divisor of 32.
    """
    rows, depth = (_least_tile(target) if path == "block_scaled" else None) or (16, MX_BLOCK)
    if ragged == "contracting":
        tile = chosen(tiling, GROUPED_WGRAD_TILES[_dot_bytes(path)][0], p)
        check_mxfp8_tile("tm", tile[0], p.m)
        tm, tk, tn = fitted(tile, p)
        tk = max(tk, rows)
        return Tile(max(step_of(tk, tm, tn, _dot_bytes(path)), depth), tk, tn)
    tile = chosen(tiling, first_filled(GROUPED_GEMM_TILES[_dot_bytes(path)], p), p)
    check_mxfp8_tile("tk", tile[1], p.k)
    tm, tk, tn = fitted(tile, p)
    tm = max(tm, rows)
    return Tile(tm, max(step_of(tm, tk, tn, _dot_bytes(path)), depth), tn)


@triton.jit
def _grouped_gemm_kernel(lhs, rhs, task, TILE: tl.constexpr, EVEN_K: tl.constexpr, SCALING: tl.constexpr):
    multiply_rows(lhs, rhs, task, TILE, EVEN_K, _added, SCALING)


@triton.jit
def _grouped_wgrad_kernel(lhs, rhs, task, TILE: tl.constexpr, EXPERTS_BLOCK: tl.constexpr, SCALING: tl.constexpr):
    multiply_groups(lhs, rhs, task, TILE, EXPERTS_BLOCK, _added, SCALING)


@triton.jit
def _added(sums, a, b, lhs, rhs, region, first, SCALING: tl.constexpr):
    """sums + a @ b of the tiles of a step from `first`, times the scales of their rows, columns and blocks of 32.

    The matrix unit takes the scales of b as [columns, blocks].
    """
    DOT: tl.constexpr = SCALING.dot
    LHS_FORMAT: tl.constexpr = SCALING.lhs_format
    RHS_FORMAT: tl.constexpr = SCALING.rhs_format
    block = first // BLOCK + tl.arange(0, a.shape[1] // BLOCK)
    # A block without rows of the group may have a scale of NaN, and NaN times the zeros here is NaN.
    is_block = (block * BLOCK + BLOCK > region.start) & (block * BLOCK < region.end)
    along, down = block[None, :], block[:, None]
    a_read = region.in_rows & is_block[None, :]
    a_scales = _scales(lhs, region.group, region.row, along, a_read, True, SCALING.swizzled)
    if DOT == "block_scaled":
        b_read = region.in_columns.trans() & is_block[None, :]
        b_scales = _scales(rhs, region.group, region.column.trans(), along, b_read, False, SCALING.swizzled)
        A: tl.constexpr = tl.constexpr("e4m3" if LHS_FORMAT == "float8_e4m3fn" else "e5m2")
        B: tl.constexpr = tl.constexpr("e4m3" if RHS_FORMAT == "float8_e4m3fn" else "e5m2")
        sums = tl.dot_scaled(a, a_scales, A, b, b_scales, B, sums)
    else:
        b_read = region.in_columns & is_block[:, None]
        b_scales = _scales(rhs, region.group, region.column, down, b_read, False, SCALING.swizzled)
        a = _mxfp8_operand(a, a_scales, 1, LHS_FORMAT, DOT)
        b = _mxfp8_operand(b, b_scales, 0, RHS_FORMAT, DOT)
        sums = tl.dot(a, b, sums, input_precision="ieee")
    return sums


@triton.jit
def _scales(operand, group, line, block, is_read, OF_ROWS: tl.constexpr, SWIZZLED: tl.constexpr):
    """The scales of blocks of a group's lines (OF_ROWS of lhs, or columns of rhs), in bytes; 1 where none is read, or
    there is none."""
    line = line.to(tl.int64)
    block = block.to(tl.int64)
    if operand.scale is None:
        scales = tl.full(is_read.shape, 127, tl.uint8)
    else:
        first = operand.scale
        if operand.scale_group is not None:
            first += group.to(tl.int64) * operand.scale_group
        stride_line = operand.scale_row if OF_ROWS else operand.scale_column
        stride_block = operand.scale_column if OF_ROWS else operand.scale_row
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
