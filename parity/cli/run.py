"""`parity run`: the table of ε over the cases with published model shapes."""

from __future__ import annotations

import argparse
import multiprocessing
import os
import shlex
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path

from rich import box
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from parity import matrix
from parity.backends import prepare_environment, runner
from parity.cli.options import EXPRESSION, console, file, matches, positive
from parity.dtypes import SHORT_NAMES
from parity.judging.judge import compare
from parity.judging.verdict import Verdict
from parity.ledger.provenance import now
from parity.op import BACKENDS, Case, Op
from parity.report import entries
from parity.runners import ray as ray_run

ABOUT = "run the cases with published model shapes on both backends and print the table of ε"


@dataclass(frozen=True)
class Line:
    """One line of the table: what all seeds of one case came to."""

    case: Case
    seeds: int
    epsilon: dict[str, float]  # root mean square over seeds, by backend
    worst: float | None  # the share of its bound that an error comes to at most
    verdict: Verdict
    entry: entries.Entry


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments of `parity run`."""
    parser.add_argument("-k", metavar="EXPRESSION", default="", help=EXPRESSION)
    parser.add_argument("--seeds", type=positive, default=8, metavar="S", help="paired draws of each case (default: 8)")
    parser.add_argument(
        "-j", "--jobs", type=positive, default=None, metavar="N", help="processes (default: one per core)"
    )
    parser.add_argument("--report", type=file, default=None, metavar="FILE", help="write an HTML report as well")
    ray_run.add_arguments(parser)


def command(given: argparse.Namespace) -> int:
    """`parity run`: 0 where every verdict passes, else 1."""
    if given.ray is not None:
        return ray_run.command(given)
    if given.pytest_arguments:
        raise ValueError(f"ARGUMENTS are for pytest with --ray, got {shlex.join(given.pytest_arguments)}")
    ops = matrix.load(given.root)
    chosen = [(op, case) for op in ops for case in op.cases if case.model and matches(case, given.k)]
    screen = console(150)
    if not chosen:
        raise ValueError(f"-k must match a case of a model's shape, got {given.k!r}")
    utc = now()
    lines: dict[str, Line] = {}
    with Progress(
        TextColumn("parity"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TextColumn("{task.description}"),
        console=screen, transient=True,
    ) as progress:  # fmt: skip
        task = progress.add_task("", total=len(chosen))
        for line in _judge_all(given.root, chosen, given.seeds, given.jobs or os.cpu_count() or 1):
            lines[line.case.id] = line
            progress.update(task, advance=1, description=line.case.id)
        if given.report:
            judged = [lines[case.id].entry for _, case in chosen]
            explained = entries.attribute(ops, judged, lambda id: progress.update(task, description=f"explain {id}"))
    table = _table([lines[case.id] for _, case in chosen])
    screen.print(table)
    screen.print(" · ".join(f"{b}: {runner(b).describe()}" for b in BACKENDS), highlight=False)
    failed = [line for line in lines.values() if not line.verdict.passed]
    for line in failed:
        screen.print(f"{line.verdict.outcome}: {line.case.id}: {line.verdict.reason}", style="red", highlight=False)
    if given.report:
        from parity.report import page

        command = shlex.join(["parity", "run", *(["-k", given.k] if given.k else []), "--seeds", str(given.seeds)])
        about = page.Run(command, tuple(f"{b}: {runner(b).describe()}" for b in BACKENDS), utc)
        print(f"report: {page.write(given.report, explained, about, given.root)}")
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
    rerun = f'parity run -k "{case.id}" --seeds {seeds}'
    try:
        op = next(op for op in matrix.load(root) if op.name == op_name)
        compared = compare(op, case, seeds)
    except Exception as error:
        reason = f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
        crash = entries.without_judgement(op_name, case.id, entries.COMPARED, "CRASH", reason, rerun)
        return Line(case, seeds, {}, None, Verdict("CRASH", "G1", reason), crash)
    return Line(
        case,
        seeds,
        {backend: compared.epsilon(backend) for backend in BACKENDS},
        max(judged.load for judged in compared.everything),
        compared.comparison.verdict,
        entries.of_comparison(op, compared, rerun),
    )


def _table(lines: Sequence[Line]) -> Table:
    table = Table(title="ε_TPU ≤ ε_GPU", title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False)
    for name in ("op", "dtype", "model", "shape"):
        table.add_column(name, no_wrap=True)
    for name in ("cases", "ε_TPU", "ε_GPU", "error / bound"):
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
            "–" if line.worst is None else f"{line.worst:.2f}",
            f"{line.verdict.outcome} {line.verdict.reason}",
            style=None if passed else "red",
        )
    return table
