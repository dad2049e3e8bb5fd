"""Operands on their way from the caller to a kernel: what the host can read of them, where they are, their strides."""

import math
from typing import Any

import torch
from torch import Tensor

from op_arguments import dtype_name


def strides(name: str, tensor: Tensor | None, axes: str) -> dict[str, int]:
    """The strides of `tensor` as kernels take them: `{name}_stride_{axis}`, 0 where it is None."""
    sizes = (0,) * len(axes) if tensor is None else tensor.stride()
    return {f"{name}_stride_{axis}": size for axis, size in zip(axes, sizes, strict=True)}


def on_device(group_offset: int | Tensor, device: torch.device) -> Tensor:
    """group_offset where a kernel can load it."""
    if isinstance(group_offset, Tensor):
        return group_offset
    return torch.full((1,), group_offset, dtype=torch.int32, device=device)


def only_tensor(name: str, value: Any) -> dict[str, Tensor | None]:
    """{name: value} for a tensor: what `check_devices` is asked about a group_offset."""
    return {name: value} if isinstance(value, Tensor) else {}


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


def range_of(values: Any) -> tuple[int, int] | None:
    """The least and the largest of an int tensor that the host can read at once, None where there is none."""
    readable = isinstance(values, Tensor) and values.device.type == "cpu" and values.dtype == torch.int32
    return (int(values.min()), int(values.max())) if readable and values.numel() else None


def primal_of(x: Tensor) -> Tensor:
    """x with a gradient of its own. What can have none stays as it is, for the function to refuse it."""
    return x.detach().requires_grad_() if isinstance(x, Tensor) and x.is_floating_point() else x
