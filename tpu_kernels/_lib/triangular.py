"""The inverse of a unit lower triangular matrix by substitution, of each head of a chunk."""

from functools import reduce

import jax
import jax.numpy as jnp

from tpu_kernels._lib.chip import LANES
from tpu_kernels._lib.chunk_dots import WHOLE, dot, iota
from tpu_kernels._lib.chunk_plan import Scan

BLOCK = 16
"""Rows of a diagonal block."""


def inverse(a: jax.Array, scan: Scan) -> jax.Array:
    """T = (I + A)⁻¹ [heads, C, C] float32, of strictly lower triangular A [heads, C, C].

    The rows of the diagonal blocks of 16 are solved one after the other; what is below them follows from products with
    the halves of twice, four times … as many rows, of whole float32 whatever q and k are. No power of A is formed:
    those of keys with a common component grow like 50^64.
    """
    t, i, j = _of_blocks(a), iota(a.shape, 1), iota(a.shape, 2)
    half = BLOCK
    while half < a.shape[1]:
        apart = i ^ j
        below = jnp.where((i > j) & (apart >= half) & (apart < 2 * half), a, 0.0)
        t -= dot(t, dot(below, t, (1, 0), scan, WHOLE), (1, 0), scan, WHOLE)
        half *= 2
    return t


def _of_blocks(a: jax.Array) -> jax.Array:
    """The inverse of the diagonal blocks, zero elsewhere.

    All blocks of a head lie beside each other in 16 rows, and heads where they fill the lanes.
    """
    heads, c, _ = a.shape
    own = iota((heads, BLOCK, c), 2) // BLOCK
    blocks = [jnp.where(own == n, a[:, n * BLOCK : (n + 1) * BLOCK], 0.0) for n in range(c // BLOCK)]
    diagonal = reduce(jnp.add, blocks)
    beside = next(n for n in range(max(LANES // c, 1), 0, -1) if heads % n == 0)
    grouped = diagonal.reshape(heads // beside, beside, BLOCK, c)
    parts = [grouped[:, n] for n in range(beside)]
    if beside * c < LANES:
        parts.append(jnp.zeros((heads // beside, BLOCK, LANES - beside * c), jnp.float32))
    t = _by_rows(jnp.concatenate(parts, 2))
    t = jnp.stack([t[:, :, n * c : (n + 1) * c] for n in range(beside)], 1).reshape(heads, BLOCK, c)
    return jnp.concatenate([jnp.where(own == n, t, 0.0) for n in range(c // BLOCK)], 1)


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
