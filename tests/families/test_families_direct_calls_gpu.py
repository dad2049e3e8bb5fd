"""Triton's interpreter multiplies bfloat16 as integers; whoever calls a kernel by hand must not notice.

All other tests run kernels under an emulation that knows better.
"""

import contextlib
from dataclasses import replace

import pytest

from parity.judging.judge import judge
from parity.trial import Trial
from tests.matrix.gla import BF16, F32, GATED_LINEAR_ATTENTION
from tests.matrix.gmm import GMM, TGMM
from tests.matrix.moe import MOE_LAYER
from tests.matrix.mxfp8 import GROUPED_GEMM
from tests.matrix.quantized_gmm import GMM_QUANTIZED, TGMM_QUANTIZED

SCAN, PRODUCT = dict(B=1, T=5, H=1, K=16, V=16), dict(M=32, K=64, N=24, G=4)
CASES = [
    *((op, case) for op in GATED_LINEAR_ATTENTION for case in op.grid([SCAN], dtype=[BF16])),
    *((op, case) for op in (GMM, TGMM) for case in op.grid([PRODUCT], dtype=[BF16, (BF16, F32)])),
    *((op, next(case for case in op.cases if case.out == BF16)) for op in (GMM_QUANTIZED, TGMM_QUANTIZED)),
    *(
        (op, next(case for case in op.cases if case.dtype == BF16 and case.out != BF16))
        for op in (GMM_QUANTIZED, TGMM_QUANTIZED)
    ),
    *((GROUPED_GEMM, case) for case in GROUPED_GEMM.cases if case.tier == "smoke" and case.out == BF16),
    *((MOE_LAYER, case) for case in MOE_LAYER.cases if case.tier == "smoke"),
]


@pytest.mark.gpu
@pytest.mark.parametrize(("op", "case"), [pytest.param(op, case, id=case.id) for op, case in CASES])
def test_a_direct_call_is_right_without_emulation(op, case, monkeypatch):
    pytest.importorskip("triton")
    monkeypatch.setattr("parity.backends.emulation.tensor_core.emulated", contextlib.nullcontext)
    if op.magnitude:  # the interpreter's own sums are in another order than any contract's: hold derived bounds alone
        derived = replace(op, contract=lambda c, backend: replace(op.contract(c, backend), sites={}, functions={}))
    verdict = judge(Trial(derived if op.magnitude else op, case, "gpu")).verdict
    assert verdict.outcome == "AGREES", verdict
