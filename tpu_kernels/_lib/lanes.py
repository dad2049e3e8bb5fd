"""Maxima of blocks along the lanes of vector registers, and scales spread back over the lanes of their blocks.

Rows hold one scale after the other. Where several blocks share a register of 128 lanes they are brought there, and
back, by permutations of its lanes, each of which moves 8 rows of float32 or 16 of bfloat16.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from tpu_kernels._lib.chip import LANES


def maxima(values: jax.Array, block: int, count: int) -> jax.Array:
    """The maximum of each of `count` blocks of columns, [rows, columns] -> float32 [rows, whole registers].

    values: not negative, in float32 or bfloat16, of whole registers; block: 16, 32, 64 or whole registers.
    """
    chunks = []
    for first in range(0, count, LANES):
        here = range(first, min(first + LANES, count))
        if block < LANES:
            registers = range(first * block // LANES, pl.cdiv(here.stop * block, LANES))
            chunks.append(_of_parts([values[:, r * LANES : (r + 1) * LANES] for r in registers], block))
        else:
            merged = jnp.zeros((values.shape[0], LANES), values.dtype)
            for b in here:
                most = jnp.max(values[:, b * block : (b + 1) * block], axis=1, keepdims=True)
                merged = _where(partial(jnp.equal, b % LANES), jnp.broadcast_to(most, merged.shape), merged)
            chunks.append(merged)
    return jnp.concatenate(chunks, axis=1).astype(jnp.float32)


def maxima_of_rows(blocks: list[jax.Array]) -> jax.Array:
    """The maxima over the rows of up to 8 blocks [8, columns] of float32: row i has those of block i.

    Two blocks are merged by one rotation of rows, as registers of lanes are below; with it every second row takes its
    pair from the row after it, which is in the other block's place.
    """
    for step in (1, 2, 4):
        row = lax.broadcasted_iota(jnp.int32, blocks[0].shape, 0)
        pairs = [(blocks[i], blocks[min(i + 1, len(blocks) - 1)]) for i in range(0, len(blocks), 2)]
        blocks = [
            jnp.maximum(
                jnp.where(row & step == 0, a, b), pltpu.roll(jnp.where(row & step == 0, b, a), 8 - step, axis=0)
            )
            for a, b in pairs
        ]
    return blocks[0]


def spread(scales: jax.Array, first: Any, block: int) -> jax.Array:
    """The scale of each lane of a register of columns, the first of which has scale `first` of `scales` [rows, 128]."""
    return _permuted(scales, lambda lane: first + lane // block)


def _of_parts(registers: list[jax.Array], block: int) -> jax.Array:
    """The maxima of the blocks of up to `block` registers [rows, 128] in one: each register's after the other's.

    Two registers are merged by one permutation: each keeps, of every two lanes of its blocks, the larger one in one of
    them, and leaves the other to the other register; then of every two pairs, and so on.
    """
    lanes, each = registers, LANES // block
    for step in (1 << bit for bit in range(block.bit_length() - 1)):
        lanes = [_merge(lanes[i : i + 2], step) for i in range(0, len(lanes), 2)]
    return _permuted(lanes[0], lambda lane: lane % each * block + lane // each)


def _merge(registers: list[jax.Array], step: int) -> jax.Array:
    """The larger of lanes i and i ^ step: of the first register where i has not that bit, else of the second."""
    a, b = registers[0], registers[-1]
    if len(registers) == 1:
        return jnp.maximum(a, _permuted(a, lambda lane: lane ^ step))
    mine, others = (_where(lambda lane: lane & step == 0, *pair) for pair in ((a, b), (b, a)))
    return jnp.maximum(mine, _permuted(others, lambda lane: lane ^ step))


def _words(x: jax.Array) -> jax.Array:
    """The 32-bit words of registers, two rows of bfloat16 to each."""
    return pltpu.bitcast(x, jnp.int32)


def _permuted(x: jax.Array, source: Callable[[jax.Array], jax.Array]) -> jax.Array:
    """x [rows, 128] with each lane from lane source(lane)."""
    words = _words(x)
    lane = lax.broadcasted_iota(jnp.int32, words.shape, 1)
    return pltpu.bitcast(jnp.take_along_axis(words, source(lane), axis=1), x.dtype)


def _where(condition: Callable[[jax.Array], jax.Array], x: jax.Array, y: jax.Array) -> jax.Array:
    """x in the lanes of which the condition holds, else y, [rows, 128]."""
    words = _words(x)
    lane = lax.broadcasted_iota(jnp.int32, words.shape, 1)
    return pltpu.bitcast(jnp.where(condition(lane), words, _words(y)), x.dtype)
