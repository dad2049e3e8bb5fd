"""Bad input to the block-scaled matmuls: the same words in all three packages."""

from tests.support.bad_input import f16, f32, fp8, i8, i32, refusals

GMM = dict(lhs=fp8(8, 64), lhs_scale=f32(8, 2), rhs=fp8(3, 64, 6), rhs_scale=f32(3, 1, 6), group_sizes=i32(2, 3, 3))
TGMM = dict(lhs=fp8(64, 4), lhs_scale=f32(2, 4), rhs=fp8(64, 6), rhs_scale=f32(1, 6), group_sizes=i32(20, 30, 3))
GOOD = {
    "gmm_quantized": GMM,
    "tgmm_quantized": TGMM,
}
BAD = [
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
]  # fmt: skip

test_the_good_arguments_are_good, test_bad_arguments_are_refused_in_the_same_words = refusals(GOOD, BAD)
