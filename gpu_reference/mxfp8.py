"""MXFP8 on the GPU, in Triton: fp8 with a power of two per 32 elements; it is defined in `cpu_golden/mxfp8.py`.

Results are those of the golden bit for bit. Values of CUDA tensors are not read by the host: ±inf in them is never
refused, but treated as with check_finite=False.
"""
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators
# (kernel arguments are what Triton makes of them; every host function below is annotated)

import math
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.nn.functional import pad

from gpu_reference._lib.formats import (
    BLOCK,
    FORMATS,
    Output,
    as_codes,
    checked,
    code_of,
    flushed,
    magnitudes,
    mxfp8_values,
    power_of_two,
)
from gpu_reference._lib.hardware import check_devices
from gpu_reference._lib.launch import Launch
from gpu_reference._lib.probe import INTERPRETED, probe
from op_arguments import dtype_name
from op_arguments.mxfp8 import (
    MX_BLOCK,
    SWIZZLED_COLUMNS,
    SWIZZLED_ROWS,
    check_mxfp8_dequantize,
    check_mxfp8_dual_quantize,
    check_mxfp8_quantize,
    check_swizzle,
    check_unswizzle,
)
from op_arguments.quantize import DualQuantized, Quantized

MX_TILE = 32, 256  # rows and columns of a program that quantises to MXFP8, or back: whole blocks of 32 either way
MX_OPTIONS = {"num_warps": 8, "enable_fp_fusion": True}


def mxfp8_quantize(
    x: Tensor,
    axis: int,
    *,
    dtype: Any = torch.float8_e4m3fn,
    scale_rounding: str = "up",
    check_finite: bool = True,
) -> Quantized:
    """x in MXFP8: fp8 with one power of two per 32 consecutive elements along `axis`; a short last block is a block.

    x [...] float32, bfloat16 or float16, of any strides. Returns qvalue [...] in dtype (float8_e4m3fn or float8_e5m2)
    and scale float8_e8m0fnu, whose `axis` is ceil(n / 32), both contiguous. With absmax taken over the finite elements
    the exponent of the scale is, for scale_rounding="up", ceil(log2(absmax / finfo(dtype).max)), the least that
    saturates nothing; for "floor", OCP's, floor(log2(absmax)) - 8 (e5m2: 15), which saturates the elements beyond
    finfo(dtype).max; and at least -127, which is also that of a block of zeros. `qvalue = x / scale`, rounded once, to
    nearest even; zeros keep x's sign; NaN stays NaN (the positive quiet one) and leaves its block alone. ±inf in a CPU
    tensor is refused with check_finite; it becomes ±finfo(dtype).max without.
    Raises TypeError for a wrong dtype, ValueError for a wrong axis or rounding, or ±inf, and RuntimeError as
    `fp8_quantize`. Sites shown to a probe: as `fp8_quantize`.
    """
    axis, name = check_mxfp8_quantize(x, axis, dtype, scale_rounding)
    device = checked(x, check_finite, has_nan=True)
    by_rows, planes = _mx_planes(x, axis)
    result = _empty_mxfp8(x, axis)
    rowwise, columnwise = (result, None) if by_rows else (None, result)
    if x.numel():
        mxfp8_quantize_launch(planes.contiguous(), name, scale_rounding, rowwise, columnwise).run(device)
    return Quantized(*_as_mxfp8(result, name))


def mxfp8_dual_quantize(
    x: Tensor,
    *,
    dtype: Any = torch.float8_e4m3fn,
    scale_rounding: str = "up",
    check_finite: bool = True,
) -> DualQuantized:
    """`mxfp8_quantize(x, -1, …)` and `mxfp8_quantize(x, -2, …)` by one kernel, which reads x [M, K] or [G, M, K] once.

    The columnwise payload is not the rowwise one: each has been rounded with its own scales.
    """
    name = check_mxfp8_dual_quantize(x, dtype, scale_rounding)
    device = checked(x, check_finite, has_nan=True)
    results = _empty_mxfp8(x, x.ndim - 1), _empty_mxfp8(x, x.ndim - 2)
    if x.numel():
        planes = x.reshape(-1, *x.shape[-2:]).contiguous()
        mxfp8_quantize_launch(planes, name, scale_rounding, results[0], results[1]).run(device)
    return DualQuantized(*_as_mxfp8(results[0], name), *_as_mxfp8(results[1], name))


def mxfp8_dequantize(qvalue: Tensor, scale: Tensor, *, dtype: Any = None) -> Tensor:
    """qvalue · scale: [...] fp8 times the power of two of its 32, in float32 (default) or bfloat16.

    The axis that has the blocks is the one of scale (float8_e8m0fnu) that is ceil(n / 32). Exact in either dtype,
    but at the ends of the exponent range that both share: 2^128 and beyond becomes ±inf, and what is below 2^-126 ±0.
    A scale of NaN (0xFF) makes its block NaN. Raises TypeError for a wrong dtype, ValueError for a wrong scale, and as
    `fp8_quantize`.
    """
    axis, name = check_mxfp8_dequantize(qvalue, scale, dtype)
    device = check_devices({"qvalue": qvalue, "scale": scale})
    by_rows, planes = _mx_planes(as_codes(qvalue), axis)
    codes, scales = planes.contiguous(), scale.view(torch.uint8).contiguous()
    out = torch.empty(qvalue.shape, dtype=getattr(torch, name), device=device)
    if qvalue.numel():
        mxfp8_dequantize_launch(codes, dtype_name(qvalue.dtype), scales, by_rows, out).run(device)
    return out


def swizzle_scales(scale: Tensor) -> Tensor:
    """Scales [..., R, C] as block-scaled matrix units read them: [..., ceil(R / 128), ceil(C / 4), 32, 16].

    scale: float8_e8m0fnu, R rows (or columns) of an operand with C scales each along the axis that is summed over.
    Tiles of 128 rows and 4 scales, one behind the other; that of row r and column c of a tile is its byte
    (r % 32) · 16 + (r // 32) · 4 + c. What is missing of a whole tile is 0, which stands for 2^-127.
    Source: cuBLAS, "1D Block Scaling Factors Layout". Raises TypeError and ValueError for any other array.
    """
    check_swizzle(scale)
    *lead, rows, columns = scale.shape
    whole = pad(scale.view(torch.uint8), (0, -columns % SWIZZLED_COLUMNS, 0, -rows % SWIZZLED_ROWS))
    tiles_r, tiles_c = whole.shape[-2] // SWIZZLED_ROWS, whole.shape[-1] // SWIZZLED_COLUMNS
    split = whole.reshape(*lead, tiles_r, SWIZZLED_ROWS // 32, 32, tiles_c, SWIZZLED_COLUMNS)
    tiles = split.transpose(-4, -2).reshape(*lead, tiles_r, tiles_c, 32, SWIZZLED_ROWS // 32 * SWIZZLED_COLUMNS)
    return tiles.contiguous().view(scale.dtype)


def unswizzle_scales(swizzled: Tensor, rows: int, columns: int) -> Tensor:
    """The scales [..., rows, columns] of which `swizzled` is the `swizzle_scales`. Raises as it does."""
    check_unswizzle(swizzled, rows, columns)
    *lead, tiles_r, tiles_c, _, _ = swizzled.shape
    tiles = swizzled.view(torch.uint8).reshape(*lead, tiles_r, tiles_c, 32, SWIZZLED_ROWS // 32, SWIZZLED_COLUMNS)
    whole = tiles.transpose(-4, -2).reshape(*lead, tiles_r * SWIZZLED_ROWS, tiles_c * SWIZZLED_COLUMNS)
    return whole[..., :rows, :columns].contiguous().view(swizzled.dtype)


def _mx_planes(x: Tensor, axis: int) -> tuple[bool, Tensor]:
    """x as [planes, rows, columns] with `axis` the columns (True), or the rows (False)."""
    before, size, behind = math.prod(x.shape[:axis]), x.shape[axis], math.prod(x.shape[axis + 1 :])
    if behind == 1:
        return True, x.reshape(1, before, size)
    return False, x.reshape(before, size, behind)


def _empty_mxfp8(x: Tensor, axis: int) -> Output:
    """What the kernel fills, in bytes."""
    blocks = -(-x.shape[axis] // MX_BLOCK)
    scale = x.new_empty((*x.shape[:axis], blocks, *x.shape[axis + 1 :]), dtype=torch.uint8)
    return Output(torch.empty(x.shape, dtype=torch.uint8, device=x.device), scale)


def _as_mxfp8(result: Output, name: str) -> tuple[Tensor, Tensor]:
    return result.qvalue.view(getattr(torch, name)), result.scale.view(torch.float8_e8m0fnu)


class Planes(NamedTuple):
    """The rows and columns of each plane, and how many tiles it has along them."""

    rows: int
    columns: int
    tiles_down: int
    tiles_across: int


def mxfp8_quantize_launch(
    planes: Tensor, name: str, scale_rounding: str, rowwise: Output | None, columnwise: Output | None
) -> Launch:
    """The kernel that quantises contiguous x [planes, rows, columns] to MXFP8, its codes and scales in bytes.

    rowwise: in blocks of 32 along the columns; columnwise: along the rows; each where it is given.
    """
    grid, geometry = _mx_geometry(planes)
    outputs = {"rowwise": rowwise, "columnwise": columnwise}
    arguments = {"x": planes, **outputs, **geometry, "ROUND_UP": scale_rounding == "up", "FORMAT": FORMATS[name]}
    return Launch(_mxfp8_quantize_kernel, grid, arguments, MX_OPTIONS)


def mxfp8_dequantize_launch(codes: Tensor, name: str, scales: Tensor, by_rows: bool, out: Tensor) -> Launch:
    """The kernel that dequantises contiguous codes [planes, rows, columns]; scales in bytes, blocks along the columns
    with by_rows, else along the rows."""
    grid, geometry = _mx_geometry(codes)
    arguments = {"codes": codes, "scales": scales, "out": out, **geometry, "BY_ROWS": by_rows, "FORMAT": name}
    return Launch(_mxfp8_dequantize_kernel, grid, arguments, MX_OPTIONS)


def _mx_geometry(planes: Tensor) -> tuple[tuple[int], dict[str, Any]]:
    """The grid of programs, and the arguments from which each finds its tile."""
    count, rows, columns = planes.shape
    tile_rows, tile_columns = MX_TILE
    each = Planes(rows, columns, triton.cdiv(rows, tile_rows), triton.cdiv(columns, tile_columns))
    arguments = {"planes": each, "TILE_ROWS": tile_rows, "TILE_COLUMNS": tile_columns}
    return (count * each.tiles_down * each.tiles_across,), arguments


@triton.jit
def _mxfp8_quantize_kernel(
    x,
    rowwise,
    columnwise,
    planes,
    TILE_ROWS: tl.constexpr,
    TILE_COLUMNS: tl.constexpr,
    ROUND_UP: tl.constexpr,
    FORMAT: tl.constexpr,
):
    """One program per tile of a plane, which holds whole blocks along both axes: one load serves both results."""
    plane, row, column, in_tile, position = _mx_tile_of_program(planes, TILE_ROWS, TILE_COLUMNS)
    bits = tl.load(x + position, mask=in_tile, other=0).to(tl.float32).to(tl.int32, bitcast=True)
    IS_DUAL: tl.constexpr = rowwise is not None and columnwise is not None
    if rowwise is not None:
        blocks = bits.reshape(TILE_ROWS, TILE_COLUMNS // BLOCK, BLOCK)
        codes, exponents = _mxfp8_codes(blocks, in_tile, 2, ROUND_UP, FORMAT, "rowwise_" if IS_DUAL else "")
        tl.store(rowwise.qvalue + position, codes.reshape(TILE_ROWS, TILE_COLUMNS), mask=in_tile)
        offset, in_scale = _mx_scales_of_tile(plane, row, column, planes, True)
        tl.store(rowwise.scale + offset, exponents.reshape(TILE_ROWS, TILE_COLUMNS // BLOCK), mask=in_scale)
    if columnwise is not None:
        blocks = bits.reshape(TILE_ROWS // BLOCK, BLOCK, TILE_COLUMNS)
        codes, exponents = _mxfp8_codes(blocks, in_tile, 1, ROUND_UP, FORMAT, "columnwise_" if IS_DUAL else "")
        tl.store(columnwise.qvalue + position, codes.reshape(TILE_ROWS, TILE_COLUMNS), mask=in_tile)
        offset, in_scale = _mx_scales_of_tile(plane, row, column, planes, False)
        tl.store(columnwise.scale + offset, exponents.reshape(TILE_ROWS // BLOCK, TILE_COLUMNS), mask=in_scale)


@triton.jit
def _mxfp8_dequantize_kernel(
    codes,
    scales,
    out,
    planes,
    TILE_ROWS: tl.constexpr,
    TILE_COLUMNS: tl.constexpr,
    BY_ROWS: tl.constexpr,
    FORMAT: tl.constexpr,
):
    """One program per tile of a plane, as in `_mxfp8_quantize_kernel`."""
    plane, row, column, in_tile, position = _mx_tile_of_program(planes, TILE_ROWS, TILE_COLUMNS)
    offset, in_scale = _mx_scales_of_tile(plane, row, column, planes, BY_ROWS)
    tile = tl.load(codes + position, mask=in_tile, other=0)
    product = mxfp8_values(tile, tl.load(scales + offset, mask=in_scale, other=0), 1 if BY_ROWS else 0, FORMAT)
    tl.store(out + position, flushed(product).to(out.dtype.element_ty), mask=in_tile)


@triton.jit
def _mxfp8_codes(bits, in_tile, AXIS: tl.constexpr, ROUND_UP: tl.constexpr, FORMAT: tl.constexpr, RESULT: tl.constexpr):
    """The codes of x, from its float32 bits in blocks along AXIS, and their scales, with that axis 1; both in bytes.

    RESULT begins the sites' names."""
    magnitude, finite = magnitudes(bits)
    largest = tl.max(finite, axis=AXIS, keep_dims=True)
    exponent = (largest >> 23) - (FORMAT.exponent + 2)  # the largest value of both formats is 1.75 · a power of two
    if ROUND_UP:
        exponent += ((largest & 0x007FFFFF) > 0x00600000).to(tl.int32)
    exponent = tl.maximum(exponent, 0)
    if INTERPRETED:
        in_blocks = in_tile.reshape(bits.shape)
        in_scale = tl.max(in_blocks.to(tl.int32), axis=AXIS, keep_dims=True) > 0
        scale = tl.where(exponent == 0, 0x00400000, exponent << 23).to(tl.float32, bitcast=True)  # 2^-127 is subnormal
        probe(RESULT + "absmax", largest.to(tl.float32, bitcast=True), in_scale)
        probe(RESULT + "scale", scale, in_scale)
        probe(RESULT + "spread", tl.broadcast_to(scale, bits.shape), in_blocks)

    quotient = finite.to(tl.float32, bitcast=True) * power_of_two(254 - exponent)
    quantum = tl.maximum((quotient.to(tl.int32, bitcast=True) >> 23) - FORMAT.mantissa, FORMAT.least + 127)
    # A float32 as large as this has no bits below the quantum, so that the sum is rounded to it.
    whole = power_of_two(quantum + 23)
    count = (quotient + whole).to(tl.int32, bitcast=True) - whole.to(tl.int32, bitcast=True)
    # Codes are in the order of the values: each doubling of the quantum has 2^mantissa of them.
    code = tl.minimum(((quantum - (FORMAT.least + 127)) << FORMAT.mantissa) + count, FORMAT.largest)
    return code_of(bits, magnitude, code, FORMAT), exponent.to(tl.uint8)


@triton.jit
def _mx_tile_of_program(planes, TILE_ROWS: tl.constexpr, TILE_COLUMNS: tl.constexpr):
    """This program's plane, the rows [TILE_ROWS, 1] and columns [1, TILE_COLUMNS] of its tile, which of them exist,
    and where they are."""
    program = tl.program_id(0)
    tiles = planes.tiles_down * planes.tiles_across
    plane = (program // tiles).to(tl.int64)
    tile = program % tiles
    row = tile // planes.tiles_across * TILE_ROWS + tl.arange(0, TILE_ROWS)[:, None]
    column = tile % planes.tiles_across * TILE_COLUMNS + tl.arange(0, TILE_COLUMNS)[None, :]
    in_tile = (row < planes.rows) & (column < planes.columns)
    return plane, row, column, in_tile, (plane * planes.rows + row) * planes.columns + column


@triton.jit
def _mx_scales_of_tile(plane, row, column, planes, BY_ROWS: tl.constexpr):
    """Where the scales of a tile are, and which of them exist: [rows, 1 for 32 columns], or the other way round."""
    TILE_ROWS: tl.constexpr = row.shape[0]
    TILE_COLUMNS: tl.constexpr = column.shape[1]
    rows = planes.rows
    columns = planes.columns
    if BY_ROWS:
        column = tl.min(column) // BLOCK + tl.arange(0, TILE_COLUMNS // BLOCK)[None, :]
        columns = (columns + BLOCK - 1) // BLOCK
    else:
        row = tl.min(row) // BLOCK + tl.arange(0, TILE_ROWS // BLOCK)[:, None]
        rows = (rows + BLOCK - 1) // BLOCK
    return (plane * rows + row) * columns + column, (row < rows) & (column < columns)
