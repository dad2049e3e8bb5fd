"""The delta rules on the GPU, or its emulation, against the float64 golden."""

import pytest

from parity.judging.judge import judge
from parity.trial import Trial
from tests.matrix.delta_rule import DELTA_RULES, FUSED_RECURRENT_GATED_DELTA_RULE, is_usual
from tests.matrix.ops import F32
from tests.support.agreement import agree, are_exact
from tests.support.interpreter import interpreted

test_agrees_with_golden = agree(*DELTA_RULES, backend="gpu")
test_is_exact_on_integers = are_exact(*DELTA_RULES, backend="gpu", where=is_usual)


@pytest.mark.gpu
@interpreted
def test_a_recurrence_goes_back_through_several_blocks_of_steps(monkeypatch):
    monkeypatch.setattr(pytest.importorskip("gpu_reference.recurrent_delta_rule"), "BLOCK", 4)
    op = FUSED_RECURRENT_GATED_DELTA_RULE[1]
    (case,) = op.grid([dict(B=1, T=6, H=1, HV=2, K=4, V=4)], dtype=[F32])
    judged = judge(Trial(op, case, "gpu"))
    assert judged.verdict.passed, judged.verdict
