"""Every kernel of the gated linear attentions compiles for real GPUs, as the public functions launch it; it fits the
chip, and its dots are in the machine code what the contract says."""

import pytest

pytest.importorskip("triton")

from parity.compilers.ptx import deviations
from tests.matrix.gla import BF16, F32, is_recurrent
from tests.support import calls, gpu_code

B, N = 2, 8
SIZES = dict(T=4096, H=16, K=128, V=128)
# Of all instructions, those that move what the registers do not hold: as small a share as is asked of the TPU kernels.
# (A few dozen words are traded for registers in most kernels of this size.)
SPILL_SHARE = 0.05
SPILLS = ("LDL", "STL", "scratch_")


def scan(form, direction, gates, dtype, packed=False, **settings):
    """A pass with states, of B rows or of one that packs N."""
    settings |= dict(B=1, N=N) if packed else dict(B=B)
    return calls.scan(form, direction, gates, dtype, **SIZES | settings, h0=True, ht=True)


def both(*arguments, **settings):
    """Of both directions."""
    form, *others = arguments
    return [scan(form, direction, *others, **settings) for direction in ("fwd", "bwd")]


REPRESENTATIVE = [
    scan("chunk", "fwd", "g", BF16, chunk=64, route="unfused"),
    scan("fused_chunk", "bwd", "gamma", F32, chunk=64),
    scan("fused_recurrent", "bwd", "gk", BF16),
]
RECURRENT = [
    call
    for dtype in (F32, BF16)
    for found in (
        *(both("fused_recurrent", gates, dtype) for gates in ("none", "g", "gamma", "both", "gk")),
        both("fused_recurrent", "both", dtype, packed=True, reverse=True),
        both("fused_recurrent", "gk", dtype, packed=True, K=256, V=256),
        both("fused_recurrent", "g", dtype, K=100, V=16),
    )
    for call in found
]
CHUNKED = [
    call
    for dtype in (F32, BF16)
    for found in (
        *(
            both("chunk", gates, dtype, chunk=chunk, route=route)
            for gates in ("g", "gamma", "gk")
            for chunk in (64, 128)
            for route in ("unfused", "fused")
        ),
        *(both("fused_chunk", gates, dtype, chunk=64) for gates in ("none", "both")),
        *(both("chunk", gates, dtype, chunk=64, route="unfused", packed=True) for gates in ("both", "gk")),
        *(both("chunk", gates, dtype, chunk=16, route="fused", K=100, V=48) for gates in ("g", "gk")),
        *(both("chunk", gates, dtype, chunk=64, route="fused", K=256, V=256) for gates in ("g", "gk")),
    )
    for call in found
] + [
    call
    for gates in ("g", "gk")
    for route in ("unfused", "fused")
    for call in both("chunk", gates, F32, chunk=64, route=route, precision="bf16x3")
]
CHIPS = ("sm_80", "sm_90", "sm_100")


def kernel(name, *arguments, **settings):
    """The name of a kernel that a pass launches."""
    return f"{scan(*arguments, **settings)[1].id}/{name}"


# What the registers do not hold at the tiles there are, which were chosen on sm_80 to sm_100: two states and gradients
# of them in the backward pass of a scalar gate, and operands in two bfloat16 parts.
BACKWARD = {"unfused": "2_backward_kernel", "fused": "1_backward_kernel"}
SPLIT = dict(chunk=64, precision="bf16x3")
SPLIT_BACKWARD = [kernel(name, "chunk", "bwd", "g", F32, route=route, **SPLIT) for route, name in BACKWARD.items()]
ON_AMD = [
    kernel(name, "chunk", "bwd", "gamma", F32, chunk=chunk, route=route)
    for chunk in (64, 128)
    for route, name in BACKWARD.items()
]
LIMITS = {
    # What a chip does not support, with the reason; all else must compile for every target.
    "sm_100": {SPLIT_BACKWARD[1]: "spills"},
    "sm_120": {SPLIT_BACKWARD[1]: "spills"},
    "gfx942": dict.fromkeys(ON_AMD, "spills"),
    "gfx950": dict.fromkeys([*ON_AMD, SPLIT_BACKWARD[1]], "spills"),
}


def expected_operands(case, target):
    """The operand types of the matrix instructions: of bfloat16 where dots are in passes of it, else of float32,
    for which only AMD has one that takes it as it is."""
    if is_recurrent(case):
        return set()
    if case.dtype == BF16 or case.precision == "bf16x3":
        return {"bfloat16"}
    return {"float32"} if target.startswith("gfx") else set()


def problem(case, result, target):
    """What is wrong with a kernel of this case as it was compiled for a target, None if nothing is."""
    if result.error is not None:
        return gpu_code.problem(result)
    spills = sum(count for name, count in result.instructions.items() if name.startswith(SPILLS))
    share = spills / sum(result.instructions.values())
    if share > SPILL_SHARE:
        return f"spills: {share:.1%} of its instructions"
    operands, expected = result.dot_operands, expected_operands(case, target)
    if operands != expected:
        return f"its dots are of {operands or 'no matrix unit'}, its contract's of {expected or 'none'}"
    if not {"fma", "float32"} & result.dot_kinds.keys():
        return "it has no multiply-add in float32"
    return None


def check(target, calls):
    kernels = gpu_code.kernels(calls, target)
    problems = {name: problem(kernel.case, kernel.result, target) for name, kernel in kernels.items()}
    limits = {name: reason for name, reason in LIMITS.get(target, {}).items() if name in problems}
    assert deviations(problems, limits) == []


@pytest.mark.parametrize("target", [pytest.param(t, marks=[] if t == "sm_90" else [pytest.mark.full]) for t in CHIPS])
def test_compiles(target):
    check(target, REPRESENTATIVE)


@pytest.mark.full
@gpu_code.EACH_TARGET
def test_every_recurrent_kernel_compiles(target):
    check(target, RECURRENT)


@pytest.mark.full
@pytest.mark.parametrize("fused", [False, True])
@gpu_code.EACH_TARGET
def test_every_chunked_kernel_compiles(target, fused):
    check(target, [(op, case) for op, case in CHUNKED if op.name.startswith("fused") == fused])


def test_limits_name_what_there_is():
    names = gpu_code.names(CHUNKED, "gfx950").keys()
    assert {name for limits in LIMITS.values() for name in limits} <= names


@pytest.mark.full
@gpu_code.EACH_TARGET
def test_both_routes_use_the_same_matrix_instructions(target):
    """They are to be the same arithmetic: which one is taken depends on how long sequences are and on the GPU."""
    units = set()
    for route in ("fused", "unfused"):
        found = gpu_code.kernels([scan("chunk", "fwd", "g", BF16, chunk=64, route=route)], target).values()
        (forward,) = (kernel.result for kernel in found if kernel.launch.name == "_forward_kernel")
        units.add((frozenset(forward.dot_operands), frozenset(n for n in forward.instructions if "MMA" in n.upper())))
    assert len(units) == 1
