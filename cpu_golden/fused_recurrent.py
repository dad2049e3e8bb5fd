"""The gated linear recurrence step by step in float64: what `simple_gla` and `gla` share.

    S_t = diag(a_t) S_{t-1} + k_t v_tᵀ        o_t = scale · q_tᵀ S_t        a_t = exp(gate_t)

Katharopoulos et al. 2020 (arXiv:2006.16236) without gates; Yang et al. 2023 (arXiv:2312.06635) with one per key
channel; one per head and step is the special case of a gate of width 1. What a scan
is: `_lib/sequences.py`.
"""

import numpy as np

from cpu_golden import Array
from cpu_golden._lib.decays import decayed, kept_of, sum_to_gate
from cpu_golden._lib.sequences import Sequence, loaded
from cpu_golden.stages import Stages, exact, folded_sum

BLOCK = 64  # steps between the states that the staged backward pass keeps
SEGMENT = 16  # steps between states that are rounded for the steps to come


def recurrent_forward(x: Sequence, *, stages: Stages = exact) -> tuple[Array, Array]:
    """The recurrence as the fused recurrent kernels round it: see `_step`. A `Forward` scan.

    Sites: q, k, v, initial_state, kept_exponent (a step's gate), kept, lost, written (k_t v_tᵀ), change, state, partial
    and acc (products of q_t and S_t, and their sums as `folded_sum` adds), out.
    """
    q, k, v, gate, state, scale, *_ = loaded(x, stages)
    o, rounded = np.zeros(v.shape), state
    for t in range(q.shape[-2]):
        state, rounded = _step(t, k, v, gate, state, stages)
        o[..., t, :] = scale * _summed(q[..., t, :, None] * rounded, -2, stages)
    return stages("out", o), rounded


def recurrent_backward(x: Sequence, *, stages: Stages = exact) -> tuple[Array, Array, Array, Array, Array]:
    """The derivative of the recurrence as the fused recurrent kernels round it. A `Backward` scan.

    A forward pass keeps the state before every `BLOCK` steps; the states between are computed again. The gate of a step
    decays the gradient of the state together with what the step before adds to it.
    Sites: as `recurrent_forward`, do, dht, dwritten, dchange, dstate, decayed (a state), dgate.
    """
    q, k, v, gate, state, scale, _, do, dstate = loaded(x, stages)
    size = q.shape[-2]
    checkpoints = []
    for t in range(size):
        if t % BLOCK == 0:
            checkpoints.append(state)
        state, _ = _step(t, k, v, gate, state, stages)
    dq, dk, dv, dgate = (np.zeros(x.shape) for x in (q, k, v, gate))
    following, back = None, stages.renamed(change="dchange")
    for first in reversed(range(0, size, BLOCK)):
        states = [state := checkpoints.pop()]
        for t in range(first, min(first + BLOCK, size)):
            state, rounded = _step(t, k, v, gate, state, stages)
            states.append(rounded)
            dq[..., t, :] = scale * _summed(rounded * do[..., t, None, :], -1, stages)
        for t in reversed(range(first, min(first + BLOCK, size))):
            written = stages("dwritten", scale * q[..., t, :, None] * do[..., t, None, :])
            dstate = dstate + written if following is None else decayed(following, dstate, written, back)
            rounded = stages("dstate", dstate)
            dk[..., t, :] = _summed(rounded * v[..., t, None, :], -1, stages)
            dv[..., t, :] = _summed(k[..., t, :, None] * rounded, -2, stages)
            following = gate[..., t, :, None]
            before = stages("decayed", kept_of(following, stages) * states[t - first])
            dgate[..., t, :] = sum_to_gate(_summed(rounded * before, -1, stages), gate, stages)
            if t % SEGMENT == 0:
                dstate, following = decayed(following, rounded, 0.0, back), None
    out = [stages("out", x) for x in (dq, dk, dv, dgate)]
    return out[0], out[1], out[2], out[3], dstate


def forward_definition(x: Sequence) -> tuple[Array, Array]:
    """The definition: one step after the other. A `Forward` scan."""
    q, k, v, gate, state, scale, *_ = x
    o = np.zeros(v.shape)
    for t in range(q.shape[-2]):
        state = np.exp(gate[..., t, :, None]) * state + k[..., t, :, None] * v[..., t, None, :]
        o[..., t, :] = scale * np.sum(q[..., t, :, None] * state, axis=-2)
    return o, state


def backward_definition(x: Sequence) -> tuple[Array, Array, Array, Array, Array]:
    """The derivative of each line of `forward_definition`, in reverse. A `Backward` scan; all states are kept."""
    q, k, v, gate, state, scale, _, do, dstate = x
    states = [state]
    for t in range(q.shape[-2]):
        states.append(np.exp(gate[..., t, :, None]) * states[t] + k[..., t, :, None] * v[..., t, None, :])
    dq, dk, dv, dgate = (np.zeros(x.shape) for x in (q, k, v, gate))
    for t in reversed(range(q.shape[-2])):
        dstate = dstate + scale * q[..., t, :, None] * do[..., t, None, :]
        dq[..., t, :] = scale * np.sum(states[t + 1] * do[..., t, None, :], axis=-1)
        dk[..., t, :] = np.sum(dstate * v[..., t, None, :], axis=-1)
        dv[..., t, :] = np.sum(dstate * k[..., t, :, None], axis=-2)
        dstate = np.exp(gate[..., t, :, None]) * dstate
        dgate[..., t, :] = sum_to_gate(np.sum(dstate * states[t], axis=-1), gate)
    return dq, dk, dv, dgate, dstate


def _summed(products: Array, axis: int, stages: Stages) -> Array:
    """Over an axis, registers before what they hold: neighbours that cancel do so at the end."""
    terms = np.moveaxis(stages("partial", products), axis, -1)
    return folded_sum(terms, stages.renamed(sum="acc"))[..., 0]


def _step(t: int, k: Array, v: Array, gate: Array, state: Array, stages: Stages) -> tuple[Array, Array]:
    """The state after step t, as the next step takes it and as it is read, rounded.

    A slow gate keeps hundreds of steps in a state, and hundreds of roundings: kernels carry along what a rounding has
    lost, and drop it every `SEGMENT` steps.
    """
    written = stages("written", k[..., t, :, None] * v[..., t, None, :])
    after = decayed(gate[..., t, :, None], state, written, stages)
    rounded = stages("state", after)
    return (after if (t + 1) % SEGMENT else rounded), rounded
