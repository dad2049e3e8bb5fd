"""The delta rules on the TPU, or its emulation, against the float64 golden."""

from tests.matrix.delta_rule import DELTA_RULES, is_usual
from tests.support.agreement import agree, are_exact, are_no_worse

test_agrees_with_golden = agree(*DELTA_RULES, backend="tpu")
test_is_exact_on_integers = are_exact(*DELTA_RULES, backend="tpu", where=is_usual)
test_is_no_worse_than_the_gpu = are_no_worse(*DELTA_RULES)
