"""The block-scaled matmuls on the GPU, or its emulation, against the golden."""

from tests.matrix.quantized_gmm import GMM_QUANTIZED, TGMM_QUANTIZED
from tests.support.agreement import agree, are_exact

test_agrees_with_golden = agree(GMM_QUANTIZED, TGMM_QUANTIZED, backend="gpu")
test_is_exact_on_integers = are_exact(GMM_QUANTIZED, TGMM_QUANTIZED, backend="gpu")
