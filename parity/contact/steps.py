"""All that is tried on a new device, the most informative first, and each by itself.

A step is done in a process of its own (`session`): what crashes or hangs there ends that row alone.
"""

from __future__ import annotations

import hashlib
import importlib
import math
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from parity import git, matrix
from parity.backends import load_kernel, runner
from parity.contact import assumptions, probes
from parity.inputs import draw
from parity.judging.judge import gates
from parity.ledger import provenance, sources
from parity.op import Backend, Case, Groups, Inputs, Offsets, Op, outputs
from parity.trial import Trial

OFFSET = "group_offset"
"""What the kernels call the argument that says which group a shard begins with."""
PROBE_SECONDS, ALL_SECONDS = 60, 3600
"""A probe's time limit, of which it tries bit patterns for a quarter; and one in which it tries every one."""
ENDING_SECONDS = 30
"""What pytest is given to write its records, where its time is over."""
INTERRUPTED, NO_TESTS = 2, 5
"""Exit codes of pytest."""
AGREES, OFF, RAN, NOT_HERE = "AGREES", "OFF CONTRACT", "RAN", "NOT HERE"


@dataclass(frozen=True)
class Step:
    """One thing to try: a probe's name, a case's id or a file, and the seconds that it may take."""

    kind: str
    name: str
    seconds: float

    @property
    def id(self) -> str:
        """Unique among the steps of a session."""
        return f"{self.kind} {self.name}"


@dataclass(frozen=True)
class Found:
    """What came of a step: RAN (nothing to compare with), AGREES, or OFF CONTRACT `by` how much.

    by: the error over what is allowed, infinite where what differs has no measure. more: plain data for who reads the
    file.
    """

    outcome: str
    by: float = 0.0
    detail: str = ""
    more: Any = None


def steps(root: Path, backend: Backend) -> list[Step]:
    """The steps of a project's matrix on a backend, in order of risk: what most others rest upon comes first.

    Functions of the hardware; a case of every kernel and dtype path, a case of each op before its other dtypes; two
    runs and two streams, and replayed graphs, of each op; the smoke tier with its ledger; benchmarks.
    """
    ops = matrix.load(root)
    benchmarks = sorted((root / "benchmarks").glob(f"{backend}_*.py"))
    paths = sorted((place, nth, case.id) for nth, op in enumerate(ops) for place, case in enumerate(one_each(op)))
    return [
        *(Step("probe", name, PROBE_SECONDS) for name in probes.NAMES),
        *(Step("case", case_id, 60) for _, _, case_id in paths),
        *(Step("repeat", one_each(op)[0].id, 60) for op in ops),
        *(Step("graph", of_sizes(op).id, 120) for op in ops),
        Step("tests", "smoke", 300),
        *(Step("benchmark", path.name, 120) for path in benchmarks if "static" not in path.name),
    ]


def one_each(op: Op) -> list[Case]:
    """One case for each dtype path of an op: the first of every pair of dtypes, as `_cheapest_first` has them."""
    found: dict[tuple[str, str], Case] = {}
    for case in _cheapest_first(op):
        found.setdefault((case.dtype, case.out), case)
    return list(found.values())


def _cheapest_first(op: Op) -> list[Case]:
    """The cases of an op, cheapest tier first: on usual data, then on other data, then those without elements.

    Cases of a model's shape are left out if there are others.
    """
    tiers = ("smoke", "default", "full")

    def cost(case: Case) -> tuple[bool, bool, int]:
        return not _elements(case), case.data != "normal", tiers.index(case.tier)

    return sorted([case for case in op.cases if not case.model] or op.cases, key=cost)


def _elements(case: Case) -> int:
    return math.prod(size for _, size in case.dims)


def of_sizes(op: Op) -> Case:
    """The smallest case of an op that has most of what a captured graph may find changed: sizes of groups, offsets of
    sequences and a shard's; on usual data if there is one."""

    def rank(case: Case) -> tuple[bool, bool, int, int]:
        sizes = sum(isinstance(spec, Groups | Offsets) for spec in op.inputs(case).values())
        elements = _elements(case)
        return elements > 0, case.data == "normal", sizes + bool(op.arguments(case).get(OFFSET)), -elements

    return max(_cheapest_first(op), key=rank)


def redrawn(op: Op, case: Case) -> tuple[Inputs, Inputs]:
    """The tensors of a case, and those of another draw in their place, sizes and offsets in reverse."""
    before, after = (
        {name: x for name, x in draw(op, each).items() if x is not None}
        for each in (case, case.with_seed(case.seed + 1))
    )
    for name, spec in op.inputs(case).items():
        if isinstance(spec, Groups):
            after[name] = before[name][::-1].copy()
        elif isinstance(spec, Offsets):
            after[name] = np.concatenate([[0], np.cumsum(np.diff(before[name])[::-1])]).astype(before[name].dtype)
    if op.arguments(case).get(OFFSET):
        before[OFFSET] = np.array([op.arguments(case)[OFFSET]], np.int32)
        after[OFFSET] = before[OFFSET] - 1
    return before, after


def perform(root: Path, backend: Backend, step: Step) -> Found:
    """Do a step here and now. Raises whatever its kernel raises."""
    return _PERFORM[step.kind](root, backend, step)


def _probe(root: Path, backend: Backend, step: Step) -> Found:
    module = importlib.import_module(f"parity.contact.{backend}")
    assumed = assumptions.of_device(module.kind())[step.name]
    real = runner(backend).real
    measured = probes.measure(module.device(), assumed, step.seconds / 4 if real else 0.0)
    outcome = AGREES if measured.share <= 1 else OFF
    if assumed.holds is not None and not real:  # what an interpreter does is no device's
        return Found(RAN, 0.0, measured.detail)
    return Found(outcome, measured.share, measured.detail, {step.name: dict(measured.figures)})


def _case(root: Path, backend: Backend, step: Step) -> Found:
    judged = gates(Trial(*matrix.find(matrix.load(root), step.name), backend))
    if judged.verdict.outcome == "CRASH":
        raise RuntimeError(judged.verdict.reason)
    if judged.verdict.passed:  # without metrics: bit for bit
        return Found(AGREES, judged.load if judged.metrics else 0.0, "", judged.summary())
    by = judged.load if judged.metrics else float("inf")
    return Found(OFF, by, f"{judged.verdict.outcome} {judged.verdict.reason}", judged.summary())


def _repeat(root: Path, backend: Backend, step: Step) -> Found:
    trial = Trial(*matrix.find(matrix.load(root), step.name), backend)
    found = _same_bits([list(trial.run().values()) for _ in range(2)], "two runs")
    if backend != "gpu" or not runner("gpu").real or found.outcome == OFF:
        return found
    gpu = importlib.import_module("parity.contact.gpu")
    return _same_bits(gpu.on_streams(trial.kernel, trial.inputs, trial.arguments), "two streams")


def _same_bits(results: list[list[np.ndarray]], what: str) -> Found:
    for a, b in zip(*results, strict=True):
        different = np.flatnonzero(np.frombuffer(a.tobytes(), np.uint8) != np.frombuffer(b.tobytes(), np.uint8))
        if len(different):
            return Found(OFF, float("inf"), f"{what} differ in {len(different)} of {a.nbytes} bytes")
    return Found(AGREES, 0.0, f"{what} are the same bits")


def _graph(root: Path, backend: Backend, step: Step) -> Found:
    """On a GPU a captured graph, on a TPU a compiled call, with other tensors than it was made with."""
    op, case = matrix.find(matrix.load(root), step.name)
    before, after = redrawn(op, case)
    arguments = {name: x for name, x in {**op.arguments(case), **op.route(case)}.items() if name not in before}
    kernel = load_kernel(getattr(op, backend))
    if backend == "gpu":
        gpu = importlib.import_module("parity.contact.gpu")
        return _same_bits(list(gpu.replayed(kernel, before, after, arguments)), "a replayed graph and a call")
    import jax

    compiled, anew = (jax.jit(lambda **tensors: kernel(**tensors, **arguments)) for _ in range(2))
    runner("tpu").run(compiled, before, {})
    results = [outputs(runner("tpu").run(each, after, {})) for each in (compiled, anew)]
    return _same_bits([list(result.values()) for result in results], "a compiled call with other tensors and a new one")


def _tests(root: Path, backend: Backend, step: Step) -> Found:
    """The smoke tier of a backend as far as it comes in its time, recorded: its ledger is in `more`."""
    with tempfile.TemporaryDirectory() as folder:
        options = ["-m", f"smoke and {backend}", "--parity-tier=smoke", "--parity-record", f"--parity-records={folder}"]
        arguments = ["-m", "pytest", "-q", "-p", "no:cacheprovider", *options]
        done = _python(root, *arguments, seconds=step.seconds - ENDING_SECONDS)
        records = {
            str(path.relative_to(folder)): path.read_text(encoding="utf-8") for path in Path(folder).rglob("*.jsonl")
        }
    last = done.stdout.strip().rpartition("\n")[2]
    if done.returncode == NO_TESTS:
        return Found(NOT_HERE, 0.0, "no smoke tests")
    if done.returncode == INTERRUPTED and "failed" not in last:
        return Found(RAN, 0.0, f"its time was over: {last}", {"records": records})
    return Found(*(OFF, float("inf")) if done.returncode else (AGREES, 0.0), last, {"records": records})


def _benchmark(root: Path, backend: Backend, step: Step) -> Found:
    if not runner(backend).real:
        raise NotImplementedError("needs a device")
    done = _python(root, str(Path("benchmarks", step.name)))
    if done.returncode:
        raise RuntimeError(done.stderr.strip().rpartition("\n")[2] or f"ended with status {done.returncode}")
    return Found(RAN, 0.0, "", {"output": done.stdout})


def _python(root: Path, *arguments: str, seconds: float | None = None) -> subprocess.CompletedProcess[str]:
    """A command of Python that has ended; after `seconds` it is sent a SIGTERM.

    `supervision` turns that into a KeyboardInterrupt. A SIGINT would be ignored in a job in the background.
    """
    paths = os.pathsep.join(filter(None, [str(root), *sys.path]))
    command = [sys.executable, *arguments]
    environment = {**os.environ, "PYTHONPATH": paths}
    pipe = subprocess.PIPE
    with subprocess.Popen(command, cwd=root, env=environment, stdout=pipe, stderr=pipe, text=True) as process:
        try:
            written = process.communicate(timeout=seconds)
        except subprocess.TimeoutExpired:
            process.terminate()
            written = process.communicate()
    return subprocess.CompletedProcess(command, process.returncode, *written)


def _device(root: Path, backend: Backend, step: Step) -> Found:
    """What the device and the code are, in `more`."""
    here = runner(backend)
    versions = provenance.installed(backend, here.real)
    about = {"backend": backend, "device": here.device_kind, "describe": here.describe(), "installed": versions}
    commit: str | None
    changes: str | None
    try:
        commit = git.run(root, "rev-parse", "HEAD", timeout=30).decode().strip()
        changes = hashlib.sha256(git.run(root, "diff", "HEAD", timeout=30)).hexdigest()
    except (OSError, subprocess.SubprocessError):
        commit = changes = None
    kernels = "".join(_code(getattr(op, backend)) for op in matrix.load(root))  # which git may know nothing of
    code = {"commit": commit, "changes": changes, "kernels": hashlib.sha256(kernels.encode()).hexdigest()}
    return Found(RAN, more=about | code)


def _code(kernel: str) -> str:
    """What a kernel's code is; nothing of one that is not there, as its case will say."""
    try:
        return sources.identity(kernel)
    except (ImportError, AttributeError):
        return ""


_PERFORM: Mapping[str, Callable[[Path, Backend, Step], Found]] = {
    "device": _device,
    "probe": _probe,
    "case": _case,
    "repeat": _repeat,
    "graph": _graph,
    "tests": _tests,
    "benchmark": _benchmark,
}
