"""The kernel of the chunked backward pass; see `chunk_scan`."""
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators

from typing import Any, NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from gpu_reference._lib.chunk_decays import block_decays, gate_sums, pair_decays
from gpu_reference._lib.chunk_dots import dot, next_state
from gpu_reference._lib.chunk_pairs import channel_gate_gradient, channel_gradients, channel_scores, sums_across
from gpu_reference._lib.chunk_plan import Scan
from gpu_reference._lib.launch import Launch
from gpu_reference._lib.layout import (
    Inputs,
    Rows,
    first_slot,
    load_tile,
    of_program,
    rows_of_segment,
    rows_of_sequence,
    state_offset,
    store_columns,
)
from gpu_reference._lib.probe import INTERPRETED, probe


class Outs(NamedTuple):
    """What the kernel fills: dq, dk [B, T, H, K], dv [tiles of K, B, T, H, V], and dgate, gk's in its shape, else
    [tiles of K, B, T, H]."""

    dq: Any
    dk: Any
    dv: Any
    dgate: Any


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


def backward_launch(scan: Scan, inputs: Inputs, states: Tensor, dstates: Tensor, outs: Outs) -> Launch:
    """The kernel that fills `outs` from the states before each block of rows and dstates, the gradients of those after
    each; or if fused, after each sequence [N, H, K, V], which become those before it."""
    arguments = {
        "inputs": inputs,
        "gates": scan.gates,
        "states": states,
        "dstates": dstates,
        "outs": outs,
        "sequences": scan.sequences,
        "sizes": scan.sizes,
        "scale": scan.p.scale,
        "SEGMENT": None if scan.fused else scan.segment,
        "SPLIT": scan.split,
        "ROWS": scan.block.rows,
        "BK": scan.block.keys,
        "BV": scan.block.values,
    }
    programs = scan.parts * scan.p.h * triton.cdiv(scan.p.k, scan.block.keys)
    return Launch(_backward_kernel, (programs,), arguments, scan.block.options)


@triton.jit
def _backward_kernel(
    inputs,
    gates,
    states,
    dstates,
    outs,
    sequences,
    sizes,
    scale,
    SEGMENT: tl.constexpr,
    SPLIT: tl.constexpr,
    ROWS: tl.constexpr,
    BK: tl.constexpr,
    BV: tl.constexpr,
):
    """One program per (segment, head, tile of K), from the last block to the first. dstates are those after each block,
    or without SEGMENT one per sequence, which goes with the blocks. "Columns" are tiles that are loaded transposed:
    tl.trans next to a wgmma has been miscompiled (Triton before 3.7.1)."""
    tile, head, segment = of_program(sizes.k, BK, sizes.h)
    sequence, start, end = rows_of_segment(segment, sequences, SEGMENT)
    sequence_start, _ = rows_of_sequence(sequence, sequences)
    key = tile * BK + tl.arange(0, BK)[:, None]
    key_row = tile * BK + tl.arange(0, BK)[None, :]
    at_tile = tile.to(tl.int64) * sequences.rows * sizes.h

    blocks = tl.cdiv(end - start, ROWS)
    for nth in range(blocks):
        rows = Rows(start + (blocks - 1 - nth) * ROWS, end, head, sizes.h)
        row = rows.first + tl.arange(0, ROWS)
        q_columns = load_tile(inputs.q, row[None, :], key, rows, sizes.k)
        k_columns = load_tile(inputs.k, row[None, :], key, rows, sizes.k)
        k_rows = load_tile(inputs.k, row[:, None], key_row, rows, sizes.k)
        decays = block_decays(gates, rows, key, sizes.k, 1, SPLIT, ROWS)
        if gates.gk is None:
            k_decayed = k_rows
            coarse, fine = gate_sums(gates, rows, ROWS)
            scores_t = dot(k_rows, q_columns, SPLIT) * pair_decays(coarse, fine, True, SPLIT)
        else:
            of_rows = block_decays(gates, rows, key_row, sizes.k, 0, SPLIT, ROWS)
            k_decayed = k_rows.to(tl.float32) * of_rows.to_end
            scores_t = channel_scores(k_rows, inputs.q, gates.gk, rows, key_row, sizes.k, True)
        if INTERPRETED:  # of a tile of K it is a part
            is_pair = (row[:, None] < end) & (row[None, :] < end)
            scores_t = probe("A", scores_t, is_pair & (sizes.k <= BK), chunk_size=ROWS)
        scores_t *= scale

        slot = first_slot(sequence, sequence_start, ROWS) + (rows.first - sequence_start) // ROWS
        memory = Memory(states, slot, dstates, segment, outs.dv + at_tile * sizes.v)
        sums = _sums_over_values(
            inputs, memory, scores_t, q_columns, k_decayed, decays, rows, key, sizes, scale, SEGMENT, SPLIT, BV
        )
        products = sums.products.to(tl.float32)
        products_t = sums.products_t.to(tl.float32)
        if INTERPRETED:
            probe("dA", scale * products, is_pair & (row[:, None] >= row[None, :]), chunk_size=ROWS)
            probe("dA", scale * products_t, is_pair & (row[:, None] <= row[None, :]), chunk_size=ROWS)
        # Loaded again, as in the forward pass.
        q_columns = load_tile(inputs.q, row[None, :], key, rows, sizes.k)
        k_columns = load_tile(inputs.k, row[None, :], key, rows, sizes.k)
        dq_tile = sums.dq.to(tl.float32) * (decays.from_start * scale)
        dk_tile = sums.dk.to(tl.float32) * decays.to_end
        if gates.gk is None:
            if outs.dgate is not None:
                through_state = tl.sum(q_columns.to(tl.float32) * dq_tile, axis=0)
                through_dstate = tl.sum(k_columns.to(tl.float32) * dk_tile, axis=0)
                dgate_rows = sums_across(scores_t * products_t, through_state, through_dstate, SPLIT, ROWS)
                past = (decays.kept + decays.lost) * tl.sum(sums.past_block)
                if INTERPRETED:
                    probe("dgate", past, sizes.k <= BK, chunk_size=ROWS)
                tl.store(outs.dgate + at_tile + row * sizes.h + head, dgate_rows + past, mask=row < end)
            products *= scale * pair_decays(coarse, fine, False, SPLIT)
            products_t *= scale * pair_decays(coarse, fine, True, SPLIT)
            dq_tile += dot(k_columns, products_t, SPLIT)
            dk_tile += dot(q_columns, products, SPLIT)
        else:
            dgate_tile = channel_gate_gradient(
                q_columns, k_columns, dq_tile, dk_tile, sums.past_block, decays, rows, key, sizes.k, ROWS
            )
            products *= scale
            products_t *= scale
            dq_inner, dk_inner, dgate_inner = channel_gradients(
                inputs, gates.gk, q_columns, k_columns, products, products_t, rows, key, sizes.k, ROWS
            )
            dq_tile += dq_inner
            dk_tile += dk_inner
            store_columns(outs.dgate, dgate_tile + dgate_inner, row, key, rows, sizes.k)
        store_columns(outs.dq, dq_tile, row, key, rows, sizes.k)
        store_columns(outs.dk, dk_tile, row, key, rows, sizes.k)
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
    sizes,
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
    for first_value in range(0, sizes.v, BV):
        value = first_value + tl.arange(0, BV)[None, :]
        value_column = first_value + tl.arange(0, BV)[:, None]
        do_rows = load_tile(inputs.do, row[:, None], value, rows, sizes.v)
        do_columns = load_tile(inputs.do, row[None, :], value_column, rows, sizes.v)
        v_rows = load_tile(inputs.v, row[:, None], value, rows, sizes.v)
        v_columns = load_tile(inputs.v, row[None, :], value_column, rows, sizes.v)
        products += dot(do_rows, v_columns, SPLIT)
        products_t += dot(v_rows, do_columns, SPLIT)

        in_state = (key < sizes.k) & (value < sizes.v)
        at_state = state_offset(memory.slot, rows.head, key, value, sizes)
        at_dstate = state_offset(memory.segment, rows.head, key, value, sizes)
        state = tl.load(memory.states + at_state, mask=in_state, other=0)
        dstate = tl.load(memory.dstates + at_dstate, mask=in_state, other=0)
        dq_tile += dot(state, do_columns, SPLIT)
        dk_tile += dot(dstate, v_columns, SPLIT)
        past_block += tl.sum(state * dstate, axis=1)
        dv_tile = dot(k_decayed, dstate, SPLIT)
        if len(decays.to_end.shape) == 1:
            dv_tile *= decays.to_end[:, None]
        dv_tile += dot(scores_t, do_rows, SPLIT)
        at_value = (row[:, None] * rows.heads + rows.head) * sizes.v + value
        in_values = (row[:, None] < rows.end) & (value < sizes.v)
        tl.store(memory.dv + at_value, dv_tile.to(memory.dv.dtype.element_ty), mask=in_values)
        if SEGMENT is None:
            dstate = next_state(dstate, q_columns, do_rows, decays.from_start * scale, decays, SPLIT)
            if INTERPRETED:
                dstate = probe("dstate", dstate, in_state, chunk_size=ROWS)
            tl.store(memory.dstates + at_dstate, dstate, mask=in_state)
    return SumsOverValues(products, products_t, dq_tile, dk_tile, past_block)
