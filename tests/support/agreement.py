"""The tests that every family has of its ops: they agree with the golden, exactly on integers, no worse on the TPU."""

from collections.abc import Callable, Mapping, Sequence
from functools import cache
from itertools import product
from typing import Any

import pytest

import parity
from parity.judging.judge import judge
from parity.op import BACKENDS, Backend, Case, Op
from parity.runners.plugin import Run
from parity.trial import Trial
from tests.support.functions import FRAMEWORKS
from tests.support.interpreter import interpreted
from tests.support.tiny import in_every_way, tiny

Test = Callable[[Run], None]
FULL = [pytest.mark.full]


@cache
def asked(op: Op, backend: Backend) -> frozenset[Case]:
    """The cases that the default tier asks a backend: the smoke tier's, every other program of the rest, and what else
    the faults that are planted in the backend's kernels need to be caught. The full tier asks all of both.

    Cases that differ in their data alone share a program.
    """
    from tests.meta.faults.planting import planted

    rest = [case for case in op.cases if case.tier == "default"]
    programs = list(dict.fromkeys(case.with_data("normal") for case in rest))[backend == "gpu" :: 2]
    found = {case for case in op.cases if case.tier == "smoke" or case.with_data("normal") in programs}
    for fault in planted():
        if fault.backend == backend and op.name in fault.ops:
            catching = [case for case in op.cases if case.tier != "full" and fault.where(case)]
            found |= set() if found & {*catching} else {*catching[:1]}
    return frozenset(found)


def in_turn(values: Mapping[str, tuple[Any, ...]]) -> list[Any]:
    """Parameters (*values, backend) by name: each on both backends, in the default tier on one, the two in turn."""
    return [
        pytest.param(
            *each, backend, id=f"{name}-{backend}", marks=[getattr(pytest.mark, backend), *_of_turn(nth, backend)]
        )
        for nth, (name, each) in enumerate(values.items())
        for backend in BACKENDS
    ]


def _of_turn(nth: int, backend: Backend) -> list[pytest.MarkDecorator]:
    """The marks of the nth of several tests that the default tier has on one backend, the two in turn."""
    return FULL * (nth % 2 != BACKENDS.index(backend))


def crossed(*axes: Sequence[Any]) -> list[Any]:
    """Parameters, one of each axis: all of them together, in the default tier no more than each value takes."""
    diagonal = {tuple(n % len(axis) for axis in axes) for n in range(max(map(len, axes)))}
    return [
        pytest.param(*(axis[n] for axis, n in zip(axes, at, strict=True)), marks=FULL * (at not in diagonal))
        for at in product(*(range(len(axis)) for axis in axes))
    ]


def agree(*ops: Op, backend: Backend) -> Test:
    """The test that every output agrees with the golden."""
    every = frozenset().union(*(asked(op, backend) for op in ops))
    return _held(Run.agrees, *ops, backend=backend, where=every.__contains__)


def agree_in_every_way(*ops: Op, backend: Backend) -> Callable[[Op, Case], None]:
    """The test that each op agrees with the golden in all of `tiny.in_every_way`; in the default tier in turn."""
    every = [(op, case) for op in ops for case in in_every_way(op)]

    @getattr(pytest.mark, backend)
    @pytest.mark.parametrize(
        ("op", "case"),
        [pytest.param(*each, id=each[1].id, marks=_of_turn(nth, backend)) for nth, each in enumerate(every)],
    )
    def test(op: Op, case: Case) -> None:
        pytest.importorskip(FRAMEWORKS[backend])
        verdict = judge(Trial(op, case, backend)).verdict
        assert verdict.passed, verdict

    return test


def agree_in_blocks(*ops: Op, module: str) -> Callable[[Op, pytest.MonkeyPatch], None]:
    """The test that a recurrence of the GPU agrees where it goes back through several blocks, of two steps each."""

    @pytest.mark.gpu
    @interpreted
    @pytest.mark.parametrize("op", ops, ids=[op.name for op in ops])
    def test(op: Op, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(pytest.importorskip(module), "BLOCK", 2)
        verdict = judge(Trial(op, tiny(op, T=14), "gpu")).verdict
        assert verdict.passed, verdict

    return test


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
