"""Bad input to the quantisers: the same words in all three packages."""

import numpy as np
import pytest

from op_arguments.quantize import check_scale
from parity.interop import to_jax
from tests.support.bad_input import f16, f32, fp8, i8, refusals, with_values

GOOD = {
    "fp8_quantize": dict(x=f32(8, 64), axis=1, block_size=32),
    "int8_quantize": dict(x=f32(8, 64), axis=1, block_size=32),
    "fp8_dual_quantize": dict(x=f32(32, 64), block_size=32),
    "fp8_dequantize": dict(qvalue=fp8(8, 64), scale=f32(8, 2)),
    "int8_dequantize": dict(qvalue=i8(8, 64), scale=f32(8, 2)),
}

# What both quantisers refuse.
BAD_X = [
    (dict(x=[1.0]), TypeError, "x must be an array, got list"),
    (dict(x=i8(8, 64)), TypeError, "x must be float32, bfloat16 or float16, got int8"),
    (dict(x=f32()), ValueError, "x must have at least one axis, got a scalar"),
    (dict(axis=2), ValueError, "axis must be in [-2, 1] for shape [8, 64], got 2"),
    (dict(axis=-3), ValueError, "axis must be in [-2, 1] for shape [8, 64], got -3"),
    (dict(axis=(0, 1.0)), TypeError, "axis must be an int or a tuple of ints, got (0, 1.0)"),
    (dict(block_size=-1), ValueError, "block_size must be positive, got -1"),
    (dict(axis=1.0), TypeError, "axis must be an int or a tuple of ints, got 1.0"),
    (dict(axis=(1, -1)), ValueError, "axis must name each axis once, got (1, -1)"),
    (dict(block_size=48), ValueError, "block_size must divide axis 1 of x, 64, got 48"),
    (dict(block_size=0), ValueError, "block_size must be positive, got 0"),
    (dict(block_size=32.0), TypeError, "block_size must be an int or None (the whole axis), got float"),
    (dict(x=with_values(np.inf, -np.inf)), ValueError,
     "x must be free of infinities (or check_finite=False, to saturate them), got 2"),
]  # fmt: skip
BAD = [
    *((function, *bad) for function in ("fp8_quantize", "int8_quantize") for bad in BAD_X),
    ("fp8_quantize", dict(dtype="int8"), TypeError, "dtype must be float8_e4m3fn or float8_e5m2, got int8"),
    ("int8_quantize", dict(x=with_values(np.nan)), ValueError,
     "x must be free of NaN (or check_finite=False, to make it 0), got 1"),
    ("fp8_dual_quantize", dict(x=f32(64)), ValueError, "x must have rank 2 [M, K] or 3 [G, M, K], got shape [64]"),
    ("fp8_dual_quantize", dict(x=f32(31, 64)), ValueError, "block_size must divide axis 0 of x, 31, got 32"),
    ("fp8_dual_quantize", dict(x=with_values(np.inf), block_size=8), ValueError,
     "x must be free of infinities (or check_finite=False, to saturate them), got 1"),
    ("fp8_dequantize", dict(qvalue=f32(8, 64)), TypeError,
     "qvalue must be float8_e4m3fn or float8_e5m2, got float32"),
    ("fp8_dequantize", dict(qvalue=1.0), TypeError, "qvalue must be an array, got float"),
    ("int8_dequantize", dict(qvalue=fp8(8, 64)), TypeError, "qvalue must be int8, got float8_e4m3fn"),
    ("fp8_dequantize", dict(scale=f16(8, 2)), TypeError, "scale must be float32, got float16"),
    ("fp8_dequantize", dict(scale=1.0), TypeError, "scale must be a float32 array, got float"),
    ("fp8_dequantize", dict(scale=f32(8, 3)), ValueError,
     "scale must have the rank of qvalue [8, 64] and axes that divide its own, got [8, 3]"),
    ("fp8_dequantize", dict(qvalue=fp8(0, 64)), ValueError,
     "scale must have the rank of qvalue [0, 64] and axes that divide its own, got [8, 2]"),
    ("int8_dequantize", dict(qvalue=i8(8, 0)), ValueError,
     "scale must have the rank of qvalue [8, 0] and axes that divide its own, got [8, 2]"),
    ("fp8_dequantize", dict(scale=f32(8)), ValueError,
     "scale must have the rank of qvalue [8, 64] and axes that divide its own, got [8]"),
]  # fmt: skip

test_the_good_arguments_are_good, test_bad_arguments_are_refused_in_the_same_words = refusals(GOOD, BAD)


def test_infinities_saturate_where_values_cannot_be_seen():
    jax = pytest.importorskip("jax")
    from cpu_golden import quantize as golden
    from tpu_kernels.quantize import fp8_quantize

    x = with_values(np.inf, -np.inf, np.nan)
    traced = jax.jit(lambda x: fp8_quantize(x, 1, 32))(to_jax(x))
    expected = golden.fp8_quantize(x, 1, 32, check_finite=False)
    assert np.asarray(traced.qvalue).tobytes() == expected.qvalue.tobytes()
    assert np.asarray(traced.scale).tobytes() == expected.scale.tobytes()


def test_an_axis_of_length_zero_has_blocks_of_one():
    """With no scale along it, or with one."""
    for parts in (0, 1):
        assert check_scale("scale", f32(parts, 3), "qvalue", (0, 3)) == (1, 1)
