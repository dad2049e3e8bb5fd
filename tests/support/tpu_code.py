"""Cases compiled for real TPUs."""

from collections.abc import Iterable, Iterator
from importlib.util import find_spec

import pytest

from parity.compilers import schedule
from parity.compilers.chips import CHIPS
from parity.compilers.mosaic import Compiled, compile_for_tpu
from parity.compilers.programs import Program
from parity.op import Case, Op
from tests.support.calls import compilation

Call = tuple[Op, Case]
needs_compiler = pytest.mark.skipif(
    find_spec("libtpu") is None, reason="the TPU compiler is not installed: pip install libtpu"
)
WITHOUT_KERNELS = ("permute", "unpermute", "swizzle_scales")  # they are XLA's
EACH_CHIP = pytest.mark.parametrize("chip", CHIPS)


def some_then_all(default: str, some: Iterable[Call], everything: Iterable[Call]) -> pytest.MarkDecorator:
    """A chip with some calls in the default tier, each chip with everything in the full: a chip takes half a minute."""
    marked = [pytest.param(chip, [*everything], marks=pytest.mark.full, id=chip) for chip in CHIPS]
    return pytest.mark.parametrize(("chip", "calls"), [pytest.param(default, [*some], id=f"some-{default}"), *marked])


def compiled(calls: Iterable[Call], chip: str) -> list[tuple[Op, Case, Compiled]]:
    """Each call with what became of it; all of them compile."""
    calls = list(calls)
    results = compile_for_tpu([compilation(*call, chip) for call in calls], schedule=True)
    assert {case.id: result.error for (_, case), result in zip(calls, results, strict=True) if not result.ok} == {}
    return [(*call, result) for call, result in zip(calls, results, strict=True)]


def dots(programs: Iterable[Program], chip: str) -> Iterator[tuple[Program, set[tuple[str, int]]]]:
    """Each program with the operands of its dots and the passes that these take; all of them compile."""
    programs = list(programs)
    results = schedule.compile_all(programs, [chip])
    assert schedule.surprises(programs, results) == []
    for program in programs:
        kernels = results[program.id, chip].kernels
        yield program, {(passes.operand, passes.promised) for kernel in kernels for passes in kernel.passes}
