"""Triton's interpreter in float64: its builder's operations on numbers that are wider than their dtypes."""

from __future__ import annotations

import contextlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import triton.language as tl
from triton.runtime import interpreter
from triton.runtime.interpreter import (
    ReduceOps,
    ReduceScanOpInterface,
    ScanOps,
    TensorHandle,
    _get_np_dtype,
)

from parity.backends.emulation.tensor_core import TensorCoreBuilder, scaled, sum_in_pairs
from parity.debugging.attribution.gpu_frames import Errors, place_now
from parity.debugging.attribution.gpu_memory import Memory
from parity.debugging.attribution.program import Births, Line, is_cut
from parity.debugging.attribution.tape import Tape
from parity.dtypes import Floats, numpy_dtype, round_to

if TYPE_CHECKING:
    from parity.debugging.attribution.gpu_lines import Lines

_NAMES = {
    "fp64": "float64",
    "fp32": "float32",
    "fp16": "float16",
    "bf16": "bfloat16",
    "fp8e4nv": "float8_e4m3fn",
    "fp8e5": "float8_e5m2",
}


@dataclass(frozen=True)
class Carried:
    """What the interpreter's builder has while a program is evaluated."""

    errors: Errors
    memory: Memory
    lines: Lines | None = None
    births: Births | None = None
    tape: Tape | None = None


def pieces_of(value: Any) -> Sequence[Any]:
    """The tensors of a probe's value or of a reduction, which may be several."""
    return value if isinstance(value, (tuple, list, tl.tuple)) else (value,)


@contextlib.contextmanager
def widened(wide: type, carried: Carried) -> Iterator[None]:
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
    return sum_in_pairs(data, reduction.axis, keep_dims=reduction.keep_dims)


def _summed(reduction: Any, x: Any, total: Callable[[np.ndarray], np.ndarray]) -> Any:
    if not is_float(x.handle):
        return reduction.to_tensor(total(x.handle.data), x.dtype)
    own = own_of(x.handle).view(numpy_dtype(_NAMES[x.handle.dtype.scalar.name]))
    errors = interpreter.interpreter_builder.errors
    exact = errors.add(
        total(wide_of(x.handle)),
        lambda: (total(own).astype(np.float64), total(own.astype(np.float64))),
    )
    return reduction.to_tensor(exact, x.dtype)


def _to_tensor(reduction: Any, value: Any, dtype: Any) -> Any:
    value = np.asarray(value)
    data = value if dtype.scalar.name in _NAMES else value.astype(_get_np_dtype(dtype))
    kind = tl.block_type(dtype, list(value.shape)) if value.ndim else dtype
    return tl.core.tensor(TensorHandle(np.atleast_1d(data), dtype.scalar), kind)


def is_float(handle: TensorHandle) -> bool:
    """Whether its numbers are carried in float64."""
    return handle.dtype.scalar.name in _NAMES


def wide_of(handle: TensorHandle) -> Floats:
    """The numbers in a handle of floats."""
    data: np.ndarray = handle.data
    if data.dtype == np.float64:
        return data
    return data.view(numpy_dtype(_NAMES[handle.dtype.scalar.name])).astype(np.float64)


def own_of(handle: TensorHandle) -> np.ndarray:
    """A handle's data as the interpreter has them."""
    if not is_float(handle) or handle.data.dtype != np.float64:
        return np.asarray(handle.data)
    dtype = handle.dtype.scalar
    return round_to(handle.data, _NAMES[dtype.name]).view(_get_np_dtype(dtype))


def as_own(handle: TensorHandle) -> TensorHandle:
    """The same with the data of its own dtype."""
    return TensorHandle(own_of(handle), handle.dtype)


def as_float64(handle: TensorHandle) -> TensorHandle:
    """The same as a float64, where it is of floats."""
    return TensorHandle(wide_of(handle), tl.float64) if is_float(handle) else handle


def _of_bits(result: TensorHandle, *handles: TensorHandle) -> TensorHandle:
    """An integer result, noted as of the one number whose bits are among these."""
    numbers = {id(n): n for n in (x.attr.get("number") for x in handles) if n is not None}
    if len(numbers) == 1:
        result.attr["number"] = next(iter(numbers.values()))
    return result


class WideBuilder(TensorCoreBuilder):
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
        if not any(map(is_float, handles)):
            return _of_bits(operation(*handles), *handles)
        exact = operation(*map(as_float64, handles))
        if exact.data.dtype != np.float64:
            return TensorHandle(exact.data, tl.int1 if exact.data.dtype == np.bool_ else dtype)

        def own() -> tuple[Floats, Floats]:
            rounded = [*map(as_own, handles)]
            return wide_of(operation(*rounded)), operation(*map(as_float64, rounded)).data

        return TensorHandle(self.errors.add(exact.data, own), dtype.scalar)

    def unary_op(self, arg: TensorHandle, op: Any) -> TensorHandle:
        """Elementwise op of one tensor."""
        return self._apply(arg.dtype, lambda x: super(WideBuilder, self).unary_op(x, op), arg)

    def binary_op(self, lhs: TensorHandle, rhs: TensorHandle, op: Any) -> TensorHandle:
        """Elementwise op or comparison of two tensors."""
        return self._apply(lhs.dtype, lambda x, y: super(WideBuilder, self).binary_op(x, y, op), lhs, rhs)

    def ternary_op(self, lhs: TensorHandle, rhs: TensorHandle, other: TensorHandle, op: Any) -> TensorHandle:
        """Elementwise op of three tensors, or a choice."""

        def operation(x: TensorHandle, y: TensorHandle, z: TensorHandle) -> TensorHandle:
            return super(WideBuilder, self).ternary_op(x, y, z, op)

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
            return super(WideBuilder, self).create_dot(x, y, z, input_precision, max_num_imprecise_acc)

        return self._apply(d.dtype, operation, a, b, d)

    def create_dot_scaled(self, *operands: Any) -> TensorHandle:
        """(lhs · scale) @ (rhs · scale) + acc, of operands as they are stored: exact is what becomes of them."""
        lhs, lhs_scale, lhs_format, rhs, rhs_scale, rhs_format, *how, acc = operands
        lhs, rhs = as_own(lhs), as_own(rhs)
        a, b = scaled(lhs, lhs_scale), scaled(rhs, rhs_scale, is_rhs=True)
        products = a.astype(np.float64) @ b.astype(np.float64)

        def own() -> tuple[Floats, Floats]:
            rounded, total = (lhs, lhs_scale, lhs_format, rhs, rhs_scale, rhs_format), as_own(acc)
            result = super(WideBuilder, self).create_dot_scaled(*rounded, *how, total)
            return wide_of(result), products + wide_of(total)

        return TensorHandle(self.errors.add(products + wide_of(acc), own), acc.dtype.scalar)

    def create_atomic_rmw(self, rmw_op: Any, ptr: Any, val: TensorHandle, mask: Any, sem: Any, scope: Any) -> Any:
        """In memory, as the dtype has it: what it stores is not followed."""
        return super().create_atomic_rmw(rmw_op, ptr, as_own(val), mask, sem, scope)

    def cast_impl(self, src: TensorHandle, dst_type: Any) -> TensorHandle:
        """Any cast but those of 8-bit floats."""
        return self._cast(src, dst_type, super().cast_impl)

    def create_fp_to_fp(self, src: TensorHandle, dst_type: Any, rounding_mode: Any) -> TensorHandle:
        """Casts with a rounding mode, and those of 8-bit floats."""
        return self._cast(
            src, dst_type, lambda x, dtype: super(WideBuilder, self).create_fp_to_fp(x, dtype, rounding_mode)
        )

    def _cast(
        self, src: TensorHandle, dst_type: Any, cast: Callable[[TensorHandle, Any], TensorHandle]
    ) -> TensorHandle:
        dtype = dst_type.scalar
        if dtype.name not in _NAMES:
            return cast(as_own(src), dst_type) if not is_float(src) else super().cast_impl(as_float64(src), dst_type)
        is_quantised = dtype.primitive_bitwidth == 8

        def rounded(x: Floats) -> Floats:
            # What a number becomes in 8 bits is the operation's result, and no error of it.
            return round_to(x, _NAMES[dtype.name]).astype(np.float64) if is_quantised else x

        exact = rounded(wide_of(src) if is_float(src) else src.data.astype(np.float64))

        def own() -> tuple[Floats, Floats]:
            given = as_own(src)
            true = rounded(wide_of(given)) if is_float(src) else exact
            return (true, true) if src.dtype.scalar == dtype else (wide_of(cast(given, dst_type)), true)

        return TensorHandle(self.errors.add(exact, own), dtype)

    def create_ashr(self, lhs: TensorHandle, rhs: TensorHandle) -> TensorHandle:
        """Bits moved to the right, the sign kept; the interpreter makes new handles of both."""
        return _of_bits(super().create_ashr(lhs, rhs), lhs, rhs)

    def create_bitcast(self, src: TensorHandle, dst_type: Any) -> TensorHandle:
        """The same bits as another dtype; of bits that are cut or rounded the whole number, and the cut its error."""
        result = super().create_bitcast(as_own(src), dst_type)
        if is_float(src) and not is_float(result):
            result.attr["number"] = wide_of(src)
        number = src.attr.get("number")
        if number is None or not is_float(result):
            return result
        dtype, got = result.dtype.scalar, wide_of(result)
        true = round_to(number, _NAMES[dtype.name]).astype(np.float64)
        if got.shape != true.shape or not is_cut(true, got):
            return result
        return TensorHandle(self.errors.add(number, lambda: (got, true)), dtype)

    def create_splat(self, ret_ty: Any, arg: TensorHandle) -> TensorHandle:
        """A tensor of one number."""
        if not is_float(arg):
            return super().create_splat(ret_ty, arg)
        return TensorHandle(np.full(ret_ty.shape, wide_of(arg).ravel()[0]), arg.dtype.scalar)

    def create_unsplat(self, arg: TensorHandle) -> TensorHandle:
        """The number of a tensor of one."""
        if not is_float(arg):
            return super().create_unsplat(arg)
        return TensorHandle(np.full((1,), wide_of(arg).ravel()[0]), arg.dtype.scalar)

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
        given = None if other is None else as_own(other)
        if self.tape:
            self.tape.touch(ptrs.data[np.broadcast_to(mask.data, ptrs.data.shape)])
        loaded = super().create_masked_load(ptrs, mask, given, *how)
        if not is_float(loaded):
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
        if is_float(value):
            addresses, numbers, masks = np.broadcast_arrays(ptrs.data, wide_of(value), mask.data)
            self.memory.store(addresses[masks], numbers[masks])
        return super().create_masked_store(ptrs, as_own(value), mask, *how)


_OPERATIONS = ("create_", "get_", "unary_op", "binary_op", "ternary_op", "cast_impl")
"""How the names of a builder's operations begin."""


class WrappedBuilder(WideBuilder, ABC):
    """The same, with another function in the place of each operation's."""

    def __getattribute__(self, name: str) -> Any:
        found = super().__getattribute__(name)
        return self.wrapped(name, found) if name.startswith(_OPERATIONS) else found

    @abstractmethod
    def wrapped(self, name: str, operation: Callable[..., Any]) -> Callable[..., Any]:
        """The function that an operation's is replaced by."""


class RecordingBuilder(WrappedBuilder):
    """The same, recorded."""

    tape: Tape

    def wrapped(self, name: str, operation: Callable[..., Any]) -> Callable[..., Any]:
        """The operation, recorded."""
        return partial(self.tape.recorded, name, operation)


class WatchingBuilder(WideBuilder):
    """The same, in which what is born is noted."""

    births: Births

    def _apply(self, dtype: Any, operation: Callable[..., TensorHandle], *handles: TensorHandle) -> TensorHandle:
        return self._seen(super()._apply(dtype, operation, *handles), *handles)

    def _cast(self, src: TensorHandle, dst_type: Any, cast: Callable[[TensorHandle, Any], TensorHandle]) -> Any:
        return self._seen(super()._cast(src, dst_type, cast), src)

    def _seen(self, result: TensorHandle, *operands: TensorHandle) -> TensorHandle:
        floats = [wide_of(x) for x in operands if is_float(x)]
        if not is_float(result) or result.data.dtype != np.float64:
            return result
        return TensorHandle(self.births.seen(place_now(), floats, result.data), result.dtype)
