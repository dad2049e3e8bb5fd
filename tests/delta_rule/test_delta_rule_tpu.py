"""The delta rules on the TPU, or its emulation, against the float64 golden."""

from tests.matrix.delta_rule import CHUNK_GATED_DELTA_RULE, CHUNK_KDA, is_usual
from tests.support.agreement import agree, are_exact, are_no_worse

RULES = (*CHUNK_GATED_DELTA_RULE, *CHUNK_KDA)

test_agrees_with_golden = agree(*RULES, backend="tpu")
test_is_exact_on_integers = are_exact(*RULES, backend="tpu", where=is_usual)
test_is_no_worse_than_the_gpu = are_no_worse(*RULES)
