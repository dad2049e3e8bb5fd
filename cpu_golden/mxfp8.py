"""MXFP8, fp8 with one power of two for every 32 elements: the definition.

OCP Microscaling Formats (MX) v1.0, where what is left to the implementation is decided here. A scale is a byte, the
exponent of a power of two; all else, subnormals and sites too, is as in `cpu_golden/quantize.py`.
"""

from typing import Any

import ml_dtypes
import numpy as np

from cpu_golden import Array
from cpu_golden._lib.scales import SMALLEST, check_finite_here, flushed, named_output, round_fp8, spread
from cpu_golden.stages import Stages, exact
from op_arguments.mxfp8 import (
    E8M0,
    MX_BLOCK,
    check_mxfp8_dequantize,
    check_mxfp8_dual_quantize,
    check_mxfp8_quantize,
)
from op_arguments.quantize import DualQuantized, Quantized


def mxfp8_quantize(
    x: Array,
    axis: int,
    *,
    dtype: Any = "float8_e4m3fn",
    scale_rounding: str = "up",
    check_finite: bool = True,
    stages: Stages = exact,
) -> Quantized:
    """x in MXFP8: fp8 with one power of two per 32 consecutive elements along `axis`; a short last block is a block.

    x [...] float32, bfloat16 or float16. Returns qvalue [...] in dtype (float8_e4m3fn or float8_e5m2) and scale
    float8_e8m0fnu, whose `axis` is ceil(n / 32). With absmax taken over the finite elements the exponent of the scale
    is, for scale_rounding="up", ceil(log2(absmax / finfo(dtype).max)), the least that saturates nothing; for "floor",
    OCP's, floor(log2(absmax)) - 8 (e5m2: 15), which saturates the elements beyond finfo(dtype).max. It is at least
    -127, which is also that of a block of zeros; no finite x comes near the other end, 127. `qvalue = x / scale`,
    rounded once, to nearest even, saturating; zeros keep x's sign. NaN stays NaN in its element (the positive quiet
    one) and leaves its block alone: the scale is never NaN. ±inf is refused with check_finite (where the values are at
    hand) and becomes ±finfo(dtype).max without.
    Raises TypeError for a wrong dtype, ValueError for a wrong axis or rounding, or ±inf.
    """
    axis, name = check_mxfp8_quantize(x, axis, dtype, scale_rounding)
    if check_finite:
        check_finite_here(x)
    return _mxfp8_quantize(x, axis, name, scale_rounding, stages)


def mxfp8_dual_quantize(
    x: Array,
    *,
    dtype: Any = "float8_e4m3fn",
    scale_rounding: str = "up",
    check_finite: bool = True,
    stages: Stages = exact,
) -> DualQuantized:
    """`mxfp8_quantize(x, -1, …)` and `mxfp8_quantize(x, -2, …)`; the kernels read x [M, K] or [G, M, K] once for both.

    The columnwise payload is not the rowwise one: each has been rounded with its own scales.
    """
    name = check_mxfp8_dual_quantize(x, dtype, scale_rounding)
    if check_finite:
        check_finite_here(x)
    return DualQuantized(
        *_mxfp8_quantize(x, x.ndim - 1, name, scale_rounding, named_output(stages, "rowwise")),
        *_mxfp8_quantize(x, x.ndim - 2, name, scale_rounding, named_output(stages, "columnwise")),
    )


def mxfp8_dequantize(qvalue: Array, scale: Array, *, dtype: Any = None, stages: Stages = exact) -> Array:
    """qvalue · scale: [...] fp8 times the power of two of its 32, in float32 (default) or bfloat16.

    The axis that has the blocks is the one of scale (float8_e8m0fnu) that is ceil(n / 32). Exact in either dtype,
    but at the ends of the exponent range that both share: 2^128 and beyond becomes ±inf, and what is below 2^-126 ±0.
    A scale of NaN (0xFF) makes its block NaN. Raises TypeError for a wrong dtype, ValueError for a wrong scale.
    """
    axis, name = check_mxfp8_dequantize(qvalue, scale, dtype)
    with np.errstate(over="ignore", invalid="ignore"):
        wide = stages("spread", spread(scale, axis, qvalue.shape[axis]))
        product = stages("out", qvalue.astype(np.float64) * wide).astype(np.float32)
    product = np.where(np.abs(product) < np.float32(SMALLEST), np.copysign(np.float32(0), product), product)
    return product.astype(getattr(ml_dtypes, name, name))


def mxfp8_values(qvalue: Array, scale: Array, axis: int) -> Array:
    """qvalue times its scales in float64, which holds every product."""
    return qvalue.astype(np.float64) * spread(scale, axis, qvalue.shape[axis])


def _mxfp8_quantize(x: Array, axis: int, dtype: str, scale_rounding: str, stages: Stages) -> Quantized:
    target = np.dtype(getattr(ml_dtypes, dtype))
    largest = float(ml_dtypes.finfo(target).max)
    values = flushed(x)
    finite = np.moveaxis(np.where(np.isfinite(values), np.abs(values), 0.0), axis, -1)
    count = -(-x.shape[axis] // MX_BLOCK)
    missing = count * MX_BLOCK - x.shape[axis]
    blocks = np.pad(finite, [(0, 0)] * (x.ndim - 1) + [(0, missing)]).reshape(*finite.shape[:-1], count, MX_BLOCK)
    absmax = stages("absmax", np.moveaxis(blocks.max(axis=-1, initial=0.0), -1, axis))
    # absmax = m · 2^e with m in [½, 1), and `largest` likewise: floor(log2) is e - 1, and up is one more beyond it.
    mantissa, exponent = np.frexp(absmax)
    largest_mantissa, largest_exponent = np.frexp(largest)
    exponent = exponent - largest_exponent
    if scale_rounding == "up":
        exponent = exponent + (mantissa > largest_mantissa)
    exponent = np.clip(np.where(absmax > 0, exponent, -127), -127, 127)
    scale = stages("scale", np.ldexp(1.0, exponent)).astype(getattr(ml_dtypes, E8M0))
    quotient = values / stages("spread", spread(scale, axis, x.shape[axis]))
    quotient = stages("qvalue", np.clip(quotient, -largest, largest))
    qvalue = round_fp8(quotient, target).astype(target)
    qvalue[np.isnan(values)] = np.array(np.nan, target)
    return Quantized(qvalue, scale)
