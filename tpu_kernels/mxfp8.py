"""MXFP8 on the TPU: fp8 with a power of two per 32 elements, bit for bit as `cpu_golden/mxfp8.py` defines it.

With powers of two for scales every quotient is exact by itself.
"""

from dataclasses import dataclass
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from op_arguments.mxfp8 import (
    E8M0,
    MX_BLOCK,
    check_mxfp8_dequantize,
    check_mxfp8_dual_quantize,
    check_mxfp8_quantize,
)
from op_arguments.quantize import Blocks, DualQuantized, Quantized
from tpu_kernels._lib import chip
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
    float_of,
    rounded,
    rounded_short,
    rounded_whole,
)


def mxfp8_quantize(
    x: jax.Array,
    axis: int,
    *,
    dtype: Any = "float8_e4m3fn",
    scale_rounding: Literal["up", "floor"] = "up",
    check_finite: bool = True,
    interpret: Interpret = None,
) -> Quantized:
    """qvalue [...] in dtype and scale float8_e8m0fnu: x in MXFP8, one power of two per 32 elements along `axis`.

    Arguments, result and errors as `cpu_golden.mxfp8.mxfp8_quantize`, bit for bit; under tracing ±inf saturates.
    XLA pads x first where 32 does not divide the axis. interpret and sites as `tpu_kernels.quantize.fp8_quantize`.
    """
    axis, name = check_mxfp8_quantize(x, axis, dtype, scale_rounding)
    if check_finite:
        check_finite_here(x, nan=False)
    scaling = PowerScales(FORMATS[name], scale_rounding)
    q = quantize_blocks(
        _whole_blocks(x, axis), blocks=_mx_blocks(x, axis), scaling=scaling, interpret=resolve_interpret(interpret, x)
    )
    return Quantized(lax.slice_in_dim(q.qvalue, 0, x.shape[axis], axis=axis), q.scale)


def mxfp8_dual_quantize(
    x: jax.Array,
    *,
    dtype: Any = "float8_e4m3fn",
    scale_rounding: Literal["up", "floor"] = "up",
    check_finite: bool = True,
    interpret: Interpret = None,
) -> DualQuantized:
    """`mxfp8_quantize` of x [M, K] or [G, M, K] by rows and by columns, reading x once for both.

    Arguments, result and errors as `cpu_golden.mxfp8.mxfp8_dual_quantize`.
    """
    name = check_mxfp8_dual_quantize(x, dtype, scale_rounding)
    if check_finite:
        check_finite_here(x, nan=False)
    *_, m, k = x.shape
    rows, columns = x.ndim - 1, x.ndim - 2  # the axes that the blocks of each lie along
    padded = _whole_blocks(_whole_blocks(x, rows), columns)
    blocks = _mx_blocks(x, rows), _mx_blocks(x, columns)
    scaling = PowerScales(FORMATS[name], scale_rounding)
    dual = dual_quantize_blocks(padded, blocks=blocks, scaling=scaling, interpret=resolve_interpret(interpret, x))
    return DualQuantized(
        dual.rowwise[..., :m, :k],
        dual.rowwise_scale[..., :m, :],
        dual.columnwise[..., :m, :k],
        dual.columnwise_scale[..., :, :k],
    )


def mxfp8_dequantize(
    qvalue: jax.Array, scale: jax.Array, *, dtype: Any = None, interpret: Interpret = None
) -> jax.Array:
    """qvalue · scale [...] in dtype; arguments, result and errors as `cpu_golden.mxfp8.mxfp8_dequantize`."""
    axis, name = check_mxfp8_dequantize(qvalue, scale, dtype)
    wide = dequantize_blocks(
        _whole_blocks(qvalue, axis),
        scale,
        blocks=_mx_blocks(qvalue, axis),
        decode=_decode_by_power,
        dtype=name,
        interpret=resolve_interpret(interpret, qvalue),
    )
    return lax.slice_in_dim(wide, 0, qvalue.shape[axis], axis=axis)


def _mx_blocks(x: jax.Array, axis: int) -> Blocks:
    return tuple(MX_BLOCK if a == axis else 1 for a in range(x.ndim))


def _whole_blocks(x: jax.Array, axis: int) -> jax.Array:
    """x, filled up with zeros to whole blocks along an axis."""
    missing = -x.shape[axis] % MX_BLOCK
    return jnp.pad(x, [(0, missing if a == axis else 0) for a in range(x.ndim)]) if missing else x


@dataclass(frozen=True)
class PowerScales:
    """MXFP8's scales, powers of two. Kernels keep their inverses: that of the smallest, 2^-127, is a normal float32."""

    format: Format
    rounding: Literal["up", "floor"]
    scale_dtype = E8M0

    def factor_dtype(self, dtype: Any) -> str:
        """bfloat16 for elements in it where the chip computes with it: products with powers of two are exact."""
        return "bfloat16" if dtype == jnp.bfloat16 and chip.computes_bfloat16() else "float32"

    def kept(self, absmax: jax.Array) -> jax.Array:
        """The inverse of the power of two, of at least 2^-127, that absmax gives."""
        largest = int(np.float32(self.format.largest).view(np.int32))
        # Beyond the mantissa of `largest` a carry makes the exponent one more.
        carry = 0x7FFFFF - (largest & 0x7FFFFF) if self.rounding == "up" else 0
        first = (largest >> 23) - 127  # the exponent of absmax that gives 2^-127
        exponent = (bits_of(jnp.maximum(absmax, SMALLEST * 2.0 ** (first - 1))) + carry) >> 23
        return float_of((254 + first - exponent) << 23)

    def encode(self, x: jax.Array, kept: jax.Array) -> jax.Array:
        """The int8 bits of x times the inverse: an exact product, rounded to nearest even."""
        inverse, target = kept, self.format
        bits = bits_of(x)
        magnitude = bits & MAGNITUDE
        quotient = jnp.minimum(float_of(jnp.where(magnitude < SMALLEST_NORMAL, 0, magnitude)) * inverse, target.largest)
        shift = 23 - target.mantissa
        aligned = bits_of(quotient)
        normal = (aligned + ((1 << (shift - 1)) - 1) + ((aligned >> shift) & 1)) >> shift
        first = (int(np.float32(target.linear).view(np.int32)) >> shift) - (1 << target.mantissa)
        # Where the format's values are equally spaced, a float32 with that spacing rounds when it is added.
        spaced = np.float32(target.linear * 2.0**shift)
        linear = bits_of(quotient + spaced) - int(spaced.view(np.int32))
        code = jnp.where(quotient < target.linear, linear, normal - first)
        code = jnp.where(magnitude > INFINITY, target.nan_code, jnp.where(bits < 0, code - 128, code))
        return code.astype(jnp.int8)

    def short(self, absmax: jax.Array, dtype: Any) -> tuple[jax.Array, jax.Array]:
        """What is kept, the inverse of the scale, twice."""
        kept = self.kept(absmax)
        return kept, kept

    def encode_short(self, x: jax.Array, factor: jax.Array) -> jax.Array:
        """As `encode`, of finite x."""
        how = rounded if factor.dtype != x.dtype else rounded_short if x.dtype == jnp.bfloat16 else rounded_whole
        return how(x, factor, self.format, saturates=self.rounding == "floor")

    def scale(self, kept: jax.Array) -> jax.Array:
        """The power of two whose inverse is kept."""
        byte = 254 - (bits_of(kept) >> 23)
        return float_of(jnp.where(byte == 0, SMALLEST_NORMAL >> 1, byte << 23))  # 2^-127 is subnormal

    def stored(self, kept: jax.Array) -> jax.Array:
        """The byte of the power of two whose inverse is kept: 2^127 is that of the smallest."""
        return (254 - (bits_of(kept) >> 23)).astype(jnp.int8)


def _decode_by_power(q: jax.Array, power: jax.Array) -> jax.Array:
    """q · 2^(byte - 127), zero where that is subnormal, NaN for a byte of 255; by two powers, as one is no float32.

    power: a float32 that has the byte for its exponent's bits.
    """
    byte = bits_of(power) >> 23
    low = byte >> 1
    values = q.astype(jnp.float32)
    bits = bits_of(values * float_of((low + 64) << 23) * float_of((byte - low + 63) << 23))
    flushed = jnp.where(bits & MAGNITUDE < SMALLEST_NORMAL, bits_of(values) & ~MAGNITUDE, bits)
    return jnp.where(byte == 255, jnp.nan, float_of(flushed))
