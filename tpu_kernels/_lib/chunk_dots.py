"""Dots of float32 matrices on a matrix unit that multiplies bfloat16, for each head of a block."""

from functools import partial, reduce

import jax
import jax.numpy as jnp
from jax import lax

from tpu_kernels._lib.chip import sublanes
from tpu_kernels._lib.chunk_plan import Scan

WHOLE = 3
"""Pieces of bfloat16 that have all 24 bits of a float32."""

Operand = jax.Array | list[jax.Array]
"""A matrix per head, or its pieces."""


def dot(a: Operand, b: Operand, contract: tuple[int, int], scan: Scan, pieces: int = 2) -> jax.Array:
    """For each head, float32 sums over axis `contract[0]` of its matrix in a and `contract[1]` of that in b.

    A bfloat16 operand enters as it is, one in float32 as the sum of bfloat16 pieces: `WHOLE`, or where dots are split
    `pieces`, two of which have 16 bits. Products below those of the first piece and the last may be left out. For
    several dots a list of pieces, from `dot_pieces`, saves splitting an operand again.
    """
    x, y = contract[0] + 1, contract[1] + 1
    dot = partial(lax.dot_general, dimension_numbers=(((x,), (y,)), ((0,), (0,))), preferred_element_type=jnp.float32)
    pieces = pieces if scan.split else WHOLE
    lhs, rhs = (given if isinstance(given, list) else bf16_split(given, pieces) for given in (a, b))
    pairs = [(m, n) for m in range(len(lhs)) for n in range(len(rhs)) if m + n < pieces][::-1]
    if lhs[0].shape[x] % sublanes(jnp.bfloat16):
        return reduce(jnp.add, [dot(lhs[m], rhs[n]) for m, n in pairs])
    if contract == (1, 1) and len(lhs) == len(rhs) == 2 and lhs[0].shape[1] <= rhs[0].shape[1]:
        # What the matrix unit turns as it loads it takes twice as long to load. So each piece of b is loaded once, for
        # the rows of both pieces of a: side by side as below, one would be loaded twice.
        rows = jnp.concatenate([jnp.concatenate([piece, piece], 2) for piece in lhs], 1)
        high, low = jnp.split(dot(rows, jnp.concatenate(rhs, 2)), 2, 1)
        return low + high
    # One dot of a longer contraction: of the 256 rows of the matrix unit, 128 or 64 would leave most without work.
    return dot(jnp.concatenate([lhs[m] for m, _ in pairs], x), jnp.concatenate([rhs[n] for _, n in pairs], y))


def dot_pieces(a: jax.Array, scan: Scan) -> list[jax.Array]:
    """Of a float32 a what `dot` makes of it, where it is an operand of several."""
    return bf16_split(a, 2 if scan.split else WHOLE)


def dot_with_all(a: jax.Array, b: jax.Array, scan: Scan, pieces: int = 2) -> jax.Array:
    """For each head, the product of its matrix in a and the matrix b, which the matrix unit loads once.

    pieces as in `dot`: 1 of what is bfloat16 in float32.
    """
    return dot(a.reshape(1, -1, a.shape[2]), b[None], (1, 0), scan, pieces).reshape(*a.shape[:2], b.shape[1])


def bf16_split(x: jax.Array, count: int = 2) -> list[jax.Array]:
    """Split float32 x into `count` bfloat16 terms, high to low; a bfloat16 x is its own single term."""
    piece = x.astype(jnp.bfloat16)
    if x.dtype == jnp.bfloat16 or count == 1:
        return [piece]
    return [piece, *bf16_split(x - piece.astype(jnp.float32), count - 1)]


def ones(where: jax.Array) -> jax.Array:
    """1 where it is, else 0, as dots take it."""
    return jnp.where(where, 1.0, 0.0).astype(jnp.bfloat16)


def iota(shape: tuple[int, ...], axis: int) -> jax.Array:
    return lax.broadcasted_iota(jnp.int32, shape, axis)


def f32(x: jax.Array) -> jax.Array:
    return x.astype(jnp.float32)
