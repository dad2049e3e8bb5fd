"""How an output fits its contract: in every element, as a whole, and in every label of it.

With σ_i² what the contract explains of an element (`parity.judging.spread`) and δ_i the smallest compute error that
explains it (`metrics.explained_by`):

- *Elements*: |δ_i| ≤ k σ_i. σ_i is that of the element's own runs or, where that is larger, of its row and column, so
  that a few small runs make no lucky zero, and never less than one rounding of the result in the accumulator; nor so
  little that a kernel may not jump as a run did.
- *The whole, and each label* (a head, a group, a tile): ratio² = Σ w δ² / Σ w E[δ²] ≤ κ² F. How much of an error
  shows depends on where the golden value lies between two roundings of the output's dtype, so E[δ²] is that of a normal
  error of variance σ_i², cut off at both. Weights w = 1 / (row and column mean of σ²) let small elements count as well.
  What an emulation of the contract, which rounds to nearest, has beyond 1 is allowed as well (`Fit.beside`): random
  rounding has twice its variance where values lie anywhere between two numbers, but as much at a tie.
- *Label beside label*: one label's ratio² over that of all others of its axis, or over 1 where they are better than
  their contract, ≤ κ_even² F.

F is what chance may do. A sum of squares that errors make has ν = 2 mean² / variance degrees of freedom; where elements
err together (an error of a state is in all that read it) ν is smaller than elements by themselves would have it, by as
much as the sums of the runs themselves vary. A kernel at its contract has a ratio² distributed as F(ν, R ν'), with ν'
the degrees of freedom of one of R runs. Its quantile at 1 - FALSE / LOOKS, and k, the quantile of Student's t with R
degrees of freedom at FALSE / ELEMENTS, are what lets a whole tier fail falsely no more than once in a thousand times.
Both are those of `RUNS[-1]` runs, the number that a failure needs; with fewer runs a verdict can only be a pass, but
for an error beyond even the quantile of Student's t with as few degrees of freedom.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import reduce
from typing import Any

import numpy as np
from scipy import special

from parity.dtypes import Floats, neighbour, round_to
from parity.judging.metrics import UNDERFLOW, Metrics, Scale, explained_by, wrong_finiteness
from parity.judging.verdict import FALSE, Verdict

KAPPA = 1.3
"""How many times its contract's error a kernel's may be: what contracts leave out (the order of a sum, an exp).
Of 1,320 pairs of case and backend, drawn at random, four need more than 1.25 of a seed and four runs, and none more
than 1.29; over eight seeds and 64 runs these four are at 1.00 to 1.08 times their contract."""
KAPPA_EVEN = 1.25
"""How many times the others' ratio a label's may be: what contracts leave out differs less from label to label."""
ELEMENTS, LOOKS = 1e9, 1e6
"""Elements and labels that a tier looks at, rounded up to a power of ten."""
RUNS = (4, 16, 64)
"""Runs of the contract that a verdict takes: what passes on few needs no more."""
OF_LARGEST = 2
"""How many times the largest error of a run an element's may be. Of errors that are spread as a sum's are it is less
than k σ. What is quantised near a tie jumps in one run of many: k σ of 64 such runs is 0.8 of the jump."""
MANY = 16
"""Elements whose mean square is their size: of fewer, the runs that are small by chance would weigh most."""
LEAST_FREEDOM = 0.5
"""Degrees of freedom below which nothing is to be seen: no error of the contract's size would show."""
LIMITS = {count: float(-special.stdtrit(count, FALSE / ELEMENTS / 2)) for count in RUNS}
"""How many σ an element's error may be, of a σ from so many runs: 1,565 of 4, 20 of 16. Beyond it none more are
needed."""
K = LIMITS[RUNS[-1]]
"""How many σ an element's error may be."""


@dataclass(frozen=True)
class Look:
    """The error of an output, or of one label of it, beside what the contract explains."""

    axis: str  # "" for all of the output
    label: str
    ratio: float  # rms of the error over that of the contract
    limit: float  # what it may be
    others: float = 1.0  # the ratio of all other labels, where that is what it is held to

    @property
    def load(self) -> float:
        """The ratio, as a share of what it may be: beside others that are better than their contract, beside that."""
        return self.ratio / (self.limit * max(self.others, 1.0))


@dataclass(frozen=True)
class Fit:
    """How one output fits its contract."""

    output: str
    sigmas: float  # the largest |δ| / σ; infinite where one of output and golden is finite and the other not
    beyond: int  # elements whose is larger than `K`
    ratio: float  # the output's as a whole; NaN where nothing is to be seen
    freedom: tuple[float, float]  # degrees of freedom of that: of the error, and of what the runs explain
    looks: tuple[Look, ...]
    pairs: tuple[Look, ...]  # each label beside the others of its axis

    @property
    def load(self) -> float:
        """The largest share that any gate finds used up; above 1 that gate fails."""
        return max(self.sigmas / K, *(look.load for look in (*self.looks, *self.pairs)), 0.0)

    def beside(self, emulated: Fit) -> Fit:
        """This fit, with limits times the ratios of the `emulated` contract, look by look, where those are above 1.

        An output of the wrong dtype may have other looks: those keep their limits.
        """
        has = {(look.axis, look.label): max(look.ratio, 1.0) for look in emulated.looks}
        looks = [replace(look, limit=look.limit * has.get((look.axis, look.label), 1.0)) for look in self.looks]
        return replace(self, looks=tuple(looks))

    def __str__(self) -> str:
        times = f", {self.ratio:.3g} × its contract" if self.ratio == self.ratio else ""
        return f"{self.output}: {self.sigmas:.3g} σ (bound {K:.3g}){times}"

    def verdict(self) -> Verdict | None:
        """OUT OF BOUND, OFF CONTRACT or UNEVEN, with the output, the label and the ratio; None where it fits."""
        if self.beyond:
            reason = f"{self.output}: {self.sigmas:.3g} σ (bound {K:.3g}), {self.beyond} elements beyond"
            return Verdict("OUT OF BOUND", "G3", reason)
        for outcome, looks in (("OFF CONTRACT", self.looks), ("UNEVEN", self.pairs)):
            look = max(looks, key=lambda look: look.load, default=None)
            if look and look.load > 1:
                return Verdict(outcome, "G3", f"{self.output}: {self._words(look)}")
        return None

    def _words(self, look: Look) -> str:
        where = f" in {look.axis} {look.label}" if look.axis else ""
        beside = next((pair for pair in self.pairs if (pair.axis, pair.label) == (look.axis, look.label)), None)
        others = f" (others {beside.others:.3g})" if beside else ""
        return f"{look.ratio:.3g} × its contract{where}{others}"


def over_seeds(fits: Sequence[Fit], emulated: Sequence[Fit] = ()) -> Verdict | None:
    """OFF CONTRACT where one output of several seeds is so as a whole, though none by itself need be; else None.

    Of few elements a seed says little: those of all together say more. emulated: as `Fit.beside`, of each seed.
    """
    shown = _shown(fits)
    if not shown:
        return None
    freedom, of_runs = (sum(fit.freedom[n] for fit in shown) for n in (0, 1))
    ratio, limit = _of_all(shown), KAPPA * float(np.sqrt(_chance(freedom, of_runs)))
    if ratio <= limit * max(1.0, _of_all(_shown(emulated))):
        return None
    return Verdict("OFF CONTRACT", "G3", f"{fits[0].output}: {ratio:.3g} × its contract over {len(fits)} seeds")


def _shown(fits: Sequence[Fit]) -> list[Fit]:
    """Those in which anything is to be seen."""
    return [fit for fit in fits if fit.freedom[0] >= LEAST_FREEDOM]


def _of_all(fits: Sequence[Fit]) -> float:
    """The ratio of several seeds together; 0 of none."""
    freedom = [fit.freedom[0] for fit in fits]
    return float(np.sqrt(np.average([fit.ratio**2 for fit in fits], weights=freedom))) if fits else 0.0


@dataclass(frozen=True)
class Allowance:
    """What a contract explains of one output, from R runs that keep it."""

    golden: Floats
    runs: Sequence[Floats]  # what each differs from the golden by; at least 3
    variance: Floats  # σ² of each element
    smooth: Floats  # that of its row and column
    last: Floats  # of one rounding of the golden in the accumulator

    @classmethod
    def of(cls, golden: Floats, runs: Sequence[Floats], roundoff: float) -> Allowance:
        """roundoff: the accumulator's."""
        count, zero = len(runs), np.zeros_like(golden)
        mean = sum(runs, zero) / count
        own = mean**2 + sum(((run - mean) ** 2 for run in runs), zero) / (count - 1) * (0.5 - 1 / count)
        value = np.nan_to_num(golden, posinf=0.0, neginf=0.0)
        return cls(golden, runs, own, _by_row_and_column(own), (roundoff * value) ** 2 / 3 + UNDERFLOW**2)

    @property
    def size(self) -> Floats:
        """The size of the errors around each element, its row's and column's: a unit."""
        return np.sqrt(self.smooth + self.last)

    @property
    def sigma(self) -> Floats:
        """σ of each element, as an error of it alone is held to."""
        largest = reduce(np.maximum, map(np.abs, self.runs)) * (OF_LARGEST / K)
        return np.maximum(np.sqrt(np.maximum(self.variance, self.smooth) + self.last), largest)

    def sigmas(self, y: np.ndarray) -> Floats:
        """|δ| / σ of each element of an output y."""
        return self._sigmas(explained_by(y, self.golden))

    def _sigmas(self, explained: Floats) -> Floats:
        return np.nan_to_num(explained, posinf=np.finfo(float).max) / self.sigma

    def fit(self, output: str, y: np.ndarray, labels: Mapping[str, np.ndarray]) -> Fit:
        """How y fits. labels: by axis those of each element, of a shape that broadcasts to y's."""
        explained = explained_by(y, self.golden)
        sigmas = self._sigmas(explained)
        delta = np.nan_to_num(explained, posinf=0.0)  # infinite ones are beyond any bound
        delta = np.maximum(delta - UNDERFLOW, 0)
        squares = _Squares.of(self, delta**2, 1 / (self.smooth + self.last), str(y.dtype))
        whole = squares.whole
        fit = whole.fit(output)
        looks, pairs = [*fit.looks], []
        for axis, of_each in labels.items():
            names, codes = np.unique(of_each, return_inverse=True)
            if len(names) > 1:
                parts = squares.by(codes.reshape((1,) * (y.ndim - of_each.ndim) + of_each.shape), len(names))
                looks += parts.looks(axis, names)
                pairs += parts.pairs(axis, names, whole)
        largest = np.inf if wrong_finiteness(y, self.golden).any() else float(sigmas.max(initial=0.0))
        beyond = int((sigmas > K).sum())
        return replace(fit, sigmas=largest, beyond=beyond, looks=tuple(looks), pairs=tuple(pairs))

    def fit_of_sketch(self, output: str, measured: Metrics, scale: Scale, dtype: str) -> Fit:
        """How an output of `dtype` fits as a whole, of which a record has left the rms of η by tile."""
        shape = self.golden.shape
        square = np.full(shape, measured.power(shape)) * scale.unit**2
        fit = _Squares.of(self, square, 1 / scale.unit**2, dtype).whole.fit(output)
        return replace(fit, sigmas=np.inf) if measured.wrong_finiteness else fit


@dataclass(frozen=True)
class _Squares:
    """Weighted squares of each element, to be summed."""

    each: tuple[Floats, ...]  # the terms of `_Sums`, in its order, but for those of runs
    weight: Floats  # w
    runs: Sequence[Floats]  # d of each; squared one by one, as all at once take as much memory again

    @classmethod
    def of(cls, allowed: Allowance, square: Floats, weight: Floats, dtype: str) -> _Squares:
        """Those of an output of `dtype`; square: δ²."""
        variance = allowed.variance
        sigma = np.sqrt(variance)
        with np.errstate(divide="ignore", invalid="ignore"):
            cut = [np.where(sigma > 0, side / sigma, np.inf) for side in _room(allowed.golden, dtype)]
        second, fourth = map(sum, zip(*map(_moments, cut), strict=True))
        model = weight * variance
        shown = model**2 * np.maximum(fourth - second**2, 0)
        return cls((weight * square, model * second, shown, model, 2 * model**2), weight, allowed.runs)

    @property
    def whole(self) -> _Sums:
        """The sums over all elements."""
        return self.by(np.zeros((1,) * self.weight.ndim, int), 1)

    def by(self, codes: np.ndarray, count: int) -> _Sums:
        """The sums over the elements of each label, which `codes` numbers, 1 long where all along an axis share one."""
        shared, flat = tuple(axis for axis, size in enumerate(codes.shape) if size == 1), codes.ravel()

        def total(x: Floats) -> Floats:
            return np.bincount(flat, x.sum(axis=shared).ravel(), count).astype(np.float64)

        runs = np.stack([total(self.weight * run**2) for run in self.runs])
        return _Sums(*[*map(total, self.each), runs])


@dataclass(frozen=True)
class _Sums:
    """Sums of weighted squares over the elements of each label [labels]."""

    found: Floats  # of w δ²
    expected: Floats  # of w E[δ²]
    variance: Floats  # of that of w δ²
    model: Floats  # of w σ²
    model_variance: Floats  # of that of w e² for a normal e
    runs: Floats  # [R, labels], of w d²

    def fit(self, output: str) -> Fit:
        """How the output fits as a whole; of the sums over all elements."""
        looks = self.looks("", [""])
        shown, of_run = (float(n[0]) for n in self.freedom)
        ratio = looks[0].ratio if looks else float("nan")
        return Fit(output, 0.0, 0, ratio, (shown, len(self.runs) * of_run), tuple(looks), ())

    @property
    def freedom(self) -> tuple[Floats, Floats]:
        """ν of the error that shows, and ν' of one run."""
        alone = _over(2 * self.model**2, self.model_variance)
        mean, variance = self.runs.mean(axis=0), self.runs.var(axis=0, ddof=1)
        # Runs that are the same, as of a sum that is rounded toward zero, err alike in nothing.
        together = np.where(variance > 0, np.minimum(_over(2 * mean**2, variance), alone), alone)
        return _over(2 * self.expected**2, self.variance) * _over(together, alone), together

    def looks(self, axis: str, names: Any) -> list[Look]:
        """Each label where anything is to be seen, held to its contract."""
        freedom, of_run = self.freedom
        ratio = np.sqrt(_over(self.found, self.expected))
        limit = KAPPA * np.sqrt(_chance(freedom, RUNS[-1] * of_run))
        shown = np.flatnonzero(freedom >= LEAST_FREEDOM)
        return [Look(axis, str(names[i]), float(ratio[i]), float(limit[i])) for i in shown]

    def pairs(self, axis: str, names: Any, total: _Sums) -> list[Look]:
        """Each label where anything is to be seen, held to all others together."""
        freedom, _ = self.freedom
        # Of sums in another order the difference may be below 0.
        rest = _Sums(**{f.name: np.maximum(getattr(total, f.name) - getattr(self, f.name), 0) for f in fields(self)})
        of_rest, _ = rest.freedom
        ratio, others = (np.sqrt(_over(x.found, x.expected)) for x in (self, rest))
        more = 1 + 1 / RUNS[-1]  # each side has a denominator of R runs as well
        limit = KAPPA_EVEN * np.sqrt(_chance(freedom / more, of_rest / more))
        shown = np.flatnonzero((freedom >= LEAST_FREEDOM) & (of_rest >= LEAST_FREEDOM) & (others > 0))
        return [Look(axis, str(names[i]), float(ratio[i]), float(limit[i]), float(others[i])) for i in shown]


def _chance(freedom: Any, of_denominator: Any) -> Floats:
    """The F quantile that chance exceeds once in LOOKS / FALSE looks."""
    quantile: Floats = special.fdtri(
        np.clip(freedom, LEAST_FREEDOM, 1e9), np.clip(of_denominator, 1, 1e9), 1 - FALSE / LOOKS
    )
    return np.maximum(quantile, 1.0)


def _over(a: Floats, b: Floats | float) -> Floats:
    """a / b, 0 where b is."""
    return np.divide(a, b, out=np.zeros(np.broadcast_shapes(np.shape(a), np.shape(b))), where=b > 0)


def _by_row_and_column(variance: Floats) -> Floats:
    """The product of the means of row and column over the mean of all. Rows are along the last axis that is longer than
    1, and columns along all others; where one has fewer than `MANY` elements, the mean of all takes its place."""
    shape = tuple(size for size in variance.shape if size > 1)
    rows = variance.reshape(-1, shape[-1] if shape else 1)
    smooth: Floats = np.full(rows.shape, rows.mean() if rows.size else 0.0)
    for axis in (0, 1):
        if rows.shape[axis] >= MANY:
            smooth *= _over(rows.mean(axis=axis, keepdims=True), rows.mean())
    return smooth.reshape(variance.shape)


def _room(golden: Floats, dtype: str) -> tuple[Floats, Floats]:
    """How far each golden value may go, up and down, before it is rounded to another number of `dtype`."""
    with np.errstate(invalid="ignore", over="ignore"):
        nearest = round_to(golden, dtype)
        value = nearest.astype(np.float64)
        above, below = (neighbour(nearest, way) for way in (True, False))
        room = (value + above) / 2 - golden, golden - (value + below) / 2
    up, down = (np.where(np.isfinite(x), np.maximum(x, 0.0), np.inf) for x in room)
    return up, down


def _moments(t: Floats) -> tuple[Floats, Floats]:
    """E[(x - t)²; x > t] and E[(x - t)⁴; x > t] of a standard normal x."""
    t = np.minimum(t, 30.0)
    square = t**2
    beyond, density = special.ndtr(-t), np.exp(-square / 2) / np.sqrt(2 * np.pi)
    second = (1 + square) * beyond - t * density
    fourth = (square**2 + 6 * square + 3) * beyond - t * (square + 5) * density
    return np.maximum(second, 0), np.maximum(fourth, 0)
