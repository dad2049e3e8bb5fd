"""Every sequence of a gated linear attention by a scan.

A *scan* computes one `Sequence` (of each of B batch rows) of float64 tensors with the heads first, q and k
[B, H, T, K], v and do [B, H, T, V], gate [B, H, T, K] or [B, H, T, 1], state and dstate [B, H, K, V]; all with an axis
of runs before these where `Stages.runs` says so.
"""

from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple, TypedDict

import numpy as np

from cpu_golden import Array
from cpu_golden._lib.arguments import values
from cpu_golden.stages import Stages, exact
from op_arguments import gla
from op_arguments.gla import CHUNK_STEP, Gates, Gradients, Output, Problem, check_forward, check_gradients
from op_arguments.options import options_of


class Sequence(NamedTuple):
    """What a scan is given: tensors, the state that it starts from, and for a backward pass the gradients of o and of
    the final state."""

    q: Array
    k: Array
    v: Array
    gate: Array
    state: Array
    scale: float
    do: Any = None
    dstate: Any = None

    def read(self, stages: Stages) -> "Sequence":
        """What a kernel reads of it. Sites: q, k, v, initial_state (state), and of a backward pass do, dht (dstate)."""
        return self._replace(**read(self, stages, ("q", "k", "v", "do", "state", "dstate")))


SITES = {"state": "initial_state", "dstate": "dht"}
"""Of fields that are called otherwise; those of the others have their names."""


def read(given: Any, stages: Stages, fields: Iterable[str]) -> dict[str, Any]:
    """What a kernel reads of those fields of a sequence that are there."""
    return {
        name: stages(SITES.get(name, name), getattr(given, name)) for name in fields if getattr(given, name) is not None
    }


Forward = Callable[..., tuple[Array, Array]]
"""A scan (Sequence, **steps) -> o [B, H, T, V] and the final state."""
Backward = Callable[..., tuple[Array, Array, Array, Array, Array]]
"""A scan (Sequence, **steps) -> dq, dk, dv, dgate, and the gradient of the state that it starts from."""


class Staged(TypedDict, total=False):
    """stages: which intermediate results are rounded, and to what; default `exact`, none."""

    stages: Stages


class ChunkFwd(gla.Forward, gla.ChunkOptions, Staged, total=False):
    """The options of `chunk_…_fwd`."""


class ChunkBwd(gla.Backward, gla.ChunkOptions, Staged, total=False):
    """The options of `chunk_…_bwd`."""


class StepFwd(gla.StepFwd, Staged, total=False):
    """The options of `fused_recurrent_…_fwd`, one step at a time."""


class StepBwd(gla.StepBwd, Staged, total=False):
    """The options of `fused_recurrent_…_bwd`, one step at a time."""


class Call(NamedTuple):
    """A checked call: q, k, v; the log decay of every step [B, T, H, K], or [B, T, H, 1] where all channels have the
    same; the states before the first steps; of every sequence (or of all rows of the batch at once) its steps in the
    order of time, and its states; and what else the scan takes."""

    p: Problem
    x: tuple[Array, Array, Array]
    gate: Array
    states: Array
    sequences: list[tuple[Array, slice]]
    steps: dict[str, Any]


def take(
    q: Array,
    k: Array,
    v: Array,
    gates: Gates,
    *,
    scale: float | None = None,
    initial_state: Array | None = None,
    cu_seqlens: Array | None = None,
    reverse: bool = False,
    **steps: Any,
) -> Call:
    """The checked call of a forward pass, or of the backward pass but for do and dht. Raises as `check_forward`."""
    offsets, chunk_size = values(cu_seqlens), steps.get("chunk_size", CHUNK_STEP)
    p = check_forward(q, k, v, gates, scale, initial_state, cu_seqlens, offsets, chunk_size, exact=True)
    each_run = steps.get("stages", exact).each_run
    x = each_run(q), each_run(k), each_run(v)
    states = np.array(each_run(_states(initial_state, p)))
    return Call(p, x, each_run(_gate(gates, p)), states, list(sequences_of(p.t, offsets, reverse)), steps)


@options_of(take)
def forward(
    scan: Forward, q: Array, k: Array, v: Array, gates: Gates, *, output_final_state: bool = False, **options: Any
) -> Output:
    """Every sequence by `scan`; arguments as the public functions of `simple_gla` and `gla` take them, checked here."""
    p, x, gate, states, sequences, steps = take(q, k, v, gates, **options)
    o = np.zeros(x[2].shape)
    for rows, n in sequences:
        q_n, k_n, v_n, gate_n = (heads_first(tensor, rows) for tensor in (*x, gate))
        o_n, states[..., n, :, :, :] = scan(Sequence(q_n, k_n, v_n, gate_n, states[..., n, :, :, :], p.scale), **steps)
        o[..., rows, :, :] = heads_last(o_n)
    return Output(o, states if output_final_state else None)


@options_of(take)
def backward(
    scan: Backward, q: Array, k: Array, v: Array, do: Array, gates: Gates, *, dht: Array | None = None, **options: Any
) -> Gradients:
    """The gradients of `forward`'s arguments; dh0 only where there is an initial_state."""
    p, x, gate, states, sequences, steps = take(q, k, v, gates, **options)
    check_gradients(p, do, dht, exact=True)
    each_run = options.get("stages", exact).each_run
    do, dstates = each_run(do), np.array(each_run(_states(dht, p)))
    dq, dk, dv, dgate = grads = [np.zeros(tensor.shape) for tensor in (*x, gate)]
    for rows, n in sequences:
        q_n, k_n, v_n, gate_n, do_n = (heads_first(tensor, rows) for tensor in (*x, gate, do))
        given = Sequence(q_n, k_n, v_n, gate_n, states[..., n, :, :, :], p.scale, do_n, dstates[..., n, :, :, :])
        *of_rows, dstates[..., n, :, :, :] = scan(given, **steps)
        for grad, grad_n in zip(grads, of_rows, strict=True):
            grad[..., rows, :, :] = heads_last(grad_n)
    dh0 = None if options.get("initial_state") is None else dstates
    return Gradients(dq, dk, dv, _gate_gradients(dgate, gates), dh0)


def sequences_of(t: int, offsets: list[int] | None, reverse: bool = False) -> Iterator[tuple[Array, slice]]:
    """Of every sequence (or of all rows of the batch at once) its steps in the order of time, and its states."""
    order = -1 if reverse else 1
    if offsets is None:
        yield np.arange(t)[::order], slice(None)
        return
    for n in range(len(offsets) - 1):
        yield np.arange(offsets[n], offsets[n + 1])[::order], slice(n, n + 1)


def _gate(gates: Gates, p: Problem) -> Array:
    """The log decay of every step, [B, T, H, K], or [B, T, H, 1] where all channels have the same."""
    total = np.zeros((p.b, p.t, p.h, 1))
    for name, gate in gates.items():
        if gate is not None:
            channels = np.asarray(gate, np.float64)
            total = total + (channels if name == "gk" else channels[..., None])
    return total


def _gate_gradients(dgate: Array, gates: Gates) -> dict[str, Array | None]:
    """The gradient of each gate that was given, from that of the log decay of every step."""
    if "gk" in gates:
        return {"gk": dgate}
    found = {"g": dgate[..., 0], "g_gamma": dgate[..., 0].sum(axis=(-3, -2))}
    return {name: None if gate is None else found[name] for name, gate in gates.items()}


def _states(given: Array | None, p: Problem) -> Array:
    return np.zeros((p.n, p.h, p.k, p.v)) if given is None else given.astype(np.float64)


def heads_first(x: Array, rows: Array) -> Array:
    """These rows of x [..., T, H, C] as float64 [..., H, T, C]."""
    return np.ascontiguousarray(x[..., rows, :, :].swapaxes(-3, -2), dtype=np.float64)


def heads_last(x: Array) -> Array:
    """x [..., H, T, C] as [..., T, H, C]."""
    return x.swapaxes(-3, -2)
