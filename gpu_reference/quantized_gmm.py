"""Grouped matrix multiplication of block-scaled operands on the GPU, in Triton.

The operations are defined in `cpu_golden/quantized_gmm.py`; groups, visits and grids are those of
`gpu_reference/gmm.py`. A step of the sum never crosses a scale block: where scales change along the contraction, each
step's products are summed by the tensor core on their own, multiplied by the scales and added to float32 sums.
Other scales multiply the whole sum, once. Sums of int8 products are int32 as long as no scale changes.
"""
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators
# (kernel arguments are what Triton makes of them; every host function below is annotated)

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from gpu_reference._lib.formats import as_codes, decoded
from gpu_reference._lib.hardware import (
    architecture,
    computes_bfloat16,
    converts_fp8,
    sums_fp8_in_float32,
    supports_matmul,
)
from gpu_reference._lib.launch import launch_options
from gpu_reference._lib.operands import Operand, groups_of, operand
from gpu_reference._lib.plans import Given, OfGroups, OfRows, product
from gpu_reference._lib.products import multiply_groups, multiply_rows
from gpu_reference._lib.tiles import Candidate, Tile, chosen, first_filled, fitted, step_of
from gpu_reference.gmm import GMM_TILES, TGMM_TILES
from op_arguments import Tiling, dtype_name
from op_arguments.gmm import GmmOptions, TgmmOptions
from op_arguments.options import options_of
from op_arguments.quantize import NARROW, Quantized
from op_arguments.quantized_gmm import (
    QuantizedProblem,
    check_gmm_quantized,
    check_tgmm_quantized,
    check_tile,
    dot_dtype,
)

GMM_QUANTIZED_TILES: dict[int, tuple[Candidate, ...]] = {
    1: ((128, 128, 128), (64, 128, 128), (32, 128, 128), (16, 128, 128)),
    2: GMM_TILES[2],
    4: ((64, 16, 128), (32, 32, 128), (16, 64, 128)),
}
TGMM_QUANTIZED_TILES: dict[int, tuple[Candidate, ...]] = {
    1: ((128, 128, 128), (64, 128, 128), (64, 64, 128)),
    2: TGMM_TILES[2],
    4: ((16, 64, 128), (32, 64, 64), (16, 64, 64)),
}
"""As GMM_TILES and TGMM_TILES, by bytes per element of what the dot multiplies. A step is a scale block at most."""

Scale = Tensor | None
Pair = tuple[Tensor, Scale]
"""An operand and its scale."""

CONVERTED = "converted"
CONVERTED_TILE = (128, 64, 128)
"""Of tgmm on sm_90, whose registers sums and steps of 128 x 128 fill, both float32: with scales in blocks 349 µs on an
H200 in place of 474."""
LEAST_DEPTH = 32  # of a dot of 8-bit operands
INT32_PRODUCTS = 2**31 // 128**2 - 1  # products of int8 that an int32 sum holds, whatever they are


class DotPath(NamedTuple):
    """What a dot multiplies, "fp8", "int8" or the dtype that both operands are widened to, and why."""

    dtype: str
    reason: str


class Scaling(NamedTuple):
    """How a kernel multiplies scaled operands, known when it is compiled.

    dot: as in DotPath. in_int32: whether sums are. Of each operand the format that is decoded, CONVERTED of one whose
    conversion is an instruction, "" of one that the dot takes as it is; and how many elements along the sum share a
    scale, 0 where all do or there is none.
    """

    dot: str
    in_int32: bool
    lhs_format: str
    rhs_format: str
    lhs_block: int
    rhs_block: int


@options_of(GmmOptions)
def gmm_quantized(
    lhs: Tensor, lhs_scale: Tensor | None, rhs: Tensor, rhs_scale: Tensor | None, group_sizes: Tensor, **options: Any
) -> Tensor:
    """`gmm` of operands with block scales: [M, N] in preferred_element_type.

    Arguments, result and errors as `cpu_golden.quantized_gmm.gmm_quantized`, strides, options and further errors as
    `gmm`; here: what the dot multiplies on which GPU, and why: `dot_path`. Shown to a probe: the finished sums, at acc.
    """
    o = GmmOptions(**options)
    a, b, groups = Quantized(lhs, lhs_scale), Quantized(rhs, rhs_scale), groups_of(group_sizes, o.group_offset)
    p = check_gmm_quantized(a, b, groups, o.existing_out, o.transpose_rhs, o.preferred_element_type)
    if o.transpose_rhs:
        rhs, rhs_scale = rhs.transpose(1, 2), None if rhs_scale is None else rhs_scale.transpose(1, 2)
        block_g, block_n, block_k = p.rhs_blocks
        p = replace(p, rhs_blocks=(block_g, block_k, block_n))
    operands = {"lhs": lhs, "lhs_scale": lhs_scale, "rhs": rhs, "rhs_scale": rhs_scale}
    return product(gmm_quantized_plan, p, operands, Given(group_sizes, o.group_offset, o.existing_out, o.tiling))


@options_of(TgmmOptions)
def tgmm_quantized(
    lhs: Tensor, lhs_scale: Tensor | None, rhs: Tensor, rhs_scale: Tensor | None, group_sizes: Tensor, **options: Any
) -> Tensor:
    """`tgmm` of operands with block scales: [G, K, N] in preferred_element_type.

    Arguments, result and errors as `cpu_golden.quantized_gmm.tgmm_quantized`; all else as `gmm_quantized`.
    existing_out is added to the float32 sums.
    """
    o = TgmmOptions(**options)
    a, b, groups = Quantized(lhs, lhs_scale), Quantized(rhs, rhs_scale), groups_of(group_sizes, o.group_offset)
    p = check_tgmm_quantized(a, b, groups, o.num_actual_groups, o.existing_out, o.preferred_element_type)
    operands = {"lhs": lhs, "lhs_scale": lhs_scale, "rhs": rhs, "rhs_scale": rhs_scale}
    return product(tgmm_quantized_plan, p, operands, Given(group_sizes, o.group_offset, o.existing_out, o.tiling))


def dot_path(
    lhs: torch.dtype, rhs: torch.dtype, out: torch.dtype, target: str | None, *, over_rows: bool = False
) -> DotPath:
    """What the dot of two operand dtypes multiplies on `target` (see `gpu_reference._lib.hardware`), and why.

    over_rows: whether sums are over the rows of both operands, as tgmm's.
    """
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
    if over_rows and not sums_fp8_in_float32(target):
        return DotPath(
            "float16", f"the tensor cores of {target} take fp8 along the sum alone: bytes of rows would be transposed"
        )
    if out == torch.float32 and not sums_fp8_in_float32(target):
        return DotPath(
            "float16", f"the tensor cores of {target} keep 13 bits of an fp8 sum, too few for float32 results"
        )
    return DotPath(
        dtype, f"the matrix unit of {target} multiplies fp8; each step is added to float32 sums outside of it"
    )


def gmm_quantized_plan(
    p: QuantizedProblem, lhs: Tensor, lhs_scale: Scale, rhs: Tensor, rhs_scale: Scale, tiling: Tiling | None = None
) -> OfRows:
    """`gmm_quantized`: rhs, its scale and its blocks as of [G, K, N]. The tile is by default the first of
    GMM_QUANTIZED_TILES whose tm an average group fills, its tk no longer than a scale block.

    Raises ValueError where the caller's tk is neither a multiple nor a divisor of the block.
    """
    target = architecture(lhs.device)
    path = dot_path(lhs.dtype, rhs.dtype, getattr(torch, p.out_dtype), target)
    tiles = GMM_QUANTIZED_TILES[_dot_bytes(path)]
    if target == "sm_90" and path.dtype == "fp8":  # of 128 rows sums and steps, both float32, fill its registers
        tiles = tiles[1:]
    tile = chosen(tiling, first_filled(tiles, p), p)
    check_tile("tk", tile[1], p.block, p.k)
    tm, tk, tn = fitted(tile, p)
    tk = step_of(tm, _step(tk, path, p.block, p.k), tn, _dot_bytes(path))
    formats = [_format(values.dtype, path, target) for values in (lhs, rhs)]
    arguments = {
        "lhs": _operand(lhs, lhs_scale, formats[0], lines=p.lhs_blocks[0]),
        "rhs": _operand(rhs, rhs_scale, formats[1], lines=p.rhs_blocks[-1], groups=p.rhs_blocks[0]),
        "SCALING": _scaling(p, path, formats, (lhs, lhs_scale), (rhs, rhs_scale), axis=1),
    }
    return OfRows(_gmm_quantized_kernel, Tile(tm, tk, tn), arguments, _options(tm, tk, tn, path, target))


def tgmm_quantized_plan(
    p: QuantizedProblem, lhs: Tensor, lhs_scale: Scale, rhs: Tensor, rhs_scale: Scale, tiling: Tiling | None = None
) -> OfGroups:
    """`tgmm_quantized`: by default the first of TGMM_QUANTIZED_TILES, its tm no longer than a scale block;
    raises for tm as `gmm_quantized_plan` for tk."""
    target = architecture(lhs.device)
    path = dot_path(lhs.dtype, rhs.dtype, getattr(torch, p.out_dtype), target, over_rows=True)
    formats = [_format(values.dtype, path, target) for values in (lhs, rhs)]
    tiles = TGMM_QUANTIZED_TILES[_dot_bytes(path)]
    tile = chosen(tiling, CONVERTED_TILE if target == "sm_90" and CONVERTED in formats else tiles[0], p)
    check_tile("tm", tile[0], p.block, p.m)
    tm, tk, tn = fitted(tile, p)
    tm = step_of(tk, _step(tm, path, p.block, p.m), tn, _dot_bytes(path))
    arguments = {
        "lhs": _operand(lhs, lhs_scale, formats[0], lines=p.lhs_blocks[1], transposed=True),
        "rhs": _operand(rhs, rhs_scale, formats[1], lines=p.rhs_blocks[1]),
        "SCALING": _scaling(p, path, formats, (lhs, lhs_scale), (rhs, rhs_scale), axis=0),
    }
    return OfGroups(_tgmm_quantized_kernel, Tile(tm, tk, tn), arguments, _options(tk, tm, tn, path, target))


@triton.jit
def _gmm_quantized_kernel(lhs, rhs, task, TILE: tl.constexpr, EVEN_K: tl.constexpr, SCALING: tl.constexpr):
    ACC: tl.constexpr = tl.int32 if SCALING.in_int32 else tl.float32
    multiply_rows(lhs, rhs, task, TILE, EVEN_K, _added, SCALING, _times_whole_scales, ACC)


@triton.jit
def _tgmm_quantized_kernel(lhs, rhs, task, TILE: tl.constexpr, EXPERTS_BLOCK: tl.constexpr, SCALING: tl.constexpr):
    ACC: tl.constexpr = tl.int32 if SCALING.in_int32 else tl.float32
    multiply_groups(lhs, rhs, task, TILE, EXPERTS_BLOCK, _added, SCALING, _times_whole_scales, ACC)


@triton.jit
def _scales_of_rows(lhs, region):
    """Where the first scale of each row of lhs is."""
    return lhs.scale + region.row.to(tl.int64) // lhs.scale_lines * lhs.scale_row


@triton.jit
def _scales_of_columns(rhs, region):
    """Where the first scale of each column of rhs is."""
    first = rhs.scale
    if rhs.scale_group is not None:
        first += region.group.to(tl.int64) // rhs.scale_groups * rhs.scale_group
    return first + region.column.to(tl.int64) // rhs.scale_lines * rhs.scale_column


@triton.jit
def _added(sums, a, b, lhs, rhs, region, first, SCALING: tl.constexpr):
    """sums + a @ b of the tiles of a step from `first`, times the scales that change along the sum.

    Sums of fp8 products stay outside of the tensor core, which may not keep all bits of float32.
    """
    DOT: tl.constexpr = SCALING.dot
    LHS_FORMAT: tl.constexpr = SCALING.lhs_format
    RHS_FORMAT: tl.constexpr = SCALING.rhs_format
    a = _dot_operand(a, LHS_FORMAT, DOT)
    b = _dot_operand(b, RHS_FORMAT, DOT)
    if SCALING.lhs_block or SCALING.rhs_block:
        partial = _dot_of_step(a, b, DOT)
        at = tl.full((), 0, tl.int64) + first
        if SCALING.lhs_block:
            scales = _scales_of_rows(lhs, region) + at // SCALING.lhs_block * lhs.scale_column
            partial *= tl.load(scales, mask=region.in_rows, other=0)
        if SCALING.rhs_block:
            scales = _scales_of_columns(rhs, region) + at // SCALING.rhs_block * rhs.scale_row
            partial *= tl.load(scales, mask=region.in_columns, other=0)
        sums += partial
    elif DOT == "fp8" or (DOT == "int8" and not SCALING.in_int32):
        sums += _dot_of_step(a, b, DOT)
    else:
        sums = tl.dot(a, b, sums, input_precision="ieee", out_dtype=sums.dtype)
    return sums


@triton.jit
def _times_whole_scales(sums, lhs, rhs, region, SCALING: tl.constexpr):
    """Finished sums in float32, times the scales that are of the whole sum."""
    total = sums.to(tl.float32)
    # A scale may be NaN for a group without rows, whose sums are zero.
    has_rows = region.start < region.end
    if lhs.scale is not None and SCALING.lhs_block == 0:
        total *= tl.load(_scales_of_rows(lhs, region), mask=tl.where(has_rows, region.in_rows, False), other=0)
    if rhs.scale is not None and SCALING.rhs_block == 0:
        total *= tl.load(_scales_of_columns(rhs, region), mask=tl.where(has_rows, region.in_columns, False), other=0)
    return total


@triton.jit
def _dot_operand(tile, FORMAT: tl.constexpr, DOT: tl.constexpr):
    """A tile as the dot multiplies it: FORMAT as in Scaling."""
    if FORMAT != "":
        tile = tile.to(tl.float16) if FORMAT == "converted" else decoded(tile, FORMAT)
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


def _dot_bytes(path: DotPath) -> int:
    """Bytes per element of what the dot multiplies."""
    return 1 if path.dtype in ("fp8", "int8") else int(getattr(torch, path.dtype).itemsize)


def _options(rows: int, depth: int, columns: int, path: DotPath, target: str | None) -> dict[str, Any]:
    """As `launch_options`, with warps for two float32 tiles: the sums, and what a step adds to them."""
    element_size = _dot_bytes(path)
    warps = max(4, min(rows * columns * max(element_size, 2) // 4096, 8))
    return launch_options(rows, depth, columns, element_size, target) | {"num_warps": warps}


def _step(tile: int, path: DotPath, block: int, size: int) -> int:
    """A tile of the contraction axis: deep enough for the dot, and no longer than a block of scales (32 or more)."""
    step = max(tile, LEAST_DEPTH) if _dot_bytes(path) == 1 else tile
    return min(step, block) if block < size else step


def _operand(
    values: Tensor, scale: Tensor | None, form: str, *, lines: int, groups: int = 1, transposed: bool = False
) -> Operand:
    """An operand and its scale; one serves so many groups and lines (rows of lhs, columns of rhs)."""
    given = values if form in ("", CONVERTED) else as_codes(values)
    if scale is None or not values.numel():  # a scale may be as empty as what it scales
        return operand(given, transposed=transposed)
    scales = operand(scale, transposed=transposed)
    return operand(given, transposed=transposed, scale=scales, scale_groups=groups, scale_lines=lines)


def _format(dtype: torch.dtype, path: DotPath, target: str | None) -> str:
    """The format in `Scaling` of an operand of a dtype."""
    if path.dtype in ("fp8", "int8") or dtype_name(dtype) not in NARROW:
        return ""
    return CONVERTED if converts_fp8(dtype, target) else dtype_name(dtype)


def _scaling(p: QuantizedProblem, path: DotPath, formats: Sequence[str], lhs: Pair, rhs: Pair, axis: int) -> Scaling:
    """The Scaling of operands whose sum is over their axis of that number."""
    in_int32 = _sums_in_int32(path, p.block, lhs[0].shape[axis])
    blocks = [
        blocks[axis] if scale is not None and scale.shape[axis] > 1 else 0
        for (_, scale), blocks in ((lhs, p.lhs_blocks), (rhs, p.rhs_blocks))
    ]
    return Scaling(path.dtype, in_int32, formats[0], formats[1], blocks[0], blocks[1])


def _sums_in_int32(path: DotPath, block: int, size: int) -> bool:
    """Whether sums over a contraction axis of `size` are int32: no scale changes, and they cannot overflow."""
    return path.dtype == "int8" and block >= size and size <= INT32_PRODUCTS
