"""The delta rules on the TPU, or its emulation, against the float64 golden.

Cases are judged here and not by `parity.cases`, which wants an op of both backends.
"""

import pytest

from parity.judging.judge import judge
from parity.trial import Trial
from tests.matrix.delta_rule import CHUNK_GATED_DELTA_RULE, CHUNK_KDA, is_usual
from tests.matrix.gmm import F32

RULES = (*CHUNK_GATED_DELTA_RULE, *CHUNK_KDA)


def is_default(case):
    """One rule forward and the other backward, which share their code, and keys on which powers of A overflow."""
    if case.op == "chunk_gated_delta_rule_fwd":
        return case.tier == "default" and case.dtype == F32 and case.rho == "equal"
    return case.op == "chunk_kda_bwd" and case.tier == "smoke" and case.dtype == F32 and case.data != "integers"


def params(cases):
    return [pytest.param(op, case, id=case.id, marks=[] if is_default(case) else [pytest.mark.full])
            for op in RULES for case in cases(op)]  # fmt: skip


def check(op, case):
    pytest.importorskip("jax")
    judged = judge(Trial(op, case, "tpu"))
    assert judged.verdict.passed, judged.verdict


@pytest.mark.tpu
@pytest.mark.parametrize(("op", "case"), params(lambda op: op.cases))
def test_agrees_with_golden(op, case):
    check(op, case)


@pytest.mark.tpu
@pytest.mark.parametrize(
    ("op", "case"), params(lambda op: (case.with_data("integers") for case in op.cases if is_usual(case)))
)
def test_is_exact_on_integers(op, case):
    check(op, case)
