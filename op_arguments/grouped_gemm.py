"""What `grouped_gemm` accepts (it is defined in `cpu_golden/grouped_gemm.py`)."""

from collections.abc import Sequence
from typing import Any, NamedTuple

from op_arguments import Array, check_array, dtype_name
from op_arguments.gmm import Problem, check_existing_out, check_groups, check_num_actual_groups
from op_arguments.mxfp8 import MX_BLOCK, WIDE, check_mxfp8_scale
from op_arguments.quantize import FP8
from op_arguments.quantized_gmm import check_quantized_out, check_tile

RAGGED = ("lhs", "contracting")
SCALE_LAYOUTS = ("plain", "swizzled")


class Support(NamedTuple):
    """How a `grouped_gemm` is computed: its path, why that one, and whether it stands in for the kernels' direct path.

    A fallback gives the same result as the direct path; `strict=True` refuses it, with the reason.
    """

    path: str
    reason: str
    fallback: bool


def check_grouped_gemm(
    lhs: Array,
    rhs: Array,
    group_sizes: Array,
    lhs_scale: Array | None,
    rhs_scale: Array | None,
    ragged: str,
    group_offset: Any,
    num_actual_groups: int | None,
    existing_out: Array | None,
    transpose_rhs: bool,
    scale_layout: str,
    preferred_element_type: Any,
    sizes: Sequence[int] | None,
) -> Problem:
    """Check the arguments of `grouped_gemm`; `sizes` as in `op_arguments.gmm.check_gmm`.

    Raises TypeError for a wrong type or dtype, ValueError for a wrong rank, shape or value.
    """
    for name, value, allowed in (("ragged", ragged, RAGGED), ("scale_layout", scale_layout, SCALE_LAYOUTS)):
        if value not in allowed:
            raise ValueError(f"{name} must be {' or '.join(map(repr, allowed))}, got {value!r}")
    contracting = ragged == "contracting"
    shape: tuple[int, ...]
    check_array("lhs", lhs, "M, K", (*WIDE, *FP8))
    check_array("rhs", rhs, "M, N" if contracting else "G, N, K" if transpose_rhs else "G, K, N", (*WIDE, *FP8))
    mxfp8_dot_dtype(lhs.dtype, rhs.dtype)
    m, k = lhs.shape
    if contracting:
        if transpose_rhs:
            raise ValueError('transpose_rhs must be False for ragged="contracting", whose rhs is [M, N], got True')
        rhs_m, n = rhs.shape
        if rhs_m != m:
            raise ValueError(f"rhs must have M = {m} rows as lhs does, got {rhs_m}")
        lhs_axis = rhs_axis = 0
        groups = check_num_actual_groups(num_actual_groups, group_sizes)
        axes, shape = "G, K, N", (groups, k, n)
    else:
        if num_actual_groups is not None:
            raise ValueError(f'num_actual_groups must be None for ragged="lhs", got {num_actual_groups}')
        groups, *kn = rhs.shape
        rhs_k, n = reversed(kn) if transpose_rhs else kn
        if rhs_k != k:
            raise ValueError(f"rhs must have K = {k} as lhs does, got {rhs_k} (shape {list(rhs.shape)})")
        lhs_axis, rhs_axis = 1, 2 if transpose_rhs else 1
        axes, shape = "M, N", (m, n)
    swizzled = scale_layout == "swizzled"
    _check_operand("lhs", lhs, lhs_scale, lhs_axis, swizzled)
    _check_operand("rhs", rhs, rhs_scale, rhs_axis, swizzled)
    out_dtype = check_quantized_out(lhs, preferred_element_type)
    experts = check_groups(group_sizes, group_offset, groups, m, sizes)
    check_existing_out(existing_out, axes, shape, out_dtype, exact=False)
    return Problem(m, k, n, groups, experts, out_dtype)


def mxfp8_dot_dtype(lhs: Any, rhs: Any) -> str:
    """`"mxfp8"` for two fp8 operands, else the dtype of those that are not quantised, to which the other is widened.

    Raises TypeError for two unlike dtypes that are not quantised.
    """
    wide = [name for name in (dtype_name(lhs), dtype_name(rhs)) if name not in FP8]
    if len(set(wide)) > 1:
        raise TypeError(f"rhs must have lhs's dtype {wide[0]} where neither is quantised, got {wide[1]}")
    return wide[0] if wide else "mxfp8"


def check_strict(support: Support, strict: bool) -> None:
    """Refuse a path that is a fallback where none is wanted."""
    if strict and support.fallback:
        raise ValueError(f"strict must be False for a fallback, {support.path}: {support.reason}")


def check_mxfp8_tile(name: str, tile: int, size: int) -> None:
    """Refuse a tile of part of the contraction axis (of `size`) that is no multiple or divisor of the block, 32."""
    if tile < size:
        check_tile(name, tile, MX_BLOCK, size)


def _check_operand(name: str, operand: Array, scale: Array | None, axis: int, swizzled: bool) -> None:
    dtype = dtype_name(operand.dtype)
    if dtype not in FP8:
        if scale is not None:
            raise ValueError(f"{name}_scale must be None for a {name} of {dtype}, got an array")
    elif scale is None:
        raise ValueError(f"{name}_scale must be given for a {name} of {dtype}, got None")
    else:
        check_mxfp8_scale(f"{name}_scale", scale, name, tuple(operand.shape), axis, swizzled)
