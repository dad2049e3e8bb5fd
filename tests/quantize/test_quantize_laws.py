"""The whole finite domain on both backends: every 16-bit float quantised, ties of float32, every byte dequantised."""

import ml_dtypes
import numpy as np
import pytest

from cpu_golden import quantize as golden
from tests.support.formats import BITS_OF, FORMATS, decode, quantise
from tests.support.functions import BACKENDS, run


def every_pattern(dtype, largest):
    """Every bit pattern of a 16-bit float, in three arrangements of [rows, 128].

    As they come; those of equal size together; and 127 to a row behind `largest`, so that wherever that is the
    largest of its row the scale is 1, and every midpoint of two codes is met as a tie.
    """
    patterns = np.arange(65536, dtype=np.uint16)
    in_order = np.argsort(np.abs(np.nan_to_num(patterns.view(dtype).astype(np.float64))), kind="stable")
    pinned = np.resize(patterns, 517 * 127).view(dtype).reshape(517, 127)
    return {
        "mixed": patterns.view(dtype).reshape(512, 128),
        "sorted": patterns[in_order].view(dtype).reshape(512, 128),
        "pinned": np.concatenate([np.full((517, 1), largest, dtype), pinned], axis=1),
    }


@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")  # NaN on purpose
@pytest.mark.parametrize("dtype", [ml_dtypes.bfloat16, np.float16], ids=["bf16", "f16"])
@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("backend", BACKENDS)
def test_every_pattern_is_quantised_to_the_goldens_bits(backend, name, dtype):
    function = "int8_quantize" if name == "int8" else "fp8_quantize"
    arguments = {"axis": 1, "block_size": None, "check_finite": False}
    if name != "int8":
        arguments["dtype"] = name
    for arrangement, x in every_pattern(dtype, FORMATS[name].largest).items():
        got = run(backend, function, {"x": x}, **arguments)
        expected = getattr(golden, function)(x, **arguments)
        for field, ours, theirs in zip(got._fields, got, expected, strict=True):
            wrong = np.argwhere(ours.view(f"u{ours.dtype.itemsize}") != theirs.view(f"u{theirs.dtype.itemsize}"))
            assert not len(wrong), f"{arrangement} {field}: {len(wrong)} differ, first at {wrong[0]}"


@pytest.mark.parametrize("power", [0, -120], ids=["usual", "lifted"])
@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("backend", BACKENDS)
def test_a_quotient_a_hair_off_a_tie_is_rounded_to_the_nearer_side(backend, name, power):
    """float32 beside the product of a scale with all its 24 bits and the middle of two codes, and that product itself
    where float32 has it; the search is done in float64, where no quotient of the kind is rounded onto a tie."""
    largest = FORMATS[name].largest
    values = np.unique(np.abs(decode(name)[np.isfinite(decode(name))]))
    values = values[values <= largest]
    absmax = (np.random.default_rng(0).uniform(1, 2, (32, 1)) * largest * 2.0**power).astype(np.float32)
    scale = (absmax / np.float64(largest)).astype(np.float32)
    near = (scale * (values[1:] + values[:-1]) / 2).astype(np.float32)
    beside = [np.nextafter(near, np.float32(sign * np.inf)) for sign in (-1, 1)]
    x = np.minimum(np.concatenate([absmax, near, -near, *beside], axis=1), absmax)
    function, options = ("int8_quantize", {}) if name == "int8" else ("fp8_quantize", {"dtype": name})
    got = run(backend, function, {"x": x}, axis=1, block_size=None, **options)
    codes, scales = quantise(x, (32, 1), name)
    assert got.scale.tobytes() == scales.tobytes()
    assert got.qvalue.tobytes() == codes.tobytes()


@pytest.mark.parametrize("is_usual", [False, True])
@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("backend", BACKENDS)
def test_every_byte_is_dequantised(backend, name, is_usual):
    """Where all scales of a tile are usual ones, the TPU has one product for an element."""
    codes = np.tile(np.arange(256, dtype=np.uint8).view(BITS_OF[name]), (8, 1))
    scale = np.array([1, 0.1, 3e-38, 2.0**-126, 1e36, 2.0**127, 1 / 3, 448], np.float32)[:, None]
    if is_usual:
        scale = np.clip(scale, 2.0**-60, 2.0**60)
    function = "int8_dequantize" if name == "int8" else "fp8_dequantize"
    got = run(backend, function, {"qvalue": codes, "scale": scale})
    with np.errstate(over="ignore"):
        expected = (decode(name) * scale.astype(np.float64)).astype(np.float32)
    expected[np.abs(expected) < np.finfo(np.float32).tiny] *= 0.0
    np.testing.assert_array_equal(got, expected)
    assert np.array_equal(np.signbit(got)[~np.isnan(got)], np.signbit(expected)[~np.isnan(expected)])


@pytest.mark.tpu
@pytest.mark.parametrize("generation", [5, 6, 7])
def test_every_byte_is_widened(generation, monkeypatch):
    """As each generation of TPUs does it, in every place of the four that share a word."""
    jax = pytest.importorskip("jax")
    from jax.experimental import pallas as pl

    from tpu_kernels._lib import narrow

    monkeypatch.setattr("tpu_kernels._lib.chip.generation", lambda: generation)
    codes = np.arange(256, dtype=np.uint8).repeat(128).reshape(256, 128)
    codes = np.concatenate([codes, np.random.default_rng(0).permuted(codes, axis=0)]).view(ml_dtypes.float8_e4m3fn)

    def widen(x, wide):
        wide[...] = narrow.widen(x[...], wide.dtype)

    unit = narrow.unit_of(codes.dtype, "bfloat16")

    wide = jax.ShapeDtypeStruct(codes.shape, jax.numpy.bfloat16)
    got = pl.pallas_call(widen, out_shape=wide, interpret=True)(codes)
    np.testing.assert_array_equal(np.asarray(got, np.float64) * unit, codes.astype(np.float64))
