"""Cases compiled for real GPUs, as the public functions launch them there."""

from collections.abc import Iterable
from typing import Any, NamedTuple

import pytest

from parity.compilers.launches import Launched
from parity.compilers.ptx import TARGETS, Compiled, case_of, compile_kernels
from parity.op import Case, Op
from tests.support.calls import launched

Call = tuple[Op, Case]
SPILL_BYTES = 64
"""ptxas trades a register for a word of stack here and there (0 to 56 bytes, another choice in Triton 3.6 than in 3.9);
a tile that does not fit spills hundreds to thousands of bytes."""
EACH_TARGET = pytest.mark.parametrize("target", TARGETS)


def some_targets(*default: str) -> Any:
    """Each target, but in the default tier only these: a target takes seconds."""
    marked = [pytest.param(target, marks=[] if target in default else [pytest.mark.full]) for target in TARGETS]
    return pytest.mark.parametrize("target", marked)


def some_then_all(default: str, some: Iterable[Call], everything: Iterable[Call]) -> Any:
    """A target with some calls in the default tier, each target with everything in the full."""
    marked = [pytest.param(target, [*everything], marks=pytest.mark.full, id=target) for target in TARGETS]
    return pytest.mark.parametrize(("target", "calls"), [pytest.param(default, [*some], id=f"some-{default}"), *marked])


class Kernel(NamedTuple):
    """A kernel that a case launches, and what the compiler made of it."""

    op: Op
    case: Case
    launch: Launched
    result: Compiled


def names(calls: Iterable[Call], target: str) -> dict[str, tuple[Op, Case, Launched]]:
    """What each call launches, by its id, the number of the launch and the kernel's name."""
    return {
        f"{case.id}/{nth}{launch.name}": (op, case, launch)
        for op, case in calls
        for nth, launch in enumerate(launched(op, case, target))
    }


def kernels(calls: Iterable[Call], target: str) -> dict[str, Kernel]:
    """Each kernel that the calls launch, by the names of `names`; one that several launch alike is compiled once."""
    found = names(calls, target)
    cases = [case_of(launch, target) for _, _, launch in found.values()]
    unique = [case for nth, case in enumerate(cases) if case not in cases[:nth]]
    results = compile_kernels(unique)
    compiled = [results[unique.index(case)] for case in cases]
    return {name: Kernel(*call, result) for (name, call), result in zip(found.items(), compiled, strict=True)}


def problem(result: Compiled) -> str | None:
    """What is wrong with a kernel as it was compiled, None if nothing is."""
    if result.error is not None:
        return f"{result.outcome}: {result.error} ({result.location})"
    return f"spills {result.spill_bytes} bytes" if result.spill_bytes > SPILL_BYTES else None
