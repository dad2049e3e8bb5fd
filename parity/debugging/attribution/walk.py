"""A kernel's named intermediate results beside those of the staged golden, up to the first that is off.

A kernel marks values with the names of the golden's sites. They are compared without regard to where they lie: in
float64 a value that is right is one that the golden has at that site, and two of its numbers hardly ever agree to seven
digits by chance. So no tile has to be put in its place, and right values in a wrong place show at the next stage.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Any

import numpy as np

from cpu_golden.stages import single_pass
from parity.debugging.attribution import MENDED, mean_square, program
from parity.debugging.attribution.program import Line, Mark, Run
from parity.dtypes import Floats
from parity.judging.metrics import UNDERFLOW
from parity.judging.reference import Reference
from parity.judging.stages import by_contract, emulate, staged
from parity.trial import Trial

SAME = 2.0**-27
"""Of M in an output, and of what the contract has exact: float64 values that differ by less are the same."""
PIECES = 2.0**-25
"""Of the largest value of a site: values that differ by less are the same, as kernels multiply them in up to three
bfloat16 pieces, which hold 24 bits of a float64 number."""
JUMP = 4.0
"""A stage that errs by more than so many times what the contract's roundings make of it is where precision is lost.
Right kernels err by 0.4 to 2.3 times that; one bfloat16 rounding too many is some 10^4 times a float32 one. Of what
the contract has exact an error below SAME is none: kernels keep it in two pieces."""
FEW = 32
"""Numbers from which on an error is no matter of chance; of fewer, where they err by more than half a `JUMP`, those of
further seeds are taken as well."""
LEAST = 8
"""Of fewer numbers than these, all seeds together, nothing is said."""
SEEDS = 8


@dataclass(frozen=True)
class Stage:
    """A site, and how the kernel's values are there.

    wrong: the share of the values, evaluated in float64, that the golden does not have. error: root mean square of what
    the kernel's own arithmetic changes in them, over that of the values (of an output: over M). expected: that of the
    staged golden under the contract. numbers: how many values there are.
    """

    site: str
    wrong: float
    error: float
    expected: float
    numbers: int

    @property
    def is_off(self) -> bool:
        """Whether logic fails or precision is lost here, or before."""
        is_loss = self.error > (JUMP * self.expected or SAME)
        return self.wrong > 0 or (is_loss and self.numbers >= LEAST)

    @property
    def is_suspect(self) -> bool:
        """Whether few numbers are worth being looked at over seeds."""
        return self.numbers > 0 and (self.wrong > 0 or self.error > JUMP / 2 * self.expected)


def walk(first: Evaluation, fixed: Set[Line] = frozenset()) -> tuple[Stage, ...]:
    """The stages in the golden's order, the outputs last, none after the first that is off.

    A kernel has a stage only if it marks values there that the golden has in these arguments too. Where every output
    is right in float64 no stage is wrong: what the golden does not have there comes to nothing. fixed: as `rank` takes
    it, for further seeds of the case.
    """
    trial = first.trial
    is_right = all(map(first.is_right, trial.reference.golden))
    further: list[Evaluation] = []
    stages: list[Stage] = []
    for name, is_output in first.names():
        found = [first.stage(name, is_output)]
        for n in range(1, SEEDS):
            if trial.given is not None or sum(s.numbers for s in found) >= FEW or not found[0].is_suspect:
                break
            if len(further) < n:
                further.append(Evaluation.of_trial(trial.with_seed(trial.case.seed + n), fixed))
            found.append(further[n - 1].stage(name, is_output))
        together = _together(found)
        stages.append(replace(together, wrong=0.0) if is_right else together)
        if stages[-1].is_off:
            break
    return tuple(stages)


def _together(found: Sequence[Stage]) -> Stage:
    """The same stage of several seeds, each weighted by its numbers."""
    numbers = sum(stage.numbers for stage in found)

    def mean(of: Callable[[Stage], float]) -> float:
        return sum(of(stage) * stage.numbers for stage in found) / max(numbers, 1)

    error, expected = (float(np.sqrt(mean(of))) for of in (lambda s: s.error**2, lambda s: s.expected**2))
    return Stage(found[0].site, mean(lambda s: s.wrong), error, expected, numbers)


@dataclass(frozen=True)
class Evaluation:
    """A trial's kernel in float64 and as it is, and the golden's sites in the steps of each of its marks."""

    trial: Trial
    none: Run
    all: Run
    marks: Mapping[str, Sequence[tuple[Mark, Mark]]]
    goldens: Mapping[Any, tuple[Mapping[str, Floats], Mapping[str, float]]]
    by_contract: Mapping[str, np.ndarray]

    @classmethod
    def of_trial(cls, trial: Trial, fixed: Set[Line]) -> Evaluation:
        """Of a trial that is yet to be evaluated."""
        of = program(trial)
        return cls.of_runs(trial, of.run(lambda place: place.line in fixed), of.run(lambda place: True))

    @classmethod
    def of_runs(cls, trial: Trial, none: Run, everything: Run) -> Evaluation:
        """Of its evaluations without and with rounding. Raises ValueError where a kernel marks what is no site."""
        marks: dict[str, list[tuple[Mark, Mark]]] = {}
        for exact, own in zip(none.marks, everything.marks, strict=True):
            marks.setdefault(exact.site, []).append((exact, own))
        # Coarser steps round less often than the contract's own: of both the larger error is expected.
        goldens: dict[Any, tuple[Mapping[str, Floats], Mapping[str, float]]] = {(): _sites(trial, {})}
        for pairs in marks.values():
            for exact, _ in pairs:
                if exact.steps not in goldens:
                    goldens[exact.steps] = _sites(trial, dict(exact.steps))
        known = {site for values, _ in goldens.values() for site in values}
        if unknown := marks.keys() - known:
            raise ValueError(f"a kernel must show sites of the golden, got {', '.join(sorted(unknown))}")
        return cls(trial, none, everything, marks, goldens, emulate(trial))

    def wrong_marks(self) -> tuple[bool, ...]:
        """Of each mark of the kernel, in order, whether it has values in float64 that the golden does not have."""
        wrong = []
        for mark in self.none.marks:
            known = self.goldens[mark.steps][0][mark.site]
            wrong.append(bool(_missing(mark.value[np.isfinite(mark.value)], known).any()))
        return tuple(wrong)

    def names(self) -> Iterator[tuple[str, bool]]:
        """The sites that the kernel has values of, in the golden's order, and the outputs; which is which."""
        order = dict.fromkeys(site for values, _ in self.goldens.values() for site in values)
        for site in order:
            if any(np.isfinite(exact.value).any() for exact, _ in self.marks.get(site, ())):
                yield site, False
        for name in self.trial.reference.golden:
            yield name, True

    def is_right(self, output: str) -> bool:
        """Whether an output is the golden's in float64."""
        return not self.stage(output, True).wrong

    def stage(self, name: str, is_output: bool) -> Stage:
        """A site or an output as a stage."""
        if is_output:
            return _output(name, self.trial.reference, self.none, self.all, self.by_contract)
        return _stage(name, self.marks.get(name, ()), self.goldens)


def unseen(marks: Sequence[Mark]) -> tuple[str, ...]:
    """The sites at which a kernel marks no whole value: each program has a tile of the sum."""
    sites = dict.fromkeys(mark.site for mark in marks)
    return tuple(site for site in sites if not any(np.isfinite(m.value).any() for m in marks if m.site == site))


def _stage(
    site: str,
    marks: Sequence[tuple[Mark, Mark]],
    goldens: Mapping[Any, tuple[Mapping[str, Floats], Mapping[str, float]]],
) -> Stage:
    wrong, errors, values, expected = 0, [], [], 0.0
    for steps, pairs in groupby(sorted(marks, key=lambda pair: repr(pair[0].steps)), lambda pair: pair[0].steps):
        of_golden, of_contract = goldens[steps]
        for exact, own in pairs:
            there = np.isfinite(exact.value)
            wrong += int(_missing(exact.value[there], of_golden[site]).sum())
            values.append(exact.value[there])
            errors.append(own.value[there] - exact.value[there])
        expected = max(expected, of_contract[site], goldens[()][1].get(site, 0.0))
    error, scale = (np.concatenate(x) if x else np.zeros(0) for x in (errors, values))
    size = _rms(scale) or 1.0
    if expected:  # of numbers next to the smallest normal one, as a steep gate leaves, a unit may flush what it rounds
        expected = math.hypot(expected, UNDERFLOW / size)
    return Stage(site, wrong / max(scale.size, 1), _rms(error) / size, expected, scale.size)


def _output(name: str, expected: Reference, exact: Run, own: Run, by_contract: Mapping[str, np.ndarray]) -> Stage:
    """An output as a stage. An element is wrong if it is far off both in float64 and as the kernel has it, and float64
    does not mend it; one without a magnitude, of which no error is a rounding, if it is off at all."""
    golden, magnitude = expected.golden[name], expected.magnitude[name]
    scored = (magnitude > 0) & np.isfinite(golden)

    def off(got: np.ndarray) -> Floats:
        return np.nan_to_num(np.abs(got[scored].astype(np.float64) - golden[scored]) / magnitude[scored], nan=np.inf)

    errors = off(by_contract[name])
    none, everything = exact.outputs, own.outputs
    exactly, roughly = off(none[name]), off(everything[name])
    wrong = (exactly > max(SAME, MENDED * _rms(roughly))) & (roughly > JUMP * errors.max(initial=0.0))
    fixed = (magnitude == 0) & np.isfinite(golden)
    count = wrong.sum() + ((none[name] != golden) & (everything[name] != golden) & fixed).sum()
    error = float(np.sqrt(mean_square(everything, none, {name: magnitude})))
    return Stage(name, float(count) / max(golden.size, 1), error, _rms(errors), errors.size)


def _sites(trial: Trial, steps: Mapping[str, Any]) -> tuple[Mapping[str, Floats], Mapping[str, float]]:
    """By site, all values of the golden, sorted; and how far they are off under the contract, root mean square."""
    by_the_contract = by_contract(trial.contract)

    def record(**steps: Any) -> dict[str, list[Floats]]:
        seen: dict[str, list[Floats]] = {}

        def watch(site: str, value: Floats) -> Floats:
            seen.setdefault(site, []).append(value.ravel().copy())
            return value

        staged(trial, watch, **steps)
        return seen

    # They are of every step of every sum: none is in memory twice.
    with np.errstate(invalid="ignore", over="ignore"):
        exact = record(**steps)
        squares = {site: np.zeros(2) for site in exact}  # of what is off, and of all

        def compare(site: str, value: Floats) -> Floats:
            rounded, x = by_the_contract(site, value), exact[site].pop(0)
            squares[site] += _square(rounded.ravel() - x), _square(x)
            return rounded

        staged(trial, compare, **steps)
        off = {site: float(np.sqrt(lost / (all_of_it or 1.0))) for site, (lost, all_of_it) in squares.items()}
        # Narrow passes leave out products of the smallest pieces, and a kernel in float64 makes no such passes.
        whole = record(**{**steps, "passes": single_pass, "router_passes": None})
    known = {}
    for site in [*whole]:
        values = np.concatenate(whole.pop(site))
        known[site] = values[np.isfinite(values)]
        known[site].sort()
    return known, off


def _square(x: Floats) -> float:
    """Σ x² of what is finite."""
    return float(np.sum(x**2, where=np.isfinite(x)))


def _missing(values: Floats, known: Floats) -> np.ndarray:
    """Which values are none of the known ones, which are sorted."""
    if not known.size:
        return np.ones(values.shape, bool)
    after = np.searchsorted(known, values).clip(0, known.size - 1)
    nearest = np.minimum(np.abs(known[after] - values), np.abs(known[np.maximum(after - 1, 0)] - values))
    return nearest > PIECES * max(abs(known[0]), abs(known[-1]))


def _rms(x: Floats) -> float:
    finite = x[np.isfinite(x)]
    return float(np.sqrt(np.mean(finite**2))) if finite.size else 0.0
