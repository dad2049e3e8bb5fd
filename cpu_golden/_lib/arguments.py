"""What the checks of arguments want to know of NumPy's."""

from typing import Any

import numpy as np

from op_arguments.gmm import Groups


def values(group_sizes: Any) -> list[int] | None:
    """The values of group_sizes where it is the int vector it should be (else the check says what it is)."""
    integers = isinstance(group_sizes, np.ndarray) and group_sizes.ndim == 1 and group_sizes.dtype == np.int32
    return [int(size) for size in group_sizes] if integers else None


def scalar(value: Any) -> Any:
    """The int in an int32 scalar array ([] or [1]); anything else as it is, for the check to judge."""
    one_integer = isinstance(value, np.ndarray | np.integer) and value.size == 1 and value.dtype.kind == "i"
    return int(value.reshape(())) if one_integer else value


def groups_of(group_sizes: Any, group_offset: Any) -> Groups:
    """The groups as checks take them, with what is known of them."""
    return Groups(group_sizes, scalar(group_offset), values(group_sizes))


def one_tile(m: int, k: int, n: int) -> tuple[int, int, int]:
    """The whole problem as one tile."""
    return max(m, 1), max(k, 1), max(n, 1)


def range_of(values: Any) -> tuple[int, int] | None:
    """The least and the largest of an int array (None where there is none, or where it is no such array)."""
    integers = isinstance(values, np.ndarray) and values.dtype == np.int32 and values.size > 0
    return (int(values.min()), int(values.max())) if integers else None
