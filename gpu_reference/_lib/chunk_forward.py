"""The kernels of the chunked forward pass, and of the states that both passes begin with; see `chunk_scan`."""
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators

import triton
import triton.language as tl
from torch import Tensor

from gpu_reference._lib.chunk_decays import block_decays, gate_sums, pair_decays
from gpu_reference._lib.chunk_dots import dot, next_state
from gpu_reference._lib.chunk_pairs import channel_scores
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
)
from gpu_reference._lib.probe import INTERPRETED, probe
from gpu_reference._lib.rows import contiguous


def states_launch(
    scan: Scan,
    k: Tensor,
    v: Tensor,
    first_state: Tensor | None,
    states: Tensor,
    last_state: Tensor | None,
    *,
    reverse: bool = False,
) -> Launch:
    """The kernel that fills `states` [slots, H, K, V] with the state before each segment of a scan, and last_state
    [N, H, K, V] with that after the last; reverse, of q and do: the gradients of the states after each."""
    keys, values = (min(size, 64) for size in (scan.block.keys, scan.block.values))
    arguments = {
        "k": k,
        "v": v,
        "gates": scan.gates,
        "first_state": contiguous(first_state),
        "states": states,
        "last_state": last_state,
        "sequences": scan.sequences,
        "sizes": scan.sizes,
        "scale": scan.p.scale,
        "SEGMENT": scan.segment,
        "REVERSE": reverse,
        "SPLIT": scan.split,
        "ROWS": scan.block.rows,
        "BK": keys,
        "BV": values,
    }
    programs = scan.p.n * scan.p.h * triton.cdiv(scan.p.k, keys) * triton.cdiv(scan.p.v, values)
    return Launch(_states_kernel, (programs,), arguments, scan.block.options)


def forward_launch(
    scan: Scan, inputs: Inputs, first_states: Tensor | None, o: Tensor, last_states: Tensor | None
) -> Launch:
    """The kernel that fills o from the state before each sequence (fused) or segment, as `states_launch` leaves
    them; if fused, last_states [N, H, K, V] too."""
    arguments = {
        "inputs": inputs,
        "gates": scan.gates,
        "first_states": first_states,
        "o": o,
        "last_states": last_states,
        "sequences": scan.sequences,
        "sizes": scan.sizes,
        "scale": scan.p.scale,
        "SEGMENT": None if scan.fused else scan.segment,
        "SPLIT": scan.split,
        "ROWS": scan.block.rows,
        "BK": scan.block.keys,
        "BV": scan.block.values,
    }
    programs = scan.parts * scan.p.h * triton.cdiv(scan.p.v, scan.block.values)
    return Launch(_forward_kernel, (programs,), arguments, scan.block.options)


@triton.jit
def _states_kernel(
    k,
    v,
    gates,
    first_state,
    states,
    last_state,
    sequences,
    sizes,
    scale,
    SEGMENT: tl.constexpr,
    REVERSE: tl.constexpr,
    SPLIT: tl.constexpr,
    ROWS: tl.constexpr,
    BK: tl.constexpr,
    BV: tl.constexpr,
):
    """One program per (sequence, head, tile of K, tile of V). In reverse k and v are q and do, and states gradients."""
    tiles_v = tl.cdiv(sizes.v, BV)
    tile, head, sequence = of_program(tl.cdiv(sizes.k, BK) * tiles_v, 1, sizes.h)
    start, end = rows_of_sequence(sequence, sequences)
    key = (tile // tiles_v * BK + tl.arange(0, BK))[:, None]
    value = (tile % tiles_v * BV + tl.arange(0, BV))[None, :]
    in_state = (key < sizes.k) & (value < sizes.v)
    at_sequence = state_offset(sequence, head, key, value, sizes)

    state = tl.full((BK, BV), 0.0, tl.float32)
    if first_state is not None:
        state += tl.load(first_state + at_sequence, mask=in_state, other=0)
    blocks = tl.cdiv(end - start, ROWS)
    for nth in range(blocks):
        block = nth
        if REVERSE:
            block = blocks - 1 - nth
        rows = Rows(start + block * ROWS, end, head, sizes.h)
        if block * ROWS % SEGMENT == 0:
            slot = first_slot(sequence, start, SEGMENT) + block * ROWS // SEGMENT
            tl.store(states + state_offset(slot, head, key, value, sizes), state, mask=in_state)
        row = rows.first + tl.arange(0, ROWS)
        k_columns = load_tile(k, row[None, :], key, rows, sizes.k)
        v_rows = load_tile(v, row[:, None], value, rows, sizes.v)
        decays = block_decays(gates, rows, key, sizes.k, 1, SPLIT, ROWS)
        weight = decays.to_end
        if REVERSE:
            weight = decays.from_start * scale
        state = next_state(state, k_columns, v_rows, weight, decays, SPLIT)
        if INTERPRETED:
            state = probe("dstate" if REVERSE else "state", state, in_state, chunk_size=ROWS)
    if last_state is not None:
        tl.store(last_state + at_sequence, state, mask=in_state)


@triton.jit
def _forward_kernel(
    inputs,
    gates,
    first_states,
    o,
    last_states,
    sequences,
    sizes,
    scale,
    SEGMENT: tl.constexpr,
    SPLIT: tl.constexpr,
    ROWS: tl.constexpr,
    BK: tl.constexpr,
    BV: tl.constexpr,
):
    """One program per (segment, head, tile of V)."""
    tile, head, segment = of_program(sizes.v, BV, sizes.h)
    _, start, end = rows_of_segment(segment, sequences, SEGMENT)
    value = tile * BV + tl.arange(0, BV)[None, :]
    key_row = tl.arange(0, BK)[None, :]
    key = tl.arange(0, BK)[:, None]
    in_state = (key < sizes.k) & (value < sizes.v)
    if SEGMENT is not None:
        in_state = in_state & (key < tl.where(start < end, sizes.k, 0))  # there are states only of segments
    at_segment = state_offset(segment, head, key, value, sizes)

    state = tl.full((BK, BV), 0.0, tl.float32)
    if first_states is not None:
        state += tl.load(first_states + at_segment, mask=in_state, other=0)
    for block in range(tl.cdiv(end - start, ROWS)):
        rows = Rows(start + block * ROWS, end, head, sizes.h)
        row = rows.first + tl.arange(0, ROWS)
        q_rows = load_tile(inputs.q, row[:, None], key_row, rows, sizes.k)
        k_columns = load_tile(inputs.k, row[None, :], key, rows, sizes.k)
        v_rows = load_tile(inputs.v, row[:, None], value, rows, sizes.v)
        if gates.gk is None:
            decays = block_decays(gates, rows, key, sizes.k, 1, SPLIT, ROWS)
            coarse, fine = gate_sums(gates, rows, ROWS)
            scores = dot(q_rows, k_columns, SPLIT) * pair_decays(coarse, fine, False, SPLIT)
            out = decays.from_start[:, None] * dot(q_rows, state, SPLIT)
        else:
            scores = channel_scores(q_rows, inputs.k, gates.gk, rows, key_row, sizes.k, False)
            decays = block_decays(gates, rows, key_row, sizes.k, 0, SPLIT, ROWS)
            out = dot(decays.from_start * q_rows.to(tl.float32), state, SPLIT)
        if INTERPRETED:
            scores = probe("A", scores, (row[:, None] < end) & (row[None, :] < end), chunk_size=ROWS)
        out += dot(scores, v_rows, SPLIT)
        at_out = (row[:, None] * sizes.h + head) * sizes.v + value
        tl.store(o + at_out, (scale * out).to(o.dtype.element_ty), mask=(row[:, None] < end) & (value < sizes.v))
        if SEGMENT != ROWS:
            decays = block_decays(gates, rows, key, sizes.k, 1, SPLIT, ROWS)
            # Loaded again: kept meanwhile, they would leave too few registers for the rest.
            k_columns = load_tile(inputs.k, row[None, :], key, rows, sizes.k)
            state = next_state(state, k_columns, v_rows, decays.to_end, decays, SPLIT)
            if INTERPRETED:
                state = probe("state", state, in_state, chunk_size=ROWS)
    if last_states is not None:
        tl.store(last_states + at_segment, state, mask=in_state)
