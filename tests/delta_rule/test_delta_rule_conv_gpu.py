"""The causal convolution on the GPU, or its emulation, against the float64 golden."""

from tests.matrix.delta_rule import CAUSAL_CONV1D
from tests.support.agreement import agree, are_exact

test_agrees_with_golden = agree(*CAUSAL_CONV1D, backend="gpu")
test_is_exact_on_integers = are_exact(*CAUSAL_CONV1D, backend="gpu")
