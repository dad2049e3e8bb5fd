"""A gated linear attention as the call of a scan: what `simple_gla` and `gla` share."""

from typing import Any

import numpy as np

from cpu_golden import Array
from cpu_golden._lib.arguments import values
from cpu_golden._lib.sequences import Backward, Call, Forward, Sequence, Staged, sequences_of, states_of
from cpu_golden.stages import exact
from op_arguments import gla
from op_arguments.gla import CHUNK_STEP, Gates, Gradients, Output, Problem, check_forward, check_gradients
from op_arguments.options import options_of


class ChunkFwd(gla.Forward, gla.ChunkOptions, Staged, total=False):
    """The options of `chunk_…_fwd`."""


class ChunkBwd(gla.Backward, gla.ChunkOptions, Staged, total=False):
    """The options of `chunk_…_bwd`."""


class StepFwd(gla.StepFwd, Staged, total=False):
    """The options of `fused_recurrent_…_fwd`, one step at a time."""


class StepBwd(gla.StepBwd, Staged, total=False):
    """The options of `fused_recurrent_…_bwd`, one step at a time."""


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
) -> tuple[Problem, Call]:
    """The problem, and the checked call of its forward pass, or of the backward pass but for do and dht.

    Raises as `check_forward`.
    """
    offsets, chunk_size = values(cu_seqlens), steps.get("chunk_size", CHUNK_STEP)
    p = check_forward(q, k, v, gates, scale, initial_state, cu_seqlens, offsets, chunk_size, exact=True)
    stages = steps.get("stages", exact)
    q, k, v, gate = (stages.each_run(tensor) for tensor in (q, k, v, _gate(gates, p)))
    x = Sequence(q, k, v, gate, states_of(initial_state, (p.n, p.h, p.k, p.v), stages), p.scale)
    return p, Call(x, list(sequences_of(p.t, offsets, reverse)), steps)


@options_of(take)
def forward(
    scan: Forward, q: Array, k: Array, v: Array, gates: Gates, *, output_final_state: bool = False, **options: Any
) -> Output:
    """Every sequence by `scan`; arguments as the public functions of `simple_gla` and `gla` take them, checked here."""
    _, call = take(q, k, v, gates, **options)
    o, states = call.forward(scan)
    return Output(o, states if output_final_state else None)


@options_of(take)
def backward(
    scan: Backward, q: Array, k: Array, v: Array, do: Array, gates: Gates, *, dht: Array | None = None, **options: Any
) -> Gradients:
    """The gradients of `forward`'s arguments; dh0 only where there is an initial_state."""
    p, call = take(q, k, v, gates, **options)
    check_gradients(p, do, dht, exact=True)
    (dq, dk, dv, dgate), dstates = call.backward(scan, do, dht)
    dh0 = None if options.get("initial_state") is None else dstates
    return Gradients(dq, dk, dv, _gate_gradients(dgate, gates), dh0)


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
