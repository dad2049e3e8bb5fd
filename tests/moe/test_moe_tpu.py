"""permute, unpermute and the whole layer on the TPU, or its emulation, against the golden."""

import parity
from tests.matrix.moe import MOE_LAYER, MOE_LAYER_BWD, PERMUTE, UNPERMUTE


@parity.cases(PERMUTE, backend="tpu")
def test_has_the_goldens_bits(run):
    run.agrees()


@parity.cases(UNPERMUTE, MOE_LAYER, MOE_LAYER_BWD, backend="tpu")
def test_agrees_with_golden(run):
    run.agrees()


@parity.cases(UNPERMUTE, MOE_LAYER, MOE_LAYER_BWD, backend="tpu", data="integers")
def test_is_exact_on_integers(run):
    run.is_exact()


@parity.cases(UNPERMUTE, MOE_LAYER, MOE_LAYER_BWD, backend="tpu", compared=True)
def test_is_no_worse_than_the_gpu(run):
    run.is_no_worse()
