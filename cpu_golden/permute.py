"""Rows sorted by the experts that they go to, and back: the definition."""

import numpy as np

from cpu_golden import Array
from cpu_golden._lib.arguments import range_of
from cpu_golden._lib.permutation import permutation, take_rows
from cpu_golden.stages import Stages, exact
from op_arguments.permute import Permuted, check_permute, check_unpermute


def permute(x: Array, indices: Array, *, num_experts: int, capacity: int | None = None) -> Permuted:
    """Copies of the rows of x sorted by the experts that they go to, for a grouped matmul.

    x [T, D] float32, bfloat16 or float16; indices [T, k] int32 in [0, num_experts): the experts of each token, all
    different. Within an expert rows are in the order of their tokens. capacity: rows that an expert takes at most; of
    those beyond it the later ones are dropped. Returns rows [M, D] in x's dtype, M = T·k or, if that is less,
    num_experts·capacity, and zero beyond sum(group_sizes); slots [T, k] int32, the row of each choice, -1 where it was
    dropped; group_sizes [num_experts] int32. Every bit of a row is x's.
    Raises TypeError for a wrong type or dtype, ValueError for a wrong shape or value.
    """
    rows = check_permute(x, indices, num_experts, capacity, range_of=range_of(indices), exact=True)
    source, slots, group_sizes = permutation(indices, num_experts, capacity, rows)
    return Permuted(take_rows(x, source, indices.shape[1]), slots, group_sizes)


def unpermute(rows: Array, slots: Array, weights: Array | None = None, *, stages: Stages = exact) -> Array:
    """The rows of each token, summed, times their weights where these are given: the inverse of `permute`.

    rows [M, D] float32, bfloat16 or float16; slots [T, k] int32 in [-1, M), as `permute` gives them; weights [T, k]
    float32. Returns `out[t] = Σ_j weights[t, j] · rows[slots[t, j]]` [T, D], float64 here; a slot of -1 adds nothing.
    Sites: product, sum (the running sum, in the order of j), out.
    Raises TypeError for a wrong type or dtype, ValueError for a wrong shape or value.
    """
    check_unpermute(rows, slots, weights, range_of=range_of(slots), exact=True)
    out = np.zeros((slots.shape[0], rows.shape[1]))
    for j in range(slots.shape[1]):
        kept = slots[:, j] >= 0
        taken = rows[slots[kept, j]].astype(np.float64)
        if weights is not None:
            taken = stages("product", taken * weights[kept, j, None].astype(np.float64))
        out[kept] = stages("sum", out[kept] + taken)
    return stages("out", out)
