"""What `moe_layer` takes and returns, beyond what its matmuls and quantisers check."""

from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

from op_arguments import Array, Tiling, check_array, check_shape, dtype_name
from op_arguments.gmm import FLOATS
from op_arguments.permute import check_count
from op_arguments.quantize import check_block_size

QUANTIZE = (None, "fp8", "mxfp8")


@dataclass(frozen=True, kw_only=True)
class LayerOptions:
    """The options of `moe_layer` and its gradients.

    top_k: the experts that each token goes to.
    quantize: the operands of the matmuls of both passes in e4m3; "fp8": rows with a float32 scale per `block_size`
    elements, weights per block_size x block_size of them (None: whole axes; it must divide D and F), as
    `grouped_dense`; "mxfp8": with a power of two per 32, of any D and F, as `mxfp8_quantize`.
    capacity: rows that an expert takes at most. Of the tokens of an expert the later ones are dropped beyond it: their
    choice contributes nothing, and the weights of their other choices stay what they were.
    renormalize: weights are the softmax over the top_k chosen (Mixtral, Qwen3), else over all E.
    sanitize_grads: zero in place of every gradient that is NaN or infinite; by default they propagate.
    tiling: (tm, tk, tn) of every matmul of the experts, or a look-up (m, k, n) -> (tm, tk, tn).
    Raises TypeError for a wrong type, ValueError for a wrong value.
    """

    top_k: int
    quantize: Literal["fp8", "mxfp8"] | None = None
    block_size: int | None = 128
    capacity: int | None = None
    renormalize: bool = True
    sanitize_grads: bool = False
    tiling: Tiling | None = None

    def __post_init__(self) -> None:
        check_count("top_k", self.top_k, 1)
        if self.quantize not in QUANTIZE:
            raise ValueError(f"quantize must be None, 'fp8' or 'mxfp8', got {self.quantize!r}")
        check_block_size(self.block_size)
        if self.capacity is not None:
            check_count("capacity", self.capacity, 1)


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
    options: LayerOptions,
    group_offset: Any,
    exact: bool = False,
) -> Layer:
    """Check what `moe_layer` takes besides its `options`; `exact` also lets the float64 operands of goldens through.

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
    if options.top_k > experts:
        raise ValueError(f"top_k must be at most E = {experts}, got {options.top_k}")
    if options.quantize == "fp8" and options.block_size is not None:
        for name, size in (("D", hidden), ("F", intermediate)):
            if size % options.block_size:
                raise ValueError(f"block_size must divide {name} = {size}, got {options.block_size}")
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
