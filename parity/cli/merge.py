"""`parity merge`: join ledgers."""

from __future__ import annotations

import argparse
from pathlib import Path

from parity.cli.options import folder
from parity.ledger import shards
from parity.ledger.read import read_all
from parity.ledger.schema import Record
from parity.ledger.write import left_in_parts, merge
from parity.op import BACKENDS

ABOUT = "join ledgers, of shards or of other machines, into this project's"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments of `parity merge`."""
    parser.add_argument("folders", type=folder, nargs="+", metavar="DIR", help="a folder of ledgers")
    parser.add_argument("--records", type=Path, default=None, metavar="DIR", help="into which (default: records)")


def command(given: argparse.Namespace) -> int:
    """`parity merge`: 1 where a line was lost, else 0.

    Raises ValueError for shards that were dealt differently, and for folders that no run has left anything in.
    """
    into = given.records or given.root / "records"
    notes = shards.together(given.folders)
    records: list[Record] = []
    lost: list[str] = []
    for source in given.folders:
        records += [record for b in BACKENDS for ledger in read_all(source, b).values() for record in ledger.values()]
        if source != into.resolve():
            left, wrong = left_in_parts(source)
            records, lost = records + left, lost + wrong
    # A run's parts beside the ledger itself are merged below.
    left_something = into.resolve() in given.folders or any((source / shards.FILE).exists() for source in given.folders)
    if not (records or lost or left_something):
        folders = ", ".join(map(str, given.folders))
        raise ValueError(f"DIR must hold a ledger (tpu/…/*.jsonl, gpu/…/*.jsonl), none is in {folders}")
    merged = merge(into, records)
    print(f"{merged.written} records written to {into}; of each case and seed the newest stays")
    if merged.older and not merged.written:
        print(f"none of {merged.older} records is newer than what {into} has")
    for note in [*notes, *(f"lost: {line}" for line in (*lost, *merged.lost_lines))]:
        print(note)
    return int(bool(lost or merged.lost_lines))
