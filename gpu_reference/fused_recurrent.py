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
# (kernel arguments are what Triton makes of them; every host function below is annotated)

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from gpu_reference._lib.hardware import check_devices, computes_bfloat16
from gpu_reference._lib.launch import Launch
from gpu_reference._lib.operands import values
from gpu_reference._lib.probe import INTERPRETED, probe
from gpu_reference._lib.tiles import block_of
from op_arguments.gla import Problem, check_backward, check_forward

Gates = Mapping[str, Tensor | None]
"""By name: `g` and `g_gamma`, either of which may be None, or `gk`."""

SEGMENT = 16  # steps between plain float32 states: divides every chunk size, so calls may be cut at chunk borders
BLOCK = 64  # steps between the copies of the state
TILE = 4096  # elements of a state in a program: 32 registers a thread with four warps
FLOAT32_MAX = tl.constexpr(torch.finfo(torch.float32).max)


class Output(NamedTuple):
    """o, and the final state where it was asked for."""

    o: Tensor
    ht: Tensor | None


class Gradients(NamedTuple):
    """The gradients of the arguments of `recurrent_fwd`; None for those that are None. dgates by the gates' names."""

    dq: Tensor
    dk: Tensor
    dv: Tensor
    dgates: dict[str, Tensor | None]
    dh0: Tensor | None


def recurrent_fwd(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    gates: Gates,
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
    p = check_forward(
        q,
        k,
        v,
        gates=gates,
        scale=scale,
        initial_state=initial_state,
        cu_seqlens=cu_seqlens,
        offsets=values(cu_seqlens),
    )
    tensors = {"q": q, "k": k, "v": v, **gates, "initial_state": initial_state, "cu_seqlens": cu_seqlens}
    device = check_devices(tensors)
    if q.dtype == torch.bfloat16 and not computes_bfloat16(device):
        o, ht = recurrent_fwd(
            q.float(),
            k.float(),
            v.float(),
            gates=_widened(gates),
            scale=scale,
            initial_state=initial_state,
            output_final_state=output_final_state,
            cu_seqlens=cu_seqlens,
            reverse=reverse,
        )
        return Output(o.to(q.dtype), ht)

    o = _rows((p.b, p.t, p.h, p.v), q.dtype, device, cu_seqlens)
    ht = _states(p, device, p.n) if output_final_state else None
    forward_launch(p, q, k, v, gates, initial_state, cu_seqlens, o, ht, reverse).run(device)
    return Output(o, ht)


def recurrent_bwd(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    do: Tensor,
    *,
    gates: Gates,
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
    p = check_backward(
        q,
        k,
        v,
        do,
        gates=gates,
        scale=scale,
        initial_state=initial_state,
        dht=dht,
        cu_seqlens=cu_seqlens,
        offsets=values(cu_seqlens),
    )
    tensors = {"q": q, "k": k, "v": v, "do": do, **gates, "initial_state": initial_state, "dht": dht}
    device = check_devices(tensors | {"cu_seqlens": cu_seqlens})
    if q.dtype == torch.bfloat16 and not computes_bfloat16(device):
        wide = recurrent_bwd(
            q.float(),
            k.float(),
            v.float(),
            do.float(),
            gates=_widened(gates),
            scale=scale,
            initial_state=initial_state,
            dht=dht,
            cu_seqlens=cu_seqlens,
            reverse=reverse,
        )
        narrow = {name: _cast(gradient, gates[name]) for name, gradient in wide.dgates.items()}
        return Gradients(wide.dq.to(q.dtype), wide.dk.to(q.dtype), wide.dv.to(q.dtype), narrow, wide.dh0)

    dq, dk = (_rows((p.b, p.t, p.h, p.k), q.dtype, device, cu_seqlens) for _ in range(2))
    # A program has a tile of K, and sums over K need those of the others: they are left apart, and added in order.
    tiles = _key_tiles(p)
    dv = _rows((tiles, p.b, p.t, p.h, p.v), q.dtype if tiles == 1 else torch.float32, device, cu_seqlens)
    gk = gates.get("gk")
    gated = any(gate is not None for gate in gates.values())
    dgate = None
    if gk is not None:
        dgate = _rows((p.b, p.t, p.h, p.k), gk.dtype, device, cu_seqlens)
    elif gated:
        dgate = _rows((tiles, p.b, p.t, p.h), torch.float32, device, cu_seqlens)
    dh0 = None if initial_state is None else _states(p, device, p.n)
    states = _states(p, device, p.b * p.t // BLOCK + p.n) if gated else None
    block = _states(p, device, p.n * BLOCK) if gated else None
    dq_launch(p, k, v, do, gates, initial_state, cu_seqlens, dq, states, reverse).run(device)
    dk_dv_launch(p, q, k, v, do, gates, dht, cu_seqlens, states, block, dk, dv, dgate, dh0, reverse).run(device)

    if gk is not None:
        dgates = {"gk": dgate}
    else:
        step = None if dgate is None else _sum_of_tiles(dgate)
        dgates = {name: _gate_gradient(step, gate) for name, gate in gates.items()}
    return Gradients(dq, dk, _sum_of_tiles(dv).to(q.dtype), dgates, dh0)


def forward_launch(
    p: Problem,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    gates: Gates,
    initial_state: Tensor | None,
    cu_seqlens: Tensor | None,
    o: Tensor,
    ht: Tensor | None,
    reverse: bool,
) -> Launch:
    """The kernel of `recurrent_fwd`, which fills o and ht."""
    keys = block_of(p.k)
    tile = min(block_of(p.v), max(TILE // keys, 1))
    arguments = {
        "q": q.contiguous(),
        "k": k.contiguous(),
        "v": v.contiguous(),
        **_gate_arguments(gates),
        "initial_state": _contiguous(initial_state),
        "o": o,
        "ht": ht,
        "scale": p.scale,
        **_size_arguments(p, cu_seqlens, reverse),
        "BK": keys,
        "BV": tile,
        "SEGMENT_STEPS": SEGMENT,
    }
    return _launch(_forward_kernel, p.n * p.h * triton.cdiv(p.v, tile), arguments)


def dq_launch(
    p: Problem,
    k: Tensor,
    v: Tensor,
    do: Tensor,
    gates: Gates,
    initial_state: Tensor | None,
    cu_seqlens: Tensor | None,
    dq: Tensor,
    states: Tensor | None,
    reverse: bool,
) -> Launch:
    """The first kernel of `recurrent_bwd`, which fills dq and, where there are gates, `states`: those before each
    block of BLOCK steps, [B T // BLOCK + N, H, K, V], a sequence's first at its first row // BLOCK + its number."""
    arguments = {
        "k": k.contiguous(),
        "v": v.contiguous(),
        "do": do.contiguous(),
        **_gate_arguments(gates),
        "initial_state": _contiguous(initial_state),
        "dq": dq,
        "states": states,
        "scale": p.scale,
        **_size_arguments(p, cu_seqlens, reverse),
        "BK": _key_tile(p),
        "BV": block_of(p.v),
        "SEGMENT_STEPS": SEGMENT,
        "BLOCK_STEPS": BLOCK,
    }
    return _launch(_dq_kernel, p.n * p.h * _key_tiles(p), arguments)


def dk_dv_launch(
    p: Problem,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    do: Tensor,
    gates: Gates,
    dht: Tensor | None,
    cu_seqlens: Tensor | None,
    states: Tensor | None,
    block: Tensor | None,
    dk: Tensor,
    dv: Tensor,
    dgate: Tensor | None,
    dh0: Tensor | None,
    reverse: bool,
) -> Launch:
    """The second kernel of `recurrent_bwd`, which fills dk, dh0, dv [tiles, B, T, H, V] and, where there are gates,
    dgate: gk's in its shape, else [tiles, B, T, H]. States are recomputed into `block` [N BLOCK, H, K, V].
    """
    arguments = {
        "q": q.contiguous(),
        "k": k.contiguous(),
        "v": v.contiguous(),
        "do": do.contiguous(),
        **_gate_arguments(gates),
        "dht": _contiguous(dht),
        "states": states,
        "block": block,
        "dk": dk,
        "dv": dv,
        "dgate": dgate,
        "dh0": dh0,
        "scale": p.scale,
        "rows": p.b * p.t,
        **_size_arguments(p, cu_seqlens, reverse),
        "BK": _key_tile(p),
        "BV": block_of(p.v),
        "SEGMENT_STEPS": SEGMENT,
        "BLOCK_STEPS": BLOCK,
    }
    return _launch(_dk_dv_kernel, p.n * p.h * _key_tiles(p), arguments)


@triton.jit
def _forward_kernel(
    q,
    k,
    v,
    g,
    g_gamma,
    gk,
    initial_state,
    cu_seqlens,
    o,
    ht,
    scale,
    steps,
    heads,
    keys,
    values,
    REVERSE: tl.constexpr,
    BK: tl.constexpr,
    BV: tl.constexpr,
    SEGMENT_STEPS: tl.constexpr,
):
    """One program per (sequence, head, tile of V)."""
    tile, head, sequence, start, length = of_program(values, BV, heads, steps, cu_seqlens)
    first_row, row_step = rows_of_steps(start, length, heads, head, REVERSE)
    key = tl.arange(0, BK)
    value = tile * BV + tl.arange(0, BV)
    in_keys = key < keys
    in_values = value < values
    in_state = in_keys[None, :] & in_values[:, None]
    at_state = ((sequence * heads + head) * keys + key[None, :]) * values + value[:, None]

    state = tl.full((BV, BK), 0.0, tl.float32)
    if initial_state is not None:
        state += tl.load(initial_state + at_state, mask=in_state, other=0)
    residue = tl.full((BV, BK), 0.0, tl.float32)
    for step in range(length):
        row = first_row + step * row_step
        q_row = tl.load(q + row * keys + key, mask=in_keys, other=0).to(tl.float32)
        k_row = tl.load(k + row * keys + key, mask=in_keys, other=0).to(tl.float32)
        v_row = tl.load(v + row * values + value, mask=in_values, other=0).to(tl.float32)
        kept, rest = decay_of_row(g, g_gamma, gk, row, head, key, keys, 0)
        residue = tl.where(step % SEGMENT_STEPS == 0, 0.0, residue)
        update = tl.fma(k_row[None, :], v_row[:, None], (kept + rest) * residue)
        state, residue = decay_and_add(state, update, kept, rest)
        if INTERPRETED:
            state = probe("state", state, in_state)
        o_row = scale * tl.sum(tl.sum(tl.reshape(q_row[None, :] * state, (BV, 4, BK // 4)), axis=1), axis=1)
        tl.store(o + row * values + value, o_row.to(o.dtype.element_ty), mask=in_values)
    if ht is not None:
        tl.store(ht + at_state, state, mask=in_state)


@triton.jit
def _dq_kernel(
    k,
    v,
    do,
    g,
    g_gamma,
    gk,
    initial_state,
    cu_seqlens,
    dq,
    states,
    scale,
    steps,
    heads,
    keys,
    values,
    REVERSE: tl.constexpr,
    BK: tl.constexpr,
    BV: tl.constexpr,
    SEGMENT_STEPS: tl.constexpr,
    BLOCK_STEPS: tl.constexpr,
):
    """One program per (sequence, head, tile of K): the states again, each copied that a block of steps begins with."""
    tile, head, sequence, start, length = of_program(keys, BK, heads, steps, cu_seqlens)
    first_row, row_step = rows_of_steps(start, length, heads, head, REVERSE)
    key = tile * BK + tl.arange(0, BK)
    value = tl.arange(0, BV)
    in_keys = key < keys
    in_values = value < values
    in_state = in_keys[:, None] & in_values[None, :]
    at_state = key[:, None] * values + value[None, :]

    state = tl.full((BK, BV), 0.0, tl.float32)
    if initial_state is not None:
        state += tl.load(initial_state + (sequence * heads + head) * keys * values + at_state, mask=in_state, other=0)
    residue = tl.full((BK, BV), 0.0, tl.float32)
    for step in range(length):
        row = first_row + step * row_step
        if states is not None:
            copy = start // BLOCK_STEPS + sequence + step // BLOCK_STEPS
            at_copy = (copy * heads + head) * keys * values + at_state
            tl.store(states + at_copy, state, mask=in_state & (step % BLOCK_STEPS == 0))
        k_row = tl.load(k + row * keys + key, mask=in_keys, other=0).to(tl.float32)
        v_row = tl.load(v + row * values + value, mask=in_values, other=0).to(tl.float32)
        do_row = tl.load(do + row * values + value, mask=in_values, other=0).to(tl.float32)
        kept, rest = decay_of_row(g, g_gamma, gk, row, head, key, keys, 1)
        residue = tl.where(step % SEGMENT_STEPS == 0, 0.0, residue)
        update = tl.fma(k_row[:, None], v_row[None, :], (kept + rest) * residue)
        state, residue = decay_and_add(state, update, kept, rest)
        if INTERPRETED:
            state = probe("state", state, in_state)
        dq_row = scale * tl.sum(tl.sum(tl.reshape(do_row[None, :] * state, (BK, BV // 4, 4)), axis=2), axis=1)
        tl.store(dq + row * keys + key, dq_row.to(dq.dtype.element_ty), mask=in_keys)


@triton.jit
def _dk_dv_kernel(
    q,
    k,
    v,
    do,
    g,
    g_gamma,
    gk,
    dht,
    cu_seqlens,
    states,
    block,
    dk,
    dv,
    dgate,
    dh0,
    scale,
    rows,
    steps,
    heads,
    keys,
    values,
    REVERSE: tl.constexpr,
    BK: tl.constexpr,
    BV: tl.constexpr,
    SEGMENT_STEPS: tl.constexpr,
    BLOCK_STEPS: tl.constexpr,
):
    """One program per (sequence, head, tile of K), from the last step to the first. The decay of a step is applied to
    the gradient of the state together with what the step before adds to it, or where a segment of steps begins."""
    tile, head, sequence, start, length = of_program(keys, BK, heads, steps, cu_seqlens)
    first_row, row_step = rows_of_steps(start, length, heads, head, REVERSE)
    key = tile * BK + tl.arange(0, BK)
    value = tl.arange(0, BV)
    in_keys = key < keys
    in_values = value < values
    in_state = in_keys[:, None] & in_values[None, :]
    at_state = key[:, None] * values + value[None, :]
    dv_tile = dv + tile.to(tl.int64) * rows * heads * values

    dstate = tl.full((BK, BV), 0.0, tl.float32)
    if dht is not None:
        dstate += tl.load(dht + (sequence * heads + head) * keys * values + at_state, mask=in_state, other=0)
    residue = tl.full((BK, BV), 0.0, tl.float32)
    kept, rest = no_decay(gk, BK)
    for nth in range(tl.cdiv(length, BLOCK_STEPS)):
        first = (tl.cdiv(length, BLOCK_STEPS) - 1 - nth) * BLOCK_STEPS
        end = tl.minimum(first + BLOCK_STEPS, length)
        if states is not None:
            copy = start // BLOCK_STEPS + sequence + first // BLOCK_STEPS
            state = tl.load(states + (copy * heads + head) * keys * values + at_state, mask=in_state, other=0)
            state_residue = tl.full((BK, BV), 0.0, tl.float32)
            for step in range(first, end):
                row = first_row + step * row_step
                at_block = ((sequence * BLOCK_STEPS + step - first) * heads + head) * keys * values + at_state
                tl.store(block + at_block, state, mask=in_state)
                k_row = tl.load(k + row * keys + key, mask=in_keys, other=0).to(tl.float32)
                v_row = tl.load(v + row * values + value, mask=in_values, other=0).to(tl.float32)
                state_kept, state_rest = decay_of_row(g, g_gamma, gk, row, head, key, keys, 1)
                state_residue = tl.where(step % SEGMENT_STEPS == 0, 0.0, state_residue)
                state_update = tl.fma(k_row[:, None], v_row[None, :], (state_kept + state_rest) * state_residue)
                state, state_residue = decay_and_add(state, state_update, state_kept, state_rest)
                if INTERPRETED:
                    state = probe("state", state, in_state)
            tl.debug_barrier()  # a thread may load from `block` what another has stored
        for step_back in range(end - first):
            step = end - 1 - step_back
            row = first_row + step * row_step
            q_row = scale * tl.load(q + row * keys + key, mask=in_keys, other=0).to(tl.float32)
            k_row = tl.load(k + row * keys + key, mask=in_keys, other=0).to(tl.float32)
            v_row = tl.load(v + row * values + value, mask=in_values, other=0).to(tl.float32)
            do_row = tl.load(do + row * values + value, mask=in_values, other=0).to(tl.float32)
            update = tl.fma(q_row[:, None], do_row[None, :], (kept + rest) * residue)
            dstate, residue = decay_and_add(dstate, update, kept, rest)
            if INTERPRETED:
                dstate = probe("dstate", dstate, in_state)
            dk_row = tl.sum(tl.sum(tl.reshape(dstate * v_row[None, :], (BK, BV // 4, 4)), axis=2), axis=1)
            dv_row = tl.sum(tl.sum(tl.reshape(dstate * k_row[:, None], (4, BK // 4, BV)), axis=0), axis=0)
            tl.store(dk + row * keys + key, dk_row.to(dk.dtype.element_ty), mask=in_keys)
            tl.store(dv_tile + row * values + value, dv_row.to(dv.dtype.element_ty), mask=in_values)
            kept, rest = decay_of_row(g, g_gamma, gk, row, head, key, keys, 1)
            if dgate is not None:
                at_block = ((sequence * BLOCK_STEPS + step - first) * heads + head) * keys * values + at_state
                before = tl.load(block + at_block, mask=in_state, other=0)
                dgate_row = tl.sum(
                    tl.sum(tl.reshape(dstate * ((kept + rest) * before), (BK, BV // 4, 4)), axis=2), axis=1
                )
                if INTERPRETED:
                    if gk is not None:
                        dgate_row = probe("dgate", dgate_row, in_keys)
                    else:  # of a tile of K there is a part of the sum
                        probe("dgate", tl.sum(dgate_row), keys <= BK)
                if gk is not None:
                    tl.store(dgate + row * keys + key, dgate_row.to(dgate.dtype.element_ty), mask=in_keys)
                else:
                    tl.store(dgate + tile.to(tl.int64) * rows * heads + row, tl.sum(dgate_row))
            if step % SEGMENT_STEPS == 0:
                dstate, residue = decay_and_add(dstate, (kept + rest) * residue, kept, rest)
                residue = tl.full((BK, BV), 0.0, tl.float32)
                kept, rest = no_decay(gk, BK)
        if states is not None:
            tl.debug_barrier()  # the next block overwrites it
    if dh0 is not None:
        tl.store(dh0 + (sequence * heads + head) * keys * values + at_state, dstate, mask=in_state)


@triton.jit
def of_program(size, TILE_SIZE: tl.constexpr, heads, steps, cu_seqlens):
    """This program's tile of an axis of `size` elements, its head and its sequence, that sequence's first row (int64)
    and its number of steps. Sequences are of `steps` each, or cut from as many by cu_seqlens."""
    tiles = tl.maximum(tl.cdiv(size, TILE_SIZE), 1)
    tile = tl.program_id(0) % tiles
    head = tl.program_id(0) // tiles % heads
    sequence = (tl.program_id(0) // tiles // heads).to(tl.int64)
    if cu_seqlens is None:
        start = sequence * steps
        length = steps
    else:
        start = tl.minimum(tl.maximum(tl.load(cu_seqlens + sequence), 0), steps)
        length = tl.minimum(tl.maximum(tl.load(cu_seqlens + sequence + 1), start), steps) - start
        start = start.to(tl.int64)
    return tile, head, sequence, start, length


@triton.jit
def rows_of_steps(start, length, heads, head, REVERSE: tl.constexpr):
    """The row of a [B T H, ...] tensor that is the first step's, and from a step's to the next step's; int64."""
    row_step = tl.full((), heads, tl.int64)
    if REVERSE:
        row_step = -row_step
        start += tl.maximum(length - 1, 0)
    return start * heads + head, row_step


@triton.jit
def no_decay(gk, BK: tl.constexpr):
    """`decay_of_row` where nothing decays."""
    kept = tl.full((BK, 1), 1.0, tl.float32) if gk is not None else tl.full((), 1.0, tl.float32)
    return kept, kept - 1.0


@triton.jit
def decay_of_row(g, g_gamma, gk, row, head, key, keys, NEW_AXIS: tl.constexpr):
    """exp(gate) as a sum: 1 or 0, whichever is nearer (1 beyond it), and the float32 that is left. With gk for the
    channels `key`, in their shape. In float64: a decay near 1 whose error is 2^-25 has lost as many of its 24 bits
    after n steps as n has, and the hardware's own float32 exp loses more, the steeper the gate is."""
    gate = tl.full((), 0.0, tl.float64)
    if g is not None:
        gate += tl.load(g + row).to(tl.float32).to(tl.float64)
    if g_gamma is not None:
        gate += tl.load(g_gamma + head).to(tl.float64)
    if gk is not None:
        gate = tl.load(gk + row * keys + key, mask=key < keys, other=0).to(tl.float32).to(tl.float64)
    decay = tl.exp(gate)
    decay = tl.where(decay > FLOAT32_MAX, FLOAT32_MAX, decay)  # finite times a state of zero is zero
    kept = tl.where(decay < 0.5, 0.0, 1.0)
    rest = (decay - kept).to(tl.float32)
    if INTERPRETED:
        rest = probe("kept", rest) if gk is None else probe("kept", rest, key < keys)
    kept = kept.to(tl.float32)
    if gk is not None:
        kept = tl.expand_dims(kept, NEW_AXIS)
        rest = tl.expand_dims(rest, NEW_AXIS)
    return kept, rest


@triton.jit
def decay_and_add(state, update, kept, rest):
    """(kept + rest) state + update, rounded to float32, and what the last rounding left (Knuth's TwoSum): the residue,
    which the next update should contain, decayed as the state is."""
    base = tl.where(kept > 0, state, 0.0)
    change = tl.fma(rest, state, update)
    result = base + change
    added = result - base
    return result, (base - (result - added)) + (change - added)


def _key_tile(p: Problem) -> int:
    """The tile of K of the backward pass, whose programs have all of V."""
    return min(block_of(p.k), max(TILE // block_of(p.v), 4))


def _key_tiles(p: Problem) -> int:
    return max(triton.cdiv(p.k, _key_tile(p)), 1)


def _launch(kernel: Any, programs: int, arguments: dict[str, Any]) -> Launch:
    return Launch(kernel, (programs,), arguments, {"num_warps": 4, "enable_fp_fusion": True})


def _size_arguments(p: Problem, cu_seqlens: Tensor | None, reverse: bool) -> dict[str, Any]:
    sizes = {"steps": p.t, "heads": p.h, "keys": p.k, "values": p.v}
    return {"cu_seqlens": _contiguous(cu_seqlens), **sizes, "REVERSE": bool(reverse)}


def _gate_arguments(gates: Gates) -> dict[str, Any]:
    return {name: _contiguous(gates.get(name)) for name in ("g", "g_gamma", "gk")}


def _contiguous(tensor: Any) -> Any:
    return None if tensor is None else tensor.contiguous()


def _widened(gates: Gates) -> dict[str, Any]:
    return {name: None if gate is None else gate.float() for name, gate in gates.items()}


def _cast(tensor: Tensor | None, like: Any) -> Tensor | None:
    return None if tensor is None else tensor.to(like.dtype)


def _rows(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device, cu_seqlens: Tensor | None) -> Tensor:
    """A tensor for kernels to fill, zero where there may be rows of no sequence."""
    return (torch.empty if cu_seqlens is None else torch.zeros)(shape, dtype=dtype, device=device)


def _states(p: Problem, device: torch.device, count: int) -> Tensor:
    return torch.empty(count, p.h, p.k, p.v, dtype=torch.float32, device=device)


def _sum_of_tiles(tiles: Tensor) -> Tensor:
    """The sum over the first axis, in order: `torch.sum` may choose another order for another batch size."""
    first, *others = tiles.unbind()
    for tile in others:
        first += tile
    return first


def _gate_gradient(step: Tensor | None, gate: Any) -> Tensor | None:
    """Of g or g_gamma, from that of each step's gate."""
    if step is None or gate is None:
        return None
    if gate.ndim == 1:
        return step.sum((0, 1), dtype=torch.float64).float()
    return step.to(gate.dtype)
