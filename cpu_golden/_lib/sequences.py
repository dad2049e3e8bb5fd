"""Every sequence of a recurrence by a scan: what gated linear attention and the gated delta rule share.

A *scan* computes one sequence (of each of B batch rows): float64 tensors with the heads first, q and k [B, H, T, K], v
and do [B, H, T, V], gate [B, H, T, K] or [B, H, T, 1], of a delta rule beta [B, H, T, 1], state and dstate
[B, H, K, V]; all with an axis of runs before these where `Stages.runs` says so. A `Call` has all sequences at once,
with the steps before the heads: [B, T, H, C], and states [N, H, K, V].
"""

from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple, TypedDict

import numpy as np

from cpu_golden import Array
from cpu_golden.stages import Stages, exact


class Sequence(NamedTuple):
    """What a scan is given: tensors, the state that it starts from, of a delta rule beta, and for a backward pass the
    gradients of o and of the final state."""

    q: Array
    k: Array
    v: Array
    gate: Array
    state: Array
    scale: float
    beta: Any = None
    do: Any = None
    dstate: Any = None


GRADED = ("q", "k", "v", "gate", "beta")
"""What a sequence has of every step, and a backward scan returns the gradients of, before that of the state."""
LOADED = {"q": "q", "k": "k", "v": "v", "beta": "beta", "do": "do", "state": "initial_state", "dstate": "dht"}
"""What a kernel loads of a sequence, and the site of each."""

Forward = Callable[..., tuple[Array, Array]]
"""A scan (sequence, **steps) -> o [B, H, T, V] and the final state."""
Backward = Callable[..., tuple[Array, ...]]
"""A scan (sequence, **steps) -> the gradients of `GRADED`, and of the state that it starts from."""


class Staged(TypedDict, total=False):
    """stages: which intermediate results are rounded, and to what; default `exact`, none."""

    stages: Stages


class Call(NamedTuple):
    """A checked call: all sequences, the steps of each, in the order of time, and its states, and what else the scan
    takes."""

    x: Sequence
    sequences: list[tuple[Array, slice]]
    steps: dict[str, Any]

    def forward(self, scan: Forward) -> tuple[Array, Array]:
        """o of every sequence, and the states after the last steps."""
        o, states = np.zeros(self.x.v.shape), np.array(self.x.state)
        for rows, n in self.sequences:
            o_n, states[..., n, :, :, :] = scan(_sequence(self.x, rows, n), **self.steps)
            o[..., rows, :, :] = _swapped(o_n)
        return o, states

    def backward(self, scan: Backward, do: Array, dht: Array | None) -> tuple[list[Array], Array]:
        """The gradients of `GRADED` that there are, and of the states before the first steps, given those of o and of
        the states after the last ones."""
        each_run = self.steps.get("stages", exact).each_run
        dstates = np.zeros(self.x.state.shape) if dht is None else np.array(each_run(dht.astype(np.float64)))
        x = self.x._replace(do=each_run(do), dstate=dstates)
        grads = [np.zeros(tensor.shape) for name in GRADED if (tensor := getattr(x, name)) is not None]
        for rows, n in self.sequences:
            *of_rows, dstates[..., n, :, :, :] = scan(_sequence(x, rows, n), **self.steps)
            for grad, grad_n in zip(grads, of_rows, strict=True):
                grad[..., rows, :, :] = _swapped(grad_n)
        return grads, dstates


def loaded(x: Sequence, stages: Stages) -> Sequence:
    """x as a kernel loads it. Sites: q, k, v, initial_state, of a delta rule beta, of a backward pass do and dht."""
    return _each(x, LOADED, lambda name, tensor: stages(LOADED[name], tensor))


def each_step(x: Sequence, change: Callable[[Array], Array]) -> Sequence:
    """x with what it has of every step changed, the gradient of o too."""
    return _each(x, (*GRADED, "do"), lambda _, tensor: change(tensor))


def states_of(given: Array | None, shape: tuple[int, ...], stages: Stages) -> Array:
    """States of this shape in float64, to be read only: those that are given, or zeros; of every run."""
    return stages.each_run(np.zeros(shape) if given is None else given.astype(np.float64))


def sequences_of(t: int, offsets: list[int] | None, reverse: bool = False) -> Iterator[tuple[Array, slice]]:
    """Of every sequence (or of all rows of the batch at once) its steps in the order of time, and its states."""
    order = -1 if reverse else 1
    if offsets is None:
        yield np.arange(t)[::order], slice(None)
        return
    for n in range(len(offsets) - 1):
        yield np.arange(offsets[n], offsets[n + 1])[::order], slice(n, n + 1)


def _sequence(x: Sequence, rows: Array, n: slice) -> Sequence:
    """One sequence of all: these steps, as float64 [..., H, T, C], and these states; its scale is a float32.

    Kernels multiply by no other. An exact scale differs by up to half a unit, in all elements alike: where sums of one
    sign leave less error than that, every kernel would be off.
    """
    x = x._replace(scale=float(np.float32(x.scale)))
    steps = each_step(x, lambda tensor: np.ascontiguousarray(_swapped(tensor[..., rows, :, :]), dtype=np.float64))
    return _each(steps, ("state", "dstate"), lambda _, state: state[..., n, :, :, :])


def _each(x: Sequence, names: Iterable[str], change: Callable[[str, Array], Any]) -> Sequence:
    """x with those of its tensors changed that it has."""
    return x._replace(**{name: change(name, tensor) for name in names if (tensor := getattr(x, name)) is not None})


def _swapped(x: Array) -> Array:
    """x [..., H, T, C] as [..., T, H, C], or the other way round."""
    return x.swapaxes(-3, -2)
