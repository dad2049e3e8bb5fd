"""Every sequence of a gated linear attention by a scan.

A *scan* computes one sequence (of each of B batch rows): it takes float64 tensors with the heads first, q and k
[B, H, T, K], v and do [B, H, T, V], gate [B, H, T, K] or [B, H, T, 1], and the state [B, H, K, V] that it starts from.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from cpu_golden import Array
from cpu_golden._lib.arguments import values
from op_arguments.gla import CHUNK_STEP, Gates, Problem, check_backward, check_forward

Forward = Callable[[Array, Array, Array, Array, Array, float], tuple[Array, Array]]
"""A scan (q, k, v, gate, state, scale) -> o [B, H, T, V] and the final state."""
Backward = Callable[[Array, Array, Array, Array, Array, Array, Array, float], tuple[Array, Array, Array, Array, Array]]
"""A scan (q, k, v, do, gate, state, dstate, scale), dstate [B, H, K, V] the gradient of the final state -> dq, dk, dv,
dgate, and the gradient of the state that it starts from."""


class Output(NamedTuple):
    """The result o [B, T, H, V], and the states after the last steps ht [N, H, K, V], None unless asked for."""

    o: Any
    ht: Any


def forward(
    scan: Forward,
    q: Array,
    k: Array,
    v: Array,
    gates: Gates,
    *,
    scale: float | None = None,
    initial_state: Array | None = None,
    output_final_state: bool = False,
    cu_seqlens: Array | None = None,
    chunk_size: int = CHUNK_STEP,
    reverse: bool = False,
) -> Output:
    """Every sequence by `scan`; arguments as the public functions of `simple_gla` and `gla` take them, checked here."""
    offsets = values(cu_seqlens)
    p = check_forward(q, k, v, gates, scale, initial_state, cu_seqlens, offsets, chunk_size, exact=True)
    o, states = np.zeros((p.b, p.t, p.h, p.v)), _states(initial_state, p)
    gate = _gate(gates, p)
    for steps, n in _sequences(p, offsets, reverse):
        q_n, k_n, v_n, gate_n = (_heads_first(x[:, steps]) for x in (q, k, v, gate))
        o_n, states[n] = scan(q_n, k_n, v_n, gate_n, states[n], p.scale)
        o[:, steps] = o_n.swapaxes(1, 2)
    return Output(o, states if output_final_state else None)


def backward(
    scan: Backward,
    q: Array,
    k: Array,
    v: Array,
    do: Array,
    gates: Gates,
    *,
    scale: float | None = None,
    initial_state: Array | None = None,
    dht: Array | None = None,
    cu_seqlens: Array | None = None,
    chunk_size: int = CHUNK_STEP,
    reverse: bool = False,
) -> tuple[Array, Array, Array, Array, Array | None]:
    """dq, dk, dv, dgate [B, T, H, K or 1] and, where there is an initial_state, dh0; as `forward`."""
    offsets = values(cu_seqlens)
    p = check_backward(q, k, v, do, gates, scale, initial_state, dht, cu_seqlens, offsets, chunk_size, exact=True)
    gate, states, dstates = _gate(gates, p), _states(initial_state, p), _states(dht, p)
    dq, dk, dv, dgate = (np.zeros(x.shape) for x in (q, k, v, gate))
    for steps, n in _sequences(p, offsets, reverse):
        q_n, k_n, v_n, do_n, gate_n = (_heads_first(x[:, steps]) for x in (q, k, v, do, gate))
        *grads, dstates[n] = scan(q_n, k_n, v_n, do_n, gate_n, states[n], dstates[n], p.scale)
        dq[:, steps], dk[:, steps], dv[:, steps], dgate[:, steps] = (grad.swapaxes(1, 2) for grad in grads)
    return dq, dk, dv, dgate, None if initial_state is None else dstates


def _sequences(p: Problem, offsets: Sequence[int] | None, reverse: bool) -> Iterator[tuple[Array, slice]]:
    """Of every sequence (or of all rows of the batch at once) its steps in the order of time, and its states."""
    order = -1 if reverse else 1
    if offsets is None:
        yield np.arange(p.t)[::order], slice(None)
        return
    for n in range(p.n):
        yield np.arange(offsets[n], offsets[n + 1])[::order], slice(n, n + 1)


def _gate(gates: Gates, p: Problem) -> Array:
    """The log decay of every step, [B, T, H, K], or [B, T, H, 1] where all channels have the same."""
    total = np.zeros((p.b, p.t, p.h, 1))
    for name, gate in gates.items():
        if gate is not None:
            channels = np.asarray(gate, np.float64)
            total = total + (channels if name == "gk" else channels[..., None])
    return total


def _states(given: Array | None, p: Problem) -> Array:
    return np.zeros((p.n, p.h, p.k, p.v)) if given is None else given.astype(np.float64)


def _heads_first(x: Array) -> Array:
    return np.ascontiguousarray(x.swapaxes(1, 2), dtype=np.float64)
