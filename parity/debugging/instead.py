"""Names the argument that a kernel mistook: the golden of the changed argument is then the wrong output.

The host makes most of these faults: it does not transpose a scale with its operand, does not hand on an option, passes
an offset that is off by one. No statement of the kernel shows them, since each is right for what it is given. So the
golden is run with one argument changed at a time, and compared with the output.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from parity.dtypes import Floats
from parity.op import outputs
from parity.trial import Trial

WHOLLY = 0.999
"""The share of the mean square error that goes where the golden has the argument that the kernel took."""


@dataclass(frozen=True)
class Instead:
    """What an output is, in words, and the names of the arguments that it was computed from."""

    words: str
    arguments: tuple[str, ...]

    def __str__(self) -> str:
        return self.words


def other_call(trial: Trial, name: str, y: np.ndarray) -> Instead | None:
    """The changed argument whose golden is the output called `name`; None if no change that is tried gives it.

    y: that output as the kernel returned it, of any dtype, in the golden's shape. A change gives it if `WHOLLY` of the
    mean square error, weighed by the magnitude, goes. Raises KeyError for an output that the golden does not have.
    """
    expected, value = trial.reference, y.astype(np.float64)
    golden, magnitude = expected.golden[name], expected.magnitude[name]
    weight = 1 / np.where(magnitude > 0, magnitude, magnitude.max(initial=0.0) or 1.0)
    power = _power((value - golden) * weight)
    if not 0 < power < np.inf:
        return None

    def is_output(instead: Floats) -> bool:
        return instead.shape == y.shape and _power((value - instead) * weight) <= (1 - WHOLLY) * power

    for given, x in trial.inputs.items():
        if x is not None and is_output(x.astype(np.float64)):
            return Instead(f"it is {given}, as that is given", (given,))
    for names, words, changed in _changes({**trial.inputs, **trial.op.arguments(trial.case)}):
        try:
            with np.errstate(all="ignore"):
                instead = outputs(trial.op.golden(**changed))[name].astype(np.float64)
        except Exception:  # what a golden cannot take no kernel took; each says so in its own way
            continue
        if is_output(instead):
            return Instead(f"it is the golden of {' and '.join(names)} {words}", names)
    return None


def _power(error: Floats) -> float:
    """The sum of squares, infinite where any is not finite."""
    power = float((error**2).sum())
    return power if np.isfinite(power) else np.inf


def _changes(call: Mapping[str, Any]) -> Iterator[tuple[tuple[str, ...], str, dict[str, Any]]]:
    """Calls with an argument changed, each with its name and what it is then: the likeliest first."""
    tensors = {name: x for name, x in call.items() if isinstance(x, np.ndarray)}
    for name, value in call.items():
        if name not in tensors:
            for other in _other_values(value):
                yield (name,), f"{other} in the place of {value}", {**call, name: other}
    for name, x in tensors.items():
        for words, other in _other_tensors(x):
            yield (name,), words, {**call, name: other}
    for name, x in tensors.items():
        for second, other in tensors.items():
            if name < second and (x.shape, x.dtype) == (other.shape, other.dtype):
                yield (name, second), "in each other's place", {**call, name: other, second: x}


def _other_values(value: Any) -> Iterator[Any]:
    if isinstance(value, bool):
        yield not value
    elif value is not None:
        yield None
    if isinstance(value, int) and not isinstance(value, bool):
        yield from (value - 1, value + 1)


def _other_tensors(x: np.ndarray) -> Iterator[tuple[str, Any]]:
    if x.ndim >= 2 and x.shape[-1] == x.shape[-2]:
        yield "with its last two axes swapped", x.swapaxes(-1, -2)
    if x.dtype.kind in "iu":
        return
    yield "left out", None
    yield "zero", np.zeros_like(x)
    for n, size in enumerate(x.shape):
        at = np.arange(size)
        if size > 1:
            yield f"with the first along axis {n} for all", np.take(x, at * 0, n)
            yield f"in reverse along axis {n}", np.flip(x, n)
            yield f"one back along axis {n}", np.take(x, np.maximum(at - 1, 0), n)
            yield f"one ahead along axis {n}", np.take(x, np.minimum(at + 1, size - 1), n)
