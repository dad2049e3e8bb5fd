"""Which roundings make an error field: the golden is run with every candidate in turn, greedily, one more at a time."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import numpy as np

from parity.dtypes import UNIT_ROUNDOFF, Floats, cut_off, round_to
from parity.judging.reference import Reference
from parity.judging.stages import staged
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
MOST_VISITS = 64
"""Visits of one site, each of which takes a run of the golden to try; of more none is tried by itself."""
LIKELY_VISITS = 3
"""Visits that every rounding is tried at."""
OPERANDS = ("lhs", "rhs")
"""Sites of the operands of dots: what a matrix unit rounds to 11 bits is TF32 there, elsewhere it may be float16."""


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
