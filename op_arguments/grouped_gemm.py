"""What `grouped_gemm` accepts (it is defined in `cpu_golden/grouped_gemm.py`)."""

from typing import Any, NamedTuple

from op_arguments import Array, check_array, dtype_name
from op_arguments.gmm import Groups, Problem, problem_of_gmm, problem_of_tgmm
from op_arguments.mxfp8 import MX_BLOCK, WIDE, check_mxfp8_scale
from op_arguments.quantize import FP8, Quantized
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
    lhs: Quantized,
    rhs: Quantized,
    groups: Groups,
    ragged: str,
    num_actual_groups: int | None,
    existing_out: Array | None,
    transpose_rhs: bool,
    scale_layout: str,
    preferred_element_type: Any,
) -> Problem:
    """Check the arguments of `grouped_gemm`; operands as in `op_arguments.quantized_gmm.check_gmm_quantized`.

    Raises TypeError for a wrong type or dtype, ValueError for a wrong rank, shape or value.
    """
    for name, value, allowed in (("ragged", ragged, RAGGED), ("scale_layout", scale_layout, SCALE_LAYOUTS)):
        if value not in allowed:
            raise ValueError(f"{name} must be {' or '.join(map(repr, allowed))}, got {value!r}")
    contracting = ragged == "contracting"
    check_array("lhs", lhs.qvalue, "M, K", (*WIDE, *FP8))
    check_array("rhs", rhs.qvalue, "M, N" if contracting else "G, N, K" if transpose_rhs else "G, K, N", (*WIDE, *FP8))
    mxfp8_dot_dtype(lhs.qvalue.dtype, rhs.qvalue.dtype)
    if contracting and transpose_rhs:
        raise ValueError('transpose_rhs must be False for ragged="contracting", whose rhs is [M, N], got True')
    if not contracting and num_actual_groups is not None:
        raise ValueError(f'num_actual_groups must be None for ragged="lhs", got {num_actual_groups}')
    out_dtype = check_quantized_out(lhs.qvalue, preferred_element_type)
    if contracting:
        p = problem_of_tgmm(lhs.qvalue, rhs.qvalue, groups, num_actual_groups, existing_out, out_dtype)
    else:
        p = problem_of_gmm(lhs.qvalue, rhs.qvalue, groups, existing_out, transpose_rhs, out_dtype)
    lhs_axis, rhs_axis = (0, 0) if contracting else (1, 2 if transpose_rhs else 1)
    for name, pair, axis in (("lhs", lhs, lhs_axis), ("rhs", rhs, rhs_axis)):
        _check_operand(name, pair, axis, scale_layout == "swizzled")
    return p


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


def _check_operand(name: str, pair: Quantized, axis: int, swizzled: bool) -> None:
    operand, scale = pair
    dtype = dtype_name(operand.dtype)
    if dtype not in FP8:
        if scale is not None:
            raise ValueError(f"{name}_scale must be None for a {name} of {dtype}, got an array")
    elif scale is None:
        raise ValueError(f"{name}_scale must be given for a {name} of {dtype}, got None")
    else:
        check_mxfp8_scale(f"{name}_scale", scale, name, tuple(operand.shape), axis, swizzled)
