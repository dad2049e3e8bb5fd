"""Where the error of one case comes from: which rounding, at which site of the staged golden, or no rounding at all.

It needs the kernel's output and nothing else: no dumps, no debugging build. A loss of precision leaves a fingerprint:
rounding the same values at the same place errs by the same amounts, sign for sign. So the golden is run with every
candidate rounding in turn, and the set whose error field is the kernel's is the answer. An error that no rounding
makes is a fault of logic, and then *where* it is says most.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Set
from dataclasses import dataclass, field, replace
from itertools import groupby, pairwise
from typing import Any

import numpy as np

from parity.debugging.attribution import MENDED, outputs_in_float64
from parity.debugging.instead import other_call
from parity.dtypes import UNIT_ROUNDOFF, Floats, cut_off, round_to
from parity.judging.fit import K
from parity.judging.judge import Judgement, explained, judge, judge_twin
from parity.judging.metrics import eta
from parity.judging.reference import Reference
from parity.judging.stages import staged
from parity.op import Op, outputs
from parity.trial import Trial

ROUNDINGS: Mapping[str, float] = {
    "bfloat16": UNIT_ROUNDOFF["bfloat16"],
    "tf32": UNIT_ROUNDOFF["tf32"],
    "float16": UNIT_ROUNDOFF["float16"],
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
FEW = 64
"""Elements of an output from which on one seed says enough; of fewer more seeds are taken together, `SEEDS` at most."""
SEEDS = 8
SIGNIFICANT_BITS = {"bfloat16": 8, "tf32": 11}
DOT = "dot"
"""Not a site but the product of lhs and rhs, in one of `PASSES`."""
PASSES = ("bf16x3", "bf16x3 cut")
"""Three bfloat16 passes leave out the product of both second pieces; the first ones are rounded or (cut) cut off."""
PARTS = 8
"""What an axis is cut into, to see where on it the error is."""
LOCAL = 2.0
"""The contrast from which on an error is said to be where it is largest, and not everywhere."""
MOST_VISITS = 64
"""Visits of one site, each of which takes a run of the golden to try; of more none is tried by itself."""
LIKELY_VISITS = 3
"""Visits that every rounding is tried at."""
OPERANDS = ("lhs", "rhs")
"""Sites of the operands of dots: what a matrix unit rounds to 11 bits is TF32 there, elsewhere it may be float16."""
MANY = 8
"""Elements from which on it is no chance that they are a multiple of others."""
MOST_BINS = 64
"""Bins of an axis that is summed over, each of which takes a run of the golden; of more none is tried."""


@dataclass(frozen=True)
class Rounding:
    """A rounding at a site of the staged golden. depth: products summed before it, None where it is no sum. visit: the
    only one of the golden's visits of the site that it is made at, from 0 on; None: at all."""

    site: str
    dtype: str
    depth: int | None = None
    visit: int | None = None

    @property
    def sites(self) -> tuple[str, ...]:
        """Where it is made: of passes, at both operands."""
        return OPERANDS if self.dtype in PASSES else (self.site,)

    def __str__(self) -> str:
        dtype = "tf32 or float16" if self.dtype == "tf32" and self.site not in OPERANDS else self.dtype
        summed = f" (every {self.depth} products)" if self.depth else ""
        visit = "" if self.visit is None else f", visit {self.visit} alone"
        return f"{dtype} at {self.site}{summed}{visit}"


@dataclass(frozen=True)
class Attribution:
    """Roundings that make the kernel's error, the largest first, and the share of its mean square that they explain.

    steps: that share with the first, the first two, … of those that had to be found. where: the bins of an axis that
    alone were to be explained, as they have next to all of the error.
    """

    roundings: tuple[Rounding, ...]
    explained: float
    steps: tuple[float, ...] = ()
    where: str = ""


@dataclass(frozen=True)
class Contrast:
    """The bins of an axis that carry the error: rms |δ|/σ in them (η where no contract says σ), over the others'."""

    axis: str
    bin: str  # or several
    share: float  # of the sum of squares
    contrast: float  # infinite where the others have no error
    inside: np.ndarray | None = field(default=None, repr=False, compare=False)  # which elements are in them


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
    (beyond it, by no rounding of a named site), "unstable" (float64 mends nearly all of it), "logic", "overflow"
    (finite in float64 alone), "unknown" (one of these: there is no float64 evaluation), "form" (no result of the
    golden's form). twin: the same case on integer data.
    source: what of the sums the error is made of, where one thing is all of it. alike: what of the golden the output
    has where it is wrong, in words. errors: of the output's elements, in what `symbol` says: |δ|/σ or, without a
    contract's sites, η.
    """

    judged: Judgement
    twin: Judgement | None
    attribution: Attribution
    contrasts: tuple[Contrast, ...]
    kind: str
    source: Source | None = None
    errors: Floats | None = None
    symbol: str = "η"
    alike: str = ""

    @property
    def region(self) -> str:
        """Where the error is, in words."""
        first = next(iter(self.contrasts), None)
        return f"in {first.axis} {first.bin}" if first and first.contrast >= LOCAL else "everywhere"

    @property
    def conclusion(self) -> str:
        """In one sentence."""
        named = " and ".join(map(str, self.attribution.roundings))
        share = f"{max(self.attribution.explained, 0.0):.0%} explained"
        source = f": {self.source or self.alike}" if self.source or self.alike else ""
        nearest = f" (nearest: {named}, {share})" if named and self.attribution.explained >= GAIN else ""
        return {
            "exact": "no error: every element is the golden, correctly rounded",
            "rounding": f"error {self.attribution.where}{' ' if self.attribution.where else ''}= {named}, {share}",
            "noise": f"error within its bound, of many roundings of which none stands out{nearest}",
            "precision": f"precision is lost {self.region}, by no named site's rounding alone: in float64 the kernel "
            f"keeps its contract{nearest}",
            "unstable": f"precision is lost {self.region}, by an unstable computation: in float64 the error is less "
            f"than {MENDED:g} of it, and still beyond the contract",
            "logic": f"not explained by rounding: a logic fault {self.region}{source}; "
            "in float64 the kernel is wrong too",
            "overflow": f"not finite {self.region}, where in float64 the kernel is and keeps its contract: a narrower "
            "dtype overflows (parity stages says where)",
            "form": f"nothing to explain: {self.judged.verdict.reason}",
            "unknown": f"error {self.region}, not explained by a rounding at the golden's sites{nearest}: a fault of "
            "logic, or precision lost elsewhere",
        }[self.kind]


def explain(
    trial: Trial,
    done: Callable[[int], None] = lambda emulations: None,
    *,
    judged: Judgement | None = None,
    output: str = "",
    ops: Iterable[Op] = (),
) -> Explanation:
    """Explain the error of an output of a trial: by default of the one that is furthest off.

    done: called with the number of emulations made so far. judged: the verdict, where it is known. ops: the matrix, see
    `lines_compared_bit_for_bit`. Raises ValueError for an op that is compared bit for bit (`parity.debugging.bits` is
    for those) and for an output that the op does not have, ImportError where the backend's framework is missing.
    """
    if trial.op.bit_exact:
        raise ValueError(f"case must be of an op whose results are rounded, got {trial.case.id} of a bit-exact one")
    judged = judged or judge(trial)
    name = output_named(trial, output) or judged.output
    judged = replace(judged, output=name)
    expected, ys = trial.reference, {} if judged.ended else trial.run()
    whole = {n: y for n, y in ys.items() if n in expected.golden and y.shape == expected.golden[n].shape}
    if name not in whole:
        return Explanation(judged, None, Attribution((), 0.0), (), "form")
    fields = {n: Field.of(y, expected, n) for n, y in whole.items()}
    field = fields[name]
    errors, symbol = _errors(trial, name, whole[name], field)
    axes = trial.axes(name)
    contrasts = contrast(errors, {**axes, **in_parts(errors.shape, axes)})
    attribution = attribute(trial, name, fields, done)
    kind = _kind(trial, judged, attribution, field, frozenset(ops))
    if kind in ("precision", "unknown") and contrasts:
        more = _in_bins(trial, name, field, contrasts[0], done) or attribute(trial, name, fields, done, at_visits=True)
        if more.explained >= EXPLAINED:
            attribution, kind = more, "rounding"
    twin = judged.twin or judge_twin(trial) or (judged if trial.exact else None)
    found, alike = None, ""
    if kind == "logic":
        found = source(trial, name, field) if field.power else None
        y = whole[name]
        alike = "" if found else likeness(y, expected.golden[name], axes) or str(other_call(trial, name, y) or "")
    return Explanation(judged, twin, attribution, contrasts, kind, found, errors, symbol, alike)


def _in_bins(trial: Trial, name: str, whole: Field, first: Contrast, done: Callable[[int], None]) -> Attribution | None:
    """The roundings that make the error in the bins that carry it, where that explains it; else None."""
    if first.contrast < LOCAL or first.inside is None or first.share < EXPLAINED:
        return None
    part = whole.within(first.inside)
    if part.error.size < FEW:
        return None
    found = attribute(trial, name, {name: part}, done)
    if found.explained < EXPLAINED:
        found = attribute(trial, name, {name: part}, done, at_visits=True)
    return replace(found, where=f"in {first.axis} {first.bin}") if found.explained >= EXPLAINED else None


def output_named(trial: Trial, output: str) -> str:
    """The output of that name, "" where none is asked for. Raises ValueError for one that the op does not have."""
    if output and output not in trial.reference.golden:
        raise ValueError(f"output must be one of {', '.join(trial.reference.golden)}, got {output!r}")
    return output


def _errors(trial: Trial, name: str, y: np.ndarray, field: Field) -> tuple[Floats, str]:
    """|δ| of each element in σ of its contract or, where that names no sites, in η; infinite where it is wrong."""
    allowed = explained(trial).get(name)
    golden = trial.reference.golden[name]
    errors = allowed.sigmas(y) if allowed else eta(y, golden, trial.scale(name))
    return np.where(field.wrong, np.inf, np.nan_to_num(errors, posinf=np.inf)), "|δ|/σ" if allowed else "η"


def _kind(trial: Trial, judged: Judgement, attribution: Attribution, field: Field, ops: Set[Op]) -> str:
    """What the error is: a rounding that was found or, of a kernel that fails, logic where float64 does not mend it."""
    if not field.power and not field.wrong.any():
        return "exact"
    if attribution.explained >= EXPLAINED and not field.wrong.any():
        return "rounding"
    if judged.verdict.passed:
        return "noise"
    try:
        exact = outputs_in_float64(trial, ops)[judged.output]
    except Exception:  # whatever a broken kernel raises where each of its steps is followed
        return "unknown"
    if not _keeps_contract(trial, judged.output, exact):
        return "unstable" if _is_mended(trial, judged.output, exact, field) else "logic"
    return "overflow" if field.wrong.any() else "precision"


def _is_mended(trial: Trial, name: str, exact: Floats, field: Field) -> bool:
    """Whether float64 leaves little of an output's error, and little of each element's that it leaves most of.

    The second, for what a kernel reads beyond its arrays is another number in each run.
    """
    left = Field.of(exact, trial.reference, name)
    if field.wrong.any() or left.wrong.any() or left.size >= MENDED * field.size:
        return False
    most = np.abs(left.error) >= left.largest / 2
    return bool(np.all(np.abs(left.error[most]) < MENDED * np.abs(field.error[most])))


def _keeps_contract(trial: Trial, name: str, exact: Floats) -> bool:
    """Whether an output of a kernel in float64, rounded once to its dtype, is within its contract."""
    golden = trial.reference.golden[name]
    if exact.shape != golden.shape or (np.isfinite(exact) != np.isfinite(golden)).any():
        return False
    y = round_to(exact, trial.contract.dtype(name))
    if (allowed := explained(trial).get(name)) is None:
        return bool((eta(y, golden, trial.scale(name)) <= trial.bound).all())
    fit = allowed.fit(name, y, {})
    return fit.sigmas <= K and fit.load <= 1


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

    def within(self, inside: np.ndarray) -> Field:
        """Its elements that are inside a region of the output."""
        kept = inside[self.scored]
        wrong, scored = self.wrong & inside, self.scored & inside
        return Field(self.error[kept], scored, wrong, self.golden[kept], self.magnitude[kept], self.dtype)

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

    def error_of(self, value: Floats) -> Floats:
        """The error of `value`, rounded as the output is, over the same elements."""
        with np.errstate(over="ignore", invalid="ignore"):
            rounded = round_to(value[self.scored], self.dtype).astype(np.float64)
            error: Floats = (rounded - self.golden) / self.magnitude
        return error

    def left_by(self, value: Floats) -> float:
        """The sum of squares that is left when the error of `value` is taken away."""
        with np.errstate(over="ignore", invalid="ignore"):
            return float(np.sum((self.error - self.error_of(value)) ** 2))


def attribute(
    trial: Trial,
    name: str,
    fields: Mapping[str, Field],
    done: Callable[[int], None] = lambda emulations: None,
    *,
    at_visits: bool = False,
) -> Attribution:
    """The smallest set of roundings, found greedily, whose error field in the output `name` is the one measured.

    The output's own dtype is among them where it is narrower than the sums. Stops where the next one explains less than
    `GAIN` of the mean square, or no more than the best of so many that have nothing to do with it would: with n
    numbers left to explain that is 2 ln(candidates) / n of what is left. Of few numbers those of further seeds are
    taken as well. at_visits: where that does not explain the error, single visits of sites are tried too. Of roundings
    that do the same there, the fields of the other outputs decide, and where they cannot the order of
    `Emulator.candidates`.
    """
    contract = trial.contract
    narrow = contract.is_narrow(name)
    own = (Rounding("out", contract.dtype(name)),) if narrow else ()
    if not fields[name].power:
        return Attribution(own, 0.0)
    seeds = Seeds.of_trial(trial, name, fields, done)
    others = [other for other in fields if other != name and fields[other].power]

    def share_elsewhere(chosen: tuple[Rounding, ...]) -> float:
        return float(np.mean([max(seeds.share(chosen, other), 0.0) for other in others]))

    best: tuple[Rounding, ...] = ()
    steps: list[float] = []
    explained = seeds.share(best) if narrow else 0.0
    candidates = []
    if explained < 1 - GAIN:
        candidates = [
            c for c in seeds.first.candidates() if seeds.first.may_explain(c, fields[name], fields[name].size)
        ]
    while explained < 1 - GAIN:
        tried = {chosen: seeds.share(chosen) for chosen in one_more(best, candidates)}
        most = max(tried.values(), default=0.0)
        if most < explained + seeds.least_gain(explained, len(tried)) and explained < EXPLAINED and at_visits:
            tried = {(*best, visit): seeds.share((*best, visit)) for visit in seeds.visits(best)}
            most = max(tried.values(), default=0.0)
        if most < explained + seeds.least_gain(explained, len(tried)):
            break
        alike = [chosen for chosen in tried if tried[chosen] >= most - ALIKE]
        if len(alike) > 1 and others:
            elsewhere = {chosen: share_elsewhere(chosen) for chosen in alike}
            alike = [chosen for chosen in alike if elsewhere[chosen] >= max(elsewhere.values()) - ALIKE]
        best = alike[0]
        explained = tried[best]
        steps.append(explained)
    return Attribution(best + own, explained, tuple(steps))


@dataclass(frozen=True)
class Seeds:
    """The error fields of an output, of one seed or of several, each with the emulator of its golden."""

    name: str
    of: tuple[tuple[Emulator, Mapping[str, Field]], ...]

    @classmethod
    def of_trial(cls, trial: Trial, name: str, fields: Mapping[str, Field], done: Callable[[int], None]) -> Seeds:
        """The trial's own seed, and as many further ones as an output of few elements needs."""
        found = [(Emulator(trial, name, done), fields)]
        numbers = fields[name].error.size
        for n in range(1, SEEDS if trial.given is None and numbers else 1):
            if numbers >= FEW:
                break
            other = trial.with_seed(trial.case.seed + n)
            ys, expected = other.run(), other.reference
            found.append((Emulator(other, name, done), {each: Field.of(ys[each], expected, each) for each in fields}))
            numbers += found[-1][1][name].error.size
        return cls(name, tuple(found))

    @property
    def first(self) -> Emulator:
        """That of the trial's own seed."""
        return self.of[0][0]

    @property
    def numbers(self) -> int:
        """How many there are to explain."""
        return sum(fields[self.name].error.size for _, fields in self.of)

    def least_gain(self, explained: float, candidates: int) -> float:
        """What one more rounding must explain: more than the best of so many that have nothing to do with the error."""
        by_chance = 2 * float(np.log(max(candidates, 2))) / self.numbers
        return max(GAIN, (1 - explained) * by_chance)

    def share(self, chosen: tuple[Rounding, ...], output: str = "") -> float:
        """The share of the mean square of an output's error (default: the one that counts) that roundings explain."""
        output = output or self.name
        left, total = 0.0, 0.0
        for emulator, fields in self.of:
            left += fields[output].left_by(emulator.run(chosen)[output])
            total += fields[output].power * fields[output].error.size
        share = 1 - left / total if total else 0.0
        return share if np.isfinite(share) else 0.0

    def visits(self, best: tuple[Rounding, ...]) -> list[Rounding]:
        """Roundings of a site at one of its visits only (a chunk, a step along K), of the likeliest visits.

        Which those are the squares of the error say, whatever the dtype: a rounding errs where what it rounds goes.
        """
        emulator, fields = self.of[0]
        power, taken = fields[self.name].error ** 2, {site for r in best for site in r.sites}
        likely: list[tuple[float, Rounding]] = []
        for visit in emulator.single_visits():
            if visit.site in taken:
                continue
            made = fields[self.name].error_of(emulator.run((visit,))[self.name]) ** 2
            norm = float(np.sqrt((made**2).sum() * (power**2).sum()))
            likely.append((float((made * power).sum()) / norm if norm else 0.0, visit))
        likely.sort(key=lambda pair: -pair[0])
        return [replace(visit, dtype=dtype) for _, visit in likely[:LIKELY_VISITS] for dtype in ROUNDINGS]


def one_more(chosen: tuple[Rounding, ...], candidates: list[Rounding]) -> list[tuple[Rounding, ...]]:
    """The chosen roundings and one more, of a site that has none; sums are all rounded at the same depth."""
    taken = {site for r in chosen for site in r.sites}
    depth = next((r.depth for r in chosen if r.depth), None)
    return [(*chosen, c) for c in candidates if taken.isdisjoint(c.sites) and (not c.depth or depth in (None, c.depth))]


class Emulator:
    """The staged golden of a trial with some roundings and no others, of which `name` is the output that counts."""

    def __init__(self, trial: Trial, name: str, done: Callable[[int], None]) -> None:
        self.trial, self.name, self.done = trial, name, done
        self.contract = trial.contract
        self.emulations = 0
        self.sizes: dict[Rounding, float] = {}

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
        known = replace(candidate, dtype=PASSES[0] if candidate.dtype in PASSES else "bfloat16")
        if known not in self.sizes:
            self.sizes[known] = field.size_of(self.run((known,))[self.name])
        own = self.sizes[known] * ROUNDINGS.get(candidate.dtype, 1.0) / ROUNDINGS.get(known.dtype, 1.0)
        return PLAUSIBLE[0] * size < own < PLAUSIBLE[1] * size

    def run(self, chosen: tuple[Rounding, ...]) -> dict[str, Floats]:
        """The outputs with the chosen roundings, themselves not rounded."""
        self.emulations += 1
        self.done(self.emulations)
        depth = next((r.depth for r in chosen if r.depth), self.contract.depth)
        dtypes = {site: (r.dtype, r.visit) for r in chosen for site in r.sites}
        return self._golden(depth, _rounding(dtypes))

    def single_visits(self) -> list[Rounding]:
        """Every site at each of its visits, rounded to bfloat16; none of a site with one visit, or with very many."""
        shallow, deep = self._visits(self.contract.depth), self._visits(2 * self.contract.depth)
        visits: dict[tuple[str, int | None], int] = {
            (site, None): count for site, count in shallow.items() if count == deep[site]
        }
        sums = [site for site in shallow if shallow[site] != deep[site]]
        for depth in DEPTHS if sums else ():
            seen = self._visits(depth)
            visits |= {(site, depth): seen[site] for site in sums}
        return [
            Rounding(site, "bfloat16", depth, visit)
            for (site, depth), count in visits.items()
            if 1 < count <= MOST_VISITS
            for visit in range(count)
        ]

    def _golden(self, depth: int, rounding: Callable[[str, Floats], Floats]) -> dict[str, Floats]:
        return staged(self.trial, rounding, replace(self.contract, depth=depth))


def _rounding(dtypes: Mapping[str, tuple[str, int | None]]) -> Callable[[str, Floats], Floats]:
    seen: Counter[str] = Counter()

    def rounding(site: str, value: Floats) -> Floats:
        dtype, visit = dtypes.get(site, ("", None))
        seen[site] += 1
        if not dtype or visit not in (None, seen[site] - 1):
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
                Contrast(
                    axis,
                    spelled(bins[sorted(order[: border + 1], key=first.__getitem__)]),
                    s,
                    ratio,
                    np.isin(index, order[: border + 1]).reshape(errors.shape),
                ),
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


def likeness(y: np.ndarray, golden: Floats, axes: Mapping[str, np.ndarray]) -> str:
    """What a wrong output is instead of its golden, in words: "" where it is nothing that is known.

    Bin by bin of each axis of labels: a multiple of the golden (0: it is missing), or the golden of another bin; the
    golden one step further along a dimension; its transpose. An axis explains the output where every bin of it is such
    a one or right.
    """
    value = y.astype(np.float64)
    if not (np.isfinite(value).all() and np.isfinite(golden).all()):
        return ""
    if y.ndim >= 2 and y.shape[-1] == y.shape[-2] and _same(value, golden.swapaxes(-1, -2)):
        return "it is the golden, transposed"
    for axis, labels in {"": np.zeros((1,) * y.ndim, int), **axes}.items():
        bins = np.unique(labels)
        inside = {bin_: np.broadcast_to(labels == bin_, y.shape) for bin_ in bins} if bins.size <= MOST_BINS else {}
        found: dict[str, list[str]] = {}
        for bin_, here in inside.items():
            if _same(value[here], golden[here]):
                continue
            found.setdefault(_instead(value[here], golden, here, bin_, inside), []).append(str(bin_))
        if found and "" not in found:
            return "; ".join(f"{axis} {spelled(of)} {what}" if axis else f"it {what}" for what, of in found.items())
    for n, size in enumerate(y.shape):
        later, earlier = np.arange(1, size), np.arange(size - 1)
        for taken, given, way in ((later, earlier, "before"), (earlier, later, "after")):
            if size > MANY and _same(np.take(value, taken, n), np.take(golden, given, n)):
                return f"each element along axis {n} is the golden's one {way}"
    return ""


def _same(value: Floats, golden: Floats) -> bool:
    rest = float(((value - golden) ** 2).sum())
    return value.size > 0 and rest <= ALIKE**2 * float((golden**2).sum())


def _instead(value: Floats, golden: Floats, here: np.ndarray, bin_: Any, inside: Mapping[Any, np.ndarray]) -> str:
    """What a bin has that does not have its golden."""
    own = golden[here]
    power = float((own**2).sum())
    factor = float((value * own).sum()) / power if power else 0.0
    if not value.any():
        return "is 0"
    if value.size >= MANY and _same(value, factor * own):
        return f"is {factor:.4g} times the golden"
    for other, there in inside.items():
        if other != bin_ and there.sum() == here.sum() >= MANY and _same(value, golden[there]):
            return f"has the golden of {other}"
    return ""


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
