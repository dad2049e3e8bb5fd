"""A kernel's run, guarded: whatever it raises is its verdict, and what it changes in this process is put back.

Every command runs kernels through this: `Trial.run` does. A kernel that raises, be it SystemExit or KeyboardInterrupt,
is a CRASH or, for lack of memory, OOM. One that changes what the next kernel or the judge would meet (NumPy's error
handling, torch's default dtype, JAX's configuration, the environment, …) or its own inputs is DIRTY.
"""

from __future__ import annotations

import ctypes
import gc
import locale
import os
import re
import signal
import sys
import threading
import traceback
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import numpy as np

from parity.runners.supervision import PASSED_ON
from parity.words import said, shown

OUTCOMES = ("CRASH", "OOM", "DIRTY")
"""The verdicts on kernels that came to no result, or did more than return one."""
OUT_OF_MEMORY = re.compile(r"RESOURCE_EXHAUSTED|[Oo]ut of memory|OutOfMemoryError|can't allocate memory|std::bad_alloc")
FRAMES = 6
"""Frames of a traceback that are shown: the innermost ones that are not a framework's."""
FORKED = 70
"""The status of a copy of this process that a kernel forked, and that came back from it."""
_OWN = str(Path(__file__).parent)

T = TypeVar("T")


class Ended(Exception):
    """A kernel that came to no result, or did more than return one.

    outcome: one of `OUTCOMES`. reason: in one line. trace: the kernel's lines where it was, "" where none is known.
    """

    def __init__(self, outcome: str, reason: str, trace: str = "") -> None:
        super().__init__(outcome, reason, trace)
        self.outcome, self.reason, self.trace = outcome, reason, trace

    def __str__(self) -> str:
        return "\n".join(filter(None, [f"{self.outcome}  G1: {self.reason}", self.trace]))


def guarded(call: Callable[[], T]) -> T:
    """What `call` returns. Raises Ended where it raises anything, or leaves a setting of this process changed.

    Settings are put back in any case. A user's Ctrl-C is raised as it is.
    """
    modules = len(sys.modules)
    result, changed = _settled(call)
    if changed and len(sys.modules) > modules:  # importing a library may set things, and does so once
        result, changed = _settled(call)
    if changed:
        raise Ended("DIRTY", shown(f"changed {'; '.join(changed)}"))
    return result


def loaded(load: Callable[[], T]) -> T:
    """The kernel that `load` imports. Raises ImportError where something is missing, Ended as `guarded`."""
    return ending(load, besides=(ImportError,))


def ending(call: Callable[[], T], besides: tuple[type[Exception], ...] = ()) -> T:
    """What `call` returns. Raises Ended for whatever it raises but `besides`, and a user's Ctrl-C."""
    with _interrupts() as came:
        try:
            return call()
        except BaseException as error:
            if came or isinstance(error, (Ended, *besides)):
                raise
            raise _ended(error) from None


def _ended(error: BaseException) -> Ended:
    text = ""
    with suppress(BaseException):  # the class is the kernel's, and so is what its text does
        text = str(error)
    lacks_memory = isinstance(error, MemoryError) or (isinstance(error, Exception) and OUT_OF_MEMORY.search(text))
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if not frame.filename.startswith(_OWN) and "site-packages" not in frame.filename]
    lines = "".join(traceback.format_list((own or frames)[-FRAMES:])).splitlines()
    return Ended("OOM" if lacks_memory else "CRASH", said(error), "\n".join(map(shown, lines)))


@contextmanager
def _interrupts() -> Iterator[list[int]]:
    """The signals that come meanwhile: a KeyboardInterrupt without one is the kernel's own."""
    came: list[int] = []
    before: dict[int, Callable[..., Any]] = {}
    if threading.current_thread() is threading.main_thread():
        before = {number: handler for number in PASSED_ON if callable(handler := signal.getsignal(number))}

    def interrupt(number: int, frame: Any) -> None:
        came.append(number)
        before[number](number, frame)

    for number in before:
        signal.signal(number, interrupt)
    try:
        yield came
    finally:
        for number, handler in before.items():
            if signal.getsignal(number) is interrupt:
                signal.signal(number, handler)


# --- settings ---


class _Setting(NamedTuple):
    """Something of this process that every kernel and the judge meet. fresh: what a framework has when it is loaded."""

    name: str
    read: Callable[[], Any]
    write: Callable[[Any], Any]
    fresh: Callable[[], Any] = lambda: None


def _settled(call: Callable[[], T]) -> tuple[T, list[str]]:
    """What `call` returns, and the settings that it changed, in words; they are as before. Raises as `ending`."""
    process = os.getpid()
    before = {setting.name: setting.read() for setting in _settings()}
    changed: list[str] = []
    try:
        result = ending(call)
    finally:
        if os.getpid() != process:
            os._exit(FORKED)
        for setting in _settings():  # of a framework too that has been loaded meanwhile
            now = setting.read()
            then = before[setting.name] if setting.name in before else setting.fresh()
            if now != then:
                changed.append(f"{setting.name} ({_difference(then, now)})")
                setting.write(then)
    return result, changed


def _difference(then: Any, now: Any) -> str:
    if isinstance(then, Mapping) and isinstance(now, Mapping):
        return ", ".join(sorted(name for name in then.keys() | now.keys() if then.get(name) != now.get(name)))
    if isinstance(then, list | tuple):
        return "other entries"
    return f"{then} → {now}"


def _settings() -> Iterator[_Setting]:
    """Those of Python, of NumPy, and of the frameworks that are loaded."""
    yield _Setting("the environment", lambda: dict(os.environ), _put_environment)
    yield _Setting("the working directory", _folder, _put_folder)
    yield _Setting("the warnings' filters", lambda: [warnings.filters, *warnings.filters], _put_filters)
    yield _Setting("sys.path", lambda: [*sys.path], lambda path: sys.path.__setitem__(slice(None), path))
    yield _Setting("the recursion limit", sys.getrecursionlimit, sys.setrecursionlimit)
    yield _Setting("the garbage collector", gc.isenabled, lambda on: gc.enable() if on else gc.disable())
    yield _Setting("the locale", lambda: locale.setlocale(locale.LC_ALL), partial(locale.setlocale, locale.LC_ALL))
    yield _Setting("sys.stdout and sys.stderr", lambda: (sys.stdout, sys.stderr), _put_streams)
    if threading.current_thread() is threading.main_thread():
        yield _Setting("what signals do", lambda: tuple(map(signal.getsignal, _SIGNALS)), _put_handlers)
    yield _Setting("NumPy's error handling", lambda: np.geterr() | {"call": np.geterrcall()}, _put_numpy_errors)
    yield _Setting("NumPy's printing", np.get_printoptions, lambda options: np.set_printoptions(**options))
    if _LIBC:
        yield _Setting("the floating-point mode", _floating_point, _put_floating_point)
    if torch := sys.modules.get("torch"):
        yield from _torch_settings(torch)
    if jax := sys.modules.get("jax"):
        yield _Setting("JAX's configuration", lambda: _jax(jax), lambda it: _put_jax(jax, it), lambda: _fresh_jax(jax))


def _torch_settings(torch: Any) -> Iterator[_Setting]:
    def of(name: str, read: str, write: str, fresh: Any) -> _Setting:
        return _Setting(f"torch's {name}", getattr(torch, read), getattr(torch, write), lambda: fresh)

    yield of("default dtype", "get_default_dtype", "set_default_dtype", torch.float32)
    yield of("gradient mode", "is_grad_enabled", "set_grad_enabled", True)
    yield of("matmul precision", "get_float32_matmul_precision", "set_float32_matmul_precision", "highest")
    yield of("determinism", "are_deterministic_algorithms_enabled", "use_deterministic_algorithms", False)
    cpu = torch.device("cpu")
    yield _Setting(
        "torch's default device", torch.get_default_device,
        lambda device: torch.set_default_device(None if device == cpu else device), lambda: cpu,
    )  # fmt: skip
    yield _Setting("torch's threads", torch.get_num_threads, torch.set_num_threads, torch.get_num_threads)


_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGALRM, signal.SIGCHLD)
_SMALLEST_NORMAL = sys.float_info.min
_LIBC = ctypes.CDLL(None) if sys.platform == "linux" else None


def _put_environment(variables: Mapping[str, str]) -> None:
    for name in os.environ.keys() - variables.keys():
        del os.environ[name]
    os.environ.update(variables)


def _folder() -> str | None:
    with suppress(FileNotFoundError):
        return os.getcwd()  # noqa: PTH109  as os.chdir takes it
    return None


def _put_folder(folder: str | None) -> None:
    if folder is not None:
        os.chdir(folder)


def _put_filters(filters: list[Any]) -> None:
    warnings.filters, *kept = filters
    warnings.resetwarnings()  # says that they are others
    warnings.filters[:] = kept  # type: ignore[index]


def _put_streams(streams: tuple[Any, Any]) -> None:
    sys.stdout, sys.stderr = streams


def _put_handlers(handlers: tuple[Any, ...]) -> None:
    for number, handler in zip(_SIGNALS, handlers, strict=True):
        if signal.getsignal(number) != handler:
            signal.signal(number, signal.SIG_DFL if handler is None else handler)


def _put_numpy_errors(handling: Mapping[str, Any]) -> None:
    np.seterrcall(handling["call"])
    np.seterr(**{name: how for name, how in handling.items() if name != "call"})


def _floating_point() -> tuple[int, bool]:
    """How sums are rounded, and whether subnormals are kept: what libraries built with -ffast-math change."""
    return (_LIBC.fegetround() if _LIBC else 0), _SMALLEST_NORMAL / 2 > 0


def _put_floating_point(mode: tuple[int, bool]) -> None:
    if _LIBC:
        _LIBC.fesetenv(ctypes.c_void_p(-1))  # FE_DFL_ENV


def _jax(jax: Any) -> dict[str, tuple[Any, Any]]:
    """Each option's value, and what this thread has in its place (`with jax.enable_x64()` sets that)."""
    holders = jax.config._value_holders.items()  # no public name has what a thread has in an option's place
    return {name: (holder.value, getattr(holder, "get_local", bool)()) for name, holder in holders}


def _fresh_jax(jax: Any) -> dict[str, tuple[Any, Any]]:
    """As JAX has it now, which a kernel has loaded, but 64-bit types as the environment wants them."""
    on = os.environ.get("JAX_ENABLE_X64", "").lower() in ("1", "true", "yes", "on", "t", "y")
    options = _jax(jax)
    return options | {"jax_enable_x64": (on, options["jax_enable_x64"][1])}


def _put_jax(jax: Any, options: Mapping[str, tuple[Any, Any]]) -> None:
    for name, (value, local) in options.items():
        holder = jax.config._value_holders[name]
        if (holder.value, getattr(holder, "get_local", bool)()) != (value, local):
            if hasattr(holder, "set_local"):
                holder.set_local(local)
            if holder.value != value:
                jax.config.update(name, value)
