"""Saves the real arguments of an operation in a training run or a server, for `parity replay`.

    gmm = capture.wrap(gmm, op="gmm")                     # once, where the model gets its kernel from

    with capture.to("bundles", every=100):                # what is called in here is saved ...
        for step in range(1000):
            with capture.at(step=step):
                state = train_step(state)

In JAX, wrapped functions work eagerly and inside jit, grad, vmap and shard_map: there a callback takes the tensors from
the device. Whether anything is saved is decided where a function is traced, so a program that was compiled outside
`to` stays as it is: enter `to` before the first call, or clear JAX's caches. `at` around a jitted call waits for its
callbacks when it ends, so that the step is theirs; with `capture.at(step=state.step)` in the traced function nothing
waits, and tensors of steps that are not saved stay on the device. What `jax.checkpoint` computes again is called
again, and saved again. In torch the tensors are copied when the function is
called; under torch.compile a saved call breaks the graph. Outside `to` a wrapped function costs one look at an
attribute, and its jaxpr is the one that it has without.

A bundle is a folder, `<op>-<layer>-step<step>-<n>`, that appears whole or not at all: `tensors.safetensors`, with the
bits of every tensor, and `manifest.json`. Nothing is ever pickled.
"""

from __future__ import annotations

import functools
import hashlib
import inspect
import json
import math
import os
import re
import shutil
import sys
import tempfile
import threading
import warnings
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, NamedTuple, ParamSpec, TypeVar

import numpy as np

from op_arguments import dtype_name
from parity.dtypes import numpy_dtype
from parity.interop import DTYPES, to_numpy

VERSION = 1
MANIFEST, TENSORS = "manifest.json", "tensors.safetensors"
STORED = {
    **{name: name for name in ("float64", "float32", "float16", "int64", "int32", "int16", "int8", "uint8", "bool")},
    "bfloat16": "uint16",
    "complex64": "uint64",
    **dict.fromkeys(("float8_e4m3fn", "float8_e5m2", "float8_e8m0fnu"), "uint8"),
}
"""What the bits of a dtype are stored as: NumPy's own dtypes as they are, others as integers of their width."""
LABEL = "at most 200 printable characters"

P = ParamSpec("P")
R = TypeVar("R")
Index = slice | tuple[slice, ...]


@dataclass(eq=False)
class Recorder:
    """Where calls are saved, and which."""

    folder: Path
    max_bytes: int
    every: int
    steps: Collection[int] | None
    count: int = 0
    # By op and layer, of calls that have no step.
    calls: dict[tuple[str, str | None], int] = field(default_factory=dict)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def wants(self, step: int) -> bool:
        """Whether calls of a step are saved."""
        return step % self.every == 0 and (self.steps is None or step in self.steps)


class Place(NamedTuple):
    """Where in a run a call is made; None: not said."""

    step: Any = None
    layer: str | None = None


class _State:
    # Of the process: a server's threads, and the one that callbacks run in, have no context of their own.
    recorder: Recorder | None = None
    # Of the contexts that are open, in the order they were entered: threads leave theirs in any order.
    places: ClassVar[dict[object, Place]] = {}

    @property
    def place(self) -> Place:
        return next(reversed(self.places.values()), _NOWHERE)


_NOWHERE = Place()
_STATE = _State()
_PLACE: ContextVar[Place] = ContextVar("_PLACE", default=_NOWHERE)
_TRACED: ContextVar[Place] = ContextVar("_TRACED", default=_NOWHERE)
"""What was said inside a function while jit traced it: it is a part of the program."""


@contextmanager
def to(
    folder: str | Path, *, max_bytes: int = 2**28, every: int = 1, steps: Collection[int] | None = None
) -> Iterator[Recorder]:
    """Save calls of wrapped functions below `folder`, which is made, until the context ends; then all are on disk.

    A call whose tensors (as cut) have more than `max_bytes` bytes is not saved, with a warning. Of the others those of
    every `every`th step are, and of them only those in `steps`. Raises ValueError for numbers that are not positive,
    and where calls are being saved already.
    """
    for name, value in {"max_bytes": max_bytes, "every": every}.items():
        if value < 1:
            raise ValueError(f"{name} must be positive, got {value}")
    if _STATE.recorder:
        raise ValueError(f"capture.to must not be nested, already saving to {_STATE.recorder.folder}")
    recorder = Recorder(Path(folder), max_bytes, every, steps)
    recorder.folder.mkdir(parents=True, exist_ok=True)
    _STATE.recorder = recorder
    try:
        yield recorder
    finally:
        try:
            _wait()
        finally:
            _STATE.recorder = None


@contextmanager
def at(*, step: Any = None, layer: str | None = None) -> Iterator[None]:
    """Say which training step (an integer, or inside jit a scalar array) and which layer calls belong to, inside `to`.

    What is not given is as outside. Calls without a step are counted, by op and layer. Raises ValueError for a layer
    that no line can show.
    """
    if _STATE.recorder is None:
        yield
        return
    if layer is not None and not is_label(layer):
        raise ValueError(f"layer must be {LABEL}, got {layer[:200]!a}")
    is_traced = _in_jit()
    said = _TRACED if is_traced else _PLACE
    token, key = said.set(_within(said.get(), step, layer)), object()
    if not is_traced:
        _STATE.places[key] = said.get()
    try:
        yield
    finally:
        said.reset(token)
        if not is_traced:
            try:
                _wait()  # or callbacks would find the next step
            finally:
                del _STATE.places[key]


def is_label(layer: str) -> bool:
    """Whether a line can show the name of a layer."""
    return len(layer) <= 200 and layer.isprintable()


def _within(outer: Place, step: Any, layer: str | None) -> Place:
    return Place(outer.step if step is None else step, outer.layer if layer is None else layer)


def _in_jit() -> bool:
    jax = sys.modules.get("jax")
    return jax is not None and isinstance(jax.numpy.zeros(()), jax.core.Tracer)


def _wait() -> None:
    """Until the callbacks of programs that still run are done."""
    if jax := sys.modules.get("jax"):
        jax.effects_barrier()


def wrap(function: Callable[P, R], *, op: str, slices: Mapping[str, Index] | None = None) -> Callable[P, R]:
    """`function` with its calls saved inside `to`, as calls of the operation of that name in the matrix.

    The function's parameters must have the operation's names. `slices` cuts tensors before they are saved, by name, as
    `numpy.s_` spells it. Only what leaves the call one of the same operation may be cut, and all tensors alike: for a
    grouped product the columns of rhs, not its rows, which group_sizes counts.
    """
    if not op.isidentifier():
        raise ValueError(f"op must be the name of an operation, got {op!r}")
    signature = inspect.signature(function)
    cuts = {name: cut if isinstance(cut, tuple) else (cut,) for name, cut in (slices or {}).items()}
    for name in cuts:
        if name not in signature.parameters:
            raise ValueError(f"slices must name parameters of {function.__name__}, got {name!r}")

    @functools.wraps(function)
    def wrapped(*args: P.args, **kwargs: P.kwargs) -> R:
        if _STATE.recorder is None:
            return function(*args, **kwargs)
        result = function(*args, **kwargs)
        torch = sys.modules.get("torch")
        save = torch.compiler.disable(_save_call) if torch else _save_call
        save(_STATE.recorder, op, cuts, signature.bind(*args, **kwargs), result)
        return result

    return wrapped


def _save_call(
    recorder: Recorder, op: str, cuts: Mapping[str, tuple[slice, ...]], bound: inspect.BoundArguments, result: Any
) -> None:
    given = {name: _plain(value) for name, value in bound.arguments.items()}
    bound.apply_defaults()
    tensors = {name: x for name, x in bound.arguments.items() if _is_tensor(x)}
    arguments = {name: _plain(value) for name, value in bound.arguments.items() if name not in tensors}
    fields = result._asdict() if hasattr(result, "_asdict") else result
    fields = fields if isinstance(fields, Mapping) else {"out": result}
    call = {
        "version": VERSION,
        "op": op,
        "arguments": {name: value for name, value in arguments.items() if name in given},
        "defaults": {name: value for name, value in arguments.items() if name not in given},
        "outputs": {name: dtype_name(x.dtype) for name, x in fields.items() if _is_tensor(x)},
        "tensors": {
            name: {
                "dtype": dtype_name(x.dtype),
                "original_shape": list(x.shape),
                "slices": _spelled(cuts.get(name, ())),
            }
            for name, x in tensors.items()
        },
    }
    tensors = {name: x[cuts[name]] if name in cuts else x for name, x in tensors.items()}
    for name, x in tensors.items():
        if dtype_name(x.dtype) not in STORED:
            raise TypeError(f"{name} must be of a dtype in {', '.join(STORED)} to be saved, got {dtype_name(x.dtype)}")
    size = sum(math.prod(x.shape) * numpy_dtype(dtype_name(x.dtype)).itemsize for x in tensors.values())
    if size > recorder.max_bytes:
        shapes = ", ".join(f"{name} {list(x.shape)}" for name, x in tensors.items())
        message = f"a call of {op} is not saved: {size} bytes, max_bytes is {recorder.max_bytes} ({shapes})"
        warnings.warn(message, stacklevel=3)
        return
    jax = sys.modules.get("jax")
    if jax and any(isinstance(x, jax.core.Tracer) for x in tensors.values()):
        _save_traced(recorder, call, tensors, _TRACED.get())
    else:
        _save(recorder, call, tensors, _PLACE.get())


def _save_traced(recorder: Recorder, call: dict[str, Any], tensors: Mapping[str, Any], place: Place) -> None:
    import jax
    import jax.numpy as jnp

    def save(step: Any, tensors: Mapping[str, Any]) -> None:
        arrays = {name: np.asarray(x) for name, x in tensors.items()}
        _save(recorder, call, arrays, _within(_STATE.place, step, place.layer))

    if place.step is None:
        jax.debug.callback(functools.partial(save, None), tensors)
        return
    wanted = jnp.asarray(place.step) % recorder.every == 0
    if recorder.steps is not None:
        wanted &= jnp.isin(place.step, jnp.asarray(sorted(recorder.steps)))
    # In the gradient of a scan JAX drops a cond that returns nothing and whose condition it knows before the tensors.
    wanted, kept = jax.lax.optimization_barrier((wanted, jax.lax.stop_gradient(dict(tensors))))
    jax.lax.cond(wanted, lambda: jax.debug.callback(save, place.step, kept), lambda: None)


def _is_tensor(value: Any) -> bool:
    return not isinstance(value, type) and hasattr(value, "shape") and hasattr(value, "dtype")


def _plain(value: Any) -> Any:
    """An argument as JSON has it: dtypes by name, tuples as lists. None for what is a tensor."""
    if _is_tensor(value):
        return None
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, tuple | list):
        return [_plain(item) for item in value]
    if dtype_name(value) in DTYPES:
        return dtype_name(value)
    raise TypeError(f"an argument must be a tensor, a number, a string, a dtype or a tuple to be saved, got {value!r}")


def _spelled(cut: tuple[slice, ...]) -> list[list[int | None]]:
    return [[part.start, part.stop, part.step] for part in cut]


# --- a bundle ---


def _save(recorder: Recorder, call: Mapping[str, Any], tensors: Mapping[str, Any], place: Place) -> None:
    step, layer = place
    with recorder.lock:
        if step is None:
            step = recorder.calls.get((call["op"], layer), 0)
            recorder.calls[call["op"], layer] = step + 1
        if not recorder.wants(int(step)):
            return
        recorder.count += 1
        number = recorder.count
    spelled = re.sub(r"[^A-Za-z0-9_.]", "_", layer or "")
    name = "-".join(filter(None, [call["op"], spelled, f"step{int(step)}", str(number)]))
    labelled = {**call, "layer": layer or "", "step": int(step)}
    write(recorder.folder / name, labelled, {name: to_numpy(x) for name, x in tensors.items()})


def write(bundle: Path, call: Mapping[str, Any], tensors: Mapping[str, np.ndarray]) -> None:
    """Write a bundle: it appears whole, under that name or, where that is taken, one with a number behind it."""
    from safetensors.numpy import save_file

    described = {
        name: {**call["tensors"][name], "shape": list(x.shape), "sha256": digest(x)} for name, x in tensors.items()
    }
    partial = Path(tempfile.mkdtemp(dir=bundle.parent, prefix=".partial-"))
    try:
        save_file({name: _as_stored(x) for name, x in tensors.items()}, partial / TENSORS)
        (partial / MANIFEST).write_text(json.dumps({**call, "tensors": described}, indent=1))
        for file in (partial / TENSORS, partial / MANIFEST):
            with file.open("rb") as written:
                os.fsync(written.fileno())
        partial.chmod(0o755)
        place, taken = bundle, 0
        while place.exists():
            taken += 1
            place = bundle.with_name(f"{bundle.name}.{taken}")
        partial.rename(place)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise


def digest(array: np.ndarray) -> str:
    """SHA-256 of a tensor's bytes, in row-major order and little-endian."""
    return hashlib.sha256(np.ascontiguousarray(array).tobytes()).hexdigest()


def _as_stored(array: np.ndarray) -> np.ndarray:
    flat = np.ascontiguousarray(array).reshape(-1)
    return flat.view(STORED[dtype_name(array.dtype)]).reshape(array.shape)
