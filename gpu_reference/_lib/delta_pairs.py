"""The pairs of steps within a block of rows of a gated delta rule: scores, and the triangular system that they are.

What a block's steps write is T beta (v - what the state recalls), T = (I + A)^-1: see `chunk_delta_rule`. T comes from
substitution, by rows in diagonal blocks of 16 and by products between these; keys with a component in common make
powers of A grow as 50^64.
"""
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators

from typing import Any, NamedTuple

import triton
import triton.language as tl

from gpu_reference._lib.chunk_decays import causal_decay, channel_sums, gate_sums, pair_decays, with_row
from gpu_reference._lib.chunk_dots import dot
from gpu_reference._lib.layout import Rows, load_tile, rows_of_block, store_tile
from gpu_reference._lib.probe import INTERPRETED, probe

DIAGONAL = tl.constexpr(16)
"""Rows of a diagonal block."""


class Pairs(NamedTuple):
    """Of every row its pairs with each row of its block [B, T, HV, ROWS], float32: P, the decayed scores of queries and
    keys, T, and for the backward pass raw, A without beta."""

    p: Any
    t: Any = None
    raw: Any = None


@triton.jit
def rows_of_keys(rows, layout):
    """These rows of the head of keys that the head of values shares with others."""
    return Rows(rows.first, rows.end, rows.head // layout.group, rows.heads // layout.group)


@triton.jit
def pairs_kernel(
    inputs, layout, scale, pairs, SPLIT: tl.constexpr, ROWS: tl.constexpr, LEVELS: tl.constexpr, BK: tl.constexpr
):
    """One program per (block of rows, head of values): fills `pairs`. ROWS are DIAGONAL times 2^LEVELS."""
    _, rows = rows_of_block(layout, ROWS)
    key_rows = rows_of_keys(rows, layout)
    at = tl.arange(0, ROWS)
    row = rows.first + at
    SUM: tl.constexpr = tl.float32 if SPLIT else tl.float64
    raw = tl.full((ROWS, ROWS), 0.0, SUM)
    scores = tl.full((ROWS, ROWS), 0.0, SUM)
    for first_key in range(0, layout.k, BK):
        key_row = first_key + tl.arange(0, BK)[None, :]
        k_rows = load_tile(inputs.k, row[:, None], key_row, key_rows, layout.k)
        q_rows = load_tile(inputs.q, row[:, None], key_row, key_rows, layout.k)
        if inputs.gk is None:
            key = first_key + tl.arange(0, BK)[:, None]
            k_columns = load_tile(inputs.k, row[None, :], key, key_rows, layout.k)
            raw += dot(k_rows, k_columns, SPLIT)
            scores += dot(q_rows, k_columns, SPLIT)
        else:
            of_keys, of_queries = _channel_scores(q_rows, k_rows, inputs, rows, key_rows, key_row, layout.k)
            raw += of_keys
            scores += of_queries
    raw = raw.to(tl.float32)
    scores = scores.to(tl.float32)
    if inputs.gk is None:
        coarse, fine = gate_sums(inputs, rows, ROWS)
        decays = pair_decays(coarse, fine, False, SPLIT)
        raw *= decays
        scores *= decays
    raw = tl.where(at[:, None] > at[None, :], raw, 0.0)
    beta = load_tile(inputs.beta, row, 0, rows, 1).to(tl.float32)
    inverse = _inverse(beta[:, None] * raw, LEVELS)
    if INTERPRETED:
        is_pair = (row[:, None] < rows.end) & (row[None, :] < rows.end)
        inverse = probe("T", inverse, is_pair, chunk_size=ROWS)
        scores = probe("P", scores, is_pair, chunk_size=ROWS)
    store_tile(pairs.t, inverse, row[:, None], at[None, :], rows, ROWS)
    store_tile(pairs.p, scores, row[:, None], at[None, :], rows, ROWS)
    if pairs.raw is not None:
        store_tile(pairs.raw, raw, row[:, None], at[None, :], rows, ROWS)


@triton.jit
def _inverse(a, LEVELS: tl.constexpr):
    """(I + a)^-1 of a strictly lower triangular a [R, R], R = DIAGONAL 2^LEVELS."""
    inverse = _diagonal_inverses(a)
    for level in tl.static_range(0, LEVELS):
        inverse = _joined(inverse, a, DIAGONAL << level)
    return inverse


@triton.jit
def _joined(inverse, a, HALF: tl.constexpr):
    """The inverses of I + the diagonal blocks of 2 HALF rows, from those of the blocks of HALF: below these two,
    T1 and T2, is -T2 A21 T1. Products are those of float32, whatever the operands were."""
    row = tl.arange(0, a.shape[0])[:, None]
    column = tl.arange(0, a.shape[0])[None, :]
    is_below = (row // HALF == column // HALF + 1) & (row // HALF % 2 == 1)
    product = dot(inverse, dot(tl.where(is_below, a, 0.0), inverse, False), False)
    return tl.where(is_below, -product, inverse)


@triton.jit
def _diagonal_inverses(a):
    """The inverses of I + the diagonal blocks of a [R, R], zero elsewhere: each row of a block, once it is known, is
    taken from the rows below."""
    ROWS: tl.constexpr = a.shape[0]
    COUNT: tl.constexpr = ROWS // DIAGONAL
    block = tl.arange(0, COUNT)
    is_same = block[:, None, None, None] == block[None, None, :, None]
    at = tl.arange(0, DIAGONAL)
    row = at[None, :, None]
    column = at[None, None, :]
    blocks = tl.sum(tl.where(is_same, tl.reshape(a, (COUNT, DIAGONAL, COUNT, DIAGONAL)), 0.0), axis=2)
    inverse = tl.where(row == column, 1.0, tl.zeros_like(blocks))
    for nth in range(DIAGONAL - 1):
        known = tl.sum(tl.where(row == nth, inverse, 0.0), axis=1, keep_dims=True)
        weight = tl.sum(tl.where(column == nth, blocks, 0.0), axis=2, keep_dims=True)
        # Compilers fuse a product and a difference, the interpreter rounds both.
        inverse = tl.where(row > nth, tl.fma(-weight, known, inverse), inverse)
    return tl.reshape(tl.where(is_same, inverse[:, :, None, :], 0.0), (ROWS, ROWS))


@triton.jit
def _channel_scores(q_rows, k_rows, inputs, rows, key_rows, key, keys):
    """The scores [i, j] of keys and of queries with each key, where every channel has a gate, of the channels `key`
    [1, K]: a pair is computed at a time for each, as in `chunk_pairs`."""
    ROWS: tl.constexpr = q_rows.shape[0]
    at = tl.arange(0, ROWS)
    q_rows = q_rows.to(tl.float32)
    k_rows = k_rows.to(tl.float32)
    coarse, fine = channel_sums(inputs.gk, rows, key, keys, 0, ROWS)
    of_keys = tl.full((ROWS, ROWS), 0.0, tl.float32)
    of_queries = tl.full((ROWS, ROWS), 0.0, tl.float32)
    other_coarse = tl.full((1, q_rows.shape[1]), 0.0, tl.float32)
    other_fine = tl.full((1, q_rows.shape[1]), 0.0, tl.float32)
    for nth in range(ROWS):
        other_row = rows.first + nth + tl.arange(0, 1)[:, None]
        other = load_tile(inputs.k, other_row, key, key_rows, keys).to(tl.float32)
        other_coarse, other_fine = with_row(other_coarse, other_fine, inputs.gk, other_row, key, rows, keys)
        decayed = other * causal_decay((at >= nth)[:, None], coarse - other_coarse, fine - other_fine)
        is_other = at[None, :] == nth
        of_keys += tl.where(is_other, tl.sum(k_rows * decayed, axis=1)[:, None], 0.0)
        of_queries += tl.where(is_other, tl.sum(q_rows * decayed, axis=1)[:, None], 0.0)
    return of_keys, of_queries
