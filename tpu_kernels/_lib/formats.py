"""Narrow number formats, and the bits of a float32."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax


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
