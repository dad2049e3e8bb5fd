"""What an op declares, checked where it comes in: each error names the op, the case, the field and what there is."""

from __future__ import annotations

import inspect
import math
import re
from collections.abc import Callable, Mapping
from dataclasses import fields
from functools import cache
from types import FunctionType
from typing import Any

import numpy as np

from cpu_golden.stages import Stages
from parity.contact.assumptions import ASSUMPTIONS
from parity.dtypes import Floats, numpy_dtype
from parity.interop import DTYPES
from parity.ledger.sources import ANYTHING, labels, texts
from parity.op import (
    BACKENDS,
    Array,
    Backend,
    Case,
    Contract,
    Gates,
    Given,
    Groups,
    Inputs,
    Offsets,
    Op,
    OutputsError,
    Scales,
    outputs,
)
from parity.words import one_of


class DeclarationError(ValueError):
    """An op that declares what cannot be judged."""

    def __init__(self, op: Op, case: Case, field: str, what: str) -> None:
        super().__init__(f"op {op.name}, case {case.id}: {field} {what}")


def contract_of(op: Op, case: Case, backend: Backend) -> Contract:
    """What the op's contract is for a case on a backend. Raises DeclarationError where it is none."""
    try:
        contract = op.contract(case, backend)
    except (TypeError, ValueError) as error:
        raise DeclarationError(op, case, f"contract of the {backend}:", str(error)) from error
    if not isinstance(contract, Contract):
        raise DeclarationError(op, case, "contract", f"must return a parity.Contract, got {type(contract).__name__}")
    for name in contract.unless.keys() - _PROPERTIES:
        raise DeclarationError(op, case, "contract.unless", one_of(sorted(_PROPERTIES), name))
    for site, names in contract.functions.items():
        field = f"contract.functions[{site!r}]"
        if isinstance(names, str):
            raise DeclarationError(op, case, field, f"must be a tuple of names, got {names!r}")
        for name in set(names) - _FUNCTIONS:
            raise DeclarationError(op, case, field, one_of(sorted(_FUNCTIONS), name))
    return contract


_FUNCTIONS = {assumption.name for assumption in ASSUMPTIONS}
_PROPERTIES = {assumption.name for assumption in ASSUMPTIONS if assumption.holds is not None}


def golden_of(op: Op, case: Case, inputs: Inputs, stages: Stages | None = None) -> dict[str, Any]:
    """The golden's outputs on these inputs, by name: float64, unless the op is compared bit for bit.

    Raises DeclarationError for a golden that does not take what it is given, or returns something else.
    """
    given = {**inputs, **op.arguments(case)} | ({} if stages is None else {"stages": stages})
    try:
        signature = inspect.signature(op.golden)
    except (TypeError, ValueError):
        raise DeclarationError(op, case, "golden", f"must be a function, got {op.golden!r}") from None
    taken = signature.parameters
    if not any(p.kind is p.VAR_KEYWORD for p in taken.values()):
        for name in given.keys() - taken.keys():
            if name == "stages":
                raise DeclarationError(op, case, "golden", "must take stages, as what its contract rounds is named")
            field = "inputs" if name in inputs else "arguments"
            raise DeclarationError(op, case, field, one_of([n for n in taken if n != "stages"], name))
    for name, parameter in taken.items():
        if parameter.default is parameter.empty and parameter.kind in _NAMED and name not in given:
            got = ", ".join(given)
            raise DeclarationError(op, case, "inputs", f"must have {name}, which the golden takes, got {got}")
    try:
        found = outputs(op.golden(**given))
    except OutputsError as error:
        raise DeclarationError(op, case, "golden", str(error)) from None
    for name, y in found.items():
        what = f"{y.dtype} array" if isinstance(y, np.ndarray | np.generic) else type(y).__name__
        if not op.bit_exact and what != "float64 array":
            raise DeclarationError(op, case, "golden", f"must return float64 arrays, got a {what} as {name}")
    return found


_NAMED = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)


def checked_magnitude(op: Op, case: Case, inputs: Inputs, golden: Mapping[str, Floats]) -> dict[str, Floats]:
    """Σ|terms| by output, where the op derives it. Raises DeclarationError where it is not the golden's in form."""
    if op.magnitude is None or op.bit_exact:
        return {}
    if op.chain is None:
        raise DeclarationError(op, case, "chain", "must be given where magnitude is")
    try:
        found = outputs(op.magnitude(op, case, inputs))
    except OutputsError as error:
        raise DeclarationError(op, case, "magnitude", str(error)) from None
    for name in [*found, *golden]:
        if name not in golden:
            raise DeclarationError(op, case, "magnitude", f"must be of the golden's outputs: {one_of(golden, name)}")
        if name not in found:
            raise DeclarationError(op, case, "magnitude", f"must have each output, lacks {name}")
        shapes = np.shape(found[name]), golden[name].shape
        if shapes[0] != shapes[1]:
            what = f"of {name} must have its shape {list(shapes[1])}, got {list(shapes[0])}"
            raise DeclarationError(op, case, "magnitude", what)
        if np.any(found[name] < 0):
            raise DeclarationError(op, case, "magnitude", f"of {name} must be at least 0, got {np.nanmin(found[name])}")
    return found


def checked_chain(op: Op, case: Case, inputs: Inputs) -> int:
    """The longest chain of additions; 0 where none is derived. Raises DeclarationError for anything but a number."""
    chain = 0 if op.chain is None else op.chain(case, inputs)
    if not isinstance(chain, int | np.integer) or chain < 0:
        raise DeclarationError(op, case, "chain", f"must return how many additions there are, got {chain!r}")
    return int(chain)


def checked_axes(
    op: Op, case: Case, inputs: Inputs, golden: Mapping[str, Floats]
) -> Mapping[str, Mapping[str, np.ndarray]]:
    """The labels of outputs and inputs by name; others may be of what other cases have.

    Raises DeclarationError for labels that do not fit what they are of, and where no output has any.
    """
    found = op.axes(case, inputs)
    if found and not found.keys() & golden.keys():
        raise DeclarationError(op, case, "axes", one_of(golden, next(iter(found))))
    shapes = {name: np.shape(x) for name, x in {**inputs, **golden}.items() if x is not None}
    for name, of_axes in found.items():
        if name not in shapes:
            continue
        for axis, label in of_axes.items():
            try:
                fits = np.broadcast_shapes(np.shape(label), shapes[name]) == shapes[name]
            except ValueError:
                fits = False
            if not fits:
                what = f"must broadcast to {list(shapes[name])}, got {list(np.shape(label))}"
                raise DeclarationError(op, case, f"axes[{name!r}][{axis!r}]", what)
    return found


def steps_of(op: Op, case: Case, contract: Contract, **others: Any) -> dict[str, Any]:
    """The fields of the golden's `Stages` under a contract. Raises DeclarationError for one that it does not have."""
    steps = {**op.steps(case, contract), **others}
    for name in steps.keys() - _STEPS:
        raise DeclarationError(op, case, "steps and contract.schedule", one_of(sorted(_STEPS), name))
    return steps


_STEPS = {field.name for field in fields(Stages)} - {"rounding", "runs"}


def check_sites(op: Op, case: Case, contract: Contract, reached: set[str]) -> None:
    """Raise DeclarationError for a site of the contract that the golden does not have.

    It may have one that it did not reach: there may be nothing to round in this case.
    """
    for site in contract.sites.keys() - reached:
        if not _speaks_of(site, op.golden, texts) and not _has(op, site):
            raise DeclarationError(op, case, "contract.sites", one_of(sorted(reached), site))


def check_outs(op: Op, case: Case, contract: Contract, golden: Mapping[str, Floats]) -> None:
    """Raise DeclarationError for a name in `contract.outs` that is no output of the golden, in this case or another."""
    for name in contract.outs.keys() - golden.keys():
        if not _speaks_of(name, op.golden, texts, labels) and not _has(op, name):
            raise DeclarationError(op, case, "contract.outs", one_of(golden, name))


@cache
def _speaks_of(name: str, golden: Callable[..., Any], *kinds: Callable[[FunctionType], frozenset[str]]) -> bool:
    """Whether a golden's code has a name among its texts or labels; True where the code cannot be read."""
    function = inspect.unwrap(golden)
    if not isinstance(function, FunctionType):
        return True
    try:
        return any(re.fullmatch(text, name) for kind in kinds for text in kind(function) if text != ANYTHING)
    except (ModuleNotFoundError, OSError, SyntaxError):
        return True


def _has(op: Op, name: str) -> bool:
    """Whether some case reaches a site of that name or returns such an output.

    Only running the golden tells, and only a golden with an f-string that is all placeholders needs it: its cases run,
    the smallest first, until one has the name.
    """
    ordered = sorted(op.cases, key=lambda case: math.prod(size for _, size in case.dims))
    filled_in = ANYTHING in texts(inspect.unwrap(op.golden))
    return filled_in and any(name in _names(op, case, backend) for case in ordered for backend in BACKENDS)


@cache
def _names(op: Op, case: Case, backend: Backend) -> frozenset[str]:
    """The sites that the golden reaches in a case, and its outputs."""
    from parity.inputs import draw  # which checks what is declared

    reached: set[str] = set()

    def watch(site: str, value: Floats) -> Floats:
        reached.add(site)
        return value

    with np.errstate(all="ignore"):
        found = golden_of(op, case, draw(op, case), Stages(watch, **steps_of(op, case, contract_of(op, case, backend))))
    return frozenset(reached | found.keys())


def check_spec(op: Op, case: Case, name: str, spec: Any) -> None:
    """Raise DeclarationError where an input is no specification that can be drawn."""
    field = f"inputs[{name!r}]"
    if spec is None or isinstance(spec, Given):
        return
    if not isinstance(spec, Array | Scales | Groups | Offsets | Gates):
        kinds = "Array, Scales, Groups, Offsets, Gates, Given or None"
        raise DeclarationError(op, case, field, f"must be a parity.{kinds}, got {type(spec).__name__}")
    if isinstance(spec, Array | Scales | Gates):
        sizes = spec.shape if isinstance(spec.shape, tuple) else ()
        if spec.shape != () and not (sizes and all(isinstance(n, int | np.integer) and n >= 0 for n in sizes)):
            raise DeclarationError(op, case, field, f"must have a tuple of sizes as its shape, got {spec.shape!r}")
        try:
            numpy_dtype(spec.dtype)
        except TypeError:
            raise DeclarationError(op, case, f"{field}.dtype", one_of(DTYPES, spec.dtype)) from None
    axis, axes = getattr(spec, "sum_over", None), len(getattr(spec, "shape", ()))
    if axis is not None and not -axes <= axis < axes:
        raise DeclarationError(op, case, f"{field}.sum_over", f"must be one of {axes} axes, got {axis}")


def checked_unread(op: Op, case: Case, drawn: Inputs) -> Mapping[str, np.ndarray]:
    """What poison goes into, by input. Raises DeclarationError where nothing is said to be unread, or no mask fits."""
    found = op.unread(case, drawn)
    if not found:
        what = f"must say what is not read, for data {case.data} to be told apart from normal ones; it names nothing"
        raise DeclarationError(op, case, "unread", what)
    for name, mask in found.items():
        if name not in drawn:
            raise DeclarationError(op, case, "unread", one_of(drawn, name))
        x = drawn[name]
        if x is not None and (np.shape(mask) != x.shape or np.asarray(mask).dtype != bool):
            got = f"{np.asarray(mask).dtype} {list(np.shape(mask))}"
            raise DeclarationError(op, case, f"unread[{name!r}]", f"must be a bool mask {list(x.shape)}, got {got}")
    return found
