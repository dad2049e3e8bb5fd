"""The tests that every family has of its ops: they agree with the golden, exactly on integers, no worse on the TPU."""

from collections.abc import Callable
from typing import Any

import parity
from parity.op import Case, Op
from parity.runners.plugin import Run

Test = Callable[[Run], None]


def in_smoke(case: Case) -> bool:
    """Whether a case is of the smoke tier: integers on an interpreted GPU have these alone in the default tier."""
    return case.tier == "smoke"


def agree(*ops: Op, **which: Any) -> Test:
    """The test that every output agrees with the golden: on one `backend`, and what else `parity.cases` takes."""
    return _held(Run.agrees, *ops, **which)


def are_exact(*ops: Op, **which: Any) -> Test:
    """The test that outputs of integers equal the golden; as `agree`."""
    return _held(Run.is_exact, *ops, data="integers", **which)


def are_no_worse(*ops: Op) -> Test:
    """The test that ε_TPU ≤ ε_GPU."""
    return _held(Run.is_no_worse, *ops, backend="tpu", compared=True)


def _held(law: Test, *ops: Op, **which: Any) -> Test:
    @parity.cases(*ops, **which)
    def test(run: Run) -> None:
        law(run)

    return test
