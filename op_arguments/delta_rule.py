"""What the gated delta rules take and return (defined in `cpu_golden/gated_delta_rule.py` and `cpu_golden/kda.py`)."""

import inspect
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, ParamSpec, TypeVar

from op_arguments import Array, check_array, check_shape, dtype_name
from op_arguments.gla import (
    CHUNK_STEP,
    FLOATS,
    Backward,
    ChunkOptions,
    Forward,
    check_chunk_size,
    check_same_dtype,
    check_scale,
    check_sequences,
    check_state,
)
from op_arguments.options import variant

P = ParamSpec("P")
R = TypeVar("R")

LARGEST_CHUNK = 128
LARGEST_HEAD = 256
"""Of K and of V: a kernel has a state's K rows at a time."""
NORM_EPS = 1e-6
"""What `use_qk_l2norm_in_kernel` adds to Σx² before the root."""


class DeltaFwd(Forward, total=False):
    """What a forward pass takes: see `op_arguments.gla`, states [N, HV, K, V].

    use_qk_l2norm_in_kernel: q and k are first x · rsqrt(Σx² + 1e-6) of each row, default False; gradients are those of
    what was given.
    """

    use_qk_l2norm_in_kernel: bool


class DeltaBwd(Backward, total=False):
    """What a backward pass takes: as `DeltaFwd`, and dht."""

    use_qk_l2norm_in_kernel: bool


class ChunkDeltaFwd(DeltaFwd, ChunkOptions, total=False):
    """The options of `chunk_…_fwd`; chunk_size is at most 128."""


class ChunkDeltaBwd(DeltaBwd, ChunkOptions, total=False):
    """The options of `chunk_…_bwd`; chunk_size is at most 128."""


class DeltaGrads(NamedTuple):
    """The gradients of the arguments of the same names, dh0 None unless initial_state was given."""

    dq: Any
    dk: Any
    dv: Any
    dg: Any
    dbeta: Any
    dh0: Any


class DeltaProblem(NamedTuple):
    """A checked gated delta rule: its sizes (`hv` heads of values, `h` of queries and keys), its scale, the name of the
    dtype of q, k, v, do and o, whether there are cu_seqlens, and whether q and k are normalised."""

    b: int
    t: int
    h: int
    hv: int
    k: int
    v: int
    n: int  # sequences: B, or as many as cu_seqlens cuts
    scale: float
    dtype: str
    packed: bool
    l2norm: bool

    @property
    def group(self) -> int:
        """Value heads that share a head of keys: value head i has key head i // group."""
        return self.hv // max(self.h, 1)


class DeltaTensors(NamedTuple):
    """The tensors of a forward pass: q, k [B, T, H, K], v [B, T, HV, V], beta [B, T, HV], and g, the natural logarithm
    of the decays, [B, T, HV] (`gated_delta_rule`) or [B, T, HV, K] (`kda`)."""

    q: Any
    k: Any
    v: Any
    g: Any
    beta: Any


def per_channel(front: Callable[P, R], rule: Callable[..., R]) -> Callable[P, R]:
    """The public function of `kda` that `front` is of `gated_delta_rule`: its arguments but for g, given to `rule`."""

    def forward(q: Any, k: Any, v: Any, *, g: Any, beta: Any, **options: Any) -> R:
        return rule(DeltaTensors(q, k, v, g, beta), True, **options)

    def backward(q: Any, k: Any, v: Any, do: Any, *, g: Any, beta: Any, **options: Any) -> R:
        return rule(DeltaTensors(q, k, v, g, beta), do, True, **options)

    function = backward if "do" in inspect.signature(front).parameters else forward
    name, module = (text.replace("gated_delta_rule", "kda") for text in (front.__name__, front.__module__))
    doc = f"`{front.__name__}` with a decay per key channel: g [B, T, HV, K]; `cpu_golden.kda.{name}` defines it."
    of_channels = variant(function, front, name, doc)
    of_channels.__module__ = module
    return of_channels


def check_delta_forward(
    x: DeltaTensors,
    per_channel: bool,
    scale: float | None,
    initial_state: Array | None,
    cu_seqlens: Array | None,
    offsets: Sequence[int] | None,
    use_qk_l2norm_in_kernel: bool,
    *,
    chunk_size: int = CHUNK_STEP,
    exact: bool = False,
) -> DeltaProblem:
    """Check the arguments of a forward pass.

    per_channel: whether g is that of `kda`. `offsets` are the values of cu_seqlens, or None where there is none, or
    reading it is impossible (traced) or would stall a device. chunk_size: the recurrent forms, which have none, leave
    it out. `exact` also lets float64 tensors through: the goldens take them.
    Raises TypeError for a wrong type or dtype, ValueError for a wrong rank, shape or value.
    """
    q, k, v, g, beta = x
    check_array("q", q, "B, T, H, K", FLOATS, exact=exact)
    check_array("k", k, "B, T, H, K", FLOATS, exact=True)
    check_array("v", v, "B, T, HV, V", FLOATS, exact=True)
    (b, t, h, key_size), (hv, value_size) = q.shape, v.shape[2:]
    dtype = dtype_name(q.dtype)
    for name, tensor in (("k", k), ("v", v)):
        check_same_dtype(name, tensor, dtype)
    check_shape("k", k, "B, T, H, K", (b, t, h, key_size))
    check_shape("v", v, "B, T, HV, V", (b, t, hv, value_size))
    for name, axis, tensor in (("q", "K", q), ("v", "V", v)):
        if tensor.shape[3] > LARGEST_HEAD:
            raise ValueError(f"{name} must have {axis} <= {LARGEST_HEAD}, got {tensor.shape[3]}")
    if (hv % h if h else hv) != 0:
        raise ValueError(f"v must have a multiple of q's H = {h} heads, got {hv}")
    narrow = tuple(dict.fromkeys(["float32", dtype]))
    of_gate = ("B, T, HV, K", (b, t, hv, key_size)) if per_channel else ("B, T, HV", (b, t, hv))
    for name, tensor, (axes, expected) in (("g", g, of_gate), ("beta", beta, ("B, T, HV", (b, t, hv)))):
        check_array(name, tensor, axes, narrow, exact=exact)
        check_shape(name, tensor, axes, expected)
    n = check_sequences(cu_seqlens, offsets, q)
    check_state("initial_state", initial_state, (n, hv, key_size, value_size), exact, "N, HV, K, V")
    if not isinstance(use_qk_l2norm_in_kernel, bool):
        raise TypeError(f"use_qk_l2norm_in_kernel must be a bool, got {type(use_qk_l2norm_in_kernel).__name__}")
    check_chunk_size(chunk_size, LARGEST_CHUNK)
    chosen = check_scale(scale, key_size)
    packed = cu_seqlens is not None
    return DeltaProblem(b, t, h, hv, key_size, value_size, n, chosen, dtype, packed, use_qk_l2norm_in_kernel)


def check_delta_gradients(p: DeltaProblem, do: Array, dht: Array | None, exact: bool = False) -> None:
    """Check what a backward pass takes besides the arguments of the forward pass that gave `p`.

    As `check_delta_forward`.
    """
    check_array("do", do, "B, T, HV, V", FLOATS, exact=True)
    check_same_dtype("do", do, p.dtype)
    check_shape("do", do, "B, T, HV, V", (p.b, p.t, p.hv, p.v))
    check_state("dht", dht, (p.n, p.hv, p.k, p.v), exact, "N, HV, K, V")
