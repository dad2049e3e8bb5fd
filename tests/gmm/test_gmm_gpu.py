"""gmm and tgmm on the GPU, or its emulation, against the float64 golden."""

import parity
from tests.matrix.gmm import GMM, TGMM


@parity.cases(GMM, TGMM, backend="gpu")
def test_agrees_with_golden(run):
    run.agrees()


@parity.cases(GMM, TGMM, backend="gpu", data="integers")
def test_is_exact_on_integers(run):
    run.is_exact()
