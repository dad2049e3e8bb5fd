"""Plants faults: in a copy of the source that has a kernel's code, wherever in its package that is."""

import importlib
import importlib.util
import sys
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import NamedTuple

import pytest

from mutation.tokens import occurrences
from parity.backends import load_kernel
from parity.judging.judge import gates
from parity.ledger.sources import imported_by, reached
from parity.op import BACKENDS, Backend, Case, Op
from parity.trial import Trial
from tests.matrix import OPS
from tests.support.agreement import asked
from tests.support.interpreter import INTERPRETED

ROOT = Path(__file__).parents[3]
PACKAGES = {"tpu": "tpu_kernels", "gpu": "gpu_reference"}
OP = {op.name: op for op in OPS}


def having(**values: object) -> Callable[[Case], bool]:
    """Whether a case has these values."""
    return lambda c: all(getattr(c, name) == value for name, value in values.items())


smoke = having(tier="smoke")


@dataclass(frozen=True)
class Fault:
    """`old` becomes `new` in the code of the first of `ops` on the backend; `ops` must catch it in a case that `where`
    admits.

    `old` must occur once in what that kernel reaches, compared without comments, line breaks and indentation; which
    file has it does not matter. `within`: the definition that it is in, where others have it too. `data` takes the
    place of the cases' own.
    """

    name: str
    backend: str
    ops: tuple[str, ...]
    old: str
    new: str
    where: Callable[[Case], bool] = smoke
    data: str | None = None
    within: str = ""


def tpu(ops: str, old: str, new: str, where: Callable[[Case], bool] = smoke, **others: str) -> Fault:
    """A fault of a TPU's kernels; ops: their names, with spaces between."""
    return Fault("", "tpu", tuple(ops.split()), old, new, where, **others)


def gpu(ops: str, old: str, new: str, where: Callable[[Case], bool] = smoke, **others: str) -> Fault:
    """A fault of a GPU's kernels."""
    return replace(tpu(ops, old, new, where, **others), backend="gpu")


def named(faults: dict[str, list[Fault]]) -> list[Fault]:
    """Faults with their names."""
    return [replace(fault, name=name) for name, those in faults.items() for fault in those]


@cache
def planted() -> tuple[Fault, ...]:
    """Every fault of this folder's tests."""
    tests = sorted(path.stem for path in Path(__file__).parent.glob("test_faults*.py"))
    return tuple(fault for test in tests for fault in importlib.import_module(f"{__package__}.{test}").FAULTS)


def plant(fault: Fault, folder: Path) -> SimpleNamespace:
    """The fault's ops on its backend by name, with the fault in them."""
    return with_sources(sources_with(fault), fault.backend, fault.ops, folder)


def sources_with(fault: Fault) -> dict[str, str]:
    """The source of the module that has the fault, by its name."""
    target = getattr(OP[fault.ops[0]], fault.backend)
    found = places(target, fault.old, fault.within)
    assert len(found) == 1, f"{fault.old!r} occurs {len(found)} times in what {target} reaches: {found}"
    return edited([Edit(found[0], fault.old, fault.new)])


def planted_lines(fault: Fault) -> range:
    """The lines of the planted file that the fault is on."""
    (place,) = places(getattr(OP[fault.ops[0]], fault.backend), fault.old, fault.within)
    before, (after,) = source_of(place.module), edited([Edit(place, fault.old, fault.new)]).values()
    end = len(after) - (len(before) - place.end)
    return range(after.count("\n", 0, place.start) + 1, after.count("\n", 0, end) + 2)


def trial_of(faults: Iterable[Fault], name: str, backend: Backend, op: str, folder: Path) -> tuple[Trial, range]:
    """The first case that shows a fault, with the fault in its kernel; and the lines that were changed."""
    fault = next(f for f in faults if (f.backend, f.name) == (backend, name) and op in f.ops)
    case = next(case for case in OP[op].cases if case.tier != "full" and fault.where(case))
    return Trial(OP[op], case, backend, getattr(plant(fault, folder), op)), planted_lines(fault)


class Place(NamedTuple):
    """Code in a module: from which character to which."""

    module: str
    start: int
    end: int


def places(target: str, old: str, within: str = "") -> list[Place]:
    """Every place of `old` in what a kernel `target` ("module:function") reaches of its own package."""
    package = target.partition(".")[0]
    lines: dict[str, set[int]] = {}
    for definition in reached(target):
        module = definition.module.name
        if module.partition(".")[0] == package and (not within or within in definition.names):
            lines.setdefault(module, set()).update(range(definition.first, definition.last + 1))
    found = []
    for module in sorted(lines):
        source = source_of(module)
        for tokens in occurrences(old, source):
            first, last = (source.count("\n", 0, token.start) + 1 for token in (tokens[0], tokens[-1]))
            if not lines[module].isdisjoint(range(first, last + 1)):
                found.append(Place(module, tokens[0].start, tokens[-1].end))
    return found


class Edit(NamedTuple):
    """What is changed at a place."""

    place: Place
    old: str
    new: str


def edited(edits: list[Edit]) -> dict[str, str]:
    """The sources, as they are then, of the modules that are changed."""
    sources = {edit.place.module: source_of(edit.place.module) for edit in edits}
    for (module, start, end), old, new in sorted(edits, reverse=True):
        source = sources[module]
        sources[module] = source[:start] + _indented(old, new, source, start, end) + source[end:]
    return sources


def _indented(old: str, new: str, source: str, start: int, end: int) -> str:
    """`new` moved to the right or the left, so that its lines stand to the code around it as they do to `old`."""
    first, *more = new.strip("\n").split("\n")
    if not more:
        return new.strip()
    here = _indent(source[source.rfind("\n", 0, start) + 1 :])
    if new[0] == " ":
        shift = here - _indent(first)
    elif "\n" in old.strip():
        shift = _indent(source[source.rfind("\n", 0, end) + 1 :]) - _indent(old.rstrip().rpartition("\n")[2])
    else:
        shift = here + 4 * first.endswith(":") - min(_indent(line) for line in more if line.strip())
    moved = [" " * (_indent(line) + shift) + line.lstrip(" ") if line.strip() else "" for line in more]
    return "\n".join([first.lstrip(" "), *moved]).rstrip()


def _indent(line: str) -> int:
    return len(line) - len(line.lstrip(" "))


def with_sources(sources: dict[str, str], backend: str, ops: Collection[str], folder: Path) -> SimpleNamespace:
    """Ops of a backend by name, where these modules, which they are in or import, have other sources.

    The files are `folder/planted_tpu.py`, and of more than one module `planted_tpu1.py` and so on.
    """
    with _fresh(PACKAGES[backend]):
        for n, module in enumerate(sorted(sources, key=lambda module: len(imported_by(module)))):
            path = folder / f"planted_{backend}{n or ''}.py"
            path.write_text(sources[module])
            _load(path, module)
        return SimpleNamespace(**{name: load_kernel(getattr(OP[name], backend)) for name in ops})


@contextmanager
def _fresh(package: str) -> Iterator[None]:
    """Import every module of a package anew: one that is already loaded holds what it imported before."""
    loaded = {name: module for name, module in sys.modules.items() if name.partition(".")[0] == package}
    try:
        for name in loaded:
            del sys.modules[name]
        yield
    finally:
        for name in [name for name in sys.modules if name.partition(".")[0] == package]:
            del sys.modules[name]
        sys.modules.update(loaded)


def _load(path: Path, name: str) -> None:
    spec = importlib.util.spec_from_file_location(name, path)
    sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(sys.modules[name])


@cache
def source_of(module: str) -> str:
    """The source of a module of the project."""
    path = ROOT / module.replace(".", "/")
    return (path / "__init__.py" if path.is_dir() else path.with_suffix(".py")).read_text()


def pairs(faults: Collection[Fault], ops: Collection[Op]) -> list:
    """Parameters (fault, op): each fault with each of these ops that must catch it.

    One of every other name is in the default tier, on the TPU and on the GPU in turn; the others are in the full one.
    """
    named: dict[str, list[tuple[Fault, Op]]] = {}
    for fault in faults:
        named.setdefault(fault.name, []).extend((fault, op) for op in ops if op.name in fault.ops)
    found = []
    for nth, those in enumerate(those for those in named.values() if those):
        turn = BACKENDS[nth // 2 % 2]
        first = None if nth % 2 else next((each for each in those if each[0].backend == turn), those[0])
        for fault, op in those:
            marks = [*INTERPRETED[fault.backend], *([pytest.mark.full] if (fault, op) != first else [])]
            found.append(pytest.param(fault, op, id=f"{fault.backend}-{op.name}-{fault.name}", marks=marks))
    return found


def first_of_all(faults: Collection[Fault], ops: Collection[Op]) -> list:
    """Parameters (fault, op) as of `pairs`, each fault with the first of its ops; only the first of a backend is in the
    default tier."""
    found, begun = [], set()
    for fault in faults:
        op = next(op for op in ops if op.name == fault.ops[0])
        marks = [*INTERPRETED[fault.backend], *([pytest.mark.full] if fault.backend in begun else [])]
        begun.add(fault.backend)
        found.append(pytest.param(fault, op, id=f"{fault.backend}-{op.name}-{fault.name}", marks=marks))
    return found


def check_is_caught(fault: Fault, op: Op, folder: Path):
    """Fail unless a case of the op's default tier fails with the fault."""
    kernel = getattr(plant(fault, folder), op.name)
    tried = [case for case in op.cases if case in asked(op, fault.backend) and fault.where(case)]
    tried = tried if fault.data is None else [case.with_data(fault.data) for case in tried]
    assert tried, "no case of the default tier is there to catch it"
    verdicts = {}
    for case in tried:
        try:
            verdicts[case.id] = gates(Trial(op, case, fault.backend, kernel)).verdict
        except IndexError as error:  # an interpreter that checks bounds has caught it
            verdicts[case.id] = error
            return
        if not verdicts[case.id].passed:
            reason = verdicts[case.id].reason
            assert "NameError" not in reason, f"the fault has no such name: {reason}"
            return
    pytest.fail(f"not caught by any of {len(tried)} cases: {verdicts}")
