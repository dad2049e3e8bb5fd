"""The gated linear attentions on the TPU, or its emulation, against the float64 golden."""

import parity
from tests.matrix.gla import GATED_LINEAR_ATTENTION


@parity.cases(*GATED_LINEAR_ATTENTION, backend="tpu")
def test_agrees_with_golden(run):
    run.agrees()


@parity.cases(*GATED_LINEAR_ATTENTION, backend="tpu", data="integers")
def test_is_exact_on_integers(run):
    run.is_exact()


@parity.cases(*GATED_LINEAR_ATTENTION, backend="tpu", compared=True)
def test_is_no_worse_than_the_gpu(run):
    run.is_no_worse()
