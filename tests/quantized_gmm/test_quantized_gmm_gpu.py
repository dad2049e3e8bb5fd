"""The block-scaled matmuls on the GPU, or its emulation, against the golden."""

import parity
from tests.matrix.quantized_gmm import GMM_QUANTIZED, TGMM_QUANTIZED


@parity.cases(GMM_QUANTIZED, TGMM_QUANTIZED, backend="gpu")
def test_agrees_with_golden(run):
    run.agrees()


@parity.cases(GMM_QUANTIZED, TGMM_QUANTIZED, backend="gpu", data="integers")
def test_is_exact_on_integers(run):
    run.is_exact()
