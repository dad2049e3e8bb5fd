"""Probes: what sees a kernel's intermediate results, and may put others in their place.

A kernel calls `probe(site, value)` wherever the golden of its operation has a site of that name. Without an active
probe that is the value itself. What traces or compiles a kernel has to make `active()` part of what it caches by; the
kernels of Triton call `probe` where they are interpreted only.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

Probe = Callable[..., Any]
"""probe(site, value, where=None, **steps) -> what takes the place of the value.

value is the golden's at that site wherever `where` is (None: everywhere). It may be a tuple, of arrays that sum to it.
steps: fields of the golden's stages with which it takes the kernel's steps, e.g. how many products it sums at once.
"""
Rename = Callable[[str], str | None]

_active: ContextVar[Probe | None] = ContextVar("active probe", default=None)


def active() -> Probe | None:
    """The probe that kernels called here show their intermediate results to."""
    return _active.get()


@contextmanager
def probing(probe: Probe | None) -> Iterator[None]:
    """Show the intermediate results of kernels called inside to `probe`; None hides them."""
    token = _active.set(probe)
    try:
        yield
    finally:
        _active.reset(token)


@contextmanager
def renamed(rename: Rename) -> Iterator[None]:
    """Show the sites of kernels called inside under other names: `rename(site)`, None of one that is not to be shown.

    Without an active probe it does nothing. A `rename` that is defined once, not anew in each call, lets what was
    compiled for a probe be found again.
    """
    current = active()
    with probing(None if current is None else _Renamed(current, rename)):
        yield


def probe(site: str, value: Any, where: Any = None, **steps: Any) -> Any:
    """The value, or what the active probe puts in its place."""
    current = _active.get()
    return value if current is None else current(site, value, where, **steps)


@dataclass(frozen=True)
class _Renamed:
    probe: Probe
    rename: Rename

    def __call__(self, site: str, value: Any, where: Any = None, **steps: Any) -> Any:
        name = self.rename(site)
        return value if name is None else self.probe(name, value, where, **steps)
