"""The gated linear attentions on the GPU, or its emulation, against the float64 golden."""

import pytest

import parity
from parity.judging.judge import judge
from parity.trial import Trial
from tests.matrix.gla import F32, GATED_LINEAR_ATTENTION, has_usual_decay


@parity.cases(*GATED_LINEAR_ATTENTION, backend="gpu")
def test_agrees_with_golden(run):
    run.agrees()


@parity.cases(*GATED_LINEAR_ATTENTION, backend="gpu", data="integers", where=has_usual_decay)
def test_is_exact_on_integers(run):
    run.is_exact()


@pytest.mark.gpu
@pytest.mark.parametrize("op", [op for op in GATED_LINEAR_ATTENTION if "recurrent" in op.name], ids=lambda op: op.name)
def test_a_state_in_several_tiles_is_exact_on_integers(op):
    """Of K as of V; in the default tier of the matrix no state is larger than a tile."""
    pytest.importorskip("triton")
    gates = {"gates": ["both"]} if "gates" in op.defaults else {}
    (case,) = op.grid([dict(B=1, T=3, H=2, K=80, V=72)], dtype=[F32], h0=[True], ht=[True], **gates)
    judged = judge(Trial(op, case.with_data("integers"), "gpu"))
    assert judged.verdict.passed, judged.verdict
