"""The inputs: the same bytes everywhere, each distribution what it says, group sizes that fit."""

import ml_dtypes
import numpy as np
import pytest

from parity.dtypes import numpy_dtype
from parity.inputs import (
    CANCELLATION,
    DISTRIBUTIONS,
    GATES,
    GROUPS,
    OFFSETS,
    SCALES,
    draw,
    group_sizes,
    hashes,
    log_decays,
    stream,
)
from parity.op import Array, Gates, Groups
from tests.matrix import OPS
from tests.matrix.gla import GATED_LINEAR_ATTENTION, build_alibi_slopes, make_alibi_g_gamma
from tests.matrix.gmm import GMM, TGMM
from tests.matrix.moe import GROUPED_DENSE
from tests.matrix.quantize import FP8_QUANTIZE
from tests.matrix.quantized_gmm import GMM_QUANTIZED, TGMM_QUANTIZED

DEFAULT = [(op, case) for op in OPS for case in op.cases if case.tier != "full"]


def find(op, **wanted):
    return next(c for c in op.cases if all(getattr(c, name) == value for name, value in wanted.items()))


def test_the_bytes_of_a_case_never_change():
    """Frozen digests: whoever changes them changes what every recorded error was measured on."""
    case = find(GMM, dtype="bfloat16", groups="zipf", data="normal", tier="smoke")
    assert {name: digest[:16] for name, digest in hashes(draw(GMM, case)).items()} == BYTES
    other = {name: digest[:16] for name, digest in hashes(draw(GMM, case.with_seed(1))).items()}
    assert all(other[name] != digest for name, digest in BYTES.items())


BYTES = {"lhs": "d949f8624f954c7e", "rhs": "a4396c73b2477917", "group_sizes": "5221077f924be1ef"}


def test_an_argument_has_a_key_of_its_own():
    case = find(GMM, existing_out=True, dtype="float32", groups="zipf", M=300)
    drawn = draw(GMM, case)
    flat = {name: x.ravel()[:64].tobytes() for name, x in drawn.items()}
    assert len(set(flat.values())) == len(flat)


@pytest.mark.parametrize("data", DISTRIBUTIONS)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_every_distribution_fits_every_dtype(data, dtype):
    case = find(GMM, dtype=dtype, groups="short", data="normal", M=300).with_data(data)
    drawn = draw(GMM, case)
    for name in ("lhs", "rhs"):
        x = drawn[name]
        assert x.dtype == numpy_dtype(dtype)
        values = x.astype(np.float64)
        if data not in ("poison", "nonfinite", "bits"):
            assert np.all(np.isfinite(values))
        assert np.unique(values[np.isfinite(values)]).size > 3


def values(data, dtype="float32", name="lhs"):
    case = find(GMM, dtype=dtype, groups="short", data="normal", M=300).with_data(data)
    return draw(GMM, case)[name].astype(np.float64)


def test_normal():
    x = values("normal", name="rhs")
    assert abs(x.mean()) < 0.01
    assert abs(x.std() - 1) < 0.01
    assert abs(np.mean(x**4) - 2.85) < 0.05  # Irwin-Hall of eight: 3 - 6 / 40
    assert 3.5 < np.abs(x).max() < 4.9
    significant = np.frexp(x)[0] * 2.0**24
    assert np.mean(significant % 2 == 1) > 0.4  # float32 data use all 24 digits


def test_one_signed():
    x = values("one_signed")
    assert (x > 0).all()
    assert x.max() <= 1
    assert abs(x.mean() - 0.5) < 0.01


def test_correlated_rows_point_the_same_way_and_residuals_are_of_many_sizes():
    rows = values("correlated")
    rows /= np.linalg.norm(rows, axis=1, keepdims=True)
    assert np.median(rows[:-1] @ rows[-1]) == pytest.approx(0.9, abs=0.02)
    sizes = np.log2(np.sqrt(np.mean(values("residuals") ** 2, axis=1)))
    assert (sizes.max(), sizes.min()) == pytest.approx((0, -12), abs=0.2)


def test_correlated_data_of_a_scalar_are_a_number():
    (x,) = DISTRIBUTIONS["correlated"](Array((), "float32"), stream(find(GMM), "eps"), "float32").ravel()
    assert np.isfinite(x)


def test_wide_spans_the_exponents():
    exponents = np.frexp(values("wide"))[1]
    assert np.unique(exponents).size >= 24


def test_outliers_are_whole_channels_of_the_first_factor():
    x, w = values("outliers"), values("outliers", name="rhs")
    loud = np.sqrt((x**2).mean(axis=0)) > 16
    assert 0 < loud.sum() < x.shape[1] // 8
    assert np.abs(w).max() < 5


def test_cancellation_cancels_and_leaves_a_known_rest():
    case = find(GMM, dtype="float32", groups="short", data="cancellation", M=300)
    drawn = draw(GMM, case)
    golden, magnitude = GMM.golden(**drawn, **GMM.arguments(case)), GMM.magnitude(GMM, case, drawn)
    active = magnitude > 0
    left = np.sqrt(np.mean((golden[active] / magnitude[active]) ** 2))
    assert CANCELLATION / 50 < left < CANCELLATION


@pytest.mark.parametrize("op", [GMM, TGMM], ids=["gmm", "tgmm"])
@pytest.mark.parametrize("out", ["float32", "bfloat16", "float16"])
def test_integer_sums_are_exact_and_reach_every_position(op, out):
    case = find(op, out=out, groups="zipf", data="normal", M=300, existing_out=True).with_data("integers")
    drawn = draw(op, case)
    sums = op.magnitude(op, case, drawn)
    digits = {"float32": 24, "bfloat16": 8, "float16": 11}[out]
    assert sums.max() <= 2**digits
    axis = op.inputs(case)["lhs"].sum_over
    assert (drawn["lhs"] != 0).any(axis=1 - axis).all()


def test_poison_is_only_where_nothing_may_be_read():
    case = find(GMM, dtype="float32", groups="short", data="poison", M=300)
    poisoned, clean = draw(GMM, case), draw(GMM, case.with_data("normal"))
    unread = GMM.unread(case, clean)
    for name in ("lhs", "rhs"):
        assert not np.isfinite(poisoned[name][unread[name]]).any()
        assert np.array_equal(poisoned[name][~unread[name]], clean[name][~unread[name]])
    assert unread["lhs"].any()


@pytest.mark.parametrize("op", [GMM_QUANTIZED, TGMM_QUANTIZED], ids=["gmm", "tgmm"])
def test_integer_sums_of_quantised_data_are_exact_in_the_output(op):
    for case in op.cases:
        if case.tier == "smoke" and not case.model:
            drawn = draw(op, case.with_data("integers"))
            sums = op.magnitude(op, case, drawn)
            assert sums.max() <= 2 ** {"float32": 24, "bfloat16": 8}[case.out], case.id
            assert set(np.unique(drawn["lhs_scale"])) <= {1.0, 2.0}
            assert (drawn["lhs"].astype(float) != 0).any()


@pytest.mark.parametrize("op", [GMM_QUANTIZED, TGMM_QUANTIZED], ids=["gmm", "tgmm"])
def test_int8_climbs_beyond_float32_and_comes_back(op):
    case = find(op, dtype="int8", groups="one_hot" if op is TGMM_QUANTIZED else "balanced").with_data("integers")
    drawn = draw(op, case)
    lhs, rhs = (drawn[name].astype(np.int64) for name in ("lhs", "rhs"))
    terms = lhs[:, 0] * rhs[:, 0] if op is TGMM_QUANTIZED else lhs[0] * rhs[0, :, 0]
    assert np.cumsum(terms).max() > 2**24
    assert abs(terms.sum()) < 2**20
    assert (np.cumsum(terms) % 2).any()  # else float32 would hold it beyond 2^24 as well


def test_integers_quantised_inside_stay_what_they_are():
    case = find(GROUPED_DENSE, quantize=True, dtype="float32", existing_out=False, transpose_rhs=False)
    case = case.with_data("integers")
    drawn, arguments = draw(GROUPED_DENSE, case), GROUPED_DENSE.arguments(case)
    assert (drawn["lhs"] != 0).mean() > 0.9
    quantised = GROUPED_DENSE.golden(**drawn, **arguments)
    assert np.array_equal(quantised, GROUPED_DENSE.golden(**drawn, **arguments | {"quantize": False}))


def test_narrow_data_fill_their_format_and_stay_finite():
    for dtype, least in (("float8_e4m3fn", 100), ("float8_e5m2", 60), ("int8", 100)):
        case = find(GMM_QUANTIZED, dtype=dtype, data="normal", existing_out=False, scales="varied")
        lhs = draw(GMM_QUANTIZED, case)["lhs"]
        assert np.isfinite(lhs.astype(np.float64)).all()
        assert np.unique(lhs.view(np.uint8)).size > least
        assert lhs.dtype != "int8" or lhs.min() >= -127


def test_bits_are_every_pattern_and_ranges_reach_both_ends():
    case = find(FP8_QUANTIZE, dtype="bfloat16", data="bits")
    x = draw(FP8_QUANTIZE, case)["x"]
    with np.errstate(invalid="ignore"):
        values = x.astype(np.float64)
    assert np.unique(x.view(np.uint16)).size > 0.7 * 2**16
    assert np.isnan(values).any()
    assert np.isinf(values).any()
    tiles = np.abs(draw(FP8_QUANTIZE, case.with_data("ranges"))["x"].astype(np.float64))
    tiles = tiles.reshape(2, 128, 3, 128).max(axis=(1, 3))
    assert (tiles == 0).any()
    assert ((tiles > 0) & (tiles < 2.0**-126)).any()
    assert (tiles > 2.0**120).any()


def test_scales_are_positive_and_what_they_are_called():
    bits = np.random.Philox(key=3).random_raw
    drawn = {name: pattern((6, 8, 10), bits) for name, pattern in SCALES.items()}
    for scale in drawn.values():
        assert scale.dtype == np.float32
        assert np.isfinite(scale).all()
        assert (scale >= np.finfo(np.float32).tiny).all()
    assert np.unique(np.frexp(drawn["varied"])[0]).size > 400  # significands of all digits
    for axis in range(3):
        ratio = np.abs(np.diff(np.log2(drawn["steps"]), axis=axis))
        assert ratio.min() > 2
        assert ratio.max() < 4
    assert set(np.unique(drawn["powers"])) == {1.0, 2.0}


@pytest.mark.parametrize("pattern", GROUPS)
@pytest.mark.parametrize(("count", "rows"), [(0, 0), (1, 0), (1, 7), (6, 300), (64, 130), (8, 3), (256, 4096)])
def test_group_sizes_fit(pattern, count, rows):
    bits = np.random.Philox(key=1).random_raw
    if count == 0 and pattern == "one_hot":
        pattern = "none"
    sizes = group_sizes(Groups(count, rows, pattern), bits)
    assert sizes.shape == (count,)
    assert sizes.dtype == np.int32
    assert (sizes >= 0).all()
    assert sizes.sum() <= rows


def test_zipf_is_skewed_as_routers_are_and_leaves_experts_empty():
    sizes = np.sort(group_sizes(Groups(128, 512, "zipf"), np.random.Philox(key=5).random_raw))[::-1]
    assert sizes.sum() == 512
    assert sizes[0] > 4 * sizes[8] > 0
    assert (sizes == 0).any()


def test_patterns_are_what_they_are_called():
    bits = np.random.Philox(key=1).random_raw
    sizes = {name: group_sizes(Groups(8, 300, name), bits) for name in GROUPS}
    assert sizes["empty_first"][0] == sizes["empty_last"][7] == sizes["empty_middle"][4] == 0
    assert (sizes["empty_runs"] == 0).tolist() == [True, True, True, False] * 2
    assert sizes["one_hot"].max() == 300
    assert set(sizes["ones"]) == {1}
    assert sizes["short"].sum() == 180
    assert all(edge % 2 for edge in np.cumsum(sizes["straddle"])[:-1])


def test_log_decays_are_what_they_are_called():
    bits = np.random.Philox(key=1).random_raw
    drawn = {name: log_decays(Gates((4, 256, 8), name), bits, exact=False) for name in GATES}
    assert drawn["sigmoid"].max() < 0
    assert drawn["sigmoid"].mean() == pytest.approx(-1 / 16, rel=0.05)
    assert drawn["steep"][:, :64].sum(axis=1).mean() == pytest.approx(-500, rel=0.05)
    jumps = drawn["resets"] < -79
    assert 1 / 40 < jumps.mean() < 1 / 20
    assert drawn["resets"][~jumps].min() > -0.05
    assert not drawn["zero"].any()
    assert drawn["positive"].min() > 0
    assert drawn["positive"].sum(axis=1).mean() == pytest.approx(1, rel=0.1)
    assert 0.4 < (drawn["mixed"] > 0).mean() < 0.6
    assert drawn["slow"].max() < 0
    assert drawn["slow"].sum(axis=1).mean() == pytest.approx(-1, rel=0.1)
    assert 0.4 < (drawn["bound"] == -5).mean() < 0.6
    assert drawn["bound"].min() == -5 and drawn["bound"].max() < 0
    assert (log_decays(Gates((2, 3), (-0.5, 0.0, 1.0)), bits, exact=False) == [-0.5, 0.0, 1.0]).all()


def test_logarithms_are_right_to_the_last_digits():
    words = np.random.Philox(key=1).random_raw(4096)
    ours = log_decays(Gates((4096,), "sigmoid"), lambda count: words, exact=False)
    uniform = ((words >> np.uint64(11)) + 0.5) * 2.0**-53
    np.testing.assert_allclose(ours * 16, np.log(uniform), rtol=1e-14, atol=1e-16)


def test_decays_of_integer_data_are_exactly_one_and_zero():
    for shape, name in (((2, 300, 2), "sigmoid"), ((16,), "sigmoid"), ((16,), (-0.5,) * 16)):
        exact = log_decays(Gates(shape, name), np.random.Philox(key=1).random_raw, exact=True)
        for dtype in (np.float32, ml_dtypes.bfloat16):
            assert set(np.exp(exact.astype(dtype).astype(np.float32)).ravel()) == {0.0, 1.0}
            assert np.array_equal(exact.astype(dtype).astype(np.float64), exact)


def test_sequences_cover_all_rows():
    bits = np.random.Philox(key=1).random_raw
    sizes = {name: pattern(5, 150, bits) for name, pattern in OFFSETS.items()}
    assert all(size.sum() == 150 and size.min() >= 0 for size in sizes.values())
    assert set(sizes["even"]) == {30}
    assert sizes["one"].max() == 150
    assert {0, 1} < set(sizes["zeros_and_ones"])
    assert sizes["ragged"].min() > 1
    assert len(set(sizes["ragged"])) > 2


def test_alibi_slopes():
    assert build_alibi_slopes(8) == tuple(2.0**-i for i in range(1, 9))
    np.testing.assert_allclose(build_alibi_slopes(64), 2.0 ** (-np.arange(1, 65) / 8), rtol=1e-13)
    assert build_alibi_slopes(12) == build_alibi_slopes(8) + build_alibi_slopes(16)[:8:2]
    assert build_alibi_slopes(1) == (2.0**-8,)
    np.testing.assert_allclose(make_alibi_g_gamma(8, 20, 1), -np.array(build_alibi_slopes(8)) * (1 + 1e-5))
    np.testing.assert_allclose(make_alibi_g_gamma(8, 20, 20), -np.array(build_alibi_slopes(8)) * 1e-5, rtol=1e-9)


LINEAR = ("q", "k", "v", "do", "initial_state", "dht")


@pytest.mark.parametrize("op", GATED_LINEAR_ATTENTION, ids=[op.name for op in GATED_LINEAR_ATTENTION])
def test_integer_sums_of_gla_are_exact_and_not_all_zero(op):
    digits = {"float32": 24, "bfloat16": 8}
    for case in (c.with_data("integers") for c in op.cases if c.tier != "full"):
        drawn, contract, arguments = draw(op, case), op.contract(case, "tpu"), op.arguments(case)
        unit = arguments["scale"] or case.K**-0.5
        assert unit in (0.5, 0.25, 0.125), case.id
        given = {name: np.abs(x) if name in LINEAR and x is not None else x for name, x in drawn.items()}
        golden, sums = (op.golden(**x, **arguments)._asdict() for x in (drawn, given))
        for name, y in golden.items():
            if y is not None and y.size:
                assert y.any(), (case.id, name)
                assert np.all(y / unit == np.round(y / unit)), (case.id, name)
                assert np.abs(y / unit).max() <= 2.0 ** digits[contract.dtype(name)], (case.id, name)
                # … and so are the sums of absolute terms in float32.
                assert np.max(sums[name] / unit) <= 2.0**22, (case.id, name)


def test_every_default_draw_is_valid_and_every_id_unique():
    ids = [case.id for _, case in DEFAULT]
    assert len(set(ids)) == len(ids) >= 340
    with np.errstate(invalid="ignore"):  # some data are not finite
        for op, case in DEFAULT:
            if not case.model:
                op.golden(**draw(op, case), **op.arguments(case))


def test_ml_dtypes_are_found_by_name():
    assert numpy_dtype("bfloat16") == ml_dtypes.bfloat16
    assert numpy_dtype("float32") == np.float32
    with pytest.raises(TypeError):
        numpy_dtype("float17")
