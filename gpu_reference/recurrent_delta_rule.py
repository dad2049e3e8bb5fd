"""The recurrent forms of the gated delta rules on the GPU, in Triton: one step of time after the other.

`recurrent_delta_fwd` and `recurrent_delta_bwd` are what `fused_recurrent_*` of `gpu_reference/gated_delta_rule.py` and
`gpu_reference/kda.py` are made of; the operations are defined in the modules of these names in `cpu_golden`. A program
owns a tile of V of one head's state [V, K] in one sequence, in float32, with all of K, and walks through time. There
are no dots: float32 and bfloat16 differ in what is loaded and stored, and in nothing between.

The decay meets the key where a state is read, and the state where it is written: S^T k of the decayed state is
S^T (exp(g) k). A decay near 1 is kept as its difference from 1. The backward pass walks forwards first and leaves a
copy of the state every BLOCK steps; then backwards, block by block, whose states it computes anew from the copy. What
is summed over V is left apart for each tile, and added in order.

Nothing is read back from the device. The offsets in a CUDA tensor are not checked; those out of order are clamped.
"""
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators

from typing import Any, NamedTuple, Unpack

import torch
import triton
import triton.language as tl
from torch import Tensor

from gpu_reference._lib.decays import step_decay
from gpu_reference._lib.delta import Delta, DeltaOptions, dtypes_of_gradients, take
from gpu_reference._lib.hardware import bfloat16_as_float32_where_interpreted
from gpu_reference._lib.launch import Launch
from gpu_reference._lib.layout import (
    first_slot,
    load_row,
    load_state,
    of_program,
    rows_of_sequence,
    state_offset,
    store_row,
    store_state,
)
from gpu_reference._lib.probe import INTERPRETED, probe
from gpu_reference._lib.scans import sum_in_order
from gpu_reference._lib.tiles import block_of, cdiv
from op_arguments.delta_rule import DeltaGrads, DeltaTensors
from op_arguments.gla import Output
from op_arguments.options import options_of

BLOCK = 64  # steps between the copies of the state
TILE = 4096  # elements of a state in a program: 32 registers a thread with four warps


class StepOuts(NamedTuple):
    """What the backward pass fills, by tile of V where it is summed over V: dq, dk [tiles, B, T, HV, K], dgate likewise
    in the gate's shape, dbeta [tiles, B, T, HV]; and dv [B, T, HV, V]."""

    dq: Any
    dk: Any
    dv: Any
    dgate: Any
    dbeta: Any


@options_of(take)
def recurrent_delta_fwd(
    x: DeltaTensors, per_channel: bool, *, output_final_state: bool = False, **options: Unpack[DeltaOptions]
) -> Output:
    """(o, ht) of a gated delta rule; arguments, results and errors as `chunk_delta_rule.chunk_delta_fwd`.

    Sites shown to a probe: kept, v_new, h, rstd.
    """
    return _forward(take(x, per_channel, **options), output_final_state)


@options_of(take)
def recurrent_delta_bwd(
    x: DeltaTensors, do: Tensor, per_channel: bool, *, dht: Tensor | None = None, **options: Unpack[DeltaOptions]
) -> DeltaGrads:
    """The gradients of `recurrent_delta_fwd`'s arguments; arguments, results and errors as
    `chunk_delta_rule.chunk_delta_bwd`.

    Held meanwhile, in float32: T / BLOCK + BLOCK states per sequence, and dq, dk and dgate of each head of values and
    tile of V. Sites: those of `recurrent_delta_fwd`, and dh.
    """
    return _backward(take(x, per_channel, do, dht, **options))


@bfloat16_as_float32_where_interpreted(lambda delta, *_: Output(delta.scan.inputs.v.dtype, None))
def _forward(delta: Delta, output_final_state: bool) -> Output:
    scan = delta.scan
    if scan.is_empty:
        return scan.forward_of_nothing(output_final_state)
    o, ht = scan.empty_output(output_final_state)
    own = {"initial_state": scan.initial_state, "o": o, "ht": ht}
    _launch(_forward_kernel, delta.normalised(), **own).run(scan.device)
    return Output(o, ht)


@bfloat16_as_float32_where_interpreted(dtypes_of_gradients)
def _backward(delta: Delta) -> DeltaGrads:
    """The gradients, from copies of states [B T // BLOCK + N, HV, K, V], a sequence's first at its first row // BLOCK +
    its number, and all states of a block [N BLOCK, HV, K, V]."""
    if delta.scan.is_empty:
        return delta.empty_gradients()
    delta = delta.normalised()
    scan = delta.scan
    p, x = delta.p, scan.inputs
    parts = (cdiv(p.v, _columns(delta)),)
    dq, dk = (scan.empty_rows(p.k, parts=parts, dtype=torch.float32) for _ in range(2))
    dgate = scan.empty_rows(*x.gate.shape[3:], parts=parts, dtype=torch.float32)
    dbeta = scan.empty_rows(parts=parts, dtype=torch.float32)
    outs = StepOuts(dq, dk, scan.empty_rows(p.v), dgate, dbeta)
    dh0 = None if scan.initial_state is None else scan.empty_states(p.n)
    copies, block = scan.empty_states(p.b * p.t // BLOCK + p.n), scan.empty_states(p.n * BLOCK)
    own = {"initial_state": scan.initial_state, "dht": scan.dht, "copies": copies, "block": block}
    _launch(_backward_kernel, delta, **own, outs=outs, dh0=dh0, BLOCK_STEPS=BLOCK).run(scan.device)
    of_gate, of_beta = sum_in_order(dgate).to(x.gate.dtype), sum_in_order(dbeta).to(x.beta.dtype)
    return DeltaGrads(*delta.of_keys((dq, dk)), outs.dv, of_gate, of_beta, dh0)


def _columns(delta: Delta) -> int:
    """Those of V in a program's tile, with all of K."""
    return min(block_of(delta.p.v), max(TILE // block_of(delta.p.k), 1))


def _launch(kernel: Any, delta: Delta, **own: Any) -> Launch:
    """A program for each tile of every state; own: the kernel's own arguments."""
    p, columns = delta.p, _columns(delta)
    arguments = {**delta.scan.arguments, **own, "BK": block_of(p.k), "BV": columns}
    options = {"num_warps": 4, "enable_fp_fusion": True}
    return Launch(kernel, (p.n * p.hv * cdiv(p.v, columns),), arguments, options, "K and V")


@triton.jit
def _forward_kernel(inputs, layout, scale, initial_state, o, ht, BK: tl.constexpr, BV: tl.constexpr):
    """One program per (sequence, head of values, tile of V)."""
    tile, head, sequence = of_program(layout.v, BV, layout.h)
    start, end = rows_of_sequence(sequence, layout)
    key = tl.arange(0, BK)
    value = tile * BV + tl.arange(0, BV)
    in_state = (key[None, :] < layout.k) & (value[:, None] < layout.v)
    at_state = state_offset(sequence, head, key[None, :], value[:, None], layout)

    state = load_state(initial_state, at_state, in_state)
    for step in range((end - start).to(tl.int32)):
        row = (start + step) * layout.h + head
        state, _, _ = _next_state(inputs, state, row, head, key, value, layout)
        q_row = load_row(inputs.q, _row_of_keys(row, head, layout), key, layout.k)
        o_row = scale * _sum_over_keys(q_row[None, :] * state)
        store_row(o, o_row, row, value, layout.v)
    store_state(ht, at_state, state, in_state)


@triton.jit
def _backward_kernel(
    inputs,
    layout,
    scale,
    initial_state,
    dht,
    copies,
    block,
    outs,
    dh0,
    BK: tl.constexpr,
    BV: tl.constexpr,
    BLOCK_STEPS: tl.constexpr,
):
    """One program per (sequence, head of values, tile of V): from the first step to the last, and back."""
    tile, head, sequence = of_program(layout.v, BV, layout.h)
    start, end = rows_of_sequence(sequence, layout)
    length = (end - start).to(tl.int32)
    key = tl.arange(0, BK)
    value = tile * BV + tl.arange(0, BV)
    in_state = (key[None, :] < layout.k) & (value[:, None] < layout.v)
    at_state = state_offset(sequence, head, key[None, :], value[:, None], layout)
    first_copy = first_slot(sequence, start, BLOCK_STEPS)
    rows_of_tile = tile.to(tl.int64) * layout.rows * layout.h

    state = load_state(initial_state, at_state, in_state)
    for step in range(length):
        at_copy = state_offset(first_copy + step // BLOCK_STEPS, head, key[None, :], value[:, None], layout)
        tl.store(copies + at_copy, state, mask=in_state & (step % BLOCK_STEPS == 0))
        row = (start + step) * layout.h + head
        state, _, _ = _next_state(inputs, state, row, head, key, value, layout)
    tl.debug_barrier()  # a thread may load what another has stored
    dstate = load_state(dht, at_state, in_state)
    blocks = tl.cdiv(length, BLOCK_STEPS)
    for nth in range(blocks):
        first = (blocks - 1 - nth) * BLOCK_STEPS
        last = tl.minimum(first + BLOCK_STEPS, length)
        in_block = sequence * BLOCK_STEPS - first  # + step: where `block` has the state before it
        at_copy = state_offset(first_copy + first // BLOCK_STEPS, head, key[None, :], value[:, None], layout)
        state = tl.load(copies + at_copy, mask=in_state, other=0)
        for step in range(first, last):
            at_block = state_offset(in_block + step, head, key[None, :], value[:, None], layout)
            tl.store(block + at_block, state, mask=in_state)
            row = (start + step) * layout.h + head
            state, _, _ = _next_state(inputs, state, row, head, key, value, layout)
        tl.debug_barrier()
        for step_back in range(last - first):
            step = last - 1 - step_back
            at_block = state_offset(in_block + step, head, key[None, :], value[:, None], layout)
            before = tl.load(block + at_block, mask=in_state, other=0)
            row = (start + step) * layout.h + head
            dstate = _step_back(inputs, outs, before, dstate, scale, row, rows_of_tile, head, key, value, layout)
        tl.debug_barrier()  # the next block overwrites it
    store_state(dh0, at_state, dstate, in_state)


@triton.jit
def _step_back(inputs, outs, before, dstate, scale, row, rows_of_tile, head, key, value, layout):
    """The gradient of the state `before` a step, given that of the state after it; stores those of the step."""
    row_of_keys = _row_of_keys(row, head, layout)
    k_row = load_row(inputs.k, row_of_keys, key, layout.k)
    do_row = load_row(inputs.do, row, value, layout.v)
    after, error, v_new = _next_state(inputs, before, row, head, key, value, layout)
    kept, lost = step_decay(inputs, row, head, key, layout.k, 0)
    beta = tl.load(inputs.beta + row).to(tl.float32)
    at_part = rows_of_tile + row

    store_row(outs.dq, scale * _sum_over_values(do_row[:, None] * after), at_part, key, layout.k)
    q_row = load_row(inputs.q, row_of_keys, key, layout.k)  # earlier, it would be in registers all along
    dstate += (scale * q_row)[None, :] * do_row[:, None]
    dv_new = _sum_over_keys(k_row[None, :] * dstate)
    dv_row = beta * dv_new
    store_row(outs.dv, dv_row, row, value, layout.v)
    tl.store(outs.dbeta + at_part, tl.sum(dv_new * error))
    recalled = _sum_over_values((kept + lost) * before * dv_row[:, None])
    dk_row = _sum_over_values(dstate * v_new[:, None]) - recalled
    store_row(outs.dk, dk_row, at_part, key, layout.k)
    through = dstate - k_row[None, :] * dv_row[:, None]
    dgate_row = _sum_over_values((kept + lost) * before * through)
    if inputs.gk is not None:
        store_row(outs.dgate, dgate_row, at_part, key, layout.k)
    else:
        tl.store(outs.dgate + at_part, tl.sum(dgate_row))
    dstate = tl.where(kept > 0, through, 0.0) + lost * through
    if INTERPRETED:
        dstate = probe("dh", dstate, (key < layout.k)[None, :] & (value < layout.v)[:, None])
    return dstate


@triton.jit
def _next_state(inputs, state, row, head, key, value, layout):
    """The state [V, K] after a step, the error of what the one before recalls, and what is written."""
    k_row = load_row(inputs.k, _row_of_keys(row, head, layout), key, layout.k)[None, :]
    kept, lost = step_decay(inputs, row, head, key, layout.k, 0)
    error = load_row(inputs.v, row, value, layout.v) - _sum_over_keys((kept + lost) * k_row * state)
    v_new = tl.load(inputs.beta + row).to(tl.float32) * error
    if INTERPRETED:
        v_new = probe("v_new", v_new, value < layout.v)
    state = tl.where(kept > 0, state, 0.0) + (lost * state + k_row * v_new[:, None])
    if INTERPRETED:
        state = probe("h", state, (key < layout.k)[None, :] & (value < layout.v)[:, None])
    return state, error, v_new


@triton.jit
def _row_of_keys(row, head, layout):
    """The row in [B T H, K] that `row` of [B T HV, ...] reads."""
    return (row - head) // layout.group + head // layout.group


@triton.jit
def _sum_over_keys(x):
    """The sum of x [V, K] over K, in two steps: one chain would round too often."""
    return tl.sum(tl.sum(tl.reshape(x, (x.shape[0], 4, x.shape[1] // 4)), axis=1), axis=1)


@triton.jit
def _sum_over_values(x):
    """The sum of x [V, K] over V, likewise."""
    return tl.sum(tl.sum(tl.reshape(x, (4, x.shape[0] // 4, x.shape[1])), axis=0), axis=0)
