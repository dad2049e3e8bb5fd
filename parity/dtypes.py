"""Dtypes by name: what they are in NumPy, how they are spelled, how they round."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import ml_dtypes
import numpy as np

from parity.blocks import in_blocks

Floats = np.ndarray[Any, np.dtype[np.float64]]
Words = Callable[[Floats], np.ndarray]
"""Random uint64 for float64 values, one for each, in their shape."""

SHORT_NAMES = {
    "float32": "f32", "bfloat16": "bf16", "float16": "f16", "float64": "f64",
    "float8_e4m3fn": "e4m3", "float8_e5m2": "e5m2", "int8": "i8",
}  # fmt: skip

UNIT_ROUNDOFF = {
    "float64": 2.0**-53,
    "float32": 2.0**-24,
    "tf32": 2.0**-11,
    "float16": 2.0**-11,
    "bfloat16": 2.0**-8,
    "float8_e4m3fn": 2.0**-4,
    "float8_e5m2": 2.0**-3,
}
"""Half an ulp at 1, bounding the relative error of one rounding to nearest."""

OFF_BY_ULPS = {f"float32/{2**lost}": 24 - lost for lost in range(1, 11)}
"""Significant digits of what a function returns in float32: float32/2 of an exp that is off by up to two ulps."""

IN_FLOAT32 = {"tf32": 11, **OFF_BY_ULPS}
"""Significant digits of what is kept in a float32."""

TOWARD_ZERO = " toward zero"
"""Follows the name of a dtype that hardware rounds to by leaving digits out, as a TF32 instruction does."""

OF_POWER = " of a power"
"""Follows the name of a dtype where hardware rounds the exponent of two that a value comes out of to float32 first."""


def numpy_dtype(name: str) -> np.dtype[Any]:
    """The NumPy (or ml_dtypes) dtype called `name`; raises TypeError for a name neither has."""
    return np.dtype(getattr(ml_dtypes, name, name))


def round_to(values: Floats, dtype: str) -> np.ndarray:
    """float64 values rounded once, to nearest even, to the dtype called `dtype` (an integer dtype must hold them).

    A direct cast to a narrow dtype goes through float32 and rounds twice; so float32 is entered by rounding to odd
    (Boldo & Melquiond 2008, IEEE TC 57:462), which keeps the sticky bit. A float32 that is `TOWARD_ZERO` is cut off.
    """
    if dtype.endswith(OF_POWER):
        values = _powers(values, lambda exponents: exponents.astype(np.float32).astype(np.float64))
        return round_to(values, dtype.removesuffix(OF_POWER))
    if dtype.endswith(TOWARD_ZERO):
        return _toward_zero(values, dtype).astype(np.float32)
    if dtype in IN_FLOAT32:
        mantissa, exponent = np.frexp(values)
        unit = 2.0 ** IN_FLOAT32[dtype]
        return np.ldexp(np.rint(mantissa * unit) / unit, exponent).astype(np.float32)
    if dtype == "bf16x2":  # the sum of two bfloat16, in a float32
        high = round_to(values, "bfloat16").astype(np.float64)
        return (high + round_to(values - high, "bfloat16")).astype(np.float32)
    target = numpy_dtype(dtype)
    if target.kind == "i":
        return np.rint(values).astype(target)
    if target.itemsize >= 4:
        return values.astype(target)
    with np.errstate(over="ignore", invalid="ignore"):
        if target.itemsize > 1:
            return in_blocks(_to_odd, values, dtype=target)
        narrowed = _from_bfloat16(dtype)
        return in_blocks(lambda x: narrowed.take(_high_half(_to_odd(x))), values, dtype=target)


def neighbour(y: np.ndarray, above: np.ndarray | bool) -> Floats:
    """The number of y's dtype next to each of y, in its shape and float64; infinite beyond the last.

    y: of a dtype of `UNIT_ROUNDOFF`. above: whether the one above, not below; of y's shape, or one for all.
    """
    infinity = np.array(np.inf, y.dtype)
    end = infinity if np.isinf(infinity) else ml_dtypes.finfo(y.dtype).max
    with np.errstate(invalid="ignore", over="ignore"):  # signalling NaNs; beyond float16's last
        found: Floats = np.nextafter(y, np.where(above, end, -end)).astype(np.float64)
        if end is not infinity:
            found = np.where(found == y.astype(np.float64), np.where(above, np.inf, -np.inf), found)
    return found


def _to_odd(values: Floats) -> np.ndarray:
    """float64 values in float32, rounded to odd: an inexact one goes to its neighbour with an odd last bit."""
    single = values.astype(np.float32)
    wide = single.astype(np.float64)
    inexact = np.isfinite(single)
    inexact &= wide != values
    bits = single.view(np.uint32)
    bits -= inexact & (np.abs(wide) > np.abs(values))
    bits |= inexact
    return single


def _high_half(single: np.ndarray) -> np.ndarray:
    """The bfloat16 patterns (uint16) of float32 values, rounded to odd."""
    bits = single.view(np.uint32)
    high: np.ndarray = (bits >> np.uint32(16)).astype(np.uint16)
    high |= bits & np.uint32(0xFFFF) != 0
    return high


@cache
def _from_bfloat16(dtype: str) -> np.ndarray:
    """A table [2**16]: each bfloat16 pattern in the dtype called `dtype`.

    A cast of random values to 8 bits waits for branches; this does not.
    """
    return np.arange(2**16, dtype=np.uint16).view(ml_dtypes.bfloat16).astype(numpy_dtype(dtype))


def cut_off(values: Floats, digits: int) -> Floats:
    """float64 values without all but their leading `digits` significant bits: rounded towards zero."""
    mantissa, exponent = np.frexp(values)
    cut: Floats = np.ldexp(np.trunc(np.ldexp(mantissa, digits)), exponent - digits)
    return cut


def _toward_zero(values: Floats, dtype: str) -> Floats:
    """float64 values rounded toward zero to a dtype of `TOWARD_ZERO`; those that are not finite stay."""
    if dtype == "bf16x2" + TOWARD_ZERO:
        high = _toward_zero(values, "bfloat16" + TOWARD_ZERO)
        with np.errstate(invalid="ignore"):
            return high + _toward_zero(np.where(np.isfinite(high), values - high, 0), "bfloat16" + TOWARD_ZERO)
    digits, smallest = FORMATS[dtype.removesuffix(TOWARD_ZERO)]
    quantum = smallest * 2.0 ** (1 - digits)  # of what is below the normal numbers
    with np.errstate(invalid="ignore"):
        return np.where(np.abs(values) < smallest, np.trunc(values / quantum) * quantum, cut_off(values, digits))


def stochastic(values: Floats, dtype: str, words: Words) -> Floats:
    """float64 values rounded at random to a neighbour in the dtype called `dtype`, right on average; in float64.

    Bits of `words` as random as those that the dtype has not are added to a value, and the sum cut off: a carry goes to
    the next number, across powers of two as well. Values that are not finite stay; no finite one overflows. What is
    rounded `TOWARD_ZERO` is not random: its error has a sign, and every run shares it.
    """
    if dtype.endswith(OF_POWER):
        values = _powers(values, lambda exponents: stochastic(exponents, "float32", words))
        return stochastic(values, dtype.removesuffix(OF_POWER), words)
    if dtype.endswith(TOWARD_ZERO):
        return _toward_zero(values, dtype)
    if dtype == "bf16x2":
        high = round_to(values, "bfloat16").astype(np.float64)
        return high + stochastic(values - high, "bfloat16", words)
    digits, smallest = FORMATS[dtype]
    values = np.ascontiguousarray(values, np.float64)
    noise = words(values)
    noise >>= np.uint64(11 + digits)
    noise += values.view(np.uint64)
    noise &= LEADING[digits]
    rounded = noise.view(np.float64)
    if smallest > SMALLEST:
        tiny = (np.abs(values) < smallest) & (values != 0)
        quantum = smallest * 2.0 ** (1 - digits)
        if tiny.any():
            rounded[tiny] = np.floor(values[tiny] / quantum + words(values)[tiny] * 2.0**-64) * quantum
    finite = np.isfinite(values)
    return rounded if finite.all() else np.where(finite, rounded, values)


def _powers(values: Floats, rounded: Callable[[Floats], Floats]) -> Floats:
    """float64 values as powers of two of `rounded` exponents."""
    with np.errstate(divide="ignore"):
        return np.copysign(np.exp2(rounded(np.log2(np.abs(values)))), values)


def _format(name: str) -> tuple[int, float]:
    info = ml_dtypes.finfo(numpy_dtype(name))
    return int(info.nmant) + 1, float(info.smallest_normal)


SMALLEST = float(np.finfo(np.float32).tiny)
"""Of float32 and bfloat16; below it errors are too small to matter."""
FORMATS = {name: _format(name) for name in UNIT_ROUNDOFF if name not in ("tf32", "float64")}
FORMATS |= {name: (digits, SMALLEST) for name, digits in IN_FLOAT32.items()}
"""Significant digits (with the leading 1) and smallest normal number of the dtypes that a site may round to."""
LEADING = [np.uint64(2**64 - 2 ** (53 - digits)) for digits in range(54)]
"""The bits of a float64 without those below as many significant digits, whose sign and exponent they leave."""
SITES = frozenset(name + how for name in (*FORMATS, "bf16x2") for how in ("", TOWARD_ZERO))
SITES |= {name + OF_POWER for name in ("float32", *OFF_BY_ULPS)}
"""What a site may be rounded to."""
