"""The goldens of the block-scaled matmuls: against dequantised operands and exact rationals, and their stages."""

from collections import Counter
from fractions import Fraction

import numpy as np
import pytest

from cpu_golden.quantize import fp8_quantize
from cpu_golden.quantized_gmm import gmm_quantized, gmm_quantized_definition, tgmm_quantized, tgmm_quantized_definition
from tests.matrix.quantized_gmm import GMM_QUANTIZED, TGMM_QUANTIZED
from tests.support.definitions import check_definition, distinct
from tests.support.sites import watched


@pytest.mark.parametrize(("op", "case"), distinct(GMM_QUANTIZED, TGMM_QUANTIZED))
def test_golden_is_the_matmul_of_dequantised_operands(op, case):
    check_definition(op, case, {GMM_QUANTIZED: gmm_quantized_definition, TGMM_QUANTIZED: tgmm_quantized_definition}[op])


def fraction(x):
    return Fraction(float(x))


def test_goldens_against_exact_rationals():
    rng = np.random.default_rng(0)
    lhs, rhs = rng.standard_normal((9, 256)).astype(np.float32), rng.standard_normal((2, 256, 128)).astype(np.float32)
    (a, a_scale), (b, b_scale) = fp8_quantize(lhs, 1, 64), fp8_quantize(rhs, (1, 2), 128)
    sizes = np.array([4, 3], np.int32)
    out = gmm_quantized(a, a_scale, b, b_scale, sizes)
    for m, n in [(0, 0), (3, 127), (4, 0), (6, 77)]:
        g = int(m >= 4)
        expected = sum(
            fraction(a[m, k]) * fraction(a_scale[m, k // 64]) * fraction(b[g, k, n]) * fraction(b_scale[g, k // 128, 0])
            for k in range(256)
        )
        assert out[m, n] == pytest.approx(float(expected), rel=1e-12, abs=1e-12)
    assert np.all(out[7:] == 0)
    rows = rng.integers(-127, 128, (96, 3)).astype(np.int8)
    scale = rng.uniform(0.5, 2, (3, 3)).astype(np.float32)  # blocks of 32 rows
    grads = tgmm_quantized(rows, scale, rows, scale, np.array([40, 50], np.int32))
    for group, members in enumerate([range(40), range(40, 90)]):
        expected = sum(
            fraction(rows[r, 1]) * fraction(scale[r // 32, 1]) * fraction(rows[r, 2]) * fraction(scale[r // 32, 2])
            for r in members
        )
        assert grads[group, 1, 2] == pytest.approx(float(expected), rel=1e-12, abs=1e-12)


def test_stages_see_every_site_and_change_nothing_by_themselves():
    rng = np.random.default_rng(1)
    lhs, rhs = rng.standard_normal((12, 256)).astype(np.float32), rng.standard_normal((3, 256, 4)).astype(np.float32)
    operands = (*fp8_quantize(lhs, 1, 64), *fp8_quantize(rhs, 1, 128))
    sizes = np.array([5, 0, 7], np.int32)
    stages, seen = watched(depth=32)
    staged = gmm_quantized(*operands, sizes, stages=stages)
    # Two groups, four blocks of 64, two steps in each.
    by_block = dict.fromkeys(["lhs", "rhs", "lhs_scale", "rhs_scale", "scale", "scaled", "acc"], 8)
    assert Counter(seen) == {**by_block, "partial": 16, "inner": 16, "out": 1}
    np.testing.assert_allclose(staged, gmm_quantized(*operands, sizes), rtol=1e-12, atol=1e-12)
