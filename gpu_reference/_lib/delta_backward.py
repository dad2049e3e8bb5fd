"""The kernels of the chunked backward pass of a gated delta rule; see `chunk_delta_rule`.

"Columns" are tiles that are loaded transposed: tl.trans next to a wgmma has been miscompiled (Triton before 3.7.1).
"""
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators

from typing import Any, NamedTuple

import triton
import triton.language as tl

from gpu_reference._lib.chunk_decays import block_decays, gate_sums, pair_decays
from gpu_reference._lib.chunk_dots import dot, update_of
from gpu_reference._lib.chunk_pairs import before_rows, one_row, row_where, sums_across, sums_before, sums_from
from gpu_reference._lib.delta_forward import columns_of_program, read_state
from gpu_reference._lib.delta_pairs import rows_of_keys
from gpu_reference._lib.layout import (
    Rows,
    first_slot,
    load_state,
    load_tile,
    rows_of_block,
    rows_of_sequence,
    state_offset,
    store_state,
    store_tile,
)
from gpu_reference._lib.probe import INTERPRETED, probe


class Outs(NamedTuple):
    """What `gradients_kernel` fills: dq, dk [B, T, HV, K] of each head of values, and dgate in the gate's shape."""

    dq: Any
    dk: Any
    dgate: Any


class StateGradients(NamedTuple):
    """What a block sums over V: what its rows take of the gradients of q and k [K, R] through the state before it (read
    by queries, recalled by keys) and the state after it (written), and S dS [K]."""

    read: Any
    recalled: Any
    written: Any
    past: Any


@triton.jit
def reverse_kernel(
    inputs,
    layout,
    scale,
    pairs,
    dht,
    memory,
    dv,
    dh0,
    SPLIT: tl.constexpr,
    ROWS: tl.constexpr,
    BK: tl.constexpr,
    BV: tl.constexpr,
):
    """One program per (sequence, head of values, tile of V), from the last block to the first: fills dstates and
    dupdate of `memory`, and dv."""
    sequence, head, value, key, key_row, in_state, at_sequence = columns_of_program(layout, BK, BV)
    start, end = rows_of_sequence(sequence, layout)
    at = tl.arange(0, ROWS)

    dstate = load_state(dht, at_sequence, in_state)
    blocks = tl.cdiv(end - start, ROWS)
    for nth in range(blocks):
        block = blocks - 1 - nth
        rows = Rows(start + block * ROWS, end, head, layout.h)
        key_rows = rows_of_keys(rows, layout)
        row = rows.first + at
        slot = first_slot(sequence, start, ROWS) + block
        tl.store(memory.dstates + state_offset(slot, head, key, value, layout), dstate, mask=in_state)

        do_rows = load_tile(inputs.do, row[:, None], value, rows, layout.v)
        p_columns = load_tile(pairs.p, row[None, :], at[:, None], rows, ROWS)
        k_rows = load_tile(inputs.k, row[:, None], key_row, key_rows, layout.k)
        to_end = block_decays(inputs, rows, key_row, layout.k, 0, SPLIT, ROWS).to_end
        dv_new = scale * dot(p_columns, do_rows, SPLIT) + read_state(k_rows, dstate, to_end, SPLIT)
        if INTERPRETED:
            dv_new = probe("dv_new", dv_new, (row[:, None] < end) & (value < layout.v), chunk_size=ROWS)
        t_columns = load_tile(pairs.t, row[None, :], at[:, None], rows, ROWS)
        beta = load_tile(inputs.beta, row, 0, rows, 1).to(tl.float32)
        dupdate_rows = dot(t_columns, dv_new, SPLIT)
        dv_rows = beta[:, None] * dupdate_rows
        store_tile(memory.dupdate, dupdate_rows, row[:, None], value, rows, layout.v)
        store_tile(dv, dv_rows, row[:, None], value, rows, layout.v)

        decays = block_decays(inputs, rows, key, layout.k, 1, SPLIT, ROWS)
        q_columns = load_tile(inputs.q, row[None, :], key, key_rows, layout.k)
        k_columns = load_tile(inputs.k, row[None, :], key, key_rows, layout.k)
        # So do stays as exact as it came.
        change = dot(scale * decays.from_start * q_columns.to(tl.float32), do_rows, SPLIT)
        change -= update_of(k_columns, dv_rows, decays.from_start, SPLIT)
        dstate = decays.kept * dstate + (decays.lost * dstate + change)
        if INTERPRETED:
            dstate = probe("dh", dstate, in_state, chunk_size=ROWS)
    store_state(dh0, at_sequence, dstate, in_state)


@triton.jit
def pair_gradients_kernel(
    inputs, layout, scale, pairs, memory, dbeta, SPLIT: tl.constexpr, ROWS: tl.constexpr, BV: tl.constexpr
):
    """One program per (block of rows, head of values): fills dpairs of `memory`, and dbeta [B, T, HV]."""
    _, rows = rows_of_block(layout, ROWS)
    SUM: tl.constexpr = tl.float32 if SPLIT else tl.float64
    at = tl.arange(0, ROWS)
    row = rows.first + at
    dp = tl.full((ROWS, ROWS), 0.0, SUM)
    da = tl.full((ROWS, ROWS), 0.0, SUM)
    of_beta = tl.full((ROWS,), 0.0, tl.float32)
    for first_value in range(0, layout.v, BV):
        value = first_value + tl.arange(0, BV)[None, :]
        value_column = first_value + tl.arange(0, BV)[:, None]
        v_columns = load_tile(memory.v_new, row[None, :], value_column, rows, layout.v)
        do_rows = load_tile(inputs.do, row[:, None], value, rows, layout.v)
        dp += dot(do_rows, v_columns, SPLIT)
        dupdate_rows = load_tile(memory.dupdate, row[:, None], value, rows, layout.v)
        da -= dot(dupdate_rows, v_columns, SPLIT)
        error_rows = load_tile(memory.error, row[:, None], value, rows, layout.v)
        of_beta += tl.sum(dupdate_rows * error_rows, axis=1)
    dp = tl.where(at[:, None] >= at[None, :], scale * dp.to(tl.float32), 0.0)
    da = tl.where(at[:, None] > at[None, :], da.to(tl.float32), 0.0)
    raw = load_tile(pairs.raw, row[:, None], at[None, :], rows, ROWS)
    of_beta += tl.sum(raw * da, axis=1)
    if INTERPRETED:
        is_pair = (row[:, None] < rows.end) & (row[None, :] < rows.end)
        dp = probe("dP", dp, is_pair, chunk_size=ROWS)
        da = probe("dA", da, is_pair, chunk_size=ROWS)
    beta = load_tile(inputs.beta, row, 0, rows, 1).to(tl.float32)
    store_tile(memory.dpairs.p, dp, row[:, None], at[None, :], rows, ROWS)
    store_tile(memory.dpairs.raw, beta[:, None] * da, row[:, None], at[None, :], rows, ROWS)
    store_tile(dbeta, of_beta, row, 0, rows, 1)


@triton.jit
def gradients_kernel(
    inputs,
    layout,
    scale,
    pairs,
    memory,
    outs,
    SPLIT: tl.constexpr,
    ROWS: tl.constexpr,
    BK: tl.constexpr,
    BV: tl.constexpr,
):
    """One program per (block of rows, head of values): fills `outs` from what the others left, tile by tile of K."""
    slot, rows = rows_of_block(layout, ROWS)
    key_rows = rows_of_keys(rows, layout)
    at = tl.arange(0, ROWS)
    row = rows.first + at
    read = tl.full((ROWS,), 0.0, tl.float32)
    written = tl.full((ROWS,), 0.0, tl.float32)
    past = tl.full((), 0.0, tl.float32)
    for first_key in range(0, layout.k, BK):
        key = first_key + tl.arange(0, BK)[:, None]
        of_states = _state_gradients(inputs, memory, slot, rows, key, layout, SPLIT, ROWS, BV)
        decays = block_decays(inputs, rows, key, layout.k, 1, SPLIT, ROWS)
        q_columns = load_tile(inputs.q, row[None, :], key, key_rows, layout.k)
        k_columns = load_tile(inputs.k, row[None, :], key, key_rows, layout.k)
        dq_tile = of_states.read * (scale * decays.from_start)
        dk_tile = of_states.written * decays.to_end
        dk_recalled = of_states.recalled * -decays.from_start
        read_terms = q_columns.to(tl.float32) * dq_tile + k_columns.to(tl.float32) * dk_recalled
        written_terms = k_columns.to(tl.float32) * dk_tile
        dk_tile += dk_recalled
        dp_t = load_tile(memory.dpairs.p, row[None, :], at[:, None], rows, ROWS)
        if inputs.gk is None:
            read += tl.sum(read_terms, axis=0)
            written += tl.sum(written_terms, axis=0)
            past += tl.sum(of_states.past)
            coarse, fine = gate_sums(inputs, rows, ROWS)
            decay_t = pair_decays(coarse, fine, True, SPLIT)
            dq_tile += dot(k_columns, dp_t * decay_t, SPLIT)
            # Before dk is begun: sm_80 has no registers for both.
            store_tile(outs.dq, dq_tile, row[None, :], key, rows, layout.k)
            decay = pair_decays(coarse, fine, False, SPLIT)
            dp = load_tile(memory.dpairs.p, row[:, None], at[None, :], rows, ROWS)
            dk_tile += dot(q_columns, dp * decay, SPLIT)
            draw = load_tile(memory.dpairs.raw, row[:, None], at[None, :], rows, ROWS)
            draw_t = load_tile(memory.dpairs.raw, row[None, :], at[:, None], rows, ROWS)
            dk_tile += dot(k_columns, draw * decay + draw_t * decay_t, SPLIT)
        else:
            dp = load_tile(memory.dpairs.p, row[:, None], at[None, :], rows, ROWS)
            draw = load_tile(memory.dpairs.raw, row[:, None], at[None, :], rows, ROWS)
            draw_t = load_tile(memory.dpairs.raw, row[None, :], at[:, None], rows, ROWS)
            dq_inner, dk_inner, dgate_tile = _channel_gradients(
                q_columns, k_columns, dp, dp_t, draw, draw_t, inputs, rows, key_rows, key, layout.k
            )
            dq_tile += dq_inner
            dk_tile += dk_inner
            dgate_tile += (decays.kept + decays.lost) * of_states.past[:, None]
            dgate_tile += sums_from(read_terms) + sums_before(written_terms)
            store_tile(outs.dgate, dgate_tile, row[None, :], key, rows, layout.k)
            store_tile(outs.dq, dq_tile, row[None, :], key, rows, layout.k)
        store_tile(outs.dk, dk_tile, row[None, :], key, rows, layout.k)
    if inputs.gk is None:
        decays = block_decays(inputs, rows, 0, layout.k, 1, SPLIT, ROWS)
        p_t = load_tile(pairs.p, row[None, :], at[:, None], rows, ROWS)
        raw_t = load_tile(pairs.raw, row[None, :], at[:, None], rows, ROWS)
        dp_t = load_tile(memory.dpairs.p, row[None, :], at[:, None], rows, ROWS)
        draw_t = load_tile(memory.dpairs.raw, row[None, :], at[:, None], rows, ROWS)
        dgate_rows = sums_across(p_t * dp_t + raw_t * draw_t, read, written, SPLIT)
        dgate_rows += (decays.kept + decays.lost) * past
        store_tile(outs.dgate, dgate_rows, row, 0, rows, 1)


@triton.jit
def _state_gradients(
    inputs, memory, slot, rows, key, layout, SPLIT: tl.constexpr, ROWS: tl.constexpr, BV: tl.constexpr
):
    """The `StateGradients` of a block for the channels `key` [K, 1]."""
    SUM: tl.constexpr = tl.float32 if SPLIT else tl.float64
    BK: tl.constexpr = key.shape[0]
    row = rows.first + tl.arange(0, ROWS)
    beta = load_tile(inputs.beta, row, 0, rows, 1).to(tl.float32)
    read = tl.full((BK, ROWS), 0.0, SUM)
    recalled = tl.full((BK, ROWS), 0.0, SUM)
    written = tl.full((BK, ROWS), 0.0, SUM)
    past = tl.full((BK,), 0.0, tl.float32)
    is_state = key < tl.where(rows.first < rows.end, layout.k, 0)  # there are states only of blocks
    for first_value in range(0, layout.v, BV):
        value = first_value + tl.arange(0, BV)[None, :]
        value_column = first_value + tl.arange(0, BV)[:, None]
        in_state = is_state & (value < layout.v)
        at_state = state_offset(slot, rows.head, key, value, layout)
        state = tl.load(memory.states + at_state, mask=in_state, other=0)
        dstate = tl.load(memory.dstates + at_state, mask=in_state, other=0)
        do_columns = load_tile(inputs.do, row[None, :], value_column, rows, layout.v)
        v_columns = load_tile(memory.v_new, row[None, :], value_column, rows, layout.v)
        dv_columns = beta[None, :] * load_tile(memory.dupdate, row[None, :], value_column, rows, layout.v)
        read += dot(state, do_columns, SPLIT)
        recalled += dot(state, dv_columns, SPLIT)
        written += dot(dstate, v_columns, SPLIT)
        past += tl.sum(state * dstate, axis=1)
    return StateGradients(read.to(tl.float32), recalled.to(tl.float32), written.to(tl.float32), past)


@triton.jit
def _channel_gradients(q_columns, k_columns, dp, dp_t, draw, draw_t, inputs, rows, key_rows, key, keys):
    """The parts of dq, dk and dgk [K, R] that are of pairs within the block, as in `chunk_pairs`: those of a query and
    a key, whose gradient is dp [i, j], and of two keys, draw; and both transposed."""
    ROWS: tl.constexpr = dp.shape[0]
    at = tl.arange(0, ROWS)
    q_columns = q_columns.to(tl.float32)
    k_columns = k_columns.to(tl.float32)
    coarse, fine, other_coarse, other_fine = before_rows(inputs, rows, key, keys, ROWS)
    dq = tl.zeros_like(q_columns)
    dk_later = tl.zeros_like(q_columns)
    dk_earlier = tl.zeros_like(q_columns)
    for nth in range(ROWS):
        q_other, k_other, other_coarse, other_fine, from_other, to_other = one_row(
            inputs, nth, coarse, fine, other_coarse, other_fine, rows, key_rows, key, keys
        )
        is_other = at[:, None] == nth
        dq += row_where(is_other, dp_t) * (k_other * from_other)
        dk_later += row_where(is_other, draw_t) * (k_other * from_other)
        dk_earlier += (row_where(is_other, dp) * q_other + row_where(is_other, draw) * k_other) * to_other
    dgate = sums_from(q_columns * dq + k_columns * (dk_later - dk_earlier))
    of_same = row_where(at[:, None] == at[None, :], dp)
    return dq + of_same * k_columns, dk_later + dk_earlier + of_same * q_columns, dgate
