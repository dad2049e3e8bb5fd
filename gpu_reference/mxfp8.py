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

from gpu_reference._lib.formats import (
    BLOCK,
    FORMATS,
    NO_OUTPUT,
    Output,
    as_codes,
    checked,
    code_of,
    flushed,
    magnitudes,
    mxfp8_values,
    power_of_two,
    tile_of_program,
)
from gpu_reference._lib.hardware import check_devices
from gpu_reference._lib.launch import Launch
from gpu_reference._lib.probe import INTERPRETED, probe
from gpu_reference._lib.tiles import cdiv
from op_arguments import dtype_name
from op_arguments.mxfp8 import (
    MX_BLOCK,
    check_mxfp8_dequantize,
    check_mxfp8_dual_quantize,
    check_mxfp8_quantize,
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
    """qvalue [...] in dtype and scale float8_e8m0fnu: x in MXFP8, one power of two per 32 elements along `axis`.

    Arguments, result and errors as `cpu_golden.mxfp8.mxfp8_quantize`, bit for bit; x of any strides, qvalue and scale
    contiguous. Further errors and sites as `gpu_reference.quantize.fp8_quantize`.
    """
    axis, name = check_mxfp8_quantize(x, axis, dtype, scale_rounding)
    device = checked(x, check_finite, has_nan=True)
    by_rows, planes = _mx_planes(x, axis)
    result = _empty_mxfp8(x, axis)
    rowwise, columnwise = (result, NO_OUTPUT) if by_rows else (NO_OUTPUT, result)
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
    """`mxfp8_quantize` of x [M, K] or [G, M, K] by rows and by columns, by one kernel that reads x once.

    Arguments, result and errors as `cpu_golden.mxfp8.mxfp8_dual_quantize`.
    """
    name = check_mxfp8_dual_quantize(x, dtype, scale_rounding)
    device = checked(x, check_finite, has_nan=True)
    results = _empty_mxfp8(x, x.ndim - 1), _empty_mxfp8(x, x.ndim - 2)
    if x.numel():
        planes = x.reshape(-1, *x.shape[-2:]).contiguous()
        mxfp8_quantize_launch(planes, name, scale_rounding, results[0], results[1]).run(device)
    return DualQuantized(*_as_mxfp8(results[0], name), *_as_mxfp8(results[1], name))


def mxfp8_dequantize(qvalue: Tensor, scale: Tensor, *, dtype: Any = None) -> Tensor:
    """qvalue · scale [...] in dtype; arguments, result and errors as `cpu_golden.mxfp8.mxfp8_dequantize`."""
    axis, name = check_mxfp8_dequantize(qvalue, scale, dtype)
    device = check_devices({"qvalue": qvalue, "scale": scale})
    by_rows, planes = _mx_planes(as_codes(qvalue), axis)
    codes, scales = planes.contiguous(), scale.view(torch.uint8).contiguous()
    out = torch.empty(qvalue.shape, dtype=getattr(torch, name), device=device)
    if qvalue.numel():
        mxfp8_dequantize_launch(codes, dtype_name(qvalue.dtype), scales, by_rows, out).run(device)
    return out


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
    planes: Tensor, name: str, scale_rounding: str, rowwise: Output, columnwise: Output
) -> Launch:
    """The kernel that quantises contiguous x [planes, rows, columns] to MXFP8, its codes and scales in bytes.

    rowwise: in blocks of 32 along the columns; columnwise: along the rows; each but where it is NO_OUTPUT.
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
    each = Planes(rows, columns, cdiv(rows, tile_rows), cdiv(columns, tile_columns))
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
    IS_DUAL: tl.constexpr = rowwise.scale is not None and columnwise.scale is not None
    if rowwise.scale is not None:
        blocks = bits.reshape(TILE_ROWS, TILE_COLUMNS // BLOCK, BLOCK)
        codes, exponents = _mxfp8_codes(blocks, in_tile, 2, ROUND_UP, FORMAT, "rowwise_" if IS_DUAL else "")
        tl.store(rowwise.qvalue + position, codes.reshape(TILE_ROWS, TILE_COLUMNS), mask=in_tile)
        offset, in_scale = _mx_scales_of_tile(plane, row, column, planes, True)
        tl.store(rowwise.scale + offset, exponents.reshape(TILE_ROWS, TILE_COLUMNS // BLOCK), mask=in_scale)
    if columnwise.scale is not None:
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
    plane, down, across = tile_of_program(planes.tiles_down, planes.tiles_across)
    row = down * TILE_ROWS + tl.arange(0, TILE_ROWS)[:, None]
    column = across * TILE_COLUMNS + tl.arange(0, TILE_COLUMNS)[None, :]
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
