"""What `op_arguments` says of arguments that the packages cannot tell it apart by: no array at all, and defaults."""

from types import SimpleNamespace

import ml_dtypes
import numpy as np
import pytest

from op_arguments import check_array, check_output_dtype
from op_arguments.moe import check_expert_parallel
from op_arguments.quantize import check_dequantize, check_dual_quantize, check_mxfp8_dequantize, check_quantize
from op_arguments.quantized_gmm import RAGGED, check_gmm_quantized, check_grouped_gemm, check_tgmm_quantized

E4M3 = ml_dtypes.float8_e4m3fn
SIZES = np.array([2, 3, 3], np.int32)
SHARED = dict(group_sizes=SIZES, group_offset=0, existing_out=None, preferred_element_type=None, sizes=None)


def gmm(lhs, rhs):
    return check_gmm_quantized(lhs, None, rhs, None, transpose_rhs=False, **SHARED)


def tgmm(lhs, rhs):
    return check_tgmm_quantized(lhs, None, rhs, None, num_actual_groups=None, **SHARED)


def gemm(lhs, rhs, ragged="lhs"):
    options = dict(lhs_scale=None, rhs_scale=None, num_actual_groups=None, transpose_rhs=False, scale_layout="plain")
    return check_grouped_gemm(lhs, rhs, ragged=ragged, **options, **SHARED)


@pytest.mark.parametrize("x", [[1.0], SimpleNamespace(shape=(8, 64)), SimpleNamespace(dtype=np.float32)])
def test_what_is_no_array_is_refused_as_that(x):
    wide, narrow = np.ones((8, 64), np.float32), np.ones((8, 64), E4M3)
    calls = {
        "qvalue": [
            lambda: check_dequantize(x, wide, ("float8_e4m3fn",)),
            lambda: check_mxfp8_dequantize(x, wide, None),
        ],
        "scale": [
            lambda: check_dequantize(narrow, x, ("float8_e4m3fn",)),
            lambda: check_mxfp8_dequantize(narrow, x, None),
        ],
        "x": [lambda: check_quantize(x, 1, 32, "float8_e4m3fn"), lambda: check_dual_quantize(x, 32, "float8_e4m3fn")],
        "lhs": [lambda: gmm(x, wide), lambda: tgmm(x, wide), lambda: gemm(x, wide)],
        "rhs": [lambda: gmm(wide, x), lambda: tgmm(wide, x), *(lambda r=r: gemm(wide, x, r) for r in RAGGED)],
    }
    for name, refused in calls.items():
        for call in refused:
            with pytest.raises(TypeError, match=f"{name} must be an? .*array.*, got {type(x).__name__}"):
                call()


@pytest.mark.parametrize(("lhs", "rhs", "out"), [("float32", E4M3, "float32"), (E4M3, "float32", "bfloat16")])
def test_the_result_has_the_dtype_of_lhs_and_bfloat16_where_that_is_narrow(lhs, rhs, out):
    lhs, rhs = np.ones((8, 64), lhs), np.ones((3, 64, 6), rhs)
    one = np.ones((1, 1), np.float32)
    scales = [one if x.dtype == E4M3 else None for x in (lhs, rhs)]
    scales[1] = None if scales[1] is None else one[None]
    problem = check_gmm_quantized(lhs, scales[0], rhs, scales[1], transpose_rhs=False, **SHARED)
    assert problem.out_dtype == out


@pytest.mark.parametrize("offset", [1, np.int32(0)])
def test_a_shard_of_experts_that_are_shared_out_is_refused(offset):
    check_expert_parallel(SimpleNamespace(groups=2, experts=4), 2, 0)
    with pytest.raises(ValueError, match=f"group_offset must be 0 .*, got {offset}"):
        check_expert_parallel(SimpleNamespace(groups=2, experts=4), 2, offset)


def test_float64_is_let_through_only_where_the_goldens_ask_for_it():
    x = np.ones((2, 3))
    check_array("x", x, "M, K", ("float32",), exact=True)
    assert check_output_dtype("dtype", "float64", None, ("float32",), exact=True) == "float64"
    with pytest.raises(TypeError, match="x must be float32, got float64"):
        check_array("x", x, "M, K", ("float32",))
    with pytest.raises(TypeError, match="dtype must be float32, got float64"):
        check_output_dtype("dtype", "float64", None, ("float32",))
