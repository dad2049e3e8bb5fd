"""Every kernel of the delta rules compiles for real GPUs, as the public functions launch it; it fits the chip, and its
dots are in the machine code what the contract says."""

import pytest

pytest.importorskip("triton")

from parity.compilers.ptx import deviations
from tests.matrix.delta_rule import CHUNK_GATED_DELTA_RULE, CHUNK_KDA, DELTA_RULES
from tests.matrix.ops import BF16, F32
from tests.support import gpu_code
from tests.support.calls import point

SIZES = dict(B=2, T=4096, H=16, HV=32, K=128, V=128)
OF_DOTS = ("forward_kernel", "reverse_kernel", "pair_gradients_kernel", "gradients_kernel")
LIMITS = {}
"""What does not compile as it should, by target and kernel, with the reason."""


def call(op, dtype, **settings):
    return op, point(op, dtype, **SIZES | settings, h0=True, ht=True)


REPRESENTATIVE = [call(op, BF16) for op in (CHUNK_GATED_DELTA_RULE[0], CHUNK_KDA[1])]
EVERYTHING = [
    call(op, dtype, **settings)
    for op in DELTA_RULES
    for dtype in (F32, BF16)
    for settings in (
        dict(l2norm=True),
        dict(B=1, N=8),
        dict(HV=16, K=100, V=48),
        dict(HV=16, K=256, V=256),
    )
]


def problem(kernel, target):
    """What is wrong with a kernel as it was compiled for a target, None if nothing is."""
    found = gpu_code.problem(kernel.result)
    if found is None and kernel.launch.name in OF_DOTS:
        expected = {"bfloat16"} if kernel.case.dtype == BF16 else {"float32"} if target.startswith("gfx") else set()
        if kernel.result.dot_operands != expected:
            return f"its dots are of {kernel.result.dot_operands or 'no matrix unit'}"
    return found


@gpu_code.some_then_all("sm_90", REPRESENTATIVE, EVERYTHING)
def test_compiles(target, calls):
    problems = {name: problem(kernel, target) for name, kernel in gpu_code.kernels(calls, target).items()}
    limits = {name: reason for name, reason in LIMITS.get(target, {}).items() if name in problems}
    assert deviations(problems, limits) == []
