"""`parity diff`: what moved between two ledgers."""

from __future__ import annotations

import argparse

from parity.ledger import diff

ABOUT = "compare two ledgers: what got better or worse beyond noise, and who moved it"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments of `parity diff`."""
    for name in ("a", "b"):
        parser.add_argument(name, help="a ledger, a folder of ledgers, or a git revision of this project")
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument("--fail-on-regression", action="store_true", help="exit with 1 if a case got worse")


def command(given: argparse.Namespace) -> int:
    """`parity diff`: 1 where a case got worse and --fail-on-regression is given, else 0."""
    moved = diff.diff(diff.load(given.a, given.root), diff.load(given.b, given.root))
    print(diff.to_json(moved) if given.json else diff.describe(moved))
    return int(given.fail_on_regression and diff.regressed(moved))
