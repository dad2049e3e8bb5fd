"""Operands on their way from the caller to a kernel: what the host can read of them, and the structs that kernels take.

Strides are in elements. A field that is None is no argument of the compiled kernel. For Triton 3.6 a kernel asks
whether a field is None, never a struct, and structs in a struct come after its tensors: else their ones become None.
"""

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from op_arguments import dtype_name
from op_arguments.gmm import Groups


class Operand(NamedTuple):
    """Matrices in memory, as a dot multiplies them: a tensor, and its strides along rows and columns.

    group: the stride from one group's matrix to the next, None of one that is every group's. scale: its scales and
    their strides; one serves `scale_groups` groups and `scale_lines` lines, which are rows of lhs and columns of rhs.
    """

    data: Any
    row: Any
    column: Any
    group: Any = None
    scale: Any = None
    scale_row: Any = None
    scale_column: Any = None
    scale_group: Any = None
    scale_groups: Any = 1
    scale_lines: Any = 1


NO_OPERAND = Operand(None, None, None)
"""In place of an operand that is not given."""


class Sizes(NamedTuple):
    """The sizes of a grouped matmul: rows, and columns of lhs and of rhs."""

    m: Any
    k: Any
    n: Any


class Shard(NamedTuple):
    """Which groups a kernel multiplies: `groups` from group_offset [1] of `experts`."""

    group_offset: Any
    experts: Any
    groups: Any


def operand(values: Tensor, *, transposed: bool = False, scale: Operand = NO_OPERAND, **served: int) -> Operand:
    """The Operand of [rows, columns] or [groups, rows, columns], transposed or not; served: by one of its scales."""
    *group, row, column = values.stride()
    if transposed:
        row, column = column, row
    of_scale = {"scale": scale.data, "scale_row": scale.row, "scale_column": scale.column, "scale_group": scale.group}
    return Operand(values, row, column, *group)._replace(**of_scale, **served)


def on_device(group_offset: Any, device: torch.device) -> Tensor:
    """A checked group_offset where a kernel on `device` loads it: a tensor there as it is, whatever was read of it."""
    known = scalar(group_offset)
    if isinstance(known, Tensor) or (isinstance(group_offset, Tensor) and group_offset.device == device):
        return group_offset
    return torch.full((1,), known, dtype=torch.int32, device=device)


def values(group_sizes: Any) -> list[int] | None:
    """The values of group_sizes where it is the int vector it should be, in memory that the host can read at once."""
    readable = isinstance(group_sizes, Tensor) and group_sizes.device.type == "cpu"
    return group_sizes.tolist() if readable and group_sizes.dtype == torch.int32 and group_sizes.ndim == 1 else None


def scalar(group_offset: Any) -> Any:
    """The int in a scalar ([] or [1]) of NumPy or on the CPU; anything else as it is, for the check to judge."""
    is_tensor = isinstance(group_offset, Tensor)
    readable = group_offset.device.type == "cpu" if is_tensor else hasattr(group_offset, "dtype")
    integer = readable and dtype_name(group_offset.dtype) in ("int32", "int64") and math.prod(group_offset.shape) == 1
    return group_offset.item() if integer else group_offset


def groups_of(group_sizes: Any, group_offset: Any) -> Groups:
    """The groups as checks take them, with what the host can read of them at once."""
    return Groups(group_sizes, scalar(group_offset), values(group_sizes))


def range_of(values: Any) -> tuple[int, int] | None:
    """The least and the largest of an int tensor that the host can read at once, None where there is none."""
    readable = isinstance(values, Tensor) and values.device.type == "cpu" and values.dtype == torch.int32
    return (int(values.min()), int(values.max())) if readable and values.numel() else None


def primal_of(x: Tensor) -> Tensor:
    """x with a gradient of its own. What can have none stays as it is, for the function to refuse it."""
    return x.detach().requires_grad_() if isinstance(x, Tensor) and x.is_floating_point() else x
