"""`parity contact`: the first minutes on a device that nobody tried before."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from rich import box
from rich.table import Table

from parity.backends import EMULATED
from parity.cli.options import console, file
from parity.contact import assumptions
from parity.contact.session import FAILED, Row, Session
from parity.contact.steps import ALL_SECONDS, OFF, steps
from parity.op import BACKENDS

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
    chosen = [step for step in steps(given.root, given.backend) if not given.kind or step.kind in given.kind]
    if given.every_pattern:
        chosen = [replace(step, seconds=ALL_SECONDS) if step.kind == "probe" else step for step in chosen]
    if not chosen:
        raise ValueError(f"--kind must name a kind of step, got {', '.join(given.kind)}")
    screen = console(160)
    session = Session(given.root, given.backend, path.resolve())
    screen.print(session.about["describe"], markup=False, highlight=False)
    if given.record and session.about["device"] == EMULATED:
        raise ValueError("--record must be used on a device, got an emulated one")
    rows = session.run(chosen, 60 * given.minutes, lambda row: screen.print(line(row), markup=False, highlight=False))
    screen.print(table(rows))
    wanted = {step.id for step in chosen}
    rows = [row for row in rows if row.id in wanted]
    wrong = [row for row in rows if row.outcome in (*FAILED, OFF)]
    left = len(chosen) - len(rows)
    screen.print(f"{len(rows)} of {len(chosen)} steps, {len(wrong)} wrong, {left} left", highlight=False)
    screen.print(f"send home: {path}", markup=False, highlight=False)
    if given.record:
        path = assumptions.measured_path(given.root / "records", given.backend, session.about["device"])
        found = [row.more for row in rows if row.kind == "probe" and row.more]
        assumptions.keep(path, {name: figures for more in found for name, figures in more.items()})
    return 1 if wrong or left else 0


def line(row: Row) -> str:
    """A row as it ends."""
    return f"{row.outcome:<13}{row.id}  {row.detail}"


def table(rows: Sequence[Row]) -> Table:
    """Whether each step ran, agrees, and by how much it is off its contract."""
    shown = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for name in ("step", "ran", "agrees", "× allowed", "seconds", "detail"):
        shown.add_column(name, overflow="fold")
    for row in rows:
        ran = row.outcome not in FAILED
        judged = {"AGREES": "yes", OFF: "OFF CONTRACT"}.get(row.outcome, "")
        by = f"{row.by:.3g}" if judged else ""
        style = None if ran and row.outcome != OFF else "red"
        cells = (row.id, "yes" if ran else row.outcome, judged, by, f"{row.seconds:.1f}", row.detail)
        shown.add_row(*cells, style=style)
    return shown
