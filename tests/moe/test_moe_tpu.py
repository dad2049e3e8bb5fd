"""Rows to experts and back, and the layers, on the TPU or its emulation, against the golden."""

import parity
from tests.matrix.moe import GROUPED_DENSE, GROUPED_DENSE_BWD, MOE_LAYER, MOE_LAYER_BWD, PERMUTE, UNPERMUTE

INEXACT = (UNPERMUTE, GROUPED_DENSE, GROUPED_DENSE_BWD, MOE_LAYER, MOE_LAYER_BWD)


@parity.cases(PERMUTE, backend="tpu")
def test_has_the_goldens_bits(run):
    run.agrees()


@parity.cases(*INEXACT, backend="tpu")
def test_agrees_with_golden(run):
    run.agrees()


@parity.cases(*INEXACT, backend="tpu", data="integers")
def test_is_exact_on_integers(run):
    run.is_exact()


@parity.cases(*INEXACT, backend="tpu", compared=True)
def test_is_no_worse_than_the_gpu(run):
    run.is_no_worse()
