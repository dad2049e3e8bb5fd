"""The kernels of the chunked forward pass, and of the states that both passes begin with; see `chunk_scan`."""
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators

import triton
import triton.language as tl
from torch import Tensor

from gpu_reference._lib.chunk_decays import block_decays, gate_sums, pair_decays
from gpu_reference._lib.chunk_dots import dot, next_state, read_state
from gpu_reference._lib.chunk_pairs import channel_scores
from gpu_reference._lib.chunk_plan import Plan
from gpu_reference._lib.launch import Launch
from gpu_reference._lib.layout import (
    Rows,
    first_slot,
    load_state,
    load_tile,
    of_program,
    rows_of_segment,
    rows_of_sequence,
    state_offset,
    store_state,
    store_tile,
)
from gpu_reference._lib.probe import INTERPRETED, probe
from gpu_reference._lib.tiles import cdiv


def states_launch(
    plan: Plan, first_state: Tensor | None, states: Tensor, last_state: Tensor | None, *, reverse: bool = False
) -> Launch:
    """The kernel that fills `states` [slots, H, K, V] with the state before each segment of a scan, and last_state
    [N, H, K, V] with that after the last; reverse: with the gradients of the states after each."""
    p = plan.scan.p
    keys, values = (min(size, 64) for size in (plan.block.keys, plan.block.values))
    programs = p.n * p.h * cdiv(p.k, keys) * cdiv(p.v, values)
    own = {"first_state": first_state, "states": states, "last_state": last_state, "REVERSE": reverse}
    return plan.launch(_states_kernel, programs, **own, SEGMENT=plan.segment, BK=keys, BV=values)


def forward_launch(plan: Plan, first_states: Tensor | None, o: Tensor, last_states: Tensor | None) -> Launch:
    """The kernel that fills o from the state before each sequence (fused) or segment, as `states_launch` leaves
    them; if fused, last_states [N, H, K, V] too."""
    programs = plan.parts * plan.scan.p.h * cdiv(plan.scan.p.v, plan.block.values)
    return plan.launch(_forward_kernel, programs, first_states=first_states, o=o, last_states=last_states)


@triton.jit
def _states_kernel(
    inputs,
    layout,
    scale,
    first_state,
    states,
    last_state,
    SEGMENT: tl.constexpr,
    REVERSE: tl.constexpr,
    SPLIT: tl.constexpr,
    ROWS: tl.constexpr,
    BK: tl.constexpr,
    BV: tl.constexpr,
):
    """One program per (sequence, head, tile of K, tile of V). In reverse q and do take the places of k and v, and
    states are gradients."""
    k = inputs.k
    v = inputs.v
    if REVERSE:
        k = inputs.q
        v = inputs.do
    tiles_v = tl.cdiv(layout.v, BV)
    tile, head, sequence = of_program(tl.cdiv(layout.k, BK) * tiles_v, 1, layout.h)
    start, end = rows_of_sequence(sequence, layout)
    key = (tile // tiles_v * BK + tl.arange(0, BK))[:, None]
    value = (tile % tiles_v * BV + tl.arange(0, BV))[None, :]
    in_state = (key < layout.k) & (value < layout.v)
    at_sequence = state_offset(sequence, head, key, value, layout)

    state = load_state(first_state, at_sequence, in_state)
    blocks = tl.cdiv(end - start, ROWS)
    for nth in range(blocks):
        block = nth
        if REVERSE:
            block = blocks - 1 - nth
        rows = Rows(start + block * ROWS, end, head, layout.h)
        if block * ROWS % SEGMENT == 0:
            slot = first_slot(sequence, start, SEGMENT) + block * ROWS // SEGMENT
            tl.store(states + state_offset(slot, head, key, value, layout), state, mask=in_state)
        row = rows.first + tl.arange(0, ROWS)
        k_columns = load_tile(k, row[None, :], key, rows, layout.k)
        v_rows = load_tile(v, row[:, None], value, rows, layout.v)
        decays = block_decays(inputs, rows, key, layout.k, 1, SPLIT, ROWS)
        weight = decays.to_end
        if REVERSE:
            weight = decays.from_start * scale
        state = next_state(state, k_columns, v_rows, weight, decays, SPLIT)
        if INTERPRETED:
            state = probe("dstate" if REVERSE else "state", state, in_state, chunk_size=ROWS)
    store_state(last_state, at_sequence, state, in_state)


@triton.jit
def _forward_kernel(
    inputs,
    layout,
    scale,
    first_states,
    o,
    last_states,
    SEGMENT: tl.constexpr,
    SPLIT: tl.constexpr,
    ROWS: tl.constexpr,
    BK: tl.constexpr,
    BV: tl.constexpr,
):
    """One program per (segment, head, tile of V)."""
    tile, head, segment = of_program(layout.v, BV, layout.h)
    _, start, end = rows_of_segment(segment, layout, SEGMENT)
    value = tile * BV + tl.arange(0, BV)[None, :]
    key_row = tl.arange(0, BK)[None, :]
    key = tl.arange(0, BK)[:, None]
    in_state = (key < layout.k) & (value < layout.v)
    if SEGMENT is not None:
        in_state = in_state & (key < tl.where(start < end, layout.k, 0))  # there are states only of segments
    at_segment = state_offset(segment, head, key, value, layout)

    state = load_state(first_states, at_segment, in_state)
    for block in range(tl.cdiv(end - start, ROWS)):
        rows = Rows(start + block * ROWS, end, head, layout.h)
        row = rows.first + tl.arange(0, ROWS)
        q_rows = load_tile(inputs.q, row[:, None], key_row, rows, layout.k)
        k_columns = load_tile(inputs.k, row[None, :], key, rows, layout.k)
        v_rows = load_tile(inputs.v, row[:, None], value, rows, layout.v)
        if inputs.gk is None:
            coarse, fine = gate_sums(inputs, rows, ROWS)
            scores = dot(q_rows, k_columns, SPLIT) * pair_decays(coarse, fine, False, SPLIT)
        else:
            scores = channel_scores(q_rows, inputs.k, inputs.gk, rows, key_row, layout.k, False)
        decays = block_decays(inputs, rows, key_row, layout.k, 0, SPLIT, ROWS)
        out = read_state(q_rows, state, decays.from_start, SPLIT)
        if INTERPRETED:
            scores = probe("A", scores, (row[:, None] < end) & (row[None, :] < end), chunk_size=ROWS)
        out += dot(scores, v_rows, SPLIT)
        store_tile(o, scale * out, row[:, None], value, rows, layout.v)
        if SEGMENT != ROWS:
            decays = block_decays(inputs, rows, key, layout.k, 1, SPLIT, ROWS)
            # Loaded again: kept meanwhile, they would leave too few registers for the rest.
            k_columns = load_tile(inputs.k, row[None, :], key, rows, layout.k)
            state = next_state(state, k_columns, v_rows, decays.to_end, decays, SPLIT)
            if INTERPRETED:
                state = probe("state", state, in_state, chunk_size=ROWS)
    store_state(last_states, at_segment, state, in_state)
