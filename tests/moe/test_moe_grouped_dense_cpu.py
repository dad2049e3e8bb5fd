"""The goldens of the quantised matmul and its gradients: against finite differences and the quantisers."""

import ml_dtypes
import numpy as np
import pytest

from cpu_golden.gmm import gmm
from cpu_golden.grouped_dense import grouped_dense, grouped_dense_bwd
from cpu_golden.quantize import fp8_dequantize, fp8_quantize
from tests.support.differences import check_differences
from tests.support.sites import watched

M, K, N, SIZES = 12, 8, 6, np.array([3, 0, 4, 2], np.int32)


@pytest.mark.parametrize("transpose_rhs", [False, True])
@pytest.mark.parametrize("offset", [0, 1])
def test_gradients_are_those_of_finite_differences(transpose_rhs, offset):
    """The unquantised layer is linear in each of its arguments: its differences are exact but for rounding."""
    rng = np.random.default_rng(4)
    groups = 3
    lhs, kept, dout = rng.standard_normal((M, K)), rng.standard_normal((M, N)), rng.standard_normal((M, N))
    rhs = rng.standard_normal((groups, N, K) if transpose_rhs else (groups, K, N))
    options = dict(group_offset=offset, transpose_rhs=transpose_rhs, quantize=False, bwd_quantize=False)
    grads = grouped_dense_bwd(lhs, rhs, SIZES, dout, kept, **options)

    def loss(given):
        return (grouped_dense(group_sizes=SIZES, **given, **options) * dout).sum()

    check_differences(loss, {"lhs": lhs, "rhs": rhs, "existing_out": kept}, grads, within=1e-8)


@pytest.mark.parametrize("bwd_quantize", [False, True])
@pytest.mark.parametrize("quantize", [False, True])
@pytest.mark.parametrize("transpose_rhs", [False, True])
def test_gradients_have_their_structure(quantize, bwd_quantize, transpose_rhs):
    rng = np.random.default_rng(5)
    sizes = np.array([40, 0, 70, 30, 0], np.int32)
    lhs, dout = (rng.standard_normal((160, 64)).astype(np.float32) for _ in range(2))
    rhs = rng.standard_normal((3, 64, 64)).astype(np.float32)
    options = dict(group_offset=1, transpose_rhs=transpose_rhs, block_size=32)
    exact = grouped_dense_bwd(lhs, rhs, sizes, dout, dout, **options)
    grads = grouped_dense_bwd(lhs, rhs, sizes, dout, dout, quantize=quantize, bwd_quantize=bwd_quantize, **options)
    active = slice(40, 140)
    assert np.all(grads.existing_out[active] == 0)
    assert np.array_equal(np.delete(grads.existing_out, np.r_[active], 0), np.delete(dout, np.r_[active], 0))
    assert np.all(np.delete(grads.lhs, np.r_[active], 0) == 0)
    assert np.all(grads.rhs[0] == 0)  # group 1 has no rows
    for got, expected in zip(grads[:2], exact[:2], strict=True):
        error = np.linalg.norm(got - expected) / np.linalg.norm(expected)
        assert error < 0.05 if quantize or bwd_quantize else error == 0
        assert error > 0.01 or not (quantize or bwd_quantize)


def test_block_size_and_each_pass_choose_what_is_quantised():
    rng = np.random.default_rng(6)
    lhs, rhs = rng.standard_normal((64, 128)).astype(np.float32), rng.standard_normal((2, 128, 64)).astype(np.float32)
    sizes = np.array([30, 34], np.int32)
    assert np.array_equal(grouped_dense(lhs, rhs, sizes, quantize=False, bwd_quantize=True), gmm(lhs, rhs, sizes))
    outs = [grouped_dense(lhs, rhs, sizes, quantize=True, block_size=b) for b in (32, 64, None)]
    for block, out in zip((32, 64, None), outs, strict=True):
        a = fp8_dequantize(*fp8_quantize(lhs, 1, block)).astype(np.float64)
        b = fp8_dequantize(*fp8_quantize(rhs, (1, 2), block)).astype(np.float64)
        np.testing.assert_allclose(out, gmm(a, b, sizes), rtol=1e-5, atol=1e-5)  # dequantised: rounded to float32
    errors = [np.linalg.norm(a - b) / np.linalg.norm(b) for a in outs for b in outs if a is not b]
    assert min(errors) > 1e-3


@pytest.mark.parametrize("transpose_rhs", [False, True])
def test_fp8_gradients_are_within_five_percent(transpose_rhs):
    """Frobenius error of fp8 gradients on normal data, both passes quantised; benchmarks/fp8_precision.py has more."""
    rng = np.random.default_rng(7)
    lhs, dout = rng.standard_normal((360, 256)), rng.standard_normal((360, 256))
    rhs = rng.standard_normal((2, 256, 256)) / 16
    lhs, rhs, dout = (x.astype(ml_dtypes.bfloat16) for x in (lhs, rhs, dout))
    sizes = np.array([200, 160], np.int32)
    exact = grouped_dense_bwd(lhs, rhs, sizes, dout, transpose_rhs=transpose_rhs)
    for block in (128, 256):
        options = dict(transpose_rhs=transpose_rhs, quantize=True, bwd_quantize=True, block_size=block)
        grads = grouped_dense_bwd(lhs, rhs, sizes, dout, **options)
        for got, expected in zip(grads[:2], exact[:2], strict=True):
            assert 0.01 < np.linalg.norm(got - expected) / np.linalg.norm(expected) < 0.05


@pytest.mark.parametrize("transpose_rhs", [False, True])
def test_a_look_up_of_tiles_is_asked_for_each_matmul_of_the_layer(transpose_rhs):
    rng = np.random.default_rng(8)
    lhs, dout = rng.standard_normal((12, 10)), rng.standard_normal((12, 6))
    rhs = rng.standard_normal((3, 6, 10) if transpose_rhs else (3, 10, 6))
    sizes, asked = np.array([5, 0, 7], np.int32), []

    def look_up(*size):
        asked.append(size)
        return size

    grouped_dense(lhs, rhs, sizes, transpose_rhs=transpose_rhs, tiling=look_up)
    assert asked == [(12, 10, 6)]
    asked.clear()
    grouped_dense_bwd(lhs, rhs, sizes, dout, transpose_rhs=transpose_rhs, tiling=look_up)
    assert asked == [(12, 6, 10), (12, 6, 10) if transpose_rhs else (12, 10, 6)]


@pytest.mark.parametrize("transpose_rhs", [False, True])
def test_the_gradients_of_the_layer_are_summed_in_steps_over_n_and_over_rows(transpose_rhs):
    rng = np.random.default_rng(8)
    lhs, dout = rng.standard_normal((12, 10)), rng.standard_normal((12, 6))
    rhs = rng.standard_normal((3, 6, 10) if transpose_rhs else (3, 10, 6))
    sizes = np.array([5, 0, 7], np.int32)
    for depth, over_n, over_rows in ((2, 3 + 3, 3 + 4), (4, 2 + 2, 2 + 2), (None, 2, 2)):
        stages, seen = watched(depth=depth)
        grouped_dense_bwd(lhs, rhs, sizes, dout, transpose_rhs=transpose_rhs, stages=stages)
        assert (seen.count("dlhs"), seen.count("drhs")) == (over_n, over_rows)
        assert seen.count("partial") == over_n + over_rows and "acc" not in seen
