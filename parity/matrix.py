"""The matrix of a project: the ops named by `[tool.parity] matrix` in its pyproject.toml."""

from __future__ import annotations

import importlib
import inspect
import math
import re
import traceback
from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import Path
from types import FunctionType
from typing import Any, TypeVar

from parity import projects
from parity.declared import contract_of
from parity.dtypes import SHORT_NAMES
from parity.inputs import DISTRIBUTIONS, specs_of
from parity.op import BACKENDS, Case, CaseError, Op
from parity.words import nearest, said, shown

T = TypeVar("T")


def load(root: Path) -> tuple[Op, ...]:
    """The ops of the project at `root`: the `OPS` of the module that its pyproject.toml names.

    Raises ValueError where the setting, the module's `OPS`, or the uniqueness of their names is missing, for an
    expected failure that no case has, and, as DeclarationError, for cases whose inputs or contracts name what there is
    not.
    """
    name = module(root)
    projects.enter(root)
    ops: tuple[Op, ...] = getattr(_import(name), "OPS", ())
    if not ops:
        raise ValueError(f"{name} must define OPS, a tuple of parity.Op, got none")
    if not isinstance(ops, tuple | list) or not all(isinstance(op, Op) for op in ops):
        raise ValueError(f"{name} must define OPS, a tuple of parity.Op, got {shown(repr(ops))}")
    names = [op.name for op in ops]
    if len(set(names)) < len(names):
        raise ValueError(f"{name}.OPS must have unique names, got {', '.join(names)}")
    for op in ops:
        check(op)
        declared = {op.expectation(case) for case in op.cases}
        for n, expected in enumerate(op.expected):
            if expected not in declared:
                raise ValueError(f"{op.name}.expected[{n}] must match a case, matches none: {expected.reason}")
    return ops


@cache
def check(op: Op) -> None:
    """Raise DeclarationError for data, a pattern, a dtype or a function that there is not.

    Raises ValueError for an op without cases, for a golden that is no function, and for a size or an option that its
    cases do not have.

    Of cases that differ in sizes alone the smallest is asked.
    """
    if not op.cases:
        raise ValueError(f"op {op.name} must have cases, op.with_cases(op.grid(…)), has none")
    if not isinstance(inspect.unwrap(op.golden), FunctionType):  # records know a golden by its code
        raise ValueError(f"op {op.name}: golden must be a function, def or lambda, got {op.golden!r}")
    seen: set[object] = set()
    for case in sorted(op.cases, key=lambda case: math.prod(size for _, size in case.dims)):
        chosen = {case.data, case.dtype, case.out, *((name, str(value)) for name, value in case.options)}
        if not chosen <= seen:
            seen |= chosen
            try:
                specs_of(op, case)
                for backend in BACKENDS:
                    contract_of(op, case, backend)
            except CaseError as error:
                raise ValueError(f"op {op.name}, {error}") from error


def home(op: Op) -> Path:
    """The folder of the project whose matrix has an op: the nearest above its contract with a pyproject.toml."""
    folder = Path(inspect.unwrap(op.contract).__code__.co_filename).resolve().parent
    return next((each for each in (folder, *folder.parents) if (each / "pyproject.toml").exists()), folder)


def module(root: Path) -> str:
    """The name of the matrix's module. Raises ValueError where the project at `root` names none."""
    name = _setting(root, "matrix", "")
    if not name:
        raise ValueError(f'{root / "pyproject.toml"} must name a module of ops: [tool.parity] matrix = "tests.matrix"')
    return name


def runners(root: Path) -> dict[str, str]:
    """The labels of the runners of the project at `root`, and which device each has: "tpu:v6e", "gpu:h200"."""
    return _setting(root, "runners", dict[str, str]())


def _setting(root: Path, name: str, default: T) -> T:
    """A setting of `[tool.parity]`. Raises ValueError for one of another type than its default."""
    settings = projects.tools(root).get("parity", {})
    found = settings.get(name, default) if isinstance(settings, dict) else settings
    if not isinstance(found, type(default)):
        wanted = "a string" if isinstance(default, str) else "a table"
        where = f"{root / 'pyproject.toml'}: [tool.parity] {name}"
        raise ValueError(f"{where} must be {wanted}, got {shown(repr(found))}")
    return found


def _import(name: str) -> Any:
    """The matrix's module. Raises ValueError, which says where, for whatever importing it raises."""
    try:
        return importlib.import_module(name)
    except ImportError:
        raise
    except (Exception, SystemExit) as error:
        last = traceback.extract_tb(error.__traceback__)[-1:]
        where = "".join(f" ({frame.filename}:{frame.lineno})" for frame in last)
        raise ValueError(f"{name}, the matrix, must be importable, got {said(error)}{where}") from error


def find(ops: Iterable[Op], case_id: str) -> tuple[Op, Case]:
    """The op and the case of an id.

    Beside the cases of the matrix: those with another seed, their integer twins, and cases that are spelled alike.
    Raises ValueError for any other id.
    """
    seed = re.search(r"-s(\d+)$", case_id)
    for op in ops:
        if case_id.startswith(f"{op.name}-"):
            for case in op.cases:
                drawn = case.with_seed(int(seed[1])) if seed else case
                for same in (drawn, drawn.with_data("integers")):
                    if case_id in (same.id, re.sub(r"-s\d+$", "", same.id)):
                        return op, same
            spelled = parse(op, case_id if seed else f"{case_id}-s0")
            if spelled is not None:
                return op, spelled
    near = nearest([case.id for op in ops for case in op.cases], case_id)
    raise ValueError(
        f"case must be the id of a case of the matrix (parity list -k WORDS prints them), got {case_id}{near}"
    )


def parse(op: Op, case_id: str) -> Case | None:
    """The case that an id with its seed spells; None if it spells none.

    The op's matrix must have a case with sizes of these names. An option may have any number, or tuple of numbers, for
    its value; a word must be a value that it has in the matrix.
    """
    dtypes = {dtype for case in op.cases for dtype in (case.dtype, case.out)} | SHORT_NAMES.keys()
    pairs = {_spelled_dtypes(given, out): (given, out) for given in dtypes for out in dtypes}
    form = re.fullmatch(rf"{re.escape(op.name)}-([^-]+)-({'|'.join(map(re.escape, pairs))})(-.*)?-s(\d+)", case_id)
    if form is None:
        return None
    sizes = {name: int(size) for name, size in re.findall(r"([A-Za-z]+)(\d+)", form[1])}
    if tuple(sizes) not in {tuple(dict(case.dims)) for case in op.cases}:
        return None
    for options, data in _options(op, form[3] or "", list(op.defaults)):
        chosen: dict[str, Any] = {name: [value] for name, value in options.items()}
        (case,) = op.grid([sizes], dtype=[pairs[form[2]]], data=[data], **chosen)
        if case.with_seed(int(form[4])).id == case_id:
            return case.with_seed(int(form[4]))
    return None


def _spelled_dtypes(given: str, out: str) -> str:
    return "_".join(SHORT_NAMES.get(name, name) for name in dict.fromkeys([given, out]))


def _options(op: Op, text: str, names: list[str]) -> Iterator[tuple[dict[str, Any], str]]:
    """Every reading of the end of an id: values of the options `names`, in their order, then the data."""
    if not names:
        data = text.removeprefix("-") or "normal"
        if data in DISTRIBUTIONS:
            yield {}, data
        return
    name, *later = names
    readings = [(op.defaults[name], "")]  # left out
    words = {getattr(case, name) for case in op.cases}
    readings += [(word, f"-{word}") for word in sorted(word for word in words if isinstance(word, str))]
    if number := re.match(rf"-{name}(-?\d+(?:\.\d+|(?:x-?\d+)+)?|None|False|)(?=-|$)", text):
        readings.append((_value(number[1]), number[0]))
    for value, spelled in readings:
        rest = text.removeprefix(spelled)
        if text.startswith(spelled) and (not rest or rest.startswith("-")):
            for options, data in _options(op, rest, later):
                yield {name: value, **options}, data


def _value(spelled: str) -> Any:
    named = {"": True, "None": None, "False": False}
    if spelled in named:
        return named[spelled]
    if "." in spelled:
        return float(spelled)
    numbers = [int(number) for number in spelled.split("x")]
    return tuple(numbers) if len(numbers) > 1 else numbers[0]
