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

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from gpu_reference._lib.autograd import Gradients, Output
from gpu_reference._lib.decays import Gates, gates_of, no_decay, step_decay
from gpu_reference._lib.hardware import bfloat16_as_float32_where_interpreted, check_devices
from gpu_reference._lib.launch import Launch
from gpu_reference._lib.layout import Inputs, Sequences, Sizes, of_program, rows_of_sequence, state_offset
from gpu_reference._lib.operands import values
from gpu_reference._lib.probe import INTERPRETED, probe
from gpu_reference._lib.rows import contiguous, empty_rows, empty_states, gate_gradients, sum_of_tiles
from gpu_reference._lib.tiles import block_of
from op_arguments.gla import Problem, check_backward, check_forward

SEGMENT = 16  # steps between plain float32 states: divides every chunk size, so calls may be cut at chunk borders
BLOCK = 64  # steps between the copies of the state
TILE = 4096  # elements of a state in a program: 32 registers a thread with four warps


class Scan(NamedTuple):
    """One direction of a recurrence, as its kernels are launched."""

    p: Problem
    gates: Gates
    sequences: Sequences
    sizes: Sizes
    reverse: bool

    def launch(self, kernel: Any, keys: int, values: int, tiles: int, arguments: dict[str, Any]) -> Launch:
        """A program for each of so many tiles [keys, values] of every state."""
        given = {"gates": self.gates, "sequences": self.sequences, "sizes": self.sizes, "scale": self.p.scale}
        chosen = {"REVERSE": self.reverse, "BK": keys, "BV": values, "SEGMENT_STEPS": SEGMENT}
        options = {"num_warps": 4, "enable_fp_fusion": True}
        return Launch(kernel, (self.p.n * self.p.h * tiles,), arguments | given | chosen, options)


class Outs(NamedTuple):
    """What `_dk_dv_kernel` fills: dk [B, T, H, K], dv [tiles of K, B, T, H, V], dgate, gk's in its shape, else [tiles
    of K, B, T, H], and dh0 [N, H, K, V]."""

    dk: Any
    dv: Any
    dgate: Any
    dh0: Any


def recurrent_fwd(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    gates: Mapping[str, Tensor | None],
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    cu_seqlens: Tensor | None = None,
    reverse: bool = False,
) -> Output:
    """(o, ht): `o_t = scale q_t^T S_t`, and the state after the last step where output_final_state, else None.

    q, k [B, T, H, K], v [B, T, H, V]: all float32 or all bfloat16, of any strides. gates: natural logs of the decays,
    `g` [B, T, H] and `g_gamma` [H], which add (None: no decay), or `gk` [B, T, H, K]; float32, `g` and `gk` also of
    q's dtype. initial_state [N, H, K, V] float32. cu_seqlens [N + 1] int32 packs N sequences into B = 1 (N = B
    without). reverse: time runs backwards, in each sequence. scale: default K ** -0.5. Sites shown to a probe: kept
    and state.
    o has v's shape and dtype and is zero beyond the last sequence; ht [N, H, K, V] is float32.
    Raises ValueError or TypeError as `op_arguments.gla.check_forward`, ValueError for tensors on several devices, and
    RuntimeError for CPU tensors where Triton's interpreter is off.
    """
    p = check_forward(q, k, v, gates, scale, initial_state, cu_seqlens, values(cu_seqlens))
    tensors = {"q": q, "k": k, "v": v, **gates, "initial_state": initial_state, "cu_seqlens": cu_seqlens}
    check_devices(tensors)
    return _forward(q, k, v, dict(gates), initial_state, cu_seqlens, p, reverse, output_final_state)


def recurrent_bwd(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    do: Tensor,
    *,
    gates: Mapping[str, Tensor | None],
    scale: float | None = None,
    initial_state: Tensor | None = None,
    dht: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    reverse: bool = False,
) -> Gradients:
    """The gradients of `recurrent_fwd`'s arguments, given those of o (do) and, if it is not None, of ht (dht).

    do has v's shape and dtype; dht [N, H, K, V] is float32. Gradients have their arguments' dtypes and are zero beyond
    the last sequence. Held meanwhile, in float32: a copy of dv for each of the tiles of K, and where there are gates
    T / BLOCK + BLOCK states per sequence. Sites: those of `recurrent_fwd`, dstate and dgate (a scalar gate's
    where K has one tile).
    Raises as `recurrent_fwd`, with `op_arguments.gla.check_backward`.
    """
    p = check_backward(q, k, v, do, gates, scale, initial_state, dht, cu_seqlens, values(cu_seqlens))
    tensors = {"q": q, "k": k, "v": v, "do": do, **gates, "initial_state": initial_state, "dht": dht}
    check_devices(tensors | {"cu_seqlens": cu_seqlens})
    return _backward(q, k, v, do, dict(gates), initial_state, dht, cu_seqlens, p, reverse)


def _scan_of(p: Problem, gates: Mapping[str, Tensor | None], cu_seqlens: Tensor | None, reverse: bool) -> Scan:
    sequences = Sequences(contiguous(cu_seqlens), p.n, p.t, p.b * p.t)
    return Scan(p, gates_of(gates), sequences, Sizes(p.h, p.k, p.v), bool(reverse))


@bfloat16_as_float32_where_interpreted(lambda q, *_: Output(q.dtype, None))
def _forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    gates: dict[str, Tensor | None],
    initial_state: Tensor | None,
    cu_seqlens: Tensor | None,
    p: Problem,
    reverse: bool,
    output_final_state: bool,
) -> Output:
    o = empty_rows((p.b, p.t, p.h, p.v), q, q.dtype, cu_seqlens)
    ht = empty_states(p, p.n, q) if output_final_state else None
    inputs = Inputs(q.contiguous(), k.contiguous(), v.contiguous())
    forward_launch(_scan_of(p, gates, cu_seqlens, reverse), inputs, initial_state, o, ht).run(q.device)
    return Output(o, ht)


def _dtypes_of_gradients(q: Tensor, k: Tensor, v: Tensor, do: Tensor, gates: dict[str, Any], *_: Any) -> Any:
    narrow = {name: None if gate is None else gate.dtype for name, gate in gates.items()}
    return Gradients(q.dtype, q.dtype, q.dtype, narrow, None)


@bfloat16_as_float32_where_interpreted(_dtypes_of_gradients)
def _backward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    do: Tensor,
    gates: dict[str, Tensor | None],
    initial_state: Tensor | None,
    dht: Tensor | None,
    cu_seqlens: Tensor | None,
    p: Problem,
    reverse: bool,
) -> Gradients:
    scan = _scan_of(p, gates, cu_seqlens, reverse)
    inputs = Inputs(q.contiguous(), k.contiguous(), v.contiguous(), do.contiguous())
    dq, dk = (empty_rows((p.b, p.t, p.h, p.k), q, q.dtype, cu_seqlens) for _ in range(2))
    # A program has a tile of K, and sums over K need those of the others: they are left apart, and added in order.
    tiles = _key_tiles(p)
    dv = empty_rows((tiles, p.b, p.t, p.h, p.v), q, q.dtype if tiles == 1 else torch.float32, cu_seqlens)
    gk = gates.get("gk")
    gated = any(gate is not None for gate in gates.values())
    dgate = None
    if gk is not None:
        dgate = empty_rows((p.b, p.t, p.h, p.k), q, gk.dtype, cu_seqlens)
    elif gated:
        dgate = empty_rows((tiles, p.b, p.t, p.h), q, torch.float32, cu_seqlens)
    dh0 = None if initial_state is None else empty_states(p, p.n, q)
    states = empty_states(p, p.b * p.t // BLOCK + p.n, q) if gated else None
    block = empty_states(p, p.n * BLOCK, q) if gated else None
    dq_launch(scan, inputs, initial_state, dq, states).run(q.device)
    dk_dv_launch(scan, inputs, dht, states, block, Outs(dk, dv, dgate, dh0)).run(q.device)
    return Gradients(dq, dk, sum_of_tiles(dv).to(q.dtype), gate_gradients(dgate, gates), dh0)


def forward_launch(scan: Scan, inputs: Inputs, initial_state: Tensor | None, o: Tensor, ht: Tensor | None) -> Launch:
    """The kernel of `recurrent_fwd`, which fills o and ht."""
    keys = block_of(scan.p.k)
    tile = min(block_of(scan.p.v), max(TILE // keys, 1))
    arguments = {"inputs": inputs, "initial_state": contiguous(initial_state), "o": o, "ht": ht}
    return scan.launch(_forward_kernel, keys, tile, triton.cdiv(scan.p.v, tile), arguments)


def dq_launch(scan: Scan, inputs: Inputs, initial_state: Tensor | None, dq: Tensor, states: Tensor | None) -> Launch:
    """The first kernel of `recurrent_bwd`, which fills dq and, where there are gates, `states`: those before each
    block of steps, [B T // BLOCK + N, H, K, V], a sequence's first at its first row // BLOCK + its
    number."""
    arguments = {
        "inputs": inputs,
        "initial_state": contiguous(initial_state),
        "dq": dq,
        "states": states,
        "BLOCK_STEPS": BLOCK,
    }
    return scan.launch(_dq_kernel, _key_tile(scan.p), block_of(scan.p.v), _key_tiles(scan.p), arguments)


def dk_dv_launch(
    scan: Scan, inputs: Inputs, dht: Tensor | None, states: Tensor | None, block: Tensor | None, outs: Outs
) -> Launch:
    """The second kernel of `recurrent_bwd`, which fills `outs`. Where there are gates, states are recomputed into
    `block` [N BLOCK, H, K, V]."""
    arguments = {"inputs": inputs, "dht": contiguous(dht), "states": states, "block": block, "outs": outs}
    arguments["BLOCK_STEPS"] = BLOCK
    return scan.launch(_dk_dv_kernel, _key_tile(scan.p), block_of(scan.p.v), _key_tiles(scan.p), arguments)


def _key_tile(p: Problem) -> int:
    """The tile of K of the backward pass, whose programs have all of V."""
    return min(block_of(p.k), max(TILE // block_of(p.v), 4))


def _key_tiles(p: Problem) -> int:
    return max(triton.cdiv(p.k, _key_tile(p)), 1)


@triton.jit
def _forward_kernel(
    inputs,
    gates,
    initial_state,
    o,
    ht,
    sequences,
    sizes,
    scale,
    REVERSE: tl.constexpr,
    BK: tl.constexpr,
    BV: tl.constexpr,
    SEGMENT_STEPS: tl.constexpr,
):
    """One program per (sequence, head, tile of V)."""
    tile, head, sequence = of_program(sizes.v, BV, sizes.h)
    start, length = steps_of_sequence(sequence, sequences)
    first_row, row_step = rows_of_steps(start, length, sizes.h, head, REVERSE)
    key = tl.arange(0, BK)
    value = tile * BV + tl.arange(0, BV)
    in_state = (key < sizes.k)[None, :] & (value < sizes.v)[:, None]
    at_state = state_offset(sequence, head, key[None, :], value[:, None], sizes)

    state = tl.full((BV, BK), 0.0, tl.float32)
    if initial_state is not None:
        state += tl.load(initial_state + at_state, mask=in_state, other=0)
    residue = tl.full((BV, BK), 0.0, tl.float32)
    for step in range(length):
        row = first_row + step * row_step
        q_row = load_row(inputs.q, row, key, sizes.k)
        k_row = load_row(inputs.k, row, key, sizes.k)
        v_row = load_row(inputs.v, row, value, sizes.v)
        kept, lost = step_decay(gates, row, head, key, sizes.k, 0)
        residue = tl.where(step % SEGMENT_STEPS == 0, 0.0, residue)
        update = tl.fma(k_row[None, :], v_row[:, None], (kept + lost) * residue)
        state, residue = decay_and_add(state, update, kept, lost)
        if INTERPRETED:
            state = probe("state", state, in_state)
        o_row = scale * tl.sum(tl.sum(tl.reshape(q_row[None, :] * state, (BV, 4, BK // 4)), axis=1), axis=1)
        tl.store(o + row * sizes.v + value, o_row.to(o.dtype.element_ty), mask=value < sizes.v)
    if ht is not None:
        tl.store(ht + at_state, state, mask=in_state)


@triton.jit
def _dq_kernel(
    inputs,
    gates,
    initial_state,
    dq,
    states,
    sequences,
    sizes,
    scale,
    REVERSE: tl.constexpr,
    BK: tl.constexpr,
    BV: tl.constexpr,
    SEGMENT_STEPS: tl.constexpr,
    BLOCK_STEPS: tl.constexpr,
):
    """One program per (sequence, head, tile of K): the states again, each copied that a block of steps begins with."""
    tile, head, sequence = of_program(sizes.k, BK, sizes.h)
    start, length = steps_of_sequence(sequence, sequences)
    first_row, row_step = rows_of_steps(start, length, sizes.h, head, REVERSE)
    key = tile * BK + tl.arange(0, BK)
    value = tl.arange(0, BV)
    in_state = (key < sizes.k)[:, None] & (value < sizes.v)[None, :]

    state = tl.full((BK, BV), 0.0, tl.float32)
    if initial_state is not None:
        state += tl.load(initial_state + at_index(sequence, head, key, value, sizes), mask=in_state, other=0)
    residue = tl.full((BK, BV), 0.0, tl.float32)
    for step in range(length):
        row = first_row + step * row_step
        if states is not None:
            copy = start // BLOCK_STEPS + sequence + step // BLOCK_STEPS
            at_copy = at_index(copy, head, key, value, sizes)
            tl.store(states + at_copy, state, mask=in_state & (step % BLOCK_STEPS == 0))
        do_row = load_row(inputs.do, row, value, sizes.v)
        state, residue = next_state(inputs, gates, state, residue, step, row, head, key, value, sizes, SEGMENT_STEPS)
        if INTERPRETED:
            state = probe("state", state, in_state)
        dq_row = scale * sum_over_values(do_row[None, :] * state)
        tl.store(dq + row * sizes.k + key, dq_row.to(dq.dtype.element_ty), mask=key < sizes.k)


@triton.jit
def _dk_dv_kernel(
    inputs,
    gates,
    dht,
    states,
    block,
    outs,
    sequences,
    sizes,
    scale,
    REVERSE: tl.constexpr,
    BK: tl.constexpr,
    BV: tl.constexpr,
    SEGMENT_STEPS: tl.constexpr,
    BLOCK_STEPS: tl.constexpr,
):
    """One program per (sequence, head, tile of K), from the last step to the first. The decay of a step is applied to
    the gradient of the state together with what the step before adds to it, or where a segment of steps begins."""
    tile, head, sequence = of_program(sizes.k, BK, sizes.h)
    start, length = steps_of_sequence(sequence, sequences)
    first_row, row_step = rows_of_steps(start, length, sizes.h, head, REVERSE)
    key = tile * BK + tl.arange(0, BK)
    value = tl.arange(0, BV)
    in_keys = key < sizes.k
    in_state = in_keys[:, None] & (value < sizes.v)[None, :]
    rows_of_tile = tile.to(tl.int64) * sequences.rows * sizes.h
    dv = outs.dv + rows_of_tile * sizes.v

    dstate = tl.full((BK, BV), 0.0, tl.float32)
    if dht is not None:
        dstate += tl.load(dht + at_index(sequence, head, key, value, sizes), mask=in_state, other=0)
    residue = tl.full((BK, BV), 0.0, tl.float32)
    kept, lost = no_decay(gates.gk, BK)
    for nth in range(tl.cdiv(length, BLOCK_STEPS)):
        first = (tl.cdiv(length, BLOCK_STEPS) - 1 - nth) * BLOCK_STEPS
        end = tl.minimum(first + BLOCK_STEPS, length)
        if states is not None:
            copy = start // BLOCK_STEPS + sequence + first // BLOCK_STEPS
            state = tl.load(states + at_index(copy, head, key, value, sizes), mask=in_state, other=0)
            state_residue = tl.full((BK, BV), 0.0, tl.float32)
            for step in range(first, end):
                row = first_row + step * row_step
                at_block = at_index(sequence * BLOCK_STEPS + step - first, head, key, value, sizes)
                tl.store(block + at_block, state, mask=in_state)
                state, state_residue = next_state(
                    inputs, gates, state, state_residue, step, row, head, key, value, sizes, SEGMENT_STEPS
                )
                if INTERPRETED:
                    state = probe("state", state, in_state)
            tl.debug_barrier()  # a thread may load from `block` what another has stored
        for step_back in range(end - first):
            step = end - 1 - step_back
            row = first_row + step * row_step
            q_row = scale * load_row(inputs.q, row, key, sizes.k)
            k_row = load_row(inputs.k, row, key, sizes.k)
            v_row = load_row(inputs.v, row, value, sizes.v)
            do_row = load_row(inputs.do, row, value, sizes.v)
            update = tl.fma(q_row[:, None], do_row[None, :], (kept + lost) * residue)
            dstate, residue = decay_and_add(dstate, update, kept, lost)
            if INTERPRETED:
                dstate = probe("dstate", dstate, in_state)
            dk_row = sum_over_values(dstate * v_row[None, :])
            dv_row = tl.sum(tl.sum(tl.reshape(dstate * k_row[:, None], (4, BK // 4, BV)), axis=0), axis=0)
            tl.store(outs.dk + row * sizes.k + key, dk_row.to(outs.dk.dtype.element_ty), mask=in_keys)
            tl.store(dv + row * sizes.v + value, dv_row.to(dv.dtype.element_ty), mask=value < sizes.v)
            kept, lost = step_decay(gates, row, head, key, sizes.k, 1)
            if outs.dgate is not None:
                at_block = at_index(sequence * BLOCK_STEPS + step - first, head, key, value, sizes)
                before = tl.load(block + at_block, mask=in_state, other=0)
                dgate_row = sum_over_values(dstate * ((kept + lost) * before))
                store_dgate(outs.dgate, gates.gk, dgate_row, row, rows_of_tile, key, sizes.k)
            if step % SEGMENT_STEPS == 0:
                dstate, residue = decay_and_add(dstate, (kept + lost) * residue, kept, lost)
                residue = tl.full((BK, BV), 0.0, tl.float32)
                kept, lost = no_decay(gates.gk, BK)
        if states is not None:
            tl.debug_barrier()  # the next block overwrites it
    if outs.dh0 is not None:
        tl.store(outs.dh0 + at_index(sequence, head, key, value, sizes), dstate, mask=in_state)


@triton.jit
def steps_of_sequence(sequence, sequences):
    """A sequence's first row (int64), and its number of steps."""
    start, end = rows_of_sequence(sequence, sequences)
    return start, (end - start).to(tl.int32)


@triton.jit
def rows_of_steps(start, length, heads, head, REVERSE: tl.constexpr):
    """The row of a [B T H, ...] tensor that is the first step's, and from a step's to the next step's; int64."""
    row_step = tl.full((), heads, tl.int64)
    if REVERSE:
        row_step = -row_step
        start += tl.maximum(length - 1, 0)
    return start * heads + head, row_step


@triton.jit
def at_index(index, head, key, value, sizes):
    """Where a tile [K, V] of a head's state is in [..., H, K, V]; index is int64."""
    return (index * sizes.h + head) * sizes.k * sizes.v + (key[:, None] * sizes.v + value[None, :])


@triton.jit
def load_row(x, row, column, columns):
    """Row `row` of x [rows, columns] as float32, zero beyond its last column."""
    return tl.load(x + row * columns + column, mask=column < columns, other=0).to(tl.float32)


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
        tl.store(dgate + row * keys + key, dgate_row.to(dgate.dtype.element_ty), mask=key < keys)
    else:
        if INTERPRETED:  # of a tile of K there is a part of the sum
            probe("dgate", tl.sum(dgate_row), keys <= key.shape[0])
        tl.store(dgate + rows_of_tile + row, tl.sum(dgate_row))


@triton.jit
def next_state(inputs, gates, state, residue, step, row, head, key, value, sizes, SEGMENT_STEPS: tl.constexpr):
    """The state [K, V] after a step, and its residue."""
    k_row = load_row(inputs.k, row, key, sizes.k)
    v_row = load_row(inputs.v, row, value, sizes.v)
    kept, lost = step_decay(gates, row, head, key, sizes.k, 1)
    residue = tl.where(step % SEGMENT_STEPS == 0, 0.0, residue)
    update = tl.fma(k_row[:, None], v_row[None, :], (kept + lost) * residue)
    return decay_and_add(state, update, kept, lost)


@triton.jit
def decay_and_add(state, update, kept, lost):
    """(kept + lost) state + update, rounded to float32, and what the last rounding left (Knuth's TwoSum): the residue,
    which the next update should contain, decayed as the state is."""
    base = tl.where(kept > 0, state, 0.0)
    change = tl.fma(lost, state, update)
    result = base + change
    added = result - base
    return result, (base - (result - added)) + (change - added)
