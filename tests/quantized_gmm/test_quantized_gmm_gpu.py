"""The quantisers, the block-scaled matmuls and the quantised layer on the GPU, or its emulation, against the golden."""

import parity
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
