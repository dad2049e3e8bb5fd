"""The delta rules on the TPU, or its emulation, against the float64 golden."""

import pytest

from op_arguments.delta_rule import DeltaProblem
from parity.judging.judge import judge
from parity.trial import Trial
from tests.matrix.delta_rule import CHUNK_GATED_DELTA_RULE, DELTA_RULES, F32, is_usual
from tests.support.agreement import agree, are_exact, are_no_worse

test_agrees_with_golden = agree(*DELTA_RULES, backend="tpu")
test_is_exact_on_integers = are_exact(*DELTA_RULES, backend="tpu", where=is_usual)
test_is_no_worse_than_the_gpu = are_no_worse(*DELTA_RULES)


@pytest.mark.tpu
@pytest.mark.parametrize(("held", "width"), [(True, 16), (False, 16), (True, 128)])
def test_gradients_of_several_blocks_agree_with_the_golden(held, width, monkeypatch):
    """Three of two chunks: the state before each is kept on the way there, and taken on the way back, as k and v are
    where they fit."""
    pytest.importorskip("jax")
    from tpu_kernels._lib import delta_plan

    backward = CHUNK_GATED_DELTA_RULE[1]
    shape = dict(B=1, T=80, H=1, HV=2, K=width, V=width)
    (case,) = backward.grid([shape], dtype=[F32], chunk=[16], h0=[True], ht=[True])
    problem = DeltaProblem(1, 80, 1, 2, width, width, 1, width**-0.5, F32, packed=False, l2norm=False)
    monkeypatch.setattr(delta_plan, "BLOCK_TOKENS", 32)
    if not held:
        monkeypatch.setattr(delta_plan, "vmem_limit", lambda: 0)
    plan = delta_plan.make_plan(problem, False, backward=True, chunk_size=16)
    assert plan.fused and plan.scan.blocks == 3 and plan.holds == held
    assert judge(Trial(backward, case, "tpu")).verdict.outcome == "AGREES"
