"""Each kernel of the GPU at its smallest, with every tensor that it may be given and without, and every flag turned."""

import pytest

from parity.judging.judge import judge
from parity.trial import Trial
from tests.matrix import OPS
from tests.support.functions import FRAMEWORKS
from tests.support.tiny import in_every_way

CASES = [pytest.param(op, case, id=case.id) for op in OPS for case in in_every_way(op)]


@pytest.mark.gpu
@pytest.mark.parametrize(("op", "case"), CASES)
def test_every_option_agrees_with_the_golden(op, case):
    pytest.importorskip(FRAMEWORKS["gpu"])
    verdict = judge(Trial(op, case, "gpu")).verdict
    assert verdict.passed, verdict
