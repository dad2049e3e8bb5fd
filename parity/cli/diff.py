"""`parity diff`: what moved between two ledgers."""

from __future__ import annotations

import argparse
from functools import cache
from pathlib import Path

from parity import matrix
from parity.cli.show import by_contract
from parity.ledger import diff
from parity.op import Op

ABOUT = "compare two ledgers: what got better or worse beyond noise, and who moved it"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments of `parity diff`."""
    for name in ("a", "b"):
        parser.add_argument(name, help="a ledger, a folder of ledgers, or a git revision of this project")
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument("--fail-on-regression", action="store_true", help="exit with 1 if a case got worse")


def command(given: argparse.Namespace) -> int:
    """`parity diff`: 1 where a case got worse and --fail-on-regression is given, else 0."""
    a, b = (diff.load(source, given.root) for source in (given.a, given.b))
    moved = diff.in_contracts(diff.diff(a, b), a, b, _by_contract(given.root))
    print(diff.to_json(moved) if given.json else diff.describe(moved))
    return int(given.fail_on_regression and diff.regressed(moved))


def _by_contract(root: Path) -> diff.ByContract:
    """Of records of the project at root; nothing where it has no matrix: ledgers are compared anywhere."""

    @cache
    def ops() -> tuple[Op, ...]:
        try:
            return matrix.load(root)
        except ValueError:
            return ()

    return lambda record: by_contract(ops(), record)
