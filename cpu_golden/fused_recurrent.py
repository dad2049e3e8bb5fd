"""The gated linear recurrence step by step in float64: what `simple_gla` and `gla` share.

    S_t = diag(a_t) S_{t-1} + k_t v_tᵀ        o_t = scale · q_tᵀ S_t        a_t = exp(gate_t)

Katharopoulos et al. 2020 (arXiv:2006.16236) without gates; Yang et al. 2023 (arXiv:2312.06635) with one per key
channel; one per head and step is the special case of a gate of width 1. What a scan
is: `_lib/scans.py`.
"""

import numpy as np

from cpu_golden import Array
from cpu_golden._lib.decays import decayed, sum_to_gate
from cpu_golden._lib.scans import Sequence
from cpu_golden.stages import Stages, exact

BLOCK = 64  # steps between the states that the staged backward pass keeps
SEGMENT = 16  # steps between states that are rounded for the steps to come


def recurrent_forward(x: Sequence, *, stages: Stages = exact) -> tuple[Array, Array]:
    """The recurrence as the fused recurrent kernels round it: see `_step`. A `Forward` scan.

    Sites: q, k, v, initial_state, kept_exponent (a step's gate), kept, written (k_t v_tᵀ), change, state, lhs, rhs,
    partial, acc (of q_tᵀ S_t), out.
    """
    q, k, v, gate, state, scale, *_ = x.read(stages)
    o, rounded = np.zeros(v.shape), state
    for t in range(q.shape[2]):
        state, rounded = _step(t, k, v, gate, state, stages)
        o[..., t, :] = scale * stages.dot(q[..., t, None, :], rounded)[..., 0, :]
    return stages("out", o), rounded


def recurrent_backward(x: Sequence, *, stages: Stages = exact) -> tuple[Array, Array, Array, Array, Array]:
    """The derivative of the recurrence as the fused recurrent kernels round it. A `Backward` scan.

    A forward pass keeps the state before every `BLOCK` steps; the states between are computed again.
    Sites: as `recurrent_forward`, do, dht, dwritten, dstate, dgate.
    """
    q, k, v, gate, state, scale, do, dstate = x.read(stages)
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
            dstate = dstate + stages("dwritten", scale * q[..., t, :, None] * do[..., t, None, :])
            rounded = stages("dstate", dstate)
            dk[..., t, :] = stages.dot(rounded, v[..., t, :, None])[..., 0]
            dv[..., t, :] = stages.dot(k[..., t, None, :], rounded)[..., 0, :]
            dstate = decayed(gate[..., t, :, None], dstate if t % SEGMENT else rounded, 0.0, stages)
            of_states = stages.dot(dstate[..., None, :], states[t - first][..., None])[..., 0, 0]
            dgate[..., t, :] = stages("dgate", sum_to_gate(of_states, gate))
    out = [stages("out", x) for x in (dq, dk, dv, dgate)]
    return out[0], out[1], out[2], out[3], dstate


def forward_definition(x: Sequence) -> tuple[Array, Array]:
    """The definition: one step after the other. A `Forward` scan."""
    q, k, v, gate, state, scale, *_ = x
    o = np.zeros(v.shape)
    for t in range(q.shape[2]):
        state = np.exp(gate[..., t, :, None]) * state + k[..., t, :, None] * v[..., t, None, :]
        o[..., t, :] = scale * np.sum(q[..., t, :, None] * state, axis=-2)
    return o, state


def backward_definition(x: Sequence) -> tuple[Array, Array, Array, Array, Array]:
    """The derivative of each line of `forward_definition`, in reverse. A `Backward` scan; all states are kept."""
    q, k, v, gate, state, scale, do, dstate = x
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


def _step(t: int, k: Array, v: Array, gate: Array, state: Array, stages: Stages) -> tuple[Array, Array]:
    """The state after step t, as the next step takes it and as it is read, rounded.

    A slow gate keeps hundreds of steps in a state, and hundreds of roundings: kernels carry along what a rounding has
    lost, and drop it every `SEGMENT` steps.
    """
    written = stages("written", k[..., t, :, None] * v[..., t, None, :])
    after = decayed(gate[..., t, :, None], state, written, stages)
    rounded = stages("state", after)
    return (after if (t + 1) % SEGMENT else rounded), rounded
