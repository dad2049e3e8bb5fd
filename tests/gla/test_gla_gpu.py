"""The gated linear attentions on the GPU, or its emulation, against the float64 golden."""

import pytest

from parity.judging.judge import judge
from parity.trial import Trial
from tests.matrix.gla import F32, FUSED_RECURRENT_GLA, FUSED_RECURRENT_SIMPLE_GLA, GATED_LINEAR_ATTENTION
from tests.support.agreement import agree, agree_in_blocks, are_exact

test_agrees_with_golden = agree(*GATED_LINEAR_ATTENTION, backend="gpu")
test_is_exact_on_integers = are_exact(*GATED_LINEAR_ATTENTION, backend="gpu")
test_goes_back_through_several_blocks = agree_in_blocks(
    FUSED_RECURRENT_GLA[1], FUSED_RECURRENT_SIMPLE_GLA[1], module="gpu_reference.fused_recurrent"
)


@pytest.mark.gpu
@pytest.mark.parametrize("op", [op for op in GATED_LINEAR_ATTENTION if "recurrent" in op.name], ids=lambda op: op.name)
def test_a_state_in_several_tiles_is_exact_on_integers(op):
    """Of K as of V; in the default tier of the matrix no state is larger than a tile."""
    pytest.importorskip("triton")
    gates = {"gates": ["both"]} if "gates" in op.defaults else {}
    (case,) = op.grid([dict(B=1, T=3, H=2, K=80, V=72)], dtype=[F32], h0=[True], ht=[True], **gates)
    judged = judge(Trial(op, case.with_data("integers"), "gpu"))
    assert judged.verdict.passed, judged.verdict
