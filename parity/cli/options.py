"""What several subcommands take."""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

from rich.console import Console
from rich.progress import Progress, ProgressColumn, TimeElapsedColumn
from rich.text import Text

from parity import matrix
from parity.compilers.programs import Program
from parity.compilers.recorded import Entry, Key, Recorded, differences
from parity.judging.judge import Judgement
from parity.ledger import diff
from parity.ledger.book import Book
from parity.op import BACKENDS, Case
from parity.trial import Trial

DISTRIBUTION = "kernel-parity"
ENDED = 3
"""The exit code where a kernel raised, and there is no result to judge."""
EXPRESSION = "only cases whose id or model matches, as pytest's -k: words, and, or, not, ( )"

E = TypeVar("E", bound=Entry)


def version() -> str:
    """The version of the package that is installed."""
    try:
        return importlib.metadata.version(DISTRIBUTION)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"


def folder(text: str) -> Path:
    """An argument that names a folder."""
    path = Path(text).resolve()
    if not path.is_dir():
        raise argparse.ArgumentTypeError(f"must be a folder, got {text}")
    return path


def file(text: str) -> Path:
    """An argument that names a file to be written."""
    path = Path(text)
    if path.is_dir() or not path.parent.is_dir():
        raise argparse.ArgumentTypeError(f"must be a file in a folder that is there, got {text}")
    if not os.access(path if path.exists() else path.parent, os.W_OK):  # hours before it is written
        raise argparse.ArgumentTypeError(f"must be a file that may be written, got {text}")
    return path


def positive(text: str) -> int:
    """An argument that is a positive integer."""
    if not text.isdigit() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"must be a positive integer, got {text}")
    return int(text)


def matches(case: Case, expression: str) -> bool:
    """Whether a case is one that -k asks for."""
    return diff.matches(expression, f"{case.id} {case.model}")


def add_trial_arguments(parser: argparse.ArgumentParser, case: str = "a case id") -> None:
    """What commands take that are about one case on one backend. case: the help of the argument."""
    parser.add_argument("case", help=case)
    parser.add_argument("--backend", choices=BACKENDS, default="tpu", help="whose kernel (default: tpu)")


def add_output_argument(parser: argparse.ArgumentParser) -> None:
    """`--output`, of commands that look at one output of several."""
    parser.add_argument("--output", default="", metavar="NAME", help="which output (default: the one furthest off)")


def decided(given: argparse.Namespace, trial: Trial) -> Judgement:
    """The verdict on a trial as pytest has it, the project's ledger included."""
    return Book(given.root / diff.FOLDER).decide(trial)


def exit_code(judged: Judgement) -> int:
    """What a command about one case exits with: 0 where it passes, `ENDED` where its kernel raised, else 1."""
    return ENDED if judged.ended else int(not judged.verdict.passed)


def verdict_line(judged: Judgement) -> Text:
    """A verdict in one line with its output and, of a kernel that came to no result, the kernel's lines."""
    v, device = judged.verdict, "real" if judged.real else "emulated"
    out = Text()
    out.append(f"{v.outcome}  ", "bold green" if v.passed else "bold red")
    out.append(f"{v.gate}: {v.reason}   {judged.backend}: {device}   {judged.case.id}")
    out.append(f"  [{judged.output}]\n" if judged.output else "\n")
    out.append(f"{judged.trace}\n" if judged.trace else "")
    return out


def trial_of(given: argparse.Namespace) -> Trial:
    """The case and the backend that are asked for. Raises ValueError for an id that no case has."""
    op, case = matrix.find(matrix.load(given.root), given.case)
    return Trial(op, case, given.backend)


@contextmanager
def progress(*columns: ProgressColumn) -> Iterator[Callable[..., None]]:
    """A line on stderr while something takes long, and a function to be told how much is done (and of how much)."""
    console = Console(stderr=True)
    with Progress(*columns, TimeElapsedColumn(), console=console, transient=True, redirect_stdout=False) as line:
        task = line.add_task("", total=None)
        yield lambda done, of=None: line.update(task, completed=done, total=of)


def program_arguments(*, how: str, program: str, check: str) -> Callable[[argparse.ArgumentParser], None]:
    """The `add_arguments` of a command that keeps a ledger of programs: which, and whether to record or compare it.

    how: what is done to a program ("compile"); program, check: the help of the argument and of the option.
    """

    def add_arguments(parser: argparse.ArgumentParser) -> None:
        parser.add_argument("program", nargs="?", help=program)
        parser.add_argument(
            "-k", metavar="EXPRESSION", default="", help="only programs whose id matches, as pytest's -k"
        )
        parser.add_argument(
            "--chip", action="append", default=[], metavar="CHIP", help="only this chip; may be repeated"
        )
        what = parser.add_mutually_exclusive_group()
        what.add_argument("--record", action="store_true", help=f"{how}, and write the ledger")
        what.add_argument("--check", action="store_true", help=f"{how}, and {check}")
        what.add_argument("--diff", metavar="REV", help="what moved since the ledger of a git revision")
        parser.add_argument("--json", action="store_true", help="print JSON")

    return add_arguments


def wants(given: argparse.Namespace, program: str, chip: str = "") -> bool:
    """Whether a program, by its id, is asked for (on a chip, if one is named)."""
    on_chip = not chip or not given.chip or chip in given.chip
    return given.program in (None, program) and diff.matches(given.k, program) and on_chip


def wanted_lines(given: argparse.Namespace, ledger: Mapping[Key, E]) -> dict[Key, E]:
    """The lines of a ledger of programs that are asked for."""
    return {key: line for key, line in ledger.items() if wants(given, f"{line.op}-{line.name}", line.chip)}


def wanted_programs(given: argparse.Namespace, programs: Sequence[Program]) -> list[Program]:
    """The programs that are asked for. Raises ValueError where there are none."""
    wanted = [program for program in programs if wants(given, program.id)]
    if not wanted:
        raise ValueError(f"a program must match, got {given.program or given.k!r}")
    return wanted


def show_recorded(given: argparse.Namespace, ledger: Recorded[E], show: Callable[[list[E]], None]) -> bool:
    """Whether what is recorded was asked for, and not what is so now: its lines are shown, or what moved in them.

    Raises ValueError where there is no line, or no such revision.
    """
    if (given.program and not given.diff) or given.record or given.check:
        return False
    lines = wanted_lines(given, ledger.read(given.root))
    if given.diff:
        before = wanted_lines(given, ledger.at_revision(given.root, given.diff))
        print_changes(given, differences(before, lines), "nothing moved")
    elif lines:
        show(list(lines.values()))
    else:
        raise ValueError(
            f"{ledger.title} must have a line to show, has none (record it: parity {ledger.folder} --record)"
        )
    return True


def print_changes(given: argparse.Namespace, changes: Sequence[str], none: str) -> None:
    """A line for each change, or `none` where there is no change; with `--json` a list."""
    print(json.dumps(changes, ensure_ascii=False) if given.json else "\n".join(changes) or none)


class _Screen(Console):
    def on_broken_pipe(self) -> None:
        """Leave it to `parity.cli.main`: rich's own way is to end the process, which is a kernel's fault there."""
        raise BrokenPipeError


def console(width: int, **options: Any) -> Console:
    """Where a table goes: a terminal folds it, into a file or a log it goes in so many columns. No text is markup."""
    return _Screen(width=None if sys.stdout.isatty() else width, markup=False, **options)
