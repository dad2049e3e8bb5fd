"""gmm, tgmm and their metadata compile for real GPUs, as they are launched; their default tiles fit the chip, and their
dots are in the machine code what their contract says."""

import itertools

import pytest

pytest.importorskip("triton")

from gpu_reference._lib.visits import make_group_metadata
from parity.compilers.launches import launches
from parity.compilers.mosaic import Abstract
from parity.compilers.ptx import TARGETS, case_of, compile_kernels, deviations
from tests.matrix.gmm import GMM, TGMM
from tests.matrix.models import MODELS
from tests.matrix.ops import BF16, F16, F32
from tests.support import gpu_code
from tests.support.calls import point

SIZES = dict(M=4096, K=2048, N=1408, G=8, shard=(0, 64))


def call(op, dtype, **settings):
    return op, point(op, dtype, **SIZES | settings)


REPRESENTATIVE = [call(op, dtype) for op in (GMM, TGMM) for dtype in (F32, BF16)]
UNALIGNED = call(GMM, BF16, N=2880 + 1, K=2880 + 1)
EVERYTHING = [
    *REPRESENTATIVE,
    *(call(op, F16) for op in (GMM, TGMM)),
    *(call(GMM, dtype, transpose_rhs=True) for dtype in (F32, BF16)),
    *(call(op, BF16, existing_out=True) for op in (GMM, TGMM)),
    call(GMM, BF16, N=2880 + 16, K=2880 + 16),
    UNALIGNED,
    *(
        call(op, dtype, K=model.hidden, N=model.intermediate)
        for model in MODELS
        for op in (GMM, TGMM)
        for dtype in (F32, BF16)
    ),
]
SPILLS = {f"{UNALIGNED[1].id}/1_gmm_kernel": "spills"}
LIMITS = {
    # What a chip does not support, with the reason; all else must compile for every target.
    # Rows that start at odd addresses need a pointer for each element, which the registers do not hold.
    "sm_80": SPILLS,
    "sm_90": SPILLS,
    "sm_120": SPILLS,
}


def problem(kernel):
    """What is wrong with a kernel as it was compiled, None if nothing is."""
    contract, result = kernel.op.contract(kernel.case, "gpu"), kernel.result
    if (wrong := gpu_code.problem(result)) or kernel.launch.name == "_metadata_kernel":
        return wrong
    if not result.keeps_dot(contract.dot, kernel.case.dtype):
        return f"its dots are {result.dot_kinds}, its contract {contract.name}"
    if contract.dot == "native" and kernel.case.dtype not in result.dot_kinds:
        return f"its dots use no matrix unit: {result.dot_kinds}"
    return None


@gpu_code.some_then_all("gfx942", REPRESENTATIVE, EVERYTHING)
def test_compiles(target, calls):
    problems = {name: problem(kernel) for name, kernel in gpu_code.kernels(calls, target).items()}
    limits = {name: reason for name, reason in LIMITS.get(target, {}).items() if name in problems}
    assert deviations(problems, limits) == []


@pytest.mark.full
@gpu_code.EACH_TARGET
def test_visits_of_groups_compile(target):
    """As those of tiles, which gmm launches."""
    sizes = dict(m=SIZES["M"], tm=128, num_groups=SIZES["G"])
    visits = launches(make_group_metadata, Abstract((64,), "int32"), cover="groups", target=target, **sizes)
    (result,) = compile_kernels([case_of(launch, target) for launch in visits])
    assert gpu_code.problem(result) is None


def test_limits_name_what_there_is():
    assert {*LIMITS} <= {*TARGETS}
    assert {*SPILLS} <= gpu_code.names(EVERYTHING, "sm_90").keys()


@pytest.mark.full
@pytest.mark.parametrize("experts", [256, *(pytest.param(many, marks=pytest.mark.full) for many in (512, 1024, 4096))])
@gpu_code.some_targets("sm_90")
def test_visits_of_many_experts_compile_and_stay_in_registers(target, experts):
    sizes = dict(m=4096, tm=128, num_groups=experts, cover="tiles")
    visits = launches(make_group_metadata, Abstract((experts,), "int32"), target=target, **sizes)
    (result,) = compile_kernels([case_of(launch, target) for launch in visits], timeout=60)
    assert gpu_code.problem(result) is None


TILES = (16, 32, 64, 128)
LARGEST = (128, 128, 128)


@pytest.mark.full
@pytest.mark.parametrize(
    "tiling",
    [
        pytest.param(tile, id="x".join(map(str, tile)), marks=[pytest.mark.full] * (tile != LARGEST))
        for tile in itertools.product(TILES, TILES, TILES)
    ],
)
@gpu_code.some_targets("sm_120")
def test_every_tile_that_may_be_asked_for_fits(target, tiling):
    """Spilled or not: a kernel that is refused at its launch is none."""
    calls = [call(op, dtype, tiling=tiling) for op in (GMM, TGMM) for dtype in (F32, BF16)]
    for kernel in gpu_code.kernels(calls, target).values():
        assert kernel.result.error is None, kernel.result.error
