"""The measurements: rounding, the error that explains an output, the maps."""

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from parity.dtypes import neighbour, numpy_dtype, round_to
from parity.judging.metrics import MAP, TOP, Scale, eta, explained_by, floor, histogram, measure, tile_map

U32 = 2.0**-24
NARROW = ["bfloat16", "float16"]


def every(dtype: str) -> np.ndarray:
    """All finite values of a dtype of 8 or 16 bits, ascending."""
    target = numpy_dtype(dtype)
    values = np.arange(2 ** (8 * target.itemsize)).astype(f"u{target.itemsize}").view(target)
    with np.errstate(invalid="ignore"):  # signalling NaNs
        wide = values.astype(np.float64)
    return np.unique(wide[np.isfinite(wide)])


@pytest.mark.parametrize("dtype", [*NARROW, "float8_e4m3fn", "float8_e5m2"])
def test_round_to_is_nearest_even_at_and_beside_every_tie(dtype):
    values = every(dtype)
    ties = (values[:-1] + values[1:]) / 2
    below, above = np.nextafter(ties, -np.inf), np.nextafter(ties, np.inf)
    assert np.array_equal(round_to(below, dtype).astype(np.float64), values[:-1])
    assert np.array_equal(round_to(above, dtype).astype(np.float64), values[1:])
    at = round_to(ties, dtype)
    assert np.all(at.view(f"u{at.itemsize}") % 2 == 0)
    assert np.all(np.abs(at.astype(np.float64) - ties) == (values[1:] - values[:-1]) / 2)


def test_a_direct_cast_rounds_twice_where_round_to_does_not():
    just_above_a_tie = np.array([1 + 2.0**-8 + 2.0**-40])
    assert float(just_above_a_tie.astype(ml_dtypes.bfloat16)[0]) == 1.0  # why round_to exists
    assert float(round_to(just_above_a_tie, "bfloat16")[0]) == 1 + 2.0**-7


@pytest.mark.parametrize("dtype", [*NARROW, "float32"])
@given(st.floats(-1e4, 1e4, allow_subnormal=False), st.floats(-1e-3, 1e-3))
@settings(derandomize=True, max_examples=200)
def test_a_rounded_value_is_explained_by_the_change_that_made_it(dtype, golden, delta):
    golden = np.array([golden])
    y = round_to(golden + delta, dtype)
    assert explained_by(round_to(golden, dtype), golden) == 0
    assert explained_by(y, golden) <= abs(delta) * (1 + 1e-9) + 1e-30


@pytest.mark.parametrize("dtype", [*NARROW, "float8_e4m3fn", "float8_e5m2"])
def test_a_number_lies_between_its_neighbours(dtype):
    values = every(dtype)
    y = round_to(values, dtype)
    np.testing.assert_array_equal(neighbour(y, True), [*values[1:], np.inf])
    np.testing.assert_array_equal(neighbour(y, False), [-np.inf, *values[:-1]])


@pytest.mark.parametrize("dtype", ["float8_e4m3fn", "float8_e5m2"])
def test_the_change_that_explains_a_number_of_eight_bits_is_the_smallest(dtype):
    values = every(dtype)
    golden = np.concatenate([values, (values[:-1] + values[1:]) * 0.51, [1.01 * values[-1]]])
    y, golden = (x.ravel() for x in np.meshgrid(values, golden))
    delta = explained_by(round_to(y, dtype), golden) * np.sign(y - golden)
    little = 1e-6 * np.maximum(np.abs(y), values[values > 0].min()) * np.sign(delta)
    assert (round_to(golden + delta + little, dtype).astype(np.float64) == y).all()
    short = (golden + delta - little)[delta != 0]
    assert (round_to(short, dtype).astype(np.float64) != y[delta != 0]).all()


@pytest.mark.parametrize("dtype", NARROW)
def test_a_neighbour_of_the_rounded_golden_needs_the_distance_to_the_tie(dtype):
    values = every(dtype)
    middle = values[len(values) // 2 + 500 : len(values) // 2 + 5000]
    up = np.nextafter(round_to(middle, dtype), np.array(np.inf, round_to(middle, dtype).dtype))
    gap = up.astype(np.float64) - middle
    assert np.array_equal(explained_by(up, middle), gap / 2)


def test_eta_counts_roundoffs_of_the_magnitude():
    golden, magnitude = np.array([1.0, 0.0]), np.array([64.0, 64.0])
    y = np.array([1 + 64 * 5 * U32, 64 * 5 * U32], np.float32)
    scores = eta(y, golden, Scale(magnitude, U32, 1))
    assert np.allclose(scores, 5, rtol=0.02)


def test_flushed_subnormals_are_forgiven_and_real_ones_are_not():
    golden, magnitude = np.array([2.0**-130]), np.array([2.0**-130])
    assert eta(np.zeros(1, np.float32), golden, Scale(magnitude, U32, 4)) < 1
    assert eta(np.zeros(1, np.float32), golden * 2.0**40, Scale(magnitude * 2.0**40, U32, 4)) > 1e6


def test_measure_of_a_known_error():
    rng = np.random.default_rng(0)
    golden, magnitude = rng.standard_normal((64, 48)), np.full((64, 48), 2.0)
    y = golden.astype(np.float32)
    perfect = measure(y, golden, Scale(magnitude, U32, 8))
    assert perfect.epsilon == perfect.floor > 0
    assert (perfect.misrounded, perfect.eta_max, perfect.differing) == (0, 0, 0)
    y[40, 7] += 1
    broken = measure(y, golden, Scale(magnitude, U32, 8))
    assert broken.worst[0] == (40, 7)
    assert broken.eta_max == pytest.approx(1 / (2 * U32), rel=1e-5)
    assert broken.misrounded == 1 / golden.size
    assert np.argmax(np.array(broken.tiles)) == 5 * MAP + 1
    assert sum(broken.histogram) == 1


@pytest.mark.parametrize(
    ("elements", "wrong"), [(1, 0), (1, 1), (900, 1), (1001, 1), (2001, 2), (2001, 3), (5000, 4999)]
)
def test_the_quantile_is_of_all_errors_zeros_among_them(elements, wrong):
    golden, y = np.ones(elements), np.ones(elements, np.float32)
    y[:wrong] += 2.0**-10 * np.arange(1, wrong + 1)
    scale = Scale(golden, U32, 1)
    expected = np.quantile(eta(y, golden, scale), 0.999, method="higher")
    assert measure(y, golden, scale).eta_q999 == expected


def test_an_output_without_magnitude_is_not_scored():
    golden, magnitude = np.array([1.0, 0.0, 2.0]), np.array([1.0, 0.0, 4.0])
    y = np.array([1 + 2.0**-10, 0.0, 2 - 2.0**-9], np.float32)
    m = measure(y, golden, Scale(magnitude, U32, 1))
    errors = np.array([2.0**-10, -(2.0**-11)])
    assert (m.elements, m.scored, m.differing, m.misrounded) == (3, 2, 2, 1.0)
    assert m.epsilon == pytest.approx(np.sqrt(np.mean(errors**2)))
    assert m.bias == pytest.approx(errors.mean() / m.epsilon)
    assert m.worst == ((0,), (2,), (1,))


def test_the_floor_is_the_same_of_values_however_small():
    golden, magnitude = np.random.default_rng(0).uniform(1.0, 2.0, (2, 100))
    floors = [floor(s * golden, Scale(s * magnitude, U32, 1), "bfloat16") for s in (1.0, 2.0**-20, 2.0**20)]
    assert floors[0] == floors[1] == floors[2] > 2.0**-11


@pytest.mark.parametrize("size", [5, 8, 9, 15, 16, 40, 1000])
def test_the_worst_are_the_largest_errors_and_of_equal_ones_the_first(size):
    y = np.random.default_rng(size).integers(1, size, size).astype(np.float32) / 4
    worst = measure(y, np.zeros(size), Scale(np.ones(size), U32, 1)).worst
    assert worst == tuple((n,) for n in sorted(range(size), key=lambda n: (-y[n], n))[:TOP])


def test_wrong_finiteness_is_infinite_error():
    golden = np.array([[1.0, np.nan, 2.0]])
    y = np.array([[np.nan, np.nan, 2.0]], np.float32)
    m = measure(y, golden, Scale(np.ones((1, 3)), U32, 1))
    assert (m.wrong_finiteness, m.eta_max) == (1, np.inf)


@pytest.mark.parametrize("shape", [(0, 4), (3, 0, 5), (1, 1), (7,), (2, 3, 9, 11)])
def test_any_shape_can_be_measured(shape):
    m = measure(np.zeros(shape, np.float32), np.zeros(shape), Scale(np.ones(shape), U32, 1))
    assert (m.elements, m.eta_max) == (int(np.prod(shape)), 0)
    assert (m.epsilon, m.floor, m.misrounded, m.eta_q999, m.bias) == (0, 0, 0, 0, 0)


def test_histogram_and_tiles_lose_nothing():
    errors = np.array([[0.0, 2.0**-40, 1.0, 2.0**40, np.inf]])
    assert sum(histogram(errors)) == 4
    assert histogram(errors)[0] == 1
    assert histogram(errors)[-1] == 2 and len(histogram(errors)) == 64
    assert tile_map(np.ones((3, 5, 5))) == ((1.0,) * 5,) * 5
    assert tile_map(np.ones(())) == ((1.0,),)


def test_the_unit_is_a_roundoff_of_the_magnitude_and_a_flushed_subnormal_for_every_term_and_the_result():
    scale = Scale(np.array([[2.0, 0.0], [8.0, 1.0]]), U32, 3)
    tiny = 4 * 2.0**-126
    assert scale.unit.tolist() == [[2 * U32 + tiny, tiny], [8 * U32 + tiny, U32 + tiny]]
    assert Scale(np.zeros(1), U32, 3).unit == [tiny]
    assert scale.at((1, 0)) == Scale(8.0, U32, 3)


@pytest.mark.parametrize("sign", [1, -1])
def test_the_largest_value_explains_what_would_round_to_it_if_there_were_one_beyond(sign):
    """65504 is float16's largest, the next would be 65536: from 65520 on a result is infinite."""
    y = np.full(4, sign * 65504, np.float16)
    golden = sign * np.array([65504.0, 65519.0, 65520.0, 65536.0])
    with np.errstate(over="ignore"):
        assert explained_by(y, golden).tolist() == [0, 0, 0, 16]
        assert explained_by(y[:2], sign * np.array([65488.0, 65472.0])).tolist() == [0, 16]


def test_nothing_explains_what_is_not_finite():
    y = np.array([np.inf, 1.0, np.nan, -np.inf, 1.0], np.float32)
    golden = np.array([1.0, np.inf, np.nan, -np.inf, np.nan])
    assert np.isnan(explained_by(y, golden)).all()
    assert not eta(y, golden, Scale(np.ones(5), U32, 1)).any()


def test_a_histogram_has_a_bin_for_every_power_of_two_and_a_map_and_a_list_of_the_worst_have_eight():
    """What records hold, and what those of another size could not be compared with."""
    for power in (-32, -31, -1, 0, 1, 30, 31):
        bins = [0] * 64
        bins[power + 32] = 2
        assert histogram(np.array([2.0**power, 1.99 * 2.0**power])) == tuple(bins)
    assert tile_map(np.ones((16, 24))) == ((1.0,) * 8,) * 8
    assert len(measure(np.ones(20, np.float32), np.zeros(20), Scale(np.ones(20), U32, 1)).worst) == 8


def test_an_error_of_less_than_a_roundoff_differs_as_well():
    y = np.nextafter(np.ones(3, np.float32), np.float32(2))
    m = measure(y, np.ones(3), Scale(np.full(3, 4.0), U32, 1))
    assert (m.eta_max, m.differing, m.misrounded) == (pytest.approx(0.25), 3, 1)
