"""The gates of delta rules on the TPU, or its emulation, against the float64 golden."""

from tests.matrix.delta_rule import GATES
from tests.support.agreement import agree, are_exact, are_no_worse

test_agrees_with_golden = agree(*GATES, backend="tpu")
test_is_exact_on_integers = are_exact(*GATES, backend="tpu", where=lambda case: False)
test_is_no_worse_than_the_gpu = are_no_worse(*GATES)
