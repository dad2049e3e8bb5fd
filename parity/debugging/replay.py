"""`parity replay BUNDLE`: a call that `parity.capture` saved, as a case with the full verdict.

A bundle comes from elsewhere, and nothing in it is believed: every size is checked against the file before memory is
taken for it, names cannot lead anywhere, and what the manifest does not describe is refused. The case is found by the
operation's own declarations: the sizes, dtypes and options for which the matrix would ask for tensors of just these
shapes, with just these arguments. What those declarations do not describe is refused too, never judged as something
else.
"""

from __future__ import annotations

import math
import os
import resource
import stat
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np

from parity.debugging.capture import LABEL, MANIFEST, STORED, TENSORS, VERSION, digest, is_label
from parity.dtypes import numpy_dtype
from parity.judging.judge import Judgement, judge
from parity.ledger.read import strict_json
from parity.op import Backend, Case, Groups, Offsets, Op
from parity.trial import Trial
from parity.words import shown

MANIFEST_BYTES = 2**20
BYTES = 2**32
"""Of all tensors of a bundle together."""
RANK = 8
SHOWN = 4
"""Names of a folder's files in an error."""
TENSOR_LIMIT = 64
DATA = "given"
"""What the data of a replayed case are called."""


class BundleError(ValueError):
    """A bundle that cannot be trusted: which file, what is wrong there, what it has to be."""


@dataclass(frozen=True, eq=False)
class Bundle:
    """A call that was saved. tensors: by argument name. arguments: the others. outputs: the dtypes of its results."""

    op: str
    step: int
    layer: str
    tensors: Mapping[str, np.ndarray]
    arguments: Mapping[str, Any]  # as they were given
    defaults: Mapping[str, Any]  # and what the function had for those that were not
    outputs: Mapping[str, str]


# --- reading ---


def read(folder: Path) -> Bundle:
    """The bundle in a folder. Raises BundleError for anything that is not what `parity.capture` writes."""
    try:
        return _read(folder)
    except OSError as error:
        raise BundleError(f"{folder}: must be readable, got {type(error).__name__}: {error.strerror}") from None


def _read(folder: Path) -> Bundle:
    if folder.is_symlink() or not folder.is_dir():
        raise BundleError(f"{folder}: must be the folder of a bundle, got {_kind(folder)}")
    inside = sorted(path.name for path in folder.iterdir())
    if MANIFEST not in inside and (call := next((name for name in inside if (folder / name / MANIFEST).exists()), "")):
        raise BundleError(f"{folder}: must be the folder of one call, for instance {shown(str(folder / call))}")
    if inside != [MANIFEST, TENSORS]:
        listed = [*inside[:SHOWN], *([f"{len(inside) - SHOWN} more"] if len(inside) > SHOWN else [])]
        got = shown(", ".join(listed) or "nothing")
        raise BundleError(f"{folder}: must hold {MANIFEST} and {TENSORS} alone, got {got}")
    for name in inside:
        if not stat.S_ISREG((folder / name).lstat().st_mode):
            raise BundleError(f"{folder / name}: must be a plain file, got {_kind(folder / name)}")
    manifest = _manifest(folder / MANIFEST)
    tensors = _tensors(folder / TENSORS, manifest["tensors"])
    kept = ("op", "step", "layer", "arguments", "defaults", "outputs")
    return Bundle(tensors=tensors, **{name: manifest[name] for name in kept})


def _kind(path: Path) -> str:
    if path.is_symlink():
        return "a symbolic link"
    return (
        "nothing" if not path.exists() else "a folder" if path.is_dir() else "a file" if path.is_file() else "neither"
    )


def _manifest(path: Path) -> dict[str, Any]:
    size = path.stat().st_size
    if size > MANIFEST_BYTES:
        raise BundleError(f"{path}: must have at most {MANIFEST_BYTES} bytes, got {size}")
    try:
        manifest = strict_json(path.read_bytes())
    except (ValueError, RecursionError) as error:
        raise BundleError(f"{path}: must be JSON, got what is not: {error}") from None
    check = _Checker(path)
    check.keys("manifest", manifest, {
        "version": int, "op": str, "layer": str, "step": int, "arguments": dict, "defaults": dict, "outputs": dict,
        "tensors": dict,
    })  # fmt: skip
    if manifest["version"] != VERSION:
        raise BundleError(f"{path}: version must be {VERSION}, got {manifest['version']}")
    check.name("op", manifest["op"])
    check.label("layer", manifest["layer"])
    check.number("step", manifest["step"])
    for group in ("arguments", "defaults"):
        for name, value in manifest[group].items():
            check.name(f"a name in {group}", name)
            check.plain(f"{group}[{name!r}]", value)
    for name, dtype in manifest["outputs"].items():
        check.name("a name in outputs", name)
        check.dtype(f"outputs[{name!r}]", dtype)
    if len(manifest["tensors"]) > TENSOR_LIMIT:
        raise BundleError(f"{path}: tensors must be at most {TENSOR_LIMIT}, got {len(manifest['tensors'])}")
    total = 0
    for name, described in manifest["tensors"].items():
        check.name("a name in tensors", name)
        where = f"tensors[{name!r}]"
        check.keys(where, described, {
            "dtype": str, "shape": list, "sha256": str, "original_shape": list, "slices": list,
        })  # fmt: skip
        check.dtype(f"{where}.dtype", described["dtype"])
        check.shape(f"{where}.shape", described["shape"])
        check.shape(f"{where}.original_shape", described["original_shape"])
        # A size of zero makes the others no smaller: results have them.
        total += math.prod(max(size, 1) for size in described["shape"]) * numpy_dtype(described["dtype"]).itemsize
    if total > BYTES:
        raise BundleError(f"{path}: tensors must have at most {BYTES} bytes, got {total}")
    return manifest


@dataclass(frozen=True)
class _Checker:
    path: Path

    def fail(self, what: str, wanted: str, got: Any) -> None:
        raise BundleError(f"{self.path}: {what} must be {wanted}, got {str(got)[:80]!r}")

    def keys(self, what: str, value: Any, types: Mapping[str, type]) -> None:
        if not isinstance(value, dict) or value.keys() != types.keys():
            self.fail(what, f"an object of {', '.join(types)}", ", ".join(value) if isinstance(value, dict) else value)
        for name, kind in types.items():
            if type(value[name]) is not kind:
                self.fail(f"{what}.{name}", f"of JSON's type for {kind.__name__}", value[name])

    def name(self, what: str, value: str) -> None:
        if not value.isidentifier() or len(value) > 100:
            self.fail(what, "a Python name", value)

    def label(self, what: str, value: str) -> None:
        if not is_label(value):
            self.fail(what, LABEL, value)

    def number(self, what: str, value: int) -> None:
        if abs(value) >= 2**63:
            self.fail(what, "below 2^63", value)

    def dtype(self, what: str, value: Any) -> None:
        if not isinstance(value, str) or value not in STORED:
            self.fail(what, f"one of {', '.join(STORED)}", value)

    def shape(self, what: str, value: list[Any]) -> None:
        if len(value) > RANK or not all(type(size) is int and 0 <= size < 2**31 for size in value):
            self.fail(what, f"at most {RANK} sizes from 0 to 2^31", value)

    def plain(self, what: str, value: Any) -> None:
        items = value if isinstance(value, list) else [value]
        simple = all(
            x is None or (isinstance(x, bool | int | float | str) and len(str(x)) <= 100 and str(x).isprintable())
            for x in items
        )
        if not simple or len(items) > 16:
            self.fail(what, "null, a number, a short printable string, or a few of them", value)


def _tensors(path: Path, described: Mapping[str, Mapping[str, Any]]) -> dict[str, np.ndarray]:
    from safetensors import SafetensorError, safe_open

    data = sum(math.prod(d["shape"]) * numpy_dtype(d["dtype"]).itemsize for d in described.values())
    size = path.stat().st_size
    if not data < size <= data + MANIFEST_BYTES:
        raise BundleError(f"{path}: must hold the manifest's {data} bytes of tensors and a header, got {size} bytes")
    tensors: dict[str, np.ndarray] = {}
    try:
        with safe_open(path, framework="numpy") as file:
            if set(file.keys()) != described.keys():
                raise BundleError(
                    f"{path}: must hold the manifest's tensors {', '.join(described)}, got {', '.join(file.keys())}"
                )
            for name, wanted in described.items():
                stored = file.get_slice(name)
                if stored.get_shape() != wanted["shape"]:
                    raise BundleError(f"{path}: {name} must have shape {wanted['shape']}, got {stored.get_shape()}")
                array = file.get_tensor(name)
                if str(array.dtype) != STORED[wanted["dtype"]]:
                    raise BundleError(f"{path}: {name} must be {STORED[wanted['dtype']]}, got {array.dtype}")
                if (found := digest(array)) != wanted["sha256"]:
                    raise BundleError(f"{path}: {name} must have the manifest's sha256 {wanted['sha256']}, got {found}")
                tensors[name] = array.reshape(-1).view(numpy_dtype(wanted["dtype"])).reshape(array.shape)
    except (SafetensorError, OSError, TypeError, KeyError, UnicodeDecodeError) as error:
        raise BundleError(f"{path}: must be a safetensors file, got {type(error).__name__}: {error}") from None
    return tensors


# --- which case it is ---


def case_of(op: Op, bundle: Bundle) -> Case:
    """The case for which the op asks for these tensors and arguments. Raises ValueError where there is none.

    Options are tried from those of the matrix, from the arguments, and as pairs of an argument and a size; sizes follow
    from the shapes. Whatever is found is held against the op's own declarations, so a wrong guess costs nothing.
    """
    call = _Call.of(op, bundle)
    starts = [case for case in (_with_sizes(op, call, template) for template in _templates(op)) if case is not None]
    best: tuple[float, Case] | None = None
    tried: Counter[tuple[str, ...]] = Counter()
    for start in sorted(starts, key=lambda case: call.distance(op, case)):
        names = tuple(name for name, _ in start.dims)
        tried[names] += 1
        if tried[names] > STARTS:
            continue
        found = _fit(op, call, start)
        if best is None or found[0] < best[0]:
            best = found
        if best[0] < 1:
            return best[1].with_data(DATA)
    if best is None:
        shapes = ", ".join(f"{name} {list(x.shape)}" for name, x in call.tensors.items())
        raise ValueError(f"bundle must be a call of {op.name}, whose tensors have other shapes than {shapes}")
    wrong = "; ".join(call.differences(op, best[1]))
    raise ValueError(f"bundle must be a call that a case of {op.name} describes; nearest is {best[1].id}, but: {wrong}")


@dataclass(frozen=True, eq=False)
class _Call:
    tensors: Mapping[str, np.ndarray]
    arguments: Mapping[str, Any]
    given: frozenset[str]
    outputs: Mapping[str, str]

    @classmethod
    def of(cls, op: Op, bundle: Bundle) -> _Call:
        """A tensor that is an argument of the op, not an input, is a number: an index on the device."""
        inputs = {name for case in op.cases for name in op.inputs(case)}
        numbers = {n: x.item() for n, x in bundle.tensors.items() if n not in inputs and x.size == 1}
        tensors = {n: x for n, x in bundle.tensors.items() if n not in numbers}
        arguments = {**bundle.defaults, **bundle.arguments, **numbers}
        given = frozenset(n for n, value in bundle.arguments.items() if value is not None) | numbers.keys()
        return cls(tensors, {n: _tuples(x) for n, x in arguments.items()}, given, bundle.outputs)

    def differences(self, op: Op, case: Case) -> Iterator[str]:
        """What the op asks for in that case and the call does not have, or has otherwise, in words."""
        specs = {name: spec for name, spec in op.inputs(case).items() if spec is not None}
        for name in sorted(specs.keys() | self.tensors.keys()):
            wanted = _form(specs[name]) if name in specs else "no tensor"
            x = self.tensors.get(name)
            got = "no tensor" if x is None else f"{x.dtype}{list(x.shape)}"
            if wanted != got:
                yield f"{name} is {got}, not {wanted}"
        asked = {**op.arguments(case), **op.route(case)}
        for name in sorted((asked.keys() | (self.given - self.tensors.keys())) - set(op.indifferent)):
            if name not in asked:
                if self.arguments[name] is not False:
                    yield f"{name} is {self.arguments[name]!r}, which no case gives"
            elif self.arguments.get(name) is not None and self.arguments[name] != _tuples(asked[name]):
                yield f"{name} is {self.arguments[name]!r}, not {asked[name]!r}"
        if not op.bit_exact:
            contract = op.contract(case, "tpu")
            for name, dtype in self.outputs.items():
                if contract.dtype(name) != dtype:
                    yield f"its {name} is {dtype}, not {contract.dtype(name)}"

    def distance(self, op: Op, case: Case) -> float:
        """How many differences there are; what the call leaves to a default and the case does not is a small one."""
        asked = {name: _tuples(value) for name, value in {**op.arguments(case), **op.route(case)}.items()}
        left_open = sum(
            1 for name, value in asked.items() if name not in op.indifferent and value != self.arguments.get(name)
        )
        return sum(1 for _ in self.differences(op, case)) + 0.01 * left_open


def _tuples(value: Any) -> Any:
    if isinstance(value, list | tuple):
        return tuple(map(_tuples, value))
    return value


def _form(spec: Any) -> str:
    if isinstance(spec, Groups | Offsets):
        return f"int32{list(_shape(spec))}"
    return f"{spec.dtype}{list(_shape(spec))}"


def _shape(spec: Any) -> tuple[int, ...]:
    if isinstance(spec, Groups):
        return (spec.count,)
    if isinstance(spec, Offsets):
        return (spec.count + 1,)
    return tuple(spec.shape)


def _templates(op: Op) -> Iterator[Case]:
    """One case of the matrix for every set of sizes, pair of dtypes and combination of options."""
    seen = set()
    for case in op.cases:
        key = tuple(name for name, _ in case.dims), case.dtype, case.out, case.options
        if key not in seen:
            seen.add(key)
            yield case


def _fit(op: Op, call: _Call, start: Case) -> tuple[float, Case]:
    """The best case that one change after the other leads to, and how many differences are left to it."""
    best, before = (call.distance(op, start), start), None
    while best[0] and before != best:
        before = best
        for change in _changes(op, call, start):
            changed = _with_sizes(op, call, change(best[1]))
            if changed is not None and (left := call.distance(op, changed)) < best[0]:
                best = left, changed
    return best


def _changes(op: Op, call: _Call, start: Case) -> Iterator[Callable[[Case], Case]]:
    """Other dtypes of the matrix, and other values of one option."""
    for dtype, out in dict.fromkeys((case.dtype, case.out) for case in op.cases):
        yield partial(replace, dtype=dtype, out=out)
    sizes = sorted({size for x in call.tensors.values() for size in x.shape})
    for name, _ in start.options:
        for other in _alternatives(op, name, call, sizes):
            yield partial(_with_option, name, other)


def _with_option(name: str, value: Any, case: Case) -> Case:
    return replace(case, options=tuple({**dict(case.options), name: value}.items()))


def _alternatives(op: Op, name: str, call: _Call, sizes: Iterable[int]) -> Iterator[Any]:
    known = dict.fromkeys(getattr(case, name) for case in op.cases)
    yield from known
    yield from (argument for argument in call.arguments.values() if type(argument) in (int, float, str, tuple))
    if any(isinstance(other, tuple) and len(other) == 2 for other in known):
        numbers = [n for n in call.arguments.values() if type(n) is int]
        yield from product(numbers, sizes)


def _with_sizes(op: Op, call: _Call, case: Case) -> Case | None:
    """The case with the sizes that tensors and arguments have, the first of each; None where it is no case."""
    primes = {name: prime for (name, _), prime in zip(case.dims, PRIMES, strict=False)}
    try:
        probe = replace(case, dims=tuple(primes.items()))
        specs = op.inputs(probe)
        found: dict[str, int] = {}
        for name, spec in specs.items():
            x = call.tensors.get(name)
            if spec is None or x is None or len(_shape(spec)) != x.ndim:
                continue
            less = isinstance(spec, Offsets)
            for asked, size in zip(_shape(spec), x.shape, strict=True):
                for dim, prime in primes.items():
                    if asked - less == prime:
                        found.setdefault(dim, size - less)
        for name, value in op.arguments(probe).items():
            for dim, prime in primes.items():
                if type(value) is int and value == prime and type(call.arguments.get(name)) is int:
                    found.setdefault(dim, call.arguments[name])
        # What no tensor and no argument depends on the kernel does not know either.
        dims = {name: found.get(name, size) for name, size in case.dims}
        options: dict[str, Any] = {name: [value] for name, value in case.options}
        (sized,) = op.grid([dims], dtype=[(case.dtype, case.out)], **options)
        op.inputs(sized), op.arguments(sized), op.route(sized), op.contract(sized, "tpu")
    except (ValueError, TypeError, ArithmeticError, LookupError, AttributeError):  # no such case
        return None
    return sized


STARTS = 32
"""Cases of the matrix with the same names of sizes, the nearest first, from which the search goes on."""
PRIMES = (83, 79, 73, 71, 67, 61, 59, 53)
"""Sizes that say where they went: small, for an op that draws its inputs itself, and falling, as nothing has more."""


# --- judging ---


def trial_of(op: Op, bundle: Bundle, backend: Backend) -> Trial:
    """A saved call, to be tried on a backend. Raises ValueError where no case of the op describes it."""
    case = case_of(op, bundle)
    specs = op.inputs(case.with_data("normal"))
    inputs = {name: bundle.tensors[name] if spec is not None else None for name, spec in specs.items()}
    for name, spec in specs.items():
        x = inputs[name]
        if isinstance(spec, Groups) and x is not None and ((x < 0).any() or x.sum(dtype=np.int64) > spec.rows):
            raise ValueError(f"{name} must be sizes that cut at most {spec.rows} rows, got {x.tolist()}")
        if (
            isinstance(spec, Offsets)
            and x is not None
            and (x[0] != 0 or x[-1] != spec.rows or (np.diff(x.astype(np.int64)) < 0).any())
        ):
            raise ValueError(f"{name} must rise from 0 to {spec.rows}, got {x.tolist()}")
    return Trial(op, case, backend, given=inputs)


def replay(op: Op, bundle: Bundle, backend: Backend) -> Judgement:
    """The verdict on a saved call on a backend. Raises ValueError as `trial_of`, and where memory does not suffice."""
    trial = trial_of(op, bundle, backend)
    with _limited_memory():
        try:
            trial.reference  # noqa: B018  kept for what follows
        except TypeError as error:
            raise ValueError(f"{op.name} refuses the bundle's arguments: {error}") from error
    return judge(trial)


@contextmanager
def _limited_memory() -> Iterator[None]:
    """Where more than half of this machine's memory is asked for, as two short vectors can, ValueError."""
    half = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2
    before = resource.getrlimit(resource.RLIMIT_AS)
    with suppress(FileNotFoundError):  # not Linux
        taken = int(Path("/proc/self/statm").read_text().split()[0]) * os.sysconf("SC_PAGE_SIZE")
        limits = [limit for limit in (taken + half, *before) if limit != resource.RLIM_INFINITY]
        resource.setrlimit(resource.RLIMIT_AS, (min(limits), before[1]))
    try:
        yield
    except MemoryError as error:
        raise ValueError(
            f"bundle must be a call whose golden fits into {half} bytes, got one that does not: {error}"
        ) from None
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)
