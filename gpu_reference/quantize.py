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
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from gpu_reference._lib.formats import (
    FORMATS,
    INFINITY,
    SIGN,
    SMALLEST,
    DualQuantized,
    Quantized,
    as_codes,
    checked,
    decoded,
    power_of_two,
)
from gpu_reference._lib.hardware import check_devices
from gpu_reference._lib.launch import Launch
from op_arguments import dtype_name
from op_arguments.debug import Debug, named
from op_arguments.quantize import (
    FP8,
    Blocks,
    check_blocks,
    check_dequantize,
    check_dual_quantize,
    check_quantize,
)

TILE = 128 * 128  # elements of a program: the two block sizes of 128 in one tile, 64 to a thread
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
    debug: Debug = None,
) -> Quantized:
    """x in fp8, with one scale per block of `block_size` elements (None: all) along each axis in `axis`.

    x [...] float32, bfloat16 or float16, of any strides. Returns qvalue [...] in dtype (float8_e4m3fn or float8_e5m2)
    and scale float32, whose `axis` are divided by the block, both contiguous. `scale = absmax / finfo(dtype).max`,
    absmax taken over the finite elements, correctly rounded and at least the smallest normal float32; 1 where absmax
    is 0. `qvalue = x / scale`, the exact quotient rounded once, to nearest even; zeros keep x's sign; NaN stays NaN
    (the positive quiet one). ±inf in a CPU tensor is refused with check_finite; it becomes ±finfo(dtype).max without.
    Raises TypeError for a wrong dtype, ValueError for a wrong axis, a block that does not divide, or ±inf, and
    RuntimeError for CPU tensors where Triton's interpreter is off.
    debug: see `op_arguments.debug`, of absmax, scale and spread, the scale of each element.
    """
    blocks, name = check_quantize(x, axis, block_size, dtype)
    device = checked(x, check_finite, has_nan=True)
    return _quantize(x, blocks, name, device, debug)


def int8_quantize(
    x: Tensor,
    axis: int | tuple[int, ...],
    block_size: int | None = 128,
    *,
    check_finite: bool = True,
    debug: Debug = None,
) -> Quantized:
    """As `fp8_quantize`, to int8 in [-127, 127], `scale = absmax / 127`.

    NaN, which int8 has not, is refused in a CPU tensor with check_finite and becomes 0 without.
    """
    blocks = check_blocks(x, axis, block_size)
    device = checked(x, check_finite, has_nan=False)
    return _quantize(x, blocks, "int8", device, debug)


def fp8_dual_quantize(
    x: Tensor,
    block_size: int | None = 128,
    *,
    dtype: Any = torch.float8_e4m3fn,
    check_finite: bool = True,
    debug: Debug = None,
) -> DualQuantized:
    """`fp8_quantize(x, -1, …)` and `fp8_quantize(x, -2, …)` by one kernel.

    It reads x [M, K] or [G, M, K] from memory once for both, or twice where blocks are longer than a tile (128).
    debug: as `fp8_quantize`, of both: rowwise_absmax and so on.
    """
    by_rows, by_columns, name = check_dual_quantize(x, block_size, dtype)
    device = checked(x, check_finite, has_nan=True)
    codes = [torch.empty(x.shape, dtype=torch.uint8, device=device) for _ in range(2)]
    scales = [_empty_scale(x, blocks) for blocks in (by_rows, by_columns)]
    if x.numel():
        plane = x.reshape(-1, x.shape[-1]).contiguous()
        blocks = by_columns[-2], by_rows[-1]
        rowwise, columnwise = map(Quantized, codes, scales)
        for launch in quantize_launches(plane, blocks, name, rowwise, columnwise, debug):
            launch.run(device)
    by_row, by_column = (part.view(getattr(torch, name)) for part in codes)
    return DualQuantized(by_row, scales[0], by_column, scales[1])


def fp8_dequantize(qvalue: Tensor, scale: Tensor) -> Tensor:
    """qvalue · scale in float32: [...] fp8 times its block's scale, rounded once; a subnormal result is zero.

    Raises TypeError for a wrong dtype, ValueError for a scale that does not divide qvalue, and as `fp8_quantize`.
    """
    return _dequantize(qvalue, scale, FP8)


def int8_dequantize(qvalue: Tensor, scale: Tensor) -> Tensor:
    """As `fp8_dequantize`, of int8."""
    return _dequantize(qvalue, scale, ("int8",))


def _quantize(x: Tensor, blocks: Blocks, name: str, device: torch.device, debug: Debug) -> Quantized:
    plane, plane_blocks, restored = _plane(x, blocks)
    codes, scale = torch.empty_like(plane, dtype=torch.uint8), _empty_scale(x, blocks)
    if x.numel():
        for launch in quantize_launches(plane, plane_blocks, name, Quantized(codes, scale), debug=debug):
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


def quantize_launches(
    plane: Tensor,
    blocks: tuple[int, int],
    name: str,
    result: Quantized,
    columnwise: Quantized | None = None,
    debug: Debug = None,
) -> list[Launch]:
    """The kernels that quantise contiguous x [rows, columns] in `blocks`, its codes in bytes: one, or where a block is
    larger than a tile two, the first of which finds the largest magnitudes.

    With `columnwise`, `result` is in blocks of 1 x blocks[1], and `columnwise` in blocks of blocks[0] x 1.
    """
    cell, tile = _cells(plane, blocks)
    grid, geometry = _geometry(plane, cell, tile)
    arguments: dict[str, Any] = {
        "x": plane,
        "absmax": None,
        "qvalue": result.qvalue,
        "scale": result.scale,
        "columnwise_absmax": None,
        "columnwise": columnwise.qvalue if columnwise else None,
        "columnwise_scale": columnwise.scale if columnwise else None,
        **geometry,
        "REDUCE_ROWS": blocks[0] > 1,
        "REDUCE_COLUMNS": blocks[1] > 1,
        **{name.upper(): value for name, value in FORMATS[name]._asdict().items()},
        "DEBUG": named(debug, "rowwise") if columnwise else debug,
        "COLUMNWISE_DEBUG": named(debug, "columnwise"),
    }
    quantize = Launch(_quantize_kernel, grid, arguments, OPTIONS)
    if all(block <= size for block, size in zip(blocks, tile, strict=True)):
        return [quantize]
    absmax = {"absmax": torch.zeros_like(result.scale, dtype=torch.int32)}
    if columnwise:
        absmax["columnwise_absmax"] = torch.zeros_like(columnwise.scale, dtype=torch.int32)
    find = quantize._replace(arguments=arguments | absmax | {"qvalue": None, "columnwise": None})
    return [find, quantize._replace(arguments=arguments | absmax)]


def dequantize_launch(codes: Tensor, blocks: tuple[int, int], name: str, scale: Tensor, out: Tensor) -> Launch:
    """The kernel that dequantises contiguous codes [rows, columns], as `as_codes` has them, in `blocks`."""
    grid, geometry = _geometry(codes, *_cells(codes, blocks))
    arguments = {
        "codes": codes,
        "scale": scale,
        "out": out,
        **geometry,
        "REDUCE_ROWS": blocks[0] > 1,
        "REDUCE_COLUMNS": blocks[1] > 1,
        "FORMAT": name,
    }
    return Launch(_dequantize_kernel, grid, arguments, OPTIONS)


def _cells(plane: Tensor, blocks: tuple[int, int]) -> tuple[tuple[int, int], tuple[int, int]]:
    """What a group of programs covers (a block, or the whole of an axis that has none) and one of them, in powers of
    two: along a row first, unless it is the columns that are reduced."""
    rows, columns = (size if block == 1 else block for size, block in zip(plane.shape, blocks, strict=True))
    tile_columns = min(int(triton.next_power_of_2(columns)), TILE if blocks[0] == 1 else COLUMNS)
    tile_rows = min(int(triton.next_power_of_2(rows)), TILE // tile_columns)
    return (rows, columns), (tile_rows, tile_columns)


def _geometry(plane: Tensor, cell: tuple[int, int], tile: tuple[int, int]) -> tuple[tuple[int], dict[str, int]]:
    """The grid of programs, and the arguments from which each finds its tile."""
    rows, columns = plane.shape
    cells_across = columns // cell[1]
    parts = triton.cdiv(cell[0], tile[0]), triton.cdiv(cell[1], tile[1])
    arguments = {
        "columns": columns,
        "cell_rows": cell[0],
        "cell_columns": cell[1],
        "cells_across": cells_across,
        "parts_down": parts[0],
        "parts_across": parts[1],
        "TILE_ROWS": tile[0],
        "TILE_COLUMNS": tile[1],
    }
    return (rows // cell[0] * cells_across * math.prod(parts),), arguments


@triton.jit
def _quantize_kernel(
    x,
    absmax,
    qvalue,
    scale,
    columnwise_absmax,
    columnwise,
    columnwise_scale,
    columns,
    cell_rows,
    cell_columns,
    cells_across,
    parts_down,
    parts_across,
    TILE_ROWS: tl.constexpr,
    TILE_COLUMNS: tl.constexpr,
    REDUCE_ROWS: tl.constexpr,
    REDUCE_COLUMNS: tl.constexpr,
    ODD: tl.constexpr,
    EXPONENT: tl.constexpr,
    MANTISSA: tl.constexpr,
    LEAST: tl.constexpr,
    LARGEST: tl.constexpr,
    NAN: tl.constexpr,
    DEBUG: tl.constexpr,
    COLUMNWISE_DEBUG: tl.constexpr,
):
    """One program per tile of a cell: a block, or all that is there along the axes that are not reduced. With
    columnwise_scale the cell holds blocks of both results. Each is made from its own load of the tile, the second from
    the cache: registers do not hold it through both."""
    cell_row, cell_column, row, column, in_rows, in_columns = _tile_of_program(
        cell_rows, cell_columns, cells_across, parts_down, parts_across, TILE_ROWS, TILE_COLUMNS
    )
    if columnwise_scale is not None:
        block, in_block = _blocks_of_tile(
            cell_row, cell_column, cells_across, columns, row, column, in_rows, in_columns, REDUCE_ROWS, False
        )
        _quantize_tile(
            x + (row * columns + column),
            in_rows & in_columns,
            columnwise_absmax,
            columnwise,
            columnwise_scale,
            row * columns + column,
            block,
            in_block,
            REDUCE_ROWS,
            False,
            ODD,
            EXPONENT,
            MANTISSA,
            LEAST,
            LARGEST,
            NAN,
            COLUMNWISE_DEBUG,
        )
    BOTH: tl.constexpr = REDUCE_ROWS and columnwise_scale is None
    block, in_block = _blocks_of_tile(
        cell_row, cell_column, cells_across, columns, row, column, in_rows, in_columns, BOTH, REDUCE_COLUMNS
    )
    _quantize_tile(
        x + (row * columns + column),
        in_rows & in_columns,
        absmax,
        qvalue,
        scale,
        row * columns + column,
        block,
        in_block,
        BOTH,
        REDUCE_COLUMNS,
        ODD,
        EXPONENT,
        MANTISSA,
        LEAST,
        LARGEST,
        NAN,
        DEBUG,
    )


@triton.jit
def _quantize_tile(
    x_tile,
    in_tile,
    absmax,
    qvalue,
    scale,
    position,
    block,
    in_block,
    REDUCE_ROWS: tl.constexpr,
    REDUCE_COLUMNS: tl.constexpr,
    ODD: tl.constexpr,
    EXPONENT: tl.constexpr,
    MANTISSA: tl.constexpr,
    LEAST: tl.constexpr,
    LARGEST: tl.constexpr,
    NAN: tl.constexpr,
    DEBUG: tl.constexpr,
):
    """Quantise a tile, or with no `qvalue` yet, only raise the `absmax` of its blocks.

    Largest magnitudes are compared and kept as float32 bits, whose order is that of the values. A tile that holds
    whole blocks has no `absmax`: it knows their largest itself.
    """
    bits = tl.load(x_tile, mask=in_tile, other=0).to(tl.float32).to(tl.int32, bitcast=True)
    magnitude = bits & 0x7FFFFFFF
    magnitude = tl.where(magnitude < SMALLEST, 0, magnitude)
    finite = tl.where(magnitude < INFINITY, magnitude, 0)
    if qvalue is None or absmax is None:
        largest = finite
        if REDUCE_COLUMNS:
            largest = tl.max(largest, axis=1, keep_dims=True)
        if REDUCE_ROWS:
            largest = tl.max(largest, axis=0, keep_dims=True)
    else:
        largest = tl.load(absmax + block, mask=in_block, other=0)
    if qvalue is None:
        tl.atomic_max(absmax + block, largest, mask=in_block)
    else:
        block_scale = _scale(largest, ODD, EXPONENT)
        if DEBUG is not None:
            DEBUG("absmax", largest.to(tl.float32, bitcast=True), in_block)
            DEBUG("scale", block_scale, in_block)
            DEBUG("spread", tl.broadcast_to(block_scale, in_tile.shape), in_tile)
        tl.store(scale + block, block_scale, mask=in_block)
        codes = _codes(bits, magnitude, finite, block_scale, MANTISSA, LEAST, LARGEST, NAN)
        tl.store(qvalue + position, codes, mask=in_tile)


@triton.jit
def _dequantize_kernel(
    codes,
    scale,
    out,
    columns,
    cell_rows,
    cell_columns,
    cells_across,
    parts_down,
    parts_across,
    TILE_ROWS: tl.constexpr,
    TILE_COLUMNS: tl.constexpr,
    REDUCE_ROWS: tl.constexpr,
    REDUCE_COLUMNS: tl.constexpr,
    FORMAT: tl.constexpr,
):
    """One program per tile of a cell, as in `_quantize_kernel`."""
    cell_row, cell_column, row, column, in_rows, in_columns = _tile_of_program(
        cell_rows, cell_columns, cells_across, parts_down, parts_across, TILE_ROWS, TILE_COLUMNS
    )
    block, in_block = _blocks_of_tile(
        cell_row, cell_column, cells_across, columns, row, column, in_rows, in_columns, REDUCE_ROWS, REDUCE_COLUMNS
    )
    position = row * columns + column
    in_tile = in_rows & in_columns
    values = decoded(tl.load(codes + position, mask=in_tile, other=0), FORMAT).to(tl.float32)
    product = values * tl.load(scale + block, mask=in_block, other=0)
    bits = product.to(tl.int32, bitcast=True)
    bits = tl.where((bits & 0x7FFFFFFF) < SMALLEST, bits & SIGN, bits)
    tl.store(out + position, bits.to(tl.float32, bitcast=True), mask=in_tile)


@triton.jit
def _tile_of_program(
    cell_rows,
    cell_columns,
    cells_across,
    parts_down,
    parts_across,
    TILE_ROWS: tl.constexpr,
    TILE_COLUMNS: tl.constexpr,
):
    """This program's cell, and the rows [TILE_ROWS, 1] and columns [1, TILE_COLUMNS] of its part of it, int64."""
    program = tl.program_id(0)
    parts = parts_down * parts_across
    cell = (program // parts).to(tl.int64)
    part = (program % parts).to(tl.int64)
    cell_row = cell // cells_across
    cell_column = cell % cells_across
    down = part // parts_across * TILE_ROWS + tl.arange(0, TILE_ROWS)[:, None]
    across = part % parts_across * TILE_COLUMNS + tl.arange(0, TILE_COLUMNS)[None, :]
    row = cell_row * cell_rows + down
    column = cell_column * cell_columns + across
    return cell_row, cell_column, row, column, down < cell_rows, across < cell_columns


@triton.jit
def _blocks_of_tile(
    cell_row,
    cell_column,
    cells_across,
    columns,
    row,
    column,
    in_rows,
    in_columns,
    REDUCE_ROWS: tl.constexpr,
    REDUCE_COLUMNS: tl.constexpr,
):
    """Where the scales of a tile are, [TILE_ROWS or 1, TILE_COLUMNS or 1], and which of them exist."""
    one = tl.arange(0, 1)
    if REDUCE_ROWS:
        row = cell_row + one[:, None]
        in_rows = one[:, None] == 0
    if REDUCE_COLUMNS:
        columns = cells_across
        column = cell_column + one[None, :]
        in_columns = one[None, :] == 0
    return row * columns + column, in_rows & in_columns


@triton.jit
def _scale(largest, ODD: tl.constexpr, EXPONENT: tl.constexpr):
    """largest / (ODD · 2^EXPONENT), correctly rounded, at least the smallest normal float32; 1 for 0.

    The significand is divided as an integer, shifted so that the quotient has 24 bits. There are no ties: ODD is odd.
    """
    DIGITS: tl.constexpr = 3 if ODD < 8 else 7
    significand = (largest & 0x007FFFFF) | 0x00800000
    is_large = (significand >= (ODD << (24 - DIGITS))).to(tl.int32)
    dividend = significand << (DIGITS - is_large)
    quotient = dividend // ODD + (2 * (dividend % ODD) > ODD).to(tl.int32)
    exponent = (largest >> 23) - EXPONENT - DIGITS + is_large
    bits = (exponent << 23) + (quotient - 0x00800000)
    return tl.where(largest == 0, ONE, tl.maximum(bits, SMALLEST)).to(tl.float32, bitcast=True)


@triton.jit
def _codes(
    bits,
    magnitude,
    finite,
    scale,
    MANTISSA: tl.constexpr,
    LEAST: tl.constexpr,
    LARGEST: tl.constexpr,
    NAN: tl.constexpr,
):
    """The codes of x / scale, rounded once to nearest even, from x's bits and magnitudes.

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
    quantum = tl.maximum((estimate.to(tl.int32, bitcast=True) >> 23) - MANTISSA, LEAST + 127)
    below = (estimate * power_of_two(254 - quantum)).to(tl.int32)
    middle = (below.to(tl.float32) + 0.5) * power_of_two(quantum)
    excess = x - middle * upper_half
    tie = middle * lower_half
    is_up = (excess > tie) | ((excess == tie) & (below % 2 == 1))
    # Codes are in the order of the values: below counts quanta, and each doubling of the quantum 2^MANTISSA codes.
    code = ((quantum - (LEAST + 127)) << MANTISSA) + below + is_up.to(tl.int32)

    code = tl.where(magnitude == INFINITY, LARGEST, code)
    IS_INT8: tl.constexpr = MANTISSA == 7
    code = tl.where(bits < 0, -code if IS_INT8 else code | 0x80, code)
    return tl.where(magnitude > INFINITY, NAN, code).to(tl.uint8)
