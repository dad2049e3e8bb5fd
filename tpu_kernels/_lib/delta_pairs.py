"""The decayed products of all pairs of steps of a chunk, and their gradients, for a gate per step or per channel."""

from collections.abc import Sequence
from functools import reduce

import jax
import jax.numpy as jnp

from tpu_kernels._lib.chunk_decays import ChannelDecay, Decay
from tpu_kernels._lib.chunk_dots import WHOLE, dot, dot_with_all, f32, iota, ones
from tpu_kernels._lib.chunk_plan import Scan
from tpu_kernels._lib.decays import times


def scores(rows: Sequence[jax.Array], k: jax.Array, decay: Decay, scan: Scan) -> list[jax.Array]:
    """For each x [heads, C, K] of rows, x_i · k_j decayed from step j to step i, [heads, C, C], zero for i < j."""
    if isinstance(decay, ChannelDecay):
        return _scores_by_channel([f32(x) for x in rows], f32(k), decay, scan)
    between = decay.between()
    return [times(between, products) for products in _products(rows, k, scan)]


def _products(rows: Sequence[jax.Array], k: jax.Array, scan: Scan) -> list[jax.Array]:
    """x kᵀ of each x, in one dot: the matrix unit loads k once."""
    c = scan.chunk
    products = dot(jnp.concatenate(rows, 1), k, (1, 1), scan)
    return [products[:, n * c : (n + 1) * c] for n in range(len(rows))]


def _scores_by_channel(rows: list[jax.Array], k: jax.Array, decay: ChannelDecay, scan: Scan) -> list[jax.Array]:
    i, j = _steps(scan)
    found = [jnp.where(i == j, jnp.sum(x * k, axis=2, keepdims=True), 0.0) for x in rows]
    for level, of_half in enumerate(decay.halves):
        here = (i > j) & _meet(i, j, 2**level)
        products = _products([times(of_half, x) for x in rows], times(of_half, k), scan)
        found = [jnp.where(here, product, rest) for product, rest in zip(products, found, strict=True)]
    return found


def gradients(
    x: tuple[jax.Array, jax.Array],
    products: tuple[jax.Array, jax.Array],
    of_products: tuple[jax.Array, jax.Array],
    decay: Decay,
    scan: Scan,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """The parts of dq, dk [heads, C, K] and dgate that come from the pairs of steps within a chunk.

    x: q and k. products: `scores` of both with k; of_products: the gradients of the products, zero where i < j, and
    where i = j as well of the second. dgate is [heads, C, K], or with one gate per step what `of_steps` adds up.
    """
    (q, k), (of_q, of_k) = x, of_products
    if isinstance(decay, ChannelDecay):
        return _gradients_by_channel(f32(q), f32(k), of_q, of_k, decay, scan)
    between, (i, j) = decay.between(), _steps(scan)
    # The gate of step t decays what goes from before t to t or later. Sums of just these pairs lose nothing to
    # cancellation, as running sums of q·dq - k·dk do.
    before = ones((i < j)[0])
    pairs = reduce(jnp.add, [dot_with_all(a * da, before, scan) for a, da in zip(products, of_products, strict=True)])
    of_q, of_k = times(between, of_q), times(between, of_k)
    dk = dot(of_q, q, (0, 0), scan) + (dot(of_k, k, (1, 0), scan) + dot(of_k, k, (0, 0), scan))
    return dot(of_q, k, (1, 0), scan), dk, pairs


def of_steps(pairs: jax.Array, read: jax.Array, written: jax.Array, scan: Scan) -> jax.Array:
    """The gradient of the gate of each step t but for what passes the chunk, [heads, 1, C].

    It is the sum of what each row i ≥ t reads, pairs [heads, i, t] and read [heads, i, 1], and each before it writes.
    """
    i, t = _steps(scan)
    return jnp.sum(jnp.where(i >= t, pairs + read, written), axis=1, keepdims=True)


def _gradients_by_channel(
    q: jax.Array, k: jax.Array, of_q: jax.Array, of_k: jax.Array, decay: ChannelDecay, scan: Scan
) -> tuple[jax.Array, jax.Array, jax.Array]:
    i, j = _steps(scan)
    of_same = jnp.sum(jnp.where(i == j, of_q, 0.0), axis=2, keepdims=True)
    dq, dk, dgate = of_same * k, of_same * q, jnp.zeros_like(k)
    # Of a pair, at [i, j] as at [j, i].
    both_q, both_k = (x + jnp.where(i < j, x.swapaxes(1, 2), 0.0) for x in (of_q, of_k))
    for level, of_half in enumerate(decay.halves):
        half = 2**level
        meet, second = _meet(i, j, half), iota(q.shape, 1) & half != 0
        keys = times(of_half, k)
        queries = jnp.where(second, times(of_half, q), keys)
        dqueries = dot(jnp.where(meet, both_q, 0.0), queries, (1, 0), scan)
        dkeys = dot(jnp.where(meet, both_k, 0.0), keys, (1, 0), scan)
        dq += jnp.where(second, times(of_half, dqueries), 0.0)
        dk += times(of_half, jnp.where(second, 0.0, dqueries) + dkeys)
        # Of the same half: from step i on in a second one, before it in a first one.
        after = (i ^ j < half) & ((j >= i) ^ (i & half == 0))
        dgate += dot(ones(after), queries * dqueries + keys * dkeys, (1, 0), scan, WHOLE)
    return dq, dk, dgate


def _steps(scan: Scan) -> tuple[jax.Array, jax.Array]:
    shape = (scan.heads, scan.chunk, scan.chunk)
    return iota(shape, 1), iota(shape, 2)


def _meet(i: jax.Array, j: jax.Array, half: int) -> jax.Array:
    """Whether i and j are in different halves of a part of 2·half steps."""
    between = i ^ j
    return (between >= half) & (between < 2 * half)
