# ruff: noqa: E402 (frameworks may be missing, and are asked for before they are imported)
"""Quantisers and block-scaled matmuls compile for real GPUs, as they are launched; their tiles fit the chip, and their
dots are in the machine code what `dot_path` says."""

import pytest

pytest.importorskip("triton")
torch = pytest.importorskip("torch")

from gpu_reference.quantized_gmm import dot_path
from parity.compilers.ptx import case_of, compile_kernels
from tests.matrix.gmm import sums_rows
from tests.matrix.quantize import FP8_DEQUANTIZE, FP8_DUAL_QUANTIZE, FP8_QUANTIZE, INT8_QUANTIZE
from tests.matrix.quantized_gmm import BF16, E4M3, E5M2, F16, F32, GMM_QUANTIZED, I8, PLAIN, TGMM_QUANTIZED, rhs_dtype
from tests.support import gpu_code
from tests.support.calls import launched, point

SIZES = dict(M=4096, K=2048)


def gmm(lhs, rhs, lhs_blocks, rhs_blocks, out=BF16, op=GMM_QUANTIZED, **options):
    options |= dict(rhs_dtype=rhs, lhs_blocks=lhs_blocks, rhs_blocks=rhs_blocks, shard=(0, 64))
    return op, point(op, (lhs, out), **SIZES, N=1536, G=8, **options)


def tgmm(lhs, rhs, lhs_blocks, rhs_blocks):
    return gmm(lhs, rhs, lhs_blocks, rhs_blocks, op=TGMM_QUANTIZED)


def quantiser(op, dtype, **options):
    return op, point(op, dtype, **SIZES, **options)


DEEPSEEK = (E4M3, E4M3, "1x128", "1x128x128")
REPRESENTATIVE = [
    gmm(*DEEPSEEK),
    gmm(I8, I8, "1xK", "1xKx1"),
    gmm(BF16, E4M3, PLAIN, "1x128x128"),
    tgmm(E4M3, E4M3, "128x1", "128x1"),
    quantiser(FP8_DUAL_QUANTIZE, (BF16, E4M3)),
]
EVERYTHING = [
    *REPRESENTATIVE,
    gmm(*DEEPSEEK, transpose_rhs=True),
    gmm(*DEEPSEEK, out=F32),
    gmm(E4M3, E5M2, "1xK", "1xKx1"),
    gmm(E5M2, E4M3, "1x32", "1x32x1"),
    gmm(I8, I8, "1x128", "1x128x1"),
    gmm(F16, I8, PLAIN, "1xKx1"),
    gmm(F32, E4M3, PLAIN, "1x128x128", out=F32),
    tgmm(E4M3, E5M2, "Mx1", "Mx1"),
    tgmm(I8, I8, "Mx1", "Mx1"),
    tgmm(I8, I8, "128x1", "128x1"),
    tgmm(E4M3, BF16, "128x1", PLAIN),
    quantiser(FP8_QUANTIZE, (BF16, E4M3)),
    quantiser(INT8_QUANTIZE, (F16, I8), axis=0),
    quantiser(FP8_QUANTIZE, (F32, E5M2), axis=(0, 1)),
    quantiser(FP8_DUAL_QUANTIZE, (BF16, E4M3), block_size=512),
    quantiser(FP8_DEQUANTIZE, (E4M3, F32)),
]


def expected_operands(case, target):
    """The types that the matrix unit multiplies; NVIDIA's has no float32 but a chain of FMAs."""
    dtypes = {case.dtype, rhs_dtype(case)}
    lhs, rhs, out = (getattr(torch, name) for name in (case.dtype, rhs_dtype(case), case.out))
    dtype = dot_path(lhs, rhs, out, target, over_rows=sums_rows(case)).dtype
    if dtype == "fp8":
        return dtypes
    return set() if dtype == "float32" and target.startswith("sm_") else {dtype}


@gpu_code.some_then_all("sm_90", REPRESENTATIVE, EVERYTHING)
def test_compiles(target, calls):
    kernels = gpu_code.kernels(calls, target)
    assert {name: wrong for name, kernel in kernels.items() if (wrong := gpu_code.problem(kernel.result))} == {}
    for name, kernel in kernels.items():
        if kernel.op in (GMM_QUANTIZED, TGMM_QUANTIZED) and kernel.launch.name != "_metadata_kernel":
            assert kernel.result.dot_kinds, name
            assert kernel.result.dot_operands == expected_operands(kernel.case, target), name


@pytest.mark.parametrize(
    ("target", "out", "over_rows", "dtype", "reason"),
    [
        ("sm_80", BF16, False, "float16", "no fp8"),
        ("gfx942", BF16, True, "float16", "no fp8"),
        ("sm_90", BF16, False, "fp8", "added to float32 sums"),
        ("sm_90", BF16, True, "float16", "along the sum alone"),
        ("sm_90", F32, False, "float16", "13 bits"),
        ("sm_100", F32, True, "fp8", "added to float32 sums"),
    ],
)
def test_fp8_is_widened_where_the_chip_requires_it(target, out, over_rows, dtype, reason):
    path = dot_path(torch.float8_e4m3fn, torch.float8_e5m2, getattr(torch, out), target, over_rows=over_rows)
    assert path.dtype == dtype
    assert reason in path.reason


@pytest.mark.full
def test_fp8_cannot_be_multiplied_as_it_is_where_it_is_widened():
    """The reason why sm_80 has another path, from the compiler itself."""
    (result,) = compile_kernels([case_of(launched(*gmm(*DEEPSEEK), "sm_90")[-1], "sm_80")])
    assert "fp8e4nv" in result.error
