"""The quantisers on the TPU where the matrix does not look: nothing, a single element, quotients a hair off a tie, and
which rows of a tile go through a kernel's loops."""

import ml_dtypes
import numpy as np
import pytest

jax = pytest.importorskip("jax")

from cpu_golden import quantize as golden  # noqa: E402
from parity.interop import to_jax, to_numpy  # noqa: E402
from tests.quantized.formats import FORMATS, decode  # noqa: E402
from tpu_kernels import quantize as kernels  # noqa: E402

E4M3 = ml_dtypes.float8_e4m3fn
pytestmark = pytest.mark.tpu


def check(got, expected):
    for ours, theirs in zip(got, expected, strict=True):
        ours = to_numpy(ours)
        assert (ours.shape, ours.dtype) == (theirs.shape, theirs.dtype)
        assert ours.tobytes() == theirs.tobytes()


@pytest.mark.parametrize("shape", [(0, 128), (3, 0), (1, 1)], ids=str)
def test_nothing_and_a_single_element_are_quantised_as_the_golden_does(shape):
    x = np.full(shape, 3, np.float32)
    expected = golden.fp8_quantize(x, 0, None)
    check(kernels.fp8_quantize(to_jax(x), 0, None), expected)
    check(kernels.fp8_dual_quantize(to_jax(x), None), golden.fp8_dual_quantize(x, None))
    wide = golden.fp8_dequantize(*expected)
    check([kernels.fp8_dequantize(*(to_jax(part) for part in expected))], [wide.astype(np.float32)])


@pytest.mark.parametrize("power", [0, -120], ids=["usual", "lifted"])
@pytest.mark.parametrize("name", FORMATS)
def test_a_quotient_a_hair_off_a_tie_is_rounded_to_the_nearer_side(name, power):
    """float32 on both sides of the product of a scale, with all its bits, and the middle of two codes."""
    values = np.unique(np.abs(decode(name)[np.isfinite(decode(name))]))
    largest = FORMATS[name].largest
    values = values[values <= largest]
    absmax = (np.random.default_rng(0).uniform(1, 2, 32) * largest * 2.0**power).astype(np.float32)[:, None]
    scale = (absmax / np.float64(largest)).astype(np.float32)
    near = (scale * (values[1:] + values[:-1]) / 2).astype(np.float32)
    x = np.concatenate([absmax, np.nextafter(near, np.float32(0)), near, np.nextafter(near, 2 * absmax)], 1)
    function, options = ("int8_quantize", {}) if name == "int8" else ("fp8_quantize", {"dtype": name})
    check(getattr(kernels, function)(to_jax(x), 1, None, **options), getattr(golden, function)(x, 1, None, **options))


def test_a_float32_is_split_into_two_of_12_bits():
    x = np.random.default_rng(0).standard_normal(1000).astype(np.float32)
    high, low = (to_numpy(part) for part in kernels._split(to_jax(x)))
    assert (high.astype(np.float64) + low == x).all()
    for part in (high, low):
        mantissa, _ = np.frexp(part)
        assert (mantissa * 2**12 == np.rint(mantissa * 2**12)).all()


@pytest.mark.parametrize(
    ("block", "scales", "own"), [(96, 1, [0, 0, 0]), (1, 96, [0, 32, 64]), (32, 3, [0, 1, 2]), (64, 2, [0, 0, 1])]
)
def test_a_loop_goes_over_every_32_rows_once_and_over_none_before_them(block, scales, own):
    seen = []

    def body(rows, of_scales):
        jax.debug.callback(lambda *starts: seen.append([int(start) for start in starts]), rows.start, of_scales.start)
        assert (rows.size, of_scales.size) == (32, 32 if (block, scales) == (1, 96) else 1)

    kernels._for_rows(96, block, scales, body)
    jax.effects_barrier()
    assert sorted(seen) == [[32 * i, start] for i, start in enumerate(own)]


def test_the_largest_finite_number_is_the_largest_of_its_block():
    most = np.finfo(np.float32).max
    x = np.array([[most, 0.6 * most], [np.nextafter(most, np.float32(0)), -np.inf], [most, np.nan]], np.float32)
    expected = golden.fp8_quantize(x, 1, None, check_finite=False)
    check(kernels.fp8_quantize(to_jax(x), 1, None, check_finite=False), expected)


def test_products_beside_the_smallest_normal_number_are_rounded_before_they_are_zero():
    """Every code below 1, times the scales that bring it within two units of 2^-126: of half a unit it is that."""
    codes = np.arange(256, dtype=np.uint8).view(E4M3)
    values = codes.astype(np.float64)
    codes, values = (part[(values > 0) & (values < 1)][:, None] for part in (codes, values))
    units = np.floor(2**23 / values) + np.arange(-2, 4)
    scale = (units * 2.0**-149).astype(np.float32).reshape(-1, 1)
    codes = np.broadcast_to(codes, units.shape).reshape(-1, 1)
    check([kernels.fp8_dequantize(to_jax(codes), to_jax(scale))], [golden.fp8_dequantize(codes, scale)])


@pytest.mark.parametrize(
    ("function", "options"),
    [
        ("fp8_quantize", dict(axis=1)),
        ("int8_quantize", dict(axis=1)),
        ("fp8_dual_quantize", {}),
        ("mxfp8_quantize", dict(axis=1)),
        ("mxfp8_dual_quantize", {}),
    ],
)
def test_what_is_not_finite_is_looked_for_where_it_is_asked_for_and_nan_is_refused_by_int8_alone(
    monkeypatch, function, options
):
    asked, x = [], to_jax(np.zeros((0, 128), np.float32))
    monkeypatch.setattr(kernels, "_check_finite", lambda given, nan: asked.append(nan))
    getattr(kernels, function)(x, **options, check_finite=False)
    assert not asked
    getattr(kernels, function)(x, **options)
    assert asked == [function == "int8_quantize"]


def test_of_a_tile_is_there_what_lies_in_the_array_along_both_axes():
    there = np.asarray(kernels._is_there((8, 128), (2, 128), (5, 200)))
    row, column = np.indices(there.shape)
    np.testing.assert_array_equal(there, (row < 3) & (column < 72))
