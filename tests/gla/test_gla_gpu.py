"""The gated linear attentions on the GPU, or its emulation, against the float64 golden."""

import numpy as np
import pytest

from parity.judging.judge import judge
from parity.trial import Trial
from tests.matrix.gla import F32, FUSED_RECURRENT_GLA, FUSED_RECURRENT_SIMPLE_GLA, GATED_LINEAR_ATTENTION
from tests.support.agreement import agree, agree_in_blocks, are_exact
from tests.support.interpreter import interpreted

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


@interpreted
@pytest.mark.gpu
def test_a_dot_of_an_older_triton_has_the_same_bits(monkeypatch):
    """It has twice the depth, and a zero after each element."""
    tl = pytest.importorskip("triton.language")
    from gpu_reference._lib import chunk_dots

    op = next(op for op in GATED_LINEAR_ATTENTION if op.name == "fused_chunk_simple_gla_bwd")
    (case,) = op.grid([dict(B=1, T=40, H=1, K=64, V=48)], dtype=[F32], h0=[True], ht=[True], chunk=[16])
    trial = Trial(op, case, "gpu")
    expected = trial.run()
    monkeypatch.setattr(chunk_dots, "DEPTH", tl.constexpr(2 * chunk_dots.PIECE.value))
    for name, result in trial.run().items():
        np.testing.assert_array_equal(result, expected[name], err_msg=name)
