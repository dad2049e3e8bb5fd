"""The block-scaled matmuls on the TPU, or its emulation, against the golden."""

import pytest

from parity.judging.judge import judge
from parity.trial import Trial
from tests.matrix.quantized_gmm import E4M3, E5M2, F32, GMM_QUANTIZED, I8, TGMM_QUANTIZED
from tests.support.agreement import agree, are_exact, are_no_worse

test_agrees_with_golden = agree(GMM_QUANTIZED, TGMM_QUANTIZED, backend="tpu")
test_is_exact_on_integers = are_exact(GMM_QUANTIZED, TGMM_QUANTIZED, backend="tpu")
test_is_no_worse_than_the_gpu = are_no_worse(GMM_QUANTIZED, TGMM_QUANTIZED)


FULL = pytest.mark.full


@pytest.mark.tpu
@pytest.mark.parametrize(
    ("op", "sizes", "layout", "rhs", "tile", "generation"),
    [
        pytest.param(GMM_QUANTIZED, dict(K=512, N=260), ("1xK", "1xKx1"), E5M2, (32, 512, 384), 6, marks=FULL),
        (GMM_QUANTIZED, dict(K=650, N=40), ("1xK", "GxKxN"), E4M3, (32, 512, 128), 5),
        (GMM_QUANTIZED, dict(K=256, N=260), ("1x128", "1x128x26"), E4M3, (64, 256, 384), 6),
        pytest.param(GMM_QUANTIZED, dict(K=384, N=256), ("1x128", "1x128x128"), I8, (128, 256, 256), 5, marks=FULL),
        pytest.param(TGMM_QUANTIZED, dict(K=130, N=520), ("Mx1", "Mx1"), E5M2, (288, 256, 640), 6, marks=FULL),
        (TGMM_QUANTIZED, dict(K=130, N=520), ("128x1", "64x1"), E4M3, (256, 256, 640), 5),
    ],
    ids=["gmm", "gmm in steps", "gmm by blocks", "gmm int8 by tiles", "tgmm", "tgmm by blocks"],
)
def test_operands_are_multiplied_as_older_chips_do(monkeypatch, op, sizes, layout, rhs, tile, generation):
    """An emulated chip is the newest. No other test has these sizes: a compiled kernel would be found again."""
    monkeypatch.setattr("tpu_kernels._lib.chip.generation", lambda: generation)
    rows = {"M": 640, "G": 2}
    blocks = {"lhs_blocks": [layout[0]], "rhs_blocks": [layout[1]]}
    (case,) = op.grid(
        [rows | sizes],
        dtype=[(I8 if rhs == I8 else E4M3, F32)],
        rhs_dtype=[rhs],
        tiling=[tile],
        groups=["straddle"],
        **blocks,
    )
    for data in (case, case.with_data("integers")):
        judged = judge(Trial(op, data, "tpu"))
        assert judged.verdict.passed, judged.verdict
