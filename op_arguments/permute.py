"""What `permute` and `unpermute` accept and return (they are defined in `cpu_golden/permute.py`)."""

from typing import Any, NamedTuple

from op_arguments import Array, check_array, check_shape
from op_arguments.gmm import FLOATS

Range = tuple[int, int] | None


class Permuted(NamedTuple):
    """Rows sorted by expert. rows [M, D]; slots [T, k] int32, the row of each choice or -1; group_sizes [E] int32."""

    rows: Any
    slots: Any
    group_sizes: Any


def check_permute(x: Array, indices: Array, num_experts: Any, capacity: Any, *, range_of: Range, exact: bool) -> int:
    """The rows that `permute` makes, after checking its arguments.

    range_of: the least and the largest index, or None where reading them is impossible (traced) or would stall a
    device. Raises TypeError for a wrong type or dtype, ValueError for a wrong rank, shape or value.
    """
    check_array("x", x, "T, D", FLOATS, exact=exact)
    check_array("indices", indices, "T, k", ("int32",))
    (tokens, _), (rows, top_k) = x.shape, indices.shape
    if rows != tokens:
        raise ValueError(f"indices must have T = {tokens} rows as x does, got {rows}")
    check_count("num_experts", num_experts, 0)
    if range_of is not None and not 0 <= range_of[0] <= range_of[1] < num_experts:
        wrong = range_of[0] if range_of[0] < 0 else range_of[1]
        raise ValueError(f"indices must be in [0, num_experts) = [0, {num_experts}), got {wrong}")
    return permuted_rows(tokens, top_k, num_experts, capacity)


def check_unpermute(rows: Array, slots: Array, weights: Array | None, *, range_of: Range, exact: bool) -> None:
    """Check the arguments of `unpermute`; as `check_permute`, range_of that of slots."""
    check_array("rows", rows, "M, D", FLOATS, exact=exact)
    check_array("slots", slots, "T, k", ("int32",))
    if weights is not None:
        check_array("weights", weights, "T, k", ("float32",), exact=exact)
        check_shape("weights", weights, "T, k", tuple(slots.shape))
    if range_of is not None and not -1 <= range_of[0] <= range_of[1] < rows.shape[0]:
        wrong = range_of[0] if range_of[0] < -1 else range_of[1]
        raise ValueError(f"slots must be in [-1, M) = [-1, {rows.shape[0]}), got {wrong}")


def permuted_rows(tokens: int, top_k: int, num_experts: int, capacity: Any) -> int:
    """Rows that `permute` makes of so many tokens in the worst case; refuses a capacity that is no positive int."""
    if capacity is None:
        return tokens * top_k
    check_count("capacity", capacity, 1)
    return min(tokens * top_k, num_experts * int(capacity))


def check_count(name: str, value: Any, least: int) -> None:
    """Refuse what is no int (TypeError), and one below `least` (ValueError)."""
    if type(value) is not int:
        raise TypeError(f"{name} must be an int, got {type(value).__name__}")
    if value < least:
        raise ValueError(f"{name} must be at least {least}, got {value}")
