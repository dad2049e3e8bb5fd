"""Quantisation to fp8 and int8 with one scale per block: the definition.

`x ≈ qvalue · scale`. A scale has the rank of its qvalue; each of its axes divides the qvalue's, and the ratio is the
block: [1, 1] per tensor, [M, 1] per row, [M, K/128], [G, K/128, N/128], [G, 1, N] per channel. Formats: OCP 8-bit
floating point (Micikevicius et al. 2022, arXiv:2209.05433).

Those scales are float32. MXFP8's are powers of two in a byte, one for every 32 elements: OCP Microscaling Formats (MX)
v1.0, where what is left to the implementation is decided here.

Float32 subnormals count as zero, in x and in what `dequantize` returns: vector units of TPUs flush them.

Sites of the staged quantisers: absmax, scale, spread (the scale that each element is divided by), and by the output's
name, qvalue, the quotient that is rounded to it; of both ways at once these of either, as rowwise_absmax. Those of the
dequantisers: spread, and the product at out.
"""

from typing import Any, NamedTuple

import ml_dtypes
import numpy as np

from cpu_golden import Array
from cpu_golden.stages import Stages, exact
from op_arguments.quantize import (
    E8M0,
    FP8,
    MX_BLOCK,
    SWIZZLED_COLUMNS,
    SWIZZLED_ROWS,
    Blocks,
    check_blocks,
    check_dequantize,
    check_dual_quantize,
    check_finite_values,
    check_mxfp8_dequantize,
    check_mxfp8_dual_quantize,
    check_mxfp8_quantize,
    check_quantize,
    check_swizzle,
    check_unswizzle,
    swizzled_shape,
)

INT8_MAX = 127.0
SMALLEST = float(np.finfo(np.float32).tiny)


class Quantized(NamedTuple):
    """A quantised array: x ≈ qvalue · scale, the scale of each block repeated over it."""

    qvalue: Any
    scale: Any


class DualQuantized(NamedTuple):
    """An array quantised by rows (blocks along its last axis) and by columns (blocks along the one before)."""

    rowwise: Any
    rowwise_scale: Any
    columnwise: Any
    columnwise_scale: Any


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
        check_finite_values(int(np.isinf(x.astype(np.float64)).sum()), 0)
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
        values = x.astype(np.float64)
        check_finite_values(int(np.isinf(values).sum()), int(np.isnan(values).sum()))
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
        check_finite_values(int(np.isinf(x.astype(np.float64)).sum()), 0)
    return DualQuantized(
        *_quantize(x, by_rows, name, _named(stages, "rowwise")),
        *_quantize(x, by_columns, name, _named(stages, "columnwise")),
    )


def fp8_dequantize(qvalue: Array, scale: Array, *, stages: Stages = exact) -> Array:
    """qvalue · scale in float32: [...] fp8 times its block's scale, rounded once; a subnormal result is zero.

    Raises TypeError for a wrong dtype, ValueError for a scale that does not divide qvalue.
    """
    return _dequantize(qvalue, scale, FP8, stages)


def int8_dequantize(qvalue: Array, scale: Array, *, stages: Stages = exact) -> Array:
    """As `fp8_dequantize`, of int8."""
    return _dequantize(qvalue, scale, ("int8",), stages)


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
        check_finite_values(int(np.isinf(x.astype(np.float64)).sum()), 0)
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
        check_finite_values(int(np.isinf(x.astype(np.float64)).sum()), 0)
    return DualQuantized(
        *_mxfp8_quantize(x, x.ndim - 1, name, scale_rounding, _named(stages, "rowwise")),
        *_mxfp8_quantize(x, x.ndim - 2, name, scale_rounding, _named(stages, "columnwise")),
    )


def mxfp8_dequantize(qvalue: Array, scale: Array, *, dtype: Any = None, stages: Stages = exact) -> Array:
    """qvalue · scale: [...] fp8 times the power of two of its 32, in float32 (default) or bfloat16.

    The axis that has the blocks is the one of scale (float8_e8m0fnu) that is ceil(n / 32). Exact in either dtype,
    but at the ends of the exponent range that both share: 2^128 and beyond becomes ±inf, and what is below 2^-126 ±0.
    A scale of NaN (0xFF) makes its block NaN. Raises TypeError for a wrong dtype, ValueError for a wrong scale.
    """
    axis, name = check_mxfp8_dequantize(qvalue, scale, dtype)
    with np.errstate(over="ignore", invalid="ignore"):
        wide = stages("spread", _spread(scale, axis, qvalue.shape[axis]))
        product = stages("out", qvalue.astype(np.float64) * wide).astype(np.float32)
    product = np.where(np.abs(product) < np.float32(SMALLEST), np.copysign(np.float32(0), product), product)
    return product.astype(getattr(ml_dtypes, name, name))


def swizzle_scales(scale: Array) -> Array:
    """Scales [..., R, C] as block-scaled matrix units read them: [..., ceil(R / 128), ceil(C / 4), 32, 16].

    scale: float8_e8m0fnu, R rows (or columns) of an operand with C scales each along the axis that is summed over.
    Tiles of 128 rows and 4 scales, one behind the other; that of row r and column c of a tile is its byte
    (r % 32) · 16 + (r // 32) · 4 + c. What is missing of a whole tile is 0, which stands for 2^-127.
    Source: cuBLAS, "1D Block Scaling Factors Layout". Raises TypeError and ValueError for any other array.
    """
    check_swizzle(scale)
    *lead, rows, columns = scale.shape
    tiles_r, tiles_c = -(-rows // SWIZZLED_ROWS), -(-columns // SWIZZLED_COLUMNS)
    whole = np.zeros((*lead, tiles_r * SWIZZLED_ROWS, tiles_c * SWIZZLED_COLUMNS), np.uint8)
    whole[..., :rows, :columns] = scale.view(np.uint8)
    split = whole.reshape(*lead, tiles_r, SWIZZLED_ROWS // 32, 32, tiles_c, SWIZZLED_COLUMNS)
    tiles = split.swapaxes(-4, -2)  # [..., tiles_r, tiles_c, 32, 4, 4]
    return np.ascontiguousarray(tiles).reshape(swizzled_shape(scale.shape)).view(scale.dtype)


def unswizzle_scales(swizzled: Array, rows: int, columns: int) -> Array:
    """The scales [..., rows, columns] of which `swizzled` is the `swizzle_scales`. Raises as it does."""
    check_unswizzle(swizzled, rows, columns)
    *lead, tiles_r, tiles_c, _, _ = swizzled.shape
    tiles = swizzled.view(np.uint8).reshape(*lead, tiles_r, tiles_c, 32, SWIZZLED_ROWS // 32, SWIZZLED_COLUMNS)
    whole = tiles.swapaxes(-4, -2).reshape(*lead, tiles_r * SWIZZLED_ROWS, tiles_c * SWIZZLED_COLUMNS)
    return np.ascontiguousarray(whole[..., :rows, :columns]).view(swizzled.dtype)


def mxfp8_values(qvalue: Array, scale: Array, axis: int) -> Array:
    """qvalue times its scales in float64, which holds every product."""
    return qvalue.astype(np.float64) * _spread(scale, axis, qvalue.shape[axis])


def expand(scale: Array, blocks: Blocks) -> Array:
    """A scale repeated over its blocks, in float64."""
    wide = scale.astype(np.float64)
    for axis, block in enumerate(blocks):
        wide = np.repeat(wide, block, axis)
    return wide


def _named(stages: Stages, output: str) -> Stages:
    """The stages of a quantiser that is one of two: its qvalue is at `output`, all else behind that name."""
    return stages.renamed(qvalue=output, **{site: f"{output}_{site}" for site in ("absmax", "scale", "spread")})


def _quantize(x: Array, blocks: Blocks, dtype: str, stages: Stages) -> Quantized:
    target = np.dtype(getattr(ml_dtypes, dtype, dtype))
    largest = INT8_MAX if dtype == "int8" else float(ml_dtypes.finfo(target).max)
    values = _flushed(x)
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
    qvalue = _round_fp8(quotient, target).astype(target)
    qvalue[np.isnan(values)] = np.array(np.nan, target)
    return Quantized(qvalue, scale)


def _mxfp8_quantize(x: Array, axis: int, dtype: str, scale_rounding: str, stages: Stages) -> Quantized:
    target = np.dtype(getattr(ml_dtypes, dtype))
    largest = float(ml_dtypes.finfo(target).max)
    values = _flushed(x)
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
    quotient = values / stages("spread", _spread(scale, axis, x.shape[axis]))
    quotient = stages("qvalue", np.clip(quotient, -largest, largest))
    qvalue = _round_fp8(quotient, target).astype(target)
    qvalue[np.isnan(values)] = np.array(np.nan, target)
    return Quantized(qvalue, scale)


def _flushed(x: Array) -> Array:
    """x in float64, its subnormals zero."""
    with np.errstate(invalid="ignore"):  # signalling NaNs
        values = x.astype(np.float64)
    return np.where(np.abs(values) < SMALLEST, np.copysign(0.0, values), values)


def _spread(scale: Array, axis: int, size: int) -> Array:
    """The scales of `size` elements along an axis, in float64."""
    return np.take(np.repeat(scale.astype(np.float64), MX_BLOCK, axis), np.arange(size), axis)


def _round_fp8(values: Array, dtype: np.dtype[Any]) -> Array:
    """float64 values to the nearest one of an fp8 format, ties to even."""
    info = ml_dtypes.finfo(dtype)
    _, exponent = np.frexp(values)  # |values| in [2^(exponent - 1), 2^exponent)
    quantum = np.ldexp(1.0, np.maximum(exponent - 1, int(info.minexp)) - int(info.nmant))
    return np.rint(values / quantum) * quantum


def _dequantize(qvalue: Array, scale: Array, dtypes: tuple[str, ...], stages: Stages) -> Array:
    blocks = check_dequantize(qvalue, scale, dtypes)
    with np.errstate(over="ignore", invalid="ignore"):
        product = qvalue.astype(np.float64) * stages("spread", expand(scale, blocks))
        product = stages("out", product).astype(np.float32)
    return np.where(np.abs(product) < np.float32(SMALLEST), np.copysign(np.float32(0), product), product)
