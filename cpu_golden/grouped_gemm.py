"""Grouped matrix multiplication of MXFP8 operands: the definition, in float64.

Forward, the data's gradient and the weights' in one function. Groups and shards are those of `cpu_golden/gmm.py`,
scales those of `cpu_golden/mxfp8.py`.
"""

from typing import Any

import numpy as np

from cpu_golden import Array
from cpu_golden._lib.arguments import groups_of, one_tile
from cpu_golden.gmm import gmm, gmm_definition, tgmm, tgmm_definition
from cpu_golden.mxfp8 import mxfp8_values
from cpu_golden.stages import Stages, exact
from cpu_golden.swizzle import unswizzle_scales
from op_arguments import Tiling, resolve_tiling
from op_arguments.grouped_gemm import check_grouped_gemm, check_mxfp8_tile
from op_arguments.mxfp8 import MX_BLOCK
from op_arguments.quantize import Quantized


def grouped_gemm(
    lhs: Array,
    rhs: Array,
    group_sizes: Array,
    *,
    lhs_scale: Array | None = None,
    rhs_scale: Array | None = None,
    ragged: str = "lhs",
    group_offset: int = 0,
    num_actual_groups: int | None = None,
    existing_out: Array | None = None,
    transpose_rhs: bool = False,
    scale_layout: str = "plain",
    preferred_element_type: Any = None,
    tiling: Tiling | None = None,
    stages: Stages = exact,
) -> Array:
    """Grouped matmul of MXFP8 operands: forward and the data's gradient (ragged="lhs"), the weights' ("contracting").

    ragged="lhs" is `gmm`: lhs [M, K], rhs [G, K, N] (or [G, N, K] with transpose_rhs), out [M, N], summed over K.
    ragged="contracting" is `tgmm`: lhs [M, K], rhs [M, N], out [G, K, N] of num_actual_groups groups, summed over each
    group's rows. An operand is float32 or bfloat16 (both alike where neither is quantised), with None for its scale,
    or fp8 (e4m3fn, e5m2, mixed or not) with a float8_e8m0fnu for every 32 elements of the axis that is summed over, as
    `mxfp8_quantize` along that axis gives them: K, or for "contracting" all M rows, where a group that begins inside
    32 rows uses their scale for its part of them, whatever its size. scale_layout="swizzled": both scales are
    `swizzle_scales` of these, with the axis of the blocks moved to the end.
    group_sizes, group_offset, existing_out, rows and groups without data, and errors as `gmm` and `tgmm`;
    preferred_element_type: float32, bfloat16 or float16 (default: the unquantised lhs's dtype, else bfloat16); it is
    checked, and the float64 result left unrounded. The products are exact here, however large a scale is. A `tiling`
    whose step along the sum (tk, or tm for "contracting") cuts a block is refused; nothing else depends on it here.
    Stages and sites as `gmm` and `tgmm`.
    """
    p = check_grouped_gemm(
        Quantized(lhs, lhs_scale), Quantized(rhs, rhs_scale), groups_of(group_sizes, group_offset), ragged,
        num_actual_groups, existing_out, transpose_rhs, scale_layout, preferred_element_type,
    )  # fmt: skip
    tm, tk, _ = resolve_tiling(tiling, one_tile, p.m, p.k, p.n)
    wide = _mxfp8_operands(lhs, rhs, lhs_scale, rhs_scale, ragged, transpose_rhs, scale_layout)
    shared: dict[str, Any] = {
        "group_offset": group_offset,
        "existing_out": existing_out,
        "preferred_element_type": p.out_dtype,
        "tiling": tiling,
        "stages": stages,
    }
    if ragged == "contracting":
        check_mxfp8_tile("tm", tm, p.m)
        return tgmm(*wide, group_sizes, num_actual_groups=num_actual_groups, **shared)
    check_mxfp8_tile("tk", tk, p.k)
    return gmm(*wide, group_sizes, transpose_rhs=transpose_rhs, **shared)


def grouped_gemm_definition(
    lhs: Array,
    rhs: Array,
    group_sizes: Array,
    *,
    ragged: str = "lhs",
    transpose_rhs: bool = False,
    num_actual_groups: int | None = None,
    lhs_scale: Array | None = None,
    rhs_scale: Array | None = None,
    scale_layout: str = "plain",
    **options: Any,
) -> Array:
    """`gmm_definition` or `tgmm_definition` of the dequantised operands; options are theirs."""
    wide = _mxfp8_operands(lhs, rhs, lhs_scale, rhs_scale, ragged, transpose_rhs, scale_layout)
    if ragged == "contracting":
        return tgmm_definition(*wide, group_sizes, num_actual_groups=num_actual_groups, **options)
    return gmm_definition(*wide, group_sizes, transpose_rhs=transpose_rhs, **options)


def _mxfp8_operands(
    lhs: Array,
    rhs: Array,
    lhs_scale: Array | None,
    rhs_scale: Array | None,
    ragged: str,
    transpose_rhs: bool,
    scale_layout: str,
) -> tuple[Array, Array]:
    """Both operands in float64, times their scales where they have any."""
    axes = (0, 0) if ragged == "contracting" else (1, 2 if transpose_rhs else 1)

    def widened(operand: Array, scale: Array | None, axis: int) -> Array:
        if scale is None:
            return operand.astype(np.float64)
        if scale_layout == "swizzled":
            *_, rows = np.delete(operand.shape, axis)
            plain = unswizzle_scales(scale, int(rows), -(-operand.shape[axis] // MX_BLOCK))
            scale = np.moveaxis(plain, -1, axis)
        return mxfp8_values(operand, scale, axis)

    return widened(lhs, lhs_scale, axes[0]), widened(rhs, rhs_scale, axes[1])
