"""A kernel's named intermediate results beside the golden's, where every bit must be the golden's.

As `walk`, but nothing is rounded otherwise here than the golden has it: a stage is off where the kernel lacks one of
the golden's values there, or has it less often. Outputs come last, element by element.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from parity.debugging.attribution import program, statement
from parity.debugging.attribution.program import Line, Mark
from parity.debugging.bits import values
from parity.dtypes import Floats
from parity.judging.verdict import other_bits
from parity.trial import Trial


@dataclass(frozen=True)
class BitStage:
    """A site or an output, how many of the golden's values there are not the kernel's, and of how many.

    line: where the kernel shows the value, None of an output.
    """

    site: str
    wrong: int
    numbers: int
    line: Line | None = None

    @property
    def name(self) -> str:
        """What it is called: an output may have the name of a site."""
        return self.site if self.line else f"output {self.site}"


def walk_bits(trial: Trial) -> tuple[BitStage, ...]:
    """The stages in the golden's order, the outputs last, none after the first that is off.

    A kernel that shows no site has its outputs alone. Raises ImportError where the backend's framework is missing,
    ValueError where a kernel marks what is no site.
    """
    sites = values(trial)
    marks: dict[str, list[Mark]] = {}
    for mark in program(trial).run(lambda place: True).marks:
        marks.setdefault(mark.site, []).append(mark)
    if unknown := marks.keys() - sites.keys():
        raise ValueError(f"a kernel must show sites of the golden, got {', '.join(sorted(unknown))}")
    stages: list[BitStage] = []
    for site in (site for site in sites if site in marks):
        wanted = sites[site][np.isfinite(sites[site])]
        stages.append(BitStage(site, lacking(wanted, marks[site]), wanted.size, _line(marks[site][0])))
        if stages[-1].wrong:
            return tuple(stages)
    got = trial.run()
    for name, golden in trial.reference.golden.items():
        y = got.get(name)
        has_form = y is not None and (y.shape, y.dtype) == (golden.shape, golden.dtype)
        wrong = int(other_bits(y, golden).sum()) if y is not None and has_form else golden.size
        stages.append(BitStage(name, wrong, golden.size))
        if wrong:
            break
    return tuple(stages)


def lacking(wanted: Floats, marks: Sequence[Mark]) -> int:
    """How many of the golden's values a kernel has not marked, each as often as the golden has it.

    It may have more: of blocks that fill up a last tile, or one as often as programs share it.
    """
    shown = np.concatenate([mark.value.ravel() for mark in marks])
    known, counts = np.unique(shown[np.isfinite(shown)], return_counts=True)
    needed, often = np.unique(wanted, return_counts=True)
    at = np.searchsorted(known, needed).clip(0, max(known.size - 1, 0))
    has = np.where(known[at] == needed, counts[at], 0) if known.size else np.zeros(needed.size, int)
    return int(np.maximum(often - has, 0).sum())


def _line(mark: Mark) -> Line | None:
    """Where the value is shown by its name: a function that only gives it another one is passed over."""
    lines = [line for line in mark.place or () if line]
    word = f'"{mark.site.rpartition("_")[2]}"'
    return next((line for line in lines if word in statement(line)), lines[0] if lines else None)
