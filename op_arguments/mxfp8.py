"""What the quantisers of MXFP8 accept (they are defined in `cpu_golden/mxfp8.py`), and the rules of their scales."""

from typing import Any

from op_arguments import Array, check_array, check_output_dtype, dtype_name
from op_arguments.quantize import FP8, check_float
from op_arguments.quantized_gmm import check_tile

E8M0 = "float8_e8m0fnu"
MX_BLOCK = 32
"""Consecutive elements that share a scale in OCP's microscaling formats."""
SCALE_ROUNDINGS = ("up", "floor")
WIDE = ("float32", "bfloat16")
"""What holds every fp8 value times a power of two exactly, within the exponents that both of them have."""
SWIZZLED_ROWS, SWIZZLED_COLUMNS = 128, 4
"""The tile of scales that a block-scaled matrix unit reads: 512 bytes."""


def check_mxfp8_quantize(x: Array, axis: int, dtype: Any, scale_rounding: str) -> tuple[int, str]:
    """The axis of x along which 32 elements share a scale, counted from 0, and the name of the fp8 dtype asked for.

    Raises TypeError for a wrong type or dtype, ValueError for an axis that x has not or an unknown rounding.
    """
    name = check_output_dtype("dtype", dtype, FP8[0], FP8)
    check_float("x", x)
    rank = len(x.shape)
    if type(axis) is not int:
        raise TypeError(f"axis must be an int, got {axis!r}")
    if not -rank <= axis < rank:
        raise ValueError(f"axis must be in [{-rank}, {rank - 1}] for shape {list(x.shape)}, got {axis}")
    if scale_rounding not in SCALE_ROUNDINGS:
        raise ValueError(f"scale_rounding must be {' or '.join(map(repr, SCALE_ROUNDINGS))}, got {scale_rounding!r}")
    return axis % rank, name


def check_mxfp8_dual_quantize(x: Array, dtype: Any, scale_rounding: str) -> str:
    """The fp8 dtype's name for x [..., M, K] by rows and by columns; as `check_mxfp8_quantize`."""
    check_float("x", x)
    if len(x.shape) not in (2, 3):
        raise ValueError(f"x must have rank 2 [M, K] or 3 [G, M, K], got shape {list(x.shape)}")
    return check_mxfp8_quantize(x, -1, dtype, scale_rounding)[1]


def check_mxfp8_dequantize(qvalue: Array, scale: Array, dtype: Any) -> tuple[int, str]:
    """The axis along which 32 elements of qvalue share a scale, and the name of the result's dtype.

    The axis is read off the shape of scale, which is qvalue's but for one axis of ceil(n / 32); where no axis differs,
    all that could be meant have one element at most, and the first of them is. Raises TypeError for a wrong type or
    dtype, ValueError for a wrong shape.
    """
    if not (hasattr(qvalue, "shape") and hasattr(qvalue, "dtype")):
        raise TypeError(f"qvalue must be an array, got {type(qvalue).__name__}")
    check_array("qvalue", qvalue, ", ".join("?" * len(qvalue.shape)), FP8)
    _check_e8m0("scale", scale)
    name = check_output_dtype("dtype", dtype, WIDE[0], WIDE)
    for axis, size in enumerate(qvalue.shape):
        if tuple(scale.shape) == (*qvalue.shape[:axis], -(-size // MX_BLOCK), *qvalue.shape[axis + 1 :]):
            return axis, name
    raise ValueError(
        f"scale must have qvalue's shape {list(qvalue.shape)} with one of its axes, n, as ceil(n / 32), "
        f"got {list(scale.shape)}"
    )


def check_mxfp8_scale(name: str, scale: Any, of: str, shape: tuple[int, ...], axis: int, swizzled: bool) -> None:
    """Refuse a scale that is not one float8_e8m0fnu for every 32 elements along `axis` of an operand of `shape`.

    swizzled: that scale with `axis` moved to the end, in the layout of `swizzle_scales`.
    """
    _check_e8m0(name, scale)
    rest = (*shape[:axis], *shape[axis + 1 :])
    blocks = -(-shape[axis] // MX_BLOCK)
    if swizzled:
        expected = swizzled_shape((*rest, blocks))
        words = f"the shape {list(expected)} of the swizzled scales of {of} {list(shape)}"
    else:
        expected = (*shape[:axis], blocks, *shape[axis + 1 :])
        words = f"{of}'s shape {list(shape)} with axis {axis} as ceil({shape[axis]} / 32), {list(expected)}"
    if tuple(scale.shape) != expected:
        raise ValueError(f"{name} must have {words}, got {list(scale.shape)}")


def mxfp8_dot_dtype(lhs: Any, rhs: Any) -> str:
    """`"mxfp8"` for two fp8 operands, else the dtype of those that are not quantised, to which the other is widened.

    Raises TypeError for two unlike dtypes that are not quantised.
    """
    wide = [name for name in (dtype_name(lhs), dtype_name(rhs)) if name not in FP8]
    if len(set(wide)) > 1:
        raise TypeError(f"rhs must have lhs's dtype {wide[0]} where neither is quantised, got {wide[1]}")
    return wide[0] if wide else "mxfp8"


def check_mxfp8_tile(name: str, tile: int, size: int) -> None:
    """Refuse a tile of part of the contraction axis (of `size`) that is no multiple or divisor of the block, 32."""
    if tile < size:
        check_tile(name, tile, MX_BLOCK, size)


def check_swizzle(scale: Array) -> None:
    """Refuse scales that are not a float8_e8m0fnu array of at least two axes."""
    _check_e8m0("scale", scale)
    if len(scale.shape) < 2:
        raise ValueError(f"scale must have at least two axes [..., rows, scales of a row], got {list(scale.shape)}")


def check_unswizzle(swizzled: Array, rows: int, columns: int) -> None:
    """Refuse swizzled scales that are not those of `rows` rows of `columns` scales each; as `check_swizzle`."""
    _check_e8m0("swizzled", swizzled)
    for name, value in (("rows", rows), ("columns", columns)):
        if type(value) is not int:
            raise TypeError(f"{name} must be an int, got {type(value).__name__}")
        if value < 0:
            raise ValueError(f"{name} must be at least 0, got {value}")
    expected = swizzled_shape((rows, columns))
    if tuple(swizzled.shape[-4:]) != expected:
        raise ValueError(
            f"swizzled must have shape [..., {', '.join(map(str, expected))}] for {rows} rows of {columns} scales, "
            f"got {list(swizzled.shape)}"
        )


def swizzled_shape(shape: tuple[int, ...]) -> tuple[int, ...]:
    """The shape of `swizzle_scales` of scales [..., rows, columns]: tiles of rows, of columns, and 32 x 16 bytes."""
    *lead, rows, columns = shape
    tiles = -(-rows // SWIZZLED_ROWS), -(-columns // SWIZZLED_COLUMNS)
    return (*lead, *tiles, 32, SWIZZLED_ROWS // 32 * SWIZZLED_COLUMNS)


def _check_e8m0(name: str, scale: Any) -> None:
    if not (hasattr(scale, "shape") and hasattr(scale, "dtype")):
        raise TypeError(f"{name} must be a {E8M0} array, got {type(scale).__name__}")
    if dtype_name(scale.dtype) != E8M0:
        raise TypeError(f"{name} must be {E8M0}, got {dtype_name(scale.dtype)}")
