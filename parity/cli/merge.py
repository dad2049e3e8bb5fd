"""`parity merge`: join ledgers."""

from __future__ import annotations

import argparse
from pathlib import Path

from parity.cli.options import folder
from parity.ledger.read import read_all
from parity.ledger.write import merge
from parity.op import BACKENDS

ABOUT = "join ledgers, of shards or of other machines, into this project's"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments of `parity merge`."""
    parser.add_argument("folders", type=folder, nargs="+", metavar="DIR", help="a folder of ledgers")
    parser.add_argument("--records", type=Path, default=None, metavar="DIR", help="into which (default: records)")


def command(given: argparse.Namespace) -> int:
    """`parity merge`: 0."""
    into = given.records or given.root / "records"
    ledgers = [ledger for folder in given.folders for b in BACKENDS for ledger in read_all(folder, b).values()]
    merged = merge(into, [record for ledger in ledgers for record in ledger.values()])
    print(f"{merged.written} records written to {into}; of each case and seed the newest stays")
    return 0
