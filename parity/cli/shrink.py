"""`parity shrink`: the smallest case that fails as a given one does."""

from __future__ import annotations

import argparse
from collections.abc import Iterator

import numpy as np
from rich.progress import TextColumn

from parity.cli.options import add_output_argument, add_trial_arguments, decided, file, progress, trial_of
from parity.debugging.explain import output_named
from parity.debugging.shrink import RUNS, Shrunk, filled, script, shrink

ABOUT = "reduce a case that fails as far as its verdict stays, and write a script that shows the failure alone"

SHOWN = 6
"""Elements of an argument that are printed one by one."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add what `parity shrink` takes."""
    add_trial_arguments(parser, "the id of a case that fails")
    add_output_argument(parser)
    parser.add_argument("--out", type=file, metavar="FILE", help="write the script there (default: print it)")


def command(given: argparse.Namespace) -> int:
    """`parity shrink`: 1, since what it is given fails."""
    trial = trial_of(given)
    output = output_named(trial, given.output)
    try:
        with progress(TextColumn("{task.completed} runs of the kernel")) as ran:
            shrunk = shrink(trial, accepted=print, ran=ran, output=output)
    except ValueError:
        v = decided(given, trial).verdict
        if v.passed:
            raise
        print(f"{v.outcome}  {v.gate}: {v.reason}")
        print("not reduced: it fails beside its record, other seeds or the other backend, which no smaller case has")
        return 1
    print("\n".join(describe(shrunk)))
    try:
        text = script(trial, shrunk)
    except ValueError as error:
        print(f"no script: {error}")
        return 1
    if given.out:
        given.out.write_text(text)
        print(f"script: {given.out}")
    else:
        print(f"\n{text}")
    return 1


def describe(shrunk: Shrunk) -> Iterator[str]:
    """What is left, in a few lines."""
    verdict = f": {shrunk.judged.verdict.reason}" if shrunk.judged else ""
    yield f"{shrunk.failure}{verdict}"
    yield f"smallest case: {shrunk.case.id}  ({shrunk.runs} runs)"
    if not shrunk.is_minimal:
        yield f"stopped after {RUNS} runs: there may be a smaller one"
    for name, array in shrunk.inputs.items():
        if array is None:
            continue
        places = np.argwhere(filled(array))
        elements = [f"{list(map(int, index))} = {array[tuple(index)].item()!r}" for index in places[:SHOWN]]
        more = [f"{len(places) - SHOWN} more"] if len(places) > SHOWN else []
        yield f"  {name} {array.dtype}{list(array.shape)}: {', '.join([*elements, *more]) or 'zeros'}"
