"""`parity contact`: the first minutes on a device that nobody tried before."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import replace
from math import isfinite
from pathlib import Path

from rich import box
from rich.table import Table

from parity.backends import EMULATED
from parity.cli.options import console, file
from parity.contact import assumptions
from parity.contact.session import FAILED, Row, Session
from parity.contact.steps import AGREES, ALL_SECONDS, NOT_HERE, OFF, RAN, Step, steps
from parity.op import BACKENDS
from parity.words import one_of

ABOUT = "what to run first on a device that nobody tried before: the most informative first, against the clock"


def minutes(text: str) -> float:
    """An argument that is a positive number."""
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"must be a positive number of minutes, got {text}")
    return value


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments of `parity contact`."""
    parser.add_argument("--backend", choices=BACKENDS, required=True, help="whose kernels")
    parser.add_argument(
        "--minutes", type=minutes, default=8.0, help="the time limit (default: 8); called again, it goes on"
    )
    parser.add_argument("--file", type=file, default=None, help="what is written (default: contact-BACKEND.jsonl)")
    parser.add_argument(
        "--kind", action="append", default=[], metavar="KIND",
        help="only steps of this kind (probe, case, repeat, graph, tests, benchmark); may be repeated",
    )  # fmt: skip
    parser.add_argument(
        "--every-pattern", action="store_true",
        help="let probes try all 2^32 float32 where 15 s are too few, up to 15 minutes each (see --minutes)",
    )  # fmt: skip
    parser.add_argument(
        "--record", action="store_true", help="keep what the probes measured: contracts on this device use it"
    )


def command(given: argparse.Namespace) -> int:
    """`parity contact`: 0 where all steps were made and none crashed, hung or was off its contract, else 1."""
    path = given.file or Path(f"contact-{given.backend}.jsonl")
    every = steps(given.root, given.backend)
    chosen = [step for step in every if not given.kind or step.kind in given.kind]
    if given.every_pattern:
        chosen = [replace(step, seconds=ALL_SECONDS) if step.kind == "probe" else step for step in chosen]
    if not chosen:
        raise ValueError(f"--kind {one_of(dict.fromkeys(step.kind for step in every), ', '.join(given.kind))}")
    screen = console(160)
    session = Session(given.root, given.backend, path.resolve())
    screen.print(session.about["describe"], highlight=False)
    if given.record and session.about["device"] == EMULATED:
        raise ValueError("--record must be used on a device, got an emulated one")
    wanted = {step.id for step in chosen}
    before = [row for row in session.resume() if row.id in wanted]
    if session.aside:
        screen.print(f"{path} was another device's or code's: it is {session.aside.name} now", highlight=False)
    screen.print(HEAD, highlight=False)

    def tell(row: Row) -> None:
        screen.print(line(row), style="red" if is_wrong(row) else None, highlight=False, soft_wrap=True)

    for row in before:
        tell(row)
    rows = [row for row in session.run(chosen, 60 * given.minutes, tell) if row.id in wanted]
    screen.print(table(chosen, rows))
    wrong, left = [row for row in rows if is_wrong(row)], len(chosen) - len(rows)
    for row in wrong if len(rows) > len(wrong) else []:  # once more, below all that is right
        tell(row)
    screen.print(f"{len(rows)} of {len(chosen)} steps, {len(wrong)} wrong, {left} left", highlight=False)
    if left:
        screen.print("the same command goes on", highlight=False)
    screen.print(f"send home: {path}", highlight=False)
    if given.record:
        path = assumptions.measured_path(given.root / "records", given.backend, session.about["device"])
        found = [row.more for row in rows if row.kind == "probe" and row.more]
        assumptions.keep(path, {name: figures for more in found for name, figures in more.items()})
    return 1 if wrong or left else 0


HEAD = f"{'':12}  {'× allowed':>9}  {'seconds':>7}  step"


def is_wrong(row: Row) -> bool:
    """Whether a step failed, or is off its contract."""
    return row.outcome in (*FAILED, OFF)


def line(row: Row) -> str:
    """A row: what came of the step, its error over what is allowed where that has a measure, and details."""
    by = f"{row.by:.3g}" if row.outcome in (AGREES, OFF) and isfinite(row.by) else ""
    return f"{row.outcome:<12}  {by:>9}  {row.seconds:>7.1f}  {row.id}  {row.detail}".rstrip()


def table(chosen: Sequence[Step], rows: Sequence[Row]) -> Table:
    """How many steps of each kind came to which outcome, and how many are left."""
    shown = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    outcomes = [name for name in (AGREES, RAN, NOT_HERE, OFF, *FAILED) if any(row.outcome == name for row in rows)]
    shown.add_column("")
    for name in (*outcomes, "left", "seconds"):
        shown.add_column(name, justify="right")
    for kind in dict.fromkeys(step.kind for step in chosen):
        of_kind = [row for row in rows if row.kind == kind]
        counts = [sum(row.outcome == name for row in of_kind) for name in outcomes]
        left = sum(step.kind == kind for step in chosen) - len(of_kind)
        shown.add_row(kind, *(str(n or "") for n in (*counts, left)), f"{sum(row.seconds for row in of_kind):.0f}")
    return shown
