"""`parity show`: what the ledger has of a case."""

from __future__ import annotations

import argparse
import re
from collections.abc import Sequence

from parity import matrix
from parity.cli.options import folder
from parity.inputs import hashes
from parity.judging.judge import explained, fits_of
from parity.ledger import diff
from parity.ledger.freshness import moved_floors
from parity.ledger.schema import Record
from parity.op import Op
from parity.trial import Trial
from parity.words import command as command_line

ABOUT = "print what the ledger has of a case, on all backends"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments of `parity show`."""
    parser.add_argument("case", help="a case id, with or without its seed")
    parser.add_argument("--records", type=folder, default=None, metavar="DIR", help="the ledger (default: records)")


def command(given: argparse.Namespace) -> int:
    """`parity show`: 0. Raises ValueError for a case that the ledger does not have."""
    records = given.records or given.root / "records"
    ledgers = diff.load(str(records), given.root) if records.exists() else {}
    wanted = re.sub(r"-s\d+$", "", given.case)
    found = [r for ledger in ledgers.values() for r in ledger.values() if re.sub(r"-s\d+$", "", r.case) == wanted]
    if not found:
        recording = command_line("pytest", "--parity-record", "-k", given.case)
        raise ValueError(f"case must be in the ledger, got {given.case} (record it: {recording})")
    ops = matrix.load(given.root)
    print(diff.show(found, lambda record: by_contract(ops, record)))
    return 0


def by_contract(ops: Sequence[Op], record: Record) -> dict[str, float]:
    """How many times its contract's the error of each recorded output is, as a whole; of what shows one.

    Nothing of a case that is not of the matrix, and where inputs, golden or units are not what they were.
    """
    try:
        op, case = matrix.find(ops, record.case)
    except ValueError:
        return {}
    trial = Trial(op, case.with_seed(record.seed), record.provenance.backend)
    if op.bit_exact or dict(record.inputs) != hashes(trial.inputs) or moved_floors(trial.floors, record.outputs):
        return {}
    fits = fits_of(trial, explained(trial), record.outputs)
    return {name: fit.ratio for name, fit in fits.items() if fit.looks}
