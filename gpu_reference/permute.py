"""Rows of tokens to their experts and back, on the GPU; the operations are defined in `cpu_golden/permute.py`."""

from torch import Tensor

from gpu_reference._lib.operands import range_of
from gpu_reference._lib.routing import combine, inverse, plan_rows, take
from op_arguments.permute import Permuted, check_permute, check_unpermute


def permute(x: Tensor, indices: Tensor, *, num_experts: int, capacity: int | None = None) -> Permuted:
    """Copies of the rows of x [T, D] sorted by the experts that they go to, for a grouped matmul; differentiable in x.

    Arguments, result and errors as `cpu_golden.permute.permute`; values are looked at in CPU tensors only.
    """
    rows = check_permute(x, indices, num_experts, capacity, range_of=range_of(indices), exact=False)
    plan = plan_rows(indices, num_experts, capacity, rows)
    return Permuted(take(x, plan.source, plan.slots), plan.slots, plan.group_sizes)


def unpermute(rows: Tensor, slots: Tensor, weights: Tensor | None = None) -> Tensor:
    """The rows of each token, summed, times their weights where given: [T, D] in rows' dtype; differentiable in both.

    Arguments, result and errors as `cpu_golden.permute.unpermute`; products and sums are of float32.
    """
    check_unpermute(rows, slots, weights, range_of=range_of(slots), exact=False)
    return combine(rows, weights, slots, inverse(slots.reshape(-1), rows.shape[0]))
