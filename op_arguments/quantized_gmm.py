"""What `gmm_quantized` and `tgmm_quantized` accept (they are defined in `cpu_golden/quantized_gmm.py`)."""

from dataclasses import dataclass
from typing import Any

from op_arguments import Array, check_array, check_output_dtype, dtype_name
from op_arguments.gmm import Groups, Problem, problem_of_gmm, problem_of_tgmm
from op_arguments.quantize import FLOATS, NARROW, Blocks, Quantized, check_scale

BLOCKS = (32, 64, 128, 256, 512)
"""Elements of the contraction axis that may share a scale; otherwise all of them do."""


@dataclass(frozen=True)
class QuantizedProblem(Problem):
    """A checked block-scaled grouped matmul: a Problem, and how its scales lie.

    `block` is the length along the contraction axis (K of gmm, M of tgmm) over which no scale changes: the shorter of
    the two operands' blocks. lhs_blocks and rhs_blocks are the elements that share a scale along each axis of an
    operand (all of it for one that is not quantised).
    """

    block: int
    lhs_blocks: Blocks
    rhs_blocks: Blocks


def check_gmm_quantized(
    lhs: Quantized,
    rhs: Quantized,
    groups: Groups,
    existing_out: Array | None,
    transpose_rhs: bool,
    preferred_element_type: Any,
) -> QuantizedProblem:
    """Check the arguments of `gmm_quantized`; an operand is a pair, whose scale is None where it is not quantised.

    Raises TypeError for a wrong type or dtype, ValueError for a wrong rank, shape or value.
    """
    _check_operands(lhs.qvalue, "M, K", rhs.qvalue, "G, N, K" if transpose_rhs else "G, K, N")
    out_dtype = check_quantized_out(lhs.qvalue, preferred_element_type)
    p = problem_of_gmm(lhs.qvalue, rhs.qvalue, groups, existing_out, transpose_rhs, out_dtype)
    lhs_blocks = _check_scale("lhs", lhs, contraction=1)
    rhs_blocks = _check_scale("rhs", rhs, contraction=2 if transpose_rhs else 1)
    block = min(lhs_blocks[1], rhs_blocks[2 if transpose_rhs else 1])
    return QuantizedProblem(**vars(p), block=block, lhs_blocks=lhs_blocks, rhs_blocks=rhs_blocks)


def check_tgmm_quantized(
    lhs: Quantized,
    rhs: Quantized,
    groups: Groups,
    num_actual_groups: int | None,
    existing_out: Array | None,
    preferred_element_type: Any,
) -> QuantizedProblem:
    """Check the arguments of `tgmm_quantized`; as `check_gmm_quantized`."""
    _check_operands(lhs.qvalue, "M, K", rhs.qvalue, "M, N")
    out_dtype = check_quantized_out(lhs.qvalue, preferred_element_type)
    p = problem_of_tgmm(lhs.qvalue, rhs.qvalue, groups, num_actual_groups, existing_out, out_dtype)
    lhs_blocks = _check_scale("lhs", lhs, contraction=0)
    rhs_blocks = _check_scale("rhs", rhs, contraction=0)
    block = min(lhs_blocks[0], rhs_blocks[0])
    return QuantizedProblem(**vars(p), block=block, lhs_blocks=lhs_blocks, rhs_blocks=rhs_blocks)


def check_tile(name: str, tile: int, block: int, size: int) -> None:
    """Refuse a tile of the contraction axis (of `size`) unless it or the scales' block is a multiple of the other."""
    if block < size and tile % block and block % tile:
        raise ValueError(f"tiling must have {name} a multiple or a divisor of the block {block}, got {tile}")


def dot_dtype(lhs: Any, rhs: Any) -> str:
    """What a dot of two operand dtypes multiplies: `"fp8"`, `"int8"`, or the dtype that both are widened to.

    Two fp8 operands, or two int8 ones, are multiplied as they are. A narrow operand beside an unquantised one is
    widened to its dtype, which holds every fp8 and int8 value exactly. Raises TypeError for any other pair.
    """
    names = (dtype_name(lhs), dtype_name(rhs))
    wide = [name for name in names if name not in NARROW]
    if len(wide) == 2:
        raise TypeError(f"lhs or rhs must be quantised ({', '.join(NARROW)}), got {names[0]} and {names[1]}")
    if wide:
        return wide[0]
    if ("int8" in names) and names[0] != names[1]:
        raise TypeError(f"rhs must be fp8 beside fp8 and int8 beside int8, got {names[0]} and {names[1]}")
    return "int8" if "int8" in names else "fp8"


def _check_operands(lhs: Array, lhs_axes: str, rhs: Array, rhs_axes: str) -> None:
    check_array("lhs", lhs, lhs_axes, (*FLOATS, *NARROW))
    check_array("rhs", rhs, rhs_axes, (*FLOATS, *NARROW))
    dot_dtype(lhs.dtype, rhs.dtype)


def _check_scale(name: str, pair: Quantized, contraction: int) -> Blocks:
    operand, scale = pair
    quantised = dtype_name(operand.dtype) in NARROW
    shape = tuple(operand.shape)
    if not quantised:
        if scale is not None:
            raise ValueError(f"{name}_scale must be None for a {name} of {dtype_name(operand.dtype)}, got an array")
        return tuple(max(size, 1) for size in shape)
    if scale is None:
        raise ValueError(f"{name}_scale must be given for a {name} of {dtype_name(operand.dtype)}, got None")
    blocks = check_scale(f"{name}_scale", scale, name, shape)
    whole = scale.shape[contraction] <= 1
    if not whole and blocks[contraction] not in BLOCKS:
        raise ValueError(
            f"{name}_scale must have blocks of {', '.join(map(str, BLOCKS))} or the whole of axis {contraction}, "
            f"which is summed over, got {blocks[contraction]}"
        )
    return blocks


def check_quantized_out(lhs: Array, preferred_element_type: Any) -> str:
    """The name of the output dtype asked for: by default that of an lhs that is not quantised, else bfloat16."""
    default = "bfloat16" if dtype_name(lhs.dtype) in NARROW else lhs.dtype
    return check_output_dtype("preferred_element_type", preferred_element_type, default, FLOATS)
