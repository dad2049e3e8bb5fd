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

from collections.abc import Iterator
from functools import reduce

import numpy as np

from cpu_golden import Array
from cpu_golden._lib.decays import decay_of, decayed, kept_of, sum_to_gate
from cpu_golden._lib.scans import Sequence
from cpu_golden.stages import Stages, exact, tree_sum


def chunk_forward(x: Sequence, *, chunk_size: int = 64, stages: Stages = exact) -> tuple[Array, Array]:
    """A `Forward` scan of `_lib/scans.py`, chunk by chunk.

    Sites: q, k, v, initial_state, c (sum of the gates since the chunk began), exponent, decay (exp of it),
    kept_exponent and kept (of what decays a state, the latter less 1 or 0), decayed (an operand of a dot times its
    decay), read (a dot times a decay), product and pairs (what is decayed one by one, and the running sums of that), A
    (the decayed scores), lost, change and state (what decays of a state, what is added to it, and the sum), sum (of
    parts of a result), of every dot lhs, rhs, partial and acc (see `Stages.dot`), and out (o).
    """
    q, k, v, gate, state, scale, *_ = x.read(stages)
    o = np.zeros(v.shape)
    for rows in _chunks(q, stages.chunk_size or chunk_size):
        q_c, k_c, v_c = (x[..., rows, :] for x in (q, k, v))
        c = _summed(gate[..., rows, :], stages)
        a = _scores(q_c, k_c, c, stages)
        o[..., rows, :] = scale * stages("sum", stages.dot(a, v_c) + _read(q_c, decay_of(c, stages), state, stages))
        state = _next_state(k_c, v_c, c, state, stages)
    return stages("out", o), state


def chunk_backward(
    x: Sequence, *, chunk_size: int = 64, stages: Stages = exact
) -> tuple[Array, Array, Array, Array, Array]:
    """A `Backward` scan of `_lib/scans.py`, chunk by chunk.

    Sites: those of `chunk_forward`, do, dht, dstate, dA, terms (what is summed to the gradient of a gate), pair_terms
    (those of scores, where all channels have one gate), up_to (sums that a row's own term is taken from), dgate (each
    of the other sums), out (each of the gradients).
    """
    q, k, v, gate, state, scale, do, dstate = x.read(stages)
    # What goes from chunk to chunk comes first, so that sites are in the order in which one acts on another.
    chunks = list(_chunks(q, stages.chunk_size or chunk_size))
    states, dstates = [], []
    for rows in chunks:
        states.append(state)
        state = _next_state(k[..., rows, :], v[..., rows, :], _summed(gate[..., rows, :], stages), state, stages)
    for rows in reversed(chunks):
        dstates.append(dstate)
        dstate = _previous_dstate(q[..., rows, :], do[..., rows, :], gate[..., rows, :], dstate, scale, stages)
    dq, dk, dv, dgate = (np.zeros(x.shape) for x in (q, k, v, gate))
    for rows, state_c, dstate_c in zip(chunks, states, reversed(dstates), strict=True):
        q_c, k_c, v_c, do_c = (x[..., rows, :] for x in (q, k, v, do))
        c = _summed(gate[..., rows, :], stages)
        from_start, to_end = decay_of(c, stages), decay_of(c[..., -1:, :] - c, stages)
        kept = kept_of(c[..., -1, :, None], stages)
        tiles = list(_chunks(q.mT, stages.channels)) if stages.channels else [slice(None)]
        a = [_scores(q_c[..., keys], k_c[..., keys], _of_keys(c, keys), stages) for keys in tiles]
        da = np.tril(scale * stages.dot(do_c, v_c.mT))
        if c.shape[-1] > 1 and stages.sub_block == 1:  # each row's own score is no part of a dot
            same = np.arange(da.shape[-1])
            da[..., same, same] = scale * _added(np.moveaxis(do_c * v_c, -1, 0), stages)
        da = stages("dA", da)
        read = stages("read", scale * from_start * stages.dot(do_c, state_c.mT))
        written = stages("read", to_end * stages.dot(v_c, dstate_c.mT))
        dq[..., rows, :], dk[..., rows, :], of_pairs = _pair_gradients(a, da, q_c, k_c, c, stages)
        dq[..., rows, :] += read
        dk[..., rows, :] += written
        for n, (a_n, keys) in enumerate(zip(a, tiles, strict=True)):
            of_scores = stages("sum", scale * stages.dot(a_n.mT, do_c))
            of_state = _read(k_c[..., keys], _of_keys(to_end, keys), dstate_c[..., keys, :], stages)
            tile = stages("sum", of_scores + of_state)
            dv[..., rows, :] = stages("sum", dv[..., rows, :] + tile) if n else tile
        of_states = tree_sum(stages("terms", state_c * dstate_c), stages.renamed(sum="dgate"))[..., None, :, 0]
        of_states = sum_to_gate(stages("dgate", kept[..., 0][..., None, :] * of_states), gate, stages)
        read, written = stages("terms", q_c * read), stages("terms", k_c * written)
        if gate.shape[-1] == 1:
            of_rows = stages.renamed(product="terms", pairs="dgate")
            read, written = (_added(np.moveaxis(x, -1, 0), of_rows)[..., None] for x in (read, written))
            sums: tuple[Array, ...] = (_sum_of_step(of_pairs, read, written, stages), of_states)
        else:
            sums = of_pairs, of_states, _sum_from(read), _sum_before(written, stages)
        dgate[..., rows, :] = reduce(lambda total, x: stages("dgate", total + stages("dgate", x)), sums)
    out = [stages("out", x) for x in (dq, dk, dv, dgate)]
    return out[0], out[1], out[2], out[3], dstate


def _chunks(q: Array, chunk_size: int) -> Iterator[slice]:
    size = q.shape[-2]
    return (slice(first, min(first + chunk_size, size)) for first in range(0, size, chunk_size))


def _of_keys(x: Array, keys: slice) -> Array:
    """What x [..., K or 1] has of a tile of keys."""
    return x if x.shape[-1] == 1 else x[..., keys]


def _summed(gate: Array, stages: Stages) -> Array:
    return stages("c", np.cumsum(gate, axis=-2))


def _read(x: Array, decay: Array, state: Array, stages: Stages) -> Array:
    """(x · decay) @ state. A decay per row is applied to the sums: kernels take an x of 16 bits as it is."""
    if decay.shape[-1] == 1:
        return stages("read", decay * stages.dot(x, state))
    return stages.dot(stages("decayed", x * decay), state)


def _next_state(k: Array, v: Array, c: Array, state: Array, stages: Stages) -> Array:
    written = _written(k, v, decay_of(c[..., -1:, :] - c, stages), stages)
    return stages("state", decayed(c[..., -1, :, None], state, written, stages))


def _previous_dstate(q: Array, do: Array, gate: Array, dstate: Array, scale: float, stages: Stages) -> Array:
    c = _summed(gate, stages)
    written = _written(q, do, scale * decay_of(c, stages), stages)
    return stages("dstate", decayed(c[..., -1, :, None], dstate, written, stages))


def _written(k: Array, v: Array, decay: Array, stages: Stages) -> Array:
    """(k · decay)ᵀ @ v."""
    if stages.values_decayed and decay.shape[-1] == 1:
        return stages.dot(k.mT, stages("decayed", v * decay))
    return stages.dot(stages("decayed", k * decay).mT, v)


def _scores(q: Array, k: Array, c: Array, stages: Stages) -> Array:
    """A [..., C, C] of a chunk: every pair of rows i ≥ j, decayed from j to i."""
    if c.shape[-1] == 1:
        return stages("A", stages.dot(q, k.mT) * _between(c, stages)[..., 0])
    a = np.zeros((*q.shape[:-1], q.shape[-2]))
    for rows in _chunks(q, stages.sub_block):
        k_to_i = stages("decayed", _between(c[..., rows, :], stages) * k[..., None, rows, :])  # [..., i, j, K]
        a[..., rows, rows] = _added(np.moveaxis(q[..., rows, None, :] * k_to_i, -1, 0), stages)
    for first, second in _halves(q, stages.sub_block):
        from_border, to_border = _across(c, first, second, stages)
        q_h = stages("decayed", q[..., second, :] * from_border)
        k_h = stages("decayed", k[..., first, :] * to_border)
        a[..., second, first] = stages.dot(q_h, k_h.mT)
    return stages("A", a)


def _pair_gradients(
    a: list[Array], da: Array, q: Array, k: Array, c: Array, stages: Stages
) -> tuple[Array, Array, Array]:
    """The parts of dq, dk and dgate that come from A of each tile of keys, the pairs of rows within the chunk; the
    last for each i where all channels have one gate, see `_sum_of_step`."""
    if c.shape[-1] == 1:
        of_scores = stages("decayed", da * _between(c, stages)[..., 0])
        before = np.tril(np.ones(da.shape[-2:]), -1)  # [t, j]
        parts = (stages.dot(before, stages("pair_terms", a_n * da).mT) for a_n in a)  # [..., t, i], of all j < t
        of_pairs = reduce(lambda total, x: stages("dgate", total + x), parts)
        return stages.dot(of_scores, k), stages.dot(of_scores.mT, q), of_pairs
    dq, dk, dgate = (np.zeros(x.shape) for x in (q, k, c))
    for rows in _chunks(q, stages.sub_block):
        q_r, k_r, da_r = q[..., rows, :], k[..., rows, :], da[..., rows, rows]
        of_scores = stages(
            "decayed", _between(c[..., rows, :], stages) * np.tril(da_r, -1)[..., None]
        )  # [..., i, j, K]
        dq_r = _added(np.moveaxis(of_scores * k_r[..., None, :, :], -2, 0), stages)
        dk_r = _added(np.moveaxis(of_scores * q_r[..., None, :], -3, 0), stages)
        read, written = stages("terms", q_r * dq_r), stages("terms", k_r * dk_r)
        dgate[..., rows, :] = _running_from(read - written, stages)
        of_same = np.diagonal(da_r, axis1=-2, axis2=-1)[..., None]  # no gate is between a step and itself
        dq[..., rows, :], dk[..., rows, :] = (stages("sum", x) for x in (dq_r + of_same * k_r, dk_r + of_same * q_r))
    for first, second in _halves(q, stages.sub_block):
        from_border, to_border = _across(c, first, second, stages)
        k_h = stages("decayed", k[..., first, :] * to_border)
        q_h = stages("decayed", q[..., second, :] * from_border)
        dq_h = stages("read", from_border * stages.dot(da[..., second, first], k_h))
        dk_h = stages("read", to_border * stages.dot(da[..., second, first].mT, q_h))
        read, written = stages("terms", q[..., second, :] * dq_h), stages("terms", k[..., first, :] * dk_h)
        for rows, x in ((second, _sum_from(read)), (first, _sum_before(written, stages))):
            dgate[..., rows, :] = stages("dgate", dgate[..., rows, :] + stages("dgate", x))
        dq[..., second, :] = stages("sum", dq[..., second, :] + dq_h)
        dk[..., first, :] = stages("sum", dk[..., first, :] + dk_h)
    return dq, dk, dgate


def _added(terms: Array, stages: Stages) -> Array:
    """The sum over the first axis, one after the other."""
    total = np.zeros(terms.shape[1:])
    for term in stages("product", terms):
        total = stages("pairs", total + term)
    return total


def _between(c: Array, stages: Stages) -> Array:
    """exp(c_i - c_j) [..., i, j, K or 1] of every pair i ≥ j of the rows of c, 0 for the others."""
    causal = np.tril(np.ones((c.shape[-2],) * 2, bool))[..., None]
    return decay_of(np.where(causal, c[..., :, None, :] - c[..., None, :, :], -np.inf), stages)


def _halves(q: Array, sub_block: int) -> Iterator[tuple[slice, slice]]:
    """The first and second halves of a chunk, of its halves, and so on down to `sub_block` rows: of the rows of every
    pair that is in no sub-block, one is in a first half and the other in the second half beside it."""
    size, half = q.shape[-2], sub_block
    while half < size:
        for border in range(half, size, 2 * half):
            yield slice(border - half, border), slice(border, min(border + half, size))
        half *= 2


def _across(c: Array, first: slice, second: slice, stages: Stages) -> tuple[Array, Array]:
    """The decays from the last row of a first half to each of the second, and to it from each of the first."""
    border = c[..., first.stop - 1, None, :]
    return decay_of(c[..., second, :] - border, stages), decay_of(border - c[..., first, :], stages)


def _sum_of_step(pairs: Array, read: Array, written: Array, stages: Stages) -> Array:
    """The gradient of the gate of each step t of a chunk but for what passes it, [..., C, 1]: the sum of what each row
    i ≥ t reads, pairs [..., t, i] and read [..., i, 1], and each before it writes, in pairs.
    """
    rows = np.arange(pairs.shape[-1])
    later = rows[:, None] <= rows  # [t, i]
    terms = np.where(later, stages("dgate", pairs + read.mT), written.mT)
    return tree_sum(terms, stages.renamed(sum="dgate"))


def _running_from(x: Array, stages: Stages) -> Array:
    """The sum over the rows from each on, of which later ones are rounded first: what they cancel leaves its error."""
    sums, total = np.zeros(x.shape), np.zeros(x[..., 0, :].shape)
    for row in reversed(range(x.shape[-2])):
        total = stages("dgate", total + x[..., row, :])
        sums[..., row, :] = total
    return sums


def _sum_from(x: Array) -> Array:
    """The sum over the rows from each on."""
    return np.flip(np.cumsum(np.flip(x, -2), -2), -2)


def _sum_before(x: Array, stages: Stages) -> Array:
    """The sum over the rows before each. Kernels may take it from the sum up to each."""
    before = np.zeros(x.shape)
    before[..., 1:, :] = np.cumsum(x[..., :-1, :], -2)
    up_to = before + x
    return before + (stages("up_to", up_to) - up_to)
