"""The quantised ops through the real TPU compiler, for every chip: they compile, and multiply what they declare."""

from tests.matrix.models import DEEPSEEK_V3
from tests.matrix.moe import GROUPED_DENSE_BWD
from tests.matrix.quantize import FP8_DEQUANTIZE, FP8_DUAL_QUANTIZE, FP8_QUANTIZE, INT8_QUANTIZE
from tests.matrix.quantized_gmm import BF16, E4M3, E5M2, F32, GMM_QUANTIZED, I8, PLAIN, TGMM_QUANTIZED, rhs_dtype
from tests.support import tpu_code
from tests.support.calls import point

pytestmark = tpu_code.needs_compiler

GENERATIONS = {"v4": 4, "v5e": 5, "v5p": 5, "v6e": 6, "tpu7x": 7}
PATHS = {"fp8": "fp8", "int8": "int8", "bfloat16": "bf16"}  # `matmul_path`'s words and the compiler's report's
SIZES = dict(M=8192, K=2048)
DEEPSEEK = dict(K=DEEPSEEK_V3.hidden, N=DEEPSEEK_V3.intermediate)


def gmm(lhs, lhs_blocks, rhs, rhs_blocks, op=GMM_QUANTIZED, **settings):
    operands = dict(rhs_dtype=rhs, lhs_blocks=lhs_blocks, rhs_blocks=rhs_blocks, shard=(0, 32))
    return op, point(op, (lhs, BF16), **SIZES | dict(N=512, G=8) | operands | settings)


def tgmm(lhs, lhs_blocks, rhs, rhs_blocks, **settings):
    return gmm(lhs, lhs_blocks, rhs, rhs_blocks, op=TGMM_QUANTIZED, **settings)


REPRESENTATIVE = [
    gmm(E4M3, "1x512", E5M2, "1x512x1"),
    gmm(I8, "1xK", I8, "1xKx1"),
    gmm(I8, "1xK", I8, "1xKx1", M=200, N=520),  # tiles that are no whole registers
    gmm(BF16, PLAIN, I8, "1x128x1"),
    tgmm(E4M3, "Mx1", E4M3, "Mx1"),
    (FP8_QUANTIZE, point(FP8_QUANTIZE, (BF16, E4M3), **SIZES, axis=1)),
    (FP8_DUAL_QUANTIZE, point(FP8_DUAL_QUANTIZE, (BF16, E4M3), **SIZES)),
]
EVERYTHING = [
    *REPRESENTATIVE,
    gmm(E4M3, "1xK", E4M3, "1xKx1"),
    gmm(E4M3, "1x128", E4M3, "1x128x128", **DEEPSEEK, transpose_rhs=True),
    gmm(E4M3, "1x32", E4M3, "1x32x1", N=2048),
    gmm(E4M3, "1x64", E4M3, "1x64x1", N=1408),
    tgmm(E4M3, "128x1", E4M3, "128x1", **DEEPSEEK),
    tgmm(E4M3, "128x1", E4M3, "128x1", K=640, N=1408),  # a last block of columns that is one register
    tgmm(I8, "Mx1", I8, "256x1"),
    (INT8_QUANTIZE, point(INT8_QUANTIZE, (BF16, I8), **SIZES, axis=0, block_size=None)),
    (FP8_DEQUANTIZE, point(FP8_DEQUANTIZE, (E4M3, F32), **SIZES)),
    (GROUPED_DENSE_BWD, point(GROUPED_DENSE_BWD, BF16, **SIZES, N=512, G=8)),
]


@tpu_code.some_then_all("v5e", REPRESENTATIVE, EVERYTHING)  # which has no fp8; the schedule's test compiles for tpu7x
def test_compiles(chip, calls):
    from tpu_kernels._lib.chip import matmul_path

    for op, case, result in tpu_code.compiled(calls, chip):
        if op in (GMM_QUANTIZED, TGMM_QUANTIZED):
            path, reason = matmul_path(case.dtype, rhs_dtype(case), GENERATIONS[chip])
            emitted = {passes.emitted_as for kernel in result.kernels for passes in kernel.passes}
            assert emitted == {PATHS[path]}, f"{case.id}: {reason}"
