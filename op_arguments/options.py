"""Options that many functions take: named and described once, in a TypedDict or a struct, and shown by each of them."""

import inspect
from collections.abc import Callable
from functools import wraps
from typing import Any, ParamSpec, TypeVar

Front = TypeVar("Front", bound=Callable[..., Any])
P = ParamSpec("P")
R = TypeVar("R")


def options_of(*functions: Callable[..., Any]) -> Callable[[Front], Front]:
    """Give a function that hands its `**options` on to `functions` a signature with their names and defaults.

    `help`, and whoever binds a call's arguments by name, sees every option: those of the TypedDict that `**options` are
    unpacked from, or where they are `Any` all that `functions`, which may be structs, have. One that does not exist is
    a TypeError in Python's own words, of the function that was called.
    """
    inherited = {
        name: parameter
        for function in functions
        for name, parameter in inspect.signature(function).parameters.items()
        if parameter.default is not parameter.empty
    }

    def shown(front: Front) -> Front:
        signature = inspect.signature(front)
        *own, options = signature.parameters.values()
        names = inherited
        if options.annotation is not Any:
            (kind,) = options.annotation.__args__  # Unpack[kind]
            names = kind.__annotations__
        taken = signature.replace(parameters=[*own, *(inherited[name] for name in names)])
        if options.annotation is Any and all(map(inspect.isfunction, functions)):
            front.__signature__ = taken  # type: ignore[attr-defined]
            return front  # it may hand on more than it names
        return _as(front, front, taken, front.__name__)

    return shown


def variant(function: Callable[..., R], of: Callable[P, R], name: str, doc: str, without: str = "") -> Callable[P, R]:
    """`function` as another public function beside `of`: with its module, and its signature but for one option."""
    signature = inspect.signature(of)
    kept = [parameter for parameter in signature.parameters.values() if parameter.name != without]
    shown = _as(function, of, signature.replace(parameters=kept), name)
    shown.__doc__ = doc
    return shown


def _as(function: Callable[..., Any], of: Callable[..., Any], signature: inspect.Signature, name: str) -> Any:
    """`function` with the module of another one, this name and signature, refusing any other option."""

    @wraps(of)
    def shown(*arguments: Any, **options: Any) -> Any:
        if unknown := options.keys() - signature.parameters.keys():
            raise TypeError(f"{name}() got an unexpected keyword argument {min(unknown)!r}")
        return function(*arguments, **options)

    shown.__name__ = shown.__qualname__ = function.__qualname__ = name  # Python names the last in its own errors
    shown.__signature__ = signature  # type: ignore[attr-defined]
    return shown


def fused(form: Callable[P, R]) -> Callable[P, R]:
    """The function `fused_…`, which is `form` with fused=True."""
    call: Callable[..., R] = form

    def in_one_kernel(*arguments: Any, **options: Any) -> R:
        return call(*arguments, fused=True, **options)

    name = form.__name__
    doc = f"`{name}` with fused=True: ValueError where that cannot be."
    return variant(in_one_kernel, form, f"fused_{name}", doc, without="fused")
