"""Bad input to the MXFP8 quantisers and to grouped_gemm: the same words in all three packages."""

import ml_dtypes
import numpy as np

from tests.support.bad_input import e8m0, f32, fp8, i8, i32, refusals, with_values

GEMM = dict(lhs=fp8(8, 40), lhs_scale=e8m0(8, 2), rhs=fp8(3, 40, 6), rhs_scale=e8m0(3, 2, 6), group_sizes=i32(2, 3, 3))
WGRAD = dict(lhs=fp8(40, 4), lhs_scale=e8m0(2, 4), rhs=fp8(40, 6), rhs_scale=e8m0(2, 6), ragged="contracting")
GOOD = {
    "mxfp8_quantize": dict(x=f32(8, 40), axis=1),
    "mxfp8_dual_quantize": dict(x=f32(8, 40)),
    "mxfp8_dequantize": dict(qvalue=fp8(8, 40), scale=e8m0(8, 2)),
    "swizzle_scales": dict(scale=e8m0(8, 2)),
    "unswizzle_scales": dict(swizzled=e8m0(1, 1, 32, 16), rows=8, columns=2),
    "grouped_gemm": GEMM,
}
BAD = [
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
    ("grouped_gemm", dict(rhs=fp8(40, 6)), ValueError, "rhs must have rank 3 [G, K, N], got shape [40, 6]"),
    ("grouped_gemm", dict(rhs=fp8(6, 40), transpose_rhs=True), ValueError,
     "rhs must have rank 3 [G, N, K], got shape [6, 40]"),
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
]  # fmt: skip

test_the_good_arguments_are_good, test_bad_arguments_are_refused_in_the_same_words = refusals(GOOD, BAD)
