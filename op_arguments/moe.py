"""What `moe_layer` returns, and what it accepts beyond what its matmuls and quantisers check."""

from typing import Any, NamedTuple

from op_arguments import Array, check_array, check_shape, dtype_name
from op_arguments.gmm import FLOATS
from op_arguments.permute import check_count, permuted_rows
from op_arguments.quantize import check_block_size

QUANTIZE = (None, "fp8", "mxfp8")


class LayerGrads(NamedTuple):
    """The gradients of `moe_layer`."""

    x: Any
    w_router: Any
    w_gate: Any
    w_up: Any
    w_down: Any


class Layer(NamedTuple):
    """A checked `moe_layer`: its sizes and its dtype's name."""

    tokens: int  # T
    hidden: int  # D
    intermediate: int  # F
    experts: int  # E, that the router chooses among
    groups: int  # G, in this shard
    dtype: str


def check_moe_layer(
    x: Array,
    w_router: Array,
    w_gate: Array,
    w_up: Array,
    w_down: Array,
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
    check_count("top_k", top_k, 1)
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
