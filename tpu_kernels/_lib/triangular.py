"""The inverse of a unit lower triangular matrix by substitution, of each head of a chunk.

Blocks of heads lie beside each other in the lanes of a register, and the matrix unit takes all of them at once: beside
them a dot of one head's block would leave most of it without work, and load as much.
"""

from functools import reduce

import jax
import jax.numpy as jnp
from jax.experimental.pallas import tpu as pltpu

from tpu_kernels._lib.chip import LANES
from tpu_kernels._lib.chunk_dots import WHOLE, bf16_split, dot, iota
from tpu_kernels._lib.chunk_plan import Scan

BLOCK = 16
"""Rows of a diagonal block."""


def inverse(a: jax.Array, scan: Scan) -> jax.Array:
    """T = (I + A)⁻¹ [heads, C, C] float32, of strictly lower triangular A [heads, C, C].

    The rows of the diagonal blocks of 16 are solved one after the other; what is below them follows from products with
    blocks of 16, 32, … rows, of whole float32 whatever q and k are. No power of A is formed: those of keys with a
    common component grow like 50^64. What is not finite in A makes its column of T NaN, and nothing of another head.
    """
    heads, c, _ = a.shape
    beside = next(n for n in range(max(LANES // c, 1), 0, -1) if heads % n == 0)
    split = a.reshape(heads // beside, beside, c, c)
    parts = [split[:, n] for n in range(beside)]
    if beside * c < LANES:
        parts.append(jnp.zeros((heads // beside, c, LANES - beside * c), jnp.float32))
    a = jnp.concatenate(parts, 2)
    finite = jnp.abs(a) < jnp.inf
    lost = jnp.sum(jnp.where(finite, 0.0, jnp.nan), axis=1, keepdims=True)  # 0 · NaN would reach the heads beside it
    a = jnp.where(finite, a, 0.0)
    t, size = _by_rows(_blocks(a, BLOCK, c)), BLOCK
    while size < c:
        t, size = _joined(t, _blocks(a, size, c, below=True), scan), 2 * size
    t += lost
    return jnp.stack([t[:, :, n * c : (n + 1) * c] for n in range(beside)], 1).reshape(heads, c, c)


def _blocks(a: jax.Array, size: int, c: int, *, below: bool = False) -> jax.Array:
    """The diagonal blocks [·, size, LANES] of matrices of c columns beside each other, [·, c, LANES].

    Or those below each other one, at its lanes; then the lanes between are zero.
    """
    own = iota((a.shape[0], size, LANES), 2) % c // size
    firsts = range(0, c // size, 2 if below else 1)
    rows = [a[:, (n + below) * size : (n + below + 1) * size] for n in firsts]
    return reduce(jnp.add, [jnp.where(own == n, x, 0.0) for n, x in zip(firsts, rows, strict=True)])


def _by_rows(a: jax.Array) -> jax.Array:
    """The inverses of blocks beside each other: each row, once it is known, is taken from all rows below."""
    shape = a.shape
    first = iota(shape, 2) // BLOCK * BLOCK
    t = jnp.where(iota(shape, 1) == iota(shape, 2) - first, 1.0, 0.0)
    flat, first = a.reshape(-1, shape[2]), first.reshape(-1, shape[2])
    for row in range(BLOCK - 1):
        factors = jnp.take_along_axis(flat, first + row, axis=1, mode="promise_in_bounds").reshape(shape)
        t -= factors * t[:, row : row + 1]
    return t


def _joined(t: jax.Array, below: jax.Array, scan: Scan) -> jax.Array:
    """The inverses of twice the size, from those of both halves [·, size, LANES] and what is between, at first halves.

    What lies at second halves of one register is moved, so that the products of two registers make one.
    """
    groups, size, lanes = t.shape
    is_first = iota(t.shape, 2) // size % 2 == 0
    if groups % 2:
        found = _products(_left(t, size), _products(below, t, scan), scan)
    else:
        (t_0, t_1), (below_0, below_1) = (
            [x.reshape(groups // 2, 2, size, lanes)[:, n] for n in range(2)] for x in (t, below)
        )
        here = is_first[: groups // 2]
        first, between = (jnp.where(here, x, _right(y, size)) for x, y in ((t_0, t_1), (below_0, below_1)))
        found = _products(jnp.where(here, _left(t_0, size), t_1), _products(between, first, scan), scan)
        found = jnp.stack([found, _left(found, size)], 1).reshape(t.shape)
    return jnp.concatenate([jnp.where(is_first, t, 0.0), jnp.where(is_first, -found, t)], 1)


def _left(x: jax.Array, lanes: int) -> jax.Array:
    return pltpu.roll(x, LANES - lanes, 2)


def _right(x: jax.Array, lanes: int) -> jax.Array:
    return pltpu.roll(x, lanes, 2)


def _products(x: jax.Array, y: jax.Array, scan: Scan) -> jax.Array:
    """The products of the square blocks of x and y [·, size, LANES] that lie at the same lanes, of whole float32.

    The matrix unit loads each piece of y once, as a diagonal of blocks, for all pieces of x.
    """
    size, found = x.shape[1], jnp.zeros_like(x)
    own, lhs = iota(x.shape, 2) // size, bf16_split(x, WHOLE)
    for n, piece in reversed(list(enumerate(bf16_split(y, WHOLE)))):
        diagonal = [jnp.where(own == block, piece, jnp.zeros_like(piece)) for block in range(LANES // size)]
        sums = dot(jnp.concatenate(lhs[: WHOLE - n], 1), jnp.concatenate(diagonal, 1), (1, 0), scan)
        for m in reversed(range(WHOLE - n)):
            found += sums[:, m * size : (m + 1) * size]
    return found
