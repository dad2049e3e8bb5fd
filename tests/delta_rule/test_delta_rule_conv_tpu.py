"""The causal convolution on the TPU, or its emulation, against the float64 golden."""

from tests.matrix.delta_rule import CAUSAL_CONV1D
from tests.support.agreement import agree, are_exact, are_no_worse

test_agrees_with_golden = agree(*CAUSAL_CONV1D, backend="tpu")
test_is_exact_on_integers = are_exact(*CAUSAL_CONV1D, backend="tpu")
test_is_no_worse_than_the_gpu = are_no_worse(*CAUSAL_CONV1D)
