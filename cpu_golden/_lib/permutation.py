"""Which row a token's choice of an expert is."""

import numpy as np

from cpu_golden import Array


def permutation(indices: Array, num_experts: int, capacity: int | None, rows: int) -> tuple[Array, Array, Array]:
    """(source [rows]: the choice t·k + j of each row, or -1; slots and group_sizes as `Permuted` has them)."""
    choices = indices.ravel()
    source, slots = np.full(rows, -1), np.full(choices.size, -1, np.int32)
    group_sizes = np.zeros(num_experts, np.int32)
    first = 0
    for expert in range(num_experts):
        of_expert = np.flatnonzero(choices == expert)[:capacity]
        end = first + len(of_expert)
        source[first:end], slots[of_expert] = of_expert, np.arange(first, end)
        group_sizes[expert], first = len(of_expert), end
    return source, slots.reshape(indices.shape), group_sizes


def take_rows(x: Array, source: Array, top_k: int) -> Array:
    """x's row for each source, zero for -1."""
    taken = np.zeros((len(source), x.shape[1]), x.dtype)
    taken[source >= 0] = x[source[source >= 0] // top_k]
    return taken
