"""Rows of tokens to their experts and back, on the GPU; the operations are defined in `cpu_golden/permute.py`."""

from torch import Tensor

from gpu_reference._lib.operands import range_of
from gpu_reference._lib.routing import combine, inverse, plan_rows, take
from op_arguments.permute import Permuted, check_permute, check_unpermute


def permute(x: Tensor, indices: Tensor, *, num_experts: int, capacity: int | None = None) -> Permuted:
    """Copies of the rows of x sorted by the experts that they go to, for a grouped matmul.

    x [T, D] float32, bfloat16 or float16; indices [T, k] int32 in [0, num_experts): the experts of each token, all
    different. Within an expert rows are in the order of their tokens. capacity: rows that an expert takes at most; of
    those beyond it the later ones are dropped. Returns rows [M, D] in x's dtype, M = T·k or, if that is less,
    num_experts·capacity, and zero beyond sum(group_sizes); slots [T, k] int32, the row of each choice, -1 where it was
    dropped; group_sizes [num_experts] int32. Every bit of a row is x's. Differentiable in x.
    Raises TypeError for a wrong type or dtype, ValueError for a wrong shape or value (of a CPU tensor).
    """
    rows = check_permute(x, indices, num_experts, capacity, range_of=range_of(indices), exact=False)
    plan = plan_rows(indices, num_experts, capacity, rows)
    return Permuted(take(x, plan.source, plan.slots), plan.slots, plan.group_sizes)


def unpermute(rows: Tensor, slots: Tensor, weights: Tensor | None = None) -> Tensor:
    """The rows of each token, summed, times their weights where these are given: the inverse of `permute`.

    rows [M, D] float32, bfloat16 or float16; slots [T, k] int32 in [-1, M), as `permute` gives them; weights [T, k]
    float32. Returns `out[t] = Σ_j weights[t, j] · rows[slots[t, j]]` [T, D] in rows' dtype, products and sums in
    float32; a slot of -1 adds nothing. Differentiable in rows and weights. Raises as `permute`.
    """
    check_unpermute(rows, slots, weights, range_of=range_of(slots), exact=False)
    return combine(rows, weights, slots, inverse(slots.reshape(-1), rows.shape[0]))
