"""What the causal convolution takes and returns (defined in `cpu_golden/causal_conv1d.py`)."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

from op_arguments import Array, check_array, check_shape, dtype_name
from op_arguments.gla import FLOATS, check_sequences

Activation = Literal["silu"] | None
ACTIVATIONS = (None, "silu")


@dataclass(frozen=True, kw_only=True)
class ConvOptions:
    """The options of both passes.

    bias [D]: float32 or x's dtype; initial_state [N, D, W - 1]: x's dtype, the oldest step first. activation: None or
    "silu". cu_seqlens [N + 1] int32: where each of the N sequences that are packed into B = 1 begins, and the end T of
    the last.
    """

    bias: Any = None
    initial_state: Any = None
    activation: Activation = None
    cu_seqlens: Any = None


class ConvTensors(NamedTuple):
    """What a call is given, None for what it is not: x [B, T, D], weight [D, W], bias [D], states [N, D, W - 1]."""

    x: Any
    weight: Any
    bias: Any
    initial_state: Any
    cu_seqlens: Any
    dy: Any = None
    dht: Any = None


class ConvOutput(NamedTuple):
    """y [B, T, D], and the last W - 1 steps of every sequence ht [N, D, W - 1], None unless asked for."""

    y: Any
    ht: Any


class ConvGrads(NamedTuple):
    """The gradients of a convolution's arguments of the same names, None where one was not given."""

    dx: Any
    dweight: Any
    dbias: Any
    dh0: Any


class ConvProblem(NamedTuple):
    """A checked convolution: its sizes, and the name of x's dtype."""

    b: int
    t: int
    d: int
    w: int
    n: int  # sequences: B, or as many as cu_seqlens cuts
    dtype: str


def check_conv(
    x: Array, weight: Array, options: ConvOptions, offsets: Sequence[int] | None, exact: bool = False
) -> ConvProblem:
    """Check the arguments of `causal_conv1d`; offsets and `exact` as in `op_arguments.gla.check_forward`.

    weight and bias are float32 or have x's dtype, the states have x's.
    Raises TypeError for a wrong type or dtype, ValueError for a wrong rank, shape or value.
    """
    check_array("x", x, "B, T, D", FLOATS, exact=exact)
    b, t, d = x.shape
    dtype = dtype_name(x.dtype)
    narrow = tuple(dict.fromkeys(["float32", dtype]))
    check_array("weight", weight, "D, W", narrow, exact=exact)
    width = weight.shape[1]
    check_shape("weight", weight, "D, W", (d, width))
    if not width:
        raise ValueError("weight must have W >= 1, got 0")
    if options.bias is not None:
        check_array("bias", options.bias, "D", narrow, exact=exact)
        check_shape("bias", options.bias, "D", (d,))
    n = check_sequences(options.cu_seqlens, offsets, x, "x")
    _check_steps("initial_state", options.initial_state, (n, d, width - 1), dtype, exact)
    if options.activation not in ACTIVATIONS:
        raise ValueError(f"activation must be None or 'silu', got {options.activation!r}")
    return ConvProblem(b, t, d, width, n, dtype)


def check_conv_gradients(p: ConvProblem, dy: Array, dht: Array | None, exact: bool = False) -> None:
    """Check what a backward pass takes besides the arguments of the forward pass that gave `p`; as `check_conv`."""
    check_array("dy", dy, "B, T, D", (p.dtype,), exact=exact)
    check_shape("dy", dy, "B, T, D", (p.b, p.t, p.d))
    _check_steps("dht", dht, (p.n, p.d, p.w - 1), p.dtype, exact)


def _check_steps(name: str, state: Array | None, shape: tuple[int, ...], dtype: str, exact: bool) -> None:
    if state is not None:
        check_array(name, state, "N, D, W - 1", (dtype,), exact=exact)
        check_shape(name, state, "N, D, W - 1", shape)
