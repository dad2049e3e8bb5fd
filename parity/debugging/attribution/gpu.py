"""Triton programs in float64, all but some source lines, in Triton's interpreter.

Every floating-point value is carried in float64, whatever its declared dtype. An operation of an *active* line adds the
error that it makes in its own dtypes on an emulated tensor core: with x̂ the operands rounded to their dtypes,
x ↦ op(x) + [op_own(x̂) - op(x̂)]. Which line an operation is of, its Python frames say, as the interpreter keeps a
kernel's file and line numbers.

Memory holds what it would hold, rounded, and beside it what float64 the number stands for; so does what PyTorch does
to tensors between kernels.
"""

from __future__ import annotations

import contextlib
import itertools
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import triton
import triton.language as tl
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map
from triton.language import semantic
from triton.runtime import interpreter
from triton.runtime.interpreter import (
    ReduceOps,
    ReduceScanOpInterface,
    ScanOps,
    TensorHandle,
    _get_np_dtype,
)

from op_arguments import options, probe
from parity.backends.emulation import foreign, tensor_core
from parity.backends.emulation.tensor_core import TensorCoreBuilder, scaled
from parity.backends.gpu import filled_memory
from parity.debugging.attribution import tape
from parity.debugging.attribution.program import (
    LAUNCH,
    Active,
    Births,
    Executed,
    Line,
    Mark,
    Place,
    Run,
    is_cut,
    note_error,
)
from parity.debugging.attribution.tape import Tape
from parity.dtypes import Floats, numpy_dtype, round_to
from parity.interop import to_numpy, to_torch
from parity.op import Inputs, outputs

_NAMES = {
    "fp64": "float64",
    "fp32": "float32",
    "fp16": "float16",
    "bf16": "bfloat16",
    "fp8e4nv": "float8_e4m3fn",
    "fp8e5": "float8_e5m2",
}
_FRAMEWORKS = tuple(str(Path(module.__file__ or "").parent) for module in (triton, torch, np, contextlib))
_OURS = {__file__, tape.__file__, tensor_core.__file__, foreign.__file__, options.__file__, probe.__file__}
_MEMORY_ALONE = {"aten::set_", "aten::new_empty", "aten::empty_like", "aten::detach"}  # what computes no numbers
_EXECUTE = interpreter.GridExecutor.__call__.__code__
_DEEPEST = 6  # lines of a place that are looked at
_PAGE = 2**16  # bytes of memory whose numbers are kept together


def mark(site: str, value: Any, where: Any = None, **steps: Any) -> Any:
    """A kernel's probe: the value, marked as that of a site of the staged golden, where it is one.

    value: a tensor, of Triton or (between kernels) of torch, or several of Triton's that sum to it. steps: as of
    a `Mark`.
    """
    builder = interpreter.interpreter_builder
    if isinstance(value, torch.Tensor):
        numbers = builder.memory.of(value.detach())
    else:
        numbers = np.sum([_wide(piece.handle) for piece in _pieces(value)], axis=0)
    if where is not None:
        numbers = np.where(where.handle.data, numbers, np.nan)
    plain = tuple((name, getattr(step, "value", step)) for name, step in steps.items())
    builder.errors.marks.append(Mark(site, numbers, plain, builder.errors.place(), builder.marked(value)))
    if builder.tape:
        builder.tape.add(lambda: mark(site, value, where, **steps), is_mark=True)
    return value


class TritonProgram:
    """A call of a function of torch tensors that launches Triton kernels."""

    def __init__(self, kernel: Callable[..., Any], inputs: Inputs, arguments: Mapping[str, Any]) -> None:
        """Of `kernel(**inputs, **arguments)`."""
        self._kernel, self._inputs, self._arguments = kernel, inputs, arguments
        self._tape: Tape | None = None
        self._taped = Memory()

    def run(self, active: Active) -> Run:
        """The outputs in float64 where the operations that `active` admits err, and where those are."""
        errors = Errors(active)
        if self._tape is None:
            self._tape, self._taped = Tape(active, _place), Memory()
            between = RecordedBetween(errors, self._taped, self._tape)
            run = self._evaluated(_RecordingBuilder, _Carried(errors, self._taped, tape=self._tape), between)
            self._tape.erring = run.erring
            return run
        if self._tape.is_whole:
            run = self._replayed(self._tape, errors)
            if self._tape.is_whole:
                return run
        errors, memory = Errors(active), Memory()
        return self._evaluated(_WideBuilder, _Carried(errors, memory), Between(errors, memory))

    def _replayed(self, taped: Tape, errors: Errors) -> Run:
        carried = _Carried(errors, self._taped)
        with tensor_core.emulated(), _widened(_WideBuilder, carried), np.errstate(all="ignore"), torch.no_grad():
            taped.replay(errors.active, errors.now_at)
        numbers = {name: self._taped.of(x) for name, x in outputs(taped.result).items()}
        return Run(numbers, {**taped.erred(errors.active), **errors.places}, errors.marks)

    def births(self, births: Births, fill: float = np.nan) -> Run:
        """The outputs as the kernel computes them, what is born on the way noted. fill: what memory begins as."""
        errors, memory = Errors(lambda place: True), Memory()
        with _new_memory_filled(fill):
            return self._evaluated(_WatchingBuilder, _Carried(errors, memory, births=births), Between(errors, memory))

    def slice(self, right: Set[int], of_finite: bool = True) -> Run:
        """The outputs in float64, and the lines that they and the marks come of."""
        errors, memory = Errors(lambda place: False), Memory()
        lines = Lines(right, memory, of_finite)
        carried = _Carried(errors, memory, lines=lines)
        with contextlib.nullcontext() if of_finite else _new_memory_filled(np.nan):
            return self._evaluated(_SlicingBuilder, carried, SlicedBetween(errors, memory, lines))

    def _evaluated(self, builder: type, carried: _Carried, between: Between) -> Run:
        errors, memory, lines, taped = carried.errors, carried.memory, carried.lines, carried.tape
        tensors = {name: to_torch(x) for name, x in self._inputs.items() if x is not None}
        followed = lines.followed() if lines else taped.recording() if taped else contextlib.nullcontext()
        with tensor_core.emulated(), _widened(builder, carried), np.errstate(all="ignore"), filled_memory():
            with followed, between, probe.probing(mark):
                result = self._kernel(**tensors, **self._arguments)
            if taped:
                taped.result = result
            found = outputs(result)
            numbers = {name: memory.of(x) for name, x in found.items()}
            if not lines:
                return Run(numbers, errors.places, errors.marks)
            of = {name: lines.of_tensor(x) for name, x in found.items()}
            return Run(numbers, errors.places, errors.marks, of, lines.executed.when)


@dataclass(frozen=True)
class _Carried:
    """What the interpreter's builder has while a program is evaluated."""

    errors: Errors
    memory: Memory
    lines: Lines | None = None
    births: Births | None = None
    tape: Tape | None = None


class Errors:
    """Which operations err, the errors of those that do, and what was marked."""

    def __init__(self, active: Active) -> None:
        self.active = active
        self.place: Callable[[], Place | None] = _place
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


def _place() -> Place | None:
    """Where the kernel's (or host's) operation that is going on is written."""
    return Place.of([*itertools.islice(_frames(), _DEEPEST)])


def _frames() -> Iterator[Line]:
    """The lines of kernels and of the host that are being executed, the innermost first, `LAUNCH` between them."""
    frame: Any = sys._getframe(1)
    while frame is not None and frame.f_code is not TritonProgram._evaluated.__code__:
        if frame.f_code is _EXECUTE:
            yield LAUNCH
        elif _is_kernels(frame.f_code.co_filename):
            yield Line(frame.f_code.co_filename, frame.f_lineno)
        frame = frame.f_back


@cache
def _is_kernels(file: str) -> bool:
    return not file.startswith((*_FRAMEWORKS, "<")) and file not in _OURS


class Memory:
    """The float64 number that each address stands for."""

    def __init__(self) -> None:
        self._pages: dict[int, Floats] = {}

    def store(self, addresses: np.ndarray, values: Floats) -> None:
        """Store numbers at their first bytes."""
        for page, here in self._paged(addresses):
            numbers = self._pages.setdefault(page, np.full(_PAGE, np.nan))
            numbers[addresses[here] % _PAGE] = values[here]

    def numbers(self, addresses: np.ndarray) -> Floats:
        """The number stored at each address, NaN where there is none."""
        wide = np.full(addresses.shape, np.nan)
        for page, here in self._paged(addresses):
            if page in self._pages:
                wide[here] = self._pages[page][addresses[here] % _PAGE]
        return wide

    def load(self, addresses: np.ndarray, stored: np.ndarray) -> Floats:
        """The float64 numbers behind `stored` in memory; `stored` itself where other bytes have been stored since."""
        wide = self.numbers(addresses)
        exact = stored.astype(np.float64)
        return np.where(round_to(wide, stored.dtype.name) == stored, wide, exact)

    def forget(self, tensor: torch.Tensor) -> None:
        """Of memory that is a new tensor's. What it is given without being stored here may be what an earlier number
        rounds to."""
        storage = tensor.untyped_storage()
        begin, end = storage.data_ptr(), storage.data_ptr() + storage.nbytes()
        for page in range(begin // _PAGE, -(-end // _PAGE)):
            if page in self._pages:
                self._pages[page][max(begin - page * _PAGE, 0) : end - page * _PAGE] = np.nan

    def of(self, tensor: torch.Tensor) -> Floats:
        """The numbers of a tensor."""
        stored = to_numpy(tensor)
        if not tensor.is_floating_point():
            return stored.astype(np.float64)
        return self.load(addresses_of(tensor), stored)

    @staticmethod
    def _paged(addresses: np.ndarray) -> Iterator[tuple[int, Any]]:
        pages = addresses // _PAGE
        if pages.size and (pages == pages.flat[0]).all():  # as most are: all of them without asking which
            return iter([(int(pages.flat[0]), ...)])
        return ((int(page), pages == page) for page in np.unique(pages))


def addresses_of(tensor: torch.Tensor) -> np.ndarray:
    """The address of each element."""
    found = np.full(tensor.shape, tensor.data_ptr(), np.uint64)
    for axis, (size, stride) in enumerate(zip(tensor.shape, tensor.stride(), strict=True)):
        steps = np.arange(size, dtype=np.uint64) * np.uint64(stride * tensor.element_size())
        found += steps.reshape(-1, *[1] * (tensor.ndim - axis - 1))
    return found


def _ends(tensor: torch.Tensor) -> np.ndarray:
    """The addresses of its first and its last element; none of an empty one."""
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    begin = tensor.data_ptr()
    return np.array([begin, begin + last * tensor.element_size()] if tensor.numel() else [], np.uint64)


class Between(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """What PyTorch does to tensors, in float64."""

    def __init__(self, errors: Errors, memory: Memory) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._errors, self._memory = errors, memory

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """An operation, and the same one on the numbers that its tensors stand for."""
        kwargs = kwargs or {}
        given = [x for x in tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)]
        storages = {x.untyped_storage().data_ptr() for x in given}

        def called() -> Any:
            result = func(*args, **kwargs)
            new = [] if func._schema.is_mutable else [x for x in tree_leaves(result) if isinstance(x, torch.Tensor)]
            for x in new:
                if x.untyped_storage().data_ptr() not in storages:
                    self._memory.forget(x)
            return result

        if func._schema.name in _MEMORY_ALONE:
            return called()
        own = [x.detach().to(torch.float64) if x.is_floating_point() else x.clone() for x in given]
        wide = [torch.from_numpy(self._memory.of(x)) if x.is_floating_point() else x.clone() for x in given]
        result = called()
        is_new = isinstance(result, torch.Tensor) and result.is_floating_point() and result.numel() > 0
        is_view = is_new and not func._schema.is_mutable and result.untyped_storage().data_ptr() in storages
        if not given or not is_new or is_view:
            return result

        def on(tensors: list[torch.Tensor]) -> Floats:
            left = iter(tensors)

            def swapped(x: Any) -> Any:
                if isinstance(x, torch.Tensor):
                    return next(left).clone()
                return torch.float64 if isinstance(x, torch.dtype) and x.is_floating_point else x

            return np.asarray(func(*tree_map(swapped, args), **tree_map(swapped, kwargs)).to(torch.float64).numpy())

        stored = to_numpy(result)
        exact = self._errors.add(on(wide), lambda: (stored.astype(np.float64), on(own)))
        result.copy_(to_torch(round_to(exact, stored.dtype.name)))
        self._memory.store(addresses_of(result), exact)
        return result


class RecordedBetween(Between):  # type: ignore[no-untyped-call]
    """What PyTorch does to tensors, in float64, recorded."""

    def __init__(self, errors: Errors, memory: Memory, taped: Tape) -> None:
        super().__init__(errors, memory)
        self._tape = taped

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """An operation, which is a step."""
        result = super().__torch_dispatch__(func, types, args, kwargs)
        given = [x for x in tree_leaves((args, kwargs or {})) if isinstance(x, torch.Tensor)]
        storages = {x.untyped_storage().data_ptr() for x in given}
        made = [x for x in tree_leaves(result) if isinstance(x, torch.Tensor)]
        for x in (*given, *made):
            self._tape.keep(x.untyped_storage())
        is_view = not func._schema.is_mutable and all(x.untyped_storage().data_ptr() in storages for x in made)
        if func._schema.name == "aten::copy_" and given[0].data_ptr() == given[1].data_ptr():
            return result  # as Triton's interpreter copies arguments back to where they are
        if func._schema.name not in _MEMORY_ALONE and "aten::empty" not in func._schema.name and made and not is_view:
            known = [x if x.is_floating_point() else x.clone() for x in made]
            for x in given:
                self._tape.touch(_ends(x))
            for x in made:
                self._tape.touch(_ends(x), is_written=True)
            self._tape.add(lambda: self._again(func, args, kwargs or {}, made, known), is_host=True)
        return result

    def _again(self, func: Any, args: Any, kwargs: Any, made: list[torch.Tensor], known: list[torch.Tensor]) -> None:
        """Do an operation again into what it made. known: what that was, of which integers must be the same: they may
        be addresses, and what has been recorded goes by those."""
        errors = interpreter.interpreter_builder.errors
        fresh = Between(errors, self._memory).__torch_dispatch__(func, (), args, kwargs)
        new = [x for x in tree_leaves(fresh) if isinstance(x, torch.Tensor)]
        for old, x, before in zip(made, new, known, strict=True):
            if old is not x:
                numbers = self._memory.of(x)
                old.copy_(x)
                if old.is_floating_point():
                    self._memory.store(addresses_of(old), numbers)
            is_number = old.is_floating_point() or old.element_size() == 1  # or a code
            self._tape.is_whole &= is_number or bool(torch.equal(old, before))


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
            if isinstance(value, TensorHandle) and (not _is_float(value) or self._counts(_wide(value))):
                found |= value.attr.get("lines", frozenset())
        return found

    def _counts(self, numbers: Floats) -> bool:
        return self._of_finite or not np.isfinite(numbers).all()

    def here(self) -> frozenset[Line]:
        """The line that is being executed, the one that called its function, and the conditions so far."""
        return self.executed.at(_place()) | self._launched | self._conditions

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
        handles = [] if isinstance(value, torch.Tensor) else [piece.handle for piece in _pieces(value)]
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
            self._launched, self._conditions = made | self.executed.at([*_frames()]), frozenset()
            return execute(executor, *arguments, **keywords)

        def reduced(reduction: Any, x: Any) -> Any:
            result = reduce(reduction, x)
            lines = self.of(*(piece.handle for piece in _pieces(x))) | self.here()
            for piece in _pieces(result):
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


def _pieces(value: Any) -> Sequence[Any]:
    return value if isinstance(value, (tuple, list, tl.tuple)) else (value,)


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


@contextlib.contextmanager
def _widened(wide: type, carried: _Carried) -> Iterator[None]:
    """Let Triton's interpreter carry float64."""
    builder = interpreter.interpreter_builder
    before = builder.__class__
    patches = [
        (TensorHandle, "__post_init__", lambda handle: None),  # it forbids data that are wider than their dtype
        (ReduceScanOpInterface, "to_tensor", _to_tensor),
        (ReduceOps, "sum", lambda self, x: _summed(self, x, lambda data: _sum(self, data))),
        (ScanOps, "cumsum", lambda self, x: [_summed(self, x, lambda data: np.cumsum(data, axis=self.axis))]),
    ]
    originals = [(owner, name, owner.__dict__[name]) for owner, name, _ in patches]
    for owner, name, patched in patches:
        setattr(owner, name, patched)
    vars(builder).update(vars(carried))
    builder.__class__ = wide
    try:
        yield
    finally:
        builder.__class__ = before
        for name in vars(carried):
            delattr(builder, name)
        for owner, name, original in originals:
            setattr(owner, name, original)


def _sum(reduction: Any, data: np.ndarray) -> np.ndarray:
    return np.asarray(np.sum(data, axis=reduction.axis, keepdims=reduction.keep_dims))


def _summed(reduction: Any, x: Any, total: Callable[[np.ndarray], np.ndarray]) -> Any:
    if not _is_float(x.handle):
        return reduction.to_tensor(total(x.handle.data), x.dtype)
    own = _own(x.handle).view(numpy_dtype(_NAMES[x.handle.dtype.scalar.name]))
    errors = interpreter.interpreter_builder.errors
    exact = errors.add(
        total(_wide(x.handle)),
        lambda: (total(own).astype(np.float64), total(own.astype(np.float64))),
    )
    return reduction.to_tensor(exact, x.dtype)


def _to_tensor(reduction: Any, value: Any, dtype: Any) -> Any:
    value = np.asarray(value)
    data = value if dtype.scalar.name in _NAMES else value.astype(_get_np_dtype(dtype))
    kind = tl.block_type(dtype, list(value.shape)) if value.ndim else dtype
    return tl.core.tensor(TensorHandle(np.atleast_1d(data), dtype.scalar), kind)


def _is_float(handle: TensorHandle) -> bool:
    return handle.dtype.scalar.name in _NAMES


def _wide(handle: TensorHandle) -> Floats:
    """The numbers in a handle of floats."""
    data: np.ndarray = handle.data
    if data.dtype == np.float64:
        return data
    return data.view(numpy_dtype(_NAMES[handle.dtype.scalar.name])).astype(np.float64)


def _own(handle: TensorHandle) -> np.ndarray:
    """A handle's data as the interpreter has them."""
    if not _is_float(handle) or handle.data.dtype != np.float64:
        return np.asarray(handle.data)
    dtype = handle.dtype.scalar
    return round_to(handle.data, _NAMES[dtype.name]).view(_get_np_dtype(dtype))


def _as_own(handle: TensorHandle) -> TensorHandle:
    return TensorHandle(_own(handle), handle.dtype)


def _as_float64(handle: TensorHandle) -> TensorHandle:
    return TensorHandle(_wide(handle), tl.float64) if _is_float(handle) else handle


def _of_bits(result: TensorHandle, *handles: TensorHandle) -> TensorHandle:
    """An integer result, noted as of the one number whose bits are among these."""
    numbers = {id(n): n for n in (x.attr.get("number") for x in handles) if n is not None}
    if len(numbers) == 1:
        result.attr["number"] = next(iter(numbers.values()))
    return result


class _WideBuilder(TensorCoreBuilder):
    """The tensor core's operations on float64, whose errors are added where they are asked for."""

    errors: Errors
    memory: Memory
    lines: Lines | None
    births: Births | None
    tape: Tape | None

    def marked(self, value: Any) -> frozenset[Line]:
        """The lines that a marked value comes of, where they are followed."""
        return self.lines.marked(value) if self.lines else frozenset()

    def _apply(self, dtype: Any, operation: Callable[..., TensorHandle], *handles: TensorHandle) -> TensorHandle:
        """`operation(*handles)`, of dtype where its results are floats."""
        if not any(map(_is_float, handles)):
            return _of_bits(operation(*handles), *handles)
        exact = operation(*map(_as_float64, handles))
        if exact.data.dtype != np.float64:
            return TensorHandle(exact.data, tl.int1 if exact.data.dtype == np.bool_ else dtype)

        def own() -> tuple[Floats, Floats]:
            rounded = [*map(_as_own, handles)]
            return _wide(operation(*rounded)), operation(*map(_as_float64, rounded)).data

        return TensorHandle(self.errors.add(exact.data, own), dtype.scalar)

    def unary_op(self, arg: TensorHandle, op: Any) -> TensorHandle:
        """Elementwise op of one tensor."""
        return self._apply(arg.dtype, lambda x: super(_WideBuilder, self).unary_op(x, op), arg)

    def binary_op(self, lhs: TensorHandle, rhs: TensorHandle, op: Any) -> TensorHandle:
        """Elementwise op or comparison of two tensors."""
        return self._apply(lhs.dtype, lambda x, y: super(_WideBuilder, self).binary_op(x, y, op), lhs, rhs)

    def ternary_op(self, lhs: TensorHandle, rhs: TensorHandle, other: TensorHandle, op: Any) -> TensorHandle:
        """Elementwise op of three tensors, or a choice."""

        def operation(x: TensorHandle, y: TensorHandle, z: TensorHandle) -> TensorHandle:
            return super(_WideBuilder, self).ternary_op(x, y, z, op)

        return self._apply(other.dtype, operation, lhs, rhs, other)

    def create_fma(self, x: TensorHandle, y: TensorHandle, z: TensorHandle) -> TensorHandle:
        """x * y + z, rounded once."""
        return self._apply(z.dtype, super().create_fma, x, y, z)

    def create_fabs(self, arg: TensorHandle) -> TensorHandle:
        """|x|."""
        return self.unary_op(arg, np.abs)

    def create_rsqrt(self, arg: TensorHandle) -> TensorHandle:
        """1 / √x."""
        return self.unary_op(arg, lambda x: 1 / np.sqrt(x))

    def create_dot(
        self, a: TensorHandle, b: TensorHandle, d: TensorHandle, input_precision: Any, max_num_imprecise_acc: int
    ) -> TensorHandle:
        """a [..., M, K] @ b [..., K, N] + d, of d's dtype."""

        def operation(x: TensorHandle, y: TensorHandle, z: TensorHandle) -> TensorHandle:
            return super(_WideBuilder, self).create_dot(x, y, z, input_precision, max_num_imprecise_acc)

        return self._apply(d.dtype, operation, a, b, d)

    def create_dot_scaled(self, *operands: Any) -> TensorHandle:
        """(lhs · scale) @ (rhs · scale) + acc, of operands as they are stored: exact is what becomes of them."""
        lhs, lhs_scale, lhs_format, rhs, rhs_scale, rhs_format, *how, acc = operands
        lhs, rhs = _as_own(lhs), _as_own(rhs)
        a, b = scaled(lhs, lhs_scale), scaled(rhs, rhs_scale, is_rhs=True)
        products = a.astype(np.float64) @ b.astype(np.float64)

        def own() -> tuple[Floats, Floats]:
            rounded, total = (lhs, lhs_scale, lhs_format, rhs, rhs_scale, rhs_format), _as_own(acc)
            result = super(_WideBuilder, self).create_dot_scaled(*rounded, *how, total)
            return _wide(result), products + _wide(total)

        return TensorHandle(self.errors.add(products + _wide(acc), own), acc.dtype.scalar)

    def create_atomic_rmw(self, rmw_op: Any, ptr: Any, val: TensorHandle, mask: Any, sem: Any, scope: Any) -> Any:
        """In memory, as the dtype has it: what it stores is not followed."""
        return super().create_atomic_rmw(rmw_op, ptr, _as_own(val), mask, sem, scope)

    def cast_impl(self, src: TensorHandle, dst_type: Any) -> TensorHandle:
        """Any cast but those of 8-bit floats."""
        return self._cast(src, dst_type, super().cast_impl)

    def create_fp_to_fp(self, src: TensorHandle, dst_type: Any, rounding_mode: Any) -> TensorHandle:
        """Casts with a rounding mode, and those of 8-bit floats."""
        return self._cast(
            src, dst_type, lambda x, dtype: super(_WideBuilder, self).create_fp_to_fp(x, dtype, rounding_mode)
        )

    def _cast(
        self, src: TensorHandle, dst_type: Any, cast: Callable[[TensorHandle, Any], TensorHandle]
    ) -> TensorHandle:
        dtype = dst_type.scalar
        if dtype.name not in _NAMES:
            return cast(_as_own(src), dst_type) if not _is_float(src) else super().cast_impl(_as_float64(src), dst_type)
        is_quantised = dtype.primitive_bitwidth == 8

        def rounded(x: Floats) -> Floats:
            # What a number becomes in 8 bits is the operation's result, and no error of it.
            return round_to(x, _NAMES[dtype.name]).astype(np.float64) if is_quantised else x

        exact = rounded(_wide(src) if _is_float(src) else src.data.astype(np.float64))

        def own() -> tuple[Floats, Floats]:
            given = _as_own(src)
            true = rounded(_wide(given)) if _is_float(src) else exact
            return (true, true) if src.dtype.scalar == dtype else (_wide(cast(given, dst_type)), true)

        return TensorHandle(self.errors.add(exact, own), dtype)

    def create_ashr(self, lhs: TensorHandle, rhs: TensorHandle) -> TensorHandle:
        """Bits moved to the right, the sign kept; the interpreter makes new handles of both."""
        return _of_bits(super().create_ashr(lhs, rhs), lhs, rhs)

    def create_bitcast(self, src: TensorHandle, dst_type: Any) -> TensorHandle:
        """The same bits as another dtype; of bits that are cut or rounded the whole number, and the cut its error."""
        result = super().create_bitcast(_as_own(src), dst_type)
        if _is_float(src) and not _is_float(result):
            result.attr["number"] = _wide(src)
        number = src.attr.get("number")
        if number is None or not _is_float(result):
            return result
        dtype, got = result.dtype.scalar, _wide(result)
        true = round_to(number, _NAMES[dtype.name]).astype(np.float64)
        if got.shape != true.shape or not is_cut(true, got):
            return result
        return TensorHandle(self.errors.add(number, lambda: (got, true)), dtype)

    def create_splat(self, ret_ty: Any, arg: TensorHandle) -> TensorHandle:
        """A tensor of one number."""
        if not _is_float(arg):
            return super().create_splat(ret_ty, arg)
        return TensorHandle(np.full(ret_ty.shape, _wide(arg).ravel()[0]), arg.dtype.scalar)

    def create_unsplat(self, arg: TensorHandle) -> TensorHandle:
        """The number of a tensor of one."""
        if not _is_float(arg):
            return super().create_unsplat(arg)
        return TensorHandle(np.full((1,), _wide(arg).ravel()[0]), arg.dtype.scalar)

    def get_fp32(self, value: float) -> TensorHandle:
        """A scalar constant."""
        return self._constant(value, tl.float32)

    def get_fp16(self, value: float) -> TensorHandle:
        """A scalar constant."""
        return self._constant(value, tl.float16)

    def get_bf16(self, value: float) -> TensorHandle:
        """A scalar constant."""
        return self._constant(value, tl.bfloat16)

    def _constant(self, value: float, dtype: Any) -> TensorHandle:
        exact = np.array([value], np.float64)
        rounded = round_to(exact, _NAMES[dtype.name]).astype(np.float64)
        return TensorHandle(self.errors.add(exact, lambda: (rounded, exact)), dtype)

    def create_masked_load(
        self, ptrs: TensorHandle, mask: TensorHandle, other: TensorHandle | None, *how: Any
    ) -> TensorHandle:
        """A load; what is masked is `other`."""
        given = None if other is None else _as_own(other)
        if self.tape:
            self.tape.touch(ptrs.data[np.broadcast_to(mask.data, ptrs.data.shape)])
        loaded = super().create_masked_load(ptrs, mask, given, *how)
        if not _is_float(loaded):
            return loaded
        stored = loaded.data.view(numpy_dtype(_NAMES[loaded.dtype.scalar.name]))
        addresses, masks = (np.broadcast_to(x.data, stored.shape) for x in (ptrs, mask))
        wide = stored.astype(np.float64)
        wide[masks] = self.memory.load(addresses[masks], stored[masks])
        return TensorHandle(wide, loaded.dtype.scalar)

    def create_masked_store(self, ptrs: TensorHandle, value: TensorHandle, mask: TensorHandle, *how: Any) -> Any:
        """A store: of the number, and in memory of what it is rounded to."""
        if self.tape:
            self.tape.touch(ptrs.data[np.broadcast_to(mask.data, ptrs.data.shape)], is_written=True)
        if _is_float(value):
            addresses, numbers, masks = np.broadcast_arrays(ptrs.data, _wide(value), mask.data)
            self.memory.store(addresses[masks], numbers[masks])
        return super().create_masked_store(ptrs, _as_own(value), mask, *how)


_OPERATIONS = ("create_", "get_", "unary_op", "binary_op", "ternary_op", "cast_impl")
"""How the names of a builder's operations begin."""


class _WrappedBuilder(_WideBuilder):
    """The same, with another function in the place of each operation's."""

    def __getattribute__(self, name: str) -> Any:
        found = super().__getattribute__(name)
        return self.wrapped(name, found) if name.startswith(_OPERATIONS) else found

    def wrapped(self, name: str, operation: Callable[..., Any]) -> Callable[..., Any]:
        """The function that an operation's is replaced by."""
        raise NotImplementedError


class _RecordingBuilder(_WrappedBuilder):
    """The same, recorded."""

    tape: Tape

    def wrapped(self, name: str, operation: Callable[..., Any]) -> Callable[..., Any]:
        """The operation, recorded."""
        return partial(self.tape.recorded, name, operation)


class _WatchingBuilder(_WideBuilder):
    """The same, in which what is born is noted."""

    births: Births

    def _apply(self, dtype: Any, operation: Callable[..., TensorHandle], *handles: TensorHandle) -> TensorHandle:
        return self._seen(super()._apply(dtype, operation, *handles), *handles)

    def _cast(self, src: TensorHandle, dst_type: Any, cast: Callable[[TensorHandle, Any], TensorHandle]) -> Any:
        return self._seen(super()._cast(src, dst_type, cast), src)

    def _seen(self, result: TensorHandle, *operands: TensorHandle) -> TensorHandle:
        floats = [_wide(x) for x in operands if _is_float(x)]
        if not _is_float(result) or result.data.dtype != np.float64:
            return result
        return TensorHandle(self.births.seen(_place(), floats, result.data), result.dtype)


@contextlib.contextmanager
def _new_memory_filled(value: float) -> Iterator[None]:
    """Let what torch makes without a value begin as this one."""
    empty = {name: getattr(torch, name) for name in ("empty", "empty_like")}
    for name, made in empty.items():
        setattr(torch, name, _filled(made, value))
    try:
        yield
    finally:
        for name, made in empty.items():
            setattr(torch, name, made)


def _filled(made: Callable[..., torch.Tensor], value: float) -> Callable[..., torch.Tensor]:
    """A function of torch that makes a tensor, which begins as this value where it is of floats."""

    def filled(*arguments: Any, **keywords: Any) -> torch.Tensor:
        tensor = made(*arguments, **keywords)
        return tensor.fill_(value) if tensor.is_floating_point() else tensor

    return filled


class _SlicingBuilder(_WrappedBuilder):
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
            handles = [x for x in _pieces(result) if isinstance(x, TensorHandle)]
            of = lines.of(*arguments) | lines.here() if handles else frozenset()
            if name == "create_masked_load":
                addresses, masks = np.broadcast_arrays(arguments[0].data, arguments[1].data)
                of |= lines.load(addresses[masks])
            for handle in handles:
                handle.attr["lines"] = of
            return result

        return followed


def make_program(kernel: Callable[..., Any], inputs: Inputs, arguments: Mapping[str, Any]) -> TritonProgram:
    """See `parity.debugging.attribution.program`."""
    return TritonProgram(kernel, inputs, arguments)
