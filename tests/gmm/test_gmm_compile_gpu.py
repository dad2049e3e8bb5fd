# ruff: noqa: E402 (frameworks may be missing, and are asked for before they are imported)
"""gmm, tgmm and their metadata compile for real GPUs, as they would be launched; their default tiles fit the chip, and
their dots are in the machine code what their contract says."""

import pytest

pytest.importorskip("triton")
torch = pytest.importorskip("torch")

from gpu_reference import gmm as gpu
from gpu_reference._lib import visits as gpu_visits
from op_arguments.gmm import Problem
from parity.compilers.ptx import TARGETS, case_of, compile_kernels, deviations
from parity.op import Case as MatrixCase
from tests.matrix.gmm import GMM, TGMM
from tests.matrix.models import MODELS

M, K, N, GROUPS, EXPERTS = 4096, 2048, 1408, 8, 64
# ptxas trades a register for a word of stack here and there (0 to 56 bytes, another choice in Triton 3.6 than in 3.9);
# a tile that does not fit spills hundreds to thousands of bytes.
SPILL_BYTES = 64


def meta(*shape, dtype=torch.int32):
    return torch.empty(*shape, dtype=dtype, device="meta")


def gmm_launch(dtype, transpose=False, existing=False, n=N, k=K):
    problem = Problem(M, k, n, GROUPS, EXPERTS, "")
    tile = gpu.gmm_tile(problem, dtype.itemsize)
    rhs = meta(GROUPS, n, k, dtype=dtype).transpose(1, 2) if transpose else meta(GROUPS, k, n, dtype=dtype)
    out = meta(M, n, dtype=dtype)
    visits = -(-M // tile[0]) + GROUPS
    metadata = gpu.GroupMetadata(meta(EXPERTS + 1), meta(visits), meta(visits), meta(1))
    return gpu.gmm_launch(
        problem, tile, meta(M, k, dtype=dtype), rhs, out if existing else None, out, metadata, meta(1)
    )


def tgmm_launch(dtype, existing=False, n=N, k=K):
    problem = Problem(M, k, n, GROUPS, EXPERTS, "")
    out = meta(GROUPS, k, n, dtype=dtype)
    lhs, rhs = meta(M, k, dtype=dtype), meta(M, n, dtype=dtype)
    tile = gpu.tgmm_tile(problem, dtype.itemsize)
    return gpu.tgmm_launch(problem, tile, lhs, rhs, out if existing else None, out, meta(EXPERTS), meta(1))


def metadata_launch(cover):
    visits = -(-M // 128) + GROUPS
    metadata = gpu.GroupMetadata(meta(EXPERTS + 1), meta(visits), meta(visits), meta(1))
    return gpu_visits.metadata_launch(meta(EXPERTS), meta(1), metadata, M, 128, GROUPS, cover)


REPRESENTATIVE = {
    "gmm-float32": gmm_launch(torch.float32),
    "gmm-bfloat16": gmm_launch(torch.bfloat16),
    "tgmm-float32": tgmm_launch(torch.float32),
    "tgmm-bfloat16": tgmm_launch(torch.bfloat16),
    "metadata-tiles": metadata_launch("tiles"),
}
VARIANTS = {
    "gmm-float16": gmm_launch(torch.float16),
    "gmm-float32-transposed": gmm_launch(torch.float32, transpose=True),
    "gmm-bfloat16-transposed": gmm_launch(torch.bfloat16, transpose=True),
    "gmm-bfloat16-existing": gmm_launch(torch.bfloat16, existing=True),
    "gmm-bfloat16-ragged": gmm_launch(torch.bfloat16, n=2880 + 16, k=2880 + 16),
    "gmm-bfloat16-unaligned": gmm_launch(torch.bfloat16, n=2880 + 1, k=2880 + 1),
    "tgmm-float16": tgmm_launch(torch.float16),
    "tgmm-bfloat16-existing": tgmm_launch(torch.bfloat16, existing=True),
    "metadata-groups": metadata_launch("groups"),
    **{
        f"{op}-{dtype}-{model.name}": launch(getattr(torch, dtype), k=model.hidden, n=model.intermediate)
        for model in MODELS
        for op, launch in (("gmm", gmm_launch), ("tgmm", tgmm_launch))
        for dtype in ("float32", "bfloat16")
    },
}
DEFAULT_TIER = ("sm_90", "sm_100", "gfx942")  # a target takes seconds
LIMITS = {
    # What a chip does not support, with the reason; all else must compile for every target.
    # Rows that start at odd addresses need a pointer for each element, which the registers do not hold.
    "sm_80": {"gmm-bfloat16-unaligned": "spills"},
    "sm_90": {"gmm-bfloat16-unaligned": "spills"},
    "sm_120": {"gmm-bfloat16-unaligned": "spills"},
}


def problem(name, result):
    """What is wrong with a kernel of this name as it was compiled, None if nothing is."""
    op, dtype, *_ = name.split("-")
    if result.error is not None:
        return f"{result.outcome}: {result.error} ({result.location})"
    if result.spill_bytes > SPILL_BYTES:
        return f"spills {result.spill_bytes} bytes"
    if op == "metadata":
        return None
    contract = {"gmm": GMM, "tgmm": TGMM}[op].contract(MatrixCase(op, (), dtype, dtype), "gpu")
    if not result.keeps_dot(contract.dot, dtype):
        return f"its dots are {result.dot_kinds}, its contract {contract.name}"
    if contract.dot == "native" and dtype not in result.dot_kinds:
        return f"its dots use no matrix unit: {result.dot_kinds}"
    return None


def check(launches, target):
    compiled = compile_kernels([case_of(launch, target) for launch in launches.values()])
    problems = {name: problem(name, result) for name, result in zip(launches, compiled, strict=True)}
    limits = {name: reason for name, reason in LIMITS.get(target, {}).items() if name in launches}
    assert deviations(problems, limits) == []


@pytest.mark.parametrize(
    "target", [pytest.param(t, marks=[] if t in DEFAULT_TIER else [pytest.mark.full]) for t in TARGETS]
)
def test_compiles(target):
    check(REPRESENTATIVE, target)


@pytest.mark.full
@pytest.mark.parametrize("target", TARGETS)
def test_every_variant_compiles(target):
    check(VARIANTS, target)


def test_limits_name_what_there_is():
    assert {*LIMITS} <= {*TARGETS}
    assert {name for limits in LIMITS.values() for name in limits} <= {*REPRESENTATIVE, *VARIANTS}
