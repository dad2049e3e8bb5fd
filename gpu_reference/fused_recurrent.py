"""The recurrent forms of gated linear attention on the GPU, in Triton: one step of time after the other.

`recurrent_fwd` and `recurrent_bwd` are what `fused_recurrent_simple_gla_*` (gates `g`, `g_gamma`) and
`fused_recurrent_gla_*` (gate `gk`) are made of; the operations are defined in `cpu_golden/simple_gla.py` and
`cpu_golden/gla.py`. A program owns a tile of one head's state S [K, V] in one sequence, in float32, and walks through
time: S = exp(gate) S + k v^T. There are no dots: float32 and bfloat16 differ in what is loaded and stored, and in
nothing between.

A slow gate keeps hundreds of steps in a state, and with them hundreds of roundings. So a decay near 1 is kept as its
difference from 1, what an addition to the state loses decays beside it and is added in the next step, and this residue
is dropped every SEGMENT steps: there the state is a plain float32 tensor, and a call that goes on from it computes the
same bits. Sums over K and V are taken in two steps, first of what a thread holds: one chain would round too often.

The backward pass goes through time twice: forwards for dq and for a copy of the state every BLOCK steps, then
backwards for all else. The gradient of a gate is the state's gradient times the decayed state, which is recomputed,
block by block, from these copies: a sum over later steps (of q dq - k dk) would be cheaper, but its error grows with T.

Nothing is read back from the device. The offsets in a CUDA tensor are not checked; those out of order are clamped.
"""
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators

from typing import Any, Unpack

import triton
import triton.language as tl
from torch import Tensor

from gpu_reference._lib.decays import no_decay, step_decay
from gpu_reference._lib.hardware import bfloat16_as_float32_where_interpreted
from gpu_reference._lib.launch import Launch
from gpu_reference._lib.layout import (
    first_slot,
    load_row,
    load_state,
    state_of_program,
    state_offset,
    steps_of_program,
    store_row,
    store_state,
)
from gpu_reference._lib.probe import INTERPRETED, probe
from gpu_reference._lib.scans import Scan, dtypes_of_gradients, take
from gpu_reference._lib.tiles import block_of, cdiv
from op_arguments.gla import Gates, Gradients, Output, ScanOptions
from op_arguments.options import options_of

SEGMENT = 16  # steps between plain float32 states: divides every chunk size, so calls may be cut at chunk borders
BLOCK = 64  # steps between the copies of the state
TILE = 4096  # elements of a state in a program: 32 registers a thread with four warps


@options_of(take)
def recurrent_fwd(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    gates: Gates,
    output_final_state: bool = False,
    reverse: bool = False,
    **options: Unpack[ScanOptions],
) -> Output:
    """(o, ht): `o_t = scale q_t^T S_t`, and the state after the last step where output_final_state, else None.

    Arguments, results and errors as `chunk_scan.chunk_fwd`. reverse: time runs backwards, in each sequence. Sites shown
    to a probe: kept and state.
    """
    return _forward(take(q, k, v, gates, **options), bool(reverse), output_final_state)


@options_of(take)
def recurrent_bwd(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    do: Tensor,
    *,
    gates: Gates,
    dht: Tensor | None = None,
    reverse: bool = False,
    **options: Unpack[ScanOptions],
) -> Gradients:
    """The gradients of `recurrent_fwd`'s arguments, given those of o (do) and, if it is not None, of ht (dht).

    Arguments, results and errors as `chunk_scan.chunk_bwd`. Held meanwhile, in float32: a copy of dv for each of the
    tiles of K, and where there are gates T / BLOCK + BLOCK states per sequence. Sites: those of `recurrent_fwd`, dstate
    and dgate (a scalar gate's where K has one tile).
    """
    return _backward(take(q, k, v, gates, do, dht, **options), bool(reverse))


@bfloat16_as_float32_where_interpreted(lambda scan, *_: Output(scan.inputs.q.dtype, None))
def _forward(scan: Scan, reverse: bool, output_final_state: bool) -> Output:
    o, ht = scan.empty_output(output_final_state)
    keys = block_of(scan.p.k)
    columns = min(block_of(scan.p.v), max(TILE // keys, 1))
    own = {"initial_state": scan.initial_state, "o": o, "ht": ht}
    _launch(_forward_kernel, scan, reverse, keys, columns, **own).run(scan.device)
    return Output(o, ht)


@bfloat16_as_float32_where_interpreted(dtypes_of_gradients)
def _backward(scan: Scan, reverse: bool) -> Gradients:
    """The gradients, by two kernels.

    The first leaves the states before each block of steps, [B T // BLOCK + N, H, K, V], a sequence's first at its first
    row // BLOCK + its number; from these the other recomputes those of a block, [N BLOCK, H, K, V].
    """
    p = scan.p
    columns = block_of(p.v)
    keys = min(block_of(p.k), max(TILE // columns, 4))
    outs = scan.empty_outs(keys)
    dh0 = None if scan.initial_state is None else scan.empty_states(p.n)
    states = scan.empty_states(p.b * p.t // BLOCK + p.n) if scan.is_gated else None
    block = scan.empty_states(p.n * BLOCK) if scan.is_gated else None
    shared = {"states": states, "BLOCK_STEPS": BLOCK}
    first = {"initial_state": scan.initial_state, "dq": outs.dq, **shared}
    second = {"dht": scan.dht, "block": block, "outs": outs, "dh0": dh0, **shared}
    _launch(_dq_kernel, scan, reverse, keys, columns, **first).run(scan.device)
    _launch(_dk_dv_kernel, scan, reverse, keys, columns, **second).run(scan.device)
    return scan.gradients(outs, dh0)


def _launch(kernel: Any, scan: Scan, reverse: bool, keys: int, columns: int, **own: Any) -> Launch:
    """A program for each tile [keys, columns] of every state; own: the kernel's own arguments."""
    p = scan.p
    tiles = max(cdiv(p.k, keys), 1) * max(cdiv(p.v, columns), 1)
    chosen = {"REVERSE": reverse, "BK": keys, "BV": columns, "SEGMENT_STEPS": SEGMENT}
    options = {"num_warps": 4, "enable_fp_fusion": True}
    return Launch(kernel, (p.n * p.h * tiles,), {**scan.arguments, **own, **chosen}, options, "K and V")


@triton.jit
def _forward_kernel(
    inputs,
    layout,
    scale,
    initial_state,
    o,
    ht,
    REVERSE: tl.constexpr,
    BK: tl.constexpr,
    BV: tl.constexpr,
    SEGMENT_STEPS: tl.constexpr,
):
    """One program per (sequence, head, tile of V)."""
    tile, steps = steps_of_program(layout.v, BV, layout, REVERSE)
    key = tl.arange(0, BK)
    value = tile * BV + tl.arange(0, BV)
    _, _, in_state, at_state = state_of_program(steps, key, value, layout, 0)

    state = load_state(initial_state, at_state, in_state)
    residue = tl.full((BV, BK), 0.0, tl.float32)
    for step in range(steps.length):
        row = steps.first + step * steps.stride
        q_row = load_row(inputs.q, row, key, layout.k)
        residue = tl.where(step % SEGMENT_STEPS == 0, 0.0, residue)
        state, residue = next_state(inputs, state, residue, row, steps.head, key, value, layout, 0)
        o_row = scale * tl.sum(tl.sum(tl.reshape(q_row[None, :] * state, (BV, 4, BK // 4)), axis=1), axis=1)
        store_row(o, o_row, row, value, layout.v)
    store_state(ht, at_state, state, in_state)


@triton.jit
def _dq_kernel(
    inputs,
    layout,
    scale,
    initial_state,
    dq,
    states,
    REVERSE: tl.constexpr,
    BK: tl.constexpr,
    BV: tl.constexpr,
    SEGMENT_STEPS: tl.constexpr,
    BLOCK_STEPS: tl.constexpr,
):
    """One program per (sequence, head, tile of K): the states again, each copied that a block of steps begins with."""
    tile, steps = steps_of_program(layout.k, BK, layout, REVERSE)
    key = tile * BK + tl.arange(0, BK)
    value = tl.arange(0, BV)
    state_key, state_value, in_state, at_state = state_of_program(steps, key, value, layout, 1)

    state = load_state(initial_state, at_state, in_state)
    residue = tl.full((BK, BV), 0.0, tl.float32)
    for step in range(steps.length):
        row = steps.first + step * steps.stride
        if states is not None:
            copy = first_slot(steps.sequence, steps.start, BLOCK_STEPS) + step // BLOCK_STEPS
            at_copy = state_offset(copy, steps.head, state_key, state_value, layout)
            tl.store(states + at_copy, state, mask=in_state & (step % BLOCK_STEPS == 0))
        do_row = load_row(inputs.do, row, value, layout.v)
        residue = tl.where(step % SEGMENT_STEPS == 0, 0.0, residue)
        state, residue = next_state(inputs, state, residue, row, steps.head, key, value, layout, 1)
        dq_row = scale * sum_over_values(do_row[None, :] * state)
        store_row(dq, dq_row, row, key, layout.k)


@triton.jit
def _dk_dv_kernel(
    inputs,
    layout,
    scale,
    dht,
    states,
    block,
    outs,
    dh0,
    REVERSE: tl.constexpr,
    BK: tl.constexpr,
    BV: tl.constexpr,
    SEGMENT_STEPS: tl.constexpr,
    BLOCK_STEPS: tl.constexpr,
):
    """One program per (sequence, head, tile of K), from the last step to the first. The decay of a step is applied to
    the gradient of the state together with what the step before adds to it, or where a segment of steps begins."""
    tile, steps = steps_of_program(layout.k, BK, layout, REVERSE)
    key = tile * BK + tl.arange(0, BK)
    value = tl.arange(0, BV)
    state_key, state_value, in_state, at_state = state_of_program(steps, key, value, layout, 1)
    rows_of_tile = tile.to(tl.int64) * layout.rows * layout.h
    dv = outs.dv + rows_of_tile * layout.v

    dstate = load_state(dht, at_state, in_state)
    residue = tl.full((BK, BV), 0.0, tl.float32)
    kept, lost = no_decay(inputs.gk, BK)
    for nth in range(tl.cdiv(steps.length, BLOCK_STEPS)):
        first = (tl.cdiv(steps.length, BLOCK_STEPS) - 1 - nth) * BLOCK_STEPS
        end = tl.minimum(first + BLOCK_STEPS, steps.length)
        in_block = steps.sequence * BLOCK_STEPS - first  # + step: where `block` has the state before it
        if states is not None:
            copy = first_slot(steps.sequence, steps.start, BLOCK_STEPS) + first // BLOCK_STEPS
            at_copy = state_offset(copy, steps.head, state_key, state_value, layout)
            state = tl.load(states + at_copy, mask=in_state, other=0)
            state_residue = tl.full((BK, BV), 0.0, tl.float32)
            for step in range(first, end):
                row = steps.first + step * steps.stride
                at_block = state_offset(in_block + step, steps.head, state_key, state_value, layout)
                tl.store(block + at_block, state, mask=in_state)
                state_residue = tl.where(step % SEGMENT_STEPS == 0, 0.0, state_residue)
                state, state_residue = next_state(inputs, state, state_residue, row, steps.head, key, value, layout, 1)
            tl.debug_barrier()  # a thread may load from `block` what another has stored
        for step_back in range(end - first):
            step = end - 1 - step_back
            row = steps.first + step * steps.stride
            q_row = scale * load_row(inputs.q, row, key, layout.k)
            k_row = load_row(inputs.k, row, key, layout.k)
            v_row = load_row(inputs.v, row, value, layout.v)
            do_row = load_row(inputs.do, row, value, layout.v)
            update = tl.fma(q_row[:, None], do_row[None, :], (kept + lost) * residue)
            dstate, residue = decay_and_add(dstate, update, kept, lost)
            if INTERPRETED:
                dstate = probe("dstate", dstate, in_state)
            dk_row = sum_over_values(dstate * v_row[None, :])
            dv_row = tl.sum(tl.sum(tl.reshape(dstate * k_row[:, None], (4, BK // 4, BV)), axis=0), axis=0)
            store_row(outs.dk, dk_row, row, key, layout.k)
            store_row(dv, dv_row, row, value, layout.v)
            kept, lost = step_decay(inputs, row, steps.head, key, layout.k, 1)
            if outs.dgate is not None:
                at_block = state_offset(in_block + step, steps.head, state_key, state_value, layout)
                before = tl.load(block + at_block, mask=in_state, other=0)
                dgate_row = sum_over_values(dstate * ((kept + lost) * before))
                store_dgate(outs.dgate, inputs.gk, dgate_row, row, rows_of_tile, key, layout.k)
            if step % SEGMENT_STEPS == 0:
                dstate, residue = decay_and_add(dstate, (kept + lost) * residue, kept, lost)
                residue = tl.full((BK, BV), 0.0, tl.float32)
                kept, lost = no_decay(inputs.gk, BK)
        if states is not None:
            tl.debug_barrier()  # the next block overwrites it
    store_state(dh0, at_state, dstate, in_state)


@triton.jit
def sum_over_values(x):
    """The sum of x [K, V] over V, first of what a thread holds."""
    return tl.sum(tl.sum(tl.reshape(x, (x.shape[0], x.shape[1] // 4, 4)), axis=2), axis=1)


@triton.jit
def store_dgate(dgate, gk, dgate_row, row, rows_of_tile, key, keys):
    """Store the gradient of a step's gate for channels `key`: gk's, else their sum, one of those over all of K."""
    if gk is not None:
        if INTERPRETED:
            dgate_row = probe("dgate", dgate_row, key < keys)
        store_row(dgate, dgate_row, row, key, keys)
    else:
        if INTERPRETED:  # of a tile of K there is a part of the sum
            probe("dgate", tl.sum(dgate_row), keys <= key.shape[0])
        tl.store(dgate + rows_of_tile + row, tl.sum(dgate_row))


@triton.jit
def next_state(inputs, state, residue, row, head, key, value, layout, NEW_AXIS: tl.constexpr):
    """The state after a step, and its residue; [V, K], where keys get their new axis in front, or [K, V]."""
    k_row = load_row(inputs.k, row, key, layout.k)
    v_row = load_row(inputs.v, row, value, layout.v)
    kept, lost = step_decay(inputs, row, head, key, layout.k, NEW_AXIS)
    update = tl.fma(tl.expand_dims(k_row, NEW_AXIS), tl.expand_dims(v_row, 1 - NEW_AXIS), (kept + lost) * residue)
    state, residue = decay_and_add(state, update, kept, lost)
    if INTERPRETED:
        in_keys = tl.expand_dims(key < layout.k, NEW_AXIS)
        state = probe("state", state, in_keys & tl.expand_dims(value < layout.v, 1 - NEW_AXIS))
    return state, residue


@triton.jit
def decay_and_add(state, update, kept, lost):
    """(kept + lost) state + update, rounded to float32, and what the last rounding left (Knuth's TwoSum): the residue,
    which the next update should contain, decayed as the state is."""
    base = tl.where(kept > 0, state, 0.0)
    change = tl.fma(lost, state, update)
    result = base + change
    added = result - base
    return result, (base - (result - added)) + (change - added)
