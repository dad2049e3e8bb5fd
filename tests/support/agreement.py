"""The tests that every family has of its ops: they agree with the golden, exactly on integers, no worse on the TPU."""

from collections.abc import Callable
from functools import cache
from typing import Any

import parity
from parity.op import Backend, Case, Op
from parity.runners.plugin import Run

Test = Callable[[Run], None]


@cache
def asked(op: Op, backend: Backend) -> frozenset[Case]:
    """The cases that the default tier asks a backend: those of the smoke tier, and every other program of the rest, so
    that each is asked of one backend; the full tier asks all of both.

    Cases that differ in their data alone share a program.
    """
    rest = [case for case in op.cases if case.tier == "default"]
    programs = list(dict.fromkeys(case.with_data("normal") for case in rest))[backend == "gpu" :: 2]
    smoke = [case for case in op.cases if case.tier == "smoke"]
    return frozenset((*smoke, *(case for case in rest if case.with_data("normal") in programs)))


def agree(*ops: Op, backend: Backend) -> Test:
    """The test that every output agrees with the golden."""
    every = frozenset().union(*(asked(op, backend) for op in ops))
    return _held(Run.agrees, *ops, backend=backend, where=every.__contains__)


def are_exact(*ops: Op, backend: Backend, where: Callable[[Case], bool] = lambda case: True) -> Test:
    """The test that outputs of integers equal the golden: in the default tier smoke cases alone, those of `where`."""
    return _held(
        Run.is_exact, *ops, backend=backend, data="integers", where=lambda case: case.tier == "smoke" and where(case)
    )


def are_no_worse(*ops: Op) -> Test:
    """The test that ε_TPU ≤ ε_GPU."""
    return _held(Run.is_no_worse, *ops, backend="tpu", compared=True)


def _held(law: Test, *ops: Op, **which: Any) -> Test:
    @parity.cases(*ops, **which)
    def test(run: Run) -> None:
        law(run)

    return test
