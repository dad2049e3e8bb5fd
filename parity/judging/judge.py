"""One case through golden, kernel and verdict."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import lru_cache
from typing import Any

import numpy as np

from parity.backends import load_kernel, runner
from parity.dtypes import Floats
from parity.inputs import draw
from parity.judging import goldens, verdict
from parity.judging.metrics import Metrics, Scale, eta, measure
from parity.judging.stages import emulate
from parity.judging.verdict import Comparison, Verdict
from parity.op import BACKENDS, Backend, Case, Contract, Inputs, Op, outputs


@dataclass(frozen=True)
class Reference:
    """What a case's outputs are measured against: drawn inputs; golden, magnitude and longest chain by output."""

    inputs: Inputs
    golden: dict[str, Floats]
    magnitude: dict[str, Floats]
    chain: dict[str, int]


@dataclass(frozen=True)
class Worst:
    """The worst element of an output."""

    index: tuple[int, ...]
    golden: float
    got: float
    allowed: float  # |got - golden| that the bound allows there, before the output is rounded
    box: tuple[tuple[int, int], ...]  # first and last index, per axis, of the elements beyond the bound
    beyond: int  # how many there are


@dataclass(frozen=True)
class Judgement:
    """The verdict on one case on one backend, and what it rests on."""

    case: Case
    backend: Backend
    real: bool
    verdict: Verdict
    output: str  # the output that decided
    bound: float
    outputs: Mapping[str, Metrics] = field(default_factory=dict)  # those that can be compared
    worst: Worst | None = None
    seconds: float = 0.0  # of one run of the kernel, compilation included

    @property
    def metrics(self) -> Metrics | None:
        """Of the output that decided."""
        return self.outputs.get(self.output)

    @property
    def eta_max(self) -> float:
        """The worst η, infinite where the outputs cannot be compared."""
        return self.metrics.eta_max if self.metrics else float("inf")

    def summary(self) -> dict[str, Any]:
        """The figures that the terminal summary needs, as plain data that survives a trip between processes."""
        figures = {key: getattr(self.metrics, key) for key in ("epsilon", "eta_max")} if self.metrics else {}
        return {
            "op": self.case.op,
            "case": self.case.id,
            "backend": self.backend,
            "real": self.real,
            "bound": self.bound,
            **asdict(self.verdict),
            "passed": self.verdict.passed,
            **figures,
        }


UNDECIDED = Verdict("UNDECIDED", "", "")


@lru_cache(maxsize=4)
def reference(op: Op, case: Case) -> Reference:
    """The inputs of a case, drawn, and what its outputs are measured against; the last few are kept."""
    inputs = draw(op, case)
    truth = goldens.shared(op, case, inputs, lambda: _truth(op, case, inputs))
    golden, magnitude = (
        {label.removeprefix(what): x for label, x in truth.items() if label.startswith(what)}
        for what in ("golden.", "magnitude.")
    )
    chain = op.chain(case, inputs)
    chains = dict.fromkeys(golden, chain) if isinstance(chain, int) else {name: chain[name] for name in golden}
    return Reference(inputs, golden, magnitude, chains)


def _truth(op: Op, case: Case, inputs: Inputs) -> dict[str, np.ndarray]:
    """Golden and magnitude of each output, in one dictionary."""
    with np.errstate(invalid="ignore", over="ignore"):
        golden = outputs(op.golden(**inputs, **op.arguments(case)))
        magnitude = {} if op.bit_exact else outputs(op.magnitude(op, case, inputs))
    labelled = {"golden": golden, "magnitude": magnitude}
    return {f"{what}.{name}": x for what, of in labelled.items() for name, x in of.items()}


def judge(op: Op, case: Case, backend: Backend, kernel: Callable[..., Any] | None = None) -> Judgement:
    """Run a case on a backend and pass it through the gates that need no other backend (G1 to G3).

    Data `integers` must come out exact, and bit-exact ops bit for bit (G2); everything else must lie within its
    contract's bound (G3). The verdict of several outputs is that of the worst one. `kernel` takes the place of the
    op's own, for instance one with a planted fault. Raises ImportError where the backend's framework is missing.
    """
    expected = reference(op, case)
    run = runner(backend)
    kernel = kernel or load_kernel(getattr(op, backend))
    began = time.perf_counter()
    arguments = {**op.arguments(case), **op.route(case)}
    first = outputs(run.run(kernel, expected.inputs, arguments))
    seconds = time.perf_counter() - began
    # What must be exact leaves no room to vary, and interpreters are sequential: for them a sample is enough.
    repeat = case.data != "integers" and (run.real or (case.tier == "smoke" and case.seed == 0))
    again = outputs(run.run(kernel, expected.inputs, arguments)) if repeat else first
    contract = op.contract(case, backend)
    if set(first) != set(expected.golden):
        reason = f"golden returns {', '.join(expected.golden)}, got {', '.join(first)}"
        wrong = Verdict("WRONG OUTPUTS", "G1", reason)
        return Judgement(case, backend, run.real, wrong, "", 0.0, seconds=seconds)
    exact = case.data == "integers" or op.bit_exact
    bounds = {name: 0.0 if exact else contract.bound(expected.chain[name]) for name in first}
    undecided = [Judgement(case, backend, run.real, UNDECIDED, name, bound) for name, bound in bounds.items()]
    if op.bit_exact:
        judgements = [_judge_bits(j, expected, first[j.output], again[j.output]) for j in undecided]
    else:
        judgements = [_judge_output(j, contract, expected, first[j.output], again[j.output]) for j in undecided]
    worst = max(judgements, key=lambda j: (not j.verdict.passed, j.eta_max / (j.bound or 1)))
    return replace(
        worst, seconds=seconds, outputs={name: metrics for j in judgements for name, metrics in j.outputs.items()}
    )


def _judge_bits(judged: Judgement, expected: Reference, y: np.ndarray, again: np.ndarray) -> Judgement:
    golden = expected.golden[judged.output]
    decided = verdict.form(y, again, golden, str(golden.dtype)) or verdict.identity(y, golden)
    return replace(judged, verdict=decided)


def _judge_output(
    judged: Judgement, contract: Contract, expected: Reference, y: np.ndarray, again: np.ndarray
) -> Judgement:
    golden = expected.golden[judged.output]
    dtype = contract.dtype(judged.output)
    scale = Scale(expected.magnitude[judged.output], contract.roundoff, expected.chain[judged.output])
    bad_form = verdict.form(y, again, golden, dtype)
    if bad_form and y.shape != golden.shape:
        return replace(judged, verdict=bad_form)
    metrics = measure(y, golden, scale)
    if bad_form:
        decided = bad_form
    elif judged.case.data == "integers":
        decided = verdict.exactness(y, golden)
    else:
        decided = verdict.agreement(metrics, judged.bound)
        if decided.passed:
            decided = verdict.mistrusted(golden, scale, dtype, judged.bound) or decided
    worst = None if decided.passed or not y.size else _worst(y, golden, scale, metrics, judged.bound)
    return replace(judged, verdict=decided, outputs={judged.output: metrics}, worst=worst)


def _worst(y: np.ndarray, golden: Floats, scale: Scale, metrics: Metrics, bound: float) -> Worst:
    index = metrics.worst[0]
    wrong = np.isfinite(golden) != np.isfinite(y.astype(np.float64))
    beyond = np.argwhere((eta(y, golden, scale) > bound) | wrong)
    box = tuple((int(axis.min()), int(axis.max())) for axis in beyond.T) if len(beyond) else ()
    return Worst(index, float(golden[index]), float(y[index]), bound * float(scale.at(index).unit), box, len(beyond))


@dataclass(frozen=True)
class Compared:
    """The rule ε_TPU ≤ ε_GPU on one case: every seed judged on both backends, and the comparison of the two."""

    case: Case
    judged: Mapping[Backend, tuple[Judgement, ...]]
    comparison: Comparison

    @property
    def everything(self) -> list[Judgement]:
        """All judgements."""
        return [judged for of_backend in self.judged.values() for judged in of_backend]

    def summary(self) -> dict[str, Any]:
        """As `Judgement.summary`, of the TPU and its ratio to the GPU."""
        worst = max(self.judged["tpu"], key=lambda j: j.eta_max)
        ratio = {name: getattr(self.comparison, name) for name in ("ratio", "low", "high")}
        verdict = asdict(self.comparison.verdict)
        return worst.summary() | verdict | ratio | {"passed": self.comparison.verdict.passed}

    def epsilon(self, backend: Backend) -> float:
        """ε of a backend over all seeds and outputs, root mean square; NaN where nothing could be compared."""
        measured = [metrics.epsilon for judged in self.judged[backend] for metrics in judged.outputs.values()]
        return float(np.sqrt(np.mean(np.square(measured)))) if measured else float("nan")


def compare(op: Op, case: Case, seeds: int, recorded: Sequence[Judgement] | None = None) -> Compared:
    """Judge `seeds` seeds, from the case's own on, on both backends: each against the golden, then against the other.

    `recorded` are the GPU's judgements of those seeds where it is not here to run them. Where a kernel fails against
    the golden that is the verdict; of several outputs the worst one decides, and is held to what the op expects.
    Raises ImportError where a backend's framework is missing.
    """
    judged: dict[Backend, tuple[Judgement, ...]] = {"tpu": (), "gpu": tuple(recorded or ())}
    contract: list[dict[str, Metrics]] = []
    for drawn in (case.with_seed(case.seed + n) for n in range(seeds)):
        for backend in BACKENDS if recorded is None else BACKENDS[:1]:
            judged[backend] += (judge(op, drawn, backend),)
        contract.append(measure_contract(op, drawn, "gpu"))
    failed = next((j for js in judged.values() for j in js if not j.verdict.passed), None)
    if failed is not None:
        reason = f"{failed.backend}, seed {failed.case.seed}: {failed.verdict.reason}"
        return Compared(case, judged, Comparison(replace(failed.verdict, reason=reason)))
    comparisons = [
        verdict.compare(
            [j.outputs[name] for j in judged["tpu"]],
            [j.outputs[name] for j in judged["gpu"]],
            [metrics[name] for metrics in contract],
            narrow_output=op.contract(case, "tpu").is_narrow(name),
            tau=op.tau,
        )
        for name in contract[0]
    ]
    expected = op.expectation(case)
    known = expected.verdict if expected else None
    # A known failure of one output must not hide another's.
    worst = max(comparisons, key=lambda c: (not c.verdict.passed, c.verdict.outcome != known, c.ratio))
    return Compared(case, judged, replace(worst, verdict=verdict.held_to(expected, worst.verdict)))


def measure_contract(op: Op, case: Case, backend: Backend) -> dict[str, Metrics]:
    """What a kernel emulated under the backend's contract would measure; nothing for an op compared bit for bit."""
    if op.bit_exact:
        return {}
    expected, contract = reference(op, case), op.contract(case, backend)
    scales = {name: Scale(expected.magnitude[name], contract.roundoff, n) for name, n in expected.chain.items()}
    emulated = emulate(op, case, expected.inputs, backend)
    return {name: measure(y, expected.golden[name], scales[name]) for name, y in emulated.items()}
