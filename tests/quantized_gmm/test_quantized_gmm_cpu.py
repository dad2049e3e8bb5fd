"""The goldens of quantised arithmetic: against formats written out here, exact rationals and finite differences."""

from fractions import Fraction

import ml_dtypes
import numpy as np
import pytest

from cpu_golden.gmm import gmm
from cpu_golden.grouped_dense import grouped_dense, grouped_dense_bwd
from cpu_golden.quantize import fp8_dequantize, fp8_dual_quantize, fp8_quantize, int8_dequantize, int8_quantize
from cpu_golden.quantized_gmm import gmm_quantized, gmm_quantized_definition, tgmm_quantized, tgmm_quantized_definition
from cpu_golden.stages import Stages
from parity.inputs import draw
from tests.gmm.test_gmm_cpu import without_tiles
from tests.matrix.quantized_gmm import GMM_QUANTIZED, TGMM_QUANTIZED
from tests.support.formats import BITS_OF, FORMATS, decode, quantise

# The definition knows nothing of tiles, and of dtypes only their values: one case for each of what is left.
DISTINCT = {
    (op.name, case.dims, case.dtype, case.data, tuple(o for o in case.options if o[0] != "tiling")): (op, case)
    for op in (GMM_QUANTIZED, TGMM_QUANTIZED)
    for case in op.cases
    if case.tier != "full" and not case.model
}


@pytest.mark.parametrize(("op", "case"), [pytest.param(op, case, id=case.id) for op, case in DISTINCT.values()])
def test_golden_is_the_matmul_of_dequantised_operands(op, case):
    inputs, arguments = draw(op, case), without_tiles(op.arguments(case))
    definition = {GMM_QUANTIZED: gmm_quantized_definition, TGMM_QUANTIZED: tgmm_quantized_definition}[op]
    with np.errstate(invalid="ignore"):
        golden, expected = op.golden(**inputs, **arguments), definition(**inputs, **arguments)
        magnitude = op.magnitude(op, case, inputs)
    assert golden.dtype == expected.dtype == np.float64
    finite = np.isfinite(golden)
    assert np.array_equal(finite, np.isfinite(expected))
    assert np.all(np.abs(golden[finite] - expected[finite]) <= 1e-12 * magnitude[finite])


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
    seen = {}

    def watch(site, value):
        seen[site] = seen.get(site, 0) + 1
        return value

    staged = gmm_quantized(*operands, sizes, stages=Stages(watch, depth=32))
    # Two groups, four blocks of 64, two steps in each.
    by_block = dict.fromkeys(["lhs", "rhs", "lhs_scale", "rhs_scale", "scale", "scaled", "acc"], 8)
    expected = {**by_block, "partial": 16, "inner": 16, "out": 1}
    assert seen == expected
    np.testing.assert_allclose(staged, gmm_quantized(*operands, sizes), rtol=1e-12, atol=1e-12)


# --- the quantisers ---


@pytest.mark.parametrize("name", FORMATS)
def test_the_formats_are_ocps(name):
    """ml_dtypes' tables are those of the formats written out here: every code."""
    if name == "int8":
        return
    codes = np.arange(256, dtype=np.uint8)
    theirs = codes.view(getattr(ml_dtypes, name)).astype(np.float64)
    np.testing.assert_array_equal(decode(name)[codes], theirs)


def patterns(dtype):
    """Every bit pattern of a 16-bit float, [512, 128]."""
    return np.arange(65536, dtype=np.uint16).view(dtype).reshape(512, 128)


def with_known_scale(dtype, largest, exponent):
    """Every bit pattern, 127 to a row, behind one element that makes the scale 2^exponent wherever it is the largest.

    Then every midpoint between two codes that the dtype can hold is met as a tie.
    """
    every = np.resize(np.arange(65536, dtype=np.uint16), 517 * 127).view(dtype).reshape(517, 127)
    pin = np.full((517, 1), largest * 2.0**exponent).astype(dtype)
    return np.concatenate([pin, every], axis=1)


@pytest.mark.parametrize("dtype", [ml_dtypes.bfloat16, np.float16], ids=["bf16", "f16"])
@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")  # NaN on purpose
def test_quantisers_are_nearest_by_exhaustive_search(name, dtype):
    """Every bf16 and float16 pattern, in blocks of mixed and of equal size, with ties."""
    largest = FORMATS[name].largest
    every = [patterns(dtype), np.sort(np.nan_to_num(patterns(dtype)).ravel()).reshape(512, 128)]
    every += [with_known_scale(dtype, largest, e) for e in (-6, 0)]
    for x in every:
        for axis, block in [(1, None), (1, 32), ((0, 1), None)]:
            if block and x.shape[1] % block:
                continue
            if name == "int8":
                got = int8_quantize(x, axis, block, check_finite=False)
            else:
                got = fp8_quantize(x, axis, block, dtype=name, check_finite=False)
            codes, scale = quantise(x, got.scale.shape, name)
            assert got.scale.tobytes() == scale.tobytes()
            assert got.qvalue.tobytes() == codes.tobytes()


@pytest.mark.parametrize("name", FORMATS)
def test_edges_of_float32(name):
    """Zero blocks, subnormal ones, scales that would be subnormal, the largest values, ±0."""
    rng = np.random.default_rng(2)
    sizes = [0, 1e-40, 1e-38, 2e-38, 1e-36, 1, 3e38]
    x = (rng.uniform(-1, 1, (len(sizes), 64)) * np.array(sizes)[:, None]).astype(np.float32)
    x[:, :2] = [0.0, -0.0]
    call = int8_quantize if name == "int8" else lambda x, *a: fp8_quantize(x, *a, dtype=name)
    got = call(x, 1, None)
    codes, scale = quantise(x, got.scale.shape, name)
    assert got.scale.tobytes() == scale.tobytes()
    assert got.qvalue.tobytes() == codes.tobytes()
    assert got.scale[0] == got.scale[1] == 1
    assert (got.scale >= np.finfo(np.float32).tiny).all()


def test_every_byte_is_dequantised():
    for name in FORMATS:
        codes = np.arange(256, dtype=np.uint8).view(BITS_OF[name])
        scale = np.array([0.1], np.float32)
        got = (int8_dequantize if name == "int8" else fp8_dequantize)(codes, scale)
        expected = (decode(name) * np.float64(scale[0])).astype(np.float32)  # 8 and 24 digits: exact before rounding
        np.testing.assert_array_equal(got, expected)


def test_the_dual_quantiser_is_two_quantisers():
    x = np.random.default_rng(3).standard_normal((2, 64, 128)).astype(ml_dtypes.bfloat16)
    dual = fp8_dual_quantize(x, 32)
    for got, expected in zip(dual, (*fp8_quantize(x, -1, 32), *fp8_quantize(x, -2, 32)), strict=True):
        assert got.tobytes() == expected.tobytes()


# --- the layer ---

M, K, N, SIZES = 12, 8, 6, np.array([3, 0, 4, 2], np.int32)


def difference(function, x, index, step=1e-5):
    up, down = x.copy(), x.copy()
    up[index] += step
    down[index] -= step
    return (function(up) - function(down)) / (2 * step)


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
    primals = {"lhs": lhs, "rhs": rhs, "existing_out": kept}
    for name, x in primals.items():

        def loss(moved, name=name):
            given = primals | {name: moved}
            out = grouped_dense(given["lhs"], given["rhs"], SIZES, given["existing_out"], **options)
            return float((out * dout).sum())

        grad = getattr(grads, name)
        assert grad.shape == x.shape
        for index in np.ndindex(x.shape):
            assert grad[index] == pytest.approx(difference(loss, x, index), rel=1e-6, abs=1e-8)


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
    lhs, dout = rng.standard_normal((384, 256)), rng.standard_normal((384, 256))
    rhs = rng.standard_normal((2, 256, 256)) / 16
    lhs, rhs, dout = (x.astype(ml_dtypes.bfloat16) for x in (lhs, rhs, dout))
    sizes = np.array([200, 184], np.int32)
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
        seen = []
        stages = Stages(lambda site, value, seen=seen: seen.append(site) or value, depth)
        grouped_dense_bwd(lhs, rhs, sizes, dout, transpose_rhs=transpose_rhs, stages=stages)
        assert (seen.count("dlhs"), seen.count("drhs")) == (over_n, over_rows)
        assert seen.count("partial") == over_n + over_rows and "acc" not in seen
