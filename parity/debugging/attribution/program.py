"""What line attribution asks of a backend: a program that runs in float64, all but some of its source lines."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from itertools import takewhile
from typing import Any, NamedTuple, Protocol

import numpy as np

from parity.dtypes import Floats


class Line(NamedTuple):
    """A line of a source file."""

    file: str
    number: int


LAUNCH = Line("", 0)
"""Stands among the lines that are being executed where a kernel was launched."""


class Place(NamedTuple):
    """Where an operation is written, and where the function that it is in was called.

    entry: the innermost line of another file of the kernel that led here, None where no line of the kernel did.
    """

    line: Line
    caller: Line | None
    entry: Line | None = None

    @classmethod
    def of(cls, lines: Sequence[Line]) -> Place | None:
        """That of the lines that are being executed, the innermost first; None of none.

        `LAUNCH` is between those of a kernel and of what launched it.
        """
        if not lines:
            return None
        line, *callers = lines
        inside = takewhile(lambda caller: caller != LAUNCH, callers)
        entry = next((caller for caller in inside if caller.file != line.file), None)
        return cls(line, next((caller for caller in callers if caller != LAUNCH), None), entry)


class Executed:
    """When each line was last executed, by the order of all."""

    def __init__(self) -> None:
        self.when: dict[Line, int] = {}
        self._now = 0

    def at(self, place: Place | Sequence[Line] | None, around: Sequence[Line] = ()) -> frozenset[Line]:
        """The lines of a place, the innermost first, which are executed now. around: those that led there."""
        lines = [*dict.fromkeys(line for line in place or () if line and line != LAUNCH)]
        whole = [*dict.fromkeys([*lines, *around])]
        self._now += len(whole)
        self.when |= {line: self._now - n for n, line in enumerate(whole)}
        return frozenset(lines)


@dataclass(frozen=True)
class Mark:
    """A named intermediate result, as a kernel showed it to its probe.

    value: NaN where the kernel has none. steps: fields of the golden's stages with which it takes the same steps.
    place: where it was shown, where that is known. lines: of a slice, those that the value comes of.
    """

    site: str
    value: Floats
    steps: tuple[tuple[str, Any], ...]
    place: Place | None = None
    lines: frozenset[Line] = frozenset()


Active = Callable[[Place], bool]
"""Which operations err as the backend's do; all others are exact."""


@dataclass(frozen=True)
class Run:
    """One evaluation: the outputs in float64 by name, where active operations erred and by how much of their results
    at most (root mean square), and what was marked.

    lines: of a slice, those that each output comes of. when: of a slice, when each of its lines was last executed, by
    the order of all.
    """

    outputs: Mapping[str, Floats]
    erring: Mapping[Place, float]
    marks: Sequence[Mark] = ()
    lines: Mapping[str, frozenset[Line]] = field(default_factory=dict)
    when: Mapping[Line, int] = field(default_factory=dict)


@dataclass(frozen=True)
class Birth:
    """An operation that made a NaN of operands that are none, or an infinity of finite ones.

    index: of the first such element of the result; operands: what they are there, or the largest of each where they
    are of other shapes; elements: how many there are, all together.
    """

    place: Place
    index: tuple[int, ...]
    operands: tuple[float, ...]
    result: float
    elements: int


CUT = 2.0**-7
"""The share of a number that cutting or rounding its bits as integers loses at most: down to bfloat16."""


def is_cut(number: Floats, got: Floats) -> bool:
    """Whether these are numbers whose last bits were cut or rounded: not what else their bits may be used for."""
    with np.errstate(invalid="ignore"):
        same = (got == number) | (np.isnan(got) & np.isnan(number))
        return bool(np.all(same | (np.abs(got - number) <= CUT * np.abs(number))))


def note_error(erring: dict[Place, float], place: Place, error: Floats, true: Floats) -> None:
    """Note by how much of its result an operation errs, where that is more than before."""
    if np.any(error):
        size, whole = (float(np.sqrt(np.sum(x[np.isfinite(x)] ** 2))) for x in map(np.asarray, (error, true)))
        erring[place] = max(erring.get(place, 0.0), size / whole if whole else size)


class Births:
    """Where values that are not finite are born, in the order in which that happens first.

    mended: operations whose newborn values become 0.
    """

    def __init__(self, mended: Set[Place] = frozenset()) -> None:
        self._mended = mended
        self._found: dict[Place, Birth] = {}

    @property
    def found(self) -> tuple[Birth, ...]:
        """The first birth at each place."""
        return tuple(self._found.values())

    def seen(self, place: Place | None, operands: Sequence[Floats], result: Floats) -> Floats:
        """The result of an operation, mended where it is to be."""
        result = np.asarray(result)
        if place is None or not operands or np.isfinite(result).all():
            return result
        born, there = _born(operands, result)
        if not born.any():
            return result
        index = tuple(int(i) for i in np.argwhere(born)[0])
        before = self._found.get(place)
        if before is None:
            values = tuple(float(x[index]) if there else float(np.abs(x).max(initial=0.0)) for x in operands)
            before = Birth(place, index, values, float(result[index]), 0)
        self._found[place] = replace(before, elements=before.elements + int(born.sum()))
        return np.where(born, 0.0, result) if place in self._mended else result


def _born(operands: Sequence[Floats], result: Floats) -> tuple[np.ndarray, bool]:
    """Which elements of a result are born, and whether the operands have elements where the result has."""
    there = all(x.shape == result.shape for x in operands)
    if there:
        has_nan = np.logical_or.reduce([np.isnan(x) for x in operands])
        finite = np.logical_and.reduce([np.isfinite(x) for x in operands])
    else:
        has_nan, finite = any(np.isnan(x).any() for x in operands), all(np.isfinite(x).all() for x in operands)
    return (np.isnan(result) & np.logical_not(has_nan)) | (np.isinf(result) & finite), there


class Program(Protocol):
    """A call of a kernel that can be evaluated again and again."""

    def run(self, active: Active) -> Run:
        """The outputs where only active operations err."""

    def slice(self, right: Set[int], of_finite: bool = True) -> Run:
        """What nothing rounds in, and of each mark and output the lines that it comes of.

        right: numbers of marks, in the order of `Run.marks`, that are as they should be: what went into those is left
        out. of_finite: whether finite numbers are followed; else integers and what is not finite are, and memory begins
        as NaN, so that what nothing is stored to comes of what says where things are stored.
        """

    def births(self, births: Births, fill: float = np.nan) -> Run:
        """The outputs as the kernel computes them, what is born on the way noted. fill: what memory begins as."""
