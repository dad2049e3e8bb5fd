"""The gated linear recurrence step by step in float64: what `simple_gla` and `gla` share.

    S_t = diag(a_t) S_{t-1} + k_t v_tᵀ        o_t = scale · q_tᵀ S_t        a_t = exp(gate_t)

Katharopoulos et al. 2020 (arXiv:2006.16236) without gates; Yang et al. 2023 (arXiv:2312.06635) with one per key
channel; one per head and step is the special case of a gate of width 1. A *scan* computes one sequence (of each of B
batch rows): it takes float64 tensors with the heads first, q and k [B, H, T, K], v and do [B, H, T, V], gate
[B, H, T, K] or [B, H, T, 1], and the state [B, H, K, V] that it starts from.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from cpu_golden import Array
from cpu_golden.gmm import values
from cpu_golden.stages import Stages
from op_arguments.gla import CHUNK_STEP, Gates, Problem, check_backward, check_forward

Forward = Callable[[Array, Array, Array, Array, Array, float], tuple[Array, Array]]
"""A scan (q, k, v, gate, state, scale) -> o [B, H, T, V] and the final state."""
Backward = Callable[[Array, Array, Array, Array, Array, Array, Array, float], tuple[Array, Array, Array, Array, Array]]
"""A scan (q, k, v, do, gate, state, dstate, scale), dstate [B, H, K, V] the gradient of the final state -> dq, dk, dv,
dgate, and the gradient of the state that it starts from."""

BLOCK = 64  # steps between the states that the staged backward pass keeps
SEGMENT = 16  # steps between states that are rounded for the steps to come


class Output(NamedTuple):
    """The result o [B, T, H, V], and the states after the last steps ht [N, H, K, V], None unless asked for."""

    o: Any
    ht: Any


def forward(
    scan: Forward,
    q: Array,
    k: Array,
    v: Array,
    gates: Gates,
    *,
    scale: float | None,
    initial_state: Array | None,
    output_final_state: bool,
    cu_seqlens: Array | None,
    chunk_size: int = CHUNK_STEP,
    reverse: bool = False,
) -> Output:
    """Every sequence by `scan`; arguments as the public functions of `simple_gla` and `gla` take them, checked here."""
    offsets = values(cu_seqlens)
    p = check_forward(
        q,
        k,
        v,
        gates=gates,
        scale=scale,
        initial_state=initial_state,
        cu_seqlens=cu_seqlens,
        offsets=offsets,
        chunk_size=chunk_size,
        exact=True,
    )
    o, states = np.zeros((p.b, p.t, p.h, p.v)), _states(initial_state, p)
    gate = _gate(gates, p)
    for steps, n in _sequences(p, offsets, reverse):
        q_n, k_n, v_n, gate_n = (_heads_first(x[:, steps]) for x in (q, k, v, gate))
        o_n, states[n] = scan(q_n, k_n, v_n, gate_n, states[n], p.scale)
        o[:, steps] = o_n.swapaxes(1, 2)
    return Output(o, states if output_final_state else None)


def backward(
    scan: Backward,
    q: Array,
    k: Array,
    v: Array,
    do: Array,
    gates: Gates,
    *,
    scale: float | None,
    initial_state: Array | None,
    dht: Array | None,
    cu_seqlens: Array | None,
    chunk_size: int = CHUNK_STEP,
    reverse: bool = False,
) -> tuple[Array, Array, Array, Array, Array | None]:
    """dq, dk, dv, dgate [B, T, H, K or 1] and, where there is an initial_state, dh0; as `forward`."""
    offsets = values(cu_seqlens)
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
        offsets=offsets,
        chunk_size=chunk_size,
        exact=True,
    )
    gate, states, dstates = _gate(gates, p), _states(initial_state, p), _states(dht, p)
    dq, dk, dv, dgate = (np.zeros(x.shape) for x in (q, k, v, gate))
    for steps, n in _sequences(p, offsets, reverse):
        q_n, k_n, v_n, do_n, gate_n = (_heads_first(x[:, steps]) for x in (q, k, v, do, gate))
        *grads, dstates[n] = scan(q_n, k_n, v_n, do_n, gate_n, states[n], dstates[n], p.scale)
        dq[:, steps], dk[:, steps], dv[:, steps], dgate[:, steps] = (grad.swapaxes(1, 2) for grad in grads)
    return dq, dk, dv, dgate, None if initial_state is None else dstates


def forward_definition(q: Array, k: Array, v: Array, gate: Array, state: Array, scale: float) -> tuple[Array, Array]:
    """The definition: one step after the other. A `Forward` scan."""
    o = np.zeros(v.shape)
    for t in range(q.shape[2]):
        state = np.exp(gate[..., t, :, None]) * state + k[..., t, :, None] * v[..., t, None, :]
        o[..., t, :] = scale * np.sum(q[..., t, :, None] * state, axis=-2)
    return o, state


def backward_definition(
    q: Array, k: Array, v: Array, do: Array, gate: Array, state: Array, dstate: Array, scale: float
) -> tuple[Array, Array, Array, Array, Array]:
    """The derivative of each line of `forward_definition`, in reverse. A `Backward` scan; all states are kept."""
    states = [state]
    for t in range(q.shape[2]):
        states.append(np.exp(gate[..., t, :, None]) * states[t] + k[..., t, :, None] * v[..., t, None, :])
    dq, dk, dv, dgate = (np.zeros(x.shape) for x in (q, k, v, gate))
    for t in reversed(range(q.shape[2])):
        dstate = dstate + scale * q[..., t, :, None] * do[..., t, None, :]
        dq[..., t, :] = scale * np.sum(states[t + 1] * do[..., t, None, :], axis=-1)
        dk[..., t, :] = np.sum(dstate * v[..., t, None, :], axis=-1)
        dv[..., t, :] = np.sum(dstate * k[..., t, :, None], axis=-2)
        dstate = np.exp(gate[..., t, :, None]) * dstate
        dgate[..., t, :] = sum_to_gate(np.sum(dstate * states[t], axis=-1), gate)
    return dq, dk, dv, dgate, dstate


def recurrent_forward(
    q: Array, k: Array, v: Array, gate: Array, state: Array, scale: float, *, stages: Stages
) -> tuple[Array, Array]:
    """The recurrence as the fused recurrent kernels round it: see `_step`. A `Forward` scan.

    Sites: q, k, v, initial_state, kept_exponent (a step's gate), kept, state, lhs, rhs, partial, acc (of q_tᵀ S_t),
    out.
    """
    q, k, v, state = operands(stages, q=q, k=k, v=v, initial_state=state)
    o, rounded = np.zeros(v.shape), state
    for t in range(q.shape[2]):
        state, rounded = _step(t, k, v, gate, state, stages)
        o[..., t, :] = scale * stages.dot(q[..., t, None, :], rounded)[..., 0, :]
    return stages("out", o), rounded


def recurrent_backward(
    q: Array,
    k: Array,
    v: Array,
    do: Array,
    gate: Array,
    state: Array,
    dstate: Array,
    scale: float,
    *,
    stages: Stages,
) -> tuple[Array, Array, Array, Array, Array]:
    """The derivative of the recurrence as the fused recurrent kernels round it. A `Backward` scan.

    A forward pass keeps the state before every `BLOCK` steps; the states between are computed again.
    Sites: as `recurrent_forward`, do, dht, dstate, dgate.
    """
    q, k, v, do, state, dstate = operands(stages, q=q, k=k, v=v, do=do, initial_state=state, dht=dstate)
    size = q.shape[2]
    checkpoints = []
    for t in range(size):
        if t % BLOCK == 0:
            checkpoints.append(state)
        state, _ = _step(t, k, v, gate, state, stages)
    dq, dk, dv, dgate = (np.zeros(x.shape) for x in (q, k, v, gate))
    for first in reversed(range(0, size, BLOCK)):
        states = [checkpoints.pop()]
        for t in range(first, min(first + BLOCK, size)):
            state, rounded = _step(t, k, v, gate, states[-1], stages)
            states.append(state)
            dq[..., t, :] = scale * stages.dot(rounded, do[..., t, :, None])[..., 0]
        for t in reversed(range(first, min(first + BLOCK, size))):
            dstate = dstate + scale * q[..., t, :, None] * do[..., t, None, :]
            rounded = stages("dstate", dstate)
            dk[..., t, :] = stages.dot(rounded, v[..., t, :, None])[..., 0]
            dv[..., t, :] = stages.dot(k[..., t, None, :], rounded)[..., 0, :]
            dstate = kept_of(gate[..., t, :, None], stages) * (dstate if t % SEGMENT else rounded)
            of_states = stages.dot(dstate[..., None, :], states[t - first][..., None])[..., 0, 0]
            dgate[..., t, :] = stages("dgate", sum_to_gate(of_states, gate))
    out = [stages("out", x) for x in (dq, dk, dv, dgate)]
    return out[0], out[1], out[2], out[3], dstate


def operands(stages: Stages, **tensors: Array) -> list[Array]:
    """What a kernel is given, as it reads it. Sites: their names."""
    return [stages(name, x) for name, x in tensors.items()]


def decay_of(exponent: Array, stages: Stages) -> Array:
    """exp. Sites: exponent, decay."""
    return stages("decay", np.exp(stages("exponent", exponent)))


def kept_of(exponent: Array, stages: Stages) -> Array:
    """exp, of what multiplies a state again and again. Sites: kept_exponent, kept (what is left).

    That is 0 or 1, whichever is nearer, and what is left, which alone is rounded: rounded as a whole, a decay near 1
    would err by much of what a state forgets.
    """
    decayed = np.exp(stages("kept_exponent", exponent))
    whole = np.where(decayed < 0.5, 0.0, 1.0)
    return whole + stages("kept", decayed - whole)


def sum_to_gate(channels: Array, gate: Array) -> Array:
    """The gradient by key channel [..., K], summed where one gate decays all of them."""
    return np.sum(channels, axis=-1, keepdims=True) if gate.shape[-1] == 1 else channels


def _step(t: int, k: Array, v: Array, gate: Array, state: Array, stages: Stages) -> tuple[Array, Array]:
    """The state after step t, as the next step takes it and as it is read, rounded.

    A slow gate keeps hundreds of steps in a state, and hundreds of roundings: kernels carry along what a rounding has
    lost, and drop it every `SEGMENT` steps.
    """
    after = kept_of(gate[..., t, :, None], stages) * state + k[..., t, :, None] * v[..., t, None, :]
    rounded = stages("state", after)
    return (after if (t + 1) % SEGMENT else rounded), rounded


def _sequences(p: Problem, offsets: Sequence[int] | None, reverse: bool) -> Iterator[tuple[Array, slice]]:
    """Of every sequence (or of all rows of the batch at once) its steps in the order of time, and its states."""
    order = -1 if reverse else 1
    if offsets is None:
        yield np.arange(p.t)[::order], slice(None)
        return
    for n in range(p.n):
        yield np.arange(offsets[n], offsets[n + 1])[::order], slice(n, n + 1)


def _gate(gates: Gates, p: Problem) -> Array:
    """The log decay of every step, [B, T, H, K], or [B, T, H, 1] where all channels have the same."""
    total = np.zeros((p.b, p.t, p.h, 1))
    for name, gate in gates.items():
        if gate is not None:
            channels = np.asarray(gate, np.float64)
            total = total + (channels if name == "gk" else channels[..., None])
    return total


def _states(given: Array | None, p: Problem) -> Array:
    return np.zeros((p.n, p.h, p.k, p.v)) if given is None else given.astype(np.float64)


def _heads_first(x: Array) -> Array:
    return np.ascontiguousarray(x.swapaxes(1, 2), dtype=np.float64)
