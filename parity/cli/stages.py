"""`parity stages`: the first stage of a kernel that is off, and the source lines that make its error."""

from __future__ import annotations

import argparse
from pathlib import Path

from rich.console import Console
from rich.progress import MofNCompleteColumn, TextColumn
from rich.text import Text

from parity import matrix
from parity.cli.options import add_trial_arguments, progress, trial_of
from parity.debugging.attribution import Ranking, files_compared_bit_for_bit, program, rank, statement
from parity.debugging.attribution.bits import BitStage, walk_bits
from parity.debugging.attribution.program import Line
from parity.debugging.attribution.walk import Stage, unseen, walk

ABOUT = "say at which stage of a kernel its error enters, and which of its source lines make it"

SHOWN = 10
"""Lines of the table at most."""
FAITHFUL = 0.1
"""What is left of the error where no line errs, at most, of a kernel that float64 makes exact."""
LEAST = 0.001
"""Shares below are not shown."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments of `parity stages`."""
    add_trial_arguments(parser)


def command(given: argparse.Namespace) -> int:
    """`parity stages`: 1 where a stage is off, else 0. Raises Ended as `Trial.run`."""
    trial = trial_of(given)
    title, out = f"{given.backend}   {trial.case.id}", Console(highlight=False, soft_wrap=True, markup=False)
    if trial.op.bit_exact:
        found = walk_bits(trial)
        out.print(screen_of_bits(title, found, given.root))
        return int(found[-1].wrong > 0)
    trial.run()  # a kernel that comes to no result has no stages
    expected = trial.reference
    with progress(TextColumn("one line at a time"), MofNCompleteColumn()) as done:
        traced = program(trial)
        fixed = files_compared_bit_for_bit(matrix.load(given.root), trial.op, given.backend)
        ranking = rank(traced, expected.golden, expected.magnitude, done, fixed)
    stages = walk(trial, ranking)
    out.print(screen(title, stages, ranking, given.root))
    return int(stages[-1].is_off)


def screen(title: str, stages: tuple[Stage, ...], ranking: Ranking, root: Path) -> Text:
    """Stages and lines on one screen."""
    out = Text(title + "\n")
    out.append(conclusion(stages, ranking, root) + "\n", "bold")
    for stage in stages:
        out.append(f"  {stage.site:<10} error {stage.error:.2e}, by contract {stage.expected:.2e}")
        out.append(f"   {stage.wrong:.1%} of the values are not the golden's" if stage.wrong else "")
        out.append("   ← first\n" if stage.is_off else "\n", "bold red" if stage.is_off else "")
    if parts := unseen(ranking.none.marks):
        why = "no program of the kernel has the whole value in this case, as where a sum is cut into tiles"
        out.append(f"  not compared: {', '.join(parts)}: {why}\n")
    out.append(f"error {ranking.error:.3g} of M, all lines exact: {ranking.exact:.2g}; ")
    out.append(f"the lines one by one explain {ranking.together:.0%} of its mean square\n")
    for share in ranking.shares[:SHOWN]:
        if max(share.share, share.gone or 0.0) < LEAST:
            break
        gone = "" if share.gone is None else f"  {share.gone:7.1%} go without it"
        out.append(f"{share.share:7.1%}{gone}  {quoted(share.line, root)}\n")
        for caller, part in share.callers:
            if part >= LEAST:
                out.append(f"         {part:7.1%}  by {quoted(caller, root)}\n", "dim")
    out.rstrip()
    return out


def screen_of_bits(title: str, stages: tuple[BitStage, ...], root: Path) -> Text:
    """Stages of what must come out bit for bit, on one screen: no line rounds there, so none is ranked."""
    last, before = stages[-1], [stage.name for stage in stages[:-1]]
    out = Text(title + "\n")
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
    out.rstrip()
    return out


def conclusion(stages: tuple[Stage, ...], ranking: Ranking, root: Path) -> str:
    """In one sentence."""
    last = stages[-1]
    if last.wrong:
        return f"a logic fault enters at {last.site}: exact arithmetic does not mend it"
    if not last.is_off and ranking.exact > FAITHFUL * ranking.error:
        return "no stage is off; in float64 the kernel is another one, as where sums do its quantising: shares mislead"
    shares = list(ranking.shares)
    if last.is_off:  # what is most of the error there may be little of the result's
        shares.sort(key=lambda share: share.sites.get(last.site, share.share), reverse=True)
    first = quoted(shares[0].line, root) if shares else "no line"
    if last.is_off:
        return f"precision is lost at {last.site}; most of it by {first}"
    if not shares or not ranking.error:
        return "no line errs"
    return f"no stage is off; most of the error is made by {first}"


def quoted(line: Line, root: Path) -> str:
    """file:line and the statement."""
    path = Path(line.file)
    name = path.relative_to(root) if path.is_relative_to(root) else path
    text = statement(line)
    return f"{name}:{line.number}  {text if len(text) <= 100 else text[:99] + '…'}"
