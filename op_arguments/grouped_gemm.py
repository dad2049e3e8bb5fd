"""What `grouped_gemm` accepts (it is defined in `cpu_golden/grouped_gemm.py`)."""

from dataclasses import dataclass
from typing import Any, NamedTuple

from op_arguments import check_array, dtype_name
from op_arguments.gmm import GmmOptions, Groups, Problem, TgmmOptions, problem_of_gmm, problem_of_tgmm
from op_arguments.mxfp8 import WIDE, check_mxfp8_scale, mxfp8_dot_dtype
from op_arguments.quantize import FP8, Quantized
from op_arguments.quantized_gmm import check_quantized_out

RAGGED = ("lhs", "contracting")
SCALE_LAYOUTS = ("plain", "swizzled")


@dataclass(frozen=True, kw_only=True)
class GroupedGemmOptions(GmmOptions, TgmmOptions):
    """The options of `grouped_gemm`; `cpu_golden.grouped_gemm` says what they are."""

    lhs_scale: Any = None
    rhs_scale: Any = None
    ragged: str = "lhs"
    scale_layout: str = "plain"

    @property
    def contracting(self) -> bool:
        """Whether it is a `tgmm`."""
        return self.ragged == "contracting"

    @property
    def swizzled(self) -> bool:
        """Whether scales lie in tiles."""
        return self.scale_layout == "swizzled"

    @property
    def summed_axes(self) -> tuple[int, int]:
        """The axes of lhs and rhs that are summed over, along which the blocks lie."""
        return (0, 0) if self.contracting else (1, 2 if self.transpose_rhs else 1)


class Support(NamedTuple):
    """How a `grouped_gemm` is computed: its path, why that one, and whether it stands in for the kernels' direct path.

    A fallback gives the same result as the direct path; `strict=True` refuses it, with the reason.
    """

    path: str
    reason: str
    fallback: bool


def check_grouped_gemm(lhs: Any, rhs: Any, groups: Groups, options: GroupedGemmOptions) -> Problem:
    """Check the arguments of `grouped_gemm`.

    Raises TypeError for a wrong type or dtype, ValueError for a wrong rank, shape or value.
    """
    o = options
    for name, value, allowed in (("ragged", o.ragged, RAGGED), ("scale_layout", o.scale_layout, SCALE_LAYOUTS)):
        if value not in allowed:
            raise ValueError(f"{name} must be {' or '.join(map(repr, allowed))}, got {value!r}")
    check_array("lhs", lhs, "M, K", (*WIDE, *FP8))
    check_array("rhs", rhs, "M, N" if o.contracting else "G, N, K" if o.transpose_rhs else "G, K, N", (*WIDE, *FP8))
    mxfp8_dot_dtype(lhs.dtype, rhs.dtype)
    if o.contracting and o.transpose_rhs:
        raise ValueError('transpose_rhs must be False for ragged="contracting", whose rhs is [M, N], got True')
    if not o.contracting and o.num_actual_groups is not None:
        raise ValueError(f'num_actual_groups must be None for ragged="lhs", got {o.num_actual_groups}')
    out_dtype = check_quantized_out(lhs, o.preferred_element_type)
    if o.contracting:
        p = problem_of_tgmm(lhs, rhs, groups, o.num_actual_groups, o.existing_out, out_dtype)
    else:
        p = problem_of_gmm(lhs, rhs, groups, o.existing_out, o.transpose_rhs, out_dtype)
    pairs = ("lhs", Quantized(lhs, o.lhs_scale)), ("rhs", Quantized(rhs, o.rhs_scale))
    for (name, pair), axis in zip(pairs, o.summed_axes, strict=True):
        _check_operand(name, pair, axis, o.swizzled)
    return p


def check_strict(support: Support, strict: bool) -> None:
    """Refuse a path that is a fallback where none is wanted."""
    if strict and support.fallback:
        raise ValueError(f"strict must be False for a fallback, {support.path}: {support.reason}")


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
