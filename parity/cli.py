"""The `parity` command."""

from __future__ import annotations

import argparse
import multiprocessing
import os
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path

from rich import box
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from parity import matrix
from parity.backends import prepare_environment, runner
from parity.dtypes import SHORT_NAMES
from parity.judge import compare
from parity.op import BACKENDS, Case, Op
from parity.verdict import Verdict


@dataclass(frozen=True)
class Line:
    """One line of the table: what all seeds of one case came to."""

    case: Case
    seeds: int
    epsilon: dict[str, float]  # root mean square over seeds, by backend
    worst: tuple[float, float] | None  # η and its bound, where η comes closest to it
    verdict: Verdict


def main(arguments: Sequence[str] | None = None) -> int:
    """Entry point; returns the exit code: 0 all verdicts pass, 1 one fails, 2 wrong usage."""
    parser = argparse.ArgumentParser(
        prog="parity", description="Judge TPU and GPU kernels of the same operations against one float64 golden."
    )
    parser.add_argument("--root", type=Path, default=Path.cwd(), help="the project's folder (default: this one)")
    commands = parser.add_subparsers(dest="command", required=True)
    run = commands.add_parser(
        "run", help="run the cases with published model shapes on both backends and print the table of ε"
    )
    run.add_argument("-k", metavar="TEXT", default="", help="only cases whose id or model contains TEXT")
    run.add_argument("--seeds", type=int, default=8, metavar="S", help="paired draws of each case (default: 8)")
    run.add_argument("-j", "--jobs", type=int, default=None, metavar="N", help="processes (default: one per core)")
    listing = commands.add_parser("list", help="list the ops of the matrix, or with -k their cases")
    listing.add_argument("-k", metavar="TEXT", help="list the cases whose id or model contains TEXT")
    given = parser.parse_args(arguments)
    prepare_environment()
    try:
        ops = matrix.load(given.root.resolve())
    except ValueError as error:
        parser.error(str(error))
    if given.command == "list":
        return _list(ops, given.k)
    if given.seeds < 1:
        parser.error(f"--seeds must be at least 1, got {given.seeds}")
    return _run(given.root.resolve(), ops, given.k, given.seeds, given.jobs or os.cpu_count() or 1)


def _matches(case: Case, text: str) -> bool:
    return text.lower() in f"{case.id} {case.model}".lower()


def _list(ops: Sequence[Op], text: str | None) -> int:
    for op in ops:
        if text is None:
            tiers = {tier: len(list(group)) for tier, group in groupby(sorted(c.tier for c in op.cases))}
            print(f"{op.name:<12} {len(op.cases):>6} cases  ({', '.join(f'{n} {tier}' for tier, n in tiers.items())})")
        else:
            for case in op.cases:
                if _matches(case, text):
                    print(f"{case.id}{f'  {case.model}' if case.model else ''}")
    return 0


def _run(root: Path, ops: Sequence[Op], text: str, seeds: int, jobs: int) -> int:
    chosen = [(op, case) for op in ops for case in op.cases if case.model and _matches(case, text)]
    # Into a file or a log the table goes whole; a terminal folds it.
    console = Console(width=None if sys.stdout.isatty() else 150)
    if not chosen:
        console.print(f"no case of a model's shape matches {text!r}", style="red")
        return 2
    lines: dict[str, Line] = {}
    with Progress(
        TextColumn("parity"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TextColumn("{task.description}"),
        console=console, transient=True,
    ) as progress:  # fmt: skip
        task = progress.add_task("", total=len(chosen))
        for line in _judge_all(root, chosen, seeds, jobs):
            lines[line.case.id] = line
            progress.update(task, advance=1, description=line.case.id)
    table = _table([lines[case.id] for _, case in chosen])
    console.print(table)
    console.print(" · ".join(f"{b}: {runner(b).describe()}" for b in BACKENDS), highlight=False)
    failed = [line for line in lines.values() if not line.verdict.passed]
    for line in failed:
        console.print(f"{line.verdict.outcome}: {line.case.id}: {line.verdict.reason}", style="red", highlight=False)
    print(f"{len(lines) - len(failed)} passed, {len(failed)} failed")
    return 1 if failed else 0


def _judge_all(root: Path, chosen: Sequence[tuple[Op, Case]], seeds: int, jobs: int) -> Iterator[Line]:
    # Spawned, not forked: the frameworks' threads do not survive a fork.
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(jobs, mp_context=context, initializer=prepare_environment) as pool:
        pending = [pool.submit(judge_line, root, op.name, case, seeds) for op, case in chosen]
        try:
            for done in as_completed(pending):
                yield done.result()
        finally:
            for future in pending:
                future.cancel()


def judge_line(root: Path, op_name: str, case: Case, seeds: int) -> Line:
    """One line of the table; whatever a kernel raises costs its line alone."""
    try:
        op = next(op for op in matrix.load(root) if op.name == op_name)
        compared = compare(op, case, seeds)
    except Exception as error:
        reason = f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
        return Line(case, seeds, {}, None, Verdict("CRASH", "G1", reason))
    worst = max(compared.everything, key=lambda j: j.eta_max / j.bound if j.bound else j.eta_max)
    return Line(
        case,
        seeds,
        {backend: compared.epsilon(backend) for backend in BACKENDS},
        (worst.eta_max, worst.bound),
        compared.comparison.verdict,
    )


def _table(lines: Sequence[Line]) -> Table:
    table = Table(title="ε_TPU ≤ ε_GPU", title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False)
    for name in ("op", "dtype", "model", "shape"):
        table.add_column(name, no_wrap=True)
    for name in ("cases", "ε_TPU", "ε_GPU", "η / bound"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("verdict")
    for line in lines:
        case, passed = line.case, line.verdict.passed
        table.add_row(
            case.op,
            "→".join(SHORT_NAMES.get(d, d) for d in dict.fromkeys([case.dtype, case.out])),
            case.model,
            " ".join(f"{name}{size}" for name, size in case.dims),
            str(line.seeds),
            *(f"{line.epsilon[b]:.2e}" if b in line.epsilon else "–" for b in BACKENDS),
            f"{line.worst[0]:.2g} / {line.worst[1]:.3g}" if line.worst else "–",
            f"{line.verdict.outcome} {line.verdict.reason}",
            style=None if passed else "red",
        )
    return table


if __name__ == "__main__":
    sys.exit(main())
