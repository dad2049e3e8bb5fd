# ruff: noqa: E402 (frameworks may be missing, and are asked for before they are imported)
"""Quantisers and block-scaled matmuls compile for real GPUs, as they would be launched; their tiles fit the chip."""

import pytest

pytest.importorskip("triton")
torch = pytest.importorskip("torch")

from gpu_reference import quantize
from gpu_reference import quantized_gmm as gpu
from gpu_reference.gmm import GroupMetadata
from gpu_reference.quantize import Quantized
from op_arguments.quantized_gmm import QuantizedProblem
from parity.compilers.ptx import POINTERS, TARGETS, Case, compile_kernels

M, K, N, GROUPS, EXPERTS = 4096, 2048, 1536, 8, 64
E4M3, E5M2, INT8 = torch.float8_e4m3fn, torch.float8_e5m2, torch.int8
FLOAT32, BFLOAT16, FLOAT16 = torch.float32, torch.bfloat16, torch.float16
# CUDA programming guide, per block; CDNA 3 instruction set reference, per workgroup.
SHARED_BYTES = {"sm_80": 163 * 1024, "sm_90": 227 * 1024, "sm_100": 227 * 1024, "gfx942": 64 * 1024}
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
        return Quantized(meta(M, K, dtype=torch.uint8), scale((M, K), blocks))

    results = (result((1, blocks[1])), result((blocks[0], 1))) if dual else (result(blocks),)
    return quantize.quantize_launches(meta(M, K, dtype=dtype), blocks, name, *results)


def case(launch, target):
    arguments = {
        name: POINTERS[str(value.dtype).removeprefix("torch.")] if isinstance(value, torch.Tensor) else value
        for name, value in launch.arguments.items()
    }
    function = launch.kernel.fn
    return Case(f"{function.__module__}:{function.__name__}", TARGETS[target], arguments, launch.options)


def representative(target):
    return {
        "gmm-deepseek": gmm_launch(target, E4M3, E4M3, (1, 128), (1, 128, 128)),
        "gmm-int8-per-channel": gmm_launch(target, INT8, INT8, (1, K), (1, K, 1)),
        "gmm-bfloat16-fp8": gmm_launch(target, BFLOAT16, E4M3, rhs_blocks=(1, 128, 128)),
        "tgmm-deepseek": tgmm_launch(target, E4M3, E4M3, (128, 1), (128, 1)),
        "quantize-dual": quantize_launches(BFLOAT16, (128, 128), dual=True)[0],
    }


def variants(target):
    find_largest, with_largest = quantize_launches(BFLOAT16, (512, 512), dual=True)
    codes, out = meta(M, K, dtype=torch.uint8), meta(M, K, dtype=FLOAT32)
    return {
        "gmm-deepseek-transposed": gmm_launch(target, E4M3, E4M3, (1, 128), (1, 128, 128), transpose=True),
        "gmm-deepseek-float32": gmm_launch(target, E4M3, E4M3, (1, 128), (1, 128, 128), out=FLOAT32),
        "gmm-mixed-per-channel": gmm_launch(target, E4M3, E5M2, (1, K), (1, K, 1)),
        "gmm-blocks-of-32": gmm_launch(target, E5M2, E4M3, (1, 32), (1, 32, 1)),
        "gmm-int8-blocks": gmm_launch(target, INT8, INT8, (1, 128), (1, 128, 1)),
        "gmm-float16-int8": gmm_launch(target, FLOAT16, INT8, rhs_blocks=(1, K, 1)),
        "gmm-float32-fp8": gmm_launch(target, FLOAT32, E4M3, rhs_blocks=(1, 128, 128), out=FLOAT32),
        "tgmm-mixed-per-channel": tgmm_launch(target, E4M3, E5M2, (M, 1), (M, 1)),
        "tgmm-int8-per-channel": tgmm_launch(target, INT8, INT8, (M, 1), (M, 1)),
        "tgmm-int8-blocks": tgmm_launch(target, INT8, INT8, (128, 1), (128, 1)),
        "tgmm-fp8-bfloat16": tgmm_launch(target, E4M3, BFLOAT16, (128, 1)),
        "quantize-rows": quantize_launches(BFLOAT16, (1, 128))[0],
        "quantize-columns-int8": quantize_launches(FLOAT16, (128, 1), "int8")[0],
        "quantize-weights": quantize_launches(FLOAT32, (128, 128), "float8_e5m2")[0],
        "quantize-dual-large-find": find_largest,
        "quantize-dual-large": with_largest,
        "dequantize": quantize.dequantize_launch(codes, (1, 128), "float8_e4m3fn", scale((M, K), (1, 128)), out),
    }


def check(launches, target):
    compiled = compile_kernels([case(launch, target) for launch in launches.values()])
    for name, result in zip(launches, compiled, strict=True):
        assert result.error is None, f"{name}: {result.error}"
        assert result.spill_bytes <= SPILL_BYTES, f"{name}: {result}"
        assert result.shared_bytes <= SHARED_BYTES[target], f"{name}: {result}"


@pytest.mark.parametrize(
    "target", [pytest.param(t, marks=[] if t in DEFAULT_TIER else [pytest.mark.full]) for t in SHARED_BYTES]
)
def test_default_tiles_compile_and_fit(target):
    check(representative(target), target)


@pytest.mark.full
@pytest.mark.parametrize("target", SHARED_BYTES)
def test_every_variant_compiles_and_fits(target):
    check(variants(target), target)


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
    (result,) = compile_kernels([case(gmm_launch("sm_90", E4M3, E4M3, (1, 128), (1, 128, 128)), "sm_80")])
    assert "fp8e4nv" in result.error
