"""`parity list`: the ops of the matrix, or their cases."""

from __future__ import annotations

import argparse
import sys
from collections import Counter

from parity import matrix
from parity.cli.options import EXPRESSION, matches
from parity.op import BACKENDS, TIERS

ABOUT = "list the ops of the matrix, or with -k their cases with the contracts of both backends"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments of `parity list`."""
    parser.add_argument("-k", metavar="EXPRESSION", help=EXPRESSION)


def command(given: argparse.Namespace) -> int:
    """`parity list`: 0, or 1 where -k matches no case."""
    found = 0
    for op in matrix.load(given.root):
        if given.k is None:
            tiers = Counter(case.tier for case in op.cases)
            print(
                f"{op.name:<12} {len(op.cases):>6} cases  ({', '.join(f'{tiers[t]} {t}' for t in TIERS if t in tiers)})"
            )
        else:
            for case in op.cases:
                if matches(case, given.k):
                    found += 1
                    contracts = "  ".join(f"{backend}: {op.contract(case, backend).name}" for backend in BACKENDS)
                    print("  ".join(filter(None, [case.id, case.model, contracts])))
    if given.k is not None and not found:
        print(f"no case matches -k {given.k!r}", file=sys.stderr)
        return 1
    return 0
