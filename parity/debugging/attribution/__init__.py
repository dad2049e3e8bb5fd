"""Which source lines of a kernel make its error: it is evaluated in float64, all but one line at a time."""

from __future__ import annotations

import ast
import contextlib
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from functools import cache
from importlib import import_module
from pathlib import Path

import numpy as np

from parity.debugging.attribution.program import Active, Line, Place, Program, Run
from parity.dtypes import Floats
from parity.ledger.sources import Definition, reached
from parity.op import Backend, Op
from parity.trial import Trial

NAMED = 0.05
"""Share of the mean square error from which on it is told which calls of the line's function make it."""

EXPLAINED = 0.9
"""Where the shares of single lines come to less, lines err together: it is told what goes without each."""


@dataclass(frozen=True)
class Share:
    """What a line makes of the error.

    share: of the mean square of all lines' error, where this line alone errs. gone: what of it goes where this line
    alone is exact, asked for where the shares do not explain all. callers: as share, of each place that calls the
    line's function, where there are several; the largest first. sites: by site, the mean square of the line's error in
    what is marked there, which may weigh little in the result.
    """

    line: Line
    share: float
    gone: float | None = None
    callers: tuple[tuple[Line, float], ...] = ()
    sites: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Ranking:
    """The lines that err, the one that makes most of the error first, and the evaluations with none and with all.

    error: root mean square over M of what all lines do to the outputs. exact: that of what is left where none errs,
    against the golden: float64's own roundoff, or a fault of logic.
    """

    shares: tuple[Share, ...]
    error: float
    exact: float
    none: Run
    all: Run

    @property
    def together(self) -> float:
        """The sum of the shares: 1 where the lines' errors are independent."""
        return sum(share.share for share in self.shares)


def program(trial: Trial) -> Program:
    """The call of a trial's kernel, ready to be evaluated, its sites marked.

    Raises ImportError where the backend's framework is missing.
    """
    module = import_module(f"parity.debugging.attribution.{trial.backend}")
    made: Program = module.make_program(trial.kernel, trial.inputs, trial.arguments)
    return made


def lines_compared_bit_for_bit(ops: Iterable[Op], op: Op, backend: Backend) -> frozenset[Line]:
    """The source lines behind ops whose results are exactly defined, as quantised numbers are, and behind no others.

    In float64 such code is something else: it may let an addition of float32 do its rounding. Other ops that use a
    bit-exact one share its lines; those that use none, or stand in its module, have their own, which may round.
    """
    behind: dict[Op, Sequence[Definition]] = {}
    for each in {*ops, op}:
        with contextlib.suppress(ImportError, LookupError, AttributeError):  # of the other backend alone
            behind[each] = _behind(getattr(each, backend))
    exact = {each for each in behind if each.bit_exact}
    modules = {getattr(each, backend).partition(":")[0] for each in exact}

    def uses(each: Op) -> bool:
        return (
            any(d.module.name in modules for d in behind[each])
            and getattr(each, backend).partition(":")[0] not in modules
        )

    others = {d for each in behind.keys() - exact if not uses(each) for d in behind[each]}
    fixed = {d for each in exact for d in behind[each]} - others
    return frozenset(Line(str(d.module.path), n) for d in fixed for n in range(d.first, d.last + 1))


_behind = cache(reached)


def outputs_in_float64(trial: Trial, ops: Iterable[Op] = ()) -> Mapping[str, Floats]:
    """The outputs of a trial's kernel where no operation rounds, but those of `lines_compared_bit_for_bit`.

    Raises NotImplementedError for a kernel that cannot be followed, ImportError where the framework is missing.
    """
    fixed = lines_compared_bit_for_bit(ops, trial.op, trial.backend)
    return program(trial).run(lambda place: place.line in fixed).outputs


def rank(
    of: Program,
    golden: Mapping[str, Floats],
    magnitude: Mapping[str, Floats],
    done: Callable[[int, int], None] = lambda runs, of: None,
    fixed: Set[Line] = frozenset(),
    runs: tuple[Run, Run] | None = None,
) -> Ranking:
    """Rank the lines of a program by the error that each makes.

    Errors are over the magnitude, all outputs together. `done` is called with the number of evaluations made so far,
    and how many there will be. `fixed` lines are never exact, and none of those that err: what they round is their
    result (see `lines_compared_bit_for_bit`). runs: with none and with all lines, where they are known.
    """

    def evaluate(active: Active) -> Run:
        return of.run(lambda place: place.line in fixed or active(place))

    exact, everything = runs or (evaluate(lambda place: False), evaluate(lambda place: True))

    def power(run: Run) -> float:
        return mean_square(run.outputs, exact.outputs, magnitude)

    total = power(everything) or 1.0
    lines = sorted({place.line for place in everything.erring if place.line not in fixed})
    shares: list[Share] = []
    for line in lines:
        done(2 + len(shares), 2 + len(lines))
        run = evaluate(_on(line))
        alone = power(run) / total
        places = [place for place in everything.erring if place.line == line and place.caller]
        callers: list[tuple[Line, float]] = []
        if alone >= NAMED and len(places) > 1:
            callers = [(place.caller, power(evaluate(_at(place))) / total) for place in places if place.caller]
        ordered = tuple(sorted(callers, key=lambda c: -c[1]))
        shares.append(Share(line, alone, callers=ordered, sites=_at_sites(run, exact)))
    if sum(share.share for share in shares) < EXPLAINED:
        for n, share in enumerate(shares):
            done(2 + len(lines) + n, 2 + 2 * len(lines))
            shares[n] = replace(share, gone=1 - power(evaluate(_off(share.line))) / total)
    return Ranking(
        tuple(sorted(shares, key=lambda share: -max(share.share, share.gone or 0.0))),
        float(np.sqrt(power(everything))),
        float(np.sqrt(mean_square(exact.outputs, golden, magnitude))),
        exact,
        everything,
    )


def mean_square(got: Mapping[str, Floats], true: Mapping[str, Floats], magnitude: Mapping[str, Floats]) -> float:
    """Of the difference over M, all outputs together, of the elements that are finite in both and have a magnitude."""
    errors = []
    for name, m in magnitude.items():
        scored = (m > 0) & np.isfinite(got[name]) & np.isfinite(true[name])
        errors.append((got[name][scored] - true[name][scored]) / m[scored])
    flat = np.concatenate(errors)
    return float(np.mean(flat**2)) if flat.size else 0.0


def _at_sites(run: Run, exact: Run) -> dict[str, float]:
    errors: dict[str, list[Floats]] = {}
    for got, true in zip(run.marks, exact.marks, strict=True):
        error = got.value - true.value
        errors.setdefault(got.site, []).append(error[np.isfinite(error)])
    return {site: float(np.mean(np.concatenate(parts) ** 2)) for site, parts in errors.items() if sum(map(len, parts))}


def statement(line: Line) -> str:
    """The statement that a line is part of, in one line; the line itself where the file does not parse."""
    text = _source(line.file)
    rows = text.splitlines()
    found = [
        node
        for node in _statements(line.file)
        if node.lineno <= line.number <= (node.end_lineno or node.lineno) and not hasattr(node, "body")
    ]
    if not found:
        return rows[line.number - 1].strip() if line.number <= len(rows) else ""
    return " ".join((ast.get_source_segment(text, found[-1]) or "").split())


@cache
def _source(file: str) -> str:
    path = Path(file)
    return path.read_text() if path.is_file() else ""


@cache
def _statements(file: str) -> tuple[ast.stmt, ...]:
    return tuple(node for node in ast.walk(ast.parse(_source(file))) if isinstance(node, ast.stmt))


def _on(line: Line) -> Active:
    return lambda place: place.line == line


def _off(line: Line) -> Active:
    return lambda place: place.line != line


def _at(only: Place) -> Active:
    return lambda place: place == only
