"""The delta rules on the GPU, or its emulation, against the float64 golden."""

from tests.matrix.delta_rule import DELTA_RULES, is_usual
from tests.support.agreement import agree, are_exact

test_agrees_with_golden = agree(*DELTA_RULES, backend="gpu")
test_is_exact_on_integers = are_exact(*DELTA_RULES, backend="gpu", where=is_usual)
