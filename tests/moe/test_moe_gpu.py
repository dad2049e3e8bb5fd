"""Rows to experts and back, and the whole layer, on the GPU or its emulation, against the golden."""

import parity
from tests.matrix.moe import MOE_LAYER, MOE_LAYER_BWD, PERMUTE, UNPERMUTE

INEXACT = (UNPERMUTE, MOE_LAYER, MOE_LAYER_BWD)


@parity.cases(PERMUTE, backend="gpu")
def test_has_the_goldens_bits(run):
    run.agrees()


@parity.cases(*INEXACT, backend="gpu")
def test_agrees_with_golden(run):
    run.agrees()


@parity.cases(*INEXACT, backend="gpu", data="integers")
def test_is_exact_on_integers(run):
    run.is_exact()
