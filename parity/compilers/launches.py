"""What a function launches on a GPU that is not here: it is called with tensors that have a shape and no data."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any
from unittest import mock

from parity.compilers.mosaic import Abstract
from parity.compilers.ptx import TARGETS

PROCESSORS = {"sm_80": 108, "sm_90": 132, "sm_100": 148, "sm_120": 170, "gfx942": 304, "gfx950": 256}
"""SMs or CUs of A100, H100 SXM, B200, RTX 5090, MI300X and MI355X (data sheets): how many programs fill one."""


@dataclass(frozen=True)
class Launched:
    """A launch: the kernel, its grid, its arguments by name, those that are compiled in, and its options."""

    kernel: Any
    grid: tuple[int, ...]
    arguments: Mapping[str, Any]
    constants: Mapping[str, bool | int | float | str]
    options: Mapping[str, Any]

    @property
    def name(self) -> str:
        """The kernel's name."""
        name: str = self.kernel.fn.__name__
        return name


def launches(function: Callable[..., Any], *arguments: Any, target: str, **keywords: Any) -> list[Launched]:
    """The Triton launches of a call on a GPU, one of `parity.compilers.ptx.TARGETS`, in order; none of them runs.

    `Abstract` arguments become tensors. A function that looks at their data raises, as PyTorch's fake tensors do.
    Raises ValueError for another target.
    """
    import torch

    def tensor(value: Any) -> Any:
        if not isinstance(value, Abstract):
            return value
        return torch.empty(value.shape, dtype=getattr(torch, value.dtype), device="cuda")

    with _on(target) as seen:
        function(*map(tensor, arguments), **{name: tensor(value) for name, value in keywords.items()})
    return seen


@contextmanager
def intercepted(instead: Callable[[Launched, Callable[[], Any]], Any]) -> Iterator[None]:
    """Hand each Triton launch to `instead`, with what would run it."""
    from triton.runtime.interpreter import InterpretedFunction
    from triton.runtime.jit import JITFunction

    def handing_over(on_grid: Callable[..., Callable[..., Any]]) -> Callable[..., Callable[..., Any]]:
        return lambda kernel, grid: (
            lambda *given, **named: instead(
                _launched(kernel, grid, given, named), lambda: on_grid(kernel, grid)(*given, **named)
            )
        )

    with ExitStack() as stack:
        for kind in (JITFunction, InterpretedFunction):
            stack.enter_context(mock.patch.object(kind, "__getitem__", handing_over(kind.__getitem__)))
        yield


@contextmanager
def _on(target: str) -> Iterator[list[Launched]]:
    """The list of what is launched inside, where torch answers for this GPU and launches run nothing."""
    import torch
    from torch._subclasses.fake_tensor import FakeTensorMode

    if target not in TARGETS:
        raise ValueError(f"target must be one of {', '.join(TARGETS)}, got {target!r}")
    backend, name, _ = TARGETS[target]
    major, minor = divmod(name, 10) if isinstance(name, int) else (9, 5 if target == "gfx950" else 4)
    properties = SimpleNamespace(
        major=major, minor=minor, gcnArchName=target, multi_processor_count=PROCESSORS[target], name=target
    )
    seen: list[Launched] = []

    patches: list[Any] = [
        mock.patch.object(torch.cuda, "get_device_properties", lambda device=None: properties),
        mock.patch.object(torch.cuda, "get_device_capability", lambda device=None: (major, minor)),
        mock.patch.object(torch.cuda, "device", lambda device: nullcontext()),
        # A PyTorch that is built without CUDA refuses to copy even between tensors without data.
        mock.patch.object(torch.Tensor, "copy_", lambda into, source, non_blocking=False: into),
        mock.patch.object(torch.version, "hip", "7.0" if backend == "hip" else None),
    ]
    with ExitStack() as stack:
        for patch in patches:
            stack.enter_context(patch)
        stack.enter_context(FakeTensorMode())
        stack.enter_context(intercepted(lambda launch, run: seen.append(launch)))
        yield seen


def _launched(kernel: Any, grid: Any, given: tuple[Any, ...], named: dict[str, Any]) -> Launched:
    parameters = inspect.signature(kernel.fn).parameters
    arguments = dict(zip(parameters, given, strict=False)) | {k: v for k, v in named.items() if k in parameters}
    return Launched(
        kernel,
        tuple(grid(arguments) if callable(grid) else grid),
        arguments,
        {
            name: constant
            for parameter, value in arguments.items()
            for name, constant in _constants(parameter, value, "constexpr" in str(parameters[parameter].annotation))
        },
        {name: value for name, value in named.items() if name not in parameters},
    )


def _constants(name: str, value: Any, compiled_in: bool) -> Iterator[tuple[str, bool | int | float | str]]:
    """The plain values that are compiled in, by name: constexprs, their fields, and what is text in a structure."""
    if hasattr(value, "_asdict"):
        for field, inner in value._asdict().items():
            yield from _constants(f"{name}.{field}", inner, compiled_in)
    else:
        plain = getattr(value, "value", value)
        if isinstance(plain, str) or (isinstance(plain, bool | int | float) and (compiled_in or plain is not value)):
            yield name, plain
