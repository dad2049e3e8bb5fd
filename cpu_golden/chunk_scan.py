"""The gated linear recurrence in chunks, in float64 and staged: what `simple_gla` and `gla` share.

With c the sum of the gates since the chunk began (its own step included) and S the state before it, for the rows i ≥ j
of one chunk

    A = (q_i · exp(c_i - c_j)) k_jᵀ        o = scale · (A v + (q · exp(c)) S)
    S' = exp(c_last) S + (k · exp(c_last - c))ᵀ v

(Yang et al. 2023, arXiv:2312.06635, section 4), and for the gradients, dS' that of S',

    dA = scale · do vᵀ                     dv = scale · Aᵀ do + (k · exp(c_last - c)) dS'
    dq = dA (k · exp(c_i - c_j)) + r       r = scale · exp(c) · do Sᵀ
    dk = dAᵀ (q · exp(c_i - c_j)) + w      w = exp(c_last - c) · v dS'ᵀ
    dS = exp(c_last) dS' + scale · (q · exp(c))ᵀ do

A gate decays what is written before its step and read at it or later. Of these pairs its gradient is the sum, each
found where it is: both in the chunk (A · dA), written before it (q · r, of the steps from t on), read after it (k · w,
of the steps before t), or both, exp(c_last) Σ_V S · dS'. Exponents are differences of c between two rows in the order
of time, so they are the logarithms of decays that the recurrence itself has, and only those of pairs i ≥ j are taken.
"""

import numpy as np

from cpu_golden import Array
from cpu_golden._lib.chunks import (
    chunks_of,
    gate_gradient,
    gate_sums,
    in_whole_chunks,
    next_state,
    of_keys,
    pair_gradients,
    products_added,
    read_through,
    scores,
    sums_for_pairs,
    written_by,
)
from cpu_golden._lib.decays import decay_of, decayed, kept_of
from cpu_golden._lib.sequences import Sequence, loaded
from cpu_golden.stages import Stages, exact


def chunk_forward(x: Sequence, *, chunk_size: int = 64, stages: Stages = exact) -> tuple[Array, Array]:
    """A `Forward` scan of `_lib/sequences.py`, chunk by chunk.

    Sites: q, k, v, initial_state, c (sum of the gates since the chunk began; by halves every sum), pair_gate (a gate
    that all channels have, where it is summed between two rows), exponent, decay (exp of it),
    kept_exponent and kept (of what decays a state, the latter less 1 or 0), decayed (an operand of a dot times its
    decay), read (a dot times a decay), product and pairs (what is decayed one by one, and the running sums of that), A
    (the decayed scores), lost, change and state (what decays of a state, what is added to it, and the sum), sum (of
    parts of a result), of every dot lhs, rhs, partial and acc (see `Stages.dot`), and out (o).
    """
    steps, size = x.q.shape[-2], stages.chunk_size or chunk_size
    q, k, v, gate, state, scale, *_ = in_whole_chunks(loaded(x, stages), size)
    o = np.zeros(v.shape)
    for rows in chunks_of(q, size):
        q_c, k_c, v_c = (x[..., rows, :] for x in (q, k, v))
        sums = gate_sums(gate[..., rows, :], stages)
        a = scores(q_c, k_c, sums_for_pairs(gate[..., rows, :], sums, stages), stages)
        of_state = read_through(q_c, decay_of(sums.until, stages), state, stages)
        o[..., rows, :] = scale * stages("sum", stages.dot(a, v_c) + of_state)
        state = next_state(k_c, v_c, sums, state, stages)
    return stages("out", o[..., :steps, :]), state


def chunk_backward(
    x: Sequence, *, chunk_size: int = 64, stages: Stages = exact
) -> tuple[Array, Array, Array, Array, Array]:
    """A `Backward` scan of `_lib/sequences.py`, chunk by chunk.

    Sites: those of `chunk_forward`, do, dht, dstate, dA, terms (what is summed to the gradient of a gate), pair_terms
    (those of scores, where all channels have one gate), up_to (sums that a row's own term is taken from), dgate (each
    of the other sums), out (each of the gradients).
    """
    steps, size = x.q.shape[-2], stages.chunk_size or chunk_size
    q, k, v, gate, state, scale, _, do, dstate = in_whole_chunks(loaded(x, stages), size)
    # What goes from chunk to chunk comes first, so that sites are in the order in which one acts on another.
    chunks = list(chunks_of(q, size))
    states, dstates = [], []
    for rows in chunks:
        states.append(state)
        state = next_state(k[..., rows, :], v[..., rows, :], gate_sums(gate[..., rows, :], stages), state, stages)
    for rows in reversed(chunks):
        dstates.append(dstate)
        dstate = _previous_dstate(q[..., rows, :], do[..., rows, :], gate[..., rows, :], dstate, scale, stages)
    dq, dk, dv, dgate = (np.zeros(x.shape) for x in (q, k, v, gate))
    for rows, state_c, dstate_c in zip(chunks, states, reversed(dstates), strict=True):
        q_c, k_c, v_c, do_c = (x[..., rows, :] for x in (q, k, v, do))
        sums = gate_sums(gate[..., rows, :], stages)
        of_pairs = sums_for_pairs(gate[..., rows, :], sums, stages)
        from_start, to_end = decay_of(sums.until, stages), decay_of(sums.after, stages)
        kept = kept_of(sums.whole, stages)
        tiles = list(chunks_of(q.mT, stages.channels)) if stages.channels else [slice(None)]
        a = [scores(q_c[..., keys], k_c[..., keys], of_pairs.of_keys(keys), stages) for keys in tiles]
        da = np.tril(scale * stages.dot(do_c, v_c.mT))
        if gate.shape[-1] > 1 and stages.sub_block == 1:  # each row's own score is no part of a dot
            same = np.arange(da.shape[-1])
            da[..., same, same] = scale * products_added(do_c * v_c, stages)
        da = stages("dA", da)
        read = stages("read", scale * from_start * stages.dot(do_c, state_c.mT))
        written = stages("read", to_end * stages.dot(v_c, dstate_c.mT))
        dq[..., rows, :], dk[..., rows, :], dpairs = pair_gradients(a, da, q_c, k_c, of_pairs, stages)
        dq[..., rows, :] += read
        dk[..., rows, :] += written
        for n, (a_n, keys) in enumerate(zip(a, tiles, strict=True)):
            of_scores = stages("sum", scale * stages.dot(a_n.mT, do_c))
            of_state = read_through(k_c[..., keys], of_keys(to_end, keys), dstate_c[..., keys, :], stages)
            tile = stages("sum", of_scores + of_state)
            dv[..., rows, :] = stages("sum", dv[..., rows, :] + tile) if n else tile
        dgate[..., rows, :] = gate_gradient(dpairs, q_c * read, k_c * written, state_c * dstate_c, kept, stages)
    out = [stages("out", x[..., :steps, :]) for x in (dq, dk, dv, dgate)]
    return out[0], out[1], out[2], out[3], dstate


def _previous_dstate(q: Array, do: Array, gate: Array, dstate: Array, scale: float, stages: Stages) -> Array:
    sums = gate_sums(gate, stages)
    written = written_by(q, do, scale * decay_of(sums.until, stages), stages)
    return stages("dstate", decayed(sums.whole, dstate, written, stages))
