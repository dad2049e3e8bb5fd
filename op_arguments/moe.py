"""What the layers of `cpu_golden/moe.py` accept, beyond what their matmuls and quantisers check."""

from typing import Any, NamedTuple

from op_arguments import Array, check_array, check_shape, dtype_name
from op_arguments.gmm import FLOATS, Problem
from op_arguments.quantize import check_block_size

QUANTIZE = (None, "fp8", "mxfp8")
Range = tuple[int, int] | None


def check_quantize_options(quantize: Any, bwd_quantize: Any, block_size: int | None) -> None:
    """Refuse a quantize or bwd_quantize other than "auto", True and False (ValueError), and a bad block_size."""
    for name, value in (("quantize", quantize), ("bwd_quantize", bwd_quantize)):
        if value != "auto" and not isinstance(value, bool):
            raise ValueError(f"{name} must be 'auto', True or False, got {value!r}")
    check_block_size(block_size)


def check_dout(dout: Array, p: Problem, *, exact: bool = False) -> None:
    """Refuse a gradient of the result that has not its shape (ValueError) and dtype (TypeError); `exact` as ever."""
    check_array("dout", dout, "M, N", (p.out_dtype,), exact=exact)
    check_shape("dout", dout, "M, N", (p.m, p.n))


class Layer(NamedTuple):
    """A checked `moe_layer`: its sizes and its dtype's name."""

    tokens: int  # T
    hidden: int  # D
    intermediate: int  # F
    experts: int  # E, that the router chooses among
    groups: int  # G, in this shard
    dtype: str


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
    _check_count("num_experts", num_experts, 0)
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


def check_moe_layer(
    x: Array,
    w_router: Array,
    w_gate: Array,
    w_up: Array,
    w_down: Array,
    *,
    top_k: Any,
    quantize: Any,
    block_size: int | None,
    capacity: Any,
    group_offset: Any,
    exact: bool = False,
) -> Layer:
    """Check the arguments of `moe_layer`; `exact` also lets float64 operands through: the goldens take them.

    Raises TypeError for a wrong type or dtype, ValueError for a wrong rank, shape or value.
    """
    check_array("x", x, "T, D", FLOATS, exact=exact)
    check_array("w_router", w_router, "D, E", FLOATS, exact=exact)
    (tokens, hidden), experts = x.shape, w_router.shape[1]
    check_array("w_gate", w_gate, "G, D, F", FLOATS, exact=exact)
    groups, _, intermediate = w_gate.shape
    check_shape("w_router", w_router, "D, E", (hidden, experts))
    check_shape("w_gate", w_gate, "G, D, F", (groups, hidden, intermediate))
    check_array("w_up", w_up, "G, D, F", FLOATS, exact=exact)
    check_shape("w_up", w_up, "G, D, F", (groups, hidden, intermediate))
    check_array("w_down", w_down, "G, F, D", FLOATS, exact=exact)
    check_shape("w_down", w_down, "G, F, D", (groups, intermediate, hidden))
    dtype = dtype_name(x.dtype)
    for name, weights in (("w_gate", w_gate), ("w_up", w_up), ("w_down", w_down)):
        if dtype_name(weights.dtype) != dtype:
            raise TypeError(f"{name} must have x's dtype {dtype}, got {dtype_name(weights.dtype)}")
    _check_count("top_k", top_k, 1)
    if top_k > experts:
        raise ValueError(f"top_k must be at most E = {experts}, got {top_k}")
    if quantize not in QUANTIZE:
        raise ValueError(f"quantize must be None, 'fp8' or 'mxfp8', got {quantize!r}")
    check_block_size(block_size)
    if quantize == "fp8" and block_size is not None:
        for name, size in (("D", hidden), ("F", intermediate)):
            if size % block_size:
                raise ValueError(f"block_size must divide {name} = {size}, got {block_size}")
    permuted_rows(tokens, top_k, experts, capacity)
    if groups > experts:
        raise ValueError(f"w_gate must have at most the E = {experts} experts of w_router, got {groups}")
    if type(group_offset) is int and not 0 <= group_offset <= experts - groups:  # of arrays the matmuls judge
        raise ValueError(
            f"group_offset must be in [0, E - G] = [0, {experts - groups}] "
            f"(E = {experts} groups, G = {groups} in the shard), got {group_offset}"
        )
    return Layer(tokens, hidden, intermediate, experts, groups, dtype)


def check_layer_dout(dout: Array, x: Array, *, exact: bool = False) -> None:
    """Refuse a gradient of `moe_layer`'s result that has not its shape (ValueError) and dtype (TypeError): x's."""
    check_array("dout", dout, "T, D", (dtype_name(x.dtype),), exact=exact)
    check_shape("dout", dout, "T, D", tuple(x.shape))


def check_expert_parallel(layer: Layer, devices: int, group_offset: Any) -> None:
    """Refuse experts that are no equal parts of the router's (ValueError), and a shard of a part."""
    if layer.groups * devices != layer.experts:
        raise ValueError(
            f"w_gate must have E / devices = {layer.experts} / {devices} experts on each device, got {layer.groups}"
        )
    if type(group_offset) is not int or group_offset != 0:
        raise ValueError(f"group_offset must be 0 where experts are shared out over devices, got {group_offset}")


def permuted_rows(tokens: int, top_k: int, num_experts: int, capacity: Any) -> int:
    """Rows that `permute` makes of so many tokens in the worst case; refuses a capacity that is no positive int."""
    if capacity is None:
        return tokens * top_k
    _check_count("capacity", capacity, 1)
    return min(tokens * top_k, num_experts * int(capacity))


def _check_count(name: str, value: Any, least: int) -> None:
    if type(value) is not int:
        raise TypeError(f"{name} must be an int, got {type(value).__name__}")
    if value < least:
        raise ValueError(f"{name} must be at least {least}, got {value}")
