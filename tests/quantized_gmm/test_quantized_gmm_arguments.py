"""What `op_arguments` says of arguments that the packages cannot tell it apart by: no array at all, and defaults."""

from types import SimpleNamespace

import ml_dtypes
import numpy as np
import pytest

from op_arguments import check_array, check_output_dtype
from op_arguments.gmm import Groups
from op_arguments.grouped_gemm import RAGGED, GroupedGemmOptions, Support, check_grouped_gemm, check_strict
from op_arguments.moe import check_expert_parallel
from op_arguments.mxfp8 import (
    check_mxfp8_dequantize,
    check_mxfp8_quantize,
    check_mxfp8_tile,
    check_unswizzle,
    swizzled_shape,
)
from op_arguments.quantize import (
    Quantized,
    check_blocks,
    check_dequantize,
    check_dual_quantize,
    check_quantize,
    check_scale,
)
from op_arguments.quantized_gmm import check_gmm_quantized, check_tgmm_quantized, check_tile

E4M3 = ml_dtypes.float8_e4m3fn
GROUPS = Groups(np.array([2, 3, 3], np.int32), 0, None)
SHARED = dict(groups=GROUPS, existing_out=None, preferred_element_type=None)


def gmm(lhs, rhs):
    return check_gmm_quantized(Quantized(lhs, None), Quantized(rhs, None), transpose_rhs=False, **SHARED)


def tgmm(lhs, rhs):
    return check_tgmm_quantized(Quantized(lhs, None), Quantized(rhs, None), num_actual_groups=None, **SHARED)


def gemm(lhs, rhs, ragged="lhs"):
    return check_grouped_gemm(lhs, rhs, GROUPS, GroupedGemmOptions(ragged=ragged))


def test_the_output_has_by_default_the_dtype_of_an_lhs_that_is_not_quantised():
    wide, narrow = (
        Quantized(np.ones((8, 64), np.float32), None),
        Quantized(np.ones((3, 64, 32), E4M3), np.ones((3, 1, 1), np.float32)),
    )
    assert check_gmm_quantized(wide, narrow, transpose_rhs=False, **SHARED).out_dtype == "float32"
    narrow, wide = (
        Quantized(np.ones((8, 64), E4M3), np.ones((8, 1), np.float32)),
        Quantized(np.ones((3, 64, 32), np.float32), None),
    )
    assert check_gmm_quantized(narrow, wide, transpose_rhs=False, **SHARED).out_dtype == "bfloat16"


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
    problem = check_gmm_quantized(Quantized(lhs, scales[0]), Quantized(rhs, scales[1]), transpose_rhs=False, **SHARED)
    assert problem.out_dtype == out


def test_what_is_just_good_enough_is_good():
    for axis in (-2, -1, 0, 1, (0, 1), (-2, -1), (1, 0)):
        blocks = check_blocks(np.ones((6, 4), np.float32), axis, 1)
        assert blocks == (1, 1)
        assert check_blocks(np.ones((0, 4), np.float32), 0, None) == (1, 1)  # a block of nothing is one of one
    for axis in (-2, -1, 0, 1):
        assert check_mxfp8_quantize(np.ones((6, 4), np.float32), axis, None, "up") == (axis % 2, "float8_e4m3fn")
        assert check_blocks(np.ones((6, 4), np.float32), axis, None) == ((6, 1) if axis % 2 == 0 else (1, 4))
    for rank in (2, 3):
        by_rows, by_columns, _ = check_dual_quantize(np.ones((2, 6, 4)[-rank:], np.float32), 2, None)
        assert (by_rows, by_columns) == ((1, 1, 2)[-rank:], (1, 2, 1)[-rank:])
    for rows, columns in ((0, 0), (0, 4), (128, 0), (129, 5)):
        check_unswizzle(np.ones(swizzled_shape((rows, columns)), ml_dtypes.float8_e8m0fnu), rows, columns)


def test_a_scale_of_nothing_is_one_of_blocks_of_one():
    """And an axis without elements is a block of one as well, but no more than one: nothing is divided by 0."""
    for shape, of, blocks in [
        ((2, 4), (8, 8), (4, 2)), ((0, 4), (0, 8), (1, 2)), ((1, 1), (0, 8), (1, 8)), ((1, 0), (8, 0), (8, 1)),
    ]:  # fmt: skip
        assert check_scale("scale", np.ones(shape, np.float32), "x", of) == blocks
    for shape, of in (((0, 4), (8, 8)), ((2, 1), (0, 8)), ((3, 4), (8, 8)), ((4,), (8, 8)), ((1, 2, 4), (8, 8))):
        with pytest.raises(ValueError, match="scale must have the rank of x"):
            check_scale("scale", np.ones(shape, np.float32), "x", of)


@pytest.mark.parametrize(
    ("tile", "block", "size", "good"),
    [
        *((tile, 64, 256, True) for tile in (16, 32, 64, 128, 192)),
        *((tile, 64, 256, False) for tile in (24, 48, 96)),
        (48, 256, 256, True),  # one block: there is none to cut
        (48, 512, 256, True),
        (96, 64, 65, False),
    ],
)
def test_a_tile_must_be_a_multiple_or_a_divisor_of_the_block_unless_there_is_one_block(tile, block, size, good):
    if good:
        check_tile("tk", tile, block, size)
    else:
        with pytest.raises(ValueError, match=f"a multiple or a divisor of the block {block}, got {tile}"):
            check_tile("tk", tile, block, size)


def test_a_tile_of_the_whole_axis_cuts_no_block_of_mxfp8():
    for tile, size in ((40, 40), (41, 40), (16, 40), (64, 100)):
        check_mxfp8_tile("tk", tile, size)
    with pytest.raises(ValueError, match="block 32, got 40"):
        check_mxfp8_tile("tk", 40, 41)


@pytest.mark.parametrize("offset", [1, np.int32(0)])
def test_a_shard_of_experts_that_are_shared_out_is_refused(offset):
    check_expert_parallel(SimpleNamespace(groups=2, experts=4), 2, 0)
    with pytest.raises(ValueError, match=f"group_offset must be 0 .*, got {offset}"):
        check_expert_parallel(SimpleNamespace(groups=2, experts=4), 2, offset)


@pytest.mark.parametrize(("groups", "devices"), [(1, 2), (2, 1), (4, 4), (3, 2)])
def test_experts_are_shared_out_in_equal_parts(groups, devices):
    with pytest.raises(ValueError, match=f"w_gate must have E / devices = 4 / {devices} experts .*, got {groups}"):
        check_expert_parallel(SimpleNamespace(groups=groups, experts=4), devices, 0)


def test_strict_refuses_a_fallback_and_nothing_else():
    for fallback, strict in ((False, False), (False, True), (True, False)):
        check_strict(Support("direct", "because", fallback), strict)
    with pytest.raises(ValueError, match="strict must be False for a fallback, detour: because"):
        check_strict(Support("detour", "because", True), True)


def test_float64_is_let_through_only_where_the_goldens_ask_for_it():
    x = np.ones((2, 3))
    check_array("x", x, "M, K", ("float32",), exact=True)
    assert check_output_dtype("dtype", "float64", None, ("float32",), exact=True) == "float64"
    with pytest.raises(TypeError, match="x must be float32, got float64"):
        check_array("x", x, "M, K", ("float32",))
    with pytest.raises(TypeError, match="dtype must be float32, got float64"):
        check_output_dtype("dtype", "float64", None, ("float32",))
