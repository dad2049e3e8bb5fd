"""An evaluation of Triton programs as it was recorded: only what another choice of errors changes is done again.

Most of an evaluation is Triton's own work on types, shapes and frames, and most of its values are the same whichever
line errs. So the operations on floats are recorded once, with their operands and results. Later evaluations do those
again that err otherwise or have an operand that is another one by then, all that touches memory, and nothing else.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import triton.language as tl
from triton.language import semantic
from triton.runtime.interpreter import ReduceScanOpInterface, TensorHandle

from parity.debugging.attribution.program import Active, Place

MEMORY = ("load", "store", "atomic")
"""Words in the names of operations that touch memory."""
MOST_BYTES = 2 * 10**9
"""Of the results of an evaluation that are kept; of one with more nothing is."""


@dataclass(frozen=True)
class Step:
    """An operation. again: does it, and returns its results. is_memory: it touches memory, and is always done."""

    again: Callable[[], Any]
    given: tuple[TensorHandle, ...]
    made: tuple[TensorHandle, ...]
    data: tuple[np.ndarray, ...]  # of the results, when they were recorded
    place: Place | None
    is_memory: bool


class Tape:
    """The steps of an evaluation in which `active` operations erred.

    is_whole: whether all that depends on floats has been recorded, no test of a program or bound of a loop among it.
    """

    def __init__(self, active: Active, place: Callable[[], Place | None]) -> None:
        self.is_whole, self.result = True, None
        self.erring: Mapping[Place, float] = {}
        self._active, self._place = active, place
        self._steps: list[Step] = []
        self._bytes, self._is_inside = 0, False
        self._changed: list[tuple[TensorHandle, np.ndarray]] = []

    def recorded(self, name: str, operation: Callable[..., Any], *arguments: Any) -> Any:
        """What an operation gives; it is a step unless it is part of another one, or of no floats."""
        if self._is_inside:
            return operation(*arguments)
        self._is_inside = True
        try:
            result = operation(*arguments)
        finally:
            self._is_inside = False
        given, made = handles(arguments), handles(result)
        self.add(lambda: operation(*arguments), given, made, any(word in name for word in MEMORY))
        return result

    def add(
        self,
        again: Callable[[], Any],
        given: Sequence[TensorHandle] = (),
        made: Sequence[TensorHandle] = (),
        is_memory: bool = False,
        is_host: bool = False,
    ) -> None:
        """Record a step. is_host: of torch, or a mark."""
        if not self.is_whole or not (is_host or any(map(_counts, (*given, *made)))):
            return
        new = tuple(x for x in made if all(x is not y for y in given))
        for x in given:
            self.is_whole &= "taped" in x.attr or not _counts(x) or x.data.size == 1
        for x in new:
            x.attr["taped"] = True
        self._bytes += sum(x.data.nbytes for x in new)
        self._steps.append(
            Step(again, tuple(given), new, tuple(x.data for x in new), self._place(), is_memory or is_host)
        )
        if self._bytes > MOST_BYTES:
            self.is_whole = False
        if not self.is_whole:
            self._steps.clear()

    def replay(self, active: Active, at: Callable[[Place | None], None]) -> None:
        """Do again what other active operations change. at: is told each place that comes next."""
        for x, data in self._changed:
            x.data = data
        self._changed.clear()
        changed: set[int] = set()
        differs: dict[Place | None, bool] = {None: False}
        for step in self._steps:
            place = step.place
            if place not in differs:
                differs[place] = place is not None and active(place) != self._active(place)
            if not (step.is_memory or differs[place] or any(id(x) in changed for x in step.given)):
                continue
            at(place)
            results = [x for x in handles(step.again()) if all(x is not y for y in step.given)]
            for x, result, data in zip(step.made, results, step.data, strict=bool(step.made)):
                if not np.array_equal(result.data, data, equal_nan=data.dtype == np.float64):
                    x.data = result.data
                    changed.add(id(x))
                    self._changed.append((x, data))

    def erred(self, active: Active) -> dict[Place, float]:
        """The places that erred when they were recorded, and are active still: they may have been passed over."""
        return {place: error for place, error in self.erring.items() if active(place)}

    @contextlib.contextmanager
    def recording(self) -> Iterator[None]:
        """Record what Triton does to tensors without its builder as well. Inside `emulated`."""
        reduce, transposed = ReduceScanOpInterface.apply, vars(tl.tensor)["T"]
        tests = {name: vars(tl.tensor)[name] for name in ("__bool__", "__index__")}

        def reduced(reduction: Any, x: Any) -> Any:
            combine = getattr(reduction.combine_fn, "fn", reduction.combine_fn)
            # A kernel's own function has lines of its own, which may err otherwise than that of the reduction.
            self.is_whole &= str(combine.__module__).startswith("triton.")
            return self.recorded("reduce", partial(reduce, reduction), x)

        ReduceScanOpInterface.apply = reduced
        tl.tensor.T = property(lambda x: self.recorded("transpose", transposed.fget, x))
        for name, test in tests.items():
            setattr(tl.tensor, name, self._testing(test))
        try:
            yield
        finally:
            ReduceScanOpInterface.apply, tl.tensor.T = reduce, transposed
            for name, test in tests.items():
                setattr(tl.tensor, name, test)

    def _testing(self, test: Callable[[Any], Any]) -> Callable[[Any], Any]:
        def tested(tensor: Any) -> Any:
            if sys._getframe(1).f_code.co_filename != semantic.__file__ and "taped" in tensor.handle.attr:
                self.is_whole = False
            return test(tensor)

        return tested


def handles(values: Any) -> list[TensorHandle]:
    """The handles among values: of tensors, and in lists and tuples as well."""
    if isinstance(values, TensorHandle):
        return [values]
    if isinstance(values, tl.tensor):
        return [values.handle]
    if isinstance(values, (tuple, list, tl.tuple)):
        return [handle for value in values for handle in handles(value)]
    return []


def _counts(handle: TensorHandle) -> bool:
    """Whether what is in a handle may be another number where other operations err: floats, and codes of 8 bits."""
    dtype = handle.dtype.scalar
    return "taped" in handle.attr or dtype.is_floating() or dtype.name in ("int8", "uint8")
