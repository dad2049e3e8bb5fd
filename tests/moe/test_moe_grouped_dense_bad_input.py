"""Bad input to the quantised layer: the same words in all three packages."""

from tests.support.bad_input import f16, f32, fp8, i8, i32, refusals

DENSE = dict(lhs=f32(8, 64), rhs=f32(3, 64, 32), group_sizes=i32(2, 3, 3), quantize=True, block_size=32)
GOOD = {
    "grouped_dense": DENSE,
    "grouped_dense_bwd": {**DENSE, "dout": f32(8, 32), "bwd_quantize": True},
}
BAD = [
    ("grouped_dense", dict(quantize="yes"), ValueError, "quantize must be 'auto', True or False, got 'yes'"),
    ("grouped_dense", dict(bwd_quantize=2), ValueError, "bwd_quantize must be 'auto', True or False, got 2"),
    ("grouped_dense", dict(block_size=0), ValueError, "block_size must be positive, got 0"),
    ("grouped_dense", dict(block_size=-1, quantize=False), ValueError, "block_size must be positive, got -1"),
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

test_the_good_arguments_are_good, test_bad_arguments_are_refused_in_the_same_words = refusals(GOOD, BAD)
