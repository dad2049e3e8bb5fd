"""`parity bisect`: the first commit whose kernel fails a case that it passed before."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from parity.cli.options import add_trial_arguments, positive
from parity.compilers.cache import folder
from parity.debugging.bisect import Bisection, Bisector, Revision

ABOUT = "find the first commit whose kernel fails a case that it passed before"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add what `parity bisect` takes."""
    parser.add_argument("good", help="a commit whose kernel passes")
    parser.add_argument("bad", help="a later one whose kernel does not")
    add_trial_arguments(parser, "a case id of today's matrix")
    parser.add_argument("--seeds", type=positive, default=1, metavar="S", help="draws that are judged (default: 1)")
    parser.add_argument("--epsilon", action="store_true", help="bad is also what errs more than GOOD, beyond noise")
    parser.add_argument("--cache", type=Path, metavar="DIR", help="worktrees and what was judged (default: ~/.cache/…)")


def command(given: argparse.Namespace) -> int:
    """`parity bisect`: 0 where the first bad commit was found, 1 where it is one of several."""
    cache = (given.cache or folder() / "bisect").resolve()

    def done(revision: Revision) -> None:
        print(
            f"{revision.outcome:<12} ε = {revision.epsilon:.3g}  {revision.commit[:12]}  {revision.title}", flush=True
        )

    bisector = Bisector(given.root, given.case, given.backend, given.seeds, cache, given.epsilon, done)
    found = bisector.run(given.good, given.bad)
    print("\n".join(describe(found)))
    return int(bool(found.between))


def describe(found: Bisection) -> Sequence[str]:
    """The first bad commit, both records and the attribution, in a few lines."""
    lines = [f"first bad commit: {found.bad.commit}  {found.bad.title}"]
    if found.between:
        lines[0] = f"first bad commit: one of {', '.join([*found.between, found.bad.commit])}: others cannot be judged"
    for name, revision in (("good", found.good), ("bad", found.bad)):
        epsilon = f"ε = {revision.epsilon:.3g}"
        lines.append(f"  {name:<5}{revision.commit[:12]}  {revision.outcome}  {epsilon}  {revision.reason}")
    if found.attribution:
        lines.append(f"  {found.attribution}")
    return lines
