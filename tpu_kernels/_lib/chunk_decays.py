"""The decays between the steps of a chunk, for each kind of gate, and what is made of them: scores and gradients."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cached_property, reduce
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from op_arguments.probe import active
from tpu_kernels._lib.chunk_dots import WHOLE, Operand, bf16_split, dot, dot_pieces, dot_with_all, f32, iota, ones
from tpu_kernels._lib.chunk_plan import Scan
from tpu_kernels._lib.decays import Pair, decay_parts, difference, finite_exp, running_sums, times, two_sum
from tpu_kernels._lib.recurrent_sums import sum_rows
from tpu_kernels._lib.step_numbers import ROWS, StepNumbers

Refs = Mapping[str, Any]
Load = Callable[[str], jax.Array]
"""The rows [heads, C, ·] of a chunk, of the tensor of that name."""
Store = Callable[[str, jax.Array], None]
Parts = tuple[jax.Array, ...]
"""A decay as a sum: of a series what is near it, 0 or 1, and the rest. What is decayed is multiplied by each."""
Way = Literal["decay_from_start", "decay_to_end"]
"""From the start of the chunk to each step, or from after each step to the chunk's end."""
WAYS: tuple[Way, Way] = ("decay_from_start", "decay_to_end")
Probe = Callable[..., Any]
"""probe(site, value, *axes, where=True): what takes the value's place; `axes` are those that are steps."""

# A step that decays by more leaves nothing of any float32 state, and sums of such steps stay small enough to add.
STRONGEST_GATE = -256.0


class StepDecay:
    """Decays of heads that have one per step; of `ChannelDecay` the counterpart.

    columns(way, width) [heads, C, 1 or width] and row_to_end() [heads, 1, C]: of each step. whole [heads, 1, 1]: of
    the chunk, in the parts of `_whole`. between() [heads, C, C]: from after step j to step i, zero for i < j, at [i, j]
    in the forward pass and at [j, i] in the backward one, in parts.
    """

    per_channel = False

    def __init__(self, refs: Refs, i: Any, scan: Scan) -> None:
        """Of chunk i, from what `prepare_decays` left."""
        self._refs, self._chunk, self._scan = refs, i, scan
        self._decays = StepNumbers(refs["decays"], i, scan)
        self._columns: dict[Way, jax.Array] = {}
        totals = self._decays.rows[:1] if scan.split else self._sums.rows
        last = [row[:, :, scan.chunk - 1 :] for row in totals]
        self.whole: Parts = tuple(last) if scan.split else decay_parts(*last)

    @cached_property
    def _sums(self) -> StepNumbers:
        return StepNumbers(self._refs["sums"], self._chunk, self._scan)

    def probe_sums(self, probe: Probe) -> None:
        """Show the sums of gates, but those in which one may have been clamped."""
        sums = self._sums.rows
        if not self._scan.gate_terms:
            probe("c", sums, 2, where=sums[0] > STRONGEST_GATE)
            return
        for exponent in sums:
            probe("exponent", exponent, 2, where=exponent > STRONGEST_GATE)

    def spread(self, *ways: Way) -> None:
        """Have the matrix unit make the columns, now: where they are needed one would wait for it."""
        if self._scan.spread:
            width = max(self._scan.p.k, self._scan.p.v)
            self._columns |= {way: self._decays.spread(WAYS.index(way), width) for way in ways}

    def columns(self, way: Way, width: int) -> jax.Array:
        """See the class."""
        if way not in self._columns:
            self._columns[way] = self._decays.column(WAYS.index(way))
        return self._columns[way][:, :, :width]

    def row_to_end(self) -> jax.Array:
        """See the class."""
        return self._decays.rows[1]

    def between(self) -> Parts:
        """See the class."""
        i, j = _steps(self._scan)
        sums = self._products() if self._scan.gate_terms else self._differences()
        return _parts(jnp.where(i >= j, sums, -jnp.inf), self._scan)

    def _differences(self) -> jax.Array:
        """The sums of the gates after step j up to step i, for i >= j: those up to i less those up to j."""
        rows, columns = self._sums.rows, (self._sums.column(0), self._sums.column(1))
        return difference(*((rows, columns) if self._scan.backward else (columns, rows)))

    def _products(self) -> jax.Array:
        """The same by the matrix unit, of just these gates."""
        scan, c = self._scan, self._scan.chunk
        lanes = scan.gate_terms * c
        place, step = iota((1, c, lanes), 1), iota((1, c, lanes), 2) % c
        gates = self._refs["gate"][:, pl.ds(self._chunk, 1), :][:, :, :lanes]
        gates = jnp.where(step > place if scan.backward else step <= place, gates, 0.0)
        step, place = iota((lanes, c), 0) % c, iota((lanes, c), 1)
        others = ones(step <= place if scan.backward else step > place)
        return dot_with_all(gates, others, scan, 1)

    def scores(self, load: Load, scan: Scan) -> jax.Array:
        """A [heads, C, C]."""
        return times(self.between(), dot(load("q"), load("k"), (1, 1), scan))

    def store_gradients(self, load: Load, store: Store, state: Any, dstate: Any, scan: Scan, probe: Probe) -> None:
        """Store dq, dk, dv and dg of a chunk, from the refs of the state at its start and the gradient at its end."""
        # Pairs of steps are at [j, i], so that just one of the dots below transposes. In this order, of those that were
        # tried, the units wait the least.
        products = dot(load("k"), load("q"), (1, 1), scan)
        dproducts = dot(load("v"), load("do"), (1, 1), scan)
        row, column = iota(products.shape, 1), iota(products.shape, 2)
        if active():
            probe("dA", scan.p.scale * dproducts, 1, 2, where=row <= column)
        dscores = times([scan.p.scale * part for part in self.between()], dproducts)
        dend = dot_pieces(dstate[...], scan)
        self.spread("decay_to_end")
        dv = read_state(load("k"), dend, self, "decay_to_end", scan)
        scores = probe("A", times(self.between(), products), 1, 2)
        self.spread("decay_from_start")
        dq = scan.p.scale * self.columns("decay_from_start", scan.p.k) * dot(load("do"), state[...], (1, 0), scan)
        from_state = jnp.sum(f32(load("q")) * dq, axis=2, keepdims=True)
        store("dv", dv + scan.p.scale * dot(scores, load("do"), (1, 0), scan))
        # The gate of step t decays what goes from before t to t or later. Sums of just these pairs lose nothing to
        # cancellation, as running sums of q·dq - k·dk do.
        sums = dot_with_all(products * dscores, ones((row >= column)[0]), scan)
        store("dq", dq + dot(dscores, load("k"), (0, 0), scan))
        dk = self.columns("decay_to_end", scan.p.k) * dot(load("v"), dend, (1, 0), scan)
        to_state = jnp.sum(f32(load("k")) * dk, axis=2, keepdims=True)
        store("dk", dk + dot(dscores, load("q"), (1, 0), scan))
        whole = reduce(jnp.add, self.whole)
        through = jnp.sum(whole * jnp.sum(state[...] * dstate[...], axis=1, keepdims=True), axis=2, keepdims=True)
        through = probe("dgate", through)
        store("dgate", through + jnp.sum(jnp.where(row < column, sums + to_state, from_state), axis=1, keepdims=True))


class ConstantDecay(StepDecay):
    """Decays of heads whose steps have all the same: what `prepare_decays` left of them."""

    def __init__(self, refs: Refs, gammas: jax.Array, live: Any, scan: Scan) -> None:
        self._refs, self._gammas, self._live, self._scan = refs, gammas, live, scan
        self.whole = _whole(scan, gammas * f32(jnp.full(gammas.shape, live, jnp.int32)))

    def probe_sums(self, probe: Probe) -> None:
        """There are none, but products."""

    def spread(self, *ways: Way) -> None:
        """They are there already."""

    def columns(self, way: Way, width: int) -> jax.Array:
        """See `StepDecay`."""
        if way == "decay_from_start" or not self._scan.masked:
            return self._refs[way][:, :, :width]
        step = iota((self._scan.heads, self._scan.chunk, 1), 1)
        return _power(self._gammas, jnp.maximum(self._live - 1 - step, 0))

    def row_to_end(self) -> jax.Array:
        """See `StepDecay`."""
        step = iota((self._scan.heads, 1, self._scan.chunk), 2)
        return _power(self._gammas, jnp.maximum(self._live - 1 - step, 0))

    def between(self) -> Parts:
        """See `StepDecay`."""
        return (self._refs["between"][...],)


class ChannelDecay:
    """Decays of heads that have one per step and channel of k.

    columns(way, width) [heads, C, K] and whole [heads, 1, K] as in `StepDecay`. The decay between two steps is the
    product of two that meet between them: at the border of the halves, one step in each, of the smallest part of the
    chunk that holds both (parts have 2, 4, 8, … steps). halves: for each size of parts
    `Parts` of [heads, C, K]: from that border to the steps of the second half, and to it from those of the first. So no
    exponent is of a longer way than from j to i.
    """

    per_channel = True

    def __init__(self, gk: jax.Array, scan: Scan) -> None:
        """From the log decays [heads, C, K]. Sums of halves are added to sums of wholes: no difference is taken."""
        # Of the part of a step, the sum up to it and the sum over the rest: [heads, registers, ROWS, K].
        until = jnp.maximum(f32(gk), STRONGEST_GATE).reshape(gk.shape[0], -1, ROWS, gk.shape[2])
        after = jnp.zeros_like(until)
        self.halves: list[Parts] = []
        for level in range(ROWS.bit_length() - 1):
            half = 2**level
            second = iota(until.shape, 2) & half != 0
            self.halves.append(tuple(x.reshape(gk.shape) for x in _parts(jnp.where(second, until, after), scan)))
            total = until + after
            until += jnp.where(second, pltpu.roll(total, half, 2), 0.0)
            after += jnp.where(second, 0.0, pltpu.roll(total, ROWS - half, 2))
        # From here on halves are whole registers, and no step of one has another total than the rest.
        untils, afters = ([x[:, n] for n in range(x.shape[1])] for x in (until, after))
        totals = [until + after for until, after in zip(untils, afters, strict=True)]
        registers, half = range(len(totals)), 1
        while half < len(registers):
            exponents = [untils[n] if n & half else afters[n] for n in registers]
            self.halves.append(_parts(_rows(exponents), scan))
            untils = [untils[n] + totals[n ^ half] if n & half else untils[n] for n in registers]
            afters = [afters[n] if n & half else afters[n] + totals[n ^ half] for n in registers]
            totals = [totals[n & ~half] + totals[n | half] for n in registers]
            half *= 2
        self._until, self._after, self._scan = _rows(untils), _rows(afters), scan
        self.whole = _whole(scan, self._until[:, -1:])

    def probe_sums(self, probe: Probe) -> None:
        """See `StepDecay`."""
        for sums in (self._until, self._after):
            probe("exponent", sums, 1, where=sums > STRONGEST_GATE)

    def spread(self, *ways: Way) -> None:
        """They are there, in all lanes."""

    def columns(self, way: Way, width: int) -> jax.Array:
        """See the class."""
        return _exp(self._until if way == "decay_from_start" else self._after, self._scan)

    def scores(self, load: Load, scan: Scan) -> jax.Array:
        """A [heads, C, C]."""
        q, k = f32(load("q")), f32(load("k"))
        scores = _own_scores(q, k, scan)
        for half, _, decayed in self._levels(q, k):
            scores = _with_scores_across(scores, decayed, half, scan)
        return scores

    def store_gradients(self, load: Load, store: Store, state: Any, dstate: Any, scan: Scan, probe: Probe) -> None:
        """Store dq, dk, dv and dgk of a chunk, from the refs of the state at its start and the gradient at its end."""
        q, k, v, do = (f32(load(name)) for name in ("q", "k", "v", "do"))
        i, j = _steps(scan)
        # In this order, of those that were tried, the units wait the least.
        dv = read_state(load("k"), dstate[...], self, "decay_to_end", scan)
        dq = scan.p.scale * self.columns("decay_from_start", scan.p.k) * dot(load("do"), state[...], (1, 0), scan)
        dk = self.columns("decay_to_end", scan.p.k) * dot(load("v"), dstate[...], (1, 0), scan)
        # As in `StepDecay.store_gradients`: of the gate of step t, only pairs with t between them, and what passes it.
        dgk = probe("dgate", reduce(jnp.add, self.whole) * sum_rows(state[...] * dstate[...]))
        read = probe("dgate", dot(ones(i >= j), q * dq, (1, 0), scan), 1)
        dgk += read + probe("dgate", dot(ones(i < j), k * dk, (1, 0), scan), 1)
        dscore = scan.p.scale * jnp.sum(do * v, axis=2, keepdims=True)
        dq, dk = dq + dscore * k, dk + dscore * q
        # Of a pair, at [i, j] as at [j, i].
        dscores = dot(load("do"), load("v"), (1, 1), scan), dot(load("v"), load("do"), (1, 1), scan)
        dpairs = probe("dA", scan.p.scale * jnp.where(i < j, *dscores), 1, 2)
        pieces = dot_pieces(dpairs, scan)
        scores = _own_scores(q, k, scan)
        for half, decay, decayed in self._levels(q, k):
            second = _in_second(q.shape, half)
            across = _border(i, j) == half
            ddecayed = dot([jnp.where(across, piece, jnp.zeros_like(piece)) for piece in pieces], decayed, (1, 0), scan)
            scores = _with_scores_across(scores, decayed, half, scan)
            dq += jnp.where(second, times(decay, ddecayed), 0.0)
            dk += jnp.where(second, 0.0, times(decay, ddecayed))
            # Of the same half: from t on in a second one, before t in a first one.
            after = (i ^ j < half) & ((i >= j) ^ (j & half == 0))
            dgk += dot(ones(after), decayed * ddecayed, (1, 0), scan)
        scores = probe("A", scores, 1, 2)
        store("dv", dv + scan.p.scale * dot(scores, load("do"), (1, 0), scan))
        store("dq", dq)
        store("dk", dk)
        store("dgate", dgk)

    def _levels(self, q: jax.Array, k: jax.Array) -> Iterator[tuple[int, Parts, jax.Array]]:
        """For each size of halves: it, the decays, and what they decay: q in second halves, k in first ones."""
        for level, decay in enumerate(self.halves):
            half = 2**level
            yield half, decay, times(decay, jnp.where(_in_second(q.shape, half), q, k))


Decay = StepDecay | ChannelDecay


def read_state(x: jax.Array, state: Operand, decay: Decay, way: Way, scan: Scan, pieces: int = 2) -> jax.Array:
    """(x · decay) @ the state, in `pieces`. A decay per row is applied to the sums, which leaves x exact."""
    contract = (1, 0) if scan.by_key else (1, 1)
    if decay.per_channel:
        return dot(f32(x) * decay.columns(way, scan.p.k), state, contract, scan, pieces)
    return decay.columns(way, scan.p.v) * dot(x, state, contract, scan, pieces)


def written_by(
    k: jax.Array, values: jax.Array, decay: Decay, way: Way, scan: Scan, scale: float | None = None
) -> jax.Array:
    """(k · scale · decay)ᵀ @ values, as states lie. A decay per row is applied to the values, which leaves k exact."""
    decays = decay.columns(way, scan.p.k if decay.per_channel else scan.p.v)
    decays = decays if scale is None else scale * decays
    k, values = (f32(k) * decays, values) if decay.per_channel else (k, decays * values)
    return dot(k, values, (0, 0), scan) if scan.by_key else dot(values, k, (0, 0), scan)


def written_by_each(k: jax.Array, values: jax.Array, decays: Sequence[Decay], scan: Scan) -> list[jax.Array]:
    """`written_by` to the end of each of `scan.at_once` chunks, of k and values [heads, rows of all, ·].

    Of several, decays per step multiply values that are turned, [heads, V, rows of all]: they need not be columns. What
    is not finite in a chunk may reach what those beside it write, and so gradients of its own.
    """
    if scan.at_once == 1:
        return [written_by(k, values, decay, "decay_to_end", scan) for decay in decays]
    decay = jnp.concatenate([decay.row_to_end() for decay in decays if isinstance(decay, StepDecay)], 2)
    turned = dot_pieces(values.swapaxes(1, 2) * decay, scan)
    keys = jnp.split(k, scan.at_once, 1)
    lines = [[key if n == m else jnp.zeros_like(key) for m in range(len(keys))] for n, key in enumerate(keys)]
    diagonal = jnp.concatenate([jnp.concatenate(line, 2) for line in lines], 1)
    return jnp.split(dot(turned, diagonal, (1, 0), scan), scan.at_once, 2)


def decayed(state: jax.Array, decay: Decay, term: jax.Array) -> jax.Array:
    """The state, or its gradient, decayed by a whole chunk, and term."""
    return reduce(lambda rest, part: part * state + rest, reversed(decay.whole), term)


def probe_decays(decay: Decay, probe: Probe) -> None:
    if active():
        decay.probe_sums(probe)
        probe("decay", decay.columns("decay_from_start", 1), 1)
        probe("decay", decay.columns("decay_to_end", 1), 1)


def _in_second(shape: tuple[int, ...], half: int) -> jax.Array:
    """Mask of the rows in the upper half of their 2·`half`-row block."""
    return iota(shape, 1) & half != 0


def _border(i: jax.Array, j: jax.Array) -> jax.Array:
    """The size of the halves at whose border i and j meet, the largest power of two in i ^ j; 0 where i = j."""
    bits = i ^ j
    for shift in (1, 2, 4, 8):
        bits |= bits >> shift
    return bits - (bits >> 1)


def _own_scores(q: jax.Array, k: jax.Array, scan: Scan) -> jax.Array:
    """[heads, C, C] with the scores of each step with itself, which nothing decays."""
    i, j = _steps(scan)
    return jnp.where(i == j, jnp.sum(q * k, axis=2, keepdims=True), 0.0)


def _with_scores_across(scores: jax.Array, decayed: jax.Array, half: int, scan: Scan) -> jax.Array:
    """scores with those of the pairs that meet at the border of halves of this size. decayed: as in `_levels`."""
    i, j = _steps(scan)
    border = jnp.where(i > j, _border(i, j), 0)
    if half < ROWS:
        return jnp.where(border == half, dot(decayed, decayed, (1, 1), scan), scores)
    # Halves are whole registers: just those with a step that reads are multiplied, or backward one that writes.
    halves = [slice(first, first + half) for first in range(0, scan.chunk, half)]
    multiplied = halves[0 if scan.backward else 1 :: 2]
    products = dot(_rows([decayed[:, rows] for rows in multiplied]), decayed, (1, 1), scan)
    found = {rows.start: products[:, n * half : (n + 1) * half] for n, rows in enumerate(multiplied)}

    def merged(rows: slice) -> jax.Array:
        if rows.start not in found:
            return scores[:, rows]
        return jnp.where(border[:, rows] == half, found[rows.start], scores[:, rows])

    return _rows([merged(rows) for rows in halves])


def _rows(parts: list[jax.Array]) -> jax.Array:
    return jnp.concatenate(parts, 1)


# ------------------------------------------------------------------------------------------------ of a block


def decay_scratch(scan: Scan) -> dict[str, Any]:
    """What `prepare_decays` fills."""
    if scan.gate == "constant":
        rows = pltpu.VMEM((scan.heads, scan.chunk, max(scan.p.k, scan.p.v)), jnp.float32)
        between = pltpu.VMEM((scan.heads, scan.chunk, scan.chunk), jnp.float32)
        return {"decay_from_start": rows, "decay_to_end": rows, "between": between}
    if scan.gate == "step":
        scratch = {"decays": StepNumbers.scratch(scan)}
        if scan.gate_terms:
            scratch["gate"] = pltpu.VMEM((scan.heads, scan.chunks, (WHOLE + 1) * scan.chunk), jnp.float32)
        if not scan.gate_terms or active():
            scratch["sums"] = StepNumbers.scratch(scan)
        return scratch
    return {}


def prepare_decays(refs: Refs, scan: Scan, first_head: Any) -> None:
    """What the decays of all chunks of a block, or of some heads, have in common."""
    if scan.gate == "constant":

        @pl.when(pl.program_id(2) == 0)
        def _() -> None:
            gammas = gammas_of(refs, scan, first_head)
            i, j = _steps(scan)
            refs["between"][...] = jnp.where(i >= j, _power(gammas, jnp.maximum(i - j, 0)), 0.0)
            step = iota(refs["decay_to_end"].shape, 1)
            refs["decay_from_start"][...] = _power(gammas, step + 1)
            refs["decay_to_end"][...] = _power(gammas, scan.chunk - 1 - step)

    if scan.gate == "step":
        g = jnp.maximum(refs["g"][...], STRONGEST_GATE)
        gamma = jnp.maximum(refs["g_gamma"][...], STRONGEST_GATE) if "g_gamma" in refs else jnp.zeros_like(g)
        gate = two_sum(g, gamma)
        sums, until, after = _summed(gate, refs, scan)
        if "sums" in refs:
            StepNumbers.keep(refs["sums"], *sums, scan)
        StepNumbers.keep(refs["decays"], _exp(until, scan), _exp(after, scan), scan)


def _summed(gate: Pair, refs: Refs, scan: Scan) -> tuple[Pair, jax.Array, jax.Array]:
    """Two numbers to keep, and the sums of gates up to each step and after it, [heads, chunks, C or more].

    The numbers are both sums if the matrix unit computes them, else the first sum as two float32.
    """
    c = scan.chunk
    if scan.gate_terms:
        pieces = [*bf16_split(gate[0], WHOLE), *bf16_split(gate[1], 1)]
        gates = refs["gate"][...] = jnp.concatenate([f32(piece)[:, :, :c] for piece in pieces], 2)
        step, place = iota((gates.shape[2], 2 * c), 0) % c, iota((gates.shape[2], 2 * c), 1)
        both = dot_with_all(gates, ones((step <= place % c) == (place < c)), scan, 1)
        until, after = jnp.split(both, 2, 2)
        return (until, after), until, after
    hi, lo = running_sums(*gate, c)
    last = hi[:, :, c - 1 : c], lo[:, :, c - 1 : c]
    return (hi, lo), hi + lo, difference(last, (hi, lo))


def gammas_of(refs: Refs, scan: Scan, first_head: Any) -> jax.Array:
    """[heads, 1, 1]."""
    return jnp.stack([jnp.full((1, 1), refs["g_gamma"][first_head + h]) for h in range(scan.heads)])


def _steps(scan: Scan) -> tuple[jax.Array, jax.Array]:
    """The steps i and j at each place of `StepDecay.between`: at [i, j] forward, at [j, i] backward."""
    shape = (scan.heads, scan.chunk, scan.chunk)
    i, j = iota(shape, 1), iota(shape, 2)
    return (j, i) if scan.backward else (i, j)


def _power(gammas: jax.Array, steps: jax.Array) -> jax.Array:
    """The decay over so many steps. The product is rounded once, where a running sum is at each step."""
    return finite_exp(gammas * f32(steps))


def _exp(exponent: jax.Array, scan: Scan) -> jax.Array:
    """exp, finite everywhere, as the scan takes it."""
    return reduce(jnp.add, _parts(exponent, scan))


def _parts(exponent: jax.Array, scan: Scan) -> Parts:
    """`_exp` as a sum."""
    return decay_parts(exponent) if scan.precise else (finite_exp(exponent),)


def _whole(scan: Scan, total: jax.Array, low: jax.Array | float = 0.0) -> tuple[jax.Array, ...]:
    """The decay of a whole chunk, exp(total + low), as a sum: what is near 1 and the rest, so that a product with it
    loses little of what a slow head keeps for many chunks. Split dots lose more than that."""
    return (finite_exp(total + low),) if scan.split else decay_parts(total, low)
