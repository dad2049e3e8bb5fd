"""`parity show`: what the ledger has of a case."""

from __future__ import annotations

import argparse
import re

from parity.cli.options import folder
from parity.ledger import diff

ABOUT = "print what the ledger has of a case, on all backends"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments of `parity show`."""
    parser.add_argument("case", help="a case id, with or without its seed")
    parser.add_argument("--records", type=folder, default=None, metavar="DIR", help="the ledger (default: records)")


def command(given: argparse.Namespace) -> int:
    """`parity show`: 0. Raises ValueError for a case that the ledger does not have."""
    ledgers = diff.load(str(given.records or given.root / "records"), given.root)
    wanted = re.sub(r"-s\d+$", "", given.case)
    found = [r for ledger in ledgers.values() for r in ledger.values() if re.sub(r"-s\d+$", "", r.case) == wanted]
    if not found:
        raise ValueError(
            f"case must be in the ledger, got {given.case} (record it: pytest --parity-record -k {given.case})"
        )
    print(diff.show(found))
    return 0
