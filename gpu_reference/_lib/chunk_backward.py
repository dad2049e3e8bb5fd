"""The kernel of the chunked backward pass; see `chunk_scan`."""
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators

from typing import Any, NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from gpu_reference._lib.chunk_decays import block_decays, gate_sums, pair_decays
from gpu_reference._lib.chunk_dots import added_dot, dot, next_state
from gpu_reference._lib.chunk_pairs import channel_gate_gradient, channel_gradients, channel_scores, step_gate_gradient
from gpu_reference._lib.chunk_plan import Plan
from gpu_reference._lib.launch import Launch
from gpu_reference._lib.layout import (
    Outs,
    Rows,
    first_slot,
    load_tile,
    of_program,
    rows_of_segment,
    rows_of_sequence,
    state_offset,
    store_tile,
)
from gpu_reference._lib.probe import INTERPRETED, probe
from gpu_reference._lib.tiles import cdiv


class Memory(NamedTuple):
    """Where a block has its state, in `states` at `slot`; its state's gradient, in dstates at `segment`; and its dv."""

    states: Any
    slot: Any
    dstates: Any
    segment: Any
    dv: Any


class SumsOverValues(NamedTuple):
    """What a block sums over V: do v^T [R, R] and its transpose, dq and dk [K, R] through the states, S dS [K]."""

    products: Any
    products_t: Any
    dq: Any
    dk: Any
    past_block: Any


def backward_launch(plan: Plan, states: Tensor, dstates: Tensor, outs: Outs) -> Launch:
    """The kernel that fills `outs` from the states before each block of rows and dstates, the gradients of those after
    each; or if fused, after each sequence [N, H, K, V], which become those before it."""
    programs = plan.parts * plan.scan.p.h * cdiv(plan.scan.p.k, plan.block.keys)
    return plan.launch(_backward_kernel, programs, states=states, dstates=dstates, outs=outs)


@triton.jit
def _backward_kernel(
    inputs,
    layout,
    scale,
    states,
    dstates,
    outs,
    SEGMENT: tl.constexpr,
    SPLIT: tl.constexpr,
    ROWS: tl.constexpr,
    BK: tl.constexpr,
    BV: tl.constexpr,
):
    """One program per (segment, head, tile of K), from the last block to the first. dstates are those after each block,
    or without SEGMENT one per sequence, which goes with the blocks. "Columns" are tiles that are loaded transposed:
    tl.trans next to a wgmma has been miscompiled (Triton before 3.7.1)."""
    tile, head, segment = of_program(layout.k, BK, layout.h)
    sequence, start, end = rows_of_segment(segment, layout, SEGMENT)
    sequence_start, _ = rows_of_sequence(sequence, layout)
    key = tile * BK + tl.arange(0, BK)[:, None]
    key_row = tile * BK + tl.arange(0, BK)[None, :]
    at_tile = tile.to(tl.int64) * layout.rows * layout.h

    blocks = tl.cdiv(end - start, ROWS)
    for nth in range(blocks):
        rows = Rows(start + (blocks - 1 - nth) * ROWS, end, head, layout.h)
        row = rows.first + tl.arange(0, ROWS)
        q_columns = load_tile(inputs.q, row[None, :], key, rows, layout.k)
        k_columns = load_tile(inputs.k, row[None, :], key, rows, layout.k)
        k_rows = load_tile(inputs.k, row[:, None], key_row, rows, layout.k)
        decays = block_decays(inputs, rows, key, layout.k, 1, SPLIT, ROWS)
        if inputs.gk is None:
            k_decayed = k_rows
            coarse, fine = gate_sums(inputs, rows, ROWS)
            scores_t = dot(k_rows, q_columns, SPLIT) * pair_decays(coarse, fine, True, SPLIT)
        else:
            of_rows = block_decays(inputs, rows, key_row, layout.k, 0, SPLIT, ROWS)
            k_decayed = k_rows.to(tl.float32) * of_rows.to_end
            scores_t = channel_scores(k_rows, inputs.q, inputs.gk, rows, key_row, layout.k, True)
        if INTERPRETED:  # of a tile of K it is a part
            is_pair = (row[:, None] < end) & (row[None, :] < end)
            scores_t = probe("A", scores_t, is_pair & (layout.k <= BK), chunk_size=ROWS)

        slot = first_slot(sequence, sequence_start, ROWS) + (rows.first - sequence_start) // ROWS
        memory = Memory(states, slot, dstates, segment, outs.dv + at_tile * layout.v)
        sums = _sums_over_values(
            inputs, memory, scores_t, q_columns, k_decayed, decays, rows, key, layout, scale, SEGMENT, SPLIT, BV
        )
        # Loaded again, as in the forward pass.
        q_columns = load_tile(inputs.q, row[None, :], key, rows, layout.k)
        k_columns = load_tile(inputs.k, row[None, :], key, rows, layout.k)
        dq_tile = sums.dq * (decays.from_start * scale)
        dk_tile = sums.dk * decays.to_end
        if inputs.gk is None:
            if outs.dgate is not None:
                pairs_t = scores_t * (scale * sums.products_t)
                dgate_rows = step_gate_gradient(
                    pairs_t, q_columns, k_columns, dq_tile, dk_tile, sums.past_block, decays, layout.k <= BK, SPLIT
                )
                tl.store(outs.dgate + at_tile + row * layout.h + head, dgate_rows, mask=row < end)
            dq_tile += dot(k_columns, sums.products_t * (scale * pair_decays(coarse, fine, True, SPLIT)), SPLIT)
            dk_tile += dot(q_columns, sums.products * (scale * pair_decays(coarse, fine, False, SPLIT)), SPLIT)
        else:
            dgate_tile = channel_gate_gradient(
                q_columns, k_columns, dq_tile, dk_tile, sums.past_block, decays, rows, key, layout.k
            )
            dq_inner, dk_inner, dgate_inner = channel_gradients(
                inputs, q_columns, k_columns, scale * sums.products, scale * sums.products_t, rows, key, layout.k
            )
            dq_tile += dq_inner
            dk_tile += dk_inner
            store_tile(outs.dgate, dgate_tile + dgate_inner, row[None, :], key, rows, layout.k)
        store_tile(outs.dq, dq_tile, row[None, :], key, rows, layout.k)
        store_tile(outs.dk, dk_tile, row[None, :], key, rows, layout.k)
        if SEGMENT is None:
            tl.debug_barrier()  # a thread loads of dstates what another has stored


@triton.jit
def _sums_over_values(
    inputs,
    memory,
    scores_t,
    q_columns,
    k_decayed,
    decays,
    rows,
    key,
    layout,
    scale,
    SEGMENT: tl.constexpr,
    SPLIT: tl.constexpr,
    BV: tl.constexpr,
):
    """The `SumsOverValues` of a block; tile by tile of V, dv is stored, and without SEGMENT dstates of the block
    before."""
    ROWS: tl.constexpr = scores_t.shape[0]
    BK: tl.constexpr = key.shape[0]
    SUM: tl.constexpr = tl.float32 if SPLIT else tl.float64
    row = rows.first + tl.arange(0, ROWS)
    products = tl.full((ROWS, ROWS), 0.0, SUM)
    products_t = tl.full((ROWS, ROWS), 0.0, SUM)
    dq_tile = tl.full((BK, ROWS), 0.0, SUM)
    dk_tile = tl.full((BK, ROWS), 0.0, SUM)
    past_block = tl.full((BK,), 0.0, tl.float32)
    for first_value in range(0, layout.v, BV):
        value = first_value + tl.arange(0, BV)[None, :]
        value_column = first_value + tl.arange(0, BV)[:, None]
        do_rows = load_tile(inputs.do, row[:, None], value, rows, layout.v)
        do_columns = load_tile(inputs.do, row[None, :], value_column, rows, layout.v)
        v_rows = load_tile(inputs.v, row[:, None], value, rows, layout.v)
        v_columns = load_tile(inputs.v, row[None, :], value_column, rows, layout.v)
        products = added_dot(products, do_rows, v_columns, SPLIT)
        products_t = added_dot(products_t, v_rows, do_columns, SPLIT)

        in_state = (key < layout.k) & (value < layout.v)
        at_state = state_offset(memory.slot, rows.head, key, value, layout)
        at_dstate = state_offset(memory.segment, rows.head, key, value, layout)
        state = tl.load(memory.states + at_state, mask=in_state, other=0)
        dstate = tl.load(memory.dstates + at_dstate, mask=in_state, other=0)
        dq_tile += dot(state, do_columns, SPLIT)
        dk_tile += dot(dstate, v_columns, SPLIT)
        past_block += tl.sum(state * dstate, axis=1)
        dv_tile = dot(k_decayed, dstate, SPLIT)
        if len(decays.to_end.shape) == 1:
            dv_tile *= decays.to_end[:, None]
        dv_tile += scale * dot(scores_t, do_rows, SPLIT)
        store_tile(memory.dv, dv_tile, row[:, None], value, rows, layout.v)
        if SEGMENT is None:
            dstate = next_state(dstate, q_columns, do_rows, decays.from_start * scale, decays, SPLIT)
            if INTERPRETED:
                dstate = probe("dstate", dstate, in_state, chunk_size=ROWS)
            tl.debug_barrier()  # a thread may store what another has still to load
            tl.store(memory.dstates + at_dstate, dstate, mask=in_state)
    products = products.to(tl.float32)
    products_t = products_t.to(tl.float32)
    if INTERPRETED:
        is_pair = (row[:, None] < rows.end) & (row[None, :] < rows.end)
        probe("dA", scale * products, is_pair & (row[:, None] >= row[None, :]), chunk_size=ROWS)
        probe("dA", scale * products_t, is_pair & (row[:, None] <= row[None, :]), chunk_size=ROWS)
    return SumsOverValues(products, products_t, dq_tile.to(tl.float32), dk_tile.to(tl.float32), past_block)
