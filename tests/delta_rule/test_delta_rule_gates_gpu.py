"""The gates of delta rules on the GPU, or its emulation, against the float64 golden."""

from tests.matrix.delta_rule import GATES
from tests.support.agreement import agree, are_exact

test_agrees_with_golden = agree(*GATES, backend="gpu")
test_is_exact_on_integers = are_exact(*GATES, backend="gpu", where=lambda case: False)
