"""Where a Triton program is in its source while it is evaluated, and which of its operations err."""

from __future__ import annotations

import contextlib
import itertools
import sys
from collections.abc import Callable, Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
import triton
from triton.runtime import interpreter

from op_arguments import options, probe
from parity.backends.emulation import foreign, tensor_core
from parity.debugging.attribution import tape
from parity.debugging.attribution.program import LAUNCH, Active, Line, Mark, Place, note_error
from parity.dtypes import Floats

_FRAMEWORKS = tuple(str(Path(module.__file__ or "").parent) for module in (triton, torch, np, contextlib))
_OURS = {module.__file__ for module in (tape, tensor_core, foreign, options, probe)}
_OURS |= {str(path) for path in Path(__file__).parent.glob("gpu*.py")}
_EXECUTE = interpreter.GridExecutor.__call__.__code__
_DEEPEST = 6  # lines of a place that are looked at


class Errors:
    """Which operations err, the errors of those that do, and what was marked."""

    def __init__(self, active: Active) -> None:
        self.active = active
        self.place: Callable[[], Place | None] = place_now
        self.places: dict[Place, float] = {}
        self.marks: list[Mark] = []

    def now_at(self, place: Place | None) -> None:
        """What is done from now on is done at a place, whatever is being executed."""
        self.place = lambda: place

    def add(self, exact: Floats, own: Callable[[], tuple[Floats, Floats]]) -> Floats:
        """`exact`, and where the operation errs the difference of the two that `own` gives: rounded, and exact."""
        place = self.place()
        if place is None or not self.active(place):
            return exact
        rounded, true = own()
        error = rounded - true
        note_error(self.places, place, error, true)
        # Where an operation overflows, what it gives is all that is left.
        return np.where(np.isfinite(error), exact + error, rounded)


def called(kernel: Callable[..., Any], tensors: Mapping[str, Any], arguments: Mapping[str, Any]) -> Any:
    """The result of a kernel's call, whose places are looked for in it alone."""
    return kernel(**tensors, **arguments)


def place_now() -> Place | None:
    """Where the kernel's (or host's) operation that is going on is written."""
    return Place.of([*itertools.islice(frames_now(), _DEEPEST)])


def frames_now() -> Iterator[Line]:
    """The lines of kernels and of the host that are being executed, the innermost first, `LAUNCH` between them."""
    frame: Any = sys._getframe(1)
    while frame is not None and frame.f_code is not called.__code__:
        if frame.f_code is _EXECUTE:
            yield LAUNCH
        elif _is_kernels(frame.f_code.co_filename):
            yield Line(frame.f_code.co_filename, frame.f_lineno)
        frame = frame.f_back


@cache
def _is_kernels(file: str) -> bool:
    return not file.startswith((*_FRAMEWORKS, "<")) and file not in _OURS
