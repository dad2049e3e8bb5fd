"""The delta rules on the GPU, or its emulation, against the float64 golden."""

from tests.matrix.delta_rule import DELTA_RULES, FUSED_RECURRENT_GATED_DELTA_RULE, is_usual
from tests.support.agreement import agree, agree_in_blocks, are_exact

test_agrees_with_golden = agree(*DELTA_RULES, backend="gpu")
test_is_exact_on_integers = are_exact(*DELTA_RULES, backend="gpu", where=is_usual)
test_goes_back_through_several_blocks = agree_in_blocks(
    FUSED_RECURRENT_GATED_DELTA_RULE[1], module="gpu_reference.recurrent_delta_rule"
)
