"""The MXFP8 ops through the real TPU compiler, for every chip: they compile, and multiply bfloat16."""

import pytest

from tests.matrix.models import GPT_OSS_120B
from tests.matrix.mxfp8 import GROUPED_GEMM, MXFP8_DEQUANTIZE, MXFP8_DUAL_QUANTIZE, MXFP8_QUANTIZE
from tests.matrix.quantized_gmm import BF16, E4M3, E5M2, F32
from tests.support import tpu_code
from tests.support.calls import point

pytestmark = tpu_code.needs_compiler

SIZES = dict(M=8192, K=2048)
GPT_OSS = dict(K=GPT_OSS_120B.hidden, N=GPT_OSS_120B.intermediate)


def gemm(lhs=E4M3, rhs=E4M3, **options):
    sizes = SIZES | dict(N=512, G=8, shard=(0, 32))
    return GROUPED_GEMM, point(GROUPED_GEMM, (lhs, BF16), rhs_dtype=rhs, **sizes | options)


CALLS = [
    gemm(),
    gemm(E5M2, E4M3, transpose_rhs=True),
    gemm(E4M3, E5M2, ragged="contracting"),
    gemm(**GPT_OSS),
    gemm(**GPT_OSS, ragged="contracting"),
    gemm(N=640),  # a last block of columns that is one register
    gemm(N=1536, tiling=(128, 256, 384)),
    gemm(BF16, E4M3),
    gemm(scale_layout="swizzled"),
    (MXFP8_QUANTIZE, point(MXFP8_QUANTIZE, (BF16, E4M3), **SIZES, axis=1)),
    (MXFP8_QUANTIZE, point(MXFP8_QUANTIZE, (BF16, E5M2), **SIZES, axis=0)),
    (MXFP8_DUAL_QUANTIZE, point(MXFP8_DUAL_QUANTIZE, (BF16, E4M3), **SIZES, rounding="floor")),
    (MXFP8_QUANTIZE, point(MXFP8_QUANTIZE, (BF16, E4M3), M=8192, K=GPT_OSS_120B.hidden, axis=0)),  # 22.5 registers
    (MXFP8_DUAL_QUANTIZE, point(MXFP8_DUAL_QUANTIZE, (BF16, E4M3), M=8192, K=GPT_OSS_120B.hidden)),
    (MXFP8_DEQUANTIZE, point(MXFP8_DEQUANTIZE, (E4M3, F32), **SIZES)),
]


@pytest.mark.full  # a minute for each chip
@tpu_code.EACH_CHIP
def test_compiles(chip):
    for op, case, result in tpu_code.compiled(CALLS, chip):
        if op is GROUPED_GEMM:
            emitted = {passes.emitted_as for kernel in result.kernels for passes in kernel.passes}
            assert emitted == {"bf16"}, case.id
