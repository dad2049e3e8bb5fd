"""Where the error of one case comes from: which rounding, at which site of the staged golden, or no rounding at all.

It needs the kernel's output and nothing else: no dumps, no debugging build. A loss of precision leaves a fingerprint:
rounding the same values at the same place errs by the same amounts, sign for sign. So the golden is run with every
candidate rounding in turn, and the set whose error field is the kernel's is the answer. An error that no rounding
makes is a fault of logic, and then *where* it is says most.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from itertools import groupby, pairwise
from typing import Any

import numpy as np

from parity.dtypes import UNIT_ROUNDOFF, Floats, cut_off, round_to
from parity.judging.judge import Judgement, judge, judge_twin
from parity.judging.metrics import eta
from parity.judging.reference import Reference
from parity.judging.stages import staged
from parity.op import outputs
from parity.trial import Trial

ROUNDINGS: Mapping[str, float] = {
    "bfloat16": UNIT_ROUNDOFF["bfloat16"],
    "tf32": UNIT_ROUNDOFF["tf32"],
    "bf16x2": UNIT_ROUNDOFF["bfloat16"] ** 2,
    "bfloat16 cut": 2 * UNIT_ROUNDOFF["bfloat16"],
    "tf32 cut": 2 * UNIT_ROUNDOFF["tf32"],
    "float32": UNIT_ROUNDOFF["float32"],
}
"""What a kernel may round to, and its unit roundoff: to nearest, to two pieces, or (cut) towards zero."""
PLAUSIBLE = (0.05, 3.0)
"""The sizes of an error field, of the one to explain, that are tried: smaller ones explain nothing, larger ones too
much. Of a narrow output even a small one decides roundings."""
GAIN = 0.02
"""A rounding that explains less of the error than this is not named."""
ALIKE = 0.005
"""Roundings whose shares differ by less do the same."""
EXPLAINED = 0.9
"""From this share of the mean square error on the error is explained."""
DEPTHS = (8, 16, 32, 64, 128, 256, 512)
"""Products that are summed before a sum is rounded, besides the contract's: the depths of units and of tiles."""
COARSEST = "bfloat16"
BEYOND = 2.0
"""An error so many times the largest of one that is rounded to `COARSEST` at every site is none of rounding: to cut off
errs by twice as much as to round."""
SIGNIFICANT_BITS = {"bfloat16": 8, "tf32": 11}
DOT = "dot"
"""Not a site but the product of lhs and rhs, in one of `PASSES`."""
PASSES = ("bf16x3", "bf16x3 cut")
"""Three bfloat16 passes leave out the product of both second pieces; the first ones are rounded or (cut) cut off."""
PARTS = 8
"""What an axis is cut into, to see where on it the error is."""
LOCAL = 2.0
"""The contrast from which on an error is said to be where it is largest, and not everywhere."""
MOST_BINS = 64
"""Bins of an axis that is summed over, each of which takes a run of the golden; of more none is tried."""


@dataclass(frozen=True)
class Rounding:
    """A rounding at a site of the staged golden. depth: products summed before it, None where it is no sum."""

    site: str
    dtype: str
    depth: int | None = None

    def __str__(self) -> str:
        summed = f" (every {self.depth} products)" if self.depth else ""
        return f"{self.dtype} at {self.site}{summed}"


@dataclass(frozen=True)
class Attribution:
    """Roundings that make the kernel's error, the largest first, and the share of its mean square that they explain.

    steps: that share with the first, the first two, … of those that had to be found.
    """

    roundings: tuple[Rounding, ...]
    explained: float
    steps: tuple[float, ...] = ()


@dataclass(frozen=True)
class Contrast:
    """The bins of an axis that carry the error: rms η in them, over rms η in the others."""

    axis: str
    bin: str  # or several
    share: float  # of the sum of squares of η
    contrast: float  # infinite where the others have no error


@dataclass(frozen=True)
class Source:
    """What an input adds to the sums in a bin of an axis: the error is `factor` times that (-1: it is missing)."""

    tensor: str
    axis: str
    bin: str
    factor: float
    explained: float

    def __str__(self) -> str:
        what = {-1.0: "is missing", 1.0: "counts twice"}.get(
            round(self.factor, 2), f"counts {1 + self.factor:.3g} times"
        )
        return f"what {self.tensor} adds in {self.axis} {self.bin} {what}"


@dataclass(frozen=True)
class Explanation:
    """One case on one backend, explained.

    kind: "exact", "rounding" (of the named sites), "noise" (within the bound, and not all of it named), "precision"
    (beyond it, by no rounding of a named site), "logic". twin: the same case on integer data. source: what of the sums
    the error is made of, where one thing is all of it.
    """

    judged: Judgement
    twin: Judgement | None
    attribution: Attribution
    contrasts: tuple[Contrast, ...]
    kind: str
    source: Source | None = None

    @property
    def region(self) -> str:
        """Where the error is, in words."""
        first = next(iter(self.contrasts), None)
        return f"in {first.axis} {first.bin}" if first and first.contrast >= LOCAL else "everywhere"

    @property
    def conclusion(self) -> str:
        """In one sentence."""
        named = " and ".join(map(str, self.attribution.roundings)) or "no rounding"
        share = f"{self.attribution.explained:.0%} explained"
        source = f": {self.source}" if self.source else ""
        return {
            "exact": "no error: every element is the golden, correctly rounded",
            "rounding": f"error = {named}, {share}",
            "noise": f"error within its bound, of roundings that no site has (best: {named}, {share})",
            "precision": f"precision is lost {self.region}, by no named site's rounding alone (best: {named}, {share})",
            "logic": f"not explained by rounding: a logic fault {self.region}{source} (best: {named}, {share})",
        }[self.kind]


def explain(trial: Trial, done: Callable[[int], None] = lambda emulations: None) -> Explanation:
    """Explain the error of a trial's worst output. `done` is called with the number of emulations made so far.

    Raises ValueError for an op that is compared bit for bit (`parity.debugging.bits` is for those), ImportError where
    the backend's framework is missing.
    """
    if trial.op.bit_exact:
        raise ValueError(f"case must be of an op whose results are rounded, got {trial.case.id} of a bit-exact one")
    judged = judge(trial)
    expected, name, ys = trial.reference, judged.output, trial.run()
    whole = {n: y for n, y in ys.items() if n in expected.golden and y.shape == expected.golden[n].shape}
    if name not in whole:
        return Explanation(judged, None, Attribution((), 0.0), (), "logic")
    fields = {n: Field.of(y, expected, n) for n, y in whole.items()}
    y, field, golden = whole[name], fields[name], expected.golden[name]
    scale = trial.scale(name)
    errors = np.where(field.wrong, np.inf, eta(y, golden, scale))
    axes = trial.axes(name)
    contrasts = contrast(errors, {**axes, **in_parts(y.shape, axes)})
    attribution = attribute(trial, name, fields, done)
    twin = judged.twin or judge_twin(trial) or (judged if trial.exact else None)
    kind = _kind(judged, twin, attribution, field, lambda: BEYOND * largest_rounding(trial, name, field))
    found = source(trial, name, field) if kind == "logic" and field.power else None
    return Explanation(judged, twin, attribution, contrasts, kind, found)


def _kind(
    judged: Judgement, twin: Judgement | None, attribution: Attribution, field: Field, limit: Callable[[], float]
) -> str:
    if not field.power and not field.wrong.any():
        return "exact"
    if field.wrong.any() and not judged.verdict.passed:
        return "logic"
    if attribution.explained >= EXPLAINED:
        return "rounding"
    if judged.verdict.passed:
        return "noise"
    fails_too = twin is not None and not twin.verdict.passed
    return "logic" if fails_too or field.largest > limit() else "precision"


def largest_rounding(trial: Trial, name: str, field: Field) -> float:
    """The largest |error| / M of an output, over the field's elements, where every site is rounded to `COARSEST`."""
    value = staged(trial, lambda site, x: rounded(x, COARSEST))[name]
    return field.largest_of(value)


# ------------------------------------------------------------------------------------------------- which rounding


@dataclass(frozen=True)
class Field:
    """The signed error (y - g) / M of the elements that can be scored.

    wrong: those finite in one and not the other, and those that nothing is summed behind and are not what they should.
    """

    error: Floats
    scored: np.ndarray
    wrong: np.ndarray
    golden: Floats
    magnitude: Floats
    dtype: str

    @classmethod
    def of(cls, y: np.ndarray, expected: Reference, name: str) -> Field:
        """The field of an output."""
        golden, magnitude = expected.golden[name], expected.magnitude[name]
        value = y.astype(np.float64)
        wrong = np.isfinite(golden) != np.isfinite(value)
        wrong |= np.isfinite(golden) & (magnitude == 0) & (value != golden)
        scored = np.isfinite(golden) & ~wrong & (magnitude > 0)
        error = (value[scored] - golden[scored]) / magnitude[scored]
        return cls(error, scored, wrong, golden[scored], magnitude[scored], str(y.dtype))

    @property
    def power(self) -> float:
        """Its mean square."""
        return float(np.mean(self.error**2)) if self.error.size else 0.0

    @property
    def largest(self) -> float:
        """Its largest absolute value."""
        return float(np.abs(self.error).max(initial=0.0))

    @property
    def size(self) -> float:
        """Its root mean square."""
        return float(np.sqrt(self.power))

    def size_of(self, value: Floats) -> float:
        """The root mean square error of `value`, not rounded, over the same elements."""
        return float(np.sqrt(np.mean(((value[self.scored] - self.golden) / self.magnitude) ** 2)))

    def largest_of(self, value: Floats) -> float:
        """The largest absolute error of `value`, not rounded, over the same elements."""
        return float(np.abs((value[self.scored] - self.golden) / self.magnitude).max(initial=0.0))

    def share_of(self, value: Floats) -> float:
        """The share of its mean square that goes when the error of `value`, rounded as the output is, is taken away."""
        with np.errstate(over="ignore", invalid="ignore"):
            rounded = round_to(value[self.scored], self.dtype).astype(np.float64)
            rest = self.error - (rounded - self.golden) / self.magnitude
        share = 1 - float(np.mean(rest**2)) / self.power
        return share if np.isfinite(share) else 0.0


def attribute(
    trial: Trial,
    name: str,
    fields: Mapping[str, Field],
    done: Callable[[int], None] = lambda emulations: None,
) -> Attribution:
    """The smallest set of roundings, found greedily, whose error field in the output `name` is the one measured.

    The output's own dtype is among them where it is narrower than the sums. Stops where the next one explains less
    than `GAIN` of the mean square. Of roundings that do the same there, the fields of the other outputs decide, and
    where they cannot the order of `Emulator.candidates`.
    """
    contract, field = trial.contract, fields[name]
    narrow = contract.is_narrow(name)
    own = (Rounding("out", contract.dtype(name)),) if narrow else ()
    if not field.power:
        return Attribution(own, 0.0)
    emulator = Emulator(trial, name, done)
    others = [other for other in fields if other != name and fields[other].power]

    def share(chosen: tuple[Rounding, ...]) -> float:
        return field.share_of(emulator.run(chosen)[name])

    def share_elsewhere(chosen: tuple[Rounding, ...]) -> float:
        emulated = emulator.run(chosen)
        return float(np.mean([max(fields[other].share_of(emulated[other]), 0.0) for other in others]))

    best: tuple[Rounding, ...] = ()
    steps: list[float] = []
    explained = share(best) if narrow else 0.0
    candidates = []
    if explained < 1 - GAIN:
        candidates = [c for c in emulator.candidates() if emulator.may_explain(c, field, field.size)]
    while explained < 1 - GAIN:
        tried = {chosen: share(chosen) for chosen in one_more(best, candidates)}
        most = max(tried.values(), default=0.0)
        if most < explained + GAIN:
            break
        alike = [chosen for chosen in tried if tried[chosen] >= most - ALIKE]
        if len(alike) > 1 and others:
            elsewhere = {chosen: share_elsewhere(chosen) for chosen in alike}
            alike = [chosen for chosen in alike if elsewhere[chosen] >= max(elsewhere.values()) - ALIKE]
        best = alike[0]
        explained = tried[best]
        steps.append(explained)
    return Attribution(best + own, explained, tuple(steps))


def one_more(chosen: tuple[Rounding, ...], candidates: list[Rounding]) -> list[tuple[Rounding, ...]]:
    """The chosen roundings and one more, of a site that has none; sums are all rounded at the same depth."""
    taken = {r.site for r in chosen}
    depth = next((r.depth for r in chosen if r.depth), None)
    return [(*chosen, c) for c in candidates if c.site not in taken and (not c.depth or depth in (None, c.depth))]


class Emulator:
    """The staged golden of a trial with some roundings and no others, of which `name` is the output that counts."""

    def __init__(self, trial: Trial, name: str, done: Callable[[int], None]) -> None:
        self.trial, self.name, self.done = trial, name, done
        self.contract = trial.contract
        self.emulations = 0
        self.sizes: dict[tuple[str, int | None], float] = {}

    def candidates(self) -> list[Rounding]:
        """Every rounding that a kernel might make: plain sites before sums, those nearest to the output first.

        Of roundings that do the same the simplest are thus the first. A sum is what has more sites in smaller steps.
        """
        shallow, deep = self._visits(self.contract.depth), self._visits(2 * self.contract.depth)
        sums = [site for site in shallow if shallow[site] != deep[site]]
        plain = [site for site in shallow if site not in sums]
        found = [
            Rounding(site, dtype, depth)
            for site in [*reversed(plain), *reversed(sums)]
            for dtype in ROUNDINGS
            for depth in (dict.fromkeys([self.contract.depth, *DEPTHS]) if site in sums else [None])
        ]
        return found + ([Rounding(DOT, passes) for passes in PASSES] if {"lhs", "rhs"} <= shallow.keys() else [])

    def _visits(self, depth: int) -> Counter[str]:
        seen: Counter[str] = Counter()

        def count(site: str, value: Floats) -> Floats:
            seen[site] += 1
            return value

        self._golden(depth, count)
        return seen

    def may_explain(self, candidate: Rounding, field: Field, size: float) -> bool:
        """Whether an error of the candidate's size, over the field's elements, can be a part of one of that size.

        Errors grow with the unit roundoff: one emulation tells the sizes of all roundings of a site.
        """
        key = candidate.site, candidate.depth
        known = PASSES[0] if candidate.site == DOT else "bfloat16"
        if key not in self.sizes:
            self.sizes[key] = field.size_of(self.run((replace(candidate, dtype=known),))[self.name])
        own = self.sizes[key] * ROUNDINGS.get(candidate.dtype, 1.0) / ROUNDINGS.get(known, 1.0)
        return PLAUSIBLE[0] * size < own < PLAUSIBLE[1] * size

    def run(self, chosen: tuple[Rounding, ...]) -> dict[str, Floats]:
        """The outputs with the chosen roundings, themselves not rounded."""
        self.emulations += 1
        self.done(self.emulations)
        depth = next((r.depth for r in chosen if r.depth), self.contract.depth)
        dtypes = {r.site: r.dtype for r in chosen}
        if DOT in dtypes:
            dtypes |= {"lhs": dtypes[DOT], "rhs": dtypes[DOT]}
        return self._golden(depth, _rounding(dtypes))

    def _golden(self, depth: int, rounding: Callable[[str, Floats], Floats]) -> dict[str, Floats]:
        return staged(self.trial, rounding, replace(self.contract, depth=depth))


def _rounding(dtypes: Mapping[str, str]) -> Callable[[str, Floats], Floats]:
    def rounding(site: str, value: Floats) -> Floats:
        dtype = dtypes.get(site)
        if dtype is None:
            return value
        return in_three_passes(site, value, dtype) if dtype in PASSES else rounded(value, dtype)

    return rounding


def rounded(value: Floats, dtype: str) -> Floats:
    """float64 values rounded to a dtype, as one of `ROUNDINGS`."""
    if dtype.endswith(" cut"):
        return cut_off(value, SIGNIFICANT_BITS[dtype.removesuffix(" cut")])
    return round_to(value, dtype).astype(np.float64)


def in_three_passes(site: str, value: Floats, passes: str) -> Floats:
    """The operand `lhs` [..., I, J] or `rhs` [..., J, L] of a dot, so that its product is that of three passes.

    Of both operands in two bfloat16 pieces all products but that of the second ones, which a longer sum takes away
    again: [p, -s] @ [p; s].
    """
    first = rounded(value, passes.replace("bf16x3", "bfloat16"))
    second = rounded(value - first, "bfloat16")
    if site == "lhs":
        return np.concatenate([first + second, -second], axis=-1)
    return np.concatenate([first + second, second], axis=-2)


# ------------------------------------------------------------------------------------------------------- and where


def contrast(errors: Floats, axes: Mapping[str, np.ndarray]) -> tuple[Contrast, ...]:
    """Of each axis the bins that carry the error, the axis that says most about it first.

    axes: by name, labels that broadcast to `errors`, of the bin that each element is in. Of the bins in the order of
    their rms η those before one of the borders are named: the border that takes most from knowing how many elements
    there are on either side to knowing how much of the error (the Kullback-Leibler divergence of the two). An axis with
    a single bin is left out.
    """
    power = np.minimum(np.where(np.isfinite(errors), np.abs(errors), 1e100), 1e100) ** 2
    total = float(power.sum())
    found: list[tuple[float, Contrast]] = []
    for axis, labels in axes.items():
        bins, first, index = np.unique(labels, return_index=True, return_inverse=True)
        index = np.broadcast_to(index.reshape(labels.shape), errors.shape).ravel()
        if not total or bins.size < 2:
            continue
        inside, sizes = np.bincount(index, power.ravel(), bins.size), np.bincount(index, minlength=bins.size)
        order = np.argsort(-inside / np.maximum(sizes, 1), kind="stable")
        share, rest = (np.cumsum(x)[:-1] / total for x in (inside[order], inside[order[::-1]]))
        size = np.cumsum(sizes[order])[:-1] / errors.size
        gain = np.where((size > 0) & (size < 1), _divergence(share, rest[::-1], size), -1.0)
        border = int(gain.argmax())
        if gain[border] < 0:
            continue
        s, r, f = float(share[border]), float(rest[::-1][border]), float(size[border])
        ratio = float(np.sqrt(s / f * (1 - f) / r)) if r else float("inf")
        s /= s + r
        found.append(
            (
                float(gain[border]),
                Contrast(axis, spelled(bins[sorted(order[: border + 1], key=first.__getitem__)]), s, ratio),
            )
        )
    return tuple(c for _, c in sorted(found, key=lambda pair: -pair[0]))


def _divergence(share: Floats, rest: Floats, size: Floats) -> Floats:
    with np.errstate(divide="ignore", invalid="ignore"):
        terms = share * np.log(share / size), rest * np.log(rest / (1 - size))
    return np.nan_to_num(terms[0]) + np.nan_to_num(terms[1])


def spelled(bins: Iterable[Any]) -> str:
    """Bins in words: numbers as ranges; of many the first few."""
    names = [str(bin_) for bin_ in bins]
    numbers = sorted(int(name) for name in names if name.isdigit())
    runs = [[n for _, n in run] for _, run in groupby(enumerate(numbers), lambda at: at[1] - at[0])]
    found = [f"{run[0]}-{run[-1]}" if len(run) > 1 else str(run[0]) for run in runs]
    found += [name for name in names if not name.isdigit()]
    return ", ".join(found[:4]) + (f" and {len(found) - 4} more" if len(found) > 4 else "")


def in_parts(shape: tuple[int, ...], axes: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Labels of `PARTS` parts of each axis of an array along which no label of `axes` changes."""
    parts = {}
    for n, size in enumerate(shape):
        if any(labels.ndim >= len(shape) - n and labels.shape[n - len(shape)] > 1 for labels in axes.values()):
            continue
        edges = np.unique(np.linspace(0, size, min(PARTS, size) + 1).astype(int))
        names = [f"{low}-{high - 1}" if high - low > 1 else str(low) for low, high in pairwise(edges)]
        labels = np.repeat(np.array(names), np.diff(edges))
        parts[f"axis {n}"] = np.expand_dims(labels, [a for a in range(len(shape)) if a != n])
    return parts


def source(trial: Trial, name: str, field: Field) -> Source | None:
    """What the error is a multiple of, of all that the inputs of an op add to its sums bin by bin; None if of nothing.

    The bins are those that `Op.axes` has of inputs; without one of them the golden lacks what it adds. (Of a few
    elements anything is a multiple.)
    """
    if field.error.size < MOST_BINS:
        return None
    op, case = trial.op, trial.case
    labels = op.axes(case, trial.inputs)
    best = None
    given = {t: x for t, x in trial.inputs.items() if x is not None and t in labels}
    for tensor, axis in ((t, axis) for t in given for axis in labels[t]):
        x, bins = given[tensor], np.unique(labels[tensor][axis])
        for bin_ in bins if 1 < bins.size <= MOST_BINS else []:
            without = {**trial.inputs, tensor: np.where(labels[tensor][axis] == bin_, np.zeros((), x.dtype), x)}
            with np.errstate(invalid="ignore", over="ignore"):
                rest = outputs(op.golden(**without, **op.arguments(case)))[name]
            added = (field.golden - rest[field.scored]) / field.magnitude
            product, power = float(np.mean(added * field.error)), float(np.mean(added**2))
            if not power or not np.isfinite(product):
                continue
            explained = product**2 / (power * field.power)
            if explained > (best.explained if best else EXPLAINED):
                best = Source(tensor, axis, str(bin_), product / power, explained)
    return best
