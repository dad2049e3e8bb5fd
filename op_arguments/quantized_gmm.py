"""What `gmm_quantized` and `tgmm_quantized` accept (they are defined in `cpu_golden/quantized_gmm.py`)."""

from collections.abc import Sequence
from typing import Any, NamedTuple

from op_arguments import Array, check_array, check_output_dtype, dtype_name
from op_arguments.gmm import check_existing_out, check_groups, check_num_actual_groups
from op_arguments.quantize import FLOATS, NARROW, Blocks, check_scale

BLOCKS = (32, 64, 128, 256, 512)
"""Elements of the contraction axis that may share a scale; otherwise all of them do."""


class QuantizedProblem(NamedTuple):
    """A checked block-scaled grouped matmul: its sizes, its output dtype's name, and how its scales lie.

    `block` is the length along the contraction axis (K of gmm, M of tgmm) over which no scale changes: the shorter of
    the two operands' blocks. lhs_blocks and rhs_blocks are the elements that share a scale along each axis of an
    operand (all of it for one that is not quantised).
    """

    m: int
    k: int
    n: int
    groups: int  # G, in this shard
    experts: int  # E, in group_sizes
    out_dtype: str
    block: int
    lhs_blocks: Blocks
    rhs_blocks: Blocks


def check_gmm_quantized(
    lhs: Array,
    lhs_scale: Array | None,
    rhs: Array,
    rhs_scale: Array | None,
    group_sizes: Array,
    group_offset: Any,
    existing_out: Array | None,
    transpose_rhs: bool,
    preferred_element_type: Any,
    sizes: Sequence[int] | None,
) -> QuantizedProblem:
    """Check the arguments of `gmm_quantized`; `sizes` as in `op_arguments.gmm.check_gmm`.

    Raises TypeError for a wrong type or dtype, ValueError for a wrong rank, shape or value.
    """
    _check_operands(lhs, "M, K", rhs, "G, N, K" if transpose_rhs else "G, K, N")
    m, k = lhs.shape
    groups, *kn = rhs.shape
    rhs_k, n = reversed(kn) if transpose_rhs else kn
    if rhs_k != k:
        raise ValueError(f"rhs must have K = {k} as lhs does, got {rhs_k} (shape {list(rhs.shape)})")
    lhs_blocks = _check_scale("lhs", lhs, lhs_scale, contraction=1)
    rhs_blocks = _check_scale("rhs", rhs, rhs_scale, contraction=2 if transpose_rhs else 1)
    out_dtype = check_quantized_out(lhs, preferred_element_type)
    experts = check_groups(group_sizes, group_offset, groups, m, sizes)
    check_existing_out(existing_out, "M, N", (m, n), out_dtype, exact=False)
    block = min(lhs_blocks[1], rhs_blocks[2 if transpose_rhs else 1])
    return QuantizedProblem(m, k, n, groups, experts, out_dtype, block, lhs_blocks, rhs_blocks)


def check_tgmm_quantized(
    lhs: Array,
    lhs_scale: Array | None,
    rhs: Array,
    rhs_scale: Array | None,
    group_sizes: Array,
    group_offset: Any,
    num_actual_groups: int | None,
    existing_out: Array | None,
    preferred_element_type: Any,
    sizes: Sequence[int] | None,
) -> QuantizedProblem:
    """Check the arguments of `tgmm_quantized`; as `check_gmm_quantized`."""
    _check_operands(lhs, "M, K", rhs, "M, N")
    (m, k), n = lhs.shape, rhs.shape[1]
    if rhs.shape[0] != m:
        raise ValueError(f"rhs must have M = {m} rows as lhs does, got {rhs.shape[0]}")
    lhs_blocks = _check_scale("lhs", lhs, lhs_scale, contraction=0)
    rhs_blocks = _check_scale("rhs", rhs, rhs_scale, contraction=0)
    out_dtype = check_quantized_out(lhs, preferred_element_type)
    groups = check_num_actual_groups(num_actual_groups, group_sizes)
    experts = check_groups(group_sizes, group_offset, groups, m, sizes)
    check_existing_out(existing_out, "G, K, N", (groups, k, n), out_dtype, exact=False)
    block = min(lhs_blocks[0], rhs_blocks[0])
    return QuantizedProblem(m, k, n, groups, experts, out_dtype, block, lhs_blocks, rhs_blocks)


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


def _check_scale(name: str, operand: Array, scale: Array | None, contraction: int) -> Blocks:
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
