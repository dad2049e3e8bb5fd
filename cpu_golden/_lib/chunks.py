"""A chunk of steps of a gated linear recurrence, in float64 and staged: decayed scores, states and their gradients.

Gates are [..., C, K], or [..., C, 1] where all channels have one.
"""

from collections.abc import Iterator, Mapping
from functools import reduce
from typing import Any, NamedTuple

import numpy as np

from cpu_golden import Array
from cpu_golden._lib.decays import decay_of, decayed, sum_to_gate
from cpu_golden._lib.sequences import Sequence, each_step
from cpu_golden.stages import ROWS, Stages, tree_sum


def in_whole_chunks(x: Sequence, chunk_size: int) -> Sequence:
    """x with steps of zeros after its last, so that no chunk is shorter than the others.

    Kernels fill the last one. A matrix unit that makes several passes over a chunk's rows ends its partial sums, and
    rounds them, where all rows say.
    """
    missing = -x.q.shape[-2] % chunk_size
    return each_step(x, lambda rows: filled_up(rows, missing))


def filled_up(x: Array, missing: int, mode: Any = "constant") -> Array:
    """x with so many rows after its last, of zeros or by another mode of np.pad."""
    return np.pad(x, [(0, 0)] * (x.ndim - 2) + [(0, missing), (0, 0)], mode) if missing else x


def square_filled_up(a: Array, missing: int) -> Array:
    """a [..., C, C] with so many rows and columns of zeros after its last."""
    return filled_up(filled_up(a, missing).mT, missing).mT


def chunks_of(q: Array, chunk_size: int) -> Iterator[slice]:
    """The rows of each chunk, the last of which may be shorter."""
    size = q.shape[-2]
    return (slice(first, min(first + chunk_size, size)) for first in range(0, size, chunk_size))


def of_keys(x: Array, keys: slice) -> Array:
    """What x [..., K or 1] has of a tile of keys."""
    return x if x.shape[-1] == 1 else x[..., keys]


class GateSums(NamedTuple):
    """Sums of a chunk's gates, each [..., C, K or 1]; decays are their exp."""

    until: Array  # c, the sum of the steps up to each
    after: Array  # the sum of the steps after each
    by_half: Mapping[int, Array]  # see `_summed_by_halves`; empty if sums to borders are differences of c

    @property
    def whole(self) -> Array:
        """The sum of all steps, [..., K or 1, 1]."""
        return self.until[..., -1, :, None]

    def of_keys(self, keys: slice) -> "GateSums":
        """The sums of a tile of keys."""
        until, after = (of_keys(x, keys) for x in (self.until, self.after))
        return GateSums(until, after, {half: of_keys(x, keys) for half, x in self.by_half.items()})

    def filled_up(self, missing: int) -> "GateSums":
        """The sums of a chunk with so many rows more, whose gates are 0."""
        return self._replace(until=filled_up(self.until, missing, "edge"), after=filled_up(self.after, missing))


def gate_sums(gate: Array, stages: Stages) -> GateSums:
    """The sums of a chunk's gates [..., C, K or 1]: running sums and their differences.

    Gates per channel are summed by halves if dots decay all pairs of rows (sub_block 1). Site: c.
    """
    if gate.shape[-1] > 1 and stages.sub_block == 1:
        return _summed_by_halves(gate, stages)
    c = stages("c", np.cumsum(gate, axis=-2))
    return GateSums(c, c[..., -1:, :] - c, {})


def sums_for_pairs(gate: Array, sums: GateSums, stages: Stages) -> GateSums:
    """The sums that decays between two rows of a chunk are computed from.

    If all channels have one gate, kernels may sum a bfloat16 split of it. Sites: pair_gate (what is summed), c.
    """
    return sums if gate.shape[-1] > 1 else gate_sums(stages("pair_gate", gate), stages)


def _summed_by_halves(gate: Array, stages: Stages) -> GateSums:
    """The sums of parts of 2, 4, … rows up to the chunk, each computed from its halves'.

    by_half: for each size of a half, the sum from the border of two halves to each row of the second, and from after
    each row of the first to the border. Site: c (every sum).
    """
    size = gate.shape[-2]
    until = filled_up(gate, missing_to_halve(size, 1))
    after, total, by_half = np.zeros(until.shape), until, {}
    for half in halves(until, 1):
        second = (np.arange(until.shape[-2]) & half != 0)[:, None]
        by_half[half] = np.where(second, until, after)
        if half <= ROWS:  # within a register each row has a total of its own
            total = stages("c", until + after)
        other = np.roll(blocks(total, 2 * half), half, axis=-2).reshape(total.shape)
        sums = stages("c", by_half[half] + other)
        until, after = np.where(second, sums, until), np.where(second, after, sums)
        if half >= ROWS:
            total = stages("c", total + other)
    return GateSums(until[..., :size, :], after[..., :size, :], by_half)


def read_through(x: Array, decay: Array, state: Array, stages: Stages) -> Array:
    """(x · decay) @ state. A decay per row is applied to the sums: kernels take an x of 16 bits as it is."""
    if decay.shape[-1] == 1:
        return stages("read", decay * stages.dot(x, state))
    return stages.dot(stages("decayed", x * decay), state)


def next_state(k: Array, v: Array, sums: GateSums, state: Array, stages: Stages) -> Array:
    """The state after a chunk in which each row k writes v. Sites: those of `written_by` and `decayed`, state."""
    written = written_by(k, v, decay_of(sums.after, stages), stages)
    return stages("state", decayed(sums.whole, state, written, stages))


def written_by(k: Array, v: Array, decay: Array, stages: Stages) -> Array:
    """(k · decay)ᵀ @ v."""
    if stages.values_decayed and decay.shape[-1] == 1:
        return stages.dot(k.mT, stages("decayed", v * decay))
    return stages.dot(stages("decayed", k * decay).mT, v)


def scores(q: Array, k: Array, sums: GateSums, stages: Stages) -> Array:
    """A [..., C, C] of a chunk: every pair of rows i ≥ j, decayed from j to i. sums: as `sums_for_pairs` has them."""
    if sums.until.shape[-1] == 1:
        return stages("A", stages.dot(q, k.mT) * _between(sums.until, stages)[..., 0])
    size, sub_block = q.shape[-2], stages.sub_block
    missing = missing_to_halve(size, sub_block)
    q, k, sums = filled_up(q, missing), filled_up(k, missing), sums.filled_up(missing)
    a = np.zeros((*q.shape[:-1], q.shape[-2]))
    q_b, k_b, c_b = (blocks(x, sub_block) for x in (q, k, sums.until))
    k_to_i = stages("decayed", _between(c_b, stages) * k_b[..., None, :, :])  # [..., i, j, K]
    diagonal(a, sub_block)[...] = products_added(q_b[..., None, :] * k_to_i, stages)
    for half in halves(q, sub_block):
        from_border, to_border = _across(sums, half, stages)
        q_h = stages("decayed", blocks(q, 2 * half)[..., half:, :] * from_border)
        k_h = stages("decayed", blocks(k, 2 * half)[..., :half, :] * to_border)
        diagonal(a, 2 * half)[..., half:, :half] = stages.dot(q_h, k_h.mT)
    return stages("A", a[..., :size, :size])


def pair_gradients(
    a: list[Array], da: Array, q: Array, k: Array, sums: GateSums, stages: Stages
) -> tuple[Array, Array, Array]:
    """The parts of dq, dk and dgate that come from A of each tile of keys, the pairs of rows within the chunk; the
    last for each i where all channels have one gate, see `_sum_of_step`. sums: as `sums_for_pairs` has them."""
    if sums.until.shape[-1] == 1:
        of_scores = stages("decayed", da * _between(sums.until, stages)[..., 0])
        before = np.broadcast_to(np.tril(np.ones(da.shape[-2:]), -1), da.shape)  # [t, j]
        parts = (stages.dot(before, stages("pair_terms", a_n * da).mT) for a_n in a)  # [..., t, i], of all j < t
        of_pairs = reduce(lambda total, x: stages("dgate", total + x), parts)
        return stages.dot(of_scores, k), stages.dot(of_scores.mT, q), of_pairs
    size, sub_block = q.shape[-2], stages.sub_block
    missing = missing_to_halve(size, sub_block)
    q, k, sums = filled_up(q, missing), filled_up(k, missing), sums.filled_up(missing)
    da = square_filled_up(da, missing)
    q_b, k_b, c_b = (blocks(x, sub_block) for x in (q, k, sums.until))
    da_b = diagonal(da, sub_block)
    of_scores = stages("decayed", _between(c_b, stages) * np.tril(da_b, -1)[..., None])  # [..., i, j, K]
    dq_b = added(of_scores * k_b[..., None, :, :], -2, stages)
    dk_b = added(of_scores * q_b[..., None, :], -3, stages)
    read, written = stages("terms", q_b * dq_b), stages("terms", k_b * dk_b)
    dgate = _running_from(read - written, stages).reshape(sums.until.shape)
    of_same = np.diagonal(da_b, axis1=-2, axis2=-1)[..., None]  # no gate is between a step and itself
    dq = stages("sum", dq_b + of_same * k_b).reshape(q.shape).copy()
    dk = stages("sum", dk_b + of_same * q_b).reshape(k.shape).copy()
    for half in halves(q, sub_block):
        from_border, to_border = _across(sums, half, stages)
        q_2, k_1 = blocks(q, 2 * half)[..., half:, :], blocks(k, 2 * half)[..., :half, :]
        da_h = diagonal(da, 2 * half)[..., half:, :half]
        k_h, q_h = stages("decayed", k_1 * to_border), stages("decayed", q_2 * from_border)
        dq_h = stages("read", from_border * stages.dot(da_h, k_h))
        dk_h = stages("read", to_border * stages.dot(da_h.mT, q_h))
        read, written = stages("terms", q_2 * dq_h), stages("terms", k_1 * dk_h)
        of_gates = np.concatenate([_sum_before(written, stages), _sum_from(read)], axis=-2)
        dgate = stages("dgate", dgate + stages("dgate", of_gates).reshape(sums.until.shape))
        of_q, of_k = blocks(dq, 2 * half)[..., half:, :], blocks(dk, 2 * half)[..., :half, :]
        of_q[...], of_k[...] = stages("sum", of_q + dq_h), stages("sum", of_k + dk_h)
    return dq[..., :size, :], dk[..., :size, :], dgate[..., :size, :]


def gate_gradient(pairs: Array, read: Array, written: Array, states: Array, kept: Array, stages: Stages) -> Array:
    """The gradient of the gates of a chunk's steps, [..., C, 1 or K]: the sum of every product that a step decays.

    pairs: those within the chunk, see `pair_gradients`. read, written [..., C, K]: by row, what reads the state before
    the chunk, and what is written into that after it. states [..., K, V]: what passes the chunk, less its decay `kept`.
    Sites: terms, up_to, dgate.
    """
    of_states = tree_sum(stages("terms", states), stages.renamed(sum="dgate"))[..., None, :, 0]
    of_states = sum_to_gate(stages("dgate", kept[..., 0][..., None, :] * of_states), kept.mT, stages)
    read, written = stages("terms", read), stages("terms", written)
    if kept.shape[-2] == 1:
        of_rows = stages.renamed(product="terms", pairs="dgate")
        read, written = (added(x, -1, of_rows)[..., None] for x in (read, written))
        sums: tuple[Array, ...] = (_sum_of_step(pairs, read, written, stages), of_states)
    else:
        sums = pairs, of_states, _sum_from(read), _sum_before(written, stages)
    return reduce(lambda total, x: stages("dgate", total + stages("dgate", x)), sums)


def products_added(products: Array, stages: Stages) -> Array:
    """The sum over the last axis, in pairs. Sites: product, pairs."""
    return tree_sum(stages("product", products), stages.renamed(sum="pairs"))[..., 0]


def added(terms: Array, axis: int, stages: Stages) -> Array:
    """The sum over an axis, one after the other."""
    terms = np.ascontiguousarray(np.moveaxis(stages("product", terms), axis, 0))
    total = np.zeros(terms.shape[1:])
    for term in terms:
        total = stages("pairs", total + term)
    return total


def _between(c: Array, stages: Stages) -> Array:
    """exp(c_i - c_j) [..., i, j, K or 1] of every pair i ≥ j of the rows of c, 0 for the others."""
    causal = np.tril(np.ones((c.shape[-2],) * 2, bool))[..., None]
    return decay_of(np.where(causal, c[..., :, None, :] - c[..., None, :, :], -np.inf), stages)


def missing_to_halve(size: int, sub_block: int) -> int:
    """Rows that are missing to `sub_block` times a power of two."""
    return sub_block * (1 << (-(-size // sub_block) - 1).bit_length()) - size


def halves(q: Array, sub_block: int) -> Iterator[int]:
    """Rows of a half of two sub-blocks, of four of them, and so on up to the chunk: of the rows of every pair that is
    in no sub-block, one is in a first half and the other in the second half beside it."""
    half = sub_block
    while half < q.shape[-2]:
        yield half
        half *= 2


def blocks(x: Array, size: int) -> Array:
    """x [..., C, K] as [..., C / size, size, K], a view of what is contiguous."""
    return x.reshape(*x.shape[:-2], x.shape[-2] // size, size, x.shape[-1])


def diagonal(a: Array, size: int) -> Array:
    """The blocks on the diagonal of a [..., C, C], [..., C / size, size, size], a view of what is contiguous."""
    count = a.shape[-1] // size
    of_blocks: Array = np.einsum("...iaib->...iab", a.reshape(*a.shape[:-2], count, size, count, size))
    return of_blocks


def _across(sums: GateSums, half: int, stages: Stages) -> tuple[Array, Array]:
    """The decays from the last row of each first half to those of the second, and to it from those of the first."""
    if sums.by_half:
        first, second = np.split(blocks(sums.by_half[half], 2 * half), 2, axis=-2)
    else:
        c = blocks(sums.until, 2 * half)
        border = c[..., half - 1, None, :]
        first, second = border - c[..., :half, :], c[..., half:, :] - border
    return decay_of(second, stages), decay_of(first, stages)


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
