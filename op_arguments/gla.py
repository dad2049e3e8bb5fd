"""What the gated linear attentions take and return (defined in `cpu_golden/simple_gla.py` and `cpu_golden/gla.py`)."""

import math
from collections.abc import Mapping, Sequence
from typing import Any, Literal, NamedTuple, TypedDict

from op_arguments import Array, check_array, check_shape, dtype_name

FLOATS = ("float32", "bfloat16")
PRECISIONS = ("ieee", "bf16x3")
CHUNK_STEP, LARGEST_CHUNK = 16, 256

Gates = Mapping[str, Array | None]
"""The log decays of an operation by name: `g` and `g_gamma`, either of which may be None, or `gk`, which may not."""

Precision = Literal["ieee", "bf16x3"]


class ScanOptions(TypedDict, total=False):
    """What every form takes besides q, k, v and its gates; defaults are None.

    scale: a float, which is taken as a float32, default K^-0.5. initial_state [N, H, K, V] float32: the states before
    the first steps, default zero. cu_seqlens [N + 1] int32: where each of the N sequences that are packed into B = 1
    begins, and the end T of the last; without it every row of the batch is one (N = B).
    """

    scale: float | None
    initial_state: Any
    cu_seqlens: Any


class Forward(ScanOptions, total=False):
    """What a forward pass takes. output_final_state: whether to return ht, default False."""

    output_final_state: bool


class Backward(ScanOptions, total=False):
    """What a backward pass takes. dht [N, H, K, V] float32: the gradient of ht, default None, which is zero."""

    dht: Any


class ChunkOptions(TypedDict, total=False):
    """What the chunked forms take, too.

    chunk_size: a multiple of 16 up to 256, default 64, counted from the beginning of each sequence.
    """

    chunk_size: int


class DotOptions(ChunkOptions, total=False):
    """What the chunked kernels take, too.

    precision of the dots of float32 operands: "ieee" (default), or "bf16x3", operands in two bfloat16 parts and three
    products. fused: whether one kernel does all, or another one the states before; default None: as fits.
    """

    precision: Precision
    fused: bool | None


class RecurrentOptions(TypedDict, total=False):
    """What the recurrent forms take, too.

    reverse: time runs backwards within each sequence, S_t = a_t S_{t+1} + k_t v_tᵀ, default False.
    """

    reverse: bool


class ChunkFwd(Forward, DotOptions, total=False):
    """The options of `chunk_…_fwd`."""


class ChunkBwd(Backward, DotOptions, total=False):
    """The options of `chunk_…_bwd`."""


class StepFwd(Forward, RecurrentOptions, total=False):
    """The options of `fused_recurrent_…_fwd`, one step at a time."""


class StepBwd(Backward, RecurrentOptions, total=False):
    """The options of `fused_recurrent_…_bwd`, one step at a time."""


class Output(NamedTuple):
    """o [B, T, H, V], and the states after the last steps ht [N, H, K, V], None unless asked for."""

    o: Any
    ht: Any


class Gradients(NamedTuple):
    """The gradients of a scan's arguments, None for those that are None; dgates by the gates' names."""

    dq: Any
    dk: Any
    dv: Any
    dgates: dict[str, Any]
    dh0: Any

    @property
    def named(self) -> dict[str, Any]:
        """All of them by their own names, dg for that of g."""
        dq, dk, dv, dgates, dh0 = self
        return {"dq": dq, "dk": dk, "dv": dv, **{f"d{name}": x for name, x in dgates.items()}, "dh0": dh0}


class Grads(NamedTuple):
    """The gradients of `gla`'s arguments of the same names, dh0 None unless initial_state was given."""

    dq: Any
    dk: Any
    dv: Any
    dgk: Any
    dh0: Any


class SimpleGrads(NamedTuple):
    """The gradients of `simple_gla`'s arguments of the same names, None where an argument was not given."""

    dq: Any
    dk: Any
    dv: Any
    dg: Any
    dg_gamma: Any
    dh0: Any


class Problem(NamedTuple):
    """A checked gated linear attention: its sizes, its scale, the name of the dtype of q, k, v, do and o, and whether
    there are cu_seqlens."""

    b: int
    t: int
    h: int
    k: int
    v: int
    n: int  # sequences: B, or as many as cu_seqlens cuts
    scale: float
    dtype: str
    packed: bool = False


def check_forward(
    q: Array,
    k: Array,
    v: Array,
    gates: Gates,
    scale: float | None,
    initial_state: Array | None,
    cu_seqlens: Array | None,
    offsets: Sequence[int] | None,
    chunk_size: int = CHUNK_STEP,
    exact: bool = False,
) -> Problem:
    """Check the arguments of a forward pass.

    `offsets` are the values of cu_seqlens, or None where there is none, or reading it is impossible (traced) or would
    stall a device. chunk_size: the recurrent forms, which have none, leave it out. `exact` also lets float64 tensors
    through: the goldens take them.
    Raises TypeError for a wrong type or dtype, ValueError for a wrong rank, shape or value.
    """
    check_array("q", q, "B, T, H, K", FLOATS, exact=exact)
    check_array("k", k, "B, T, H, K", FLOATS, exact=True)
    check_array("v", v, "B, T, H, V", FLOATS, exact=True)
    b, t, h, key_size = q.shape
    value_size = v.shape[3]
    dtype = dtype_name(q.dtype)
    for name, x in (("k", k), ("v", v)):
        check_same_dtype(name, x, dtype)
    check_shape("k", k, "B, T, H, K", (b, t, h, key_size))
    check_shape("v", v, "B, T, H, V", (b, t, h, value_size))
    _check_gates(gates, (b, t, h, key_size), dtype, exact)
    n = check_sequences(cu_seqlens, offsets, q)
    check_state("initial_state", initial_state, (n, h, key_size, value_size), exact)
    check_chunk_size(chunk_size)
    return Problem(b, t, h, key_size, value_size, n, check_scale(scale, key_size), dtype, cu_seqlens is not None)


def check_gradients(p: Problem, do: Array, dht: Array | None, exact: bool = False) -> None:
    """Check what a backward pass takes besides the arguments of the forward pass that gave `p`; as `check_forward`."""
    check_array("do", do, "B, T, H, V", FLOATS, exact=True)
    check_same_dtype("do", do, p.dtype)
    check_shape("do", do, "B, T, H, V", (p.b, p.t, p.h, p.v))
    check_state("dht", dht, (p.n, p.h, p.k, p.v), exact)


def check_chunk_size(chunk_size: Any, largest: int = LARGEST_CHUNK) -> None:
    """Refuse a chunk_size that is not a multiple of 16 from 16 to `largest`."""
    if type(chunk_size) is not int:
        raise TypeError(f"chunk_size must be an int, got {type(chunk_size).__name__}")
    if not 0 < chunk_size <= largest or chunk_size % CHUNK_STEP:
        raise ValueError(f"chunk_size must be a positive multiple of {CHUNK_STEP}, at most {largest}, got {chunk_size}")


def check_precision(precision: Any, dtype: str) -> None:
    """Refuse a precision other than "ieee" and "bf16x3", and the latter for operands that are no float32."""
    if precision not in PRECISIONS:
        raise ValueError(f"precision must be 'ieee' or 'bf16x3', got {precision!r}")
    if precision != "ieee" and dtype != "float32":
        raise ValueError(f"precision must be 'ieee' for {dtype} operands, got {precision!r}")


def check_fused(fused: Any, refusal: str | None) -> bool:
    """Whether to take the fused route: what was asked for, or where that is None, whether it can be taken.

    `refusal` says why it cannot be taken ("the state does not fit …"), None where it can: asking for it then is a
    ValueError with that reason.
    """
    if fused is not None and not isinstance(fused, bool):
        raise TypeError(f"fused must be True, False or None, got {type(fused).__name__}")
    if fused and refusal is not None:
        raise ValueError(f"fused must be False or None where {refusal}, got True")
    return refusal is None if fused is None else fused


def check_same_dtype(name: str, x: Array, dtype: str) -> None:
    """Refuse an x whose dtype is not q's, `dtype`."""
    if dtype_name(x.dtype) != dtype:
        raise TypeError(f"{name} must have q's dtype {dtype}, got {dtype_name(x.dtype)}")


def _check_gates(gates: Gates, shape: tuple[int, ...], dtype: str, exact: bool) -> None:
    b, t, h, key_size = shape
    narrow = tuple(dict.fromkeys(["float32", dtype]))
    known = {
        "g": ("B, T, H", (b, t, h), narrow),
        "g_gamma": ("H", (h,), ("float32",)),
        "gk": ("B, T, H, K", (b, t, h, key_size), narrow),
    }
    for name, gate in gates.items():
        axes, expected, dtypes = known[name]
        if gate is not None or name == "gk":
            check_array(name, gate, axes, dtypes, exact=exact)
        if gate is not None:
            check_shape(name, gate, axes, expected)


def check_sequences(cu_seqlens: Array | None, offsets: Sequence[int] | None, q: Array, name: str = "q") -> int:
    """N, after checking cu_seqlens, and its values where they are known, against q [B, T, …] of that name."""
    b, t = q.shape[:2]
    if cu_seqlens is None:
        return b
    check_array("cu_seqlens", cu_seqlens, "N + 1", ("int32",))
    if not cu_seqlens.shape[0]:
        raise ValueError("cu_seqlens must have N + 1 >= 1 entries, got 0")
    if b != 1:
        raise ValueError(f"{name} must have B = 1 with cu_seqlens, got {b} (shape {list(q.shape)})")
    if offsets is not None:
        if offsets[0] != 0:
            raise ValueError(f"cu_seqlens must start at 0, got {offsets[0]}")
        for index in range(1, len(offsets)):
            if offsets[index] < offsets[index - 1]:
                raise ValueError(
                    f"cu_seqlens must not decrease, got {offsets[index]} after {offsets[index - 1]} at index {index}"
                )
        if offsets[-1] != t:
            raise ValueError(f"cu_seqlens must end at T = {t}, got {offsets[-1]}")
    return cu_seqlens.shape[0] - 1


def check_state(name: str, state: Array | None, shape: tuple[int, ...], exact: bool, axes: str = "N, H, K, V") -> None:
    """Refuse a state that is not float32, or not of this shape; None is none."""
    if state is not None:
        check_array(name, state, axes, ("float32",), exact=exact)
        check_shape(name, state, axes, shape)


def check_scale(scale: Any, key_size: int) -> float:
    """The scale: K^-0.5 where none is given."""
    if scale is None:
        return float(max(key_size, 1)) ** -0.5
    if isinstance(scale, bool) or not isinstance(scale, int | float):
        raise TypeError(f"scale must be a float, got {type(scale).__name__}")
    if not math.isfinite(scale):
        raise ValueError(f"scale must be finite, got {scale}")
    return float(scale)
