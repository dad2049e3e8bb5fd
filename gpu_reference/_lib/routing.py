"""Where rows go: each token's row to its experts, sorted by expert, and back, with gradients that are no atomics."""

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable


class Plan(NamedTuple):
    """Which row is whose: source [M], the choice t·k + j of each row or -1; slots and group_sizes as `Permuted`."""

    source: Tensor
    slots: Tensor
    group_sizes: Tensor


def plan_rows(indices: Tensor, num_experts: int, capacity: int | None, rows: int, preceding: Tensor | int = 0) -> Plan:
    """The plan of `permute`. preceding [E]: rows that other processes' tokens take of each expert's capacity first."""
    choices = indices.reshape(-1).long()
    in_order, order = torch.sort(choices, stable=True)
    starts = torch.searchsorted(in_order, torch.arange(num_experts + 1, device=indices.device))
    group_sizes = starts.diff()
    if capacity is not None:
        group_sizes = group_sizes.minimum(torch.clamp(torch.as_tensor(capacity - preceding), min=0))
    position = torch.empty_like(order).scatter_(0, order, torch.arange(len(order), device=indices.device))
    position -= starts[choices]
    slots = torch.where(position < group_sizes[choices], starts_of(group_sizes)[choices] + position, -1).int()
    return Plan(inverse(slots, rows), slots.reshape(indices.shape), group_sizes.int())


def take(x: Tensor, source: Tensor, slots: Tensor) -> Tensor:
    """x's row for each source, and how its gradient comes back: slots, the inverse of source."""
    rows: Tensor = _Take.apply(x, source, slots)  # type: ignore[no-untyped-call]
    return rows


def combine(rows: Tensor, weights: Tensor | None, slots: Tensor, source: Tensor) -> Tensor:
    """`unpermute`, with the inverse of slots."""
    out: Tensor = _Combine.apply(rows, weights, slots, source)  # type: ignore[no-untyped-call]
    return out


def inverse(slots: Tensor, rows: int) -> Tensor:
    """Which of the slots is row 0, 1, …, up to `rows` of them: -1 for none."""
    source = torch.full((rows + 1,), -1, device=slots.device)
    places = torch.where(slots < 0, rows, slots).long()  # the last, which is cut off, is that of the dropped
    return source.scatter_(0, places, torch.arange(len(slots), device=slots.device))[:rows]


def starts_of(sizes: Tensor, axis: int = 0) -> Tensor:
    """Where each of consecutive parts of these sizes begins."""
    return sizes.cumsum(axis) - sizes


def _rows_of(x: Tensor, source: Tensor, slots: Tensor) -> Tensor:
    """x's row for each source (the choice t·k + j), zero for -1."""
    if not x.shape[0]:
        return x.new_zeros(len(source), x.shape[1])
    return torch.where(source[:, None] >= 0, x[source.clamp(min=0) // slots.shape[1]], 0)


def _sum_of(rows: Tensor, weights: Tensor | None, slots: Tensor) -> Tensor:
    """Σ_j weights[:, j] · rows[slots[:, j]] in float32, in the order of j."""
    total = torch.zeros(slots.shape[0], rows.shape[1], device=rows.device)
    for j in range(slots.shape[1] if rows.shape[0] else 0):
        taken = rows[slots[:, j].clamp(min=0)].float()
        taken = taken if weights is None else taken * weights[:, j, None]
        total += torch.where(slots[:, j, None] >= 0, taken, 0.0)
    return total


class _Take(torch.autograd.Function):
    """Rows to experts, whose gradient is a sum over each token's rows, in order: no atomics, the same bits always."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, source: Tensor, slots: Tensor) -> Tensor:
        ctx.save_for_backward(slots)
        return _rows_of(x, source, slots)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, drows: Tensor) -> tuple[Tensor | None, ...]:
        (slots,) = ctx.saved_tensors
        return _sum_of(drows, None, slots).to(drows.dtype), None, None


class _Combine(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, weights: Tensor | None, slots: Tensor, source: Tensor) -> Tensor:
        ctx.save_for_backward(None if weights is None else rows, weights, slots, source)
        return _sum_of(rows, weights, slots).to(rows.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor | None, ...]:
        rows, weights, slots, source = ctx.saved_tensors
        if weights is None:
            return _rows_of(dout, source, slots), None, None, None
        drows, dweights = dout.new_zeros(len(rows) + 1, dout.shape[1]), torch.zeros_like(weights)
        for j in range(slots.shape[1] if len(rows) else 0):  # float32 of all choices at once is gigabytes
            slot, is_kept = slots[:, j].long(), slots[:, j] >= 0
            drows[torch.where(is_kept, slot, len(rows))] = (dout.float() * weights[:, j, None]).to(dout.dtype)
            products = rows[slot.clamp(min=0)].float() * dout.float()
            dweights[:, j] = torch.where(is_kept, products.sum(1), 0.0)
        return drows[:-1], dweights, None, None  # the last row is that of all choices that were dropped
