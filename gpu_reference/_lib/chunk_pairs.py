"""Pairs of a query and a key within a block of rows, where each channel has its own decay; sums of pairs.

A pair is computed at a time for each channel, since a product of two decays would have to grow by what it then shrinks.
"""
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators

import triton
import triton.language as tl

from gpu_reference._lib.chunk_decays import causal_decay, channel_sums, with_row
from gpu_reference._lib.chunk_dots import dot
from gpu_reference._lib.layout import load_tile
from gpu_reference._lib.probe import INTERPRETED, probe


@triton.jit
def channel_scores(rows_tile, source, gk, rows, key, keys, KEYS_FIRST: tl.constexpr):
    """A [i, j] of queries rows_tile [R, K] and the keys in `source`, for the channels `key` [1, K]; with KEYS_FIRST its
    transpose [j, i], of keys and the queries in `source`."""
    ROWS: tl.constexpr = rows_tile.shape[0]
    at = tl.arange(0, ROWS)
    rows_tile = rows_tile.to(tl.float32)
    coarse, fine = channel_sums(gk, rows, key, keys, 0, ROWS)
    scores = tl.full((ROWS, ROWS), 0.0, tl.float32)
    other_coarse = tl.full((1, rows_tile.shape[1]), 0.0, tl.float32)
    other_fine = tl.full((1, rows_tile.shape[1]), 0.0, tl.float32)
    for nth in range(ROWS):
        other_row = rows.first + nth + tl.arange(0, 1)[:, None]
        other = load_tile(source, other_row, key, rows, keys).to(tl.float32)
        other_coarse, other_fine = with_row(other_coarse, other_fine, gk, other_row, key, rows, keys)
        if KEYS_FIRST:
            pair = causal_decay((at <= nth)[:, None], other_coarse - coarse, other_fine - fine)
        else:
            pair = causal_decay((at >= nth)[:, None], coarse - other_coarse, fine - other_fine)
        score = tl.sum(rows_tile * other * pair, axis=1)
        scores += tl.where(at[None, :] == nth, score[:, None], 0.0)
    return scores


@triton.jit
def channel_gradients(inputs, q_columns, k_columns, products, products_t, rows, key, keys):
    """The parts of dq, dk and dgk [K, R] that are of pairs within the block, given the gradient of q . k without its
    decay as products [i, j] and products_t [j, i]."""
    ROWS: tl.constexpr = products.shape[0]
    at = tl.arange(0, ROWS)
    q_columns = q_columns.to(tl.float32)
    k_columns = k_columns.to(tl.float32)
    coarse, fine, other_coarse, other_fine = before_rows(inputs, rows, key, keys, ROWS)
    dq = tl.zeros_like(q_columns)
    dk = tl.zeros_like(q_columns)
    for nth in range(ROWS):
        q_other, k_other, other_coarse, other_fine, from_other, to_other = one_row(
            inputs, nth, coarse, fine, other_coarse, other_fine, rows, rows, key, keys
        )
        is_other = at[:, None] == nth
        dq += row_where(is_other, products_t) * k_other * from_other
        dk += row_where(is_other, products) * q_other * to_other
    dgate = sums_from(q_columns * dq - k_columns * dk)
    of_same = row_where(at[:, None] == at[None, :], products)
    if INTERPRETED:
        dgate = probe("dgate", dgate, (key < keys) & (rows.first + at < rows.end)[None, :], chunk_size=ROWS)
    return dq + of_same * k_columns, dk + of_same * q_columns, dgate


@triton.jit
def before_rows(inputs, rows, key, keys, ROWS: tl.constexpr):
    """What a walk by `one_row` starts from: the gates summed up to every row [K, R], and those before the first, 0."""
    coarse, fine = channel_sums(inputs.gk, rows, key, keys, 1, ROWS)
    none = tl.full((coarse.shape[0], 1), 0.0, tl.float32)
    return coarse, fine, none, none


@triton.jit
def one_row(inputs, nth, coarse, fine, other_coarse, other_fine, rows, key_rows, key, keys):
    """Of a block's row `nth` q and k [K, 1], the gates summed up to it, from those before it, and the decays from it to
    each later row and to it from each earlier one [K, R]; coarse, fine: the sums up to every row."""
    at = tl.arange(0, coarse.shape[1])
    row = rows.first + nth + tl.arange(0, 1)[None, :]
    q = load_tile(inputs.q, row, key, key_rows, keys).to(tl.float32)
    k = load_tile(inputs.k, row, key, key_rows, keys).to(tl.float32)
    other_coarse, other_fine = with_row(other_coarse, other_fine, inputs.gk, row, key, rows, keys)
    from_other = causal_decay((at > nth)[None, :], coarse - other_coarse, fine - other_fine)
    to_other = causal_decay((at < nth)[None, :], other_coarse - coarse, other_fine - fine)
    return q, k, other_coarse, other_fine, from_other, to_other


@triton.jit
def row_where(is_element, x):
    """Of x [R, C] the elements of which there is one in each column, as a row [1, C]."""
    return tl.sum(tl.where(is_element, x, 0.0), axis=0)[None, :]


@triton.jit
def channel_gate_gradient(q_columns, k_columns, dq_tile, dk_tile, past_block, decays, rows, key, keys):
    """The part of dgk [K, R] that is of states: what passes the whole block, what is read of the state before it, and
    what is written into the one after it."""
    ROWS: tl.constexpr = q_columns.shape[1]
    past = (decays.kept + decays.lost) * past_block[:, None]
    read = sums_from(q_columns.to(tl.float32) * dq_tile)
    written = sums_before(k_columns.to(tl.float32) * dk_tile)
    if INTERPRETED:
        is_step = (key < keys) & (rows.first + tl.arange(0, ROWS) < rows.end)[None, :]
        past = probe("dgate", past, key < keys, chunk_size=ROWS)
        read = probe("dgate", read, is_step, chunk_size=ROWS)
        written = probe("dgate", written, is_step, chunk_size=ROWS)
    return past + read + written


@triton.jit
def step_gate_gradient(
    pairs_t, q_columns, k_columns, dq_tile, dk_tile, past_block, decays, is_whole, SPLIT: tl.constexpr
):
    """The gradient of a scalar gate at each t [R]: what passes the whole block, and sums over keys j < t and queries
    i >= t, of pairs_t [j, i], what a query reads of the state before the block, and what a key writes into the one
    after it. is_whole: whether the tile of K has all channels."""
    ROWS: tl.constexpr = pairs_t.shape[0]
    read = tl.sum(q_columns.to(tl.float32) * dq_tile, axis=0)
    written = tl.sum(k_columns.to(tl.float32) * dk_tile, axis=0)
    past = (decays.kept + decays.lost) * tl.sum(past_block)
    if INTERPRETED:
        probe("dgate", past, is_whole, chunk_size=ROWS)
    return sums_across(pairs_t, read, written, SPLIT) + past


@triton.jit
def sums_across(pairs_t, read, written, SPLIT: tl.constexpr):
    """At each t [R] the sum over rows j < t <= i: of pairs_t [j, i], of `read` of i, and of `written` of j."""
    at = tl.arange(0, pairs_t.shape[0])
    is_before = (at[None, :] < at[:, None]).to(tl.float32)
    if SPLIT:
        is_before = is_before.to(tl.bfloat16)
    pairs = dot(is_before, pairs_t, SPLIT)
    return tl.sum(tl.where(at[None, :] >= at[:, None], pairs + read[None, :], written[None, :]), axis=1)


@triton.jit
def sums_from(x):
    """Of x [K, R]: the sum from each column to the last."""
    return tl.cumsum(x, axis=1, reverse=True)


@triton.jit
def sums_before(x):
    """Of x [K, R]: the sum of the columns before each."""
    return tl.cumsum(x, axis=1) - x
