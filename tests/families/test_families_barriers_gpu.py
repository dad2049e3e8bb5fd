"""A barrier in a kernel's source is one in its machine code: what it parts is in global memory, where compilers that
place barriers of their own see no hazard, and no interpreter has threads that could meet there."""

import inspect
from pathlib import Path

import pytest

pytest.importorskip("triton")
pytest.importorskip("torch")

from parity.op import Op
from tests.matrix import OPS
from tests.support import gpu_code
from tests.support.tiny import tiny

FUSED = dict(route="fused")
CALLS = {  # and how many lines of their kernels have a barrier
    "chunk_simple_gla_bwd": (FUSED, 2),
    "chunk_gla_bwd": (FUSED, 2),
    "fused_recurrent_simple_gla_bwd": ({}, 2),
    "fused_recurrent_gla_bwd": ({}, 2),
    "fused_recurrent_gated_delta_rule_bwd": ({}, 3),
    "fused_recurrent_kda_bwd": ({}, 3),
}
BARRIER = "tl.debug_barrier()"
USUAL = ("fused_recurrent_kda_bwd", "gfx942")


def lines_with_barriers(launches) -> set[str]:
    """Those of the modules of kernels, as "file.py:7"."""
    return set().union(*map(_lines_of, launches))


def _lines_of(launch) -> set[str]:
    path = Path(inspect.getsourcefile(launch.kernel.fn))
    lines = path.read_text().splitlines()
    return {f"{path.name}:{number}" for number, line in enumerate(lines, 1) if line.strip().startswith(BARRIER)}


@pytest.mark.parametrize("op", [op for op in OPS if op.name in CALLS], ids=lambda op: op.name)
def test_each_place_that_needs_one_has_a_barrier(op):
    settings, count = CALLS[op.name]
    launches = [launch for *_, launch in gpu_code.names([(op, tiny(op, **settings))], "sm_90").values()]
    assert len(lines_with_barriers(launches)) == count


@pytest.mark.parametrize(
    ("op", "target"),
    [
        pytest.param(op, target, id=f"{op.name}-{target}", marks=[pytest.mark.full] * ((op.name, target) != USUAL))
        for op in OPS
        if op.name in CALLS
        for target in gpu_code.TARGETS
    ],
)
def test_a_barrier_of_the_source_is_one_of_the_machine_code(op: Op, target: str):
    kernels = gpu_code.kernels([(op, tiny(op, **CALLS[op.name][0]))], target).values()
    expected = lines_with_barriers(kernel.launch for kernel in kernels)
    assert set() < expected <= {line for kernel in kernels for line in kernel.result.barriers}
