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

from parity.debugging.attribution.program import Active, Line, Program, Run
from parity.dtypes import Floats
from parity.ledger.sources import Definition, reached
from parity.op import Backend, Op
from parity.trial import Trial

NAMED = 0.05
"""Share of the mean square error from which on it is told which calls of the line's function make it."""

WITH_CALLERS = 3
"""Lines of which that is told, those that make most."""

REST = 0.02
"""The share of the error that lines which are not asked one by one may make, all together."""

SLIGHT = (REST / 2) ** 2
"""A line with a smaller share takes less than `REST` of the error with it, unless it mends what another line does."""

CHECKS = (1, 2, 4, 8, 16, 32, 64)
"""After so many lines it is asked what the others make."""

MOST_ENTRIES = 8
"""Lines of other files that a line is executed for, each of which takes an evaluation to try; of more none is tried."""

MENDED = 0.001
"""Of a kernel's error, of which less is left in float64 where it is one of precision: float64 has 2^29 times that of
float32, and leaves a fault of logic as it is. What is left may be beyond the contract where rounding errors grow."""

FEW = 3
"""So many lines are asked one by one; more are asked together first."""

EXPLAINED = 0.9
"""Where the shares of single lines come to less, lines err together: it is told what goes without each."""


@dataclass(frozen=True)
class Share:
    """What a line makes of the error.

    share: of the mean square of all lines' error, where this line alone errs. gone: what of it goes where this line
    alone is exact, asked for where the shares do not explain all. callers: as share, of each place that calls the
    line's function, where there are several; the largest first. sites: by site, the mean square of the line's error in
    what is marked there, which may weigh little in the result. entries: the lines of other files that more than
    half of it is for, see `entered`.
    """

    line: Line
    share: float
    gone: float | None = None
    callers: tuple[tuple[Line, float], ...] = ()
    sites: Mapping[str, float] = field(default_factory=dict)
    entries: tuple[Line, ...] = ()


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

    Raises ImportError where the backend's framework is missing, NotImplementedError where Triton compiles kernels.
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
    site: str = "",
) -> Ranking:
    """Rank the lines of a program by the error that each makes.

    Errors are over the magnitude, all outputs together. Lines are asked in the order of their largest relative errors
    until the others, all together, make less than `REST` of the outputs' error and of that at `site`. `done` is called
    with the number of evaluations made so far, and how many there may be. `fixed` lines are never exact, and none of
    those that err: what they round is their result (see `lines_compared_bit_for_bit`). runs: with none and with all
    lines, where they are known.
    """

    def evaluate(active: Active) -> Run:
        return of.run(lambda place: place.line in fixed or active(place))

    exact, everything = runs or (evaluate(lambda place: False), evaluate(lambda place: True))

    def power(run: Run) -> float:
        return mean_square(run.outputs, exact.outputs, magnitude)

    def at_site(run: Run) -> float:
        return at_sites(run, exact).get(site, 0.0)

    total, total_at_site = power(everything) or 1.0, at_site(everything)
    lines = _worst_first(everything, fixed)
    shares: list[Share] = []
    for n, line in enumerate(lines):
        done(2 + n, 2 + len(lines))
        explain_all = sum(share.share for share in shares) > 1 - REST
        if n in CHECKS and (explain_all or n > FEW):
            rest = evaluate(_among(lines[n:]))
            make_little = power(rest) < REST * total and at_site(rest) <= REST * total_at_site
            # Nor may they mend what the others do.
            if make_little and (explain_all or abs(power(evaluate(_among(lines[:n]))) / total - 1) < NAMED):
                break
        run = evaluate(_on(line))
        shares.append(Share(line, power(run) / total, sites=at_sites(run, exact)))
    if sum(share.share for share in shares) < EXPLAINED:
        gone: dict[Line, float] = {}

        def without(group: Sequence[Line]) -> float:
            return 1 - power(evaluate(_but(group))) / total

        def ask(group: Sequence[Line]) -> None:
            """What goes without each; of many that make little together, nothing."""
            if len(group) <= FEW:
                gone.update({line: without([line]) for line in group})
            elif abs(without(group)) < REST:
                gone.update(dict.fromkeys(group, 0.0))
            else:
                ask(group[: len(group) // 2])
                ask(group[len(group) // 2 :])
            done(2 + len(lines) + len(gone), 2 + 2 * len(lines))

        slight = [share.line for share in shares if share.share < SLIGHT]
        for group in [*([share.line] for share in shares if share.share >= SLIGHT), slight]:
            ask(group)
        shares = [replace(share, gone=gone[share.line]) for share in shares]
    shares.sort(key=lambda share: -max(share.share, share.gone or 0.0))
    for n, share in enumerate(shares[:WITH_CALLERS]):
        places = {place.caller for place in everything.erring if place.line == share.line and place.caller}
        if share.share >= NAMED and len(places) > 1:
            callers = [(caller, power(evaluate(_by(share.line, caller))) / total) for caller in places]
            shares[n] = replace(share, callers=tuple(sorted(callers, key=lambda c: (-c[1], c[0]))))
    return Ranking(
        tuple(shares),
        float(np.sqrt(power(everything))),
        float(np.sqrt(mean_square(exact.outputs, golden, magnitude))),
        exact,
        everything,
    )


def _worst_first(everything: Run, fixed: Set[Line]) -> list[Line]:
    """The lines that err, by the largest relative error that any operation of each makes."""
    errors: dict[Line, float] = {}
    for place, error in everything.erring.items():
        if place.line not in fixed:
            errors[place.line] = max(error, errors.get(place.line, 0.0))
    return sorted(errors, key=lambda line: (-errors[line], line))


def entered(
    of: Program, ranking: Ranking, share: Share, fixed: Set[Line], power: Callable[[Run], float]
) -> tuple[Line, ...]:
    """The lines of other files that a line is executed for: the one that has more than half of its error, or the two
    that have it together, the larger first; none where it takes more, or there are none.

    power: the error of a run, which is to be halved.
    """
    entries = {place.entry for place in ranking.all.erring if place.line == share.line and place.entry}
    if len(entries) < 2 or len(entries) > MOST_ENTRIES:
        return tuple(entries) if len(entries) == 1 else ()

    def evaluate(active: Active) -> float:
        return power(of.run(lambda place: place.line in fixed or active(place)))

    half = evaluate(_on(share.line)) / 2
    parts = sorted(((evaluate(_for(share.line, entry)), entry) for entry in sorted(entries)), reverse=True)[:2]
    if parts[0][0] > half:
        return (parts[0][1],)
    return tuple(entry for _, entry in parts) if parts[0][0] + parts[1][0] > half else ()


def mean_square(got: Mapping[str, Floats], true: Mapping[str, Floats], magnitude: Mapping[str, Floats]) -> float:
    """Of the difference over M, all outputs together, of the elements that are finite in both and have a magnitude."""
    errors = []
    for name, m in magnitude.items():
        scored = (m > 0) & np.isfinite(got[name]) & np.isfinite(true[name])
        errors.append((got[name][scored] - true[name][scored]) / m[scored])
    flat = np.concatenate(errors)
    return float(np.mean(flat**2)) if flat.size else 0.0


def at_sites(run: Run, exact: Run) -> dict[str, float]:
    """By site, the mean square of what is marked there in one run less that in another."""
    errors: dict[str, list[Floats]] = {}
    for got, true in zip(run.marks, exact.marks, strict=True):
        there = np.isfinite(got.value) & np.isfinite(true.value)
        errors.setdefault(got.site, []).append(got.value[there] - true.value[there])
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


def _among(lines: Iterable[Line]) -> Active:
    lines = frozenset(lines)
    return lambda place: place.line in lines


def _on(line: Line) -> Active:
    return lambda place: place.line == line


def _but(lines: Iterable[Line]) -> Active:
    lines = frozenset(lines)
    return lambda place: place.line not in lines


def _by(line: Line, caller: Line) -> Active:
    return lambda place: place.line == line and place.caller == caller


def _for(line: Line, entry: Line) -> Active:
    return lambda place: place.line == line and place.entry == entry
