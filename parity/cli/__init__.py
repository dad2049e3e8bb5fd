"""The `parity` command."""

from __future__ import annotations

import argparse
import multiprocessing
import os
import re
import shlex
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from rich import box
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from parity import matrix
from parity.backends import prepare_environment, runner
from parity.cli import explain as explain_command
from parity.cli import stages as stages_command
from parity.compilers import schedule
from parity.debugging import bisect, replay, shrink
from parity.dtypes import SHORT_NAMES
from parity.judging.judge import compare
from parity.judging.verdict import Verdict
from parity.ledger import diff
from parity.ledger.records import merge, read_all
from parity.op import BACKENDS, TIERS, Case, Op
from parity.report import entries
from parity.runners import ray as ray_run


@dataclass(frozen=True)
class Line:
    """One line of the table: what all seeds of one case came to."""

    case: Case
    seeds: int
    epsilon: dict[str, float]  # root mean square over seeds, by backend
    worst: tuple[float, float] | None  # η and its bound, where η comes closest to it
    verdict: Verdict
    entry: entries.Entry


def main(arguments: Sequence[str] | None = None) -> int:
    """Entry point; returns the exit code: 0 all is well, 1 a verdict fails or something regressed, 2 wrong usage."""
    parser = _parser()
    given = parser.parse_args(arguments)
    prepare_environment()
    try:
        return int(given.command(given))
    except (ValueError, NotImplementedError) as error:  # NotImplementedError: a kernel that `stages` cannot follow
        parser.error(str(error))
    except ModuleNotFoundError as error:
        parser.error(f"{error.name} is needed and not installed here: {error}")
    except BrokenPipeError:  # whoever reads the output, `head` for instance, has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1


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
    run.add_argument("--report", type=_file, default=None, metavar="FILE", help="write an HTML report as well")
    ray_run.add_arguments(run)
    listing = add(
        "list", _list, "list the ops of the matrix, or with -k their cases with the contracts of both backends"
    )
    listing.add_argument("-k", metavar="EXPRESSION", help=expression)
    diffing = add("diff", _diff, "compare two ledgers: what got better or worse beyond noise, and who moved it")
    for name in ("a", "b"):
        diffing.add_argument(name, help="a ledger, a folder of ledgers, or a git revision of this project")
    diffing.add_argument("--json", action="store_true", help="print JSON")
    diffing.add_argument("--fail-on-regression", action="store_true", help="exit with 1 if a case got worse")
    merging = add("merge", _merge, "join ledgers, of shards or of other machines, into this project's")
    merging.add_argument("folders", type=_folder, nargs="+", metavar="DIR", help="a folder of ledgers")
    merging.add_argument("--records", type=Path, default=None, metavar="DIR", help="into which (default: records)")
    showing = add("show", _show, "print what the ledger has of a case, on all backends")
    showing.add_argument("case", help="a case id, with or without its seed")
    showing.add_argument("--records", type=_folder, default=None, metavar="DIR", help="the ledger (default: records)")
    about = "say where the error of a case comes from: which rounding, or which fault"
    explain_command.add_arguments(add("explain", explain_command.command, about))
    about = "say at which stage of a kernel its error enters, and which of its source lines make it"
    stages_command.add_arguments(add("stages", stages_command.command, about))
    about = "what the TPU compiler makes of the kernels: the recorded table, or what has changed"
    schedule.add_arguments(add("schedule", schedule.command, about))
    about = "reduce a case that fails as far as its verdict stays, and write a script that shows the failure alone"
    shrink.add_arguments(add("shrink", shrink.command, about))
    about = "judge a call that parity.capture saved in a training run or a server"
    replay.add_arguments(add("replay", replay.command, about))
    about = "find the first commit whose kernel fails a case that it passed before"
    bisect.add_arguments(add("bisect", bisect.command, about))
    return parser


def _folder(text: str) -> Path:
    path = Path(text).resolve()
    if not path.is_dir():
        raise argparse.ArgumentTypeError(f"must be a folder, got {text}")
    return path


def _file(text: str) -> Path:
    path = Path(text)
    if path.is_dir() or not path.parent.is_dir():
        raise argparse.ArgumentTypeError(f"must be a file in a folder that is there, got {text}")
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


def _merge(given: argparse.Namespace) -> int:
    into = given.records or given.root / "records"
    ledgers = [ledger for folder in given.folders for b in BACKENDS for ledger in read_all(folder, b).values()]
    merged = merge(into, [record for ledger in ledgers for record in ledger.values()])
    print(f"{merged.written} records written to {into}; of each case and seed the newest stays")
    return 0


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
    if given.ray is not None:
        return ray_run.command(given)
    if given.pytest_arguments:
        raise ValueError(f"ARGUMENTS are for pytest with --ray, got {shlex.join(given.pytest_arguments)}")
    ops = matrix.load(given.root)
    chosen = [(op, case) for op in ops for case in op.cases if case.model and _matches(case, given.k)]
    # Into a file or a log the table goes whole; a terminal folds it.
    console = Console(width=None if sys.stdout.isatty() else 150)
    if not chosen:
        raise ValueError(f"-k must match a case of a model's shape, got {given.k!r}")
    utc = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
    lines: dict[str, Line] = {}
    with Progress(
        TextColumn("parity"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TextColumn("{task.description}"),
        console=console, transient=True,
    ) as progress:  # fmt: skip
        task = progress.add_task("", total=len(chosen))
        for line in _judge_all(given.root, chosen, given.seeds, given.jobs or os.cpu_count() or 1):
            lines[line.case.id] = line
            progress.update(task, advance=1, description=line.case.id)
        if given.report:
            judged = [lines[case.id].entry for _, case in chosen]
            explained = entries.attribute(ops, judged, lambda id: progress.update(task, description=f"explain {id}"))
    table = _table([lines[case.id] for _, case in chosen])
    console.print(table)
    console.print(" · ".join(f"{b}: {runner(b).describe()}" for b in BACKENDS), highlight=False)
    failed = [line for line in lines.values() if not line.verdict.passed]
    for line in failed:
        console.print(f"{line.verdict.outcome}: {line.case.id}: {line.verdict.reason}", style="red", highlight=False)
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
    worst = max(compared.everything, key=lambda j: j.eta_max / j.bound if j.bound else j.eta_max)
    return Line(
        case,
        seeds,
        {backend: compared.epsilon(backend) for backend in BACKENDS},
        (worst.eta_max, worst.bound),
        compared.comparison.verdict,
        entries.of_comparison(op, compared, rerun),
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
