"""Quantisation to fp8 and int8 with one scale per block: the definition.

`x ≈ qvalue · scale`. A scale has the rank of its qvalue; each of its axes divides the qvalue's, and the ratio is the
block: [1, 1] per tensor, [M, 1] per row, [M, K/128], [G, K/128, N/128], [G, 1, N] per channel. Formats: OCP 8-bit
floating point (Micikevicius et al. 2022, arXiv:2209.05433). Scales are float32; `mxfp8` has those of MXFP8.

Float32 subnormals count as zero, in x and in what `dequantize` returns: vector units of TPUs flush them.

Sites of the staged quantisers: absmax, scale, spread (the scale that each element is divided by), and by the output's
name, qvalue, the quotient that is rounded to it; of both ways at once these of either, as rowwise_absmax. Those of the
dequantisers: spread, and the product at out.
"""

from typing import Any

import ml_dtypes
import numpy as np

from cpu_golden import Array
from cpu_golden._lib.scales import SMALLEST, check_finite_here, expand, flushed, named_output, round_fp8
from cpu_golden.stages import Stages, exact
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

INT8_MAX = 127.0


def fp8_quantize(
    x: Array,
    axis: int | tuple[int, ...],
    block_size: int | None = 128,
    *,
    dtype: Any = "float8_e4m3fn",
    check_finite: bool = True,
    stages: Stages = exact,
) -> Quantized:
    """x in fp8, with one scale per block of `block_size` elements (None: all) along each axis in `axis`.

    x [...] float32, bfloat16 or float16. Returns qvalue [...] in dtype (float8_e4m3fn or float8_e5m2) and scale
    float32, whose `axis` are divided by the block. `scale = absmax / finfo(dtype).max`, absmax taken over the finite
    elements, correctly rounded and at least the smallest normal float32; 1 where absmax is 0. `qvalue = x / scale`,
    the exact quotient rounded once, to nearest even; zeros keep x's sign; NaN stays NaN (the positive quiet one).
    ±inf is refused with check_finite (where the values are at hand) and becomes ±finfo(dtype).max without.
    Raises TypeError for a wrong dtype, ValueError for a wrong axis, a block that does not divide, or ±inf.
    """
    blocks, name = check_quantize(x, axis, block_size, dtype)
    if check_finite:
        check_finite_here(x)
    return _quantize(x, blocks, name, stages)


def int8_quantize(
    x: Array,
    axis: int | tuple[int, ...],
    block_size: int | None = 128,
    *,
    check_finite: bool = True,
    stages: Stages = exact,
) -> Quantized:
    """As `fp8_quantize`, to int8 in [-127, 127], `scale = absmax / 127`.

    NaN, which int8 has not, is refused with check_finite and becomes 0 without.
    """
    blocks = check_blocks(x, axis, block_size)
    if check_finite:
        check_finite_here(x, nan=True)
    return _quantize(x, blocks, "int8", stages)


def fp8_dual_quantize(
    x: Array,
    block_size: int | None = 128,
    *,
    dtype: Any = "float8_e4m3fn",
    check_finite: bool = True,
    stages: Stages = exact,
) -> DualQuantized:
    """`fp8_quantize(x, -1, …)` and `fp8_quantize(x, -2, …)`; the kernels read x [M, K] or [G, M, K] once for both."""
    by_rows, by_columns, name = check_dual_quantize(x, block_size, dtype)
    if check_finite:
        check_finite_here(x)
    return DualQuantized(
        *_quantize(x, by_rows, name, named_output(stages, "rowwise")),
        *_quantize(x, by_columns, name, named_output(stages, "columnwise")),
    )


def fp8_dequantize(qvalue: Array, scale: Array, *, stages: Stages = exact) -> Array:
    """qvalue · scale in float32: [...] fp8 times its block's scale, rounded once; a subnormal result is zero.

    Raises TypeError for a wrong dtype, ValueError for a scale that does not divide qvalue.
    """
    return _dequantize(qvalue, scale, FP8, stages)


def int8_dequantize(qvalue: Array, scale: Array, *, stages: Stages = exact) -> Array:
    """As `fp8_dequantize`, of int8."""
    return _dequantize(qvalue, scale, ("int8",), stages)


def _quantize(x: Array, blocks: Blocks, dtype: str, stages: Stages) -> Quantized:
    target = np.dtype(getattr(ml_dtypes, dtype, dtype))
    largest = INT8_MAX if dtype == "int8" else float(ml_dtypes.finfo(target).max)
    values = flushed(x)
    finite = np.where(np.isfinite(values), np.abs(values), 0.0)
    # [a, b] in blocks of [p, q] is [a/p, p, b/q, q].
    split = [part for size, block in zip(x.shape, blocks, strict=True) for part in (size // block, block)]
    absmax = stages("absmax", finite.reshape(split).max(axis=tuple(range(1, len(split), 2)), initial=0.0))
    scale = np.where(absmax > 0, np.maximum((absmax / largest).astype(np.float32), np.float32(SMALLEST)), np.float32(1))
    scale = stages("scale", scale.astype(np.float64)).astype(np.float32)
    quotient = values / stages("spread", expand(scale, blocks))
    quotient = stages("qvalue", np.clip(quotient, -largest, largest))
    if dtype == "int8":
        return Quantized(np.rint(np.nan_to_num(quotient, nan=0.0)).astype(np.int8), scale)
    qvalue = round_fp8(quotient, target).astype(target)
    qvalue[np.isnan(values)] = np.array(np.nan, target)
    return Quantized(qvalue, scale)


def _dequantize(qvalue: Array, scale: Array, dtypes: tuple[str, ...], stages: Stages) -> Array:
    blocks = check_dequantize(qvalue, scale, dtypes)
    with np.errstate(over="ignore", invalid="ignore"):
        product = qvalue.astype(np.float64) * stages("spread", expand(scale, blocks))
        product = stages("out", product).astype(np.float32)
    return np.where(np.abs(product) < np.float32(SMALLEST), np.copysign(np.float32(0), product), product)
