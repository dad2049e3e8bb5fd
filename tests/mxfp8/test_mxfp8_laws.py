"""MXFP8 against OCP's Microscaling Formats (MX) v1.0, written out here in integers, over everything there is.

Every bfloat16, every scale byte, every payload byte; on the golden and on both backends.
"""

import ml_dtypes
import numpy as np
import pytest

from tests.support.agreement import crossed
from tests.support.formats import BITS_OF, FORMATS, MX, decode
from tests.support.functions import BACKENDS, run

EVERYWHERE = ["golden", *BACKENDS]
LARGEST_EXPONENT = {"float8_e4m3fn": 8, "float8_e5m2": 15}  # emax of the standard's tables
E8M0 = ml_dtypes.float8_e8m0fnu


def code_values(name):
    """The values of the non-negative finite codes, in units of the smallest: integers, ascending."""
    f = FORMATS[name]
    codes = np.arange(f.nan if name == "float8_e4m3fn" else 0x7C, dtype=np.int64)
    exponent, mantissa = codes >> f.mantissa_bits, codes & (2**f.mantissa_bits - 1)
    return np.where(exponent > 0, (mantissa + 2**f.mantissa_bits) << np.maximum(exponent - 1, 0), mantissa)


def standards(x, name, rounding):
    """(codes, scale bytes) of bfloat16 x [R, 32], a block to a row, by integer arithmetic on bit patterns.

    Section 6.3: the shared exponent is floor(log2(max)) - emax, elements are rounded to nearest even and clamped.
    Left open there: subnormals count as zero, NaN and ±inf do not count for the maximum.
    """
    f = FORMATS[name]
    bits = x.view(np.uint16).astype(np.int64)
    negative, exponent, mantissa = bits >> 15, bits >> 7 & 0xFF, bits & 0x7F
    is_nan, is_inf = (exponent == 0xFF) & (mantissa > 0), (exponent == 0xFF) & (mantissa == 0)
    significand = np.where(exponent == 0, 0, mantissa + 0x80)  # x = significand · 2^(exponent - 134)
    largest = np.where(exponent == 0xFF, 0, bits & 0x7FFF).max(axis=1)
    byte = (largest >> 7) - LARGEST_EXPONENT[name]  # of 2^(exponent - 127 - emax)
    if rounding == "up":  # the largest number of both formats is 1.75 · 2^emax; 1.75 is 7 · 32 of the significand's 128
        byte += ((largest & 0x7F) + 0x80 > 7 * 32).astype(np.int64)
    byte = np.clip(np.where(largest >> 7 == 0, 0, byte), 0, 254)
    # In units of the smallest code, 2^(1 - bias - mantissa_bits), times 2^24.
    shift = exponent - 134 - (byte[:, None] - 127) - (1 - f.bias - f.mantissa_bits) + 24
    scaled = np.where(shift >= 0, significand << np.clip(shift, 0, 50), significand > 0)  # else far below a half
    values = code_values(name)
    midpoints = (values[1:] + values[:-1]) << 23
    below, through = (np.searchsorted(midpoints, scaled, side) for side in ("left", "right"))
    codes = np.where(below % 2 == 0, below, through)
    codes = np.where(is_inf, len(values) - 1, codes) | negative << 7
    return np.where(is_nan, f.nan, codes).astype(np.uint8), byte.astype(np.uint8)


def every_bfloat16(name):
    """[R, 32]: every pattern beside its neighbours, beside strangers, and behind a largest one that fixes the scale.

    That makes every midpoint of two codes a tie wherever it is the largest of its block.
    """
    patterns = np.arange(65536, dtype=np.uint16)
    strangers = np.random.default_rng(0).permutation(patterns)
    pinned = np.resize(patterns, 2115 * 31).reshape(2115, 31)
    pin = np.full((2115, 1), np.array(FORMATS[name].largest, ml_dtypes.bfloat16).view(np.uint16))
    blocks = [patterns.reshape(-1, 32), strangers.reshape(-1, 32), np.concatenate([pin, pinned], axis=1)]
    return np.concatenate(blocks).view(ml_dtypes.bfloat16)


@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")  # signalling NaNs
@pytest.mark.parametrize("rounding", ["up", "floor"])
@pytest.mark.parametrize("name", MX)
@pytest.mark.parametrize("backend", EVERYWHERE)
def test_every_bfloat16_is_quantised_as_the_standard_says(backend, name, rounding):
    x = every_bfloat16(name)
    codes, byte = standards(x, name, rounding)
    got = run(backend, "mxfp8_quantize", {"x": x}, axis=1, dtype=name, scale_rounding=rounding,
              check_finite=False)  # fmt: skip
    assert got.scale.dtype == E8M0
    assert got.qvalue.dtype == BITS_OF[name]
    np.testing.assert_array_equal(got.scale.view(np.uint8)[:, 0], byte)
    np.testing.assert_array_equal(got.qvalue.view(np.uint8), codes)
    saturated = np.isfinite(x.astype(np.float64)) & ((codes & 0x7F) == len(code_values(name)) - 1)
    assert set(np.unique(byte)) >= {0, 1, 254 - 7 - LARGEST_EXPONENT[name]}  # zero and subnormal blocks, the largest
    assert saturated.any()


@pytest.mark.tpu
@pytest.mark.parametrize(("name", "rounding", "generation"), crossed(MX, ["up", "floor"], [5, 6, 7]))
def test_usual_bfloat16_is_rounded_as_each_generation_does(name, rounding, generation, monkeypatch):
    """In tiles without one block that is not finite or that is tiny, which are encoded in other ways."""
    jax = pytest.importorskip("jax")
    monkeypatch.setattr("tpu_kernels._lib.chip.generation", lambda: generation)
    jax.clear_caches()
    x = every_bfloat16(name)
    largest = np.abs(x.astype(np.float32)).max(axis=1)
    x = np.where(((largest >= 2.0**-60) & (largest < np.inf))[:, None], x, np.zeros((), x.dtype))
    assert np.unique(x.view(np.uint16)).size > 2**15
    codes, byte = standards(x, name, rounding)
    got = run("tpu", "mxfp8_quantize", {"x": x}, axis=1, dtype=name, scale_rounding=rounding)
    np.testing.assert_array_equal(got.scale.view(np.uint8)[:, 0], byte)
    np.testing.assert_array_equal(got.qvalue.view(np.uint8), codes)
    jax.clear_caches()


@pytest.mark.parametrize("rounding", ["up", "floor"])
@pytest.mark.parametrize("backend", EVERYWHERE)
def test_a_column_is_quantised_as_a_row_is(backend, rounding):
    """And both in one pass, where the columnwise payload is another than the rowwise one."""
    x = np.random.default_rng(0).standard_normal((64, 70)).astype(ml_dtypes.bfloat16)
    dual = run(backend, "mxfp8_dual_quantize", {"x": x}, scale_rounding=rounding)
    padded = np.concatenate([x, np.zeros((64, 26), x.dtype)], axis=1)
    codes, byte = standards(padded.reshape(-1, 32), "float8_e4m3fn", rounding)
    np.testing.assert_array_equal(dual.rowwise.view(np.uint8), codes.reshape(64, 96)[:, :70])
    np.testing.assert_array_equal(dual.rowwise_scale.view(np.uint8), byte.reshape(64, 3))
    codes, byte = standards(np.ascontiguousarray(x.T).reshape(-1, 32), "float8_e4m3fn", rounding)
    np.testing.assert_array_equal(dual.columnwise.view(np.uint8), codes.reshape(70, 64).T)
    np.testing.assert_array_equal(dual.columnwise_scale.view(np.uint8), byte.reshape(70, 2).T)
    assert not np.array_equal(dual.columnwise, dual.rowwise)


def every_product(name):
    """Codes [256, 256], scale bytes [256, 8] and their exact products: each byte of a scale with each of a payload."""
    codes, byte = np.tile(np.arange(256, dtype=np.uint8), (256, 1)), np.arange(256, dtype=np.uint8)
    with np.errstate(invalid="ignore"):
        exact = decode(name) * np.exp2(byte - 127.0)[:, None]
    exact[255] = np.nan
    return codes.view(BITS_OF[name]), np.tile(byte[:, None], (1, 8)).view(E8M0), exact


@pytest.mark.parametrize("scales", [slice(0, 256), slice(127 - 60, 127 + 61)], ids=["all", "usual"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", MX)
@pytest.mark.parametrize("backend", EVERYWHERE)
def test_every_byte_with_every_scale_is_dequantised(backend, name, dtype, scales):
    """2^-127 and 2^127 among them; beyond the exponents of float32 and bfloat16 it is ±inf, below them ±0.

    Where all scales of a tile are usual ones, the TPU has one product for an element.
    """
    codes, scale, exact = (part[scales] for part in every_product(name))
    got = run(backend, "mxfp8_dequantize", {"qvalue": codes, "scale": scale}, dtype=dtype)
    expected = np.where(np.abs(exact) >= 2.0**128, np.copysign(np.inf, exact), exact)
    expected = np.where(np.abs(exact) < 2.0**-126, np.copysign(0.0, exact), expected)
    assert str(got.dtype) == dtype
    wide = got.astype(np.float64)
    np.testing.assert_array_equal(wide, expected)
    known = ~np.isnan(expected)
    np.testing.assert_array_equal(np.signbit(wide)[known], np.signbit(expected)[known])


@pytest.mark.tpu
@pytest.mark.parametrize("name", MX)
def test_every_byte_with_every_scale_is_multiplied(name):
    """Picked out by an identity, in bfloat16: exact, but what leaves its exponents, and a scale of 2^-127, which is
    subnormal there and 0."""
    codes, scale, exact = every_product(name)
    finite = np.isfinite(decode(name))
    codes = np.where(finite, codes.view(np.uint8), 0).view(BITS_OF[name])
    exact = np.where(finite, exact, exact[:, :1])  # those of code 0
    one = np.ones((1, 8, 256), E8M0)
    inputs = {"lhs": codes, "lhs_scale": scale, "rhs": np.eye(256, dtype=ml_dtypes.float8_e4m3fn)[None]}
    inputs |= {"rhs_scale": one, "group_sizes": np.array([256], np.int32)}
    got = run("tpu", "grouped_gemm", inputs, preferred_element_type="float32")
    fits = np.abs(exact).max(axis=1) < 2.0**128  # infinities beside zeros are NaN: below
    normal = fits[:, None] & ((exact == 0) | (np.abs(exact) >= 2.0**-126))
    normal[0] = False
    np.testing.assert_array_equal(got[normal], exact[normal])
    assert normal.sum() > 220 * 256
    np.testing.assert_array_equal(got[0], 0)
    assert np.isnan(got[255]).all()
    assert np.abs(got[fits] - exact[fits]).max() < 2.0**-110


@pytest.mark.tpu
def test_products_beyond_bfloat16_are_infinite():
    """One product to a sum: no infinity meets a zero."""
    lhs = np.array([[448], [-448], [1], [0.5]], ml_dtypes.float8_e4m3fn)
    inputs = {"lhs": lhs, "lhs_scale": np.full((4, 1), 2.0**127).astype(E8M0), "rhs": np.ones((1, 1, 1), lhs.dtype)}
    inputs |= {"rhs_scale": np.ones((1, 1, 1), E8M0), "group_sizes": np.array([4], np.int32)}
    got = run("tpu", "grouped_gemm", inputs, preferred_element_type="float32")
    np.testing.assert_array_equal(got[:, 0], [np.inf, -np.inf, 2.0**127, 2.0**126])


@pytest.mark.parametrize("shape", [(1, 1), (128, 4), (129, 5), (2, 200, 9), (0, 3), (5, 0)])
@pytest.mark.parametrize("backend", EVERYWHERE)
def test_swizzled_scales_lie_where_the_matrix_unit_looks(backend, shape):
    """cuBLAS's formula, byte by byte, and back."""
    *lead, rows, columns = shape
    scale = np.random.default_rng(0).integers(0, 256, shape).astype(np.uint8)
    got = run(backend, "swizzle_scales", {"scale": scale.view(E8M0)})
    tiles = -(-columns // 4)
    row, column = np.indices((rows, columns))
    offset = (row // 128 * tiles + column // 4) * 512 + row % 32 * 16 + row % 128 // 32 * 4 + column % 4
    expected = np.zeros((*lead, -(-rows // 128) * tiles * 512), np.uint8)
    expected[..., offset.ravel()] = scale.reshape(*lead, -1)
    np.testing.assert_array_equal(got.view(np.uint8).reshape(expected.shape), expected)
    back = run(backend, "unswizzle_scales", {"swizzled": got}, rows=rows, columns=columns)
    np.testing.assert_array_equal(back.view(np.uint8), scale)
