"""The gates of delta rules on the GPU, or its emulation, against the float64 golden."""

from tests.matrix.delta_rule import GATES
from tests.support.agreement import agree

test_agrees_with_golden = agree(*GATES, backend="gpu")
