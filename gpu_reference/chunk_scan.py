"""The chunked forms of gated linear attention on the GPU, in Triton: blocks of steps at a time, by matrix products.

`chunk_fwd` and `chunk_bwd` are what `chunk_*` and `fused_chunk_*` of `gpu_reference/simple_gla.py` (gates `g`,
`g_gamma`) and `gpu_reference/gla.py` (gate `gk`) are made of; the operations are defined in `cpu_golden/simple_gla.py`
and `cpu_golden/gla.py`. With c the gates summed since a block of rows began, S the state before it and dS the gradient
of the state after it, all three of the kernels below compute one block as

    A_ij = q_i . (exp(c_i - c_j) k_j) for j <= i        dA_ij likewise from do_i . v_j
    o    = scale (A v + exp(c) q S)                     dq = dA k + scale exp(c) do S^T
    S'   = exp(c_last) S + (exp(c_last - c) k)^T v      dk = dA^T q + exp(c_last - c) v dS^T
    dS'  = exp(c_last) dS + (scale exp(c) q)^T do       dv = A^T do + exp(c_last - c) k dS

`_states_kernel` goes through a sequence and leaves its states (backwards: their gradients) behind; the others go
through a *segment* from the state that it begins (ends) with. The fused forms have a whole sequence for a segment, and
take its state along; the others have a chunk (backwards: a block), whose state `_states_kernel` has left, and do all at
once. So both routes are the same arithmetic. A program of the forward pass has all of K and a tile of V; one of the
backward pass has a tile of K and goes through those of V, and what is summed over K (dv and the gradient of a scalar
gate) is left apart for each tile and added in order.

The gradient of step t's gate is the sum over all pairs j < t <= i of a key and a query, each counted where it is found:
in A, in q dq and k dk of what passes through S and dS, or in S dS. No sum is longer than a block, and nothing is
subtracted but, with a gate per channel, the k dk of A from its q dq.

Nothing is read back from the device. The offsets in a CUDA tensor are not checked; those out of order are clamped.
"""
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators
# (kernel arguments are what Triton makes of them; every host function below is annotated)

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable

from gpu_reference._lib.hardware import check_devices, computes_bfloat16, is_interpreted, is_older
from gpu_reference._lib.launch import Launch
from gpu_reference._lib.operands import values
from gpu_reference._lib.probe import INTERPRETED, probe
from gpu_reference._lib.tiles import block_of
from gpu_reference.fused_recurrent import Gates, Gradients, Output
from op_arguments.gla import Problem, check_backward, check_forward, check_fused, check_precision

LARGEST_ROWS = {False: 32, True: 16}
"""Rows of a block, at most, without and with a gate for each channel: there pairs within a block are no matrix product,
and few are best. Every row less costs the backward pass memory for states."""

BLOCK_ELEMENTS = 4096  # of q or of the state in a block that has all of K, at most (never fewer than 16 rows of either)

FORWARD_TILES = {
    ("bfloat16", False): (32, 4),
    ("bfloat16", True): (16, 4),
    ("float32", False): (16, 8),
    ("float32", True): (16, 4),
}
"""(columns of V, warps) by dtype and whether each channel has a gate: at most so many, that little is spilled."""

BACKWARD_TILES = {
    (True, False): (64, 16, 8),
    (True, True): (32, 32, 4),
    (False, False): (32, 16, 8),
    (False, True): (32, 16, 4),
}
"""(columns of K, columns of V, warps) likewise, by whether dots are of bfloat16 and whether each channel has a gate.
Every tile of K more costs memory for a copy of dv. Chosen on sm_80 to sm_100; AMD takes the same, and spills."""

PIECE = tl.constexpr(8 if is_interpreted() or not is_older(triton.__version__, 3, 8) else 16)
"""Products that a float32 dot sums one after the other, before sums are added in float64: as few as Triton compiles.
Interpreted, kernels sum alike with every Triton."""

LARGEST_GATE = tl.constexpr(128.0)  # exp(-128) is zero in float32
COARSE = tl.constexpr(1.5 * 2.0**13)  # a float32 added to it becomes a multiple of 2^-10
LARGEST_EXPONENT = tl.constexpr(88.0)  # exp of it is finite, so that times a zero it is zero


class Block(NamedTuple):
    """What a program works on at a time: rows, and columns of K and V; and its warps."""

    rows: int
    keys: int
    values: int
    warps: int


class Route(NamedTuple):
    """How a chunked form is computed, and why."""

    fused: bool
    explain: str


def chunk_route(
    p: Problem,
    chunk_size: int,
    processors: int,
    *,
    per_channel: bool,
    backward: bool = False,
    precision: str = "ieee",
) -> Route:
    """Whether one pass over each sequence (fused) keeps `processors` multiprocessors busy, or chunks must be spread.

    per_channel: whether the gate is gk; precision: as in `chunk_fwd`.
    """
    if backward:
        block = backward_block(p, chunk_size, precision, per_channel=per_channel)
        axis, tiles = "K", triton.cdiv(p.k, block.keys)
    else:
        axis, tiles = "V", triton.cdiv(p.v, forward_block(p, chunk_size, per_channel=per_channel).values)
    programs = p.n * p.h * tiles
    count = f"{p.n} sequences x {p.h} heads x {tiles} tiles of {axis} = {programs} programs"
    if p.t <= chunk_size:
        return Route(True, f"fused: no sequence is longer than a chunk of {chunk_size}")
    if programs >= processors:
        return Route(True, f"fused: {count}, at least one for each of {processors} multiprocessors")
    return Route(False, f"chunks apart: {count} would leave some of {processors} multiprocessors idle")


def chunk_fwd(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    gates: Gates,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    cu_seqlens: Tensor | None = None,
    chunk_size: int = 64,
    precision: str = "ieee",
    fused: bool | None = None,
) -> Output:
    """(o, ht): `o_t = scale q_t^T S_t`, and the state after the last step where output_final_state, else None.

    q, k [B, T, H, K], v [B, T, H, V]: all float32 or all bfloat16, of any strides. gates: natural logs of the decays,
    `g` [B, T, H] and `g_gamma` [H], which add (None: no decay), or `gk` [B, T, H, K]; float32, `g` and `gk` also of
    q's dtype. initial_state [N, H, K, V] float32. cu_seqlens [N + 1] int32 packs N sequences into B = 1 (N = B
    without). scale: default K ** -0.5. chunk_size: rows between the states that are kept where not fused.
    precision of dots of float32: "ieee" or "bf16x3" (operands in two bfloat16 parts, three products). fused: in one
    pass over each sequence; None: as `chunk_route`. Sites shown to a probe: c, decay, kept, A and state.
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
        chunk_size=chunk_size,
    )
    check_precision(precision, p.dtype)
    tensors = {"q": q, "k": k, "v": v, **gates, "initial_state": initial_state, "cu_seqlens": cu_seqlens}
    device = check_devices(tensors)
    fused = _is_fused(p, chunk_size, fused, device, per_channel="gk" in gates)
    if q.dtype == torch.bfloat16 and not computes_bfloat16(device):
        o, ht = chunk_fwd(
            q.float(),
            k.float(),
            v.float(),
            gates={name: None if gate is None else gate.float() for name, gate in gates.items()},
            scale=scale,
            initial_state=initial_state,
            output_final_state=output_final_state,
            cu_seqlens=cu_seqlens,
            chunk_size=chunk_size,
            fused=fused,
        )
        return Output(o.to(q.dtype), ht)

    o = _rows((p.b, p.t, p.h, p.v), q.dtype, device, cu_seqlens)
    ht = _states(p, p.n, device) if output_final_state else None
    if 0 in (p.b * p.t, p.h, p.k, p.v):
        return Output(o.zero_(), _copied(initial_state, ht))
    q, k, v, cu_seqlens = (_contiguous(x) for x in (q, k, v, cu_seqlens))
    first_states, last_states = _contiguous(initial_state), ht
    block = forward_block(p, chunk_size, per_channel="gk" in gates)
    if not fused:
        first_states, last_states = _states(p, p.b * p.t // chunk_size + p.n, device), None
        states_launch(p, k, v, gates, initial_state, cu_seqlens, first_states, ht, block, chunk_size, precision).run(
            device
        )
    forward_launch(
        p,
        q,
        k,
        v,
        gates,
        first_states,
        cu_seqlens,
        o,
        last_states,
        block,
        chunk_size,
        precision,
        fused=fused,
    ).run(device)
    return Output(o, ht)


def chunk_bwd(
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
    chunk_size: int = 64,
    precision: str = "ieee",
    fused: bool | None = None,
) -> Gradients:
    """The gradients of `chunk_fwd`'s arguments, given those of o (do) and, if it is not None, of ht (dht).

    do has v's shape and dtype; dht [N, H, K, V] is float32. Gradients have their arguments' dtypes and are zero beyond
    the last sequence. Held meanwhile, in float32: a state for each block of rows (where not fused, two), and where K
    has several tiles a copy of dv for each. Sites: those of `chunk_fwd`, dA, dgate and dstate; A and a
    scalar gate's dgate where K has one tile.
    Raises as `chunk_fwd`, with `op_arguments.gla.check_backward`.
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
        chunk_size=chunk_size,
    )
    check_precision(precision, p.dtype)
    tensors = {"q": q, "k": k, "v": v, "do": do, **gates, "initial_state": initial_state, "dht": dht}
    device = check_devices(tensors | {"cu_seqlens": cu_seqlens})
    fused = _is_fused(p, chunk_size, fused, device, per_channel="gk" in gates, backward=True, precision=precision)
    if q.dtype == torch.bfloat16 and not computes_bfloat16(device):
        wide = chunk_bwd(
            q.float(),
            k.float(),
            v.float(),
            do.float(),
            gates={name: None if gate is None else gate.float() for name, gate in gates.items()},
            scale=scale,
            initial_state=initial_state,
            dht=dht,
            cu_seqlens=cu_seqlens,
            chunk_size=chunk_size,
            fused=fused,
        )
        narrow = {name: _cast(gradient, gates[name]) for name, gradient in wide.dgates.items()}
        return Gradients(wide.dq.to(q.dtype), wide.dk.to(q.dtype), wide.dv.to(q.dtype), narrow, wide.dh0)

    gk = gates.get("gk")
    per_channel = gk is not None
    block = backward_block(p, chunk_size, precision, per_channel=per_channel)
    # A program has a tile of K, and sums over K need those of the others: they are left apart, and added in order.
    tiles = max(triton.cdiv(p.k, block.keys), 1)
    dq, dk = (_rows((p.b, p.t, p.h, p.k), q.dtype, device, cu_seqlens) for _ in range(2))
    dv = _rows((tiles, p.b, p.t, p.h, p.v), q.dtype if tiles == 1 else torch.float32, device, cu_seqlens)
    dgate = None
    if gk is not None:
        dgate = _rows((p.b, p.t, p.h, p.k), gk.dtype, device, cu_seqlens)
    elif any(gate is not None for gate in gates.values()):
        dgate = _rows((tiles, p.b, p.t, p.h), torch.float32, device, cu_seqlens)
    dh0 = None if initial_state is None else _states(p, p.n, device)
    if 0 in (p.b * p.t, p.h, p.k, p.v):
        for gradient in (dq, dk, dv, dgate):
            if gradient is not None:
                gradient.zero_()
        _copied(dht, dh0)
    else:
        q, k, v, do, cu_seqlens = (_contiguous(x) for x in (q, k, v, do, cu_seqlens))
        states = _states(p, p.b * p.t // block.rows + p.n, device)
        states_launch(p, k, v, gates, initial_state, cu_seqlens, states, None, block, block.rows, precision).run(device)
        if fused:
            dstates = _states(p, p.n, device) if dh0 is None else dh0
            _copied(dht, dstates)
        else:
            dstates = torch.empty_like(states)
            states_launch(
                p, q, do, gates, dht, cu_seqlens, dstates, dh0, block, block.rows, precision, reverse=True
            ).run(device)
        backward_launch(
            p,
            q,
            k,
            v,
            do,
            gates,
            states,
            dstates,
            cu_seqlens,
            dq,
            dk,
            dv,
            dgate,
            block,
            precision,
            fused=fused,
        ).run(device)

    if per_channel:
        dgates: dict[str, Tensor | None] = {"gk": dgate}
    else:
        step = None if dgate is None else _sum_of_tiles(dgate)
        dgates = {name: _gate_gradient(step, gate) for name, gate in gates.items()}
    return Gradients(dq, dk, _sum_of_tiles(dv).to(q.dtype), dgates, dh0)


def differentiable(
    forward: Callable[..., Output],
    backward: Callable[..., Gradients],
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    gates: Gates,
    initial_state: Tensor | None = None,
    **options: Any,
) -> Output:
    """`forward` (`chunk_fwd` or `recurrent_fwd`), whose gradients `backward` computes."""
    applied = _Scan.apply(  # type: ignore[no-untyped-call]
        forward, backward, tuple(gates), options, q, k, v, initial_state, *gates.values()
    )
    return Output(*applied)


class _Scan(torch.autograd.Function):
    """The two passes."""

    @staticmethod
    def forward(ctx, forward, backward, names, options, q, k, v, initial_state, *gates):
        ctx.save_for_backward(q, k, v, initial_state, *gates)
        ctx.set_materialize_grads(False)
        ctx.backward_pass, ctx.names, ctx.options = backward, names, options
        return forward(q, k, v, gates=dict(zip(names, gates, strict=True)), initial_state=initial_state, **options)

    @staticmethod
    @once_differentiable
    def backward(ctx, do, dht):
        q, k, v, initial_state, *gates = ctx.saved_tensors
        options = {name: value for name, value in ctx.options.items() if name != "output_final_state"}
        gradients = ctx.backward_pass(
            q,
            k,
            v,
            torch.zeros_like(v) if do is None else do,
            gates=dict(zip(ctx.names, gates, strict=True)),
            initial_state=initial_state,
            dht=dht,
            **options,
        )
        dgates = (gradients.dgates[name] for name in ctx.names)
        return None, None, None, None, gradients.dq, gradients.dk, gradients.dv, gradients.dh0, *dgates


def block_rows(p: Problem, chunk_size: int, *, per_channel: bool) -> int:
    """The rows of a block. They divide chunk_size, so that calls may be cut at the borders of chunks, and both passes
    have the same, so that a backward pass goes on from a forward pass's final state as from its own."""
    return min(chunk_size & -chunk_size, LARGEST_ROWS[per_channel], max(BLOCK_ELEMENTS // block_of(p.k), 16))


def forward_block(p: Problem, chunk_size: int, *, per_channel: bool) -> Block:
    """The block of `_forward_kernel`, which has all of K and a tile of V."""
    values, warps = FORWARD_TILES[p.dtype, per_channel]
    rows = block_rows(p, chunk_size, per_channel=per_channel)
    keys = block_of(p.k)
    return Block(rows, keys, min(block_of(p.v), values, max(BLOCK_ELEMENTS // keys, 16)), warps)


def backward_block(p: Problem, chunk_size: int, precision: str, *, per_channel: bool) -> Block:
    """The block of `_backward_kernel`, which goes through tiles of V for each tile of K."""
    keys, values, warps = BACKWARD_TILES[_is_split(p, precision), per_channel]
    rows = block_rows(p, chunk_size, per_channel=per_channel)
    return Block(rows, min(block_of(p.k), keys), min(block_of(p.v), values), warps)


def states_launch(
    p: Problem,
    k: Tensor,
    v: Tensor,
    gates: Gates,
    first_state: Tensor | None,
    cu_seqlens: Tensor | None,
    states: Tensor,
    last_state: Tensor | None,
    block: Block,
    segment: int,
    precision: str,
    *,
    reverse: bool = False,
) -> Launch:
    """The kernel that fills `states` [B T // segment + N, H, K, V] with the state before each segment, and
    last_state [N, H, K, V] with that after the last; reverse, of q and do: the gradients of the states after each."""
    keys, values = (min(size, 64) for size in (block.keys, block.values))
    arguments = {
        "k": k,
        "v": v,
        **_gate_arguments(gates),
        "first_state": _contiguous(first_state),
        "cu_seqlens": cu_seqlens,
        "states": states,
        "last_state": last_state,
        "scale": p.scale,
        **_size_arguments(p),
        "SEGMENT": segment,
        "REVERSE": reverse,
        "SPLIT": _is_split(p, precision),
        "ROWS": block.rows,
        "BK": keys,
        "BV": values,
    }
    programs = p.n * p.h * triton.cdiv(p.k, keys) * triton.cdiv(p.v, values)
    return Launch(_states_kernel, (programs,), arguments, _options(block))


def forward_launch(
    p: Problem,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    gates: Gates,
    first_states: Tensor | None,
    cu_seqlens: Tensor | None,
    o: Tensor,
    last_states: Tensor | None,
    block: Block,
    chunk_size: int,
    precision: str,
    *,
    fused: bool,
) -> Launch:
    """The kernel that fills o from the state before each sequence (fused) or chunk, as `states_launch` leaves them."""
    arguments = {
        "q": q,
        "k": k,
        "v": v,
        **_gate_arguments(gates),
        "first_states": first_states,
        "cu_seqlens": cu_seqlens,
        "o": o,
        "last_states": last_states,
        "scale": p.scale,
        **_size_arguments(p),
        "SEGMENT": None if fused else chunk_size,
        "SPLIT": _is_split(p, precision),
        "ROWS": block.rows,
        "BK": block.keys,
        "BV": block.values,
    }
    segments = p.n if fused else p.b * p.t // chunk_size + p.n
    return Launch(_forward_kernel, (segments * p.h * triton.cdiv(p.v, block.values),), arguments, _options(block))


def backward_launch(
    p: Problem,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    do: Tensor,
    gates: Gates,
    states: Tensor,
    dstates: Tensor,
    cu_seqlens: Tensor | None,
    dq: Tensor,
    dk: Tensor,
    dv: Tensor,
    dgate: Tensor | None,
    block: Block,
    precision: str,
    *,
    fused: bool,
) -> Launch:
    """The kernel that fills dq, dk, dv [tiles of K, B, T, H, V] and dgate (gk's in its shape, else
    [tiles of K, B, T, H]) from the states
    before each block of rows and dstates, the gradients of those after each; or if fused, after each sequence [N, H, K,
    V], which become those before it."""
    arguments = {
        "q": q,
        "k": k,
        "v": v,
        "do": do,
        **_gate_arguments(gates),
        "states": states,
        "dstates": dstates,
        "cu_seqlens": cu_seqlens,
        "dq": dq,
        "dk": dk,
        "dv": dv,
        "dgate": dgate,
        "scale": p.scale,
        "rows": p.b * p.t,
        **_size_arguments(p),
        "SEGMENT": None if fused else block.rows,
        "SPLIT": _is_split(p, precision),
        "ROWS": block.rows,
        "BK": block.keys,
        "BV": block.values,
    }
    segments = p.n if fused else p.b * p.t // block.rows + p.n
    return Launch(_backward_kernel, (segments * p.h * triton.cdiv(p.k, block.keys),), arguments, _options(block))


@triton.jit
def _states_kernel(
    k,
    v,
    g,
    g_gamma,
    gk,
    first_state,
    cu_seqlens,
    states,
    last_state,
    scale,
    sequences,
    steps,
    heads,
    keys,
    values,
    SEGMENT: tl.constexpr,
    REVERSE: tl.constexpr,
    SPLIT: tl.constexpr,
    ROWS: tl.constexpr,
    BK: tl.constexpr,
    BV: tl.constexpr,
):
    """One program per (sequence, head, tile of K, tile of V). In reverse k and v are q and do, and states gradients."""
    tiles_v = tl.cdiv(values, BV)
    tiles = tl.cdiv(keys, BK) * tiles_v
    head = tl.program_id(0) // tiles % heads
    sequence = (tl.program_id(0) // tiles // heads).to(tl.int64)
    start, end = rows_of_sequence(sequence, cu_seqlens, steps)
    key = (tl.program_id(0) % tiles // tiles_v * BK + tl.arange(0, BK))[:, None]
    value = (tl.program_id(0) % tiles_v * BV + tl.arange(0, BV))[None, :]
    in_state = (key < keys) & (value < values)
    at_sequence = state_offset(sequence, head, key, value, heads, keys, values)

    state = tl.full((BK, BV), 0.0, tl.float32)
    if first_state is not None:
        state += tl.load(first_state + at_sequence, mask=in_state, other=0)
    blocks = tl.cdiv(end - start, ROWS)
    for nth in range(blocks):
        block = nth
        if REVERSE:
            block = blocks - 1 - nth
        first = start + block * ROWS
        if block * ROWS % SEGMENT == 0:
            slot = first_slot(sequence, start, SEGMENT) + block * ROWS // SEGMENT
            at_slot = state_offset(slot, head, key, value, heads, keys, values)
            tl.store(states + at_slot, state, mask=in_state)
        row = first + tl.arange(0, ROWS)
        k_columns = load_tile(k, row[None, :], end, key, head, heads, keys)
        v_rows = load_tile(v, row[:, None], end, value, head, heads, values)
        since, rest, kept, lost = decays(g, g_gamma, gk, first, end, key, head, heads, keys, 1, SPLIT, ROWS)
        weight = rest
        if REVERSE:
            weight = since * scale
        state = next_state(state, k_columns, v_rows, weight, kept, lost, SPLIT)
        if INTERPRETED:
            state = probe("dstate" if REVERSE else "state", state, in_state, chunk_size=ROWS)
    if last_state is not None:
        tl.store(last_state + at_sequence, state, mask=in_state)


@triton.jit
def _forward_kernel(
    q,
    k,
    v,
    g,
    g_gamma,
    gk,
    first_states,
    cu_seqlens,
    o,
    last_states,
    scale,
    sequences,
    steps,
    heads,
    keys,
    values,
    SEGMENT: tl.constexpr,
    SPLIT: tl.constexpr,
    ROWS: tl.constexpr,
    BK: tl.constexpr,
    BV: tl.constexpr,
):
    """One program per (segment, head, tile of V)."""
    tiles = tl.cdiv(values, BV)
    head = tl.program_id(0) // tiles % heads
    segment = (tl.program_id(0) // tiles // heads).to(tl.int64)
    _, start, end = rows_of_segment(segment, cu_seqlens, sequences, steps, SEGMENT)
    value = tl.program_id(0) % tiles * BV + tl.arange(0, BV)[None, :]
    key_row = tl.arange(0, BK)[None, :]
    key = tl.arange(0, BK)[:, None]
    in_state = (key < keys) & (value < values)
    if SEGMENT is not None:
        in_state = in_state & (key < tl.where(start < end, keys, 0))  # there are states only of segments
    at_segment = state_offset(segment, head, key, value, heads, keys, values)

    state = tl.full((BK, BV), 0.0, tl.float32)
    if first_states is not None:
        state += tl.load(first_states + at_segment, mask=in_state, other=0)
    for block in range(tl.cdiv(end - start, ROWS)):
        first = start + block * ROWS
        row = first + tl.arange(0, ROWS)
        q_rows = load_tile(q, row[:, None], end, key_row, head, heads, keys)
        k_columns = load_tile(k, row[None, :], end, key, head, heads, keys)
        v_rows = load_tile(v, row[:, None], end, value, head, heads, values)
        if gk is None:
            since, rest, kept, lost = decays(g, g_gamma, gk, first, end, key, head, heads, keys, 1, SPLIT, ROWS)
            coarse, fine = gate_sums(g, g_gamma, first, end, head, heads, ROWS)
            scores = dot(q_rows, k_columns, SPLIT) * pair_decays(coarse, fine, False, SPLIT)
            out = since[:, None] * dot(q_rows, state, SPLIT)
        else:
            scores = channel_scores(q_rows, k, gk, first, end, key_row, head, heads, keys, False)
            since, rest, kept, lost = decays(g, g_gamma, gk, first, end, key_row, head, heads, keys, 0, SPLIT, ROWS)
            out = dot(since * q_rows.to(tl.float32), state, SPLIT)
        if INTERPRETED:
            scores = probe("A", scores, (row[:, None] < end) & (row[None, :] < end), chunk_size=ROWS)
        out += dot(scores, v_rows, SPLIT)
        at_out = (row[:, None] * heads + head) * values + value
        tl.store(o + at_out, (scale * out).to(o.dtype.element_ty), mask=(row[:, None] < end) & (value < values))
        if SEGMENT != ROWS:
            since, rest, kept, lost = decays(g, g_gamma, gk, first, end, key, head, heads, keys, 1, SPLIT, ROWS)
            # Loaded again: kept meanwhile, they would leave too few registers for the rest.
            k_columns = load_tile(k, row[None, :], end, key, head, heads, keys)
            state = next_state(state, k_columns, v_rows, rest, kept, lost, SPLIT)
            if INTERPRETED:
                state = probe("state", state, in_state, chunk_size=ROWS)
    if last_states is not None:
        tl.store(last_states + at_segment, state, mask=in_state)


@triton.jit
def _backward_kernel(
    q,
    k,
    v,
    do,
    g,
    g_gamma,
    gk,
    states,
    dstates,
    cu_seqlens,
    dq,
    dk,
    dv,
    dgate,
    scale,
    rows,
    sequences,
    steps,
    heads,
    keys,
    values,
    SEGMENT: tl.constexpr,
    SPLIT: tl.constexpr,
    ROWS: tl.constexpr,
    BK: tl.constexpr,
    BV: tl.constexpr,
):
    """One program per (segment, head, tile of K), from the last block to the first. dstates are those after each block,
    or without SEGMENT one per sequence, which goes with the blocks. "Columns" are tiles that are loaded transposed:
    tl.trans next to a wgmma has been miscompiled (Triton before 3.7.1)."""
    tiles = tl.cdiv(keys, BK)
    tile = tl.program_id(0) % tiles
    head = tl.program_id(0) // tiles % heads
    segment = (tl.program_id(0) // tiles // heads).to(tl.int64)
    sequence, start, end = rows_of_segment(segment, cu_seqlens, sequences, steps, SEGMENT)
    sequence_start, _ = rows_of_sequence(sequence, cu_seqlens, steps)
    key = tile * BK + tl.arange(0, BK)[:, None]
    key_row = tile * BK + tl.arange(0, BK)[None, :]
    at_tile = tile.to(tl.int64) * rows * heads
    SUM: tl.constexpr = tl.float32 if SPLIT else tl.float64  # of the tiles of V

    blocks = tl.cdiv(end - start, ROWS)
    for nth in range(blocks):
        first = start + (blocks - 1 - nth) * ROWS
        row = first + tl.arange(0, ROWS)
        q_columns = load_tile(q, row[None, :], end, key, head, heads, keys)
        k_columns = load_tile(k, row[None, :], end, key, head, heads, keys)
        k_rows = load_tile(k, row[:, None], end, key_row, head, heads, keys)
        since, rest, kept, lost = decays(g, g_gamma, gk, first, end, key, head, heads, keys, 1, SPLIT, ROWS)
        if gk is None:
            k_decayed = k_rows
            coarse, fine = gate_sums(g, g_gamma, first, end, head, heads, ROWS)
            scores_t = dot(k_rows, q_columns, SPLIT) * pair_decays(coarse, fine, True, SPLIT)
        else:
            k_decayed = (
                k_rows.to(tl.float32)
                * decays(g, g_gamma, gk, first, end, key_row, head, heads, keys, 0, SPLIT, ROWS)[1]
            )
            scores_t = channel_scores(k_rows, q, gk, first, end, key_row, head, heads, keys, True)
        if INTERPRETED:
            is_pair = (row[:, None] < end) & (row[None, :] < end)
            scores_t = probe("A", scores_t, is_pair & (keys <= BK), chunk_size=ROWS)  # of a tile of K it is a part
        scores_t *= scale

        products = tl.full((ROWS, ROWS), 0.0, SUM)
        products_t = tl.full((ROWS, ROWS), 0.0, SUM)
        dq_tile = tl.full((BK, ROWS), 0.0, SUM)
        dk_tile = tl.full((BK, ROWS), 0.0, SUM)
        past_block = tl.full((BK,), 0.0, tl.float32)
        slot = first_slot(sequence, sequence_start, ROWS) + (first - sequence_start) // ROWS
        for first_value in range(0, values, BV):
            value = first_value + tl.arange(0, BV)[None, :]
            value_column = first_value + tl.arange(0, BV)[:, None]
            do_rows = load_tile(do, row[:, None], end, value, head, heads, values)
            do_columns = load_tile(do, row[None, :], end, value_column, head, heads, values)
            v_rows = load_tile(v, row[:, None], end, value, head, heads, values)
            v_columns = load_tile(v, row[None, :], end, value_column, head, heads, values)
            products += dot(do_rows, v_columns, SPLIT)
            products_t += dot(v_rows, do_columns, SPLIT)

            in_state = (key < keys) & (value < values)
            at_state = state_offset(slot, head, key, value, heads, keys, values)
            at_dstate = state_offset(segment, head, key, value, heads, keys, values)
            state = tl.load(states + at_state, mask=in_state, other=0)
            dstate = tl.load(dstates + at_dstate, mask=in_state, other=0)
            dq_tile += dot(state, do_columns, SPLIT)
            dk_tile += dot(dstate, v_columns, SPLIT)
            past_block += tl.sum(state * dstate, axis=1)
            dv_tile = dot(k_decayed, dstate, SPLIT)
            if gk is None:
                dv_tile *= rest[:, None]
            dv_tile += dot(scores_t, do_rows, SPLIT)
            at_value = at_tile * values + (row[:, None] * heads + head) * values + value
            tl.store(dv + at_value, dv_tile.to(dv.dtype.element_ty), mask=(row[:, None] < end) & (value < values))
            if SEGMENT is None:
                dstate = next_state(dstate, q_columns, do_rows, since * scale, kept, lost, SPLIT)
                if INTERPRETED:
                    dstate = probe("dstate", dstate, in_state, chunk_size=ROWS)
                tl.store(dstates + at_dstate, dstate, mask=in_state)

        products = products.to(tl.float32)
        products_t = products_t.to(tl.float32)
        if INTERPRETED:
            probe("dA", scale * products, is_pair & (row[:, None] >= row[None, :]), chunk_size=ROWS)
            probe("dA", scale * products_t, is_pair & (row[:, None] <= row[None, :]), chunk_size=ROWS)
        # Loaded again, as in `_forward_kernel`.
        q_columns = load_tile(q, row[None, :], end, key, head, heads, keys)
        k_columns = load_tile(k, row[None, :], end, key, head, heads, keys)
        dq_tile = dq_tile.to(tl.float32) * (since * scale)
        dk_tile = dk_tile.to(tl.float32) * rest
        if gk is None:
            if dgate is not None:
                through_state = tl.sum(q_columns.to(tl.float32) * dq_tile, axis=0)
                through_dstate = tl.sum(k_columns.to(tl.float32) * dk_tile, axis=0)
                dgate_rows = sums_across(scores_t * products_t, through_state, through_dstate, SPLIT, ROWS)
                if INTERPRETED:
                    probe("dgate", (kept + lost) * tl.sum(past_block), keys <= BK, chunk_size=ROWS)
                tl.store(
                    dgate + at_tile + row * heads + head,
                    dgate_rows + (kept + lost) * tl.sum(past_block),
                    mask=row < end,
                )
            products *= scale * pair_decays(coarse, fine, False, SPLIT)
            products_t *= scale * pair_decays(coarse, fine, True, SPLIT)
            dq_tile += dot(k_columns, products_t, SPLIT)
            dk_tile += dot(q_columns, products, SPLIT)
        else:
            dgate_tile = (kept + lost) * past_block[:, None]
            if INTERPRETED:
                is_of_key = (key < keys) & (row[None, :] < end)
                dgate_tile = probe("dgate", dgate_tile, key < keys, chunk_size=ROWS)
            read = sums_from(q_columns.to(tl.float32) * dq_tile)
            if INTERPRETED:
                read = probe("dgate", read, is_of_key, chunk_size=ROWS)
            dgate_tile += read
            written = sums_before(k_columns.to(tl.float32) * dk_tile)
            if INTERPRETED:
                written = probe("dgate", written, is_of_key, chunk_size=ROWS)
            dgate_tile += written
            products *= scale
            products_t *= scale
            dq_inner, dk_inner, dgate_inner = channel_gradients(
                q, k, gk, q_columns, k_columns, products, products_t, first, end, key, head, heads, keys, ROWS
            )
            if INTERPRETED:
                dgate_inner = probe("dgate", dgate_inner, is_of_key, chunk_size=ROWS)
            dq_tile += dq_inner
            dk_tile += dk_inner
            store_columns(dgate, dgate_tile + dgate_inner, row, end, key, head, heads, keys)
        store_columns(dq, dq_tile, row, end, key, head, heads, keys)
        store_columns(dk, dk_tile, row, end, key, head, heads, keys)
        if SEGMENT is None:
            tl.debug_barrier()  # a thread loads of dstates what another has stored


@triton.jit
def rows_of_sequence(sequence, cu_seqlens, steps):
    """A sequence's first row (int64), and the first after it. Sequences have `steps` rows each, or are cut from as many
    by cu_seqlens."""
    if cu_seqlens is None:
        start = sequence * steps
        end = start + steps
    else:
        start = tl.minimum(tl.maximum(tl.load(cu_seqlens + sequence), 0), steps).to(tl.int64)
        end = tl.minimum(tl.maximum(tl.load(cu_seqlens + sequence + 1), start), steps).to(tl.int64)
    return start, end


@triton.jit
def first_slot(sequence, start, SEGMENT: tl.constexpr):
    """The first of a sequence's segments among those of all: no other has it, whatever the lengths are."""
    return start // SEGMENT + sequence


@triton.jit
def rows_of_segment(segment, cu_seqlens, sequences, steps, SEGMENT: tl.constexpr):
    """The sequence of a segment, its first row and the first after it: a whole sequence without SEGMENT, else at most
    SEGMENT rows of one, and none where this is no sequence's segment."""
    if SEGMENT is None:
        sequence = segment
        start, end = rows_of_sequence(sequence, cu_seqlens, steps)
    else:
        sequence = tl.full((), 0, tl.int64)
        beyond = tl.full((), 0, tl.int64) + sequences
        while beyond - sequence > 1:
            middle = (sequence + beyond) // 2
            middle_start, _ = rows_of_sequence(middle, cu_seqlens, steps)
            is_before = first_slot(middle, middle_start, SEGMENT) <= segment
            sequence = tl.where(is_before, middle, sequence)
            beyond = tl.where(is_before, beyond, middle)
        first, end = rows_of_sequence(sequence, cu_seqlens, steps)
        start = first + (segment - first_slot(sequence, first, SEGMENT)) * SEGMENT
        end = tl.minimum(end, start + SEGMENT)
    return sequence, start, end


@triton.jit
def state_offset(index, head, key, value, heads, keys, values):
    """Where the elements (key, value) of a head's state are in [..., H, K, V]; index is int64."""
    return ((index * heads + head) * keys + key) * values + value


@triton.jit
def load_tile(x, row, end, column, head, heads, columns):
    """The rows before `end`, and zero for others, of a head in x [rows, H, columns], in the shape of `row` (int64) and
    `column` broadcast: [R, 1] and [1, C], or [1, R] and [C, 1] for columns."""
    return tl.load(x + (row * heads + head) * columns + column, mask=(row < end) & (column < columns), other=0)


@triton.jit
def store_columns(x, tile, row, end, column, head, heads, columns):
    """Store tile [C, R] as rows of a head in x [rows, H, columns]; `column` is [C, 1]."""
    at_tile = (row[None, :] * heads + head) * columns + column
    tl.store(x + at_tile, tile.to(x.dtype.element_ty), mask=(row[None, :] < end) & (column < columns))


@triton.jit
def dot(a, b, SPLIT: tl.constexpr):
    """a [M, D] @ b [D, N] in float32.

    Without SPLIT both are float32, and no chain of additions in that is longer than PIECE: a batch of short products,
    since Triton would make one chain of a dot and what is added to it. With SPLIT a bfloat16 operand is taken as it is,
    a float32 one in two bfloat16 parts, and the product of two second parts is left out.
    """
    if not SPLIT:
        if a.shape[1] > PIECE:
            a_pieces = tl.permute(tl.reshape(a, (a.shape[0], a.shape[1] // PIECE, PIECE)), (1, 0, 2))
            b_pieces = tl.reshape(b, (b.shape[0] // PIECE, PIECE, b.shape[1]))
            pieces = tl.dot(a_pieces, b_pieces, input_precision="ieee")
            result = tl.sum(pieces.to(tl.float64), axis=0).to(tl.float32)
        else:
            result = tl.dot(a, b, input_precision="ieee")
    elif a.dtype == tl.bfloat16:
        if b.dtype == tl.bfloat16:
            result = tl.dot(a, b)
        else:
            b_high, b_low = halves(b)
            result = tl.dot(a, b_high, tl.dot(a, b_low))
    elif b.dtype == tl.bfloat16:
        a_high, a_low = halves(a)
        result = tl.dot(a_high, b, tl.dot(a_low, b))
    else:
        a_high, a_low = halves(a)
        b_high, b_low = halves(b)
        result = tl.dot(a_high, b_high, tl.dot(a_high, b_low, tl.dot(a_low, b_high)))
    return result


@triton.jit
def halves(x):
    """float32 as a sum of two bfloat16, to 2^-17 of it."""
    high = x.to(tl.bfloat16)
    return high, (x - high.to(tl.float32)).to(tl.bfloat16)


@triton.jit
def next_state(state, k_columns, v_rows, weight, kept, lost, SPLIT: tl.constexpr):
    """(kept + lost) state + (weight k)^T v: the state after a block. weight is [R] and the decay a scalar, or [K, R]
    and [K, 1]. A decay near 1 is 1 + lost: it acts on a slow head's state in every block, and an error in it would add
    up."""
    if len(weight.shape) == 1:
        update = dot(k_columns, weight[:, None] * v_rows.to(tl.float32), SPLIT)
    else:
        update = dot(weight * k_columns.to(tl.float32), v_rows, SPLIT)
    return kept * state + (lost * state + update)


@triton.jit
def gate_parts(gate):
    """A gate as a multiple of 2^-10, whose sums over a block are exact, and the float32 that is left, whose sums are
    small. Gates beyond what exp resolves are clamped."""
    gate = gate.to(tl.float32)
    gate = tl.where(gate < -LARGEST_GATE, -LARGEST_GATE, gate)  # NaN stays
    gate = tl.where(gate > LARGEST_GATE, LARGEST_GATE, gate)
    coarse = (gate + COARSE) - COARSE
    return coarse, gate - coarse


@triton.jit
def gate_sums(g, g_gamma, first, end, head, heads, ROWS: tl.constexpr):
    """The scalar gates summed since the block's first row, in two parts [R]; constant beyond the last row."""
    at = tl.arange(0, ROWS)
    coarse = tl.full((ROWS,), 0.0, tl.float32)
    fine = tl.full((ROWS,), 0.0, tl.float32)
    if g is not None:
        row = first + at
        gate_coarse, gate_fine = gate_parts(tl.load(g + row * heads + head, mask=row < end, other=0))
        coarse += tl.cumsum(gate_coarse, axis=0)
        fine += tl.cumsum(gate_fine, axis=0)
    if g_gamma is not None:
        count = tl.minimum(at + 1, end - first).to(tl.float32)
        gamma_coarse, gamma_fine = gate_parts(tl.load(g_gamma + head))
        coarse += gamma_coarse * count
        fine += gamma_fine * count
    return coarse, fine


@triton.jit
def decay(coarse, fine):
    """exp of a sum of gates in two parts."""
    return tl.exp(tl.minimum(coarse + fine, LARGEST_EXPONENT))


@triton.jit
def causal_decay(is_causal, coarse, fine):
    """`decay` where is_causal, else 0: an exponent of what is not may be of any size."""
    return decay(tl.where(is_causal, coarse, float("-inf")), tl.where(is_causal, fine, 0.0))


@triton.jit
def scalar_decay(coarse, fine, SPLIT: tl.constexpr):
    """`decay` of scalar gates; in float64 where dots are not split, as the hardware's own float32 exp loses more, the
    steeper the gate is."""
    if SPLIT:
        result = decay(coarse, fine)
    else:
        result = tl.exp(tl.minimum(coarse.to(tl.float64) + fine, LARGEST_EXPONENT)).to(tl.float32)
    return result


@triton.jit
def decays(
    g,
    g_gamma,
    gk,
    first,
    end,
    key,
    head,
    heads,
    keys,
    ROW_AXIS: tl.constexpr,
    SPLIT: tl.constexpr,
    ROWS: tl.constexpr,
):
    """How much of what was before the block is left after each row, how much of each row after the block, [R]; and the
    former after the last row as a sum: 1 or 0, whichever is nearer (1 beyond it), and what is left of it, scalars.

    With gk of `key`, [K, 1] or [1, K]: all in the shape of that, the first two with rows along ROW_AXIS.
    """
    if gk is None:
        coarse, fine = gate_sums(g, g_gamma, first, end, head, heads, ROWS)
        is_last = tl.arange(0, ROWS) == ROWS - 1
        last_coarse = tl.sum(tl.where(is_last, coarse, 0.0))
        last_fine = tl.sum(tl.where(is_last, fine, 0.0))
        since = scalar_decay(coarse, fine, SPLIT)
        rest = scalar_decay(last_coarse - coarse, last_fine - fine, SPLIT)
    else:
        row = first + tl.expand_dims(tl.arange(0, ROWS), 1 - ROW_AXIS)
        coarse, fine = gate_parts(load_tile(gk, row, end, key, head, heads, keys))
        last_coarse = tl.sum(coarse, axis=ROW_AXIS, keep_dims=True)
        last_fine = tl.sum(fine, axis=ROW_AXIS, keep_dims=True)
        coarse = tl.cumsum(coarse, axis=ROW_AXIS)
        fine = tl.cumsum(fine, axis=ROW_AXIS)
        since = decay(coarse, fine)
        rest = decay(last_coarse - coarse, last_fine - fine)
    whole = tl.exp(tl.minimum(last_coarse.to(tl.float64) + last_fine, LARGEST_EXPONENT))
    kept = tl.where(whole < 0.5, 0.0, 1.0)
    kept_float32 = kept.to(tl.float32)
    lost = (whole - kept).to(tl.float32)
    if INTERPRETED:
        is_step = first + tl.arange(0, ROWS) < end
        is_kept = key < keys
        if gk is not None:
            is_step = tl.expand_dims(is_step, 1 - ROW_AXIS) & is_kept
        else:
            is_kept = first < end
        # Sums beyond it may be of gates that have been clamped.
        probe("c", (coarse, fine), is_step & (coarse > -LARGEST_GATE), chunk_size=ROWS)
        since = probe("decay", since, is_step, chunk_size=ROWS)
        rest = probe("decay", rest, is_step, chunk_size=ROWS)
        lost = probe("kept", lost, is_kept, chunk_size=ROWS)
    return since, rest, kept_float32, lost


@triton.jit
def pair_decays(coarse, fine, KEYS_FIRST: tl.constexpr, SPLIT: tl.constexpr):
    """exp(c_i - c_j) for pairs of a query i and a key j <= i, else 0: [i, j], or [j, i] with KEYS_FIRST. c [R]: in two
    parts."""
    at = tl.arange(0, coarse.shape[0])
    if KEYS_FIRST:
        is_causal = at[:, None] <= at[None, :]
        pair_coarse = coarse[None, :] - coarse[:, None]
        pair_fine = fine[None, :] - fine[:, None]
    else:
        is_causal = at[:, None] >= at[None, :]
        pair_coarse = coarse[:, None] - coarse[None, :]
        pair_fine = fine[:, None] - fine[None, :]
    return scalar_decay(tl.where(is_causal, pair_coarse, float("-inf")), tl.where(is_causal, pair_fine, 0.0), SPLIT)


@triton.jit
def sums_across(pairs_t, through_state, through_dstate, SPLIT: tl.constexpr, ROWS: tl.constexpr):
    """The sum over keys j < t and queries i >= t of pairs_t [j, i], of through_state over the queries, and of
    through_dstate over the keys: [t]."""
    at = tl.arange(0, ROWS)
    is_before = (at[None, :] < at[:, None]).to(tl.float32)
    if SPLIT:
        is_before = is_before.to(tl.bfloat16)
    of_keys_before = dot(is_before, pairs_t, SPLIT)
    is_query = at[None, :] >= at[:, None]
    return tl.sum(tl.where(is_query, of_keys_before + through_state[None, :], through_dstate[None, :]), axis=1)


@triton.jit
def sums_from(x):
    """Of x [K, R]: the sum from each column to the last."""
    return tl.cumsum(x, axis=1, reverse=True)


@triton.jit
def sums_before(x):
    """Of x [K, R]: the sum of the columns before each."""
    return tl.cumsum(x, axis=1) - x


@triton.jit
def channel_scores(rows_tile, source, gk, first, end, key, head, heads, keys, KEYS_FIRST: tl.constexpr):
    """A [i, j] of queries rows_tile [R, K] and the keys in `source`, for the channels `key` [1, K]; with KEYS_FIRST its
    transpose [j, i], of keys and the queries in `source`.

    A pair at a time for each channel, since a product of two decays would have to grow by what it then shrinks.
    """
    ROWS: tl.constexpr = rows_tile.shape[0]
    at = tl.arange(0, ROWS)
    rows_tile = rows_tile.to(tl.float32)
    coarse, fine = gate_parts(load_tile(gk, (first + at)[:, None], end, key, head, heads, keys))
    coarse = tl.cumsum(coarse, axis=0)
    fine = tl.cumsum(fine, axis=0)
    scores = tl.full((ROWS, ROWS), 0.0, tl.float32)
    other_coarse = tl.full((1, rows_tile.shape[1]), 0.0, tl.float32)
    other_fine = tl.full((1, rows_tile.shape[1]), 0.0, tl.float32)
    for nth in range(ROWS):
        other_row = first + nth + tl.arange(0, 1)[:, None]
        other = load_tile(source, other_row, end, key, head, heads, keys).to(tl.float32)
        gate_coarse, gate_fine = gate_parts(load_tile(gk, other_row, end, key, head, heads, keys))
        other_coarse += gate_coarse
        other_fine += gate_fine
        if KEYS_FIRST:
            pair = causal_decay((at <= nth)[:, None], other_coarse - coarse, other_fine - fine)
        else:
            pair = causal_decay((at >= nth)[:, None], coarse - other_coarse, fine - other_fine)
        score = tl.sum(rows_tile * other * pair, axis=1)
        scores += tl.where(at[None, :] == nth, score[:, None], 0.0)
    return scores


@triton.jit
def channel_gradients(
    q, k, gk, q_columns, k_columns, products, products_t, first, end, key, head, heads, keys, ROWS: tl.constexpr
):
    """The parts of dq, dk and dgk [K, R] that are of pairs within the block, given the gradient of q . k without its
    decay as products [i, j] and products_t [j, i]; a pair at a time as in `channel_scores`."""
    at = tl.arange(0, ROWS)
    coarse, fine = gate_parts(load_tile(gk, (first + at)[None, :], end, key, head, heads, keys))
    coarse = tl.cumsum(coarse, axis=1)
    fine = tl.cumsum(fine, axis=1)
    q_columns = q_columns.to(tl.float32)
    k_columns = k_columns.to(tl.float32)
    other_coarse = tl.full((q_columns.shape[0], 1), 0.0, tl.float32)
    other_fine = tl.full((q_columns.shape[0], 1), 0.0, tl.float32)
    dq = tl.zeros_like(q_columns)
    dk = tl.zeros_like(q_columns)
    for nth in range(ROWS):
        other_row = first + nth + tl.arange(0, 1)[None, :]
        q_other = load_tile(q, other_row, end, key, head, heads, keys).to(tl.float32)
        k_other = load_tile(k, other_row, end, key, head, heads, keys).to(tl.float32)
        gate_coarse, gate_fine = gate_parts(load_tile(gk, other_row, end, key, head, heads, keys))
        other_coarse += gate_coarse
        other_fine += gate_fine
        is_other = at[:, None] == nth
        of_key = tl.sum(tl.where(is_other, products_t, 0.0), axis=0)[None, :]
        of_query = tl.sum(tl.where(is_other, products, 0.0), axis=0)[None, :]
        dq += of_key * k_other * causal_decay((at > nth)[None, :], coarse - other_coarse, fine - other_fine)
        dk += of_query * q_other * causal_decay((at < nth)[None, :], other_coarse - coarse, other_fine - fine)
    dgate = sums_from(q_columns * dq - k_columns * dk)
    of_same = tl.sum(tl.where(at[:, None] == at[None, :], products, 0.0), axis=0)[None, :]
    return dq + of_same * k_columns, dk + of_same * q_columns, dgate


def _is_fused(
    p: Problem,
    chunk_size: int,
    fused: bool | None,
    device: torch.device,
    *,
    per_channel: bool,
    backward: bool = False,
    precision: str = "ieee",
) -> bool:
    if fused is not None:
        return check_fused(fused, None)
    processors = torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1
    return chunk_route(p, chunk_size, processors, per_channel=per_channel, backward=backward, precision=precision).fused


def _is_split(p: Problem, precision: str) -> bool:
    """Whether float32 operands of dots are split in two: all but those of IEEE dots, which bfloat16's are not."""
    return p.dtype == "bfloat16" or precision != "ieee"


def _options(block: Block) -> dict[str, Any]:
    return {"num_warps": block.warps, "num_stages": 1, "enable_fp_fusion": True}


def _gate_arguments(gates: Gates) -> dict[str, Any]:
    return {name: _contiguous(gates.get(name)) for name in ("g", "g_gamma", "gk")}


def _size_arguments(p: Problem) -> dict[str, int]:
    return {"sequences": p.n, "steps": p.t, "heads": p.h, "keys": p.k, "values": p.v}


def _contiguous(tensor: Any) -> Any:
    return None if tensor is None else tensor.contiguous()


def _rows(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device, cu_seqlens: Tensor | None) -> Tensor:
    """A tensor for kernels to fill, zero where there may be rows of no sequence."""
    return (torch.empty if cu_seqlens is None else torch.zeros)(shape, dtype=dtype, device=device)


def _states(p: Problem, count: int, device: torch.device) -> Tensor:
    return torch.empty(count, p.h, p.k, p.v, dtype=torch.float32, device=device)


def _cast(tensor: Tensor | None, like: Any) -> Tensor | None:
    return None if tensor is None else tensor.to(like.dtype)


def _copied(state: Tensor | None, into: Tensor | None) -> Tensor | None:
    """`into`, filled with a state (None: zero)."""
    if into is None:
        return None
    return into.zero_() if state is None else into.copy_(state)


def _sum_of_tiles(tiles: Tensor) -> Tensor:
    """The sum over the first axis, in order: `torch.sum` may choose another order for another batch size."""
    first, *others = tiles.unbind()
    for tile in others:
        first += tile
    return first


def _gate_gradient(step: Tensor | None, gate: Any) -> Tensor | None:
    """Of g, g_gamma or gk, from that of each step's gate."""
    if step is None or gate is None:
        return None
    if gate.ndim == 1:
        return step.sum((0, 1), dtype=torch.float64).float()
    return step.to(gate.dtype)
