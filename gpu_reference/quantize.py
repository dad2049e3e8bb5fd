"""Quantisation to fp8 and int8 on the GPU, in Triton; the operations are defined in `cpu_golden/quantize.py`.

Results are those of the golden bit for bit, whatever a GPU's division and its treatment of subnormals: a scale is
divided out in integers, and a quotient is only estimated in float32 and then decided by an exact comparison.

Values of CUDA tensors are not read by the host: ±inf and NaN in them are never refused, but treated as with
check_finite=False.
"""
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators
# (kernel arguments are what Triton makes of them; every host function below is annotated)

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from gpu_reference._lib.formats import (
    FORMATS,
    NO_OUTPUT,
    SMALLEST,
    Output,
    as_codes,
    checked,
    code_of,
    decoded,
    flushed,
    magnitudes,
    power_of_two,
    tile_of_program,
)
from gpu_reference._lib.hardware import check_devices
from gpu_reference._lib.launch import Launch
from gpu_reference._lib.probe import INTERPRETED, probe
from gpu_reference._lib.tiles import cdiv, next_power_of_2
from op_arguments import dtype_name
from op_arguments.quantize import (
    FP8,
    Blocks,
    DualQuantized,
    Quantized,
    check_blocks,
    check_dequantize,
    check_dual_quantize,
    check_quantize,
)

ELEMENTS = 128 * 128  # of a tile: the two block sizes of 128 in one, 64 to a thread of a program
COLUMNS = 128  # of a tile that is reduced along its columns: whole cache lines, and still many rows

OPTIONS = {"num_warps": 16, "enable_fp_fusion": True}

ONE = tl.constexpr(0x3F800000)  # bits of 1.0


def fp8_quantize(
    x: Tensor,
    axis: int | tuple[int, ...],
    block_size: int | None = 128,
    *,
    dtype: Any = torch.float8_e4m3fn,
    check_finite: bool = True,
) -> Quantized:
    """qvalue [...] in dtype and scale float32: x in fp8, one scale per block of `block_size` along each axis in `axis`.

    Arguments, result and errors as `cpu_golden.quantize.fp8_quantize`, bit for bit; x of any strides, qvalue and scale
    contiguous. Also raises RuntimeError for CPU tensors where Triton's interpreter is off.
    Sites shown to a probe: absmax, scale and spread, the scale of each element.
    """
    blocks, name = check_quantize(x, axis, block_size, dtype)
    device = checked(x, check_finite, has_nan=True)
    return _quantize(x, blocks, name, device)


def int8_quantize(
    x: Tensor,
    axis: int | tuple[int, ...],
    block_size: int | None = 128,
    *,
    check_finite: bool = True,
) -> Quantized:
    """qvalue [...] int8 and scale float32, as `fp8_quantize`; `cpu_golden.quantize.int8_quantize` bit for bit."""
    blocks = check_blocks(x, axis, block_size)
    device = checked(x, check_finite, has_nan=False)
    return _quantize(x, blocks, "int8", device)


def fp8_dual_quantize(
    x: Tensor,
    block_size: int | None = 128,
    *,
    dtype: Any = torch.float8_e4m3fn,
    check_finite: bool = True,
) -> DualQuantized:
    """`fp8_quantize` of x [M, K] or [G, M, K] by rows and by columns, in one kernel.

    Arguments, result and errors as `cpu_golden.quantize.fp8_dual_quantize`. x is read from memory once for both, or
    twice where blocks are longer than a tile (128). Sites as `fp8_quantize`, of both: rowwise_absmax and so on.
    """
    by_rows, by_columns, name = check_dual_quantize(x, block_size, dtype)
    device = checked(x, check_finite, has_nan=True)
    codes = [torch.empty(x.shape, dtype=torch.uint8, device=device) for _ in range(2)]
    scales = [_empty_scale(x, blocks) for blocks in (by_rows, by_columns)]
    if x.numel():
        plane = x.reshape(-1, x.shape[-1]).contiguous()
        blocks = by_columns[-2], by_rows[-1]
        rowwise, columnwise = map(Output, codes, scales)
        for launch in quantize_launches(plane, blocks, name, rowwise, columnwise):
            launch.run(device)
    by_row, by_column = (part.view(getattr(torch, name)) for part in codes)
    return DualQuantized(by_row, scales[0], by_column, scales[1])


def fp8_dequantize(qvalue: Tensor, scale: Tensor) -> Tensor:
    """qvalue · scale [...] float32; arguments, result and errors as `cpu_golden.quantize.fp8_dequantize`."""
    return _dequantize(qvalue, scale, FP8)


def int8_dequantize(qvalue: Tensor, scale: Tensor) -> Tensor:
    """As `fp8_dequantize`, of int8."""
    return _dequantize(qvalue, scale, ("int8",))


def _quantize(x: Tensor, blocks: Blocks, name: str, device: torch.device) -> Quantized:
    plane, plane_blocks, restored = _plane(x, blocks)
    codes, scale = torch.empty_like(plane, dtype=torch.uint8), _empty_scale(x, blocks)
    if x.numel():
        for launch in quantize_launches(plane, plane_blocks, name, Output(codes, scale)):
            launch.run(device)
    return Quantized(restored(codes).view(getattr(torch, name)), scale)


def _dequantize(qvalue: Tensor, scale: Tensor, dtypes: tuple[str, ...]) -> Tensor:
    blocks = check_dequantize(qvalue, scale, dtypes)
    device = check_devices({"qvalue": qvalue, "scale": scale})
    codes, plane_blocks, restored = _plane(as_codes(qvalue), blocks)
    out = torch.empty_like(codes, dtype=torch.float32)
    if qvalue.numel():
        dequantize_launch(codes, plane_blocks, dtype_name(qvalue.dtype), scale.contiguous(), out).run(device)
    return restored(out)


def _empty_scale(x: Tensor, blocks: Blocks) -> Tensor:
    shape = [size // block for size, block in zip(x.shape, blocks, strict=True)]
    return x.new_empty(shape, dtype=torch.float32)


def _plane(x: Tensor, blocks: Blocks) -> tuple[Tensor, tuple[int, int], Callable[[Tensor], Tensor]]:
    """x as contiguous [rows, columns], its blocks there, and what gives a result for it x's shape.

    Neighbouring axes are merged where blocks stay blocks, and in the same order. Two axes remain at most in all that
    is usual; what is in blocks along three axes apart is moved so that each block is a row.
    """
    axes: list[tuple[int, int]] = []
    for size, block in zip(x.shape, blocks, strict=True):
        outer, outer_block = axes.pop() if axes and (axes[-1][1] == 1 or block == size) else (1, 1)
        axes.append((outer * size, outer_block * block))
    if len(axes) == 1:
        ((size, block),) = axes
        axes = [(size // block, 1), (block, block)]
    if len(axes) == 2:
        (rows, block_rows), (columns, block_columns) = axes
        plane = x.reshape(rows, columns).contiguous()
        return plane, (block_rows, block_columns), lambda result: result.view(x.shape)

    split = [part for size, block in axes for part in (size // block, block)]
    order = [*range(0, len(split), 2), *range(1, len(split), 2)]
    back = sorted(range(len(order)), key=order.__getitem__)
    moved = x.reshape(split).permute(order)
    block = math.prod(split[1::2])
    plane = moved.reshape(-1, block).contiguous()
    return plane, (1, block), lambda result: result.view(moved.shape).permute(back).reshape(x.shape)


class Cells(NamedTuple):
    """How an array of so many columns is cut in cells, and a cell in the tiles of programs.

    A cell is a block, or the whole of an axis that has none.
    """

    columns: int
    cell_rows: int
    cell_columns: int
    cells_across: int
    parts_down: int
    parts_across: int


class Tile(NamedTuple):
    """The rows and columns of a program, and the axes along which all of a cell have one scale."""

    rows: int
    columns: int
    reduce_rows: bool
    reduce_columns: bool


def quantize_launches(
    plane: Tensor, blocks: tuple[int, int], name: str, output: Output, columnwise: Output = NO_OUTPUT
) -> list[Launch]:
    """The kernels that quantise contiguous x [rows, columns] in `blocks`, its codes in bytes: one, or where a block is
    larger than a tile, two, of which the first finds each block's absmax.

    With columnwise, `blocks` are those of both results: output has them along the columns alone, columnwise along the
    rows.
    """
    grid, cells, tile = _geometry(plane, blocks)
    arguments = {"x": plane, "output": output, "columnwise": columnwise, "cells": cells, "TILE": tile}
    quantize = Launch(_quantize_kernel, grid, arguments | {"FORMAT": FORMATS[name]}, OPTIONS, "block_size")
    if blocks[0] <= tile.rows and blocks[1] <= tile.columns:
        return [quantize]
    outputs = {"output": output, "columnwise": columnwise}
    asked = {name: each for name, each in outputs.items() if each.scale is not None}
    whole = {name: each._replace(absmax=_zeros(each.scale)) for name, each in asked.items()}
    largest = {name: each._replace(qvalue=None) for name, each in whole.items()}
    return [quantize._replace(arguments=quantize.arguments | each) for each in (largest, whole)]


def _zeros(scale: Tensor) -> Tensor:
    return torch.zeros_like(scale, dtype=torch.int32)


def dequantize_launch(codes: Tensor, blocks: tuple[int, int], name: str, scale: Tensor, out: Tensor) -> Launch:
    """The kernel that dequantises contiguous codes [rows, columns], as `as_codes` has them, in `blocks`."""
    grid, cells, tile = _geometry(codes, blocks)
    arguments = {"codes": codes, "scale": scale, "out": out, "cells": cells, "TILE": tile, "FORMAT": name}
    return Launch(_dequantize_kernel, grid, arguments, OPTIONS, "block_size")


def _geometry(plane: Tensor, blocks: tuple[int, int]) -> tuple[tuple[int], Cells, Tile]:
    """The grid of programs, the cells of the array, and the tile of a program."""
    rows, columns = plane.shape
    cell, (tile_rows, tile_columns) = _cells(plane, blocks)
    cells_across = columns // cell[1]
    parts = cdiv(cell[0], tile_rows), cdiv(cell[1], tile_columns)
    tile = Tile(tile_rows, tile_columns, blocks[0] > 1, blocks[1] > 1)
    grid = (rows // cell[0] * cells_across * math.prod(parts),)
    return grid, Cells(columns, *cell, cells_across, *parts), tile


def _cells(plane: Tensor, blocks: tuple[int, int]) -> tuple[tuple[int, int], tuple[int, int]]:
    """What a group of programs covers (a block, or the whole of an axis that has none) and one of them, in powers of
    two: along a row first, unless it is the columns that are reduced."""
    rows, columns = (size if block == 1 else block for size, block in zip(plane.shape, blocks, strict=True))
    tile_columns = min(next_power_of_2(columns), ELEMENTS if blocks[0] == 1 else COLUMNS)
    tile_rows = min(next_power_of_2(rows), ELEMENTS // tile_columns)
    return (rows, columns), (tile_rows, tile_columns)


@triton.jit
def _quantize_kernel(x, output, columnwise, cells, TILE: tl.constexpr, FORMAT: tl.constexpr):
    """One program per tile of a cell. With columnwise the cell holds blocks of both results. Each is made from its own
    load of the tile, the second from the cache: registers do not hold it through both."""
    tile = _tile_of_program(cells, TILE)
    if columnwise.scale is not None:
        _quantize_tile(x, tile, cells, columnwise, TILE.reduce_rows, False, FORMAT, "columnwise_")
        _quantize_tile(x, tile, cells, output, False, TILE.reduce_columns, FORMAT, "rowwise_")
    else:
        _quantize_tile(x, tile, cells, output, TILE.reduce_rows, TILE.reduce_columns, FORMAT, "")


@triton.jit
def _quantize_tile(
    x,
    tile,
    cells,
    output,
    REDUCE_ROWS: tl.constexpr,
    REDUCE_COLUMNS: tl.constexpr,
    FORMAT: tl.constexpr,
    RESULT: tl.constexpr,
):
    """Quantise a tile, or with no `qvalue`, only raise the `absmax` of its blocks; RESULT begins the sites' names.

    Largest magnitudes are compared and kept as float32 bits, whose order is that of the values. A tile that holds
    whole blocks has no `absmax`: it knows their largest itself.
    """
    position, in_tile = _elements_of_tile(tile, cells)
    block, in_block = _blocks_of_tile(tile, cells, REDUCE_ROWS, REDUCE_COLUMNS)
    bits = tl.load(x + position, mask=in_tile, other=0).to(tl.float32).to(tl.int32, bitcast=True)
    magnitude, finite = magnitudes(bits)
    if output.qvalue is None or output.absmax is None:
        largest = finite
        if REDUCE_COLUMNS:
            largest = tl.max(largest, axis=1, keep_dims=True)
        if REDUCE_ROWS:
            largest = tl.max(largest, axis=0, keep_dims=True)
    else:
        largest = tl.load(output.absmax + block, mask=in_block, other=0)
    if output.qvalue is None:
        tl.atomic_max(output.absmax + block, largest, mask=in_block)
    else:
        block_scale = _scale(largest, FORMAT)
        if INTERPRETED:
            probe(RESULT + "absmax", largest.to(tl.float32, bitcast=True), in_block)
            probe(RESULT + "scale", block_scale, in_block)
            probe(RESULT + "spread", tl.broadcast_to(block_scale, in_tile.shape), in_tile)
        tl.store(output.scale + block, block_scale, mask=in_block)
        code = _rounded(finite, block_scale, FORMAT)
        tl.store(output.qvalue + position, code_of(bits, magnitude, code, FORMAT), mask=in_tile)


@triton.jit
def _dequantize_kernel(codes, scale, out, cells, TILE: tl.constexpr, FORMAT: tl.constexpr):
    """One program per tile of a cell, as in `_quantize_kernel`."""
    tile = _tile_of_program(cells, TILE)
    position, in_tile = _elements_of_tile(tile, cells)
    block, in_block = _blocks_of_tile(tile, cells, TILE.reduce_rows, TILE.reduce_columns)
    values = decoded(tl.load(codes + position, mask=in_tile, other=0), FORMAT).to(tl.float32)
    product = values * tl.load(scale + block, mask=in_block, other=0)
    tl.store(out + position, flushed(product), mask=in_tile)


@triton.jit
def _tile_of_program(cells, TILE: tl.constexpr):
    """This program's cell, the rows [rows, 1] and columns [1, columns] of its part of it, int64, and which of them the
    cell has."""
    cell, part_down, part_across = tile_of_program(cells.parts_down, cells.parts_across)
    cell_row = cell // cells.cells_across
    cell_column = cell % cells.cells_across
    down = part_down.to(tl.int64) * TILE.rows + tl.arange(0, TILE.rows)[:, None]
    across = part_across.to(tl.int64) * TILE.columns + tl.arange(0, TILE.columns)[None, :]
    row = cell_row * cells.cell_rows + down
    column = cell_column * cells.cell_columns + across
    return cell_row, cell_column, row, column, down < cells.cell_rows, across < cells.cell_columns


@triton.jit
def _elements_of_tile(tile, cells):
    """Where the elements of a tile are, and which of them exist."""
    _, _, row, column, in_rows, in_columns = tile
    return row * cells.columns + column, in_rows & in_columns


@triton.jit
def _blocks_of_tile(tile, cells, REDUCE_ROWS: tl.constexpr, REDUCE_COLUMNS: tl.constexpr):
    """Where the scales of a tile are, [rows or 1, columns or 1], and which of them exist."""
    cell_row, cell_column, row, column, in_rows, in_columns = tile
    columns = cells.columns
    one = tl.arange(0, 1)
    if REDUCE_ROWS:
        row = cell_row + one[:, None]
        in_rows = one[:, None] == 0
    if REDUCE_COLUMNS:
        columns = cells.cells_across
        column = cell_column + one[None, :]
        in_columns = one[None, :] == 0
    return row * columns + column, in_rows & in_columns


@triton.jit
def _scale(largest, FORMAT: tl.constexpr):
    """The largest magnitude over that of the format, correctly rounded, at least the smallest normal float32; 1 for 0.

    The significand is divided as an integer, shifted so that the quotient has 24 bits. There are no ties: ODD is odd.
    """
    ODD: tl.constexpr = FORMAT.odd
    DIGITS: tl.constexpr = 3 if ODD < 8 else 7
    significand = (largest & 0x007FFFFF) | 0x00800000
    is_large = (significand >= (ODD << (24 - DIGITS))).to(tl.int32)
    dividend = significand << (DIGITS - is_large)
    quotient = dividend // ODD + (2 * (dividend % ODD) > ODD).to(tl.int32)
    exponent = (largest >> 23) - FORMAT.exponent - DIGITS + is_large
    bits = (exponent << 23) + (quotient - 0x00800000)
    return tl.where(largest == 0, ONE, tl.maximum(bits, SMALLEST)).to(tl.float32, bitcast=True)


@triton.jit
def _rounded(finite, scale, FORMAT: tl.constexpr):
    """The codes of |x| / scale where it is finite, rounded once to nearest even.

    An estimate of the quotient finds two neighbours in the format; the exact quotient is nearer to the upper one if
    |x| is above the product of the scale and their middle. That product is exact in two parts: a middle has at most 8
    bits, and the scale's significand is cut in halves of 12.
    """
    scale_bits = scale.to(tl.int32, bitcast=True)
    divisor_bits = (scale_bits & 0x007FFFFF) | ONE  # the significand, in [1, 2)
    divisor = divisor_bits.to(tl.float32, bitcast=True)
    upper_half = (divisor_bits & -0x1000).to(tl.float32, bitcast=True)
    lower_half = divisor - upper_half
    x = finite.to(tl.float32, bitcast=True) * power_of_two(254 - (scale_bits >> 23))

    estimate = x * (1.0 / divisor)
    quantum = tl.maximum((estimate.to(tl.int32, bitcast=True) >> 23) - FORMAT.mantissa, FORMAT.least + 127)
    below = (estimate * power_of_two(254 - quantum)).to(tl.int32)
    middle = (below.to(tl.float32) + 0.5) * power_of_two(quantum)
    excess = x - middle * upper_half
    tie = middle * lower_half
    is_up = (excess > tie) | ((excess == tie) & (below % 2 == 1))
    # Codes are in the order of the values: below counts quanta, and each doubling of the quantum 2^MANTISSA codes.
    return ((quantum - (FORMAT.least + 127)) << FORMAT.mantissa) + below + is_up.to(tl.int32)
