"""The delta rules on the GPU, or its emulation, against the float64 golden."""

import pytest

from parity.judging.judge import judge
from parity.trial import Trial
from tests.matrix.delta_rule import (
    CHUNK_GATED_DELTA_RULE,
    CHUNK_KDA,
    FUSED_RECURRENT_GATED_DELTA_RULE,
    FUSED_RECURRENT_KDA,
    is_usual,
)
from tests.matrix.gmm import F32
from tests.support.agreement import agree, are_exact

CHUNKED = (*CHUNK_GATED_DELTA_RULE, *CHUNK_KDA)
RECURRENT = [
    pytest.param(op, same, id=same.id, marks=[] if case.dtype == F32 and case.tier == "smoke" else [pytest.mark.full])
    for op in (*FUSED_RECURRENT_GATED_DELTA_RULE, *FUSED_RECURRENT_KDA)
    for case in op.cases
    for same in (case, case.with_data("integers"))[: 1 + is_usual(case)]
]

test_agrees_with_golden = agree(*CHUNKED, backend="gpu")
test_is_exact_on_integers = are_exact(*CHUNKED, backend="gpu", where=is_usual)


@pytest.mark.gpu
@pytest.mark.parametrize(("op", "case"), RECURRENT)
def test_the_recurrent_rules_agree_with_golden(op, case):
    """Not by `parity.cases`, which wants an op of both backends."""
    pytest.importorskip("triton")
    judged = judge(Trial(op, case, "gpu"))
    assert judged.verdict.passed, judged.verdict
