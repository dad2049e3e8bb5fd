"""Quantisation to fp8 and int8 with float32 scales on the TPU, bit for bit as `cpu_golden/quantize.py` defines it.

No result depends on how exactly the hardware divides. An approximate quotient only finds the neighbouring values of
the target format; an exact comparison of x with the midpoint between them, times the scale, decides. The scale itself
is corrected by its exact remainder. Float32 products are made exact by splitting one factor into two of 12 bits.
Of finite bfloat16 one product with an inverse does (`FloatScales.encode_short`).
"""

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from op_arguments.quantize import (
    FP8,
    DualQuantized,
    Quantized,
    check_blocks,
    check_dequantize,
    check_dual_quantize,
    check_quantize,
)
from tpu_kernels._lib.arguments import Interpret, resolve_interpret
from tpu_kernels._lib.blocks import check_finite_here, dequantize_blocks, dual_quantize_blocks, quantize_blocks
from tpu_kernels._lib.formats import (
    FORMATS,
    INFINITY,
    MAGNITUDE,
    SMALLEST,
    SMALLEST_NORMAL,
    Format,
    bits_of,
    converted,
    float_of,
    is_converted,
    rounded,
    rounded_beside,
)

# Where a scale is below 2^-64, it and its block are multiplied by 2^64, lest a partial product be subnormal.
LIFT = 2.0**64


def fp8_quantize(
    x: jax.Array,
    axis: int | tuple[int, ...],
    block_size: int | None = 128,
    *,
    dtype: Any = "float8_e4m3fn",
    check_finite: bool = True,
    interpret: Interpret = None,
) -> Quantized:
    """qvalue [...] in dtype and scale float32: x in fp8, one scale per block of `block_size` along each axis in `axis`.

    Arguments, result and errors as `cpu_golden.quantize.fp8_quantize`, bit for bit; under tracing ±inf saturates.
    interpret: as `pl.pallas_call`; None interprets where there is no TPU. Sites shown to a probe: absmax, scale and
    spread, the scale of each element.
    x is read once where blocks fit a tile (all but whole axes of thousands), else twice. XLA transposes blocks of the
    last axis that are not 16, 32, 64 or multiples of 128, and blocks of other axes that are not multiples of 32, unless
    they are whole axes.
    """
    blocks, name = check_quantize(x, axis, block_size, dtype)
    if check_finite:
        check_finite_here(x, nan=False)
    return quantize_blocks(
        x, blocks=blocks, scaling=FloatScales(FORMATS[name]), interpret=resolve_interpret(interpret, x)
    )


def int8_quantize(
    x: jax.Array,
    axis: int | tuple[int, ...],
    block_size: int | None = 128,
    *,
    check_finite: bool = True,
    interpret: Interpret = None,
) -> Quantized:
    """qvalue [...] int8 and scale float32, as `fp8_quantize`; `cpu_golden.quantize.int8_quantize` bit for bit.

    Under tracing NaN becomes 0, as it does without check_finite.
    """
    blocks = check_blocks(x, axis, block_size)
    if check_finite:
        check_finite_here(x, nan=True)
    return quantize_blocks(
        x, blocks=blocks, scaling=FloatScales(FORMATS["int8"]), interpret=resolve_interpret(interpret, x)
    )


def fp8_dual_quantize(
    x: jax.Array,
    block_size: int | None = 128,
    *,
    dtype: Any = "float8_e4m3fn",
    check_finite: bool = True,
    interpret: Interpret = None,
) -> DualQuantized:
    """`fp8_quantize` of x [M, K] or [G, M, K] by rows and by columns, reading x once for both.

    Arguments, result and errors as `cpu_golden.quantize.fp8_dual_quantize`.
    Blocks of whole axes longer than a tile, blocks whose rows no tile holds (2^21 elements, before v6e 2^20), and those
    that `fp8_quantize` transposes take one call each. Sites as `fp8_quantize`, of both: rowwise_absmax and so on.
    """
    by_rows, by_columns, name = check_dual_quantize(x, block_size, dtype)
    if check_finite:
        check_finite_here(x, nan=False)
    scaling = FloatScales(FORMATS[name])
    return dual_quantize_blocks(
        x, blocks=(by_rows, by_columns), scaling=scaling, interpret=resolve_interpret(interpret, x)
    )


def fp8_dequantize(qvalue: jax.Array, scale: jax.Array, *, interpret: Interpret = None) -> jax.Array:
    """qvalue · scale [...] float32; arguments, result and errors as `cpu_golden.quantize.fp8_dequantize`."""
    blocks = check_dequantize(qvalue, scale, FP8)
    return dequantize_blocks(
        qvalue, scale, blocks=blocks, decode=_decode, dtype="float32", interpret=resolve_interpret(interpret, qvalue)
    )


def int8_dequantize(qvalue: jax.Array, scale: jax.Array, *, interpret: Interpret = None) -> jax.Array:
    """As `fp8_dequantize`, of int8."""
    blocks = check_dequantize(qvalue, scale, ("int8",))
    return dequantize_blocks(
        qvalue, scale, blocks=blocks, decode=_decode, dtype="float32", interpret=resolve_interpret(interpret, qvalue)
    )


@dataclass(frozen=True)
class FloatScales:
    """Scales that are any normal float32: absmax divided by the largest value of the format."""

    format: Format
    scale_dtype = "float32"

    def factor_dtype(self, dtype: Any) -> str:
        """float32."""
        return "float32"

    def kept(self, absmax: jax.Array) -> jax.Array:
        """absmax / largest, correctly rounded, at least the smallest normal number; 1 for one of 0 or subnormal."""
        largest = self.format.largest
        small = absmax < 1 / LIFT
        lift = jnp.where(small, LIFT, 1.0)
        dividend = absmax * lift
        quotient = dividend * (1 / largest)
        # No quotient lies halfway between two floats: `largest` has an odd factor above 1.
        quotient += self._remainder(dividend, quotient) * (1 / largest)
        scale = jnp.maximum(quotient, SMALLEST * lift) * jnp.where(small, 1 / LIFT, 1.0)
        return jnp.where(absmax < SMALLEST, 1.0, scale)

    def encode(self, x: jax.Array, kept: jax.Array) -> jax.Array:
        """The int8 bits of x / scale: an approximate quotient's neighbour, or the next, by x beside their midpoint."""
        scale, target = kept, self.format
        bits = bits_of(x)
        magnitude = bits & MAGNITUDE
        lift = jnp.where(scale < 1 / LIFT, LIFT, 1.0)
        divisor = scale * lift
        high, low = _split(divisor)
        dividend = float_of(jnp.where(magnitude < SMALLEST_NORMAL, 0, magnitude)) * lift
        quotient = jnp.minimum(dividend * (1.0 / divisor), target.largest)

        # Adding `linear` to a quotient below it lines up its bits with those of equally spaced values.
        is_linear = quotient < target.linear
        offset = jnp.where(is_linear, target.linear, 0.0)
        shift = 23 - target.mantissa
        aligned = bits_of(quotient + offset)
        below = aligned >> shift
        midpoint = float_of((aligned & -(1 << shift)) | (1 << (shift - 1))) - offset
        beyond = (dividend - midpoint * high) - midpoint * low
        up = (beyond > 0) | ((beyond == 0) & (below & 1 == 1))
        first = int(np.float32(target.linear).view(np.int32)) >> shift
        code = below + up.astype(jnp.int32) - jnp.where(is_linear, first, first - (1 << target.mantissa))
        code = jnp.minimum(code, target.largest_code)

        negative = -code if target.dtype == "int8" else code - 128  # the sign bit, of two's complement
        code = jnp.where(magnitude > INFINITY, target.nan_code, jnp.where(bits < 0, negative, code))
        return code.astype(jnp.int8)

    def short(self, absmax: jax.Array, dtype: Any) -> tuple[jax.Array, jax.Array]:
        """The scale, twice; for bfloat16 it and 1 / scale, a little more or less where that was rounded down or up.

        See `encode_short`.
        """
        largest = self.format.largest
        dividend = jnp.where(absmax == 0, largest, absmax)
        quotient = dividend * (1 / largest)
        before = self._remainder(dividend, quotient)
        scale = quotient + before * (1 / largest)
        if dtype != jnp.bfloat16:
            return scale, scale
        remainder = before - largest * (scale - quotient)  # exact: of few bits
        inverse = 1.0 / scale
        inverse += inverse * (1.0 - inverse * scale)
        return scale, inverse * (1 + 2.0**-21 + jnp.clip(remainder * 2.0**100, -(2.0**-18), 2.0**-18))

    def _remainder(self, dividend: jax.Array, scale: jax.Array) -> jax.Array:
        """What dividend / largest leaves beside an approximate scale, exactly."""
        high, low = _split(scale)
        return (dividend - self.format.largest * high) - self.format.largest * low

    def encode_short(self, x: jax.Array, factor: jax.Array) -> jax.Array:
        """As `encode`, of finite x and a usual scale; of bfloat16, both of 8 bits but for the scale's rounding.

        With x and absmax of 8 bits and a midpoint of at most 8, x · largest is the midpoint · absmax, or off by at
        least 2^-16 of it. A quotient on the midpoint is there by `factor` (2^-18) on the side on which the scale's
        rounding puts it; without one it is within 2^-20 above it, which the bits that do not count hold. (Below the
        format's `linear` they hold 2^-18 too. The only midpoint there under a rounded scale is 7/2 steps: it goes up.)
        """
        if x.dtype == jnp.bfloat16:
            return rounded(x, factor, self.format)
        return self._encode_float(x, factor)

    def _encode_float(self, x: jax.Array, scale: jax.Array) -> jax.Array:
        """`encode_short` of float32: a number of few bits beside the quotient, times the scale, is exact in two parts.

        Of 5 bits (8 for int8), midpoints are such numbers.
        """
        target, inverse, (high, low) = self.format, 1.0 / scale, _split(scale)
        value = x if is_converted(target) else jnp.abs(x)
        cut = 16 if target.dtype == "int8" else 19
        near = float_of((bits_of(value * inverse) + (1 << cut - 1)) & -1 << cut)
        left, least = value - near * high, near * low
        if not is_converted(target):
            return rounded_beside(near, left, least, x, target)
        # A quotient beside it is off by at least 2^-29 of near. What is off, times near, has the direction of near, and
        # where codes differ, from 2^-17 on, is at least 2^-63. 2^-12 or so of near does not reach the next one.
        beyond = (left - least) * (inverse * 2.0**50) * near
        y = near * (1 + jnp.clip(beyond, -(2.0**-12), 2.0**-12))
        return converted(y, target)

    def scale(self, kept: jax.Array) -> jax.Array:
        """What is kept."""
        return kept

    def stored(self, kept: jax.Array) -> jax.Array:
        """What is kept."""
        return kept


def _decode(q: jax.Array, scale: jax.Array) -> jax.Array:
    """q · scale, rounded once; zero where that is subnormal."""
    small = scale < 1 / LIFT
    lift = jnp.where(small, LIFT, 1.0)
    factor = scale * lift
    values = q.astype(jnp.float32)
    product, magnitude = values * factor, jnp.abs(values)
    high, low = _split(factor)
    # Half a unit below the smallest normal number, an exact product is rounded up to it.
    least = jnp.where(small, SMALLEST * LIFT * (1 - 2.0**-24), 0.0)
    subnormal = (magnitude * high - least) + magnitude * low < 0
    kept = jnp.maximum(jnp.abs(product), jnp.where(small, SMALLEST * LIFT, 0.0)) * jnp.where(small, 1 / LIFT, 1.0)
    kept = jnp.where(subnormal | (magnitude == 0), 0.0, kept)
    signed = float_of(bits_of(kept) | (bits_of(product) & ~MAGNITUDE))
    return jnp.where(product == product, signed, product)


def _split(x: jax.Array) -> tuple[jax.Array, jax.Array]:
    """x = high + low, of 12 bits each: exact products with numbers of up to 12 bits."""
    high = float_of(bits_of(x) & ~0xFFF)
    return high, x - high
