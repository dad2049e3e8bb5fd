"""What other people's kernels take for granted of a compiled Triton, put into its interpreter.

- A float argument is a float32 scalar tensor, and a loop's index has `to`, as compiled.
- Functions of CUDA's libdevice, which the interpreter leaves without a body: the float64 result, kept to as many ulps
  as NVIDIA documents (`FUNCTIONS`). Any other is refused by name.
- An autotuned kernel runs in the last of the configurations that its own pruning leaves: nothing is timed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cache
from types import FunctionType
from typing import Any

import numpy as np
import triton.language as tl
from scipy import special
from triton.language.extra import libdevice
from triton.language.extra.cuda import libdevice as cuda_libdevice
from triton.runtime import interpreter
from triton.runtime.autotuner import Autotuner
from triton.runtime.interpreter import TensorHandle

from parity.dtypes import round_to

FUNCTIONS: dict[str, tuple[Callable[..., Any], int]] = {
    "sqrt": (np.sqrt, 0),
    "rsqrt": (lambda x: 1 / np.sqrt(x), 2),
    "exp": (np.exp, 2),
    "exp2": (np.exp2, 2),
    "exp10": (lambda x: np.power(10.0, x), 2),
    "expm1": (np.expm1, 1),
    "log": (np.log, 1),
    "log2": (np.log2, 1),
    "log10": (np.log10, 2),
    "log1p": (np.log1p, 1),
    "sin": (np.sin, 2),
    "cos": (np.cos, 2),
    "tan": (np.tan, 4),
    "atan": (np.arctan, 2),
    "atan2": (np.arctan2, 3),
    "sinh": (np.sinh, 3),
    "cosh": (np.cosh, 2),
    "tanh": (np.tanh, 2),
    "asinh": (np.arcsinh, 3),
    "cbrt": (np.cbrt, 1),
    "hypot": (np.hypot, 3),
    "erf": (special.erf, 2),
    "erfc": (special.erfc, 4),
    "pow": (np.power, 4),
    "abs": (np.abs, 0),
    "floor": (np.floor, 0),
    "ceil": (np.ceil, 0),
    "trunc": (np.trunc, 0),
    "rint": (np.rint, 0),
    "nearbyint": (np.rint, 0),
    "round": (lambda x: np.copysign(np.floor(np.abs(x) + 0.5), x), 0),
}
"""By name: the function in float64, and the ulps that its float32 result may be off.

Those are of the CUDA C++ Programming Guide, Mathematical Functions, "Single-Precision Mathematical Standard Library
Functions with Maximum ULP Error", counted from the correctly rounded result. Editions of CUDA 11 allow `pow` 8 or 9.
"""
_MODULES = (libdevice, cuda_libdevice)


class Index(int):
    """A loop's index: a number with the `to` of the scalar tensor that it is in a compiled kernel."""

    def to(self, dtype: Any, **options: Any) -> Any:
        """A scalar tensor of another dtype."""
        return interpreter.interpreter_semantic.to_tensor(int(self)).to(dtype, **options)


def _as_index(name: str) -> Callable[..., Any]:
    operation = getattr(int, name)

    def of(self: Index, other: Any) -> Any:
        result = operation(self, other)
        return Index(result) if isinstance(result, int) else result

    return of


for _name in ("add", "sub", "mul", "floordiv", "mod"):
    for _side in ("", "r"):
        setattr(Index, f"__{_side}{_name}__", _as_index(f"__{_side}{_name}__"))


def indices(bounds: Callable[..., Any]) -> Callable[..., Iterator[Index]]:
    """A range whose numbers are `Index`es."""
    return lambda *given, **options: map(Index, bounds(*given, **options))


def patches() -> Iterator[tuple[Any, str, Any]]:
    """The patches (owner, name, value) of Triton."""
    convert, prune = interpreter._implicit_cvt, Autotuner.prune_configs

    def implicit_cvt(argument: Any) -> Any:
        if type(argument) is float:
            return tl.tensor(TensorHandle(np.array([argument], np.float32), tl.float32), tl.float32)
        return convert(argument)

    yield interpreter, "_implicit_cvt", implicit_cvt
    yield Autotuner, "prune_configs", lambda tuner, arguments: prune(tuner, arguments)[-1:]
    yield Autotuner, "_bench", lambda *given, **options: 0.0  # Triton 3.6 and 3.7 time a single configuration too
    yield tl, "range", indices(tl.range)
    for module in _MODULES:
        for name, value in vars(module).items():
            if _is_libdevice(value):
                yield module, name, function(name)


class Globals:
    """The globals of kernels' modules, with what `patches` cannot reach; given back by `restore`."""

    def __init__(self) -> None:
        self._before: dict[int, tuple[dict[str, Any], dict[str, Any]]] = {}

    def adopt(self, kernel: Callable[..., Any]) -> None:
        """Let a kernel's module have `range` and the functions of libdevice as they are here."""
        names: dict[str, Any] = kernel.__globals__
        if id(names) in self._before:
            return
        found = {name: value for name, value in names.items() if _is_libdevice(value)}
        self._before[id(names)] = names, found
        names.update({name: function(value.__name__) for name, value in found.items()})
        if "range" not in names:
            names["range"] = _RANGE

    def restore(self) -> None:
        """Give back the globals as they were."""
        for names, found in self._before.values():
            names.update(found)
            if names.get("range") is _RANGE:
                del names["range"]
        self._before.clear()


_RANGE = indices(range)


def _is_libdevice(value: Any) -> bool:
    return isinstance(value, FunctionType) and value.__module__ in {module.__name__ for module in _MODULES}


@cache
def function(name: str) -> Callable[..., Any]:
    """The libdevice function of that name, on tensors of float32 or float64.

    Called, it raises NotImplementedError where it is not in `FUNCTIONS`, TypeError for tensors of other dtypes.
    """

    def call(*given: Any, **options: Any) -> Any:
        if name not in FUNCTIONS and name != "fma":
            raise NotImplementedError(f"libdevice.{name} must be one that is emulated: {', '.join(FUNCTIONS)}, fma")
        semantic = interpreter.interpreter_semantic
        first, *others = (semantic.to_tensor(x) for x in given)
        for other in others:
            first, _ = semantic.broadcast_impl_value(first, other)
        operands = [first, *(semantic.broadcast_impl_value(other, first)[0] for other in others)]
        dtype = first.dtype.scalar
        if any(x.dtype.scalar != dtype for x in operands) or dtype not in (tl.float32, tl.float64):
            got = ", ".join(str(x.dtype) for x in operands)
            raise TypeError(f"libdevice.{name} must get tensors all of fp32 or all of fp64, got {got}")
        if name == "fma":  # rounded once, which no float64 sum is
            return tl.tensor(semantic.builder.create_fma(*(x.handle for x in operands)), first.type)
        operation, ulps = FUNCTIONS[name]
        with np.errstate(all="ignore"):
            values = operation(*(x.handle.data.astype(np.float64) for x in operands))
        if dtype == tl.float32:
            values = round_to(values, f"float32/{1 << ulps.bit_length() - 1}" if ulps > 1 else "float32")
        return tl.tensor(TensorHandle(values, dtype), first.type)

    call.__name__ = name
    return call
