"""The smallest case that fails as a given one does, and a script that shows the failure without this package.

The reduction is greedy and knows no operation: sizes go down, options to their defaults, and then, of the arrays that
the smallest case draws, slices and single elements to zero. A step is kept where the verdict stays the same one, by the
same gate; a case that the operation refuses is no step. Everything is tried in one fixed order: no clock, no chance.
"""

from __future__ import annotations

import faulthandler
import importlib.util
import multiprocessing
import os
import re
import subprocess
import sys
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import numpy as np

from parity.backends import load_kernel, runner
from parity.dtypes import round_to
from parity.guard import guarded
from parity.inputs import draw
from parity.judging.judge import Judgement, judge
from parity.judging.verdict import Verdict
from parity.op import Backend, Case, Inputs, Offsets
from parity.runners.supervision import end_with_parent
from parity.trial import Trial

RUNS = 4000
"""Runs of the kernel after which the reduction stops where it is."""
REPEATS = 10
"""Runs of a kernel whose results are not always the same, in a script."""

T = TypeVar("T")


class Failure(NamedTuple):
    """How a case fails: the verdict's outcome and gate or, without a result, the reason without its numbers."""

    outcome: str
    gate: str

    def __str__(self) -> str:
        return f"{self.outcome} ({self.gate})"


@dataclass(frozen=True, eq=False)
class Shrunk:
    """The smallest case found, what its inputs are, how it fails, and the runs of the kernel that this took."""

    case: Case
    inputs: Inputs
    failure: Failure
    judged: Judgement | None  # None of a kernel that came to no result
    runs: int

    @property
    def is_minimal(self) -> bool:
        """Whether every single step left was tried."""
        return self.runs < RUNS


def shrink(
    trial: Trial,
    accepted: Callable[[str], None] = lambda step: None,
    ran: Callable[[int], None] = lambda runs: None,
    output: str = "",
) -> Shrunk:
    """Reduce a failing trial's case as far as its verdict stays or, of an `output`, that output's.

    `accepted` is called with each step that is kept, in words; `ran` with the number of the kernel's runs so far.
    Raises ValueError for a case that passes, ImportError where the backend's framework is missing.
    """
    search = _Search(trial, accepted, ran, output)
    smallest = search.reduce_case(trial.case)
    inputs = search.reduce_data(smallest)
    last = _run(trial.with_case(smallest).with_inputs(inputs), search.twins.get(smallest.id))
    judged = last if isinstance(last, Judgement) and not last.ended else None
    if judged and output in judged.outputs:
        judged = replace(judged, output=output, verdict=_of_output(judged, output) or judged.verdict)
    return Shrunk(smallest, inputs, search.wanted, judged, search.runs)


def _run(trial: Trial, twin: Judgement | None = None) -> Judgement | Failure:
    """The trial's judgement, or how the kernel ended its process. `twin` as in `judge`.

    An interpreted Triton kernel has the pointers of this process, and may take it down: it runs in one of its own,
    where what it leaves unwritten is NaN every time.
    """

    if trial.backend == "tpu" or runner(trial.backend).real:
        return judge(trial, twin)
    from parity.backends.gpu import filled_memory

    def run_in_child() -> None:
        end_with_parent()
        faulthandler.disable()
        os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # a dying allocator's last words
        sender.send(judge(trial, twin))

    context = multiprocessing.get_context("fork")
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=run_in_child)
    with filled_memory(), warnings.catch_warnings():  # in the child alone it would take a second to import
        warnings.simplefilter("ignore")  # the child leaves alone what has threads
        process.start()
    sender.close()
    try:
        result: Judgement | Failure = receiver.recv()
    except EOFError:
        process.join()
        status = process.exitcode or 0
        return Failure("CRASH", f"signal {-status}" if status < 0 else f"status {status}")
    process.join()
    return result


def _of_output(judged: Judgement, output: str) -> Verdict | None:
    """The verdict on an output of a judgement, "" for the one that decided; None where it keeps its contract."""
    if output in ("", judged.output):
        return judged.verdict
    fit = judged.fits.get(output)
    return fit.verdict() if fit else None


class _Search:
    def __init__(self, trial: Trial, accepted: Callable[[str], None], ran: Callable[[int], None], output: str) -> None:
        self.trial, self.op, self.accepted, self.ran, self.output = trial, trial.op, accepted, ran, output
        self.runs = 0
        self.twins: dict[str, Judgement] = {}
        self.tried: dict[str, bool] = {}
        failure = self._failure(trial)
        if failure is None:
            raise ValueError(f"case must fail on {trial.backend} to be reduced, got {trial.case.id}, which passes")
        self.wanted = failure
        # An interpreted kernel runs twice in the smoke tier alone.
        self.tier = trial.case.tier if failure.outcome == "NOT REPEATABLE" else "default"

    def _failure(self, trial: Trial) -> Failure | None:
        self.runs += 1
        self.ran(self.runs)
        result = _run(trial, self.twins.get(trial.case.id))
        if isinstance(result, Failure):
            return result
        if result.ended:
            return Failure(result.verdict.outcome, re.sub(r"\d+", "#", result.verdict.reason))
        if result.twin:  # the same whatever the data of the case are
            self.twins[trial.case.id] = result.twin
        decided = _of_output(result, self.output)
        return None if decided is None or decided.passed else Failure(decided.outcome, decided.gate)

    def _keeps(self, trial: Trial) -> bool:
        if self.runs >= RUNS:
            return False
        try:
            trial.reference  # noqa: B018
        except Exception:  # no case of this op
            return False
        return self._failure(trial) == self.wanted

    # --- sizes and options ---

    def reduce_case(self, case: Case) -> Case:
        """The case with the smallest sizes and the fewest options."""
        before = None
        while before != case:
            before = case
            for name, _ in case.dims:  # first, since what is small runs fast
                case = self._reduce_size(case, name)
            for name, default in self.op.defaults.items():
                if getattr(case, name) != default:
                    case = self._step(case, f"{name} {getattr(case, name)} → {default}", options={name: default})
            if case.data != "normal":
                case = self._step(case, f"data {case.data} → normal", data="normal")
        return case

    def _reduce_size(self, case: Case, name: str) -> Case:
        def to(size: int) -> Case:
            return self._step(case, f"{name} {getattr(case, name)} → {size}", dims={name: size})

        for power in range(int(getattr(case, name)).bit_length()):
            if 2**power < getattr(case, name):
                smaller = to(2**power)
                if smaller != case:
                    case = smaller
                    break
        step = getattr(case, name) // 2
        while step:
            smaller = to(getattr(case, name) - step)
            step = step if smaller != case and getattr(smaller, name) > step else step // 2
            case = smaller
        return case

    def _step(
        self,
        case: Case,
        words: str,
        dims: Mapping[str, int] | None = None,
        options: Mapping[str, Any] | None = None,
        data: str = "",
    ) -> Case:
        """The changed case where it fails as the first one did, else the case itself."""
        chosen: dict[str, Any] = {name: [value] for name, value in (dict(case.options) | dict(options or {})).items()}
        dtype = [(case.dtype, case.out)]
        sizes = dict(case.dims) | dict(dims or {})
        (changed,) = self.op.grid([sizes], dtype=dtype, data=[data or case.data], tier=self.tier, **chosen)
        changed = changed.with_seed(case.seed)
        if changed.id not in self.tried:
            self.tried[changed.id] = self._keeps(self.trial.with_case(changed))
            if self.tried[changed.id]:
                self.accepted(words)
        return changed if self.tried[changed.id] else case

    # --- data ---

    def reduce_data(self, case: Case) -> Inputs:
        """The arrays of the case with the fewest elements that are not zero. Where sequences end is left as it is."""
        arrays: dict[str, Any] = dict(draw(self.op, case))
        specs = self.op.inputs(case)
        names = [name for name, x in arrays.items() if _has_zero(x) and not isinstance(specs[name], Offsets)]
        names.sort(key=lambda name: -arrays[name].size)
        for name in names:
            for axis in range(arrays[name].ndim):
                self._reduce(case, arrays, name, axis)
        for name in names:
            self._reduce(case, arrays, name)
        return arrays

    def _reduce(self, case: Case, arrays: dict[str, Any], name: str, axis: int | None = None) -> None:
        """Set slices of an array along an axis to zero, or without one its elements."""
        array, trial = arrays[name], self.trial.with_case(case)
        lines = array.reshape(-1) if axis is None else np.moveaxis(array, axis, 0)
        filled = np.flatnonzero((lines != 0).any(axis=tuple(range(1, lines.ndim)))).tolist()

        def only(kept: Sequence[int]) -> np.ndarray:
            reduced = np.zeros_like(lines)
            reduced[list(kept)] = lines[list(kept)]
            return reduced.reshape(array.shape) if axis is None else np.moveaxis(reduced, 0, axis)

        kept = minimise(filled, lambda some: self._keeps(trial.with_inputs({**arrays, name: only(some)})))
        if len(kept) < len(filled):
            what = "elements" if axis is None else f"slices along axis {axis}"
            self.accepted(f"{name}: {len(kept)} of {len(filled)} {what} other than zero")
            arrays[name] = only(kept)


def _has_zero(array: np.ndarray | None) -> bool:
    return array is not None and not np.zeros(1, array.dtype).any()  # a power of two, as scales are, never is


def minimise(items: Sequence[T], keeps: Callable[[Sequence[T]], bool]) -> Sequence[T]:
    """A part of `items`, which `keeps` accepts, that it accepts without no single item (delta debugging).

    Zeller & Hildebrandt 2002, IEEE TSE 28:183: halves are left out, then quarters, down to single items.
    """
    if not items or keeps([]):
        return []
    size = max(len(items) // 2, 1)
    while True:
        start, before = 0, len(items)
        while start < len(items):
            rest = [*items[:start], *items[start + size :]]
            if rest and keeps(rest):
                items = rest
            else:
                start += size
        if size == 1 and len(items) == before:
            return items
        size = max(size // 2, 1)


# --- the script ---


def script(trial: Trial, shrunk: Shrunk, target: str = "") -> str:
    """A Python script that runs a kernel on the smallest inputs: it exits with 1 while the result is wrong, else 0.

    It needs NumPy, the backend's framework and the kernel's module (`target`, "module:function"; default: the op's),
    which it imports from where that is now, whatever is installed and wherever the script lies. A failure that only the
    emulated matrix unit shows needs `parity.backends.emulation` as well: which of the two it is, is tried out. Raises
    ValueError for MISTRUSTED, which is no fault of the kernel's, and for a failure that neither script shows.
    """
    target = target or getattr(trial.op, trial.backend)
    other = trial.other or load_kernel(target)
    trial = Trial(trial.op, shrunk.case, trial.backend, other, shrunk.inputs)
    check = _check(trial, shrunk)
    for emulated in (False, True):
        text = _write(trial, shrunk, target, check, emulated)
        done = subprocess.run(  # of no file, which a kill would leave behind
            [sys.executable, "-"],
            input=text,
            capture_output=True,
            encoding="utf-8",
            errors="replace",
            env=_environment(),
            timeout=600,
            check=False,
        )
        if _shows(done, shrunk.failure, check):
            return text
    raise ValueError(f"a script must fail as {shrunk.case.id} does, this one does not: {done.stdout or done.stderr}")


def _shows(done: subprocess.CompletedProcess[str], failure: Failure, check: _Check | None) -> bool:
    if check:
        return done.returncode == 1 and done.stdout.startswith("got")
    if failure.gate.startswith("signal"):
        return failure.gate == f"signal {-done.returncode}"
    return done.returncode == 1 and failure.gate.partition(":")[0] in done.stderr


def _environment() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}


class _Check(NamedTuple):
    """got: an expression of `result`; golden: what it should be, in words; holds: whether it is, of `got`."""

    got: str
    golden: str
    holds: str


def _check(trial: Trial, shrunk: Shrunk) -> _Check | None:
    """How the script tells that the result is wrong: by the worst element, its form, or repetition. None of a crash."""
    judged = shrunk.judged
    if judged is None:
        return None
    outcome = judged.verdict.outcome
    if outcome == "MISTRUSTED":
        raise ValueError(
            "MISTRUSTED is said of a case whose contract allows too much for its data: the kernel's result passes"
        )
    expected, backend, name = trial.reference, trial.backend, judged.output
    returned = guarded(lambda: runner(backend).run(trial.kernel, trial.inputs, trial.arguments))
    if outcome == "WRONG OUTPUTS":
        names = sorted(expected.golden)
        fields = 'n for n in getattr(result, "_fields", ["out"]) if getattr(result, n, result) is not None'
        if isinstance(returned, Mapping):
            fields = "n for n in result if result[n] is not None"
        return _Check(f"sorted({fields})", f"{names}", f"got == {names}")
    golden = expected.golden[name]
    value = f"result.{name}" if hasattr(returned, "_asdict") else "result"
    if isinstance(returned, Mapping):
        value = f"result[{name!r}]"
    dtype = str(golden.dtype) if trial.op.bit_exact else trial.contract.dtype(name)
    if outcome == "NOT REPEATABLE":
        bits = _bits(backend, value.replace("result", "kernel(**arguments)", 1))
        return _Check(f"len({{{bits} for _ in range({REPEATS})}})", f"1 result of {REPEATS} runs", "got == 1")
    if outcome in ("WRONG SHAPE", "WRONG DTYPE"):
        form = f'({list(golden.shape)}, "{dtype}")'
        return _Check(f'([*{value}.shape], str({value}.dtype).replace("torch.", ""))', form, f"got == {form}")
    if judged.worst is None:
        return _exact_check(trial.run()[name], golden, value, backend)
    index = judged.worst.index
    right = float(golden[index])
    allowed = judged.worst.allowed
    low, high = map(float, round_to(np.array([right - allowed, right + allowed]), dtype))
    got = f"float({_element(value, index)})"
    if not np.isfinite(right):
        return _Check(got, f"{right}", "not np.isfinite(got)")
    return _Check(got, f"{right!r} ({low!r} to {high!r} are right)", f"{low!r} <= got <= {high!r}")


def _exact_check(y: np.ndarray, golden: np.ndarray, value: str, backend: Backend) -> _Check:
    """Of the first element that differs in bits: by its number, or by the bits where these are of the same number."""
    bits = [np.ascontiguousarray(x).view(f"u{x.dtype.itemsize}").reshape(x.shape) for x in (y, golden)]
    differing = np.argwhere(bits[0] != bits[1])
    if not len(differing):
        raise ValueError("a script must show an element that is wrong, run again the kernel got all of them right")
    index = tuple(map(int, differing[0]))
    element, got, right = _element(value, index), *(repr(float(x[index])) for x in (y, golden))
    if got != right:  # as 0.0 and -0.0 do, but NaNs do not
        return _Check(f"repr(float({element}))", right, f"got == {right!r}")
    right = golden[index].tobytes().hex()
    return _Check(f"{_bits(backend, element)}.hex()", right, f"got == {right!r}")


def _element(value: str, index: tuple[int, ...]) -> str:
    return f"{value}[{', '.join(map(str, index))}]" if index else value


def _bits(backend: Backend, value: str) -> str:
    """An expression of the bytes of an array."""
    if backend == "tpu":
        return f"np.asarray({value}).tobytes()"
    return f"{value}.cpu().reshape(-1).view(torch.uint8).numpy().tobytes()"


FRAMEWORK = {
    "tpu": """\
os.environ.setdefault("JAX_PLATFORMS", "cpu")  # interpreted; on a TPU: JAX_PLATFORMS=tpu
import jax.numpy as jnp
import numpy as np""",
    "gpu": """\
import numpy as np
import torch
device = "cuda" if torch.cuda.is_available() else "cpu"
os.environ.setdefault("TRITON_INTERPRET", str(int(device == "cpu")))""",
}
TENSOR = {
    "tpu": "jnp.asarray(values.astype(jnp.dtype(dtype)))",
    "gpu": "torch.tensor(values, device=device).to(getattr(torch, dtype))",
}
EMULATION = {"tpu": "parity.backends.emulation.mxu", "gpu": "parity.backends.emulation.tensor_core"}


def _write(trial: Trial, shrunk: Shrunk, target: str, check: _Check | None, emulated: bool) -> str:
    module, _, function = target.partition(":")
    keywords, backend = trial.arguments, trial.backend
    folders = dict.fromkeys(_folder_of(name) for name in [*(["parity"] if emulated else []), module])
    given = [f'    "{name}": {_literal(array)},' for name, array in shrunk.inputs.items() if array is not None]
    given += [f"    **{dict(keywords)!r},"] if keywords else []
    lines = [
        f"# {shrunk.failure}: {target}, {shrunk.case.id}. Exits with 1 while the result is wrong.",
        "import os",
        "import sys",
        *(f"sys.path.insert(0, {str(folder)!r})" for folder in folders),
        FRAMEWORK[backend],
        f"from {module} import {function} as kernel",
        f"from {EMULATION[backend]} import emulated  # what goes wrong is the matrix unit's" if emulated else None,
        "",
        "def tensor(dtype, shape, elements):",
        "    values = np.zeros(shape)",
        "    for index, value in elements.items():",
        "        values[index] = value",
        f"    return {TENSOR[backend]}",
        "",
        "inf, nan = np.inf, np.nan" if re.search(r"\b(inf|nan)\b", "".join(given)) else None,
        "arguments = {",
        *given,
        "}",
        "with emulated():" if emulated else None,
        f"{'    ' if emulated else ''}result = kernel(**arguments)",
    ]
    if check:
        lines += [
            f"got = {check.got}",
            f'print("got", got, "golden", {check.golden!r})',
            f"sys.exit(0 if {check.holds} else 1)",
        ]
    return "\n".join(line for line in lines if line is not None) + "\n"


def _folder_of(module: str) -> Path:
    """Where a module is found: another one of that name may be installed."""
    spec = importlib.util.find_spec(module.partition(".")[0])
    places: list[str | None] = [*(spec.submodule_search_locations or []), spec.origin] if spec else []
    place = next(iter(places), None)
    if place is None:
        raise ValueError(f"{module} must be in a file for a script to import it, it is in none")
    return Path(place).resolve().parent


def _literal(array: np.ndarray) -> str:
    elements = {tuple(map(int, index)): array[tuple(index)].item() for index in np.argwhere(filled(array))}
    listed = ", ".join(f"{index}: {value!r}" for index, value in elements.items())
    return f'tensor("{array.dtype}", {array.shape}, {{{listed}}})'


def filled(array: np.ndarray) -> np.ndarray:
    """Which elements are other than +0, as values: of a NaN the payload is lost."""
    return (array != 0) | np.signbit(array.astype(np.float64))
