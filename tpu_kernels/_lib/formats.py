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


def exponents(scales: jax.Array, transposed: bool) -> jax.Array:
    """The bytes of E8M0 scales as int32 [R, C]: biased exponents of the same numbers in float32.

    scales: float8_e8m0fnu [R, C], or [C, R] if transposed.
    """
    bits = lax.bitcast_convert_type(scales, jnp.int8)
    return (bits.T if transposed else bits).astype(jnp.int32) & 0xFF


def float_of(bits: jax.Array) -> jax.Array:
    """The float32 of these bits."""
    return lax.bitcast_convert_type(bits, jnp.float32)


def rounded(x: jax.Array, factor: jax.Array, target: Format, saturates: bool = False) -> jax.Array:
    """The int8 bits in the format of x · factor, rounded to nearest even but for the product's lowest bits: 4, or 5.

    x: finite bfloat16; factor: float32. saturates: products may be beyond the format's largest number.
    """
    if is_converted(target):
        y = float_of(bits_of(x.astype(jnp.float32) * factor) & ~0xF)
        return converted(_within(y, target, saturates), target)
    return _coded(_within(_magnitude(x).astype(jnp.float32) * factor, target, saturates), x, target)


def rounded_beside(near: jax.Array, left: jax.Array, least: jax.Array, x: jax.Array, target: Format) -> jax.Array:
    """The int8 bits in an fp8 format of a number close to `near`, signed as x: above it if left > least, below if less.

    All in float32. near: not negative, of 5 significant bits, less than the last one away. Where none `is_converted`.
    """
    # By 2^-10 of it: less than from one such number to the next.
    step = jnp.where(left > least, 1 << 13, jnp.where(left < least, -1 << 13, 0))
    return _coded(float_of(bits_of(near) + step), x.astype(jnp.bfloat16), target)


def rounded_whole(x: jax.Array, factor: jax.Array, target: Format, saturates: bool = False) -> jax.Array:
    """`rounded` of x in float32, all bits of the product counting, to fp8."""
    if is_converted(target):
        return converted(_within(x * factor, target, saturates), target)
    y = _within(jnp.abs(x) * factor, target, saturates)
    # A power of two is added that is 2^shift times that of y: the sum is rounded to the spacing of the format there.
    shift = 23 - target.mantissa
    power = bits_of(jnp.maximum(float_of(bits_of(y) & INFINITY), target.linear))
    steps = bits_of(y + float_of(power + (shift << 23))) + (power >> shift)
    first = -(int(np.float32(target.linear).view(np.int32)) >> shift) & 0xFF
    return _bytes_of(_words(steps.astype(jnp.int16)), x.astype(jnp.bfloat16), first)


def rounded_short(x: jax.Array, factor: jax.Array, target: Format, saturates: bool = False) -> jax.Array:
    """`rounded_whole` of x and factor in bfloat16, whose product is exact, where the chip computes with bfloat16."""
    if is_converted(target):
        return converted(_within(x * factor, target, saturates), target)
    y = _within(_magnitude(x) * factor, target, saturates)
    shift = 7 - target.mantissa
    power = _words(jnp.maximum(_pair(_words(y) & _both(0x7F80)), jnp.asarray(target.linear, y.dtype)))
    added = power + _both(shift << 7)
    steps = _words(y + _pair(added)) - added
    first = -(int(np.float32(target.linear).view(np.int32)) >> shift + 16) & 0xFF
    return _bytes_of(steps + (power >> shift), x, first)


def _within(y: jax.Array, target: Format, saturates: bool) -> jax.Array:
    """y, where it saturates of at most the largest magnitude of the format."""
    return jnp.clip(y, -target.largest, target.largest) if saturates else y


def is_converted(target: Format) -> bool:
    """Whether the chip rounds float32 to the format."""
    return target.dtype == "int8" or chip.generation() >= chip.NEWEST


def converted(y: jax.Array, target: Format) -> jax.Array:
    """The int8 bits in the format of y, as the chip rounds it."""
    if target.dtype == "int8":
        return bits_of(y + 1.5 * 2.0**23).astype(jnp.int8)
    return lax.bitcast_convert_type(y.astype(target.dtype), jnp.int8)


def _coded(y: jax.Array, x: jax.Array, target: Format) -> jax.Array:
    """The int8 bits in the fp8 format of y, float32 and not negative, with the signs of x in bfloat16.

    What does not count: the lowest four bits of y (e5m2: five), and of y below `linear` what is below 2^-18 of that.
    """
    # Below `linear` the mean of y and `linear` is larger. It lies in the binade below, where floats with as many bits
    # as the format has are half as far from each other as the format's values there.
    spaced = jnp.maximum(y, 0.5 * y + 0.5 * target.linear)
    # The exponent and the bits of the format are the upper half of a word now, and bfloat16 rounds to that.
    codes = float_of(bits_of(spaced) >> 7 - target.mantissa).astype(jnp.bfloat16)
    first = -(int(np.float32(0.5 * target.linear).view(np.int32)) >> 23 - target.mantissa) & 0xFF
    return _bytes_of(_words(codes), x, first)


def _magnitude(x: jax.Array) -> jax.Array:
    """|x| of bfloat16, without widening it."""
    return _pair(_words(x) & _both(0x7FFF))


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
