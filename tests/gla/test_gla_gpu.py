"""The gated linear attentions on the GPU, or its emulation, against the float64 golden."""

import parity
from tests.matrix.gla import GATED_LINEAR_ATTENTION


@parity.cases(*GATED_LINEAR_ATTENTION, backend="gpu")
def test_agrees_with_golden(run):
    run.agrees()


@parity.cases(*GATED_LINEAR_ATTENTION, backend="gpu", data="integers")
def test_is_exact_on_integers(run):
    run.is_exact()
