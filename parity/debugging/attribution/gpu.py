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
from collections.abc import Callable, Iterator, Mapping, Set
from typing import Any

import numpy as np
import torch
from triton.runtime import interpreter

from op_arguments import probe
from parity.backends.emulation import tensor_core
from parity.backends.gpu import filled_memory
from parity.debugging.attribution.gpu_builders import (
    Carried,
    RecordingBuilder,
    WatchingBuilder,
    WideBuilder,
    pieces_of,
    wide_of,
    widened,
)
from parity.debugging.attribution.gpu_frames import Errors, called, place_now
from parity.debugging.attribution.gpu_lines import Lines, SlicedBetween, SlicingBuilder
from parity.debugging.attribution.gpu_memory import Memory
from parity.debugging.attribution.gpu_tensors import Between, RecordedBetween
from parity.debugging.attribution.program import Active, Births, Mark, Run
from parity.debugging.attribution.tape import Tape
from parity.interop import to_torch
from parity.op import Inputs, outputs


def mark(site: str, value: Any, where: Any = None, **steps: Any) -> Any:
    """A kernel's probe: the value, marked as that of a site of the staged golden, where it is one.

    value: a tensor, of Triton or (between kernels) of torch, or several of Triton's that sum to it. steps: as of
    a `Mark`.
    """
    builder = interpreter.interpreter_builder
    if isinstance(value, torch.Tensor):
        numbers = builder.memory.of(value.detach())
    else:
        numbers = np.sum([wide_of(piece.handle) for piece in pieces_of(value)], axis=0)
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
            self._tape, self._taped = Tape(active, place_now), Memory()
            between = RecordedBetween(errors, self._taped, self._tape)
            run = self._evaluated(RecordingBuilder, Carried(errors, self._taped, tape=self._tape), between)
            self._tape.erring = run.erring
            return run
        if self._tape.is_whole:
            run = self._replayed(self._tape, errors)
            if self._tape.is_whole:
                return run
        errors, memory = Errors(active), Memory()
        return self._evaluated(WideBuilder, Carried(errors, memory), Between(errors, memory))

    def _replayed(self, taped: Tape, errors: Errors) -> Run:
        carried = Carried(errors, self._taped)
        with tensor_core.emulated(), widened(WideBuilder, carried), np.errstate(all="ignore"), torch.no_grad():
            taped.replay(errors.active, errors.now_at)
        numbers = {name: self._taped.of(x) for name, x in outputs(taped.result).items()}
        return Run(numbers, {**taped.erred(errors.active), **errors.places}, errors.marks)

    def births(self, births: Births, fill: float = np.nan) -> Run:
        """The outputs as the kernel computes them, what is born on the way noted. fill: what memory begins as."""
        errors, memory = Errors(lambda place: True), Memory()
        with _new_memory_filled(fill):
            return self._evaluated(WatchingBuilder, Carried(errors, memory, births=births), Between(errors, memory))

    def slice(self, right: Set[int], of_finite: bool = True) -> Run:
        """The outputs in float64, and the lines that they and the marks come of."""
        errors, memory = Errors(lambda place: False), Memory()
        lines = Lines(right, memory, of_finite)
        carried = Carried(errors, memory, lines=lines)
        with contextlib.nullcontext() if of_finite else _new_memory_filled(np.nan):
            return self._evaluated(SlicingBuilder, carried, SlicedBetween(errors, memory, lines))

    def _evaluated(self, builder: type, carried: Carried, between: Between) -> Run:
        errors, memory, lines, taped = carried.errors, carried.memory, carried.lines, carried.tape
        tensors = {name: to_torch(x) for name, x in self._inputs.items() if x is not None}
        followed = lines.followed() if lines else taped.recording() if taped else contextlib.nullcontext()
        with tensor_core.emulated(), widened(builder, carried), np.errstate(all="ignore"), filled_memory():
            with followed, between, probe.probing(mark):
                result = called(self._kernel, tensors, self._arguments)
            if taped:
                taped.result = result
            found = outputs(result)
            numbers = {name: memory.of(x) for name, x in found.items()}
            if not lines:
                return Run(numbers, errors.places, errors.marks)
            of = {name: lines.of_tensor(x) for name, x in found.items()}
            return Run(numbers, errors.places, errors.marks, of, lines.executed.when)


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


def make_program(kernel: Callable[..., Any], inputs: Inputs, arguments: Mapping[str, Any]) -> TritonProgram:
    """See `parity.debugging.attribution.program`. Raises NotImplementedError where Triton compiles kernels."""
    if not tensor_core.interprets():
        raise NotImplementedError(
            "a Triton kernel is followed step by step in Triton's interpreter, which is off beside a GPU: "
            "hide the GPU (CUDA_VISIBLE_DEVICES=) to follow the kernel as it is emulated"
        )
    return TritonProgram(kernel, inputs, arguments)
