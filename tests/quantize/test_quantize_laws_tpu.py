"""The quantisers on the TPU where the matrix does not look: nothing, a single element, and which rows of a tile go
through a kernel's loops."""

import itertools
from collections import Counter

import ml_dtypes
import numpy as np
import pytest

jax = pytest.importorskip("jax")
jnp = jax.numpy

from jax.experimental.pallas import tpu as pltpu  # noqa: E402

from cpu_golden import mxfp8 as golden_mxfp8  # noqa: E402
from cpu_golden import quantize as golden  # noqa: E402
from parity.interop import to_jax, to_numpy  # noqa: E402
from tests.support.agreement import crossed  # noqa: E402
from tests.support.chips import on  # noqa: E402
from tests.support.formats import FORMATS, MX  # noqa: E402
from tpu_kernels import mxfp8  # noqa: E402
from tpu_kernels import quantize as kernels  # noqa: E402
from tpu_kernels._lib.formats import FORMATS as TPU_FORMATS  # noqa: E402
from tpu_kernels._lib.fused_quantize import Computed, quantize_computed, tiles_computed  # noqa: E402
from tpu_kernels._lib.layout import Layout, Tiles, tile_size  # noqa: E402

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
    ("shape", "axis", "block"),
    [
        # No whole registers: on the TPU the elements of a block are laid one below the other.
        ((10, 48), 1, 24),
        ((20, 48), 0, 5),
        ((3, 10, 40), 0, None),
        ((4, 6, 40), (0, 2), 2),
        # Several to a register, or a register and a half; more tiles than one, the last of them not full.
        ((33, 272), 1, 16),
        ((1088, 40), 0, 64),
        ((8, 1152), 1, 384),
        ((40, 1100), 1, 1),
        # Longer than a tile, and walked in steps.
        ((4200, 140), 0, None),
        ((2, 530, 1100), (-2, -1), None),
        ((40, 9000), 1, None),
    ],
    ids=str,
)
def test_blocks_that_the_matrix_has_none_of_have_each_its_own_scale(shape, axis, block):
    x = (np.random.default_rng(0).standard_normal(shape) * np.arange(1, shape[-1] + 1)).astype(np.float32)
    got, expected = kernels.fp8_quantize(to_jax(x), axis, block), golden.fp8_quantize(x, axis, block)
    for ours, theirs in zip(got, expected, strict=True):
        np.testing.assert_array_equal(to_numpy(ours).astype(np.float32), theirs.astype(np.float32))
    np.testing.assert_array_equal(to_numpy(kernels.fp8_dequantize(*got)), golden.fp8_dequantize(*expected))


def test_blocks_of_which_a_tile_has_less_than_a_register_of_scales_have_each_its_own(monkeypatch):
    """As 128 rows of 7,168 columns have: a walk of eight tiles writes the scales of each into rows of its own."""
    monkeypatch.setattr("tpu_kernels._lib.layout.tile_size", lambda: 2**14)
    x = (np.random.default_rng(0).standard_normal((352, 512)) * np.arange(1, 353)[:, None]).astype(np.float32)
    got, expected = kernels.fp8_quantize(to_jax(x), (0, 1), 32), golden.fp8_quantize(x, (0, 1), 32)
    check(got, expected)
    check([kernels.fp8_dequantize(*got)], [golden.fp8_dequantize(*expected).astype(np.float32)])


@pytest.mark.parametrize(("axis", "spoilt"), crossed([0, 1, (0, 1)], [None, np.inf, np.nan, 0.0, 2.0**-90]), ids=str)
def test_bfloat16_that_is_walked_twice_is_rounded_as_the_golden_does(axis, spoilt, monkeypatch):
    """By the short way of finite numbers, and not where one block has others, or all are tiny."""
    monkeypatch.setattr("tpu_kernels._lib.layout.tile_size", lambda: 2**14)
    x = (np.random.default_rng(0).standard_normal((352, 500)) * np.arange(1, 353)[:, None]).astype(np.float32)
    if spoilt is not None:
        x[40:300, 130:400] *= spoilt if spoilt < 1 else 1
        x[200, 300] = spoilt
    x = x.astype(ml_dtypes.bfloat16)
    for dtype in ("float8_e4m3fn", "float8_e5m2"):
        how = {"dtype": dtype, "check_finite": False}
        check(kernels.fp8_quantize(to_jax(x), axis, None, **how), golden.fp8_quantize(x, axis, None, **how))
    how = {"check_finite": False}
    check(kernels.int8_quantize(to_jax(x), axis, None, **how), golden.int8_quantize(x, axis, None, **how))


def test_long_rows_are_quantised_within_the_bounds_of_memory():
    """Pallas's usual interpreter clamps an index beyond an array; a TPU reads another array."""
    x = np.random.default_rng(0).standard_normal((16, 40000)).astype(ml_dtypes.bfloat16)
    strict = pltpu.InterpretParams(out_of_bounds_reads="raise")
    got = kernels.fp8_quantize(to_jax(x), 1, None, check_finite=False, interpret=strict)
    check(got, golden.fp8_quantize(x, 1, None, check_finite=False))


@pytest.mark.parametrize("name", FORMATS)
def test_a_scale_at_the_ends_of_what_is_normal_is_the_goldens(name):
    """Blocks whose largest element is subnormal, the smallest normal number, or at the limit of what is lifted."""
    tiny = np.finfo(np.float32).tiny
    largest = np.float32(127 if name == "int8" else ml_dtypes.finfo(name).max)
    ends = [tiny / 2, np.nextafter(tiny, 0), tiny, np.nextafter(tiny, 1), 2 * tiny, largest * tiny]
    ends += [np.float32(2.0**power) * factor for power in (-65, -64, -63) for factor in (1, largest)]
    ends = np.array(
        [f(end) for end in ends for f in (lambda x: np.nextafter(x, np.float32(0)), np.float32)], np.float32
    )
    parts = np.array([1, 0.5, 0.25, 1 / 3, 1 / largest, 0.9999999, 0.03125, 0, -0.0, -1, -0.7], np.float32)
    x = np.concatenate([ends[:, None] * parts, np.minimum(ends[:, None], [tiny, np.nextafter(tiny, 0)])], 1)
    function, options = ("int8_quantize", {}) if name == "int8" else ("fp8_quantize", {"dtype": name})
    got = getattr(kernels, function)(to_jax(x.astype(np.float32)), 1, None, **options)
    expected = getattr(golden, function)(x.astype(np.float32), 1, None, **options)
    for ours, theirs in zip(got, expected, strict=True):
        assert to_numpy(ours).tobytes() == theirs.tobytes()


@pytest.mark.parametrize("generation", [6, 7])
def test_finite_bfloat16_is_rounded_as_each_generation_does(generation, monkeypatch):
    """Every finite pattern behind the largest number of the format (a scale of 1) and behind ones that are no multiples
    of it: where the chip converts, and where a power of two is added."""
    monkeypatch.setattr("tpu_kernels._lib.chip.generation", lambda: generation)
    jax.clear_caches()
    patterns = np.arange(0x7F80, dtype=np.uint16)
    finite = np.resize(np.concatenate([patterns, patterns | 0x8000]), 517 * 126).view(ml_dtypes.bfloat16)
    finite = np.clip(finite.reshape(517, 126).astype(np.float32), -448, 448)
    for largest in (448.0, 400.0, 451.0):
        x = np.concatenate([np.full((517, 2), largest), finite * (largest / 512)], axis=1).astype(ml_dtypes.bfloat16)
        check(kernels.fp8_quantize(to_jax(x), 1, None), golden.fp8_quantize(x, 1, None))
    jax.clear_caches()


@pytest.mark.parametrize(("name", "generation"), crossed([*FORMATS], [5, 6, 7]))
def test_every_bfloat16_behind_every_largest_one_is_rounded(name, generation, monkeypatch):
    """All 128 significands of a block's largest, times all elements down to 2^-35 of it: every quotient there is."""
    monkeypatch.setattr("tpu_kernels._lib.chip.generation", lambda: generation)
    jax.clear_caches()
    one, steps = np.float32(1).view(np.uint32) >> 16, np.arange(128, dtype=np.uint16)
    largest = (one + steps).astype(np.uint16)[:, None]
    below = (one - 35 * 128 + np.arange(36 * 128)).astype(np.uint16)[None]
    x = np.minimum(below, largest) | np.where(np.arange(36 * 128) % 2, np.uint16(0x8000), np.uint16(0))
    x = np.concatenate([largest, x, x ^ 0x8000], axis=1).astype(np.uint16).view(ml_dtypes.bfloat16)
    function, options = ("int8_quantize", {}) if name == "int8" else ("fp8_quantize", {"dtype": name})
    got, expected = (getattr(package, function)(array, 1, None, **options) for package, array in
                     ((kernels, to_jax(x)), (golden, x)))  # fmt: skip
    check(got, expected)
    jax.clear_caches()


@pytest.mark.parametrize(("name", "generation"), crossed([*FORMATS], [6, 7]))
def test_ties_under_an_exact_scale_go_to_even(name, generation, monkeypatch):
    """Every midpoint of the format times 8, in bfloat16, beside the largest number of the format times 8."""
    monkeypatch.setattr("tpu_kernels._lib.chip.generation", lambda: generation)
    jax.clear_caches()
    codes = np.arange(128, dtype=np.uint8).view(np.int8 if name == "int8" else getattr(ml_dtypes, name))
    values = codes.astype(np.float64)
    values = values[np.isfinite(values)]
    x = np.concatenate([values[-1:], (values[1:] + values[:-1]) / 2, values]) * 8
    x = np.resize(np.concatenate([x, -x]), (32, 512)).astype(ml_dtypes.bfloat16)
    x[:, 0] = values[-1] * 8
    function, options = ("int8_quantize", {}) if name == "int8" else ("fp8_quantize", {"dtype": name})
    got, expected = (getattr(package, function)(array, 1, None, **options) for package, array in
                     ((kernels, to_jax(x)), (golden, x)))  # fmt: skip
    assert np.unique(expected.scale) == 8
    check(got, expected)
    jax.clear_caches()


def beside_midpoints(name, scale, extra):
    """float32 [scales, columns]: what a scale makes of every number and midpoint of a format, and floats next to it.

    The first column is the format's largest number times the scale, the second `extra` ones of it.
    """
    codes = np.arange(128, dtype=np.uint8).view(np.int8 if name == "int8" else getattr(ml_dtypes, name))
    values = codes.astype(np.float64)
    values = values[np.isfinite(values)]
    wanted = np.concatenate([values, (values[1:] + values[:-1]) / 2])
    exact = (scale[:, None].astype(np.float64) * wanted).astype(np.float32)
    largest = (scale * values[-1]).astype(np.float32)[:, None]
    bits = exact.view(np.int32)[..., None] + np.arange(-2, 3, dtype=np.int32)
    x = np.minimum(np.maximum(bits, 0).view(np.float32).reshape(len(scale), -1), largest)
    return np.concatenate([largest, largest * np.float32(extra), x, -x], axis=1)


@pytest.mark.parametrize(("name", "generation"), crossed([*FORMATS], [5, 6, 7]))
def test_float32_on_and_beside_midpoints_is_rounded(name, generation, monkeypatch):
    """Under scales from 2^-59 to 2^100: of many bits, of few, and of those by which midpoints are exact."""
    monkeypatch.setattr("tpu_kernels._lib.chip.generation", lambda: generation)
    jax.clear_caches()
    rng = np.random.default_rng(0)
    significands = np.concatenate([1 + rng.random(64), 1 + rng.integers(0, 4096, 32) / 4096, 1 + np.arange(16) / 16])
    scale = (significands * 2.0 ** rng.integers(-59, 100, significands.size)).astype(np.float32)
    x = beside_midpoints(name, scale, 1 / 3)
    function, options = ("int8_quantize", {}) if name == "int8" else ("fp8_quantize", {"dtype": name})
    got, expected = (getattr(package, function)(array, 1, None, **options) for package, array in
                     ((kernels, to_jax(x)), (golden, x)))  # fmt: skip
    check(got, expected)
    jax.clear_caches()


@pytest.mark.parametrize(("name", "scale_rounding", "generation"), crossed(MX, ["up", "floor"], [5, 6, 7]))
def test_mxfp8_of_float32_beside_midpoints_is_rounded(name, scale_rounding, generation, monkeypatch):
    """And, with a scale that is rounded down, of numbers up to twice the largest of the format."""
    monkeypatch.setattr("tpu_kernels._lib.chip.generation", lambda: generation)
    jax.clear_caches()
    x = beside_midpoints(name, np.float32(2.0) ** np.arange(-40, 40, dtype=np.float32), 1)
    x = np.concatenate([x, np.repeat(x[:, :1], -x.shape[1] % 31, axis=1)], axis=1)
    most = np.float32(1.9 if scale_rounding == "floor" else 1) * x[:, :1]
    x = np.concatenate([x.reshape(len(x), -1, 31), np.broadcast_to(most[:, None], (len(x), x.shape[1] // 31, 1))], 2)
    x = x.reshape(len(x), -1)
    how = {"dtype": name, "scale_rounding": scale_rounding}
    check(mxfp8.mxfp8_quantize(to_jax(x), 1, **how), golden_mxfp8.mxfp8_quantize(x, 1, **how))
    jax.clear_caches()


def test_fp8_takes_nan():
    x = to_jax(np.resize(np.array([1, np.nan, -3], np.float32), (1, 96)))
    for quantised in (kernels.fp8_quantize(x, 1, None), mxfp8.mxfp8_quantize(x, 1)):
        assert np.isnan(to_numpy(quantised.qvalue).astype(np.float32)).sum() == 32


@pytest.mark.parametrize("kind", ["TPU v5e", "TPU7x"])
def test_tiles_have_whole_blocks_and_a_walk_whole_registers_of_scales(kind):
    """Of every array and block: each tile in one walk, and once but for the last; no more than VMEM holds."""
    rows_of, columns_of = (1, 33, 96, 1408, 8640), (1, 40, 128, 7168, 40000)
    for rows, columns, r, c in itertools.product(rows_of, columns_of, (1, 32, 96, 128, None), (1, 32, 128, None)):
        if rows % (r or rows) or columns % (c or columns):
            continue
        with on(kind):
            layout = Layout.of((rows, columns), (r or rows, c or columns))
            tiles, most = Tiles.of(layout.shape, [layout.block]), tile_size()
        (r, c), (a, *size) = layout.block, layout.shape
        where = (layout, tiles)
        whole = r == size[0], c == size[1]
        assert (tiles.rows % r == 0 or whole[0]) and (tiles.columns % c == 0 or whole[1]), where
        assert tiles.rows % 32 == tiles.columns % 128 == 0 and tiles.rows * tiles.columns <= most, where
        counts = [-(-n // tile) for n, tile in zip(size, (tiles.rows, tiles.columns), strict=True)]
        last, found = counts[0] - 1, Counter()
        for walk in itertools.product(*map(range, tiles.walks)):
            of_walk = [tuple(map(int, tiles.at(*walk, step))) for step in range(tiles.steps)]
            found.update(set(of_walk))
            assert len(set(of_walk)) == tiles.steps or max(row for _, row, _ in of_walk) == last, where
        assert found == Counter(itertools.product(range(a), *map(range, counts))), where
        assert tiles.spanned == any(w and n > 1 for w, n in zip(whole, counts, strict=True)), where
        if not tiles.spanned:
            kept = tiles.scales_of_walk(layout.block)
            assert kept[0] % 8 == 0 and (tiles.walks[1] == 1 or kept[0] * r == tiles.steps_r * tiles.rows), where
            assert kept[1] % 128 == 0 and (tiles.walks[2] == 1 or kept[1] * c == tiles.columns), where


@pytest.mark.parametrize("wide", [768, 4096], ids=["rows follow", "columns follow"])
def test_a_tile_without_loops_has_the_bits_of_one_with_them(wide, monkeypatch):
    """As a TPU has them; interpreted, there is a loop over each."""
    x = np.random.default_rng(0).standard_normal((128, wide)).astype(np.float32)
    monkeypatch.setattr("tpu_kernels._lib.blocks.unrolled", lambda *_: 2**17)
    for quantize, target in ((kernels.fp8_dual_quantize, golden.fp8_dual_quantize),
                             (mxfp8.mxfp8_dual_quantize, golden_mxfp8.mxfp8_dual_quantize)):  # fmt: skip
        check(quantize(to_jax(x)), target(x))


@pytest.mark.parametrize("shape", [(256, 96), (1100, 64), (2, 384, 160)], ids=str)
def test_scales_of_rows_are_those_of_the_golden(shape):
    """In one tile, in two of which the second is shorter, and of several arrays; no two rows have scales alike."""
    x = np.random.default_rng(0).standard_normal(shape).astype(np.float32)
    x *= np.exp2(np.arange(shape[-2]) % 101 - 50).astype(np.float32)[:, None]
    x[..., 5, 40] = np.nan
    check(mxfp8.mxfp8_quantize(to_jax(x), -1), golden_mxfp8.mxfp8_quantize(x, -1))
    x = x[..., : shape[-2] // 32 * 32, :]
    check(mxfp8.mxfp8_dual_quantize(to_jax(x)), golden_mxfp8.mxfp8_dual_quantize(x))


def scaled_and_cut(factors, x, y):
    """Two arrays, and terms to sum: exact, as factors are powers of two and the numbers small."""
    return Computed((factors * x, jnp.maximum(factors * y, 0.0)), factors * jnp.abs(x))


@pytest.mark.parametrize("both", [True, False], ids=["both", "rows"])
@pytest.mark.parametrize("name", ["fp8", "per channel", "mxfp8"])
def test_what_is_quantised_where_it_is_computed_has_its_bits(name, both):
    """In two tiles, the second with fewer rows; no short way takes all. Per channel both share columns."""
    target, block = TPU_FORMATS["float8_e4m3fn"], {"fp8": 128, "per channel": None, "mxfp8": 32}[name]
    scaling = mxfp8.PowerScales(target, "up") if name == "mxfp8" else kernels.FloatScales(target)
    m, n = 1152, 256
    rng = np.random.default_rng(0)
    factors = 2.0 ** rng.integers(-3, 4, m).astype(np.float32)
    x, y = (rng.integers(-(2**14), 2**14, (m, n)).astype(np.float32) for _ in range(2))
    x[300, [3, 200]] = np.nan, np.inf
    y[1100:1104] *= np.float32(2.0**-100)
    y[1090, 7] = np.inf
    arrays, blocks = (to_jax(x), to_jax(y)), ((1, block or n), (block or m, 1))[: 1 + both]
    tiles = tiles_computed(scaled_and_cut, arrays, blocks, scaling)
    assert tiles.rows < m and m % tiles.rows
    found, sums = quantize_computed(
        to_jax(factors), *arrays, compute=scaled_and_cut, blocks=blocks, scaling=scaling, tiles=tiles, interpret=True
    )
    computed = scaled_and_cut(factors[:, None], x, y)
    for quantized, values in zip(found, computed.arrays, strict=True):
        for way, axis in zip(quantized, (1, 0), strict=False):
            expected = (
                golden_mxfp8.mxfp8_quantize(np.asarray(values), axis, check_finite=False)
                if name == "mxfp8"
                else golden.fp8_quantize(np.asarray(values), axis, block, check_finite=False)
            )
            check(way, expected)
    finite = np.isfinite(x).all(axis=1)
    assert np.array_equal(to_numpy(sums)[finite], np.asarray(computed.terms, np.float64).sum(axis=1)[finite])
