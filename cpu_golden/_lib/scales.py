"""Formats of 8 bits, and scales of blocks."""

from typing import Any

import ml_dtypes
import numpy as np

from cpu_golden import Array
from cpu_golden.stages import Stages
from op_arguments.mxfp8 import MX_BLOCK
from op_arguments.quantize import Blocks, check_finite_values

SMALLEST = float(np.finfo(np.float32).tiny)


def expand(scale: Array, blocks: Blocks) -> Array:
    """A scale repeated over its blocks, in float64."""
    wide = scale.astype(np.float64)
    for axis, block in enumerate(blocks):
        wide = np.repeat(wide, block, axis)
    return wide


def spread(scale: Array, axis: int, size: int) -> Array:
    """The scales of `size` elements along an axis, in float64."""
    return np.take(np.repeat(scale.astype(np.float64), MX_BLOCK, axis), np.arange(size), axis)


def flushed(x: Array) -> Array:
    """x in float64, its subnormals zero."""
    with np.errstate(invalid="ignore"):  # signalling NaNs
        values = x.astype(np.float64)
    return np.where(np.abs(values) < SMALLEST, np.copysign(0.0, values), values)


def check_finite_here(x: Array, nan: bool = False) -> None:
    """Refuse infinities in x, and with `nan` NaN (ValueError)."""
    values = x.astype(np.float64)
    check_finite_values(int(np.isinf(values).sum()), int(np.isnan(values).sum()) if nan else 0)


def round_fp8(values: Array, dtype: np.dtype[Any]) -> Array:
    """float64 values to the nearest one of an fp8 format, ties to even."""
    info = ml_dtypes.finfo(dtype)
    _, exponent = np.frexp(values)  # |values| in [2^(exponent - 1), 2^exponent)
    quantum = np.ldexp(1.0, np.maximum(exponent - 1, int(info.minexp)) - int(info.nmant))
    return np.rint(values / quantum) * quantum


def named_output(stages: Stages, output: str) -> Stages:
    """The stages of a quantiser that is one of two: its qvalue is at `output`, all else behind that name."""
    return stages.renamed(qvalue=output, **{site: f"{output}_{site}" for site in ("absmax", "scale", "spread")})
