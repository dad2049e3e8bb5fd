"""The goldens of the quantisers: against formats written out by hand, and a search for the nearest code."""

import ml_dtypes
import numpy as np
import pytest

from cpu_golden.quantize import fp8_dequantize, fp8_dual_quantize, fp8_quantize, int8_dequantize, int8_quantize
from tests.support.formats import BITS_OF, FORMATS, decode, quantise


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


def test_a_block_of_one_element_has_a_scale_of_its_own():
    x = np.float32([[3.0, -0.75, 224.0]])
    found = fp8_quantize(x, axis=1, block_size=1)
    np.testing.assert_array_equal(found.qvalue.astype(np.float32), [[448.0, -448.0, 448.0]])
    np.testing.assert_array_equal(found.scale, np.abs(x) / np.float32(448))


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
