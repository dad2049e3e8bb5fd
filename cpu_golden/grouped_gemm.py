"""Grouped matrix multiplication of MXFP8 operands: the definition, in float64.

Forward, the data's gradient and the weights' in one function. Groups and shards are those of `cpu_golden/gmm.py`,
scales those of `cpu_golden/mxfp8.py`.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np

from cpu_golden import Array
from cpu_golden._lib.arguments import groups_of, one_tile
from cpu_golden.gmm import gmm, gmm_definition, tgmm, tgmm_definition
from cpu_golden.mxfp8 import mxfp8_values
from cpu_golden.stages import Stages, exact
from cpu_golden.swizzle import unswizzle_scales
from op_arguments import resolve_tiling
from op_arguments.grouped_gemm import GroupedGemmOptions, check_grouped_gemm
from op_arguments.mxfp8 import MX_BLOCK, check_mxfp8_tile
from op_arguments.options import options_of


@dataclass(frozen=True, kw_only=True)
class _Options(GroupedGemmOptions):
    stages: Stages = exact


@options_of(_Options)
def grouped_gemm(lhs: Array, rhs: Array, group_sizes: Array, **options: Any) -> Array:
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
    o = _Options(**options)
    p = check_grouped_gemm(lhs, rhs, groups_of(group_sizes, o.group_offset), o)
    tm, tk, _ = resolve_tiling(o.tiling, one_tile, p.m, p.k, p.n)
    wide = _mxfp8_operands(lhs, rhs, o)
    shared: dict[str, Any] = {
        "group_offset": o.group_offset,
        "existing_out": o.existing_out,
        "preferred_element_type": p.out_dtype,
        "tiling": o.tiling,
        "stages": o.stages,
    }
    if o.contracting:
        check_mxfp8_tile("tm", tm, p.m)
        return tgmm(*wide, group_sizes, num_actual_groups=o.num_actual_groups, **shared)
    check_mxfp8_tile("tk", tk, p.k)
    return gmm(*wide, group_sizes, transpose_rhs=o.transpose_rhs, **shared)


def grouped_gemm_definition(lhs: Array, rhs: Array, group_sizes: Array, **options: Any) -> Array:
    """`gmm_definition` or `tgmm_definition` of the dequantised operands; options are `GroupedGemmOptions`."""
    o = GroupedGemmOptions(**options)
    wide = _mxfp8_operands(lhs, rhs, o)
    shared: dict[str, Any] = {"group_offset": o.group_offset, "existing_out": o.existing_out}
    if o.contracting:
        return tgmm_definition(*wide, group_sizes, num_actual_groups=o.num_actual_groups, **shared)
    return gmm_definition(*wide, group_sizes, transpose_rhs=o.transpose_rhs, **shared)


def _mxfp8_operands(lhs: Array, rhs: Array, o: GroupedGemmOptions) -> tuple[Array, Array]:
    """Both operands in float64, times their scales where they have any."""

    def widened(operand: Array, scale: Array | None, axis: int) -> Array:
        if scale is None:
            return operand.astype(np.float64)
        if o.swizzled:
            *_, rows = np.delete(operand.shape, axis)
            plain = unswizzle_scales(scale, int(rows), -(-operand.shape[axis] // MX_BLOCK))
            scale = np.moveaxis(plain, -1, axis)
        return mxfp8_values(operand, scale, axis)

    lhs_axis, rhs_axis = o.summed_axes
    return widened(lhs, o.lhs_scale, lhs_axis), widened(rhs, o.rhs_scale, rhs_axis)
