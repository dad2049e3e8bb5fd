"""grouped_gemm: its golden, groups of any size, the paths it takes, and that nothing of it waits for the host."""

from functools import partial

import ml_dtypes
import numpy as np
import pytest

from cpu_golden.grouped_gemm import grouped_gemm, grouped_gemm_definition
from cpu_golden.mxfp8 import mxfp8_dequantize, mxfp8_dual_quantize, mxfp8_quantize
from cpu_golden.swizzle import swizzle_scales
from parity.interop import to_jax
from tests.matrix.mxfp8 import GROUPED_GEMM
from tests.mxfp8.test_mxfp8_laws import EVERYWHERE
from tests.support.definitions import check_definition, distinct
from tests.support.functions import run

E4M3, E8M0 = ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e8m0fnu
SIZES = np.array([0, 1, 31, 32, 33, 127, 128, 129, 0], np.int32)
M, K, N = 520, 96, 40  # 39 rows belong to no group


@pytest.mark.parametrize(("op", "case"), distinct(GROUPED_GEMM))
def test_golden_is_the_matmul_of_dequantised_operands(op, case):
    check_definition(op, case, grouped_gemm_definition)


def test_forward_and_both_gradients_are_those_of_the_dequantised_operands():
    """One pass over x and over w gives what all three products need; the swizzled scales are the same ones."""
    rng = np.random.default_rng(0)
    x, dout = rng.standard_normal((M, K)).astype(np.float32), rng.standard_normal((M, N)).astype(np.float32)
    w = rng.standard_normal((len(SIZES), K, N)).astype(np.float32)
    xq, wq, dq = (mxfp8_dual_quantize(a) for a in (x, w, dout))
    of_row = np.repeat(np.arange(len(SIZES)), SIZES)
    active = slice(0, len(of_row))

    def both(lhs, rhs, lhs_scale, rhs_scale, axes, **options):
        plain = grouped_gemm(lhs, rhs, SIZES, lhs_scale=lhs_scale, rhs_scale=rhs_scale, **options)
        left, right = (
            swizzle_scales(np.ascontiguousarray(np.moveaxis(s, axis, -1)))
            for s, axis in zip((lhs_scale, rhs_scale), axes, strict=True)
        )
        swizzled = grouped_gemm(lhs, rhs, SIZES, lhs_scale=left, rhs_scale=right, scale_layout="swizzled", **options)
        np.testing.assert_array_equal(swizzled, plain)
        return plain

    out = both(xq.rowwise, wq.columnwise, xq.rowwise_scale, wq.columnwise_scale, (1, 1))
    xr, wc = (mxfp8_dequantize(*pair).astype(np.float64) for pair in (xq[:2], wq[2:]))
    np.testing.assert_allclose(out[active], np.einsum("mk,mkn->mn", xr[active], wc[of_row]), rtol=1e-12, atol=1e-12)
    dx = both(dq.rowwise, wq.rowwise, dq.rowwise_scale, wq.rowwise_scale, (1, 2), transpose_rhs=True)
    dr, wr = (mxfp8_dequantize(*pair).astype(np.float64) for pair in (dq[:2], wq[:2]))
    np.testing.assert_allclose(dx[active], np.einsum("mn,mkn->mk", dr[active], wr[of_row]), rtol=1e-12, atol=1e-12)
    dw = both(xq.columnwise, dq.columnwise, xq.columnwise_scale, dq.columnwise_scale, (0, 0), ragged="contracting")
    xc, dc = (mxfp8_dequantize(*pair).astype(np.float64) for pair in (xq[2:], dq[2:]))
    for group in range(len(SIZES)):
        rows = np.flatnonzero(of_row == group)
        np.testing.assert_allclose(dw[group], xc[rows].T @ dc[rows], rtol=1e-12, atol=1e-12)
    assert not out[active.stop :].any()
    assert not dw[0].any()


@pytest.mark.parametrize("ragged", ["lhs", "contracting"])
@pytest.mark.parametrize("backend", EVERYWHERE)
def test_groups_of_any_size_are_exact_and_the_tail_is_not_read(backend, ragged):
    """0, 1, 31, 32, 33, 127, 128 and 129 rows, so that blocks of 32 rows have rows of up to three groups."""
    rng = np.random.default_rng(1)
    axis = 1 if ragged == "lhs" else 0
    lhs = rng.integers(-2, 3, (M, K)).astype(E4M3)
    rhs = rng.integers(-2, 3, (len(SIZES), K, N) if ragged == "lhs" else (M, N)).astype(E4M3)

    def scale_of(operand):
        blocks = [-(-n // 32) if a == axis else n for a, n in enumerate(operand.shape)]
        return (2.0 ** rng.integers(-1, 2, blocks)).astype(E8M0)

    lhs_scale, rhs_scale = scale_of(lhs), scale_of(rhs)
    multiply = partial(run, backend, "grouped_gemm", ragged=ragged, preferred_element_type="float32")
    expected = grouped_gemm(lhs, rhs, SIZES, lhs_scale=lhs_scale, rhs_scale=rhs_scale, ragged=ragged)
    end = SIZES.sum()
    lhs[end:] = np.nan
    if ragged == "lhs":
        lhs_scale[end:] = np.nan
        rhs[SIZES == 0], rhs_scale[SIZES == 0] = np.nan, np.nan
    else:
        rhs[end:] = np.nan
        lhs_scale[-(-end // 32) :], rhs_scale[-(-end // 32) :] = np.nan, np.nan
    inputs = {"lhs": lhs, "rhs": rhs, "group_sizes": SIZES, "lhs_scale": lhs_scale, "rhs_scale": rhs_scale}
    np.testing.assert_array_equal(multiply(inputs), expected)
    assert np.count_nonzero(expected) > expected.size // 2


@pytest.mark.parametrize("form", ["forward", "transposed"])
@pytest.mark.parametrize("backend", EVERYWHERE)
def test_a_last_step_that_is_short_has_powers_of_its_own(backend, form):
    """Of 320 columns in steps of 256, whose blocks of scales are not whole steps."""
    rng, sizes, k = np.random.default_rng(2), np.array([40, 56], np.int32), 320
    shape, scales = ((24, k), (24, k // 32)) if form == "transposed" else ((k, 24), (k // 32, 24))
    inputs = {
        "lhs": rng.integers(-2, 3, (96, k)).astype(E4M3),
        "rhs": rng.integers(-2, 3, (2, *shape)).astype(E4M3),
        "group_sizes": sizes,
        "lhs_scale": (2.0 ** rng.integers(-1, 2, (96, k // 32))).astype(E8M0),
        "rhs_scale": (2.0 ** rng.integers(-1, 2, (2, *scales))).astype(E8M0),
    }
    options = {"transpose_rhs": form == "transposed", "tiling": (32, 256, 128)}
    got = run(backend, "grouped_gemm", inputs, preferred_element_type="float32", **options)
    np.testing.assert_array_equal(got, grouped_gemm_definition(**inputs, transpose_rhs=form == "transposed"))


@pytest.mark.parametrize("form", ["forward", "transposed", "contracting"])
@pytest.mark.parametrize("backend", EVERYWHERE)
def test_a_scale_of_nan_is_in_its_sums_and_no_others(backend, form):
    """Whichever block of a line it is of, of any tile, and where infinity in its place would stay infinity."""
    sizes, m, k, n = np.array([40, 56], np.int32), 96, 300, 24

    def ones(shape, axis, *nan):
        scale = np.ones([-(-size // 32) if a == axis else size for a, size in enumerate(shape)], E8M0)
        for at in nan:
            scale[at] = np.nan
        return np.ones(shape, E4M3), scale

    if form == "contracting":
        lhs, rhs = ones((m, k), 0, (0, 4), (2, 7)), ones((m, n), 0, (1, 9))
        expected = np.repeat(sizes, k * n).reshape(2, k, n).astype(np.float32)
        expected[0, 4], expected[1, 7], expected[:, :, 9] = np.nan, np.nan, np.nan  # rows 32 to 63 are of both groups
        options = {"ragged": form, "tiling": (64, 256, 128)}
    else:
        lhs = ones((m, k), 1, (5, 1), (70, 5), (80, 9))
        rhs = ones((2, n, k), 2, (0, 7, 6)) if form == "transposed" else ones((2, k, n), 1, (0, 6, 7))
        expected = np.full((m, n), k, np.float32)
        expected[[5, 70, 80]], expected[:40, 7] = np.nan, np.nan
        options = {"transpose_rhs": form == "transposed", "tiling": (32, 256, 128)}
    inputs = {"lhs": lhs[0], "rhs": rhs[0], "group_sizes": sizes, "lhs_scale": lhs[1], "rhs_scale": rhs[1]}
    got = run(backend, "grouped_gemm", inputs, preferred_element_type="float32", **options)
    np.testing.assert_array_equal(got, expected)


@pytest.mark.tpu
@pytest.mark.parametrize("ragged", ["lhs", "contracting"])
def test_nothing_waits_for_the_host(ragged):
    """Group sizes and the offset have no values while it is traced, quantising included."""
    jax = pytest.importorskip("jax")
    from tpu_kernels import grouped_gemm, mxfp8

    axis = 1 if ragged == "lhs" else 0

    def step(x, w, group_sizes, group_offset):
        a, b = mxfp8.mxfp8_quantize(x, axis), mxfp8.mxfp8_quantize(w, axis)
        groups = {} if ragged == "lhs" else {"num_actual_groups": 4}
        return grouped_gemm.grouped_gemm(
            a.qvalue, b.qvalue, group_sizes, lhs_scale=a.scale, rhs_scale=b.scale, ragged=ragged,
            group_offset=group_offset, **groups,
        )  # fmt: skip

    w = jax.ShapeDtypeStruct((4, K, N) if ragged == "lhs" else (M, N), "bfloat16")
    x, int32 = jax.ShapeDtypeStruct((M, K), "bfloat16"), partial(jax.ShapeDtypeStruct, dtype="int32")
    out = jax.eval_shape(step, x, w, int32((9,)), int32(()))
    assert out.shape == ((M, N) if ragged == "lhs" else (4, K, N))
    assert out.dtype == "bfloat16"


@pytest.mark.tpu
def test_each_path_says_why_and_strict_takes_no_fallback():
    pytest.importorskip("jax")
    from tpu_kernels.grouped_gemm import grouped_gemm, grouped_gemm_support

    e4m3, e5m2, bf16, f32 = "float8_e4m3fn", "float8_e5m2", "bfloat16", "float32"
    for pair, path, fallback in [
        ((e4m3, e4m3), "bfloat16", False),
        ((e4m3, e5m2), "bfloat16", False),
        ((bf16, e4m3), "bfloat16", False),
        ((e5m2, bf16), "bfloat16", False),
        ((bf16, bf16), "unquantised", False),
        ((f32, f32), "unquantised", False),
        ((f32, e4m3), "float32", True),
    ]:
        support = grouped_gemm_support(*pair)
        assert (support.path, support.fallback) == (path, fallback)
        assert support.reason

    rng = np.random.default_rng(0)
    x = mxfp8_quantize(rng.standard_normal((8, 64)).astype(np.float32), 1)
    w = mxfp8_quantize(rng.standard_normal((2, 64, 8)).astype(np.float32), 1)
    sizes = to_jax(np.array([3, 5], np.int32))
    multiply = partial(grouped_gemm, to_jax(x.qvalue), to_jax(w.qvalue), sizes)
    plain = multiply(lhs_scale=to_jax(x.scale), rhs_scale=to_jax(w.scale), strict=True)
    swizzled = {
        "lhs_scale": to_jax(swizzle_scales(x.scale)),
        "rhs_scale": to_jax(swizzle_scales(np.ascontiguousarray(w.scale.swapaxes(1, 2)))),
        "scale_layout": "swizzled",
    }
    np.testing.assert_array_equal(np.asarray(multiply(**swizzled)), np.asarray(plain))
    with pytest.raises(ValueError, match="strict must be False for a fallback, bfloat16: the scales are for a GPU"):
        multiply(**swizzled, strict=True)
