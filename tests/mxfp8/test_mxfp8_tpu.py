"""The MXFP8 quantisers and grouped_gemm on the TPU, or its emulation, against the golden."""

import parity
from tests.matrix.mxfp8 import GROUPED_GEMM, MXFP8_QUANTIZERS


@parity.cases(*MXFP8_QUANTIZERS, backend="tpu")
def test_has_the_goldens_bits(run):
    run.agrees()


@parity.cases(GROUPED_GEMM, backend="tpu")
def test_agrees_with_golden(run):
    run.agrees()


@parity.cases(GROUPED_GEMM, backend="tpu", data="integers")
def test_is_exact_on_integers(run):
    run.is_exact()


@parity.cases(GROUPED_GEMM, backend="tpu", compared=True)
def test_is_no_worse_than_the_gpu(run):
    run.is_no_worse()
