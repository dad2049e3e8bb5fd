"""Functions of one element, without an overflow, and sums over many in pairs: what gates and convolutions share."""

import jax
import jax.numpy as jnp

SERIES = tuple(1 / n for n in range(19, 1, -2))  # of artanh(s) / s - 1 in s², from its last term down to s² / 3


def exp_of_minus(x: jax.Array) -> jax.Array:
    """exp(-|x|)."""
    return jnp.exp(-jnp.abs(x))


def sigmoid(x: jax.Array) -> jax.Array:
    """1 / (1 + exp(-x)); near 1 as what it lacks of 1, or the rounding of 1 + exp(-x) would be twice its own."""
    return sigmoid_and_rest(x)[0]


def sigmoid_and_rest(x: jax.Array) -> tuple[jax.Array, jax.Array]:
    """`sigmoid` of x and of -x, from one exponential and one division."""
    small = exp_of_minus(x)
    lesser = small / (1.0 + small)
    greater, is_negative = 1.0 - lesser, x < 0
    return jnp.where(is_negative, lesser, greater), jnp.where(is_negative, greater, lesser)


def softplus(x: jax.Array) -> jax.Array:
    """log(1 + exp(x)), as precise where it is small: log(1 + e) is twice the artanh of s = e / (2 + e), by its series.

    Written as e less something smaller, whose roundings weigh less.
    """
    e = exp_of_minus(x)
    s = e / (2.0 + e)
    square = s * s
    series = jnp.full_like(s, SERIES[0])
    for coefficient in SERIES[1:]:
        series = series * square + coefficient
    return jnp.maximum(x, 0.0) + (e - s * (e - 2.0 * square * series))


def fold_rows(x: jax.Array, rows: int = 1) -> jax.Array:
    """[R, C] -> [rows, C]: sums of blocks of `rows` rows in pairs. An odd number of blocks is added one by one."""
    while x.shape[0] % (2 * rows) == 0:
        half = x.shape[0] // 2
        x = x[:half] + x[half:]
    return sum((x[n : n + rows] for n in range(rows, x.shape[0], rows)), start=x[:rows])


def fold_nearby(x: jax.Array, rows: int) -> jax.Array:
    """`fold_rows` that adds neighbours first, so that few sums are in registers at a time."""
    half = x.shape[0] // rows // 2 * rows
    return x if x.shape[0] == rows else fold_nearby(x[:half], rows) + fold_nearby(x[half:], rows)


def sum_rows_in_pairs(x: jax.Array) -> jax.Array:
    """[R, ...] -> [...]: the sum over the first axis, of any length, in pairs."""
    size = max(x.shape[0], 1)
    whole = 1 << (size - 1).bit_length()
    padded = jnp.pad(x, [(0, whole - x.shape[0]), *[(0, 0)] * (x.ndim - 1)])
    return fold_rows(padded)[0]
