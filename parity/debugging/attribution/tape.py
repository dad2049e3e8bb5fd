"""An evaluation of Triton programs as it was recorded: only what another choice of errors changes is done again.

Most of an evaluation is Triton's own work on types, shapes and frames, and most of its values are the same whichever
line errs. So the operations on floats are recorded once, with their operands and results. Later evaluations do those
again that err otherwise or have an operand that is another one by then, all that touches memory, and nothing else.
"""

from __future__ import annotations

import bisect
import contextlib
import heapq
import sys
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import triton.language as tl
from triton.language import semantic
from triton.runtime.interpreter import ReduceScanOpInterface, TensorHandle

from parity.debugging.attribution.program import Active, Place

UNKNOWN = -1
"""Stands for memory that no tensor of PyTorch's that was seen has: the kernel's arguments."""
MOST_BYTES = 2 * 10**9
"""Of the results of an evaluation that are kept; of one with more nothing is."""


@dataclass(frozen=True)
class Step:
    """An operation. again: does it, and returns its results. read, written: memory, as `Tape.touch` has it."""

    again: Callable[[], Any]
    given: tuple[TensorHandle, ...]
    made: tuple[TensorHandle, ...]
    data: tuple[np.ndarray, ...]  # of the results, when they were recorded
    place: Place | None
    read: frozenset[int]
    written: frozenset[int]


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
        self._storages: dict[int, Any] = {}  # by where they begin
        self._begins: list[int] = []
        self._touched: tuple[set[int], set[int]] = set(), set()  # read and written since the last step
        self._read: set[int] = set()  # by all steps so far
        self._rewritten: set[int] = set()  # by a step after one that read it
        self._dirty: set[int] = set()  # not as it was recorded
        # Steps by what they are of: their place, a handle that is given to them, memory that they touch.
        self._at: defaultdict[Place, list[int]] = defaultdict(list)
        self._given: defaultdict[int, list[int]] = defaultdict(list)
        self._touching: defaultdict[int, list[int]] = defaultdict(list)
        self._marks: list[int] = []

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
        if "atomic" in name:
            for pointers in (x.data for x in given if x.dtype.scalar.is_ptr()):
                self.touch(pointers)
                self.touch(pointers, is_written=True)
        self.add(lambda: operation(*arguments), given, made)
        return result

    def keep(self, storage: Any) -> None:
        """Keep a tensor's memory, to which steps have addresses, and let it be touched as a whole."""
        begin = storage.data_ptr()
        if begin not in self._storages:
            bisect.insort(self._begins, begin)
            self._storages[begin] = storage

    def touch(self, addresses: np.ndarray, *, is_written: bool = False) -> None:
        """Note that the next step reads or writes there."""
        if addresses.size:
            first, last = int(addresses.min()), int(addresses.max())
            low, high = bisect.bisect_right(self._begins, first) - 1, bisect.bisect_right(self._begins, last)
            found = {at for at in self._begins[max(low, 0) : high] if at + self._storages[at].nbytes() > first}
            self._touched[is_written].update(found or {UNKNOWN})

    def add(
        self,
        again: Callable[[], Any],
        given: Sequence[TensorHandle] = (),
        made: Sequence[TensorHandle] = (),
        *,
        is_host: bool = False,
        is_mark: bool = False,
    ) -> None:
        """Record a step. is_host: of torch. is_mark: it is done each time."""
        read, written = map(frozenset, self._touched)
        self._touched = set(), set()
        if not self.is_whole or not (is_host or is_mark or any(map(_counts, (*given, *made)))):
            return
        self._read |= read
        self._rewritten |= written & self._read
        new = tuple(x for x in made if all(x is not y for y in given))
        for x in given:
            self.is_whole &= "taped" in x.attr or not _counts(x) or x.data.size == 1
        for x in new:
            x.attr["taped"] = True
        self._bytes += sum(x.data.nbytes for x in new)
        number, place = len(self._steps), self._place()
        self._steps.append(Step(again, tuple(given), new, tuple(x.data for x in new), place, read, written))
        if place:
            self._at[place].append(number)
        for x in given:
            self._given[id(x)].append(number)
        for memory in read | written:
            self._touching[memory].append(number)
        if is_mark:
            self._marks.append(number)
        if self._bytes > MOST_BYTES:
            self.is_whole = False
        if not self.is_whole:
            self._steps.clear()

    def replay(self, active: Active, at: Callable[[Place | None], None]) -> None:
        """Do again what other active operations change. at: is told each place that comes next."""
        for x, data in self._changed:
            x.data = data
        self._changed.clear()
        others = {n for place, steps in self._at.items() if active(place) != self._active(place) for n in steps}
        again = {n for memory in self._rewritten | self._dirty for n in self._touching[memory]}
        todo = sorted(others | again | {*self._marks})
        queued = {*todo}
        self._dirty = set()

        def queue(steps: Iterable[int]) -> None:
            for n in steps:
                if n not in queued:
                    queued.add(n)
                    heapq.heappush(todo, n)

        while todo:
            n = heapq.heappop(todo)
            step = self._steps[n]
            at(step.place)
            results = [x for x in handles(step.again()) if all(x is not y for y in step.given)]
            for x, result, data in zip(step.made, results, step.data, strict=bool(step.made)):
                if not np.array_equal(result.data, data, equal_nan=data.dtype == np.float64):
                    x.data = result.data
                    self._changed.append((x, data))
                    others |= {*self._given[id(x)]}
                    queue(self._given[id(x)])
            for memory in step.written - self._dirty if n in others else ():
                self._dirty.add(memory)
                later = [m for m in self._touching[memory] if m > n]
                others |= {m for m in later if memory in self._steps[m].read}
                queue(later)

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
