"""The grouped matmuls on the host: how each is planned, and what all of them do with a plan: check, allocate, launch.

The two forms, and what their kernels share: `gpu_reference._lib.products`.
"""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from gpu_reference._lib.hardware import bfloat16_as_float32_where_interpreted, check_devices
from gpu_reference._lib.launch import Launch
from gpu_reference._lib.operands import NO_OPERAND, Shard, Sizes, on_device, operand
from gpu_reference._lib.products import BAND, Task
from gpu_reference._lib.tiles import Tile, block_of, cdiv
from gpu_reference._lib.visits import metadata_launch
from op_arguments import Tiling
from op_arguments.gmm import Problem
from op_arguments.quantized_gmm import QuantizedProblem


class Given(NamedTuple):
    """What every grouped matmul is given besides its operands."""

    group_sizes: Tensor
    group_offset: Any  # as the caller has it, or where a kernel is launched on the device
    existing_out: Tensor | None = None
    tiling: Tiling | None = None


class Plan(NamedTuple):
    """How operands are multiplied: the kernel, its tile, its arguments but for those of all kernels, its options."""

    kernel: Any
    tile: Tile
    arguments: dict[str, Any]
    options: dict[str, Any]

    def launch(
        self, p: Problem | QuantizedProblem, given: Given, out: Tensor, groups: Any, programs: int, **constants: Any
    ) -> Launch:
        """The kernel's launch in so many programs."""
        existing_out = NO_OPERAND if given.existing_out is None else operand(given.existing_out)
        shard = Shard(given.group_offset, p.experts, p.groups)
        task = Task(out, groups, existing_out, shard, Sizes(p.m, p.k, p.n))
        arguments = {**self.arguments, "task": task, "TILE": self.tile, **constants}
        return Launch(self.kernel, (programs,), arguments, self.options, "tiling")


class OfRows(Plan):
    """The plan of a product of rows, whose kernel calls `multiply_rows`."""

    def shape(self, p: Problem | QuantizedProblem) -> tuple[int, ...]:
        """The shape of the result."""
        return p.m, p.n

    def launches(self, p: Problem | QuantizedProblem, given: Given, out: Tensor) -> list[Launch]:
        """A program for every visit that there may be and every tile of columns, in whole bands, after the visits."""
        visits = metadata_launch(given.group_sizes, given.group_offset, p.m, self.tile.m, p.groups, "tiles")
        bands = cdiv(cdiv(p.m, self.tile.m) + p.groups, BAND.value)
        programs = bands * BAND.value * cdiv(p.n, self.tile.n)
        metadata = visits.arguments["metadata"]
        return [visits, self.launch(p, given, out, metadata, programs, EVEN_K=p.k % self.tile.k == 0)]


class OfGroups(Plan):
    """The plan of a product of groups, whose kernel calls `multiply_groups`."""

    def shape(self, p: Problem | QuantizedProblem) -> tuple[int, ...]:
        """The shape of the result."""
        return p.groups, p.k, p.n

    def launches(self, p: Problem | QuantizedProblem, given: Given, out: Tensor) -> list[Launch]:
        """A program for every tile of every group's output."""
        programs = p.groups * cdiv(p.k, self.tile.k) * cdiv(p.n, self.tile.n)
        sizes = given.group_sizes.contiguous()
        return [self.launch(p, given, out, sizes, programs, EXPERTS_BLOCK=block_of(p.experts))]


PlanOf = Callable[..., OfRows | OfGroups]
"""The plan of a checked problem (the first argument), its operands and a tiling (by name)."""


def product(
    plan_of: PlanOf, p: Problem | QuantizedProblem, operands: Mapping[str, Tensor | None], given: Given
) -> Tensor:
    """The product of checked arguments as `plan_of(p, **operands, tiling=...)` says, contiguous, in p's output dtype.

    Raises ValueError and RuntimeError as `check_devices`, and what `plan_of` raises.
    """
    given = given._replace(group_offset=on_device(given.group_offset, given.group_sizes.device))
    tensors = {name: value for name, value in given._asdict().items() if name != "tiling"}
    check_devices({**operands, **tensors})
    return _product(plan_of, p, operands, given, getattr(torch, p.out_dtype))


@bfloat16_as_float32_where_interpreted()
def _product(plan_of: PlanOf, p: Problem | QuantizedProblem, operands: Any, given: Given, dtype: torch.dtype) -> Tensor:
    plan = plan_of(p, **operands, tiling=given.tiling)
    device, shape, existing_out = given.group_sizes.device, plan.shape(p), given.existing_out
    if p.groups == 0:  # nobody has any row
        if existing_out is None:
            return torch.zeros(shape, dtype=dtype, device=device)
        return existing_out.clone(memory_format=torch.contiguous_format)
    out = torch.empty(shape, dtype=dtype, device=device)
    if out.numel():
        for launch in plan.launches(p, given, out):
            launch.run(device)
    return out
