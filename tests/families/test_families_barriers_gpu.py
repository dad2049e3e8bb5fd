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
CALLS = {
    "chunk_simple_gla_bwd": FUSED,
    "chunk_gla_bwd": FUSED,
    "fused_recurrent_simple_gla_bwd": {},
    "fused_recurrent_gla_bwd": {},
    "fused_recurrent_gated_delta_rule_bwd": {},
    "fused_recurrent_kda_bwd": {},
}
BARRIER = "tl.debug_barrier()"
USUAL = ("fused_recurrent_kda_bwd", "gfx942")


def lines_with_barriers(launch) -> set[str]:
    """Those of the module of a kernel, as "file.py:7"."""
    path = Path(inspect.getsourcefile(launch.kernel.fn))
    lines = path.read_text().splitlines()
    return {f"{path.name}:{number}" for number, line in enumerate(lines, 1) if line.strip().startswith(BARRIER)}


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
    kernels = gpu_code.kernels([(op, tiny(op, **CALLS[op.name]))], target).values()
    expected = {line for kernel in kernels for line in lines_with_barriers(kernel.launch)}
    assert set() < expected <= {line for kernel in kernels for line in kernel.result.barriers}
