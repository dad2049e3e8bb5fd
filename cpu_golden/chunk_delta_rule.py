"""The gated delta rule in chunks, in float64 and staged: what `gated_delta_rule` and `kda` share.

With c the sum of the gates since the chunk began (its own step included), D_ij = exp(c_i - c_j), and S the state before
it, for the rows i > j (A) and i ≥ j (P) of one chunk

    A = beta_i (k_i · D_ij) k_jᵀ           T = (I + A)⁻¹          P = (q_i · D_ij) k_jᵀ
    v_new = T beta (v - (k · exp(c)) S)    o = scale · (P v_new + (q · exp(c)) S)
    S' = exp(c_last) S + (k · exp(c_last - c))ᵀ v_new

(Yang et al. 2024, arXiv:2412.06464; Kimi Linear, arXiv:2510.26692): v_new is what the recurrence writes. For the
gradients, with dS' that of S',

    dv_new = scale · Pᵀ do + (k · exp(c_last - c)) dS'     dupdate = Tᵀ dv_new      dv = beta · dupdate
    dP = scale · tril(do v_newᵀ)           dA = -strict_lower(dupdate v_newᵀ)
    dS = exp(c_last) dS' + scale · (q · exp(c))ᵀ do - (k · exp(c))ᵀ dv

The same with the inverse applied first (Stages.wy), as fla has it: u = T (beta v), w = T (beta k · exp(c)),
v_new = u - w S, du = dv_new, dw = -dv_new Sᵀ, dT = du (beta v)ᵀ + dw (beta k · exp(c))ᵀ, dA = -strict_lower(Tᵀ dT Tᵀ).
T comes from substitution (`_lib/triangular.py`). The gradient of a gate is the sum of all products that it decays, as
in `chunk_scan`.
"""

from dataclasses import replace
from typing import NamedTuple

import numpy as np

from cpu_golden import Array
from cpu_golden._lib.chunks import (
    GateSums,
    chunks_of,
    gate_gradient,
    gate_sums,
    in_whole_chunks,
    next_state,
    pair_gradients,
    read_through,
    scores,
    sums_for_pairs,
    written_by,
)
from cpu_golden._lib.decays import decay_of, decayed, kept_of
from cpu_golden._lib.delta import DeltaSequenceGrads
from cpu_golden._lib.sequences import Sequence, loaded
from cpu_golden._lib.triangular import inverse
from cpu_golden.stages import Stages, exact, tree_sum


class Solved(NamedTuple):
    """A chunk's own tensors, the state before it, and what follows from them up to v_new."""

    q: Array
    k: Array
    v: Array
    beta: Array
    sums: GateSums
    of_pairs: GateSums  # as `sums_for_pairs` has them
    from_start: Array
    state: Array
    raw: Array  # A without beta
    t: Array
    error: Array  # v less what the state recalls; with wy nothing of the state is taken from v
    u: Array
    w: Array
    v_new: Array


def chunk_forward(x: Sequence, *, chunk_size: int = 64, stages: Stages = exact) -> tuple[Array, Array]:
    """A `Forward` scan of `_lib/sequences.py`, chunk by chunk.

    Stages: depth, chunk_size, sub_block, kept_whole, values_decayed, whole_passes, wy, inverse, refined, and those of
    `triangular.inverse`.
    Sites: q, k, v, beta, initial_state, c, pair_gate, exponent, decay, kept_exponent, kept, lost, change, decayed,
    read, product, pairs, sum and those of `Stages.dot` as in `chunk_scan.chunk_forward`; raw (the decayed scores of
    keys, before beta), A, those of `inverse` (T), recalled (what the state has for a key), error (v less that), update
    (beta times that), rest (what is left of an update that is refined), v_new; with wy u and w instead of the former
    three; h (the state after each chunk), P, o, ht.
    """
    steps, size = x.q.shape[-2], stages.chunk_size or chunk_size
    x = in_whole_chunks(loaded(x, stages), size)
    o, state = np.zeros(x.v.shape), x.state
    for rows in chunks_of(x.q, size):
        s = _solved(x, rows, state, stages)
        p = _scores(s.q, s.k, s.of_pairs, "P", stages)
        of_state = read_through(s.q, s.from_start, state, _whole(stages))
        o[..., rows, :] = x.scale * stages("sum", stages.dot(p, s.v_new) + of_state)
        state = next_state(s.k, s.v_new, s.sums, state, stages.renamed(state="h"))
    return stages("o", o[..., :steps, :]), stages("ht", state)


def chunk_backward(x: Sequence, *, chunk_size: int = 64, stages: Stages = exact) -> DeltaSequenceGrads:
    """A `Backward` scan of `_lib/sequences.py`, chunk by chunk.

    Stages: as `chunk_forward`. Sites: those of `chunk_forward` without o and ht, do, dht, dv_new, dupdate, dh (the
    gradient of the state before each chunk), dP, dA, draw (that of A without beta), with wy du, dw and dT; terms,
    pair_terms, up_to and dgate as in `chunk_scan.chunk_backward`; of_beta (what is summed to dbeta, and the sums), and
    the results dv, dg, dbeta; dq and dk of each value head are sums at `sum`.
    """
    steps, size = x.q.shape[-2], stages.chunk_size or chunk_size
    x = in_whole_chunks(loaded(x, stages), size)
    state, scale, dstate = x.state, x.scale, x.dstate
    chunks, solved = list(chunks_of(x.q, size)), []
    for rows in chunks:
        s = _solved(x, rows, state, stages)
        solved.append(s)
        state = next_state(s.k, s.v_new, s.sums, state, stages.renamed(state="h"))
    dq, dk, dv, dgate, dbeta = (np.zeros(part.shape) for part in (x.q, x.k, x.v, x.gate, x.beta))
    for rows, s in zip(reversed(chunks), reversed(solved), strict=True):
        do_c = x.do[..., rows, :]
        to_end, kept = decay_of(s.sums.after, stages), kept_of(s.sums.whole, stages)
        p = _scores(s.q, s.k, s.of_pairs, "P", stages)
        of_scores = stages("sum", scale * stages.dot(p.mT, do_c))
        dv_new = stages("dv_new", of_scores + read_through(s.k, to_end, dstate, _whole(stages)))
        dv[..., rows, :], of_beta, da, of_read = _through_inverse(s, dv_new, stages)
        read = stages("read", scale * s.from_start * _whole(stages).dot(do_c, s.state.mT))
        written = stages("read", to_end * _whole(stages).dot(s.v_new, dstate.mT))
        dp = stages("dP", np.tril(scale * stages.dot(do_c, s.v_new.mT)))
        draw = stages("draw", s.beta * da)
        dq_p, dk_p, pairs_p = pair_gradients([p], dp, s.q, s.k, s.of_pairs, stages)
        dk_i, dk_j, pairs_a = pair_gradients([s.raw], draw, s.k, s.k, s.of_pairs, stages)
        dq[..., rows, :] = stages("sum", dq_p + read)
        dk[..., rows, :] = stages("sum", stages("sum", stages("sum", dk_p + written) + of_read) + dk_i + dk_j)
        dbeta[..., rows, :] = stages("of_beta", of_beta + _summed(da * s.raw, stages))
        of_rows = stages("terms", s.q * read) + stages("terms", s.k * of_read)
        pairs = stages("dgate", pairs_p + pairs_a)
        dgate[..., rows, :] = gate_gradient(pairs, of_rows, s.k * written, s.state * dstate, kept, stages)
        dstate = _previous_dstate(s, do_c, dv_new, dv[..., rows, :], scale, dstate, stages)
    dq, dk, dv, dgate, dbeta = (x[..., :steps, :] for x in (dq, dk, dv, dgate, dbeta))
    return DeltaSequenceGrads(dq, dk, dv, stages("dg", dgate), stages("dbeta", dbeta), dstate)


def _solved(x: Sequence, rows: slice, state: Array, stages: Stages) -> Solved:
    q, k, v, gate, beta = (tensor[..., rows, :] for tensor in (x.q, x.k, x.v, x.gate, x.beta))
    sums = gate_sums(gate, stages)
    from_start = decay_of(sums.until, stages)
    of_pairs = sums_for_pairs(gate, sums, stages)
    raw = np.tril(_scores(k, k, of_pairs, "raw", stages), -1)
    t = (stages.inverse or inverse)(stages("A", beta * raw), stages)
    if stages.wy:
        u = stages("u", stages.dot(t, stages("decayed", beta * v)))
        w = stages("w", stages.dot(t, stages("decayed", beta * (from_start * k))))
        v_new = stages("v_new", u - stages.dot(w, state))
        return Solved(q, k, v, beta, sums, of_pairs, from_start, state, raw, t, v, u, w, v_new)
    whole = _whole(stages)
    error = stages("error", v - read_through(k, from_start, state, whole.renamed(read="recalled")))
    update = stages("update", beta * error)
    v_new = whole.dot(t, update)
    if stages.refined:
        v_new = _corrected(v_new, t, update, stages("rest", beta * whole.dot(raw, v_new)), stages)
    v_new = stages("v_new", v_new)
    return Solved(q, k, v, beta, sums, of_pairs, from_start, state, raw, t, error, v, k, v_new)


def _corrected(x: Array, t: Array, given: Array, product: Array, stages: Stages) -> Array:
    """x of (I + A) x = given, or of its transpose, less what T, rounded, has lost of it; product: A x. Site: rest."""
    return x + _whole(stages).dot(t, stages("rest", stages("rest", given - x) - product))


def _whole(stages: Stages) -> Stages:
    """The stages of dots with T, which magnifies errors, and of those that read a state.

    Sites: with whole_passes whole_lhs and whole_rhs for lhs and rhs.
    """
    if stages.whole_passes is None:
        return stages
    return replace(stages.renamed(lhs="whole_lhs", rhs="whole_rhs"), passes=stages.whole_passes)


def _scores(q: Array, k: Array, sums: GateSums, site: str, stages: Stages) -> Array:
    return np.tril(scores(q, k, sums, stages.renamed(A=site)))


def _through_inverse(s: Solved, dv_new: Array, stages: Stages) -> tuple[Array, Array, Array, Array]:
    """(dv, the part of dbeta that is not from A, dA, the part of dk that is from what the state recalls)."""
    if not stages.wy:
        dupdate = _whole(stages).dot(s.t.mT, dv_new)
        if stages.refined:
            product = _whole(stages).dot(s.raw.mT, stages("rest", s.beta * dupdate))
            dupdate = _corrected(dupdate, s.t.mT, dv_new, product, stages)
        dupdate = stages("dupdate", dupdate)
        dv = stages("dv", s.beta * dupdate)
        da = stages("dA", -np.tril(stages.dot(dupdate, s.v_new.mT), -1))
        of_read = stages("read", -s.from_start * _whole(stages).dot(dv, s.state.mT))
        return dv, _summed(dupdate * s.error, stages), da, of_read
    du, dw = stages("du", dv_new), stages("dw", -stages.dot(dv_new, s.state.mT))
    values, keys = (stages("decayed", s.beta * x) for x in (s.v, s.from_start * s.k))
    dt = stages("dT", np.tril(stages.dot(du, values.mT) + stages.dot(dw, keys.mT)))
    da = stages("dA", -np.tril(stages.dot(s.t.mT, stages.dot(dt, s.t.mT)), -1))
    of_u, of_w = (stages("dupdate", stages.dot(s.t.mT, x)) for x in (du, dw))
    of_k = stages("read", s.from_start * of_w)
    of_beta = stages("of_beta", _summed(of_u * s.v, stages) + _summed(of_k * s.k, stages))
    return stages("dv", s.beta * of_u), of_beta, da, stages("read", s.beta * of_k)


def _previous_dstate(
    s: Solved, do: Array, dv_new: Array, dv: Array, scale: float, dstate: Array, stages: Stages
) -> Array:
    read = stages.dot(stages("decayed", s.q * (scale * s.from_start)).mT, do)
    of_error = stages.dot(s.w.mT, dv_new) if stages.wy else written_by(s.k, dv, s.from_start, stages)
    change = stages("sum", read - of_error)
    return stages("dh", decayed(s.sums.whole, dstate, change, stages))


def _summed(terms: Array, stages: Stages) -> Array:
    """Over the last axis, in pairs. Site: of_beta."""
    return tree_sum(stages("of_beta", terms), stages.renamed(sum="of_beta"))
