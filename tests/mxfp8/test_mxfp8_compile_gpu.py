# ruff: noqa: E402 (frameworks may be missing, and are asked for before they are imported)
"""MXFP8 quantisers and matmuls compile for real GPUs, as they are launched; they fit the chip, and block scales go to
the matrix unit where it takes them: codes that are multiplied as fp8 have their scales nowhere else to go."""

import pytest

pytest.importorskip("triton")
torch = pytest.importorskip("torch")

from gpu_reference.grouped_gemm import grouped_gemm_support
from tests.matrix.mxfp8 import GROUPED_GEMM, MXFP8_DEQUANTIZE, MXFP8_DUAL_QUANTIZE, MXFP8_QUANTIZE
from tests.matrix.quantized_gmm import BF16, E4M3, E5M2, F32, rhs_dtype
from tests.support import gpu_code
from tests.support.calls import point

SIZES = dict(M=4096, K=2048)
BLOCK_SCALED = ("sm_100", "sm_120", "gfx950")


def gemm(lhs=E4M3, rhs=E4M3, out=BF16, **options):
    options |= dict(rhs_dtype=rhs, shard=(0, 64))
    return GROUPED_GEMM, point(GROUPED_GEMM, (lhs, out), **SIZES, N=1536, G=8, **options)


def quantiser(op, dtype, **options):
    return op, point(op, dtype, **SIZES, **options)


def expected_path(target, dtypes):
    if F32 in dtypes:
        return "float32"
    return "block_scaled" if target in BLOCK_SCALED and BF16 not in dtypes else "bfloat16"


def check_dots(result, target, dtypes):
    operands = result.dot_operands
    path = expected_path(target, dtypes)
    if path == "block_scaled":
        assert operands == dtypes
        # AMD's other instruction for fp8 has no scales, and another name.
        names = [name for name in result.instructions if "mfma" in name]
        assert all(name.startswith("v_mfma_scale_") for name in names)
        assert bool(names) == (target == "gfx950")
    elif path == "bfloat16":
        assert operands == {"bfloat16"}
    else:
        assert operands == ({"float32"} if target.startswith("gfx") else set())  # NVIDIA's is a chain of FMAs
        assert operands or result.dot_kinds["fma"] > 0


def check(calls, target):
    for name, (op, case, launch, result) in gpu_code.kernels(calls, target).items():
        assert gpu_code.problem(result) is None, name
        if op is GROUPED_GEMM and launch.name != "_metadata_kernel":
            check_dots(result, target, {case.dtype, rhs_dtype(case)})


WGRAD = gemm(ragged="contracting", rhs=E5M2)
DUAL = quantiser(MXFP8_DUAL_QUANTIZE, (BF16, E4M3))


@pytest.mark.parametrize(
    ("target", "calls"),
    [
        ("sm_100", [gemm(), WGRAD, DUAL]),
        *(pytest.param(target, [gemm()], marks=pytest.mark.full) for target in ("sm_90", "sm_120", "gfx950")),
    ],
)
def test_each_gpu_multiplies_as_it_should(target, calls):
    check(calls, target)


VARIANTS = [
    gemm(),
    gemm(transpose_rhs=True),
    gemm(scale_layout="swizzled"),
    gemm(lhs=BF16),
    gemm(rhs=F32, out=F32, ragged="contracting"),
    gemm(lhs=E5M2, out=F32),
    gemm(ragged="contracting"),
    gemm(ragged="contracting", scale_layout="swizzled", rhs=E5M2),
    DUAL,
    quantiser(MXFP8_QUANTIZE, (BF16, E5M2), rounding="floor"),
    quantiser(MXFP8_QUANTIZE, (F32, E4M3), axis=0),
    quantiser(MXFP8_DEQUANTIZE, (E5M2, BF16)),
    quantiser(MXFP8_DEQUANTIZE, (E5M2, BF16), axis=0),
]


@pytest.mark.full
@gpu_code.EACH_TARGET
def test_every_variant_compiles(target):
    check(VARIANTS, target)


@pytest.mark.parametrize(
    ("target", "path", "reason"),
    [
        ("sm_80", "bfloat16", "sm_80 takes no block scales"),
        ("sm_90", "bfloat16", "sm_90 takes no block scales"),
        ("gfx942", "bfloat16", "gfx942 takes no block scales"),
        *((target, "block_scaled", f"{target} takes codes and their block scales") for target in BLOCK_SCALED),
    ],
)
def test_which_path_serves_which_gpu(target, path, reason):
    e4m3, e5m2 = torch.float8_e4m3fn, torch.float8_e5m2
    support = grouped_gemm_support(e4m3, e5m2, target=target)
    assert support.path == path
    assert reason in support.reason
    assert support.fallback == (path == "bfloat16")  # what strict=True refuses
    assert grouped_gemm_support(torch.bfloat16, e5m2, target=target).path == "bfloat16"
    assert grouped_gemm_support(torch.float32, torch.float32, target=target).path == "unquantised"
