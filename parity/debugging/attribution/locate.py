"""Where in a kernel an error enters: the line that rounds, the lines of a logic fault, or where a NaN is born."""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from functools import cache
from itertools import pairwise
from pathlib import Path

import numpy as np

from parity.debugging.attribution import NAMED, Ranking, Share, at_sites, entered, mean_square, program, rank
from parity.debugging.attribution.bits import BitStage
from parity.debugging.attribution.program import Birth, Births, Line, Program, Run
from parity.debugging.attribution.walk import Evaluation, Stage, walk
from parity.debugging.instead import Instead, other_call
from parity.dtypes import Floats, round_to
from parity.op import Contract
from parity.trial import Trial

FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
OTHERWISE = 0.001
"""Of the elements of an output, rounded otherwise than to nearest, where a line does nothing but round it."""
SAME = 2.0**-20
"""Of a number, by which it may differ from another one and be the same rounding's."""
MOST_BIRTHS = 16
"""Operations that make something not finite that are tried: whether the outputs are right without theirs."""


@dataclass(frozen=True)
class Region:
    """The lines that a wrong value comes of, after the last right ones that it comes of.

    site: the first that is wrong. after: the sites that are right until then. lines: those executed last come first,
    which are the nearest. shared: those that right sites and outputs come of as well, likewise; no line is in both.
    instead: what the output is by a changed argument, where it is that. readers: the lines that name that argument, of
    functions that were executed.
    """

    site: str
    after: tuple[str, ...]
    lines: tuple[Line, ...]
    shared: tuple[Line, ...] = ()
    instead: Instead | None = None
    readers: tuple[Line, ...] = ()


def by_function(lines: Sequence[Line]) -> Iterator[tuple[str, str, range, tuple[int, ...]]]:
    """Each function that has some of the lines, in their order: its file, name ("" outside of any) and lines, and
    those."""
    of: dict[tuple[str, str, range], list[int]] = {}
    for line in lines:
        of.setdefault((line.file, *enclosing(line)), []).append(line.number)
    for (file, name, whole), numbers in of.items():
        yield file, name, whole, tuple(sorted(numbers))


@dataclass(frozen=True)
class Birthplace:
    """Where the values come from that are not finite in outputs and should be, or the other way round.

    birth: the operation without whose own newborn values fewer outputs are wrong, or where it takes several the first
    of those, beside `others`; None where no operation is, and they are of memory that nothing is stored to, or of what
    lies outside an array. wrong, left: wrong elements of the outputs, and those that are left without it. output,
    index: the first of them.
    """

    birth: Birth | None
    wrong: int
    left: int
    output: str
    index: tuple[int, ...]
    others: int = 0


@dataclass(frozen=True)
class Located:
    """The stages of a kernel, and what more is known of the first that is off: one of the three.

    output: the one whose error the lines are ranked by. none: the evaluation in which nothing rounds. culprit: of the
    ranking, the line that makes most of the error of the stage that is off, or of the output; own: those that make
    more, and round the output to its dtype alone.
    """

    output: str
    stages: tuple[Stage, ...]
    none: Run
    ranking: Ranking | None = None
    region: Region | None = None
    birthplace: Birthplace | None = None
    culprit: Share | None = None
    own: tuple[Share, ...] = ()


def locate(
    trial: Trial, output: str, fixed: Set[Line], done: Callable[[int, int], None] = lambda runs, of: None
) -> Located:
    """Find where the error of an output of a trial enters.

    fixed: lines that always round, see `lines_compared_bit_for_bit`. done: as in `rank`. Raises
    NotImplementedError for a kernel that cannot be followed, ImportError where the backend's framework is missing.
    """
    of = program(trial)
    none, everything = of.run(lambda place: place.line in fixed), of.run(lambda place: True)
    evaluation = Evaluation.of_runs(trial, none, everything)
    stages = walk(evaluation, fixed)
    is_finite = not any(map(len, _wrong(everything, trial.reference.golden).values()))
    found = None if is_finite else birthplace(of, trial.reference.golden)
    if found and found.birth:
        return Located(output, stages, none, birthplace=found)
    if found:  # what is not finite comes of no operation, but of where it is, or should be, stored
        sliced = of.slice(frozenset(), of_finite=False)
        before = tuple(stage.site for stage in stages[:-1])
        lines = _nearest_first(sliced.lines[found.output], sliced.when)
        if lines or not stages[-1].wrong:
            return Located(output, stages, none, region=Region(found.output, before, lines), birthplace=found)
    if stages[-1].wrong:
        found_instead = other_call(trial, output, none.outputs[output])
        entered_in = region(of, evaluation, stages, found_instead)
        return Located(output, stages, none, region=entered_in, birthplace=found)
    magnitude = {output: trial.reference.magnitude[output]}
    site = stages[-1].site if stages[-1].is_off else ""
    ranking = rank(of, trial.reference.golden, magnitude, done, fixed, (none, everything), site)
    own = () if stages[-1].is_off else own_rounding(of, ranking, output, trial.contract, fixed)
    culprit = _culprit(of, ranking, stages[-1], magnitude, fixed, own)
    return Located(output, stages, none, ranking, culprit=culprit, own=own)


def own_rounding(of: Program, ranking: Ranking, output: str, contract: Contract, fixed: Set[Line]) -> tuple[Share, ...]:
    """The lines that make most of an output's error and only round it to its dtype, as promised; largest first.

    Empty if no other line makes more than `NAMED` of the error, or the output is not narrow.
    """
    own: list[Share] = []
    exact = ranking.none.outputs[output]
    promised = round_to(exact, contract.dtype(output)).astype(np.float64)
    for share, other in pairwise(ranking.shares if contract.is_narrow(output) else ()):
        if other.share < NAMED:
            break
        got = _with_line(of, share.line, fixed).outputs[output]
        # An error is that of operands in their own dtype, which are not quite the numbers that it is added to.
        rounded = ~np.isclose(got, exact, rtol=SAME, atol=0.0, equal_nan=True)
        same = np.isclose(got, promised, rtol=SAME, atol=0.0, equal_nan=True)[rounded]
        if not same.size or np.mean(~same) >= OTHERWISE:
            break
        own.append(share)
    return tuple(own)


def _with_line(of: Program, line: Line, fixed: Set[Line]) -> Run:
    """The run in which `line` rounds, and beside it only the lines that always do."""
    return of.run(lambda place: place.line in fixed or place.line == line)


def _culprit(
    of: Program,
    ranking: Ranking,
    last: Stage,
    magnitude: Mapping[str, Floats],
    fixed: Set[Line],
    own: tuple[Share, ...],
) -> Share | None:
    """The line that makes most of the error: of the stage that is off, which may be little of the output's. own: those
    that do as promised."""
    shares = [share for share in ranking.shares if share not in own]
    at_site = last.is_off and any(last.site in share.sites for share in shares)
    if at_site:
        shares.sort(key=lambda share: -share.sites.get(last.site, share.share))

    def power(run: Run) -> float:
        if at_site:
            return at_sites(run, ranking.none)[last.site]
        return mean_square(run.outputs, ranking.none.outputs, magnitude)

    return replace(shares[0], entries=entered(of, ranking, shares[0], fixed, power)) if shares else None


def region(of: Program, evaluation: Evaluation, stages: tuple[Stage, ...], instead: Instead | None = None) -> Region:
    """The lines between right values and the first wrong ones."""
    wrong = evaluation.wrong_marks()
    sites = [mark.site for mark in evaluation.none.marks]
    first, before = stages[-1].site, [stage.site for stage in stages[:-1]]
    right = {n for n, site in enumerate(sites) if site in (*before, first) and not wrong[n]}
    sliced = of.slice(right)
    at = [n for n, site in enumerate(sites) if site == first and wrong[n]]
    lines = sliced.marks[at[0]].lines if at else sliced.lines[first]
    of_right = [sliced.marks[n].lines for n in right if sites[n] in before]
    of_right += [sliced.lines[name] for name in sliced.lines if evaluation.is_right(name)]
    shared = lines & frozenset().union(*of_right)
    nearest = _nearest_first(lines, sliced.when)
    alone = nearest if shared == lines else _nearest_first(lines - shared, sliced.when)
    rest = tuple(line for line in nearest if line not in alone)
    readers = _readers(instead.arguments, sliced.when) if instead else ()
    return Region(first, tuple(before), alone, rest, instead, readers)


def _readers(names: Sequence[str], when: Mapping[Line, int]) -> tuple[Line, ...]:
    """The lines of statements that have one of these names, in functions some line of which was executed."""
    functions = {(line.file, enclosing(line)[1]) for line in when}
    found = {
        Line(file, node.lineno): max(when.get(Line(file, n), 0) for n in lines)
        for file, lines in functions
        for node in ast.walk(_parsed(file))
        if isinstance(node, ast.stmt) and not hasattr(node, "body") and node.lineno in lines
        if any(_named(n) in names for n in ast.walk(node))
    }
    return tuple(sorted(found, key=lambda line: (-found[line], line)))


def _named(node: ast.AST) -> str | None:
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Constant):  # a key of a dictionary, or what a tensor is loaded by
        return node.value if isinstance(node.value, str) else None
    if isinstance(node, ast.keyword):
        return node.arg
    return node.attr if isinstance(node, ast.Attribute) else None


def _nearest_first(lines: Set[Line], when: Mapping[Line, int]) -> tuple[Line, ...]:
    """The lines, and what in the same files they call or read, as of when they did so last."""
    last = {line: when.get(line, 0) for line in lines} | _called(lines, when) | _read(lines, when)
    return tuple(sorted(last, key=lambda line: (-last[line], line)))


def _read(lines: Set[Line], when: Mapping[Line, int]) -> dict[Line, int]:
    """The lines of statements that computed nothing, and give a name its value that these lines read: a constant in
    the place of a term."""
    found: dict[Line, int] = {}
    for file in {line.file for line in lines}:
        for function in (node for node in ast.walk(_parsed(file)) if isinstance(node, FUNCTIONS)):
            names: dict[str, int] = {}
            silent = []
            for node in (n for n in ast.walk(function) if isinstance(n, ast.stmt) and not hasattr(n, "body")):
                own = [Line(file, n) for n in range(node.lineno, (node.end_lineno or node.lineno) + 1)]
                if not lines.isdisjoint(own):
                    last = max(when.get(line, 0) for line in own)
                    names |= {n.id: max(last, names.get(n.id, 0)) for n in ast.walk(node) if isinstance(n, ast.Name)}
                elif isinstance(node, ast.Assign):
                    silent.append(node)
            for node in silent:
                given = {n.id for target in node.targets for n in ast.walk(target) if isinstance(n, ast.Name)}
                found |= {Line(file, node.lineno): names[name] for name in given & names.keys()}
    return found


def _called(lines: Set[Line], when: Mapping[Line, int]) -> dict[Line, int]:
    """The lines of functions that these lines call, in the same files, none of whose lines is among them: they only
    hand on what they are given, or should have done more. And when they were called last."""
    found: dict[Line, int] = {}
    for file in {line.file for line in lines}:
        numbers = {line.number for line in lines if line.file == file}
        called: dict[str, int] = {}
        for call in ast.walk(_parsed(file)):
            if (
                isinstance(call, ast.Call)
                and call.lineno in numbers
                and isinstance(call.func, ast.Name | ast.Attribute)
            ):
                name = call.func.id if isinstance(call.func, ast.Name) else call.func.attr
                called[name] = max(called.get(name, 0), when.get(Line(file, call.lineno), 0))
        for node in ast.walk(_parsed(file)):
            if not isinstance(node, FUNCTIONS) or node.name not in called:
                continue
            if numbers.isdisjoint(range(node.lineno, (node.end_lineno or node.lineno) + 1)):
                statements = (n for n in ast.walk(node) if isinstance(n, ast.stmt) and not hasattr(n, "body"))
                found |= {Line(file, n.lineno): called[node.name] for n in statements}
    return found


def region_of_bits(trial: Trial, stages: tuple[BitStage, ...]) -> Region | None:
    """The lines between right values and the first wrong ones, of what is compared bit for bit; None where all are
    right."""
    *before, last = stages
    if not last.wrong:
        return None
    of = program(trial)
    names = [stage.site for stage in before if stage.line]
    marked = [mark.site for mark in of.run(lambda place: True).marks]
    sliced = of.slice({n for n, site in enumerate(marked) if site in names})
    lines = (
        sliced.lines[last.site]
        if last.line is None
        else frozenset().union(*(mark.lines for mark in sliced.marks if mark.site == last.site))
    )
    return Region(last.name, tuple(stage.name for stage in before), _nearest_first(lines, sliced.when))


def birthplace(of: Program, golden: Mapping[str, Floats]) -> Birthplace | None:
    """Where values come from whose finiteness is not the golden's; None where all of it is."""
    seen = Births()
    wrong = _wrong(of.births(seen), golden)
    count = sum(len(places) for places in wrong.values())
    if not count:
        return None
    output = next(name for name, places in wrong.items() if len(places))
    index = tuple(int(i) for i in wrong[output][0])
    best, left = None, count
    for birth in seen.found[:MOST_BIRTHS]:
        rest = sum(len(places) for places in _wrong(of.births(Births({birth.place})), golden).values())
        if rest < left:
            best, left = birth, rest
        if not rest:
            break
    if best is not None:
        return Birthplace(best, count, left, output, index)
    left = sum(len(places) for places in _wrong(of.births(Births(), 0.0), golden).values())
    if left and seen.found:  # as of exp(a - a) + exp(b - b) of infinities
        together = Births({birth.place for birth in seen.found})
        rest = sum(len(places) for places in _wrong(of.births(together), golden).values())
        if rest < count:
            return Birthplace(seen.found[0], count, rest, output, index, len(seen.found) - 1)
    return Birthplace(None, count, left, output, index)


def _wrong(run: Run, golden: Mapping[str, Floats]) -> dict[str, np.ndarray]:
    return {name: np.argwhere(np.isfinite(run.outputs[name]) != np.isfinite(y)) for name, y in golden.items()}


def enclosing(line: Line) -> tuple[str, range]:
    """The name of the innermost function that a line is in and its lines; "" and that line alone outside of any."""
    around = [
        (node.name, range(node.lineno, (node.end_lineno or node.lineno) + 1))
        for node in ast.walk(_parsed(line.file))
        if isinstance(node, FUNCTIONS)
    ]
    inside = [(name, lines) for name, lines in around if line.number in lines]
    return max(inside, key=lambda found: found[1].start, default=("", range(line.number, line.number + 1)))


@cache
def _parsed(file: str) -> ast.Module:
    path = Path(file)
    return ast.parse(path.read_text() if path.is_file() else "")
