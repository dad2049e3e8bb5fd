"""Dtypes by name: what they are in NumPy, how they are spelled, how they round."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np

Floats = np.ndarray[Any, np.dtype[np.float64]]

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


def numpy_dtype(name: str) -> np.dtype[Any]:
    """The NumPy (or ml_dtypes) dtype called `name`; raises TypeError for a name neither has."""
    return np.dtype(getattr(ml_dtypes, name, name))


def round_to(values: Floats, dtype: str) -> np.ndarray:
    """float64 values rounded once, to nearest even, to the dtype called `dtype` (an integer dtype must hold them).

    A direct cast to a narrow dtype goes through float32 and rounds twice; so float32 is entered by rounding to odd
    (Boldo & Melquiond 2008, IEEE TC 57:462), which keeps the sticky bit.
    """
    if dtype == "tf32":  # 11 significant bits in a float32
        mantissa, exponent = np.frexp(values)
        return np.ldexp(np.rint(mantissa * 2.0**11) * 2.0**-11, exponent).astype(np.float32)
    if dtype == "bf16x2":  # the sum of two bfloat16, in a float32
        high = round_to(values, "bfloat16").astype(np.float64)
        return (high + round_to(values - high, "bfloat16")).astype(np.float32)
    target = numpy_dtype(dtype)
    if target.kind == "i":
        return np.rint(values).astype(target)
    if target.itemsize >= 4:
        return values.astype(target)
    with np.errstate(over="ignore", invalid="ignore"):
        single = values.astype(np.float32)
    inexact = np.isfinite(single) & (single.astype(np.float64) != values)
    bits = single.view(np.uint32)
    away = inexact & (np.abs(single.astype(np.float64)) > np.abs(values))
    bits[...] = np.where(inexact, (bits - away) | 1, bits)
    with np.errstate(over="ignore", invalid="ignore"):
        return single.astype(target)
