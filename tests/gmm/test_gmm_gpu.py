"""gmm and tgmm on the GPU, or its emulation, against the float64 golden."""

from tests.matrix.gmm import GMM, TGMM
from tests.support.agreement import agree, are_exact

test_agrees_with_golden = agree(GMM, TGMM, backend="gpu")
test_is_exact_on_integers = are_exact(GMM, TGMM, backend="gpu")
