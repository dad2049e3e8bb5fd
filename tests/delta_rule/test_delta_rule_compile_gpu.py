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
WIDE = dict(HV=16, K=256, V=256)


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
        WIDE,
    )
]


def kernels(op, dtype, *names, **settings):
    """The names of kernels that a pass launches."""
    return [f"{call(op, dtype, **settings)[1].id}/{name}" for name in names]


# What the registers do not hold at the tiles there are, which are the smallest of K = 256: on AMD states in float32 and
# normalised operands.
IN_FLOAT32 = [
    name
    for forward, backward in (CHUNK_GATED_DELTA_RULE, CHUNK_KDA)
    for name in (
        *kernels(forward, F32, "1forward_kernel", **WIDE),
        *kernels(backward, F32, "1forward_kernel", "2reverse_kernel", **WIDE),
    )
]
GRADIENTS = [
    *kernels(CHUNK_GATED_DELTA_RULE[1], BF16, "6gradients_kernel", l2norm=True),
    *kernels(CHUNK_GATED_DELTA_RULE[1], BF16, "4gradients_kernel", B=1, N=8),
]
ON_SM_120 = [  # 72 to 112 bytes
    *kernels(CHUNK_GATED_DELTA_RULE[1], F32, "4reverse_kernel", l2norm=True),
    *kernels(CHUNK_GATED_DELTA_RULE[1], F32, "2reverse_kernel", B=1, N=8),
    *kernels(CHUNK_GATED_DELTA_RULE[1], F32, "2reverse_kernel", HV=16, K=100, V=48),
    *kernels(CHUNK_GATED_DELTA_RULE[1], BF16, "4gradients_kernel", HV=16, K=100, V=48),
    *kernels(CHUNK_KDA[1], BF16, "2reverse_kernel", **WIDE),
]
LIMITS = {
    # What does not compile as it should, with the reason; all else must.
    "sm_120": dict.fromkeys(ON_SM_120, "spills"),
    "gfx942": dict.fromkeys([*IN_FLOAT32, *GRADIENTS], "spills"),
}


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


@pytest.mark.full
def test_limits_name_what_there_is():
    assert {name for limits in LIMITS.values() for name in limits} <= gpu_code.names(EVERYTHING, "gfx942").keys()
