"""`parity replay`: judge a call that `parity.capture` saved."""

from __future__ import annotations

import argparse
from pathlib import Path

from parity import matrix
from parity.debugging.capture import MANIFEST
from parity.debugging.replay import read, replay
from parity.judging.judge import twin_of
from parity.op import BACKENDS
from parity.report import text
from parity.trial import Trial
from parity.words import command as command_line

ABOUT = "judge a call that parity.capture saved in a training run or a server"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add what `parity replay` takes."""
    parser.add_argument("bundle", type=Path, help="the folder of a call that parity.capture saved")
    parser.add_argument("--backend", choices=BACKENDS, help="whose kernel (default: both)")


def command(given: argparse.Namespace) -> int:
    """`parity replay`: 0 where every verdict passes, else 1."""
    bundle = read(given.bundle)
    ops = {op.name: op for op in matrix.load(given.root)}
    if bundle.op not in ops:
        raise ValueError(f"{given.bundle / MANIFEST}: op must be one of {', '.join(ops)}, got {bundle.op!r}")
    op = ops[bundle.op]
    failed = 0
    where = " ".join(filter(None, [f"step {bundle.step}", bundle.layer]))
    for backend in [given.backend] if given.backend else BACKENDS:
        judged = replay(op, bundle, backend)
        v, m = judged.verdict, judged.metrics
        epsilon = f"ε = {m.epsilon:.2e}   " if m else ""
        print(f"{backend}  {v.outcome}  {epsilon}{v.reason}   {judged.case.id}   {where}")
        if not v.passed:
            failed += 1
            again = command_line("parity", "replay", given.bundle, "--backend", backend)
            print(text.failure(judged, twin_of(Trial(op, judged.case, backend), judged), again))
    return int(failed > 0)
