"""Narrow formats: their codes as bits, the pairs that quantisers return, and what all quantisers check and share.

Codes are put together and taken apart as bits, so that no conversion instruction is relied upon.
"""
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators
# (kernel arguments are what Triton makes of them; every host function below is annotated)

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from gpu_reference._lib.hardware import check_devices
from op_arguments.mxfp8 import MX_BLOCK
from op_arguments.quantize import check_finite_values

SMALLEST = tl.constexpr(0x00800000)  # bits of the smallest normal float32
INFINITY = tl.constexpr(0x7F800000)  # bits of float32 inf; NaNs are larger
SIGN = tl.constexpr(-(2**31))
BLOCK = tl.constexpr(MX_BLOCK)


class Output(NamedTuple):
    """Where a kernel stores a quantised array, in bytes, and the scales of its blocks.

    absmax: the largest magnitudes of blocks that no tile holds whole, which a launch with no qvalue finds first.
    """

    qvalue: Any
    scale: Any
    absmax: Any = None


NO_OUTPUT = Output(None, None)
"""In place of a result that is not asked for (as NO_OPERAND in `gpu_reference._lib.operands`)."""


class Format(NamedTuple):
    """A narrow format: its largest value is odd · 2^exponent, its smallest 2^least; a value has `mantissa` bits after
    its first (int8, all whose values are multiples of 1: as many as it has); `largest` and `nan` are codes.
    """

    odd: int
    exponent: int
    mantissa: int
    least: int
    largest: int
    nan: int


FORMATS = {
    "float8_e4m3fn": Format(odd=7, exponent=6, mantissa=3, least=-9, largest=0x7E, nan=0x7F),
    "float8_e5m2": Format(odd=7, exponent=13, mantissa=2, least=-16, largest=0x7B, nan=0x7E),
    "int8": Format(odd=127, exponent=0, mantissa=7, least=0, largest=127, nan=0),
}


def checked(x: Tensor, check_finite: bool, *, has_nan: bool) -> torch.device:
    """x's device, after checking its values where the host can read them at once."""
    device = check_devices({"x": x})
    if check_finite and device.type == "cpu":
        check_finite_values(int(x.isinf().sum()), 0 if has_nan else int(x.isnan().sum()))
    return device


def as_codes(qvalue: Tensor) -> Tensor:
    """A narrow array as kernels take it apart: int8 as it is, fp8 as its bytes."""
    return qvalue if qvalue.dtype == torch.int8 else qvalue.view(torch.uint8)


@triton.jit
def tile_of_program(down, across):
    """This program's array (int64), each of which has `down` times `across` tiles, and its tile's place down and
    across."""
    program = tl.program_id(0)
    tile = program % (down * across)
    return (program // (down * across)).to(tl.int64), tile // across, tile % across


@triton.jit
def decoded(codes, FORMAT: tl.constexpr):
    """Codes of a narrow FORMAT as float16, which holds all their values; int8, which it holds too, as it is."""
    values = codes
    if FORMAT != "int8":
        bits = codes.to(tl.int16)
        if FORMAT == "float8_e5m2":  # the upper half of a float16
            values = (bits << 8).to(tl.float16, bitcast=True)
        else:
            # float16 counts its exponents from 8 lower. The factor also makes normal what is subnormal in both.
            magnitude = bits & 0x7F
            half = tl.where(magnitude == 0x7F, 0x7E00, magnitude << 7) | ((bits & 0x80) << 8)
            values = half.to(tl.int16).to(tl.float16, bitcast=True) * 256.0
    return values


@triton.jit
def mxfp8_values(codes, scales, AXIS: tl.constexpr, FORMAT: tl.constexpr):
    """Codes [rows, columns] times their scales in float32, both in bytes; scales has one for every 32 along AXIS.

    Exact, but at the ends of float32's exponents."""
    ROWS: tl.constexpr = codes.shape[0]
    COLUMNS: tl.constexpr = codes.shape[1]
    exponent = scales.to(tl.int32)
    bits = tl.where(exponent == 0, 0x00400000, exponent << 23)  # 2^-127 is subnormal
    power = tl.where(exponent == 255, 0x7FC00000, bits).to(tl.float32, bitcast=True)
    # It is the codes that are taken apart into blocks, since registers keep their places under a reshape.
    if AXIS == 0:
        blocks = codes.reshape(ROWS // BLOCK, BLOCK, COLUMNS)
        power = power[:, None, :]
    else:
        blocks = codes.reshape(ROWS, COLUMNS // BLOCK, BLOCK)
        power = power[:, :, None]
    return (decoded(blocks, FORMAT).to(tl.float32) * power).reshape(ROWS, COLUMNS)


@triton.jit
def magnitudes(bits):
    """|x| from float32 bits of x, as bits, whose order is that of the values, and |x| where it is finite; else 0.

    Subnormals are 0 in both."""
    magnitude = bits & 0x7FFFFFFF
    magnitude = tl.where(magnitude < SMALLEST, 0, magnitude)
    return magnitude, tl.where(magnitude < INFINITY, magnitude, 0)


@triton.jit
def code_of(bits, magnitude, code, FORMAT: tl.constexpr):
    """The codes of x in bytes, from its float32 bits and magnitudes, and from the codes of |x| where it is finite."""
    IS_INT8: tl.constexpr = FORMAT.mantissa == 7
    code = tl.where(magnitude == INFINITY, FORMAT.largest, code)
    code = tl.where(bits < 0, -code if IS_INT8 else code | 0x80, code)
    return tl.where(magnitude > INFINITY, FORMAT.nan, code).to(tl.uint8)


@triton.jit
def flushed(x):
    """float32 x, subnormals as zeros of their sign."""
    bits = x.to(tl.int32, bitcast=True)
    return tl.where((bits & 0x7FFFFFFF) < SMALLEST, bits & SIGN, bits).to(tl.float32, bitcast=True)


@triton.jit
def power_of_two(biased_exponent):
    return (biased_exponent << 23).to(tl.float32, bitcast=True)
