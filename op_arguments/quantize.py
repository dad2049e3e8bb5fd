"""What the quantisers accept and return (they are defined in `cpu_golden/quantize.py`), and what their scales obey."""

from typing import Any, NamedTuple

from op_arguments import Array, check_array, check_output_dtype, dtype_name

FLOATS = ("float32", "bfloat16", "float16")
FP8 = ("float8_e4m3fn", "float8_e5m2")
NARROW = (*FP8, "int8")
Blocks = tuple[int, ...]
"""Elements that share a scale, along every axis."""


class Quantized(NamedTuple):
    """A quantised array: x ≈ qvalue · scale, the scale of each block repeated over it."""

    qvalue: Any
    scale: Any


class DualQuantized(NamedTuple):
    """An array quantised by rows (blocks along its last axis) and by columns (blocks along the one before)."""

    rowwise: Any
    rowwise_scale: Any
    columnwise: Any
    columnwise_scale: Any


def check_quantize(x: Array, axis: int | tuple[int, ...], block_size: int | None, dtype: Any) -> tuple[Blocks, str]:
    """The blocks of x that share a scale, and the name of the fp8 dtype asked for.

    Raises TypeError for a wrong type or dtype, ValueError for an axis that x has not or a block that does not divide.
    """
    name = check_output_dtype("dtype", dtype, FP8[0], FP8)
    return check_blocks(x, axis, block_size), name


def check_blocks(x: Array, axis: int | tuple[int, ...], block_size: int | None) -> Blocks:
    """The blocks of x: `block_size` (None: all) along each axis in `axis`, 1 along the others. As `check_quantize`."""
    check_float("x", x)
    rank = len(x.shape)
    axes = axis if isinstance(axis, tuple) else (axis,)
    for a in axes:
        if type(a) is not int:
            raise TypeError(f"axis must be an int or a tuple of ints, got {axis!r}")
        if not -rank <= a < rank:
            raise ValueError(f"axis must be in [{-rank}, {rank - 1}] for shape {list(x.shape)}, got {a}")
    if len({a % rank for a in axes}) != len(axes):
        raise ValueError(f"axis must name each axis once, got {axis!r}")
    check_block_size(block_size)
    blocks = [1] * rank
    for a in (a % rank for a in axes):
        size = x.shape[a]
        blocks[a] = max(size, 1) if block_size is None else block_size
        if size % blocks[a]:
            raise ValueError(f"block_size must divide axis {a} of x, {size}, got {block_size}")
    return tuple(blocks)


def check_dual_quantize(x: Array, block_size: int | None, dtype: Any) -> tuple[Blocks, Blocks, str]:
    """x [..., M, K]: its blocks by rows (along K), by columns (along M), and the fp8 dtype; as `check_quantize`."""
    check_float("x", x)
    if len(x.shape) not in (2, 3):
        raise ValueError(f"x must have rank 2 [M, K] or 3 [G, M, K], got shape {list(x.shape)}")
    by_rows, name = check_quantize(x, -1, block_size, dtype)
    by_columns, _ = check_quantize(x, -2, block_size, dtype)
    return by_rows, by_columns, name


def check_dequantize(qvalue: Array, scale: Array, dtypes: tuple[str, ...]) -> Blocks:
    """The blocks of a quantised array, from the shape of its scale; as `check_scale`, and qvalue one of `dtypes`."""
    if not (hasattr(qvalue, "shape") and hasattr(qvalue, "dtype")):
        raise TypeError(f"qvalue must be an array, got {type(qvalue).__name__}")
    check_array("qvalue", qvalue, ", ".join("?" * len(qvalue.shape)), dtypes)
    return check_scale("scale", scale, "qvalue", qvalue.shape)


def check_scale(name: str, scale: Any, of: str, shape: tuple[int, ...]) -> Blocks:
    """The blocks that `scale` gives a qvalue of `shape`, which is called `of`.

    A scale is float32 and has the rank of its qvalue; each of its axes divides the qvalue's, and the ratio is the
    block. Raises TypeError for a wrong type or dtype, ValueError for a wrong shape.
    """
    if not (hasattr(scale, "shape") and hasattr(scale, "dtype")):
        raise TypeError(f"{name} must be a float32 array, got {type(scale).__name__}")
    if dtype_name(scale.dtype) != "float32":
        raise TypeError(f"{name} must be float32, got {dtype_name(scale.dtype)}")
    divides = len(scale.shape) == len(shape) and all(
        parts <= max(size, 1) and size % parts == 0 if parts else size == 0
        for parts, size in zip(scale.shape, shape, strict=True)
    )
    if not divides:
        raise ValueError(
            f"{name} must have the rank of {of} {list(shape)} and axes that divide its own, got {list(scale.shape)}"
        )
    return tuple(max(size // parts, 1) if parts else 1 for parts, size in zip(scale.shape, shape, strict=True))


def check_block_size(block_size: int | None) -> None:
    """Refuse a block size that is neither None nor a positive int."""
    if block_size is not None and type(block_size) is not int:
        raise TypeError(f"block_size must be an int or None (the whole axis), got {type(block_size).__name__}")
    if block_size is not None and block_size < 1:
        raise ValueError(f"block_size must be positive, got {block_size}")


def check_finite_values(infinite: int, unrepresentable_nan: int) -> None:
    """Refuse values that have no place in the quantised format: `infinite` ±inf, and NaNs where it has none."""
    if infinite:
        raise ValueError(f"x must be free of infinities (or check_finite=False, to saturate them), got {infinite}")
    if unrepresentable_nan:
        raise ValueError(f"x must be free of NaN (or check_finite=False, to make it 0), got {unrepresentable_nan}")


def check_float(name: str, x: Any) -> None:
    """Refuse what is no array of floats of 16 or 32 bits, of any rank from 1 on."""
    if not (hasattr(x, "shape") and hasattr(x, "dtype")):
        raise TypeError(f"{name} must be an array, got {type(x).__name__}")
    if not x.shape:
        raise ValueError(f"{name} must have at least one axis, got a scalar")
    check_array(name, x, ", ".join("?" * len(x.shape)), FLOATS)
