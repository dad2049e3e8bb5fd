"""The narrow formats written out from their definition, and quantisers by exhaustive search: slow, and nobody's code.

OCP 8-bit floating point (arXiv:2209.05433): sign, exponent, mantissa; e4m3 has bias 7 and NaN alone at S.1111.111,
e5m2 has bias 15 and IEEE 754's infinities and NaNs.
"""

from functools import cache
from typing import NamedTuple

import ml_dtypes
import numpy as np

TINY = 2.0**-126


class Format(NamedTuple):
    exponent_bits: int
    mantissa_bits: int
    bias: int
    largest: float
    nan: int  # the code that stands for NaN


FORMATS = {
    "float8_e4m3fn": Format(4, 3, 7, 448.0, 0x7F),
    "float8_e5m2": Format(5, 2, 15, 57344.0, 0x7E),
    "int8": Format(0, 7, 0, 127.0, 0),
}
MX = ["float8_e4m3fn", "float8_e5m2"]
"""Those whose blocks have E8M0 scales."""
BITS_OF = {"float8_e4m3fn": ml_dtypes.float8_e4m3fn, "float8_e5m2": ml_dtypes.float8_e5m2, "int8": np.int8}


@cache
def decode(name):
    """The value of each of the 256 codes."""
    f = FORMATS[name]
    if name == "int8":
        return np.arange(256, dtype=np.uint8).view(np.int8).astype(np.float64)
    values = np.empty(256)
    for code in range(256):
        exponent = (code >> f.mantissa_bits) & (2**f.exponent_bits - 1)
        mantissa = code & (2**f.mantissa_bits - 1)
        if exponent:
            value = (1 + mantissa / 2**f.mantissa_bits) * 2.0 ** (exponent - f.bias)
        else:
            value = mantissa / 2**f.mantissa_bits * 2.0 ** (1 - f.bias)
        if name == "float8_e4m3fn" and exponent == 15 and mantissa == 7:
            value = np.nan
        if name == "float8_e5m2" and exponent == 31:
            value = np.nan if mantissa else np.inf
        values[code] = -value if code >> 7 else value
    return values


def nearest_code(quotient, name):
    """The codes of the representable values nearest to |quotient| <= largest; of two equally near ones the even code.

    By search over all non-negative values and their midpoints, in float64, where both are exact.
    """
    values = decode(name)[:0x80]
    values = values[np.isfinite(values)]  # codes ascend with their values
    midpoints = (values[1:] + values[:-1]) / 2
    below, through = (np.searchsorted(midpoints, np.abs(quotient), side) for side in ("left", "right"))
    return np.where(below % 2 == 0, below, through)  # they differ on a midpoint alone


def quantise(x, scale_shape, name):
    """(codes in the format's dtype, scale float32) of x [R, C], one scale for each block that `scale_shape` leaves."""
    f = FORMATS[name]
    with np.errstate(invalid="ignore"):  # signalling NaNs
        values = x.astype(np.float64)
    values[np.abs(values) < TINY] *= 0.0  # float32 subnormals are zeros of their sign
    codes, scale = np.empty(x.shape, np.uint8), np.empty(scale_shape, np.float32)
    rows, columns = (n // s for n, s in zip(x.shape, scale_shape, strict=True))
    for i, j in np.ndindex(scale_shape):
        block = np.s_[i * rows : (i + 1) * rows, j * columns : (j + 1) * columns]
        part = values[block]
        absmax = np.abs(part[np.isfinite(part)]).max(initial=0.0)
        scale[i, j] = max(np.float32(absmax / f.largest), np.float32(TINY)) if absmax else 1.0
        quotient = np.clip(part / np.float64(scale[i, j]), -f.largest, f.largest)
        found = nearest_code(np.nan_to_num(quotient), name)
        if name == "int8":
            signed = np.where(np.signbit(quotient), -found, found)
            codes[block] = np.where(np.isnan(part), 0, signed).astype(np.int8).view(np.uint8)
        else:
            codes[block] = np.where(np.isnan(part), f.nan, found | np.where(np.signbit(part), 0x80, 0))
    return codes.view(BITS_OF[name]), scale
