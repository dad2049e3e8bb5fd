"""The gated delta rule step by step in float64: what `gated_delta_rule` and `kda` share.

    S ← diag(exp(g_t)) S        v_new_t = beta_t (v_t - Sᵀ k_t)        S ← S + k_t v_new_tᵀ        o_t = scale · Sᵀ q_t

(Yang et al. 2024, arXiv:2412.06464; one gate per key channel: Kimi Linear, arXiv:2510.26692.) The state decays before
the error is formed. One gate per head is the special case of a gate of width 1.
"""

import numpy as np

from cpu_golden import Array
from cpu_golden._lib.decays import decayed, kept_of, sum_to_gate
from cpu_golden._lib.delta import DeltaSequenceGrads
from cpu_golden._lib.sequences import Sequence, loaded
from cpu_golden.chunk_delta_rule import chunk_backward, chunk_forward
from cpu_golden.stages import Stages, exact, tree_sum


def recurrent_forward(x: Sequence, *, stages: Stages = exact) -> tuple[Array, Array]:
    """The recurrence as the fused recurrent kernels round it: the decay meets the key, not the state that it reads.

    Stages: chunk_size, and where it is given all as `chunk_delta_rule.chunk_forward`, in chunks of so many steps.
    Sites: q, k, v, beta, initial_state, kept_exponent (a step's gate), kept, decayed (a decayed key), partial and acc
    (products of a vector and a state, and their sums in pairs), error (v_t less what the state recalls), v_new, written
    (k_t v_new_tᵀ), lost, change, h (the state after each step), o, ht.
    """
    if stages.chunk_size:
        return chunk_forward(x, stages=stages)
    q, k, v, gate, state, scale, beta, *_ = loaded(x, stages)
    o = np.zeros(v.shape)
    for t in range(q.shape[-2]):
        state, *_ = _step(t, k, v, gate, beta, state, stages)
        o[..., t, :] = scale * _summed(q[..., t, :, None] * state, -2, stages)
    return stages("o", o), stages("ht", state)


def recurrent_backward(x: Sequence, *, stages: Stages = exact) -> DeltaSequenceGrads:
    """The derivative of the recurrence as the fused recurrent kernels round it. A `Backward` scan.

    Stages: as `recurrent_forward`, with `chunk_delta_rule.chunk_backward`.
    Sites: as `recurrent_forward` without o and ht, do, dht, dwritten (scale q_t do_tᵀ), dh (the gradient of the state
    after each step), derror, dchange (what the gradient of the error takes from dh), of_beta, dgate, and the results
    dv, dg, dbeta.
    """
    if stages.chunk_size:
        return chunk_backward(x, stages=stages)
    q, k, v, gate, state, scale, beta, do, dstate = loaded(x, stages)
    states, errors, written = [state], np.zeros(v.shape), np.zeros(v.shape)
    for t in range(q.shape[-2]):
        state, errors[..., t, :], written[..., t, :] = _step(t, k, v, gate, beta, state, stages)
        states.append(state)
    dq, dk, dv, dgate, dbeta = (np.zeros(part.shape) for part in (q, k, v, gate, beta))
    for t in reversed(range(q.shape[-2])):
        k_t, do_t = k[..., t, :, None], do[..., t, None, :]
        dq[..., t, :] = scale * _summed(states[t + 1] * do_t, -1, stages)
        dstate = stages("dh", dstate + stages("dwritten", scale * q[..., t, :, None] * do_t))
        dv_new = _summed(k_t * dstate, -2, stages)
        dv[..., t, :] = derror = stages("derror", beta[..., t, :] * dv_new)
        dbeta[..., t, :] = _to_one(dv_new * errors[..., t, :], stages)
        dstate_k = _summed(dstate * written[..., t, None, :], -1, stages)
        kept = kept_of(gate[..., t, :, None], stages)
        recalled = _summed(states[t] * derror[..., None, :], -1, stages)
        dk[..., t, :] = stages("decayed", dstate_k - stages("decayed", kept[..., 0] * recalled))
        through = stages("dchange", dstate - stages("dwritten", k_t * derror[..., None, :]))
        of_channels = stages("dgate", kept[..., 0] * _summed(states[t] * through, -1, stages))
        dgate[..., t, :] = sum_to_gate(of_channels, gate, stages)
        dstate = stages("dh", decayed(gate[..., t, :, None], through, 0.0, stages))
    of_gate, of_beta = stages("dg", dgate), stages("dbeta", dbeta)
    return DeltaSequenceGrads(dq, dk, stages("dv", dv), of_gate, of_beta, dstate)


def forward_definition(x: Sequence) -> tuple[Array, Array]:
    """The definition: one step after the other. A `Forward` scan."""
    q, k, v, gate, state, scale, beta, *_ = x
    o = np.zeros(v.shape)
    for t in range(q.shape[-2]):
        state = np.exp(gate[..., t, :, None]) * state
        error = v[..., t, :] - np.sum(k[..., t, :, None] * state, axis=-2)
        state = state + k[..., t, :, None] * (beta[..., t, :] * error)[..., None, :]
        o[..., t, :] = scale * np.sum(q[..., t, :, None] * state, axis=-2)
    return o, state


def backward_definition(x: Sequence) -> DeltaSequenceGrads:
    """The derivative of each line of `forward_definition`, in reverse. A `Backward` scan; all states are kept."""
    q, k, v, gate, state, scale, beta, do, dstate = x
    kept, errors = [], []  # states after the decay, and errors
    states = [state]
    for t in range(q.shape[-2]):
        kept.append(np.exp(gate[..., t, :, None]) * states[t])
        errors.append(v[..., t, :] - np.sum(k[..., t, :, None] * kept[t], axis=-2))
        states.append(kept[t] + k[..., t, :, None] * (beta[..., t, :] * errors[t])[..., None, :])
    dq, dk, dv, dgate, dbeta = (np.zeros(part.shape) for part in (q, k, v, gate, beta))
    for t in reversed(range(q.shape[-2])):
        dq[..., t, :] = scale * np.sum(states[t + 1] * do[..., t, None, :], axis=-1)
        dstate = dstate + scale * q[..., t, :, None] * do[..., t, None, :]
        dwritten = np.sum(dstate * k[..., t, :, None], axis=-2)
        dk[..., t, :] = np.sum(dstate * (beta[..., t, :] * errors[t])[..., None, :], axis=-1)
        dbeta[..., t, :] = np.sum(dwritten * errors[t], axis=-1, keepdims=True)
        derror = beta[..., t, :] * dwritten
        dv[..., t, :] = derror
        dk[..., t, :] -= np.sum(kept[t] * derror[..., None, :], axis=-1)
        dkept = dstate - k[..., t, :, None] * derror[..., None, :]
        dgate[..., t, :] = sum_to_gate(np.sum(dkept * kept[t], axis=-1), gate)
        dstate = np.exp(gate[..., t, :, None]) * dkept
    return DeltaSequenceGrads(dq, dk, dv, dgate, dbeta, dstate)


def _step(
    t: int, k: Array, v: Array, gate: Array, beta: Array, state: Array, stages: Stages
) -> tuple[Array, Array, Array]:
    """The state after step t, the error of what the state before recalled, and what was written."""
    exponent = gate[..., t, :, None]
    key = stages("decayed", kept_of(exponent, stages) * k[..., t, :, None])
    error = stages("error", v[..., t, :] - _summed(key * state, -2, stages))
    v_new = stages("v_new", beta[..., t, :] * error)
    written = stages("written", k[..., t, :, None] * v_new[..., None, :])
    return stages("h", decayed(exponent, state, written, stages)), error, v_new


def _summed(products: Array, axis: int, stages: Stages) -> Array:
    """Over an axis, in pairs."""
    terms = np.moveaxis(stages("partial", products), axis, -1)
    return tree_sum(terms, stages.renamed(sum="acc"))[..., 0]


def _to_one(terms: Array, stages: Stages) -> Array:
    return tree_sum(stages("of_beta", terms), stages.renamed(sum="of_beta"))
