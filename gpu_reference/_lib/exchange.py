"""Expert parallelism: rows between processes, each of which has a part of the tokens and of the experts."""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn.functional import pad

from gpu_reference._lib.routing import Plan, inverse, plan_rows, starts_of
from op_arguments.permute import permuted_rows


def exchange_plans(
    group: dist.ProcessGroup, indices: Tensor, num_experts: int, capacity: int | None
) -> tuple[Plan, Plan]:
    """How rows lie in the buffer that is sent, a part for each process; and how what is received is sorted by expert.

    The second plan's source and slots are of rows of the received buffer, [M] and [parts · width, 1].
    """
    processes = group.size()
    groups = num_experts // processes
    tokens, top_k = indices.shape
    width = permuted_rows(tokens, min(top_k, groups), groups, capacity)
    preceding: Tensor | int = 0
    if capacity is not None:
        counts = (indices.reshape(-1, 1) == torch.arange(num_experts, device=indices.device)).sum(0)
        gathered = [torch.empty_like(counts) for _ in range(processes)]
        dist.all_gather(gathered, counts, group=group)
        preceding = torch.stack(gathered)[: group.rank()].sum(0)
    plan = plan_rows(indices, num_experts, capacity, permuted_rows(tokens, top_k, num_experts, capacity), preceding)

    sizes = plan.group_sizes.reshape(processes, groups).long()
    starts = starts_of(sizes.sum(1))
    column = torch.arange(width, device=indices.device)
    source = plan.source[(starts[:, None] + column).clamp(max=len(plan.source) - 1)]
    source = torch.where(column < sizes.sum(1)[:, None], source, -1).reshape(-1)
    process = (indices // groups).long()
    slots = torch.where(plan.slots >= 0, process * width + plan.slots - starts[process], -1)
    sent = Plan(source, slots, plan.group_sizes)

    sizes = _exchanged(sizes, group)  # [processes, G]: rows that each of them sends to each expert here
    ends = sizes.cumsum(1)
    expert = (column[:, None] >= ends[:, None]).sum(2)  # [processes, width]; G where there is no row
    begins = pad(starts_of(sizes.sum(0)) + starts_of(sizes) - starts_of(sizes, 1), (0, 1))
    places = begins.gather(1, expert) + column
    slots = torch.where(expert < groups, places, -1).reshape(-1)
    rows = len(slots) if capacity is None else min(len(slots), groups * capacity)
    return sent, Plan(inverse(slots, rows), slots[:, None], sizes.sum(0).int())


def swap(buffer: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Part i of the buffer to process i, and part i of the result from it; differentiable."""
    swapped: Tensor = _Swap.apply(buffer, group)  # type: ignore[no-untyped-call]
    return swapped


class _Swap(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, buffer: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return _exchanged(buffer, group)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return _exchanged(grad, ctx.group), None


def _exchanged(buffer: Tensor, group: dist.ProcessGroup) -> Tensor:
    received = torch.empty_like(buffer, memory_format=torch.contiguous_format)
    dist.all_to_all_single(received, buffer.contiguous(), group=group)
    return received
