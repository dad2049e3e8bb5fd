"""The `parity` command."""

from __future__ import annotations

import argparse
import multiprocessing
import os
import re
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path

from rich import box
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from parity import diff, matrix, schedule, text
from parity.backends import prepare_environment, runner
from parity.dtypes import SHORT_NAMES
from parity.explain import explain
from parity.judge import compare
from parity.op import BACKENDS, TIERS, Case, Op
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
    """Entry point; returns the exit code: 0 all is well, 1 a verdict fails or something regressed, 2 wrong usage."""
    parser = _parser()
    given = parser.parse_args(arguments)
    prepare_environment()
    try:
        return int(given.command(given))
    except ValueError as error:
        parser.error(str(error))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="parity", description="Judge TPU and GPU kernels of the same operations against one float64 golden."
    )
    parser.add_argument("--root", type=_folder, default=Path.cwd(), help="the project's folder (default: this one)")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    def add(name: str, function: Callable[[argparse.Namespace], int], text: str) -> argparse.ArgumentParser:
        command = commands.add_parser(name, help=text, description=text)
        command.set_defaults(command=function)
        return command

    expression = "only cases whose id or model matches, as pytest's -k: words, and, or, not, ( )"
    run = add("run", _run, "run the cases with published model shapes on both backends and print the table of ε")
    run.add_argument("-k", metavar="EXPRESSION", default="", help=expression)
    run.add_argument("--seeds", type=_positive, default=8, metavar="S", help="paired draws of each case (default: 8)")
    run.add_argument(
        "-j", "--jobs", type=_positive, default=None, metavar="N", help="processes (default: one per core)"
    )
    listing = add(
        "list", _list, "list the ops of the matrix, or with -k their cases with the contracts of both backends"
    )
    listing.add_argument("-k", metavar="EXPRESSION", help=expression)
    diffing = add("diff", _diff, "compare two ledgers: what got better or worse beyond noise, and who moved it")
    for name in ("a", "b"):
        diffing.add_argument(name, help="a ledger, a folder of ledgers, or a git revision of this project")
    diffing.add_argument("--json", action="store_true", help="print JSON")
    diffing.add_argument("--fail-on-regression", action="store_true", help="exit with 1 if a case got worse")
    showing = add("show", _show, "print what the ledger has of a case, on all backends")
    showing.add_argument("case", help="a case id, with or without its seed")
    showing.add_argument("--records", type=_folder, default=None, metavar="DIR", help="the ledger (default: records)")
    explaining = add("explain", _explain, "say where the error of a case comes from: which rounding, or which fault")
    explaining.add_argument("case", help="a case id")
    explaining.add_argument("--backend", choices=BACKENDS, default="tpu", help="whose kernel (default: tpu)")
    about = "what the TPU compiler makes of the kernels: the recorded table, or what has changed"
    schedule.add_arguments(add("schedule", schedule.command, about))
    return parser


def _folder(text: str) -> Path:
    path = Path(text).resolve()
    if not path.is_dir():
        raise argparse.ArgumentTypeError(f"must be a folder, got {text}")
    return path


def _positive(text: str) -> int:
    if not text.isdigit() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"must be a positive integer, got {text}")
    return int(text)


def _matches(case: Case, expression: str) -> bool:
    return diff.matches(expression, f"{case.id} {case.model}")


def _list(given: argparse.Namespace) -> int:
    for op in matrix.load(given.root):
        if given.k is None:
            tiers = Counter(case.tier for case in op.cases)
            print(
                f"{op.name:<12} {len(op.cases):>6} cases  ({', '.join(f'{tiers[t]} {t}' for t in TIERS if t in tiers)})"
            )
        else:
            for case in op.cases:
                if _matches(case, given.k):
                    contracts = "  ".join(f"{backend}: {op.contract(case, backend).name}" for backend in BACKENDS)
                    print("  ".join(filter(None, [case.id, case.model, contracts])))
    return 0


def _diff(given: argparse.Namespace) -> int:
    moved = diff.diff(diff.load(given.a, given.root), diff.load(given.b, given.root))
    print(diff.to_json(moved) if given.json else diff.describe(moved))
    return int(given.fail_on_regression and diff.regressed(moved))


def _explain(given: argparse.Namespace) -> int:
    op, case = matrix.find(matrix.load(given.root), given.case)
    columns = TextColumn("emulating roundings"), TextColumn("{task.completed:.0f}"), TimeElapsedColumn()
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task("", total=None)
        found = explain(op, case, given.backend, done=lambda count: progress.update(task, completed=count))
    Console(width=None if sys.stdout.isatty() else 150, soft_wrap=True, highlight=False).print(text.explanation(found))
    return 0 if found.judged.verdict.passed else 1


def _show(given: argparse.Namespace) -> int:
    ledgers = diff.load(str(given.records or given.root / "records"), given.root)
    wanted = re.sub(r"-s\d+$", "", given.case)
    found = [r for ledger in ledgers.values() for r in ledger.values() if re.sub(r"-s\d+$", "", r.case) == wanted]
    if not found:
        raise ValueError(
            f"case must be in the ledger, got {given.case} (record it: pytest --parity-record -k {given.case})"
        )
    print(diff.show(found))
    return 0


def _run(given: argparse.Namespace) -> int:
    ops = matrix.load(given.root)
    chosen = [(op, case) for op in ops for case in op.cases if case.model and _matches(case, given.k)]
    # Into a file or a log the table goes whole; a terminal folds it.
    console = Console(width=None if sys.stdout.isatty() else 150)
    if not chosen:
        raise ValueError(f"-k must match a case of a model's shape, got {given.k!r}")
    lines: dict[str, Line] = {}
    with Progress(
        TextColumn("parity"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TextColumn("{task.description}"),
        console=console, transient=True,
    ) as progress:  # fmt: skip
        task = progress.add_task("", total=len(chosen))
        for line in _judge_all(given.root, chosen, given.seeds, given.jobs or os.cpu_count() or 1):
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
