"""The quantisers, the block-scaled matmuls and the quantised layer on the GPU, or its emulation, against the golden."""

import contextlib

import pytest

import parity
from parity.judge import judge
from tests.matrix.moe import GROUPED_DENSE, GROUPED_DENSE_BWD
from tests.matrix.quantize import QUANTIZERS
from tests.matrix.quantized_gmm import GMM_QUANTIZED, TGMM_QUANTIZED

MATMULS = (GMM_QUANTIZED, TGMM_QUANTIZED, GROUPED_DENSE, GROUPED_DENSE_BWD)


@parity.cases(*QUANTIZERS, backend="gpu")
def test_has_the_goldens_bits(run):
    run.agrees()


@parity.cases(*MATMULS, backend="gpu")
def test_agrees_with_golden(run):
    run.agrees()


@parity.cases(*MATMULS, backend="gpu", data="integers")
def test_is_exact_on_integers(run):
    run.is_exact()


@pytest.mark.gpu
@pytest.mark.parametrize("op", [GMM_QUANTIZED, TGMM_QUANTIZED], ids=lambda op: op.name)
def test_a_direct_call_on_bfloat16_is_right_without_emulation(op, monkeypatch):
    """Triton's interpreter multiplies bfloat16 as integers; whoever calls a kernel by hand must not notice."""
    pytest.importorskip("triton")
    monkeypatch.setattr("parity.backends.emulation.tensor_core.emulated", contextlib.nullcontext)
    narrow_result = next(case for case in op.cases if case.out == "bfloat16")
    wide_operand = next(case for case in op.cases if case.dtype == "bfloat16" and case.out != "bfloat16")
    for case in (narrow_result, wide_operand):
        judged = judge(op, case, "gpu")
        assert judged.verdict.passed, judged.verdict
