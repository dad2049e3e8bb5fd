"""The delta rules on the GPU, or its emulation, against the float64 golden."""

import pytest

from parity.judging.judge import judge
from parity.trial import Trial
from tests.matrix.delta_rule import CHUNK_KDA, DELTA_RULES, FUSED_RECURRENT_GATED_DELTA_RULE, is_usual
from tests.matrix.ops import BF16
from tests.support.agreement import agree, agree_in_blocks, are_exact
from tests.support.tiny import tiny

test_agrees_with_golden = agree(*DELTA_RULES, backend="gpu")
test_is_exact_on_integers = are_exact(*DELTA_RULES, backend="gpu", where=is_usual)
test_goes_back_through_several_blocks = agree_in_blocks(
    FUSED_RECURRENT_GATED_DELTA_RULE[1], module="gpu_reference.recurrent_delta_rule"
)


@pytest.mark.gpu
@pytest.mark.parametrize("op", CHUNK_KDA, ids=[op.name for op in CHUNK_KDA])
def test_more_than_128_gated_channels_of_bfloat16_agree(op):
    """What is read of their states is summed by instructions."""
    pytest.importorskip("triton")
    verdict = judge(Trial(op, tiny(op, (BF16, BF16), K=144, T=20), "gpu")).verdict
    assert verdict.passed, verdict
