"""The delta rules on the GPU, or its emulation, against the float64 golden.

Cases are judged here and not by `parity.cases`, which wants an op of both backends.
"""

import pytest

from parity.judging.judge import judge
from parity.trial import Trial
from tests.matrix.delta_rule import DELTA_RULES, is_usual
from tests.matrix.gmm import F32


def is_default(case):
    """Every kernel once, and the keys on which an inverse by powers fails."""
    return case.dtype == F32 and (case.tier == "smoke" or (case.tier == "default" and case.rho == "equal"))


def params(cases):
    return [pytest.param(op, case, id=case.id, marks=[] if is_default(case) else [pytest.mark.full])
            for op in DELTA_RULES for case in cases(op)]  # fmt: skip


def check(op, case):
    pytest.importorskip("triton")
    judged = judge(Trial(op, case, "gpu"))
    assert judged.verdict.passed, judged.verdict


@pytest.mark.gpu
@pytest.mark.parametrize(("op", "case"), params(lambda op: op.cases))
def test_agrees_with_golden(op, case):
    check(op, case)


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("op", "case"), params(lambda op: (case.with_data("integers") for case in op.cases if is_usual(case)))
)
def test_is_exact_on_integers(op, case):
    check(op, case)
