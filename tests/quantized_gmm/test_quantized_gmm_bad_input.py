"""Bad input to the quantisers, the block-scaled matmuls and the layer: the same words in all three packages."""

import ml_dtypes
import numpy as np
import pytest

from parity.interop import to_jax, to_torch
from tests.moe.test_moe_bad_input import BAD as LAYERS
from tests.support.functions import public

PACKAGES = {"cpu_golden": lambda x: x, "tpu_kernels": to_jax, "gpu_reference": to_torch}
E4M3, E5M2, E8M0 = ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e5m2, ml_dtypes.float8_e8m0fnu


def f32(*shape):
    return np.ones(shape, np.float32)


def f16(*shape):
    return np.ones(shape, np.float16)


def fp8(*shape, dtype=E4M3):
    return np.ones(shape, dtype)


def e8m0(*shape):
    return np.ones(shape, E8M0)


def i8(*shape):
    return np.ones(shape, np.int8)


def i32(*values):
    return np.array(values, np.int32)


def with_values(*values):
    x = f32(8, 64)
    x[0, : len(values)] = values
    return x


GMM = dict(lhs=fp8(8, 64), lhs_scale=f32(8, 2), rhs=fp8(3, 64, 6), rhs_scale=f32(3, 1, 6), group_sizes=i32(2, 3, 3))
TGMM = dict(lhs=fp8(64, 4), lhs_scale=f32(2, 4), rhs=fp8(64, 6), rhs_scale=f32(1, 6), group_sizes=i32(20, 30, 3))
GEMM = dict(lhs=fp8(8, 40), lhs_scale=e8m0(8, 2), rhs=fp8(3, 40, 6), rhs_scale=e8m0(3, 2, 6), group_sizes=i32(2, 3, 3))
WGRAD = dict(lhs=fp8(40, 4), lhs_scale=e8m0(2, 4), rhs=fp8(40, 6), rhs_scale=e8m0(2, 6), ragged="contracting")
DENSE = dict(lhs=f32(8, 64), rhs=f32(3, 64, 32), group_sizes=i32(2, 3, 3), quantize=True, block_size=32)
GOOD = {
    "fp8_quantize": dict(x=f32(8, 64), axis=1, block_size=32),
    "int8_quantize": dict(x=f32(8, 64), axis=1, block_size=32),
    "fp8_dual_quantize": dict(x=f32(32, 64), block_size=32),
    "fp8_dequantize": dict(qvalue=fp8(8, 64), scale=f32(8, 2)),
    "int8_dequantize": dict(qvalue=i8(8, 64), scale=f32(8, 2)),
    "mxfp8_quantize": dict(x=f32(8, 40), axis=1),
    "mxfp8_dual_quantize": dict(x=f32(8, 40)),
    "mxfp8_dequantize": dict(qvalue=fp8(8, 40), scale=e8m0(8, 2)),
    "swizzle_scales": dict(scale=e8m0(8, 2)),
    "unswizzle_scales": dict(swizzled=e8m0(1, 1, 32, 16), rows=8, columns=2),
    "grouped_gemm": GEMM,
    "gmm_quantized": GMM,
    "tgmm_quantized": TGMM,
    "grouped_dense": DENSE,
    "grouped_dense_bwd": {**DENSE, "dout": f32(8, 32), "bwd_quantize": True},
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
BAD = [(function, *bad) for function in ("fp8_quantize", "int8_quantize") for bad in BAD_X]
BAD += [
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
    *((function, *bad) for function in ("mxfp8_quantize", "mxfp8_dual_quantize") for bad in [
        (dict(x=[1.0]), TypeError, "x must be an array, got list"),
        (dict(dtype="int8"), TypeError, "dtype must be float8_e4m3fn or float8_e5m2, got int8"),
        (dict(scale_rounding="even"), ValueError, "scale_rounding must be 'up' or 'floor', got 'even'"),
        (dict(x=with_values(np.inf)), ValueError,
         "x must be free of infinities (or check_finite=False, to saturate them), got 1"),
    ]),
    ("mxfp8_quantize", dict(axis=(0, 1)), TypeError, "axis must be an int, got (0, 1)"),
    ("mxfp8_quantize", dict(axis=2), ValueError, "axis must be in [-2, 1] for shape [8, 40], got 2"),
    ("mxfp8_quantize", dict(axis=-3), ValueError, "axis must be in [-2, 1] for shape [8, 40], got -3"),
    ("mxfp8_dual_quantize", dict(x=f32(8)), ValueError, "x must have rank 2 [M, K] or 3 [G, M, K], got shape [8]"),
    ("mxfp8_dequantize", dict(qvalue=i8(8, 40)), TypeError, "qvalue must be float8_e4m3fn or float8_e5m2, got int8"),
    ("mxfp8_dequantize", dict(qvalue=1.0), TypeError, "qvalue must be an array, got float"),
    ("mxfp8_dequantize", dict(scale=f32(8, 2)), TypeError, "scale must be float8_e8m0fnu, got float32"),
    ("mxfp8_dequantize", dict(scale=2.0), TypeError, "scale must be a float8_e8m0fnu array, got float"),
    ("mxfp8_dequantize", dict(scale=e8m0(8, 1)), ValueError,
     "scale must have qvalue's shape [8, 40] with one of its axes, n, as ceil(n / 32), got [8, 1]"),
    ("mxfp8_dequantize", dict(dtype="float16"), TypeError, "dtype must be float32 or bfloat16, got float16"),
    ("swizzle_scales", dict(scale=f32(8, 2)), TypeError, "scale must be float8_e8m0fnu, got float32"),
    ("swizzle_scales", dict(scale=e8m0(8)), ValueError,
     "scale must have at least two axes [..., rows, scales of a row], got [8]"),
    ("unswizzle_scales", dict(rows=129), ValueError,
     "swizzled must have shape [..., 2, 1, 32, 16] for 129 rows of 2 scales, got [1, 1, 32, 16]"),
    ("unswizzle_scales", dict(columns=-1), ValueError, "columns must be at least 0, got -1"),
    ("unswizzle_scales", dict(rows=-1), ValueError, "rows must be at least 0, got -1"),
    ("unswizzle_scales", dict(rows=8.0), TypeError, "rows must be an int, got float"),
    ("grouped_gemm", dict(lhs=[1.0]), TypeError, "lhs must be an array [M, K], got list"),
    ("grouped_gemm", dict(lhs=i8(8, 40)), TypeError,
     "lhs must be float32, bfloat16, float8_e4m3fn or float8_e5m2, got int8"),
    ("grouped_gemm", dict(lhs=f32(8, 40), lhs_scale=None, rhs=f32(3, 40, 6).astype(ml_dtypes.bfloat16), rhs_scale=None),
     TypeError, "rhs must have lhs's dtype float32 where neither is quantised, got bfloat16"),
    ("grouped_gemm", dict(rhs=fp8(3, 32, 6)), ValueError,
     "rhs must have K = 40 as lhs does, got 32 (shape [3, 32, 6])"),
    ("grouped_gemm", dict(ragged="rhs"), ValueError, "ragged must be 'lhs' or 'contracting', got 'rhs'"),
    ("grouped_gemm", dict(scale_layout="tiled"), ValueError,
     "scale_layout must be 'plain' or 'swizzled', got 'tiled'"),
    ("grouped_gemm", dict(lhs_scale=None), ValueError, "lhs_scale must be given for a lhs of float8_e4m3fn, got None"),
    ("grouped_gemm", dict(rhs=f32(3, 40, 6)), ValueError, "rhs_scale must be None for a rhs of float32, got an array"),
    ("grouped_gemm", dict(lhs_scale=f32(8, 2)), TypeError, "lhs_scale must be float8_e8m0fnu, got float32"),
    ("grouped_gemm", dict(lhs_scale=e8m0(8, 1)), ValueError,
     "lhs_scale must have lhs's shape [8, 40] with axis 1 as ceil(40 / 32), [8, 2], got [8, 1]"),
    ("grouped_gemm", dict(scale_layout="swizzled"), ValueError,
     "lhs_scale must have the shape [1, 1, 32, 16] of the swizzled scales of lhs [8, 40], got [8, 2]"),
    ("grouped_gemm", dict(tiling=(8, 20, 8)), ValueError,
     "tiling must have tk a multiple or a divisor of the block 32, got 20"),
    ("grouped_gemm", dict(num_actual_groups=3), ValueError, 'num_actual_groups must be None for ragged="lhs", got 3'),
    ("grouped_gemm", dict(preferred_element_type="int8"), TypeError,
     "preferred_element_type must be float32, bfloat16 or float16, got int8"),
    ("grouped_gemm", dict(group_sizes=i32(2, 3, 4)), ValueError, "group_sizes must sum to at most M = 8, got 9"),
    ("grouped_gemm", dict(group_offset=1), ValueError,
     "group_offset must be in [0, E - G] = [0, 0] (E = 3 groups, G = 3 in the shard), got 1"),
    ("grouped_gemm", dict(existing_out=f32(8, 6)), TypeError, "existing_out must be bfloat16, got float32"),
    ("grouped_gemm", dict(WGRAD, transpose_rhs=True), ValueError,
     'transpose_rhs must be False for ragged="contracting", whose rhs is [M, N], got True'),
    ("grouped_gemm", dict(WGRAD, rhs=fp8(32, 6)), ValueError, "rhs must have M = 40 rows as lhs does, got 32"),
    ("grouped_gemm", dict(WGRAD, rhs_scale=e8m0(40, 1)), ValueError,
     "rhs_scale must have rhs's shape [40, 6] with axis 0 as ceil(40 / 32), [2, 6], got [40, 1]"),
    ("grouped_gemm", dict(WGRAD, tiling=(20, 8, 8)), ValueError,
     "tiling must have tm a multiple or a divisor of the block 32, got 20"),
    ("grouped_gemm", dict(WGRAD, num_actual_groups=4), ValueError, "num_actual_groups must be in [0, E = 3], got 4"),
    ("gmm_quantized", dict(lhs=[1.0]), TypeError, "lhs must be an array [M, K], got list"),
    ("gmm_quantized", dict(rhs=fp8(64, 6)), ValueError, "rhs must have rank 3 [G, K, N], got shape [64, 6]"),
    ("gmm_quantized", dict(lhs=f32(8, 64), rhs=f32(3, 64, 6)), TypeError,
     "lhs or rhs must be quantised (float8_e4m3fn, float8_e5m2, int8), got float32 and float32"),
    ("gmm_quantized", dict(rhs=i8(3, 64, 6)), TypeError,
     "rhs must be fp8 beside fp8 and int8 beside int8, got float8_e4m3fn and int8"),
    ("gmm_quantized", dict(rhs=fp8(3, 32, 6)), ValueError,
     "rhs must have K = 64 as lhs does, got 32 (shape [3, 32, 6])"),
    ("gmm_quantized", dict(lhs_scale=None), ValueError,
     "lhs_scale must be given for a lhs of float8_e4m3fn, got None"),
    ("gmm_quantized", dict(lhs=f32(8, 64)), ValueError,
     "lhs_scale must be None for a lhs of float32, got an array"),
    ("gmm_quantized", dict(rhs_scale=f16(3, 1, 6)), TypeError, "rhs_scale must be float32, got float16"),
    ("gmm_quantized", dict(rhs_scale=f32(3, 5, 6)), ValueError,
     "rhs_scale must have the rank of rhs [3, 64, 6] and axes that divide its own, got [3, 5, 6]"),
    ("gmm_quantized", dict(lhs_scale=f32(8, 4)), ValueError,
     "lhs_scale must have blocks of 32, 64, 128, 256, 512 or the whole of axis 1, which is summed over, got 16"),
    ("gmm_quantized", dict(tiling=(8, 48, 8)), ValueError,
     "tiling must have tk a multiple or a divisor of the block 32, got 48"),
    ("gmm_quantized", dict(tiling=lambda m, k, n: None), ValueError,
     "tiling must give (tm, tk, tn) for every shape, got None for (m, k, n) = (8, 64, 6)"),
    ("gmm_quantized", dict(preferred_element_type="int8"), TypeError,
     "preferred_element_type must be float32, bfloat16 or float16, got int8"),
    ("gmm_quantized", dict(existing_out=f32(8, 6)), TypeError, "existing_out must be bfloat16, got float32"),
    ("gmm_quantized", dict(group_sizes=i32(2, 3, 4)), ValueError, "group_sizes must sum to at most M = 8, got 9"),
    ("gmm_quantized", dict(group_sizes=i32(2, -3, 4)), ValueError, "group_sizes must be >= 0, got -3 at index 1"),
    ("gmm_quantized", dict(group_offset=1), ValueError,
     "group_offset must be in [0, E - G] = [0, 0] (E = 3 groups, G = 3 in the shard), got 1"),
    ("tgmm_quantized", dict(rhs=fp8(32, 6)), ValueError, "rhs must have M = 64 rows as lhs does, got 32"),
    ("tgmm_quantized", dict(lhs_scale=f32(4, 4)), ValueError,
     "lhs_scale must have blocks of 32, 64, 128, 256, 512 or the whole of axis 0, which is summed over, got 16"),
    ("tgmm_quantized", dict(rhs_scale=None), ValueError,
     "rhs_scale must be given for a rhs of float8_e4m3fn, got None"),
    ("tgmm_quantized", dict(tiling=(48, 8, 8)), ValueError,
     "tiling must have tm a multiple or a divisor of the block 32, got 48"),
    ("tgmm_quantized", dict(num_actual_groups=4), ValueError, "num_actual_groups must be in [0, E = 3], got 4"),
    ("grouped_dense", dict(quantize="yes"), ValueError, "quantize must be 'auto', True or False, got 'yes'"),
    ("grouped_dense", dict(bwd_quantize=2), ValueError, "bwd_quantize must be 'auto', True or False, got 2"),
    ("grouped_dense", dict(block_size=0), ValueError, "block_size must be positive, got 0"),
    ("grouped_dense", dict(block_size=48), ValueError, "block_size must divide axis 1 of x, 64, got 48"),
    ("grouped_dense", dict(lhs=fp8(8, 64)), TypeError, "lhs must be float32, bfloat16 or float16, got float8_e4m3fn"),
    ("grouped_dense", dict(rhs=f32(3, 32, 32)), ValueError,
     "rhs must have K = 64 as lhs does, got 32 (shape [3, 32, 32])"),
    ("grouped_dense", dict(existing_out=f32(8, 64)), ValueError,
     "existing_out must have shape [M, N] = [8, 32], got [8, 64]"),
    ("grouped_dense", dict(group_sizes=i32(2, 3, 4)), ValueError, "group_sizes must sum to at most M = 8, got 9"),
    ("grouped_dense_bwd", dict(quantize="yes"), ValueError, "quantize must be 'auto', True or False, got 'yes'"),
    ("grouped_dense_bwd", dict(bwd_quantize=2), ValueError, "bwd_quantize must be 'auto', True or False, got 2"),
    ("grouped_dense_bwd", dict(block_size=0), ValueError, "block_size must be positive, got 0"),
    ("grouped_dense_bwd", dict(lhs=[1.0]), TypeError, "lhs must be an array [M, K], got list"),
    ("grouped_dense_bwd", dict(rhs=i8(3, 64, 32)), TypeError, "rhs must be float32, bfloat16 or float16, got int8"),
    ("grouped_dense_bwd", dict(tiling=(8, 8)), TypeError, "tiling must be three ints (tm, tk, tn), got (8, 8)"),
    ("grouped_dense_bwd", dict(dout=f32(8, 64)), ValueError, "dout must have shape [M, N] = [8, 32], got [8, 64]"),
    ("grouped_dense_bwd", dict(dout=f16(8, 32)), TypeError, "dout must be float32, got float16"),
]  # fmt: skip


def call(package, function, arguments):
    convert = PACKAGES[package]
    converted = {
        name: convert(np.asarray(x)) if isinstance(x, np.ndarray | np.generic) else x for name, x in arguments.items()
    }
    return public(package)[function](**converted)


@pytest.mark.parametrize("package", PACKAGES)
@pytest.mark.parametrize("function", GOOD)
def test_the_good_arguments_are_good(package, function):
    assert call(package, function, GOOD[function]) is not None


@pytest.mark.parametrize("package", PACKAGES)
@pytest.mark.parametrize(("function", "change", "error", "message"), BAD, ids=[f"{b[0]}-{b[3]}" for b in BAD])
def test_bad_arguments_are_refused_in_the_same_words(package, function, change, error, message):
    with pytest.raises(error) as refused:
        call(package, function, {**GOOD[function], **change})
    assert str(refused.value) == message
    assert type(refused.value) is error


def test_infinities_saturate_where_values_cannot_be_seen():
    jax = pytest.importorskip("jax")
    from cpu_golden import quantize as golden
    from tpu_kernels.quantize import fp8_quantize

    x = with_values(np.inf, -np.inf, np.nan)
    traced = jax.jit(lambda x: fp8_quantize(x, 1, 32))(to_jax(x))
    expected = golden.fp8_quantize(x, 1, 32, check_finite=False)
    assert np.asarray(traced.qvalue).tobytes() == expected.qvalue.tobytes()
    assert np.asarray(traced.scale).tobytes() == expected.scale.tobytes()


def test_everything_public_is_tested():
    """A function that a package has and this list has not would be refused nothing."""
    goldens, helpers = public("cpu_golden"), {"expand", "mxfp8_values"}
    tested = {*GOOD, *(function for function, *_ in LAYERS)}
    homes = {goldens[function].__module__ for function in tested}
    of_homes = {name for name, value in goldens.items() if value.__module__ in homes}
    assert {name for name in of_homes - helpers if not name.endswith("_definition")} == tested
