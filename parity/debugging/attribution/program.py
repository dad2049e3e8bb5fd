"""What line attribution asks of a backend: a program that runs in float64, all but some of its source lines."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

from parity.dtypes import Floats


class Line(NamedTuple):
    """A line of a source file."""

    file: str
    number: int


class Place(NamedTuple):
    """Where an operation is written, and where the function that it is in was called."""

    line: Line
    caller: Line | None


@dataclass(frozen=True)
class Mark:
    """A named intermediate result, as a kernel showed it to its probe.

    value: NaN where the kernel has none. steps: fields of the golden's stages with which it takes the same steps.
    place: where it was shown, where that is known.
    """

    site: str
    value: Floats
    steps: tuple[tuple[str, Any], ...]
    place: Place | None = None


Active = Callable[[Place], bool]
"""Which operations err as the backend's do; all others are exact."""


@dataclass(frozen=True)
class Run:
    """One evaluation: the outputs in float64 by name, where active operations erred at all, and what was marked."""

    outputs: Mapping[str, Floats]
    erring: Set[Place]
    marks: Sequence[Mark] = ()


class Program(Protocol):
    """A call of a kernel that can be evaluated again and again."""

    def run(self, active: Active) -> Run:
        """The outputs where only active operations err."""
