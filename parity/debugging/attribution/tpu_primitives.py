"""The operations of a jaxpr on NumPy arrays: each in its own dtypes or in float64, and the memory that it reads."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import cache, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

Values = list[Any]
"""NumPy arrays, floating-point ones in float64; a reference is the array (or the view) itself."""


@cache
def compiled_of(primitive: Any, params: tuple[tuple[str, Any], ...]) -> Callable[..., Any]:
    """A primitive with these parameters, compiled once."""
    return jax.jit(partial(primitive.bind, **dict(params)))


def is_float(aval: Any) -> bool:
    """Whether values of it are carried in float64."""
    return hasattr(aval, "dtype") and _is_floating(aval.dtype)


@cache
def _is_floating(dtype: Any) -> bool:
    return bool(jnp.issubdtype(dtype, np.floating))


def is_quantised(aval: Any) -> bool:
    """Whether it is of floats of 8 bits."""
    return is_float(aval) and aval.dtype.itemsize == 1


def wide_of(x: Any) -> Any:
    """x as a NumPy array, a floating-point one in float64."""
    x = np.asarray(x)
    return x.astype(np.float64) if jnp.issubdtype(x.dtype, np.floating) else x


def own_of(x: Any, aval: Any) -> Any:
    """x in its own dtype."""
    return x.astype(aval.dtype) if is_float(aval) else x


def _select(which: Any, *values: Any) -> Any:
    return np.where(which, values[1], values[0]) if len(values) == 2 else NotImplemented


def _broadcast(x: Any, *, shape: Sequence[int], broadcast_dimensions: Sequence[int], **_: Any) -> Any:
    sizes = dict(zip(broadcast_dimensions, x.shape, strict=True))
    return np.broadcast_to(x.reshape([sizes.get(axis, 1) for axis in range(len(shape))]), shape)


def _slice(x: Any, *, start_indices: Any, limit_indices: Any, strides: Any) -> Any:
    return x[tuple(map(slice, start_indices, limit_indices, strides or (1,) * x.ndim))]


def _convert(x: Any, *, new_dtype: Any, **_: Any) -> Any:
    is_cut = jnp.issubdtype(x.dtype, np.floating) and not jnp.issubdtype(new_dtype, np.floating)
    rounds_twice = new_dtype == _BFLOAT16 and x.dtype != np.float32  # in NumPy, by way of float32
    return x.astype(new_dtype) if new_dtype in _NUMPY_DTYPES and not is_cut and not rounds_twice else NotImplemented


def _iota(*, dtype: Any, shape: Sequence[int], dimension: int, **_: Any) -> Any:
    sizes = [-1 if axis == dimension else 1 for axis in range(len(shape))]
    return np.broadcast_to(np.arange(shape[dimension], dtype=dtype).reshape(sizes), shape)


def _reshape(x: Any, *, new_sizes: Any, dimensions: Any, **_: Any) -> Any:
    return x.reshape(new_sizes) if dimensions is None else NotImplemented


def _sum(x: Any, *, axes: Any, **_: Any) -> Any:
    return x.sum(axis=axes) if x.dtype == np.float64 else NotImplemented


def _div(x: Any, y: Any) -> Any:
    if x.dtype == np.int32 and np.all(y):
        return (x - np.fmod(x, y)) // y  # toward zero
    return x / y if x.dtype == np.float64 else NotImplemented


def _rem(x: Any, y: Any) -> Any:
    return np.fmod(x, y) if x.dtype == np.int32 and np.all(y) else NotImplemented


def _sign(x: Any) -> Any:
    return np.sign(x) if x.dtype == np.int32 else NotImplemented


def _dot(x: Any, y: Any, *, dimension_numbers: Any, **_: Any) -> Any:
    if not x.dtype == y.dtype == np.float64:
        return NotImplemented
    (of_x, of_y), (batch_x, batch_y) = dimension_numbers
    rows = [n for n in range(x.ndim) if n not in (*of_x, *batch_x)]
    columns = [n for n in range(y.ndim) if n not in (*of_y, *batch_y)]
    batch, m, n = [x.shape[n] for n in batch_x], [x.shape[n] for n in rows], [y.shape[n] for n in columns]
    depth = math.prod(x.shape[n] for n in of_x)
    left = x.transpose(*batch_x, *rows, *of_x).reshape(*batch, math.prod(m), depth)
    right = y.transpose(*batch_y, *of_y, *columns).reshape(*batch, depth, math.prod(n))
    return (left @ right).reshape(*batch, *m, *n)


_NUMPY: Mapping[str, Callable[..., Any]] = {
    "add": np.add,
    "sub": np.subtract,
    "mul": np.multiply,
    "neg": np.negative,
    "max": np.maximum,
    "min": np.minimum,
    "eq": np.equal,
    "ne": np.not_equal,
    "lt": np.less,
    "le": np.less_equal,
    "gt": np.greater,
    "ge": np.greater_equal,
    "and": np.bitwise_and,
    "or": np.bitwise_or,
    "xor": np.bitwise_xor,
    "not": np.invert,
    "select_n": _select,
    "broadcast_in_dim": _broadcast,
    "slice": _slice,
    "convert_element_type": _convert,
    "iota": _iota,
    "reshape": _reshape,
    "squeeze": lambda x, *, dimensions, **_: x.squeeze(tuple(dimensions)),
    "transpose": lambda x, *, permutation, **_: x.transpose(permutation),
    "concatenate": lambda *xs, dimension, **_: np.concatenate(xs, dimension),
    "reduce_max": lambda x, *, axes, **_: x.max(axis=axes),
    "abs": np.abs,
    "reduce_sum": _sum,
    "div": _div,
    "rem": _rem,
    "sign": _sign,
    "dot_general": _dot,
}
"""Operations in NumPy, in a hundredth of the time that JAX takes to run one by itself: with the same bits, but for the
sums and quotients, which are of float64 alone."""
_BFLOAT16 = np.dtype(jnp.bfloat16)
_NUMPY_DTYPES = frozenset(map(np.dtype, (np.float64, np.float32, _BFLOAT16, np.int32, np.bool_)))


def bind(eqn: Any, operands: Values, params: Mapping[str, Any]) -> Values:
    """The results of an equation with other parameters, in the dtypes of its operands."""
    in_numpy = _NUMPY.get(eqn.primitive.name)
    if in_numpy and all(x.dtype in _NUMPY_DTYPES for x in operands):
        if not isinstance(in_numpy, np.ufunc):
            result = in_numpy(*operands, **params)
        else:
            result = NotImplemented if any(params.values()) else in_numpy(*operands)
        if result is not NotImplemented:
            return [np.asarray(result)]
    if eqn.primitive is lax.scatter_add_p:  # has an addition of its own dtype among its parameters
        plain = ("dimension_numbers", "indices_are_sorted", "unique_indices", "mode")
        return [np.asarray(lax.scatter_add(*operands, **{name: params[name] for name in plain}))]
    results = eqn.primitive.bind(*operands, **params)
    return [*map(np.asarray, results if eqn.primitive.multiple_results else [results])]


def exact_of(eqn: Any, operands: Values) -> Values:
    """The results of an equation in float64."""
    if eqn.primitive.name == "reduce_precision":
        return operands
    return bind(eqn, operands, in_float64(eqn))


def in_float64(eqn: Any) -> dict[str, Any]:
    """The parameters of an operation with float64 in the place of every other floating-point dtype."""

    def wide(value: Any) -> Any:
        is_float = isinstance(value, np.dtype) and jnp.issubdtype(value, np.floating)
        return np.dtype(np.float64) if is_float else value

    return {name: wide(value) for name, value in eqn.params.items()}


def unset_memory(aval: Any) -> Any:
    """Memory that nothing has been stored to."""
    is_number = isinstance(getattr(aval, "dtype", None), np.dtype)
    if not is_number:  # a semaphore
        return np.zeros(aval.shape, np.int32)
    return np.full(aval.shape, np.nan) if is_float(aval) else np.zeros(aval.shape, aval.dtype)


def block_size(size: Any) -> int | None:
    """Of an axis of a block, None where it is left out."""
    if size is None or isinstance(size, int):
        return size
    inner = getattr(size, "block_size", None)  # pl.Blocked; a squeezed axis has none
    return None if inner is None else int(inner)


def padded_to(x: Any, block: Any) -> Any:
    """x in whole blocks; views of it are the kernel's blocks."""
    sizes = [block_size(size) or 1 for size in block.block_shape]
    shape = [math.ceil(n / size) * size for n, size in zip(x.shape, sizes, strict=True)]
    padded = np.full(shape, np.nan if x.dtype == np.float64 else 0, x.dtype)
    padded[tuple(map(slice, x.shape))] = x
    return padded


def view_of(ref: Any, transforms: Sequence[Any]) -> Any:
    """The part of a reference that indexers choose."""
    for transform in transforms:
        if not hasattr(transform, "indices"):
            raise NotImplementedError(f"lines cannot follow a reference through {type(transform).__name__}")
        where: list[Any] = []
        for i in transform.indices:
            if hasattr(i, "stride"):
                where.append(slice(int(i.start), int(i.start) + int(i.size) * i.stride, i.stride))
            else:
                where.append(int(i))
        ref = ref[(*where, ...)]
    return ref


def referred(ref: Any) -> Any:
    """The array, or the view of one, that a reference is."""
    return view_of(ref.ref, ref.transforms) if hasattr(ref, "transforms") else ref
