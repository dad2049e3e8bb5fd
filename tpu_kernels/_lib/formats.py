"""Narrow number formats, and the bits of a float32."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental.pallas import tpu as pltpu

from tpu_kernels._lib import chip


class Format(NamedTuple):
    """A narrow number format. Below `linear`, a power of two, its values are equally spaced; int8's all are."""

    dtype: str
    largest: float
    mantissa: int  # stored bits
    linear: float
    largest_code: int
    nan_code: int


FORMATS = {
    "float8_e4m3fn": Format("float8_e4m3fn", 448.0, 3, 2.0**-6, 0x7E, 0x7F),
    "float8_e5m2": Format("float8_e5m2", 57344.0, 2, 2.0**-14, 0x7B, 0x7E),
    "int8": Format("int8", 127.0, 7, 2.0**7, 127, 0),
}

SMALLEST = float(np.finfo(np.float32).tiny)
"""The smallest normal float32."""
# Of a float32: all bits but the sign, those of infinity, and those of the smallest normal number.
MAGNITUDE = 0x7FFFFFFF
INFINITY = 0x7F800000
SMALLEST_NORMAL = 0x00800000


def bits_of(x: jax.Array) -> jax.Array:
    """The bits of a float32, as int32."""
    return lax.bitcast_convert_type(x, jnp.int32)


def float_of(bits: jax.Array) -> jax.Array:
    """The float32 of these bits."""
    return lax.bitcast_convert_type(bits, jnp.float32)


def finite_magnitude(x: jax.Array) -> jax.Array:
    """|x|, 0 where that is not finite."""
    bits = bits_of(x) & MAGNITUDE
    return float_of(jnp.where(bits < INFINITY, bits, 0))


def rounded(y: jax.Array, x: jax.Array, target: Format, cut: int = 0) -> jax.Array:
    """The int8 bits in the format of y, float32 of at most its largest magnitude: rounded to nearest even.

    x: bfloat16 of the signs of y; cut: bits of y, of the lowest, that do not count. Where the chip does not convert, a
    power of two is added that is 2^(23 - mantissa) times that of y: the sum is rounded to the spacing that the format's
    values have there.
    """
    if target.dtype == "int8":
        return bits_of(_without(cut, y) + 1.5 * 2.0**23).astype(jnp.int8)
    if target.dtype == "float8_e4m3fn" and chip.generation() >= chip.NEWEST:
        y = _without(cut, y)
        return lax.bitcast_convert_type(y.astype(jnp.float8_e4m3fn), jnp.int8)
    shift = 23 - target.mantissa
    magnitude = float_of(bits_of(y) & (MAGNITUDE ^ cut))
    power = bits_of(jnp.maximum(float_of(bits_of(y) & INFINITY), target.linear))
    # The codes of smaller powers, of which a byte is left in the end, are in the lowest bits of what is added.
    first = -(int(np.float32(target.linear).view(np.int32)) >> shift) & 0xFF
    code = bits_of(magnitude + float_of(power + ((shift << 23) + first))) + (power >> shift)
    signs = pltpu.bitcast(pltpu.bitcast(x, jnp.int32) >> 8 & 0x00800080, jnp.int16)
    return (code.astype(jnp.int16) | signs).astype(jnp.int8)


def _without(cut: int, y: jax.Array) -> jax.Array:
    """y without these of its bits."""
    return float_of(bits_of(y) & ~cut) if cut else y
