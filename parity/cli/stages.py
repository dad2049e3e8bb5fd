"""`parity stages`: the first stage of a kernel that is off, and the source lines that make its error."""

from __future__ import annotations

import argparse
from itertools import groupby
from pathlib import Path

import numpy as np
from rich.console import Console
from rich.progress import MofNCompleteColumn, TextColumn
from rich.text import Text

from parity import matrix
from parity.cli.options import (
    add_output_argument,
    add_trial_arguments,
    decided,
    exit_code,
    progress,
    trial_of,
    verdict_line,
)
from parity.debugging.attribution import Ranking, Share, lines_compared_bit_for_bit, statement
from parity.debugging.attribution.bits import BitStage, walk_bits
from parity.debugging.attribution.locate import Birthplace, Located, Region, by_function, locate, region_of_bits
from parity.debugging.attribution.program import Line
from parity.debugging.attribution.walk import JUMP, unseen
from parity.debugging.explain import output_named

ABOUT = "say at which stage of a kernel its error enters, and which of its source lines make it"

EPILOG = """\
Stages are the sites of the golden that the kernel shows by `probe`, in the golden's order, and then its outputs: lhs,
rhs, partial, acc, inner of a matmul; c, decay, A, state, dstate, dA, dgate of linear attention; absmax, scale, spread
of a quantiser. One is off whose values in float64 are not the golden's (a fault of logic: the statements between the
right ones and it are listed) or whose error is more than 4 times its contract's (precision: source lines are ranked).
Of values that are not finite the first operation that made one is named. Exit codes: 0 the case passes, 1 it fails, 3
its kernel raised.
"""
SHOWN = 10
"""Lines of the table at most."""
FAITHFUL = 0.1
"""What is left of the error where no line errs, at most, of a kernel that float64 makes exact."""
LEAST = 0.001
"""Shares below are not shown."""
MOST = 10
"""Times its line's share that a call may make alone: one that makes more rounds what another has split."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments of `parity stages`."""
    add_trial_arguments(parser)
    add_output_argument(parser)


@np.errstate(all="ignore")  # hardware says nothing of what is not finite, and interpreters need not
def command(given: argparse.Namespace) -> int:
    """`parity stages`: 0 where the case passes, 1 where it fails, 3 where its kernel raised."""
    trial, out = trial_of(given), Console(highlight=False, soft_wrap=True, markup=False)
    output = output_named(trial, given.output)
    judged = decided(given, trial)
    shown = verdict_line(judged)
    if trial.op.bit_exact and not judged.ended:
        stages = walk_bits(trial)
        shown.append(screen_of_bits(stages, region_of_bits(trial, stages), given.root))
    elif not judged.ended:
        name = output or judged.output
        fixed = lines_compared_bit_for_bit(matrix.load(given.root), trial.op, given.backend)
        with progress(TextColumn("one line at a time"), MofNCompleteColumn()) as done:
            found = locate(trial, name, fixed, done)
        shown.append(screen(found, given.root))
    shown.rstrip()
    out.print(shown)
    return exit_code(judged)


def screen(found: Located, root: Path) -> Text:
    """Stages, and what is known of the first that is off, on one screen."""
    out = Text()
    out.append(conclusion(found, root) + "\n", "bold")
    for stage in found.stages:
        out.append(f"  {stage.site:<10} error {stage.error:.2e}, by contract {stage.expected:.2e}")
        out.append(f"   {stage.wrong:.1%} of the values are not the golden's" if stage.wrong else "")
        out.append("   ← first\n" if stage.is_off else "\n", "bold red" if stage.is_off else "")
    if parts := unseen(found.none.marks):
        why = "no program of the kernel has the whole value in this case, as where a sum is cut into tiles"
        out.append(f"  not compared: {', '.join(parts)}: {why}\n")
    if found.ranking:
        _append_ranking(out, found.ranking, root)
    if found.region:
        _append_region(out, found.region, found.output, root)
    out.rstrip()
    return out


def _append_ranking(out: Text, ranking: Ranking, root: Path) -> None:
    out.append(f"error {ranking.error:.3g} of M, all lines exact: {ranking.exact:.2g}; ")
    out.append(f"the lines one by one explain {ranking.together:.0%} of its mean square\n")
    for share in ranking.shares[:SHOWN]:
        if max(share.share, share.gone or 0.0) < LEAST:
            break
        gone = "" if share.gone is None else f"  {share.gone:7.1%} go without it"
        out.append(f"{share.share:7.1%}{gone}  {quoted(share.line, root)}\n")
        for caller, part in share.callers:
            if part >= LEAST:
                alone = f"{part:7.1%}" if part <= MOST * max(share.share, LEAST) else "  not alone"
                out.append(f"         {alone}  by {quoted(caller, root)}\n", "dim")


def _append_region(out: Text, region: Region, output: str, root: Path) -> None:
    if region.instead:
        out.append(f"of {output}, {region.instead}; {' or '.join(region.instead.arguments)} is named by\n")
        _append_statements(out, region.readers, root)
    if not region.lines:
        out.append(f"{region.site} comes of no operation: an argument, or a part of one, is passed on\n")
        return
    alone = ", which nothing right comes of" if region.shared else ""
    out.append(f"{region.site} comes of these statements{alone}, and of what is right before them:\n")
    _append_statements(out, region.lines, root)
    if region.shared:
        out.append("and of these, which something right comes of as well:\n")
        _append_statements(out, region.shared, root)


def _append_statements(out: Text, lines: tuple[Line, ...], root: Path) -> None:
    for file, name, whole, numbers in by_function(lines):
        out.append(f"  {_short(file, root)}:{whole[0]}–{whole[-1]}  {name}\n")
        for text, group in groupby(numbers, key=lambda number: statement(Line(file, number))):
            out.append(f"    {next(group)}  {_cut(text)}\n", "dim")


def screen_of_bits(stages: tuple[BitStage, ...], region: Region | None, root: Path) -> Text:
    """Stages of what must come out bit for bit, on one screen: no line rounds there, so none is ranked."""
    last, before = stages[-1], [stage.name for stage in stages[:-1]]
    out = Text()
    if not last.wrong:
        out.append("no stage is off: every bit is the golden's\n", "bold")
    else:
        right = f"; right until then: {', '.join(before)}" if before else ""
        out.append(f"the golden's bits are lost at {last.name}{right}\n", "bold")
    for stage in stages:
        out.append(f"  {stage.name:<24} {stage.wrong:,} of {stage.numbers:,} values are not the golden's")
        out.append("   ← first\n" if stage.wrong else "\n", "bold red" if stage.wrong else "")
        if stage.wrong and stage.line:
            out.append(f"      {quoted(stage.line, root)}\n")
    if region:
        _append_region(out, region, last.site, root)
    out.rstrip()
    return out


def conclusion(found: Located, root: Path) -> str:
    """In one sentence."""
    last, before = found.stages[-1], [stage.site for stage in found.stages[:-1]]
    if found.birthplace:
        return _born(found.birthplace, root)
    if found.region:
        between = f"between {before[-1]} (right) and {last.site} (wrong)" if before else f"before {last.site} (wrong)"
        return f"a logic fault enters {between}: exact arithmetic does not mend it"
    ranking = found.ranking
    assert ranking is not None
    first = _named(found.culprit, root) if found.culprit else "no line"
    if last.is_off:
        return f"precision is lost at {last.site}; most of it by {first}"
    if not found.culprit or not ranking.error:
        return "no line errs"
    if ranking.exact > FAITHFUL * ranking.error:
        return "no stage is off; the lines are not ranked by their shares alone: in float64 some of the error is left"
    name = found.output
    own = " and ".join(quoted(share.line, root) for share in found.own)
    beside = f"beside the rounding of {name} at {own}, " if own else ""
    return f"no stage is off by {JUMP:g} times its contract; {beside}most of the error of {name} is made by {first}"


def _named(share: Share, root: Path) -> str:
    """A line, and which call of its function, and which lines of other files, more than half of its error is for."""
    callers = [caller for caller, part in share.callers if part > share.share / 2][:1]
    named = dict.fromkeys([*callers, *share.entries])
    return quoted(share.line, root) + "".join(f", called by {quoted(caller, root)}" for caller in named)


def _born(found: Birthplace, root: Path) -> str:
    where = f"{found.output}[{', '.join(map(str, found.index))}]"
    if (birth := found.birth) is None:
        whence = "of memory that nothing is stored to, or of outside an array"
        if found.left:
            whence = "of no operation on finite numbers"
        return f"{found.wrong} elements of the outputs are not finite, or should not be, first {where}: {whence}"
    operands = ", ".join(f"{x:.6g}" for x in birth.operands)
    what = "NaN" if np.isnan(birth.result) else "infinity"
    at = ", ".join(map(str, birth.index))
    without = "without it" if not found.others else f"without it and {found.others} more,"
    rest = "" if not (found.left or found.others) else f"; {without} {found.left} of {found.wrong} are left"
    return (
        f"{what} is born at {quoted(birth.place.line, root)}: of {operands} at [{at}], in {birth.elements} elements; "
        f"first seen in {where}{rest}"
    )


def quoted(line: Line, root: Path) -> str:
    """file:line and the statement."""
    return f"{_short(line.file, root)}:{line.number}  {_cut(statement(line))}"


def _short(file: str, root: Path) -> Path:
    path = Path(file)
    return path.relative_to(root) if path.is_relative_to(root) else path


def _cut(text: str) -> str:
    return text if len(text) <= 100 else text[:99] + "…"
