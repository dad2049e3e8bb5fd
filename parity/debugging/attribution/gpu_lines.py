"""Which source lines the values of a Triton program come of, followed through launches and between them."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator, Set
from typing import Any

import numpy as np
import torch
import triton.language as tl
from torch.utils._pytree import tree_leaves
from triton.language import semantic
from triton.runtime import interpreter
from triton.runtime.interpreter import ReduceScanOpInterface, TensorHandle

from parity.debugging.attribution.gpu_builders import WrappedBuilder, is_float, pieces_of, wide_of
from parity.debugging.attribution.gpu_frames import Errors, frames_now, place_now
from parity.debugging.attribution.gpu_memory import Memory, addresses_of
from parity.debugging.attribution.gpu_tensors import Between
from parity.debugging.attribution.program import Executed, Line
from parity.dtypes import Floats


class Lines:
    """Which source lines each value of an evaluation comes of, and each address of memory.

    A program's tests and the bounds of its loops count for all that it does from then on, and the calls that led to
    its launch for all of it: what they pass that is no tensor is not followed.
    """

    def __init__(self, right: Set[int], memory: Memory, of_finite: bool = True) -> None:
        self._right, self._memory, self._of_finite = right, memory, of_finite
        self._known: list[frozenset[Line]] = [frozenset()]
        self._numbers: dict[frozenset[Line], int] = {frozenset(): 0}
        self._of_addresses = Memory()  # numbers of `_known`
        self._launched: frozenset[Line] = frozenset()
        self._conditions: frozenset[Line] = frozenset()
        self._marks = 0
        self.executed = Executed()

    def of(self, *values: Any) -> frozenset[Line]:
        """Those of handles of Triton's, in lists as well."""
        found: frozenset[Line] = frozenset()
        for value in tree_leaves(values, is_leaf=lambda x: isinstance(x, TensorHandle)):
            if isinstance(value, TensorHandle) and (not is_float(value) or self._counts(wide_of(value))):
                found |= value.attr.get("lines", frozenset())
        return found

    def _counts(self, numbers: Floats) -> bool:
        return self._of_finite or not np.isfinite(numbers).all()

    def here(self) -> frozenset[Line]:
        """The line that is being executed, the one that called its function, and the conditions so far."""
        return self.executed.at(place_now()) | self._launched | self._conditions

    def store(self, addresses: np.ndarray, lines: frozenset[Line]) -> None:
        """Note what is stored to addresses."""
        number = self._numbers.setdefault(lines, len(self._known))
        if number == len(self._known):
            self._known.append(lines)
        self._of_addresses.store(addresses, np.full(addresses.shape, float(number)))

    def load(self, addresses: np.ndarray) -> frozenset[Line]:
        """What is at addresses."""
        numbers = self._of_addresses.numbers(addresses)
        found = np.unique(numbers[np.isfinite(numbers)]).astype(int)
        return frozenset().union(*(self._known[n] for n in found))

    def of_tensor(self, tensor: torch.Tensor) -> frozenset[Line]:
        """Those of a tensor of torch."""
        counts = not tensor.is_floating_point() or self._counts(self._memory.of(tensor))
        return self.load(addresses_of(tensor)) | self.of_views(tensor) if counts else frozenset()

    def view(self, tensor: torch.Tensor, lines: frozenset[Line]) -> None:
        """Note that a tensor is a view that these lines made: what is stored there is not theirs."""
        vars(tensor)["lines"] = lines

    def of_views(self, *values: Any) -> frozenset[Line]:
        """The lines that made views of tensors, in lists as well."""
        views = [x for x in tree_leaves(values) if isinstance(x, torch.Tensor)]
        return frozenset().union(*(vars(x).get("lines", frozenset()) for x in views))

    def marked(self, value: Any) -> frozenset[Line]:
        """Those of a marked value, of which nothing is followed further back where it is right."""
        handles = [] if isinstance(value, torch.Tensor) else [piece.handle for piece in pieces_of(value)]
        lines = self.of(*handles) if handles else self.of_tensor(value)
        if self._marks in self._right:
            for handle in handles:
                handle.attr["lines"] = frozenset()
            if not handles:
                self.store(addresses_of(value), frozenset())
        self._marks += 1
        return lines | self.here()

    @contextlib.contextmanager
    def followed(self) -> Iterator[None]:
        """Note the tests and the bounds of loops of Triton programs, and what becomes of reductions. Inside `emulated`,
        which makes Triton's tensors the interpreter's."""
        execute, reduce = interpreter.GridExecutor.__call__, ReduceScanOpInterface.apply
        tests = {name: vars(tl.tensor)[name] for name in ("__bool__", "__index__")}

        def executed(executor: Any, *arguments: Any, **keywords: Any) -> Any:
            made = self.of_views(arguments, keywords)
            self._launched, self._conditions = made | self.executed.at([*frames_now()]), frozenset()
            return execute(executor, *arguments, **keywords)

        def reduced(reduction: Any, x: Any) -> Any:
            result = reduce(reduction, x)
            lines = self.of(*(piece.handle for piece in pieces_of(x))) | self.here()
            for piece in pieces_of(result):
                piece.handle.attr["lines"] = lines
            return result

        interpreter.GridExecutor.__call__, ReduceScanOpInterface.apply = executed, reduced
        for name, test in tests.items():
            setattr(tl.tensor, name, self._testing(test))
        try:
            yield
        finally:
            interpreter.GridExecutor.__call__, ReduceScanOpInterface.apply = execute, reduce
            for name, test in tests.items():
                setattr(tl.tensor, name, test)

    def _testing(self, test: Callable[[Any], Any]) -> Callable[[Any], Any]:
        def tested(tensor: Any) -> Any:
            # Triton's own functions ask whether they were given a mask.
            if sys._getframe(1).f_code.co_filename != semantic.__file__:
                self._conditions |= self.of(tensor.handle) | self.here()
            return test(tensor)

        return tested


class SlicedBetween(Between):  # type: ignore[no-untyped-call]
    """What PyTorch does to tensors, in float64, with the lines that they come of."""

    def __init__(self, errors: Errors, memory: Memory, lines: Lines) -> None:
        super().__init__(errors, memory)
        self._lines = lines

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """An operation, whose results have its operands' lines and its own."""
        given = [x for x in tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)]
        storages = {x.untyped_storage().data_ptr() for x in given}
        if func._schema.name == "aten::set_" or (func._schema.name == "aten::copy_" and len(storages) == 1):
            # Triton's interpreter copies arguments back to where they are.
            return super().__torch_dispatch__(func, types, args, kwargs)
        lines = frozenset().union(*map(self._lines.of_tensor, given)) | self._lines.here()
        result = super().__torch_dispatch__(func, types, args, kwargs)
        for x in tree_leaves(result):
            is_view = isinstance(x, torch.Tensor) and x.untyped_storage().data_ptr() in storages
            if isinstance(x, torch.Tensor) and (func._schema.is_mutable or not is_view):
                self._lines.store(addresses_of(x), lines)
            elif is_view:
                self._lines.view(x, self._lines.of_views(given) | self._lines.here())
        return result


class SlicingBuilder(WrappedBuilder):
    """The same, with the lines that each value comes of."""

    lines: Lines

    def wrapped(self, name: str, operation: Callable[..., Any]) -> Callable[..., Any]:
        """The operation, followed."""
        lines = self.lines

        def followed(*arguments: Any) -> Any:
            result = operation(*arguments)
            if name == "create_masked_store":
                pointers, value, mask, *_ = arguments
                addresses, masks = np.broadcast_arrays(pointers.data, mask.data)
                lines.store(addresses[masks], lines.of(pointers, value, mask) | lines.here())
            handles = [x for x in pieces_of(result) if isinstance(x, TensorHandle)]
            of = lines.of(*arguments) | lines.here() if handles else frozenset()
            if name == "create_masked_load":
                addresses, masks = np.broadcast_arrays(arguments[0].data, arguments[1].data)
                of |= lines.load(addresses[masks])
            for handle in handles:
                handle.attr["lines"] = of
            return result

        return followed
