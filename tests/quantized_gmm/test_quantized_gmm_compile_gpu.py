# ruff: noqa: E402 (frameworks may be missing, and are asked for before they are imported)
"""Quantisers and block-scaled matmuls compile for real GPUs, as they would be launched; their tiles fit the chip, and
their dots are in the machine code what `dot_path` says."""

import pytest

pytest.importorskip("triton")
torch = pytest.importorskip("torch")

from gpu_reference import quantize
from gpu_reference import quantized_gmm as gpu
from gpu_reference._lib.formats import Output
from op_arguments.gmm import GroupMetadata
from op_arguments.quantized_gmm import QuantizedProblem
from parity.compilers.ptx import TARGETS, case_of, compile_kernels

M, K, N, GROUPS, EXPERTS = 4096, 2048, 1536, 8, 64
E4M3, E5M2, INT8 = torch.float8_e4m3fn, torch.float8_e5m2, torch.int8
FLOAT32, BFLOAT16, FLOAT16 = torch.float32, torch.bfloat16, torch.float16
DEFAULT_TIER = ("sm_90", "sm_100", "gfx942")  # a target takes seconds
# ptxas trades a register for a word of stack here and there (0 to 56 bytes seen); a tile that does not fit spills
# hundreds to thousands of bytes.
SPILL_BYTES = 64


def meta(*shape, dtype=torch.int32):
    return torch.empty(*shape, dtype=dtype, device="meta")


def scale(shape, blocks):
    return meta(*(size // block for size, block in zip(shape, blocks, strict=True)), dtype=FLOAT32)


def pair(shape, dtype, blocks):
    return meta(*shape, dtype=dtype), scale(shape, blocks) if dtype.itemsize == 1 else None


def gmm_launch(target, lhs, rhs, lhs_blocks=(M, K), rhs_blocks=(GROUPS, K, N), out=BFLOAT16, transpose=False):
    block = min(lhs_blocks[1], rhs_blocks[1])
    problem = QuantizedProblem(M, K, N, GROUPS, EXPERTS, "", block, lhs_blocks, rhs_blocks)
    path = gpu.dot_path(lhs, rhs, out, target)
    tile = gpu.gmm_quantized_tile(problem, path)
    weights, weights_scale = pair((GROUPS, K, N), rhs, rhs_blocks)
    if transpose:
        weights = meta(GROUPS, N, K, dtype=rhs).transpose(1, 2)
    visits = -(-M // tile[0]) + GROUPS
    metadata = GroupMetadata(meta(EXPERTS + 1), meta(visits), meta(visits), meta(1))
    operands = pair((M, K), lhs, lhs_blocks), (weights, weights_scale)
    return gpu.gmm_quantized_launch(problem, tile, path, *operands, None, meta(M, N, dtype=out), metadata, meta(1))


def tgmm_launch(target, lhs, rhs, lhs_blocks=(M, K), rhs_blocks=(M, N)):
    block = min(lhs_blocks[0], rhs_blocks[0])
    problem = QuantizedProblem(M, K, N, GROUPS, EXPERTS, "", block, lhs_blocks, rhs_blocks)
    path = gpu.dot_path(lhs, rhs, BFLOAT16, target)
    tile = gpu.tgmm_quantized_tile(problem, path)
    operands = pair((M, K), lhs, lhs_blocks), pair((M, N), rhs, rhs_blocks)
    out = meta(GROUPS, K, N, dtype=BFLOAT16)
    return gpu.tgmm_quantized_launch(problem, tile, path, *operands, None, out, meta(EXPERTS), meta(1))


def quantize_launches(dtype, blocks, name="float8_e4m3fn", dual=False):
    def result(blocks):
        return Output(meta(M, K, dtype=torch.uint8), scale((M, K), blocks))

    results = (result((1, blocks[1])), result((blocks[0], 1))) if dual else (result(blocks),)
    return quantize.quantize_launches(meta(M, K, dtype=dtype), blocks, name, *results)


REPRESENTATIVE = {
    "deepseek": (gmm_launch, dict(lhs=E4M3, rhs=E4M3, lhs_blocks=(1, 128), rhs_blocks=(1, 128, 128))),
    "int8-per-channel": (gmm_launch, dict(lhs=INT8, rhs=INT8, lhs_blocks=(1, K), rhs_blocks=(1, K, 1))),
    "bfloat16-fp8": (gmm_launch, dict(lhs=BFLOAT16, rhs=E4M3, rhs_blocks=(1, 128, 128))),
    "tgmm-deepseek": (tgmm_launch, dict(lhs=E4M3, rhs=E4M3, lhs_blocks=(128, 1), rhs_blocks=(128, 1))),
}
DEEPSEEK = REPRESENTATIVE["deepseek"][1]
VARIANTS = {
    "deepseek-transposed": (gmm_launch, dict(DEEPSEEK, transpose=True)),
    "deepseek-float32": (gmm_launch, dict(DEEPSEEK, out=FLOAT32)),
    "mixed-per-channel": (gmm_launch, dict(lhs=E4M3, rhs=E5M2, lhs_blocks=(1, K), rhs_blocks=(1, K, 1))),
    "blocks-of-32": (gmm_launch, dict(lhs=E5M2, rhs=E4M3, lhs_blocks=(1, 32), rhs_blocks=(1, 32, 1))),
    "int8-blocks": (gmm_launch, dict(lhs=INT8, rhs=INT8, lhs_blocks=(1, 128), rhs_blocks=(1, 128, 1))),
    "float16-int8": (gmm_launch, dict(lhs=FLOAT16, rhs=INT8, rhs_blocks=(1, K, 1))),
    "float32-fp8": (gmm_launch, dict(lhs=FLOAT32, rhs=E4M3, rhs_blocks=(1, 128, 128), out=FLOAT32)),
    "tgmm-mixed-per-channel": (tgmm_launch, dict(lhs=E4M3, rhs=E5M2, lhs_blocks=(M, 1), rhs_blocks=(M, 1))),
    "tgmm-int8-per-channel": (tgmm_launch, dict(lhs=INT8, rhs=INT8, lhs_blocks=(M, 1), rhs_blocks=(M, 1))),
    "tgmm-int8-blocks": (tgmm_launch, dict(lhs=INT8, rhs=INT8, lhs_blocks=(128, 1), rhs_blocks=(128, 1))),
    "tgmm-fp8-bfloat16": (tgmm_launch, dict(lhs=E4M3, rhs=BFLOAT16, lhs_blocks=(128, 1))),
}
QUANTIZE_DUAL = quantize_launches(BFLOAT16, (128, 128), dual=True)[0]
QUANTISERS = {
    "rows": quantize_launches(BFLOAT16, (1, 128))[0],
    "columns-int8": quantize_launches(FLOAT16, (128, 1), "int8")[0],
    "weights": quantize_launches(FLOAT32, (128, 128), "float8_e5m2")[0],
    **dict(zip(("dual-large-find", "dual-large"), quantize_launches(BFLOAT16, (512, 512), dual=True), strict=True)),
    "dequantize": quantize.dequantize_launch(
        meta(M, K, dtype=torch.uint8), (1, 128), "float8_e4m3fn", scale((M, K), (1, 128)), meta(M, K, dtype=FLOAT32)
    ),
}


def problem(result):
    """What is wrong with a kernel as it was compiled, None if nothing is."""
    if result.error is not None:
        return f"{result.outcome}: {result.error} ({result.location})"
    return f"spills {result.spill_bytes} bytes" if result.spill_bytes > SPILL_BYTES else None


def expected_operands(target, lhs, rhs, out=BFLOAT16, **_):
    """The types that the matrix unit multiplies; NVIDIA's has no float32 but a chain of FMAs."""
    dtype = gpu.dot_path(lhs, rhs, out, target).dtype
    if dtype == "fp8":
        return {str(operand).removeprefix("torch.") for operand in (lhs, rhs)}
    return set() if dtype == "float32" and target.startswith("sm_") else {dtype}


def check(target, matmuls, quantisers):
    launches = {name: launch(target, **options) for name, (launch, options) in matmuls.items()} | quantisers
    compiled = compile_kernels([case_of(launch, target) for launch in launches.values()])
    by_name = dict(zip(launches, compiled, strict=True))
    assert {name: wrong for name, result in by_name.items() if (wrong := problem(result))} == {}
    for name, (_, options) in matmuls.items():
        assert by_name[name].dot_kinds, name
        assert by_name[name].dot_operands == expected_operands(target, **options), name


@pytest.mark.parametrize(
    "target", [pytest.param(t, marks=[] if t in DEFAULT_TIER else [pytest.mark.full]) for t in TARGETS]
)
def test_compiles(target):
    check(target, REPRESENTATIVE, {"dual": QUANTIZE_DUAL})


@pytest.mark.full
@pytest.mark.parametrize("target", TARGETS)
def test_every_variant_compiles(target):
    check(target, VARIANTS, QUANTISERS)


@pytest.mark.parametrize(
    ("target", "out", "dtype", "reason"),
    [
        ("sm_80", BFLOAT16, "float16", "no fp8"),
        ("gfx942", BFLOAT16, "float16", "no fp8"),
        ("sm_90", BFLOAT16, "fp8", "added to float32 sums"),
        ("sm_90", FLOAT32, "float16", "13 bits"),
        ("sm_100", FLOAT32, "fp8", "added to float32 sums"),
    ],
)
def test_fp8_is_widened_where_the_chip_requires_it(target, out, dtype, reason):
    path = gpu.dot_path(E4M3, E5M2, out, target)
    assert path.dtype == dtype
    assert reason in path.reason


def test_fp8_cannot_be_multiplied_as_it_is_where_it_is_widened():
    """The reason why sm_80 has another path, from the compiler itself."""
    (result,) = compile_kernels([case_of(gmm_launch("sm_90", **DEEPSEEK), "sm_80")])
    assert "fp8e4nv" in result.error
