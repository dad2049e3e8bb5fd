"""A Qwen3-Next and a Kimi K3 layer between their projections, of our operations alone, against float64."""

import numpy as np
import pytest

from parity.judging.judge import judge
from parity.op import BACKENDS
from parity.trial import Trial
from tests.support.differences import check_differences
from tests.support.functions import FRAMEWORKS
from tests.support.layers import LAYERS, Sizes, golden, golden_bwd

CASES = [
    pytest.param(op, case, backend, id=f"{backend}-{case.id}",
                 marks=[getattr(pytest.mark, backend), *([pytest.mark.full] if case.tier == "full" else [])])
    for backend in BACKENDS for op in LAYERS for case in op.cases
]  # fmt: skip


@pytest.mark.parametrize(("op", "case", "backend"), CASES)
def test_a_layer_agrees_with_its_golden(op, case, backend):
    pytest.importorskip(FRAMEWORKS[backend])
    verdict = judge(Trial(op, case, backend)).verdict
    assert verdict.outcome == "AGREES", verdict


@pytest.mark.parametrize("rule", ["gated_delta_rule", "kda"])
def test_gradients_of_a_layer_are_its_differences(rule):
    normal = np.random.default_rng(0).standard_normal
    per_head = (2, 3) if rule == "kda" else (2,)
    given = dict(x=normal((1, 5, 14)), weight=normal((14, 4)), a=normal((1, 5, *per_head)), b=normal((1, 5, 2)),
                 A_log=normal(2), dt_bias=normal(per_head))  # fmt: skip
    do, chosen = normal((1, 5, 2, 4)), dict(rule=rule, sizes=Sizes(1, 3))
    check_differences(lambda x: np.sum(do * golden(**x, **chosen).o), given, golden_bwd(do=do, **given, **chosen),
                      step=1e-6, within=1e-7)  # fmt: skip
