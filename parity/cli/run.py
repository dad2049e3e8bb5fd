"""`parity run`: the table of ε over the cases with published model shapes."""

from __future__ import annotations

import argparse
import math
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import NamedTuple

from rich import box
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from parity import matrix
from parity.backends import runner
from parity.cli.options import EXPRESSION, console, file, folder, matches, positive
from parity.dtypes import SHORT_NAMES
from parity.judging.judge import Judgement, compare
from parity.judging.verdict import Verdict
from parity.ledger.book import Book
from parity.ledger.provenance import now
from parity.op import BACKENDS, Backend, Case, Op
from parity.report import entries
from parity.runners import lanes
from parity.runners import ray as ray_run
from parity.runners.crashes import examine
from parity.trial import Trial
from parity.words import command as command_line
from parity.words import said

ABOUT = "run the cases with published model shapes on both backends and print the table of ε"
EVERY = 15.0
"""Seconds between two lines of progress where no terminal shows a bar."""

Kinds = Mapping[Backend, str]
"""The device kinds whose records are compared; none: both backends are run here."""


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
    parser.add_argument(
        "--timeout", type=positive, metavar="SECONDS", help="end a case that takes longer, as TIMEOUT (default: never)"
    )
    parser.add_argument("--report", type=file, default=None, metavar="FILE", help="write an HTML report as well")
    parser.add_argument(
        "--recorded", action="store_true",
        help="run nothing: judge every case of which the ledger has all seeds of a TPU and of a GPU, any two of them",
    )  # fmt: skip
    parser.add_argument(
        "--records", type=folder, default=None, metavar="DIR", help="the ledger of --recorded (default: records)"
    )
    ray_run.add_arguments(parser)


def command(given: argparse.Namespace) -> int:
    """`parity run`: 0 where every verdict passes, else 1. Interrupted it prints what is done, and raises then."""
    if given.ray is not None:
        return ray_run.command(given)
    if given.pytest_arguments:
        raise ValueError(f"ARGUMENTS are for pytest with --ray, got {command_line(*given.pytest_arguments)}")
    ops = matrix.load(given.root)
    chosen = list(_recorded(given, ops)) if given.recorded else [({}, *case) for case in _of_models(given, ops)]
    screen, utc = console(180), now()
    lines: list[Line | None] = [None] * len(chosen)
    interrupt = None
    with _progress(screen, len(chosen)) as progress:
        try:
            for n, line in _judge_all(given, chosen):
                lines[n] = line
                progress(1, line.case.id)
        except KeyboardInterrupt as asked:
            if not any(lines):
                raise
            interrupt = asked
    done = [line for line in lines if line is not None]
    of_kinds: dict[tuple[str, ...], list[Line]] = {}
    for (kinds, _, _), of_case in zip(chosen, lines, strict=True):
        if of_case is not None:
            of_kinds.setdefault(tuple(kinds.get(b) or runner(b).describe() for b in BACKENDS), []).append(of_case)
    for devices, compared in of_kinds.items():
        screen.print(_table(compared))
        screen.print(_named(devices), highlight=False)
    failed = [line for line in done if not line.verdict.passed]
    for line in failed:
        screen.print(f"{line.verdict.outcome}: {line.case.id}: {line.verdict.reason}", style="red", highlight=False)
    left = f", {len(chosen) - len(done)} not run" if interrupt else ""
    print(f"{len(done) - len(failed)} passed, {len(failed)} failed{left}", flush=True)
    if given.report:
        from parity.report import page

        judged: Sequence[entries.Entry] = [line.entry for line in done]
        if not (given.recorded or interrupt):  # what was recorded elsewhere would be explained by what runs here
            judged = entries.attribute(ops, judged)
        words = [*(["--recorded"] if given.recorded else []), *(["-k", given.k] if given.k else [])]
        run = command_line("parity", "run", *words, "--seeds", given.seeds)
        about = page.Run(run, tuple(map(_named, of_kinds)), utc)
        print(f"report: {page.write(given.report, judged, about, {'.': given.root})}")
    if interrupt:
        raise interrupt
    return 1 if failed else 0


def _named(devices: Sequence[str]) -> str:
    return " · ".join(f"{b}: {device}" for b, device in zip(BACKENDS, devices, strict=True))


def _of_models(given: argparse.Namespace, ops: Sequence[Op]) -> list[tuple[Op, Case]]:
    of_models = [(op, case) for op in ops for case in op.cases if case.model]
    if not of_models:
        raise ValueError(
            "parity run compares cases whose shape a model has, Op.grid(…, model='NAME'), and the matrix has none;"
            " pytest judges them all"
        )
    chosen = [(op, case) for op, case in of_models if matches(case, given.k)]
    if not chosen:
        raise ValueError(f"-k must match a case of a model's shape, got {given.k!r}")
    return chosen


def _recorded(given: argparse.Namespace, ops: Sequence[Op]) -> list[tuple[Kinds, Op, Case]]:
    """Every case, of any two devices, of which the ledger has all seeds. Raises ValueError where there is none."""
    book = _book(_records(given))
    tpus, gpus = (book.kinds(backend) for backend in BACKENDS)
    if not tpus or not gpus:
        there = f"of TPUs {', '.join(tpus) or 'none'}, of GPUs {', '.join(gpus) or 'none'}"
        raise ValueError(f"--recorded needs records of a TPU and of a GPU (parity merge DIR …), has {there}")
    pairs: list[Kinds] = [{"tpu": tpu, "gpu": gpu} for tpu in tpus for gpu in gpus]
    chosen = [
        (kinds, op, case)
        for kinds in pairs
        for op in ops
        for case in op.cases
        if not op.bit_exact and matches(case, given.k)
        and all(book.holds(Trial(op, case, b), given.seeds, kind) for b, kind in kinds.items())
    ]  # fmt: skip
    if not chosen:
        raise ValueError(f"--recorded needs a case with {given.seeds} seeds of both, has none that matches {given.k!r}")
    return chosen


@contextmanager
def _progress(screen: Console, total: int) -> Iterator[Callable[[int, str], None]]:
    """A function to be told how many more cases are done, and what is at hand: a bar, or now and then a line."""
    if screen.is_terminal:
        columns = TextColumn("parity"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn()
        described = TextColumn("{task.description}", markup=False)
        with Progress(*columns, described, console=screen, transient=True) as bar:
            task = bar.add_task("", total=total)
            yield lambda more, words: bar.update(task, advance=more, description=words)
        return
    began = said = time.monotonic()
    done = 0

    def tell(more: int, words: str) -> None:
        nonlocal done, said
        done, at = done + more, time.monotonic()
        if at - said > EVERY:
            said = at
            print(f"parity: {done} of {total} · {at - began:.0f} s · {words}", flush=True)

    yield tell


def _records(given: argparse.Namespace) -> Path:
    return given.records or given.root / "records"


class Job(NamedTuple):
    """What a line is of: a case of an op, by its name, and the kinds whose records are judged in place of runs."""

    op: str
    case: Case
    kinds: Kinds


def _judge_all(given: argparse.Namespace, chosen: Sequence[tuple[Kinds, Op, Case]]) -> Iterator[tuple[int, Line]]:
    """Each line as it comes, with its number."""
    work = partial(judge_line, given.root, given.seeds, _records(given))
    jobs = [Job(op.name, case, kinds) for kinds, op, case in reversed(chosen)]  # scans and layers take longest
    for n, line in lanes.each(work, jobs, given.jobs or os.cpu_count() or 1, given.timeout):
        if isinstance(line, lanes.Death):
            line = _without_result(jobs[n], given.seeds, _verdict(line, given.timeout))
        yield len(jobs) - 1 - n, line


def judge_line(root: Path, seeds: int, records: Path, job: Job) -> Line:
    """One line of the table, of the ledger at `records` where there are kinds; what a golden raises costs it alone."""
    case, kinds = job.case, job.kinds
    try:
        op = next(op for op in matrix.load(root) if op.name == job.op)
        compared = compare(
            op, case, seeds, {b: _judgements(records, Trial(op, case, b), seeds, kinds[b]) for b in kinds}
        )
    except Exception as error:
        return _without_result(job, seeds, Verdict("CRASH", "G1", said(error)))
    return Line(
        case,
        seeds,
        {backend: compared.epsilon(backend) for backend in BACKENDS},
        None if any(j.ended for j in compared.everything) else max(judged.load for judged in compared.everything),
        compared.comparison.verdict,
        entries.of_comparison(op, compared, _rerun(job, seeds)),
    )


def _without_result(job: Job, seeds: int, verdict: Verdict) -> Line:
    crash = entries.without_judgement(
        job.op, job.case.id, entries.COMPARED, verdict.outcome, verdict.reason, _rerun(job, seeds)
    )
    return Line(job.case, seeds, {}, None, verdict, crash)


def _verdict(death: lanes.Death, seconds: int) -> Verdict:
    if death.status is None:
        return Verdict("TIMEOUT", "G1", f"ran longer than --timeout {seconds}")
    found = examine("", death.status)
    return Verdict(found.outcome, "G1", found.reason)


def _rerun(job: Job, seeds: int) -> str:
    recorded = ["--recorded"] if job.kinds else []
    return command_line("parity", "run", *recorded, "-k", job.case.id, "--seeds", seeds)


def _judgements(records: Path, trial: Trial, seeds: int, kind: str) -> list[Judgement]:
    """What a device has recorded of a trial's seeds. Raises ValueError for a record that speaks of other inputs."""
    found = []
    for entry in _book(records).seeds(trial, seeds, real=True, kind=kind):
        if isinstance(entry, Verdict):
            raise ValueError(f"{entry.outcome}: {entry.reason}")
        found.append(entry)
    return found


_book = cache(Book)


def _table(lines: Sequence[Line]) -> Table:
    table = Table(title="ε_TPU ≤ ε_GPU", title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False)
    for name in ("op", "dtype", "model", "shape"):
        table.add_column(name, no_wrap=True)
    for name in ("cases", "ε_TPU", "ε_GPU", "error / bound"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("verdict")
    for line in lines:
        table.add_row(*cells(line), style=None if line.verdict.passed else "red")
    return table


def cells(line: Line) -> tuple[str, ...]:
    """A line of the table, as its columns have it."""
    case = line.case
    return (
        case.op,
        "→".join(SHORT_NAMES.get(d, d) for d in dict.fromkeys([case.dtype, case.out])),
        case.model,
        " ".join(f"{name}{size}" for name, size in case.dims),
        str(line.seeds),
        *(f"{e:.2e}" if (e := line.epsilon.get(b, math.nan)) == e else "–" for b in BACKENDS),
        "–" if line.worst is None else f"{line.worst:.2f}",
        f"{line.verdict.outcome} {line.verdict.reason}",
    )
