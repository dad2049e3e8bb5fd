"""Decays and their logarithms, to more bits than one float32 has.

A slow gate keeps hundreds of steps in a state. A decay near 1 whose error is 2^-25 has lost as many of its 24 bits
after n steps as n has, and of running sums in one piece differences are as wrong as the sums are large. So both come in
two pieces.
"""

from collections.abc import Sequence
from functools import reduce

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental.pallas import tpu as pltpu

Pair = tuple[jax.Array, jax.Array]
"""A number as the sum of two, the larger first."""

LN2 = float(np.log(2))
LN2_HIGH = 45426 / 65536  # times any exponent of a float32 this is exact
LN2_LOW = LN2 - LN2_HIGH
LARGEST_EXPONENT = 88.72  # of a finite float32
WHOLE_EXPONENT = 88.0  # the largest whole one of a finite float32
SMALLEST_EXPONENT = -127 * LN2  # of a decay that is zero: TPUs flush subnormals
TAYLOR = tuple(1 / float(np.prod(range(1, n + 1))) for n in range(9, 1, -1))  # of exp, from x^9 down to x^2


def two_sum(a: jax.Array, b: jax.Array) -> Pair:
    """a + b rounded, and exactly what that left out (Knuth, The Art of Computer Programming 2, 4.2.2, theorem B)."""
    total = a + b
    added = total - a
    return total, (a - (total - added)) + (b - added)


def ordered_two_sum(a: jax.Array, b: jax.Array) -> Pair:
    """`two_sum` in half as many additions: exact where |a| >= |b| (Dekker 1971), else what it left out is rounded."""
    total = a + b
    return total, b - (total - a)


def leading(x: jax.Array, bits: int) -> jax.Array:
    """The first `bits` of the 24 bits of float32 x, cut off: what is left has x's sign."""
    return lax.bitcast_convert_type(lax.bitcast_convert_type(x, jnp.int32) & -(1 << (24 - bits)), jnp.float32)


def difference(a: Pair, b: Pair) -> jax.Array:
    """a - b, both in two pieces."""
    return (a[0] - b[0]) + (a[1] - b[1])


def running_sums(hi: jax.Array, lo: jax.Array, chunk: int) -> Pair:
    """The sums of hi + lo over the lanes up to each.

    Of sums in one piece, differences are as wrong as the sums are large.
    """
    lane = lax.broadcasted_iota(jnp.int32, hi.shape, 2)
    for level in range(chunk.bit_length() - 1):
        before = 2**level
        earlier_hi, earlier_lo = (jnp.where(lane >= before, pltpu.roll(x, before, 2), 0.0) for x in (hi, lo))
        hi, error = two_sum(hi, earlier_hi)
        lo += earlier_lo + error
    return two_sum(hi, lo)


def decay_parts(gate: jax.Array, low: jax.Array | float = 0.0) -> Pair:
    """exp(gate + low) as a sum: 1 or 0, whichever is nearer (1 beyond it), and the float32 that is left; at most the
    largest float32, which times a state of zero is zero.

    Of exact operations and a short series, in place of the processor's exp: a decay near 1 whose error is 2^-25 has
    lost as many of its 24 bits after n steps as n has.
    """
    gate = jnp.clip(gate, SMALLEST_EXPONENT, LARGEST_EXPONENT)
    exponent = jnp.clip(jnp.floor(gate / LN2 + 0.5), -127.0, 127.0)
    x = (gate - exponent * LN2_HIGH) - exponent * LN2_LOW + low
    series = x + x * x * _polynomial(x, TAYLOR)  # exp(x) - 1
    power = _power(exponent)
    kept = jnp.where(gate + low > -LN2, 1.0, 0.0)
    return kept, (power - kept) + power * series


def exp_pairs(x: Pair) -> tuple[Pair, Pair]:
    """exp(x) and exp(-x), each in two pieces, for x in two pieces.

    The relative error is at most 2^-26 where both are normal float32 numbers.
    """
    exponent = jnp.floor(x[0] / LN2 + 0.5)
    high, low = two_sum(x[0] - exponent * LN2_HIGH, x[1] - exponent * LN2_LOW)
    square = high * high
    # (exp(high) - 1 - high) / high^2: what is even in high, and what is odd.
    even, odd = _polynomial(square, TAYLOR[1::2]), high * _polynomial(square, TAYLOR[::2])
    return (
        _scaled(_power(exponent), high, low + (low * high + square * (even + odd))),
        _scaled(_power(-exponent), -high, (low * high + square * (even - odd)) - low),
    )


def _scaled(power: jax.Array, high: jax.Array, low: jax.Array) -> Pair:
    """power · (1 + high + low) in two pieces.

    power is added, and not 1: XLA simplifies (1 + x) - 1 to x, which is not what float32 gives.
    """
    one, left = ordered_two_sum(power, power * high)
    return ordered_two_sum(one, left + power * low)


def _polynomial(x: jax.Array, coefficients: Sequence[float]) -> jax.Array:
    """The polynomial with these coefficients, that of the highest power first."""
    value = jnp.full_like(x, coefficients[0])
    for coefficient in coefficients[1:]:
        value = value * x + coefficient
    return value


def _power(exponent: jax.Array) -> jax.Array:
    """2 to a whole exponent, 0 for -127."""
    return lax.bitcast_convert_type((exponent.astype(jnp.int32) + 127) << 23, jnp.float32)


def decayed(pair: Pair, decay: list[jax.Array]) -> Pair:
    """decay · state, rounded to float32, and its residue; pair and decay as those of `decayed_sum`."""
    kept, rest = decay
    return ordered_two_sum(*_decayed(pair, decay, kept + rest))


def added(pair: Pair, whole: jax.Array | float, term: jax.Array) -> Pair:
    """state + term as an unrounded pair: `ordered_two_sum` makes it a float32 and its residue. whole: as below."""
    state, residue = pair
    total, left = two_sum(state, term)
    return total, left + whole * residue


def decayed_sum(pair: Pair, decay: list[jax.Array], whole: jax.Array, term: jax.Array) -> Pair:
    """decay · state + term, rounded to float32, and its residue.

    pair: the state and its residue. decay: both parts of `decay_parts`, or none. whole: what the residue is times, the
    decay in one piece; 0 drops it.
    """
    if not decay:
        return ordered_two_sum(*added(pair, whole, term))
    base, change = _decayed(pair, decay, whole)
    total, left = two_sum(base, term)
    return ordered_two_sum(total, left + change)


def _decayed(pair: Pair, decay: list[jax.Array], whole: jax.Array) -> Pair:
    """kept · state, and what else the decayed state and residue are."""
    state, residue = pair
    kept, rest = decay
    # There is no fused multiply-add: what a product loses is the smaller, the nearer the decay is to 1.
    return kept * state, rest * state + whole * residue


def times(decay: Sequence[jax.Array], x: jax.Array) -> jax.Array:
    """x times a decay that is the sum of its parts, each multiplied by itself."""
    return reduce(jnp.add, [part * x for part in decay])


def next_state(state: jax.Array, decay: Sequence[jax.Array], term: jax.Array) -> jax.Array:
    """decay · state + term in float32, the decay in two parts: what is written is added without being rounded first."""
    kept, rest = decay
    total, left = two_sum(kept * state, term)
    return total + (left + rest * state)


def finite_exp(x: jax.Array) -> jax.Array:
    """exp, finite everywhere."""
    return jnp.exp(jnp.minimum(x, WHOLE_EXPONENT))
