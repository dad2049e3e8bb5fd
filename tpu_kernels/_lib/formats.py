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
    first = -(int(np.float32(target.linear).view(np.int32)) >> shift) & 0xFF  # a byte is left of it in the end
    magnitude = float_of(bits_of(y) & (MAGNITUDE ^ cut))
    if chip.computes_bfloat16():
        # Rounded up to the next power of two, y is rounded to that one by its spacing as well.
        power = _power_of(y.astype(jnp.bfloat16), target)
        steps = bits_of(magnitude + _pair(power + _both(shift << 7)).astype(jnp.float32)).astype(jnp.int16)
        return _bytes_of(_words(steps) + (power >> shift - 16), x, first)
    power = bits_of(jnp.maximum(float_of(bits_of(y) & INFINITY), target.linear))
    code = bits_of(magnitude + float_of(power + ((shift << 23) + first))) + (power >> shift)
    return _bytes_of(_words(code.astype(jnp.int16)), x)


def rounded_short(y: jax.Array, target: Format) -> jax.Array:
    """`rounded` of y in bfloat16, of fp8, where the chip computes with bfloat16."""
    if chip.generation() >= chip.NEWEST:
        return lax.bitcast_convert_type(y.astype(target.dtype), jnp.int8)
    shift = 7 - target.mantissa
    first = -(int(np.float32(target.linear).view(np.int32)) >> shift + 16) & 0xFF
    power = _power_of(y, target)
    added = power + _both(shift << 7)
    steps = _words(_pair(_words(y) & _both(0x7FFF)) + _pair(added)) - added
    return _bytes_of(steps + (power >> shift), y, first)


def _power_of(y: jax.Array, target: Format) -> jax.Array:
    """Words of the powers of two of y in bfloat16, at least `linear`."""
    return _words(jnp.maximum(_pair(_words(y) & _both(0x7F80)), jnp.asarray(target.linear, y.dtype)))


def _bytes_of(codes: jax.Array, x: jax.Array, first: int = 0) -> jax.Array:
    """The low bytes of words of two codes, with `first` added to each and the signs of x in bfloat16."""
    return pltpu.bitcast(codes + ((_words(x) >> 8 & _both(0x80)) + _both(first)), jnp.int16).astype(jnp.int8)


def _both(half: int) -> int:
    """A word of two equal halves."""
    return half << 16 | half


def _words(x: jax.Array) -> jax.Array:
    """Words of two rows of 16 bits."""
    return pltpu.bitcast(x, jnp.int32)


def _pair(words: jax.Array) -> jax.Array:
    """The two rows of bfloat16 in words."""
    return pltpu.bitcast(words, jnp.bfloat16)


def _without(cut: int, y: jax.Array) -> jax.Array:
    """y without these of its bits."""
    return float_of(bits_of(y) & ~cut) if cut else y
