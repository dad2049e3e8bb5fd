"""gmm and tgmm on the TPU, or its emulation, against the float64 golden."""

import pytest

from parity.judging.judge import judge
from parity.trial import Trial
from tests.matrix.gmm import GMM, TGMM
from tests.support.agreement import agree, are_exact, are_no_worse

test_agrees_with_golden = agree(GMM, TGMM, backend="tpu")
test_is_exact_on_integers = are_exact(GMM, TGMM, backend="tpu")
test_is_no_worse_than_the_gpu = are_no_worse(GMM, TGMM)


@pytest.mark.tpu
@pytest.mark.parametrize(
    ("op", "sizes", "tile", "generation"),
    [
        (GMM, dict(M=70, K=400, N=41, G=3), (32, 384, 128), 6),
        (GMM, dict(M=70, K=384, N=41, G=3), (32, 384, 128), 5),
        (TGMM, dict(M=300, K=40, N=51, G=3), (256, 128, 128), 6),
    ],
    ids=["gmm", "gmm in one step", "tgmm"],
)
def test_a_step_in_several_dots_is_exact_on_integers(monkeypatch, op, sizes, tile, generation):
    """As chips before tpu7x have it; an emulated one is the newest. No other test has these sizes: none is compiled."""
    pytest.importorskip("jax")
    monkeypatch.setattr("tpu_kernels._lib.chip.generation", lambda: generation)
    (case,) = op.grid([sizes], dtype=["float32"], tiling=[tile], groups=["straddle"])
    judged = judge(Trial(op, case.with_data("integers"), "tpu"))
    assert judged.verdict.passed, judged.verdict
