"""One case through golden, kernel and verdict."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from itertools import islice
from typing import Any

import numpy as np

from parity.backends import runner
from parity.declared import DeclarationError
from parity.dtypes import Floats
from parity.guard import OUTCOMES, Ended
from parity.judging import verdict
from parity.judging.fit import LIMITS, RUNS, Allowance, Fit, K, over_seeds
from parity.judging.metrics import Metrics, explained_by, is_measurable, measure, wrong_finiteness
from parity.judging.reference import Reference
from parity.judging.spread import allowances, functions_of
from parity.judging.stages import emulate
from parity.judging.verdict import Comparison, Verdict
from parity.op import BACKENDS, Backend, Case, Op
from parity.trial import Trial


@dataclass(frozen=True)
class Worst:
    """The worst element of an output."""

    index: tuple[int, ...]
    golden: float
    got: float
    allowed: float  # |got - golden| that is allowed there, before the output is rounded
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
    fits: Mapping[str, Fit] = field(default_factory=dict)  # how these fit the contract, where that says what is rounded
    worsts: Mapping[str, Worst] = field(default_factory=dict)  # of those that have elements and can be compared
    seconds: float = 0.0  # of one run of the kernel, compilation included
    twin: Judgement | None = None  # on integer data, of one that G3 fails
    trace: str = ""  # where in the kernel it was, of one that raised
    device: str = ""  # what recorded it, "" for the device of this process

    @property
    def ended(self) -> bool:
        """Whether the kernel came to no result: nothing was measured, and no other data say more."""
        return self.verdict.outcome in OUTCOMES

    @property
    def metrics(self) -> Metrics | None:
        """Of the output that decided."""
        return self.outputs.get(self.output)

    @property
    def worst(self) -> Worst | None:
        """The worst element of the output that decided; None where that has none, or cannot be compared."""
        return self.worsts.get(self.output)

    @property
    def eta_max(self) -> float:
        """The worst η, infinite where the outputs cannot be compared."""
        return self.metrics.eta_max if self.metrics else float("inf")

    @property
    def fit(self) -> Fit | None:
        """Of the output that decided."""
        return self.fits.get(self.output)

    @property
    def load(self) -> float:
        """How near the output that decided came to a bound; above 1 it is beyond."""
        return self.fit.load if self.fit else self.eta_max / (self.bound or 1)

    def summary(self) -> dict[str, Any]:
        """The figures that the terminal summary needs, as plain data that survives a trip between processes."""
        figures = {key: getattr(self.metrics, key) for key in ("epsilon", "eta_max")} if self.metrics else {}
        figures |= {"load": self.load} if self.metrics else {}
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


class Measured(Mapping[str, Metrics]):
    """The metrics of each output that can be compared, measured when they are first asked for.

    A verdict by the contract needs none, and the unit that they are in may take four runs of the golden.
    """

    def __init__(self, trial: Trial, found: Mapping[str, np.ndarray]) -> None:
        self._trial, self._done = trial, dict[str, Metrics]()
        self._found = {name: y for name, y in found.items() if is_measurable(y, trial.reference.golden[name])}

    def __getitem__(self, name: str) -> Metrics:
        if name not in self._done:
            golden, scale = self._trial.reference.golden[name], self._trial.scale(name)
            self._done[name] = measure(self._found[name], golden, scale)
        return self._done[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._found)

    def __len__(self) -> int:
        return len(self._found)

    def __reduce__(self) -> tuple[Any, ...]:
        """A dictionary of the metrics, for another process: the trial stays here, for its op may have a closure."""
        return dict, (dict(self),)


UNDECIDED = Verdict("UNDECIDED", "", "")
BESIDE = ("G5", "G6", "G7")
"""The gates that one backend passes beside the other."""


def judge(trial: Trial, twin: Judgement | None = None) -> Judgement:
    """The verdict on a trial, by whatever command it is asked for: `gates`, and what the integer twin says of it.

    What fails G3 and on integer data as well is a LOGIC FAULT. twin: the verdict on integer data where it is known.
    Raises as `gates`.
    """
    judged = gates(trial)
    if judged.verdict.passed or judged.verdict.gate != "G3":
        return judged
    twin = twin or judge_twin(trial)
    if twin is not None and not twin.verdict.passed:
        judged = replace(judged, verdict=replace(judged.verdict, outcome="LOGIC FAULT"))
    return replace(judged, twin=twin)


def judge_twin(trial: Trial) -> Judgement | None:
    """The verdict on a trial's kernel and case on integer data.

    None where the trial is on integer data itself, and where its golden is not exact on them, as a square root is not.
    Raises as `gates`.
    """
    if trial.case.data == "integers" or not (twin := trial.twin).exact:
        return None
    return gates(twin)


def twin_of(trial: Trial, judged: Judgement) -> Judgement | None:
    """The verdict on integer data that says more of a failure: none of a kernel that came to no result."""
    return None if judged.ended else judged.twin or judge_twin(trial)


def gates(trial: Trial) -> Judgement:
    """Run a trial and pass it through the gates that need no other backend and no other data (G1 to G3).

    A kernel that raises, or changes what it should not, is judged by that alone (G1: CRASH, OOM, DIRTY). Data
    `integers` must come out exact where the golden is, and bit-exact ops bit for bit (G2); everything else must fit its
    contract and lie within a derived bound, where there is one (G3). Of several outputs one that fails G1 decides, else
    the one nearest to a limit. Raises ImportError where the backend's framework is missing, DeclarationError where the
    op is at fault.
    """
    op, case, expected = trial.op, trial.case, trial.reference
    real = runner(trial.backend).real
    began = time.perf_counter()
    # What must be exact leaves no room to vary, and interpreters are sequential: for them a sample is enough.
    repeat = case.data != "integers" and (real or _is_sampled(op, case))
    try:
        first = trial.run()
        seconds = time.perf_counter() - began
        again = trial.run() if repeat else first
    except Ended as end:
        return Judgement(case, trial.backend, real, Verdict(end.outcome, "G1", end.reason), "", 0.0, trace=end.trace)
    if set(first) != set(expected.golden):
        reason = f"golden returns {', '.join(expected.golden)}, got {', '.join(first)}"
        wrong = Verdict("WRONG OUTPUTS", "G1", reason)
        return Judgement(case, trial.backend, real, wrong, "", 0.0, seconds=seconds)
    bound = 0.0 if trial.exact else trial.bound
    measured = {} if op.bit_exact else Measured(trial, first)
    undecided = [Judgement(case, trial.backend, real, UNDECIDED, name, bound, measured) for name in first]
    if op.bit_exact:
        judgements = [_judge_bits(j, expected, first[j.output], again[j.output]) for j in undecided]
    else:
        allowed = {} if trial.exact else _allowances(trial, first)
        judgements = [
            _judge_output(j, trial, first[j.output], again[j.output], allowed.get(j.output)) for j in undecided
        ]
    worst = max(judgements, key=lambda j: (not j.verdict.passed, j.verdict.gate == "G1", j.load))
    return replace(
        worst,
        seconds=seconds,
        fits={name: fit for j in judgements for name, fit in j.fits.items()},
        worsts={name: element for j in judgements for name, element in j.worsts.items()},
    )


def _is_sampled(op: Op, case: Case) -> bool:
    """Whether a case is one of the smoke tier, in the dtype that this has first of the op."""
    dtypes = (each.dtype for each in op.cases if each.tier == "smoke")
    return case.tier == "smoke" and case.seed == 0 and case.dtype == next(dtypes, case.dtype)


Allowed = tuple[Floats, Fit]
"""The σ that a contract explains of each element of an output, and how what was found fits it."""


FEW = 1 / 8
"""The share of elements up to which even errors beyond any doubt are no reason to stop drawing runs."""


def _allowances(trial: Trial, found: Mapping[str, np.ndarray]) -> dict[str, Allowed]:
    """What the contract explains of each measurable output, and how the output fits.

    If one does not fit, and the contract has functions off by ulps, runs off their grid are drawn as well. The better
    fit of both counts.
    """
    if not trial.contract.sites and trial.op.magnitude is not None:
        return {}  # it does not say what is rounded
    allowed = _fitted(trial, found, trial.runs())
    if functions_of(trial.contract) and any(1 < fit.load < np.inf for _, fit in allowed.values()):
        again = _fitted(trial, found, trial.runs(off_grid=True))
        allowed = {name: min(of, again[name], key=lambda each: each[1].load) for name, of in allowed.items()}
    return allowed


def _fitted(trial: Trial, found: Mapping[str, np.ndarray], drawn: Iterator[dict[str, Floats]]) -> dict[str, Allowed]:
    """As `_allowances`, from the first of the drawn runs, and from more of them if an output does not fit.

    One that does not fit all of them is held to what the contract itself makes of the case: see `Fit.beside`.
    """
    golden, contract = trial.reference.golden, trial.contract
    taken: list[dict[str, Floats]] = []
    of_outputs: dict[str, Allowance] = {}
    fits: dict[str, Fit] = {}
    for count in RUNS:
        taken += islice(drawn, count - len(taken))
        every = allowances(taken, golden, contract.roundoff)
        of_outputs = {name: of for name, of in every.items() if is_measurable(found[name], golden[name])}
        fits = {name: of.fit(name, found[name], trial.axes(name)) for name, of in of_outputs.items()}
        if not any(1 < fit.load < np.inf for fit in fits.values()):  # no run makes a NaN fit
            break
        # What is quantised near a tie goes either way, in a kernel and in some runs, and what is summed from it jumps.
        if any(fit.sigmas > LIMITS[count] and fit.beyond > FEW * found[name].size for name, fit in fits.items()):
            break
    else:
        emulated = _emulated(trial, of_outputs)
        fits = {name: fit.beside(emulated[name]) for name, fit in fits.items()}
    return {name: (of.sigma, fits[name]) for name, of in of_outputs.items()}


def _emulated(trial: Trial, allowed: Mapping[str, Allowance]) -> dict[str, Fit]:
    """How each output fits of what rounds to nearest, exactly where and as the contract says."""
    found = emulate(trial)
    return {name: of.fit(name, found[name], trial.axes(name)) for name, of in allowed.items()}


def _judge_bits(judged: Judgement, expected: Reference, y: np.ndarray, again: np.ndarray) -> Judgement:
    golden = expected.golden[judged.output]
    decided = verdict.form(y, again, golden, str(golden.dtype)) or verdict.identity(y, golden)
    return replace(judged, verdict=decided)


def _judge_output(
    judged: Judgement, trial: Trial, y: np.ndarray, again: np.ndarray, allowed: Allowed | None
) -> Judgement:
    golden, dtype = trial.reference.golden[judged.output], trial.contract.dtype(judged.output)
    bad_form = verdict.form(y, again, golden, dtype)
    if bad_form and not is_measurable(y, golden):
        return replace(judged, verdict=bad_form)
    if allowed:
        unit, bound = allowed[0], K
        judged = replace(judged, fits={judged.output: allowed[1]})
    else:
        unit, bound = trial.scale(judged.output).unit, judged.bound
    if bad_form:
        decided = bad_form
    elif trial.exact:
        decided = verdict.exactness(y, golden)
    else:
        decided = _agreement(judged, derived=trial.op.magnitude is not None)
        if decided.passed:
            decided = verdict.mistrusted(golden, unit, dtype, bound) or decided
    worsts = {judged.output: _worst(y, golden, unit, bound)} if y.size else {}
    return replace(judged, verdict=decided, worsts=worsts)


def _agreement(judged: Judgement, *, derived: bool) -> Verdict:
    """G3: by the contract where it says what is rounded, and by the bound, where one is derived."""
    fit = judged.fit
    if fit and (off := fit.verdict()):
        return off
    if fit and not derived:
        return Verdict("AGREES", "G3", str(fit))
    decided = verdict.agreement(judged.outputs[judged.output], judged.bound)
    return replace(decided, reason=str(fit)) if fit and decided.passed else decided


def _worst(y: np.ndarray, golden: Floats, unit: Floats, bound: float) -> Worst:
    """The element that errs most, in its unit, and where those are that err by more than `bound` units."""
    errors = np.where(wrong_finiteness(y, golden), np.inf, np.nan_to_num(explained_by(y, golden) / unit))
    beyond = np.argwhere(errors > bound)
    index = tuple(int(i) for i in np.unravel_index(int(errors.argmax()), y.shape))
    box = tuple((int(axis.min()), int(axis.max())) for axis in beyond.T) if len(beyond) else ()
    return Worst(index, float(golden[index]), float(y[index]), bound * float(unit[index]), box, len(beyond))


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
        worst = max(self.judged["tpu"], key=lambda j: j.load)
        ratio = {name: getattr(self.comparison, name) for name in ("ratio", "low", "high")}
        verdict = asdict(self.comparison.verdict)
        return worst.summary() | verdict | ratio | {"passed": self.comparison.verdict.passed}

    def epsilon(self, backend: Backend) -> float:
        """ε of a backend over all seeds and outputs, root mean square; NaN where nothing could be compared."""
        measured = [metrics.epsilon for judged in self.judged[backend] for metrics in judged.outputs.values()]
        return float(np.sqrt(np.mean(np.square(measured)))) if measured else float("nan")


def compare(op: Op, case: Case, seeds: int, recorded: Mapping[Backend, Sequence[Judgement]] | None = None) -> Compared:
    """Judge `seeds` seeds, from the case's own on, on both backends: each against the golden, then against the other.

    `recorded` are the judgements of those seeds by a backend that is not here to run them. Where a kernel fails against
    the golden, or over the seeds against its contract (UNFIT: the GPU's), that is the verdict; of several outputs the
    worst one decides, and is held to what the op expects. Where both are here none fails beside the other on less than
    `verdict.SEEDS` seeds. Raises ImportError where the framework of a backend that is to be run is missing.
    """
    recorded = recorded or {}
    judged: dict[Backend, tuple[Judgement, ...]] = dict.fromkeys(BACKENDS, ())
    for count in (seeds, max(seeds, verdict.SEEDS)):
        for n in range(len(judged["tpu"]), count):
            for backend in BACKENDS:
                trial = Trial(op, case.with_seed(case.seed + n), backend)
                of = recorded.get(backend)
                found = judge(trial) if of is None else fitted(replace(trial, device=of[n].device), of[n])
                # Measured now: until then a judgement holds its outputs, goldens and inputs.
                judged[backend] += (replace(found, outputs=dict(found.outputs)),)
        compared = Compared(case, dict(judged), _verdict_on(op, case, judged))
        if recorded or compared.comparison.verdict.passed or compared.comparison.verdict.gate not in BESIDE:
            break
    return compared


def _verdict_on(op: Op, case: Case, judged: Mapping[Backend, Sequence[Judgement]]) -> Comparison:
    """The comparison that decides, or what is off the golden or, over the seeds, its contract."""
    if failures := [j for of_backend in judged.values() for j in of_backend if not j.verdict.passed]:
        failed = max(failures, key=lambda j: j.ended)  # the first, but rather one that came to no result
        reason = f"{failed.backend}, seed {failed.case.seed}: {failed.verdict.reason}"
        return Comparison(replace(failed.verdict, reason=reason))
    for backend, of_seeds in judged.items():
        for name in of_seeds[0].fits:
            fits = [j.fits[name] for j in of_seeds]
            if not over_seeds(fits):
                continue
            trials = [Trial(op, j.case, backend, device=j.device) for j in of_seeds]
            emulated = [_emulated(trial, explained(trial)) for trial in trials]
            if off := over_seeds(fits, [of_seed[name] for of_seed in emulated if name in of_seed]):
                off = replace(off, reason=f"{backend}, {off.reason}")
                return Comparison(off if backend == "tpu" else verdict.unfit(off), output=name)
    comparisons = [
        verdict.compare(
            [j.outputs[name] for j in judged["tpu"]],
            [j.outputs[name] for j in judged["gpu"]],
            narrow_output=op.contract(case, "tpu").is_narrow(name),
            tau=op.tau,
        ).of_output(name, alone=len(judged["tpu"][0].outputs) == 1)
        for name in judged["tpu"][0].outputs
    ]
    expected = op.expectation(case)
    if expected and expected.explained:
        seeds = len(judged["tpu"])
        comparisons = [c if c.verdict.passed else _explained(op, case, seeds, c) for c in comparisons]
    # A known failure of one output must not hide another's.
    known = [c for c in comparisons if expected and verdict.is_expected(expected, c)]
    unknown = [c for c in comparisons if not c.verdict.passed and c not in known]
    worst = max(unknown or known or comparisons, key=lambda c: c.ratio)
    return replace(worst, verdict=verdict.held_to(expected, worst))


def _explained(op: Op, case: Case, seeds: int, compared: Comparison) -> Comparison:
    """With what both contracts make of the ratio, at most as sure as the seeds are.

    Raises DeclarationError where one names no sites.
    """
    logs = []
    for n in range(seeds):
        trials = [Trial(op, case.with_seed(case.seed + n), backend) for backend in BACKENDS]
        allowed = [explained(trial) for trial in trials]
        if not all(allowed):
            raise DeclarationError(op, case, "expected", "must not be explained where a contract names no sites")
        unit = trials[0].scale(compared.output).unit
        tpu, gpu = (np.mean(of[compared.output].variance / unit**2) for of in allowed)
        logs.append(np.log(tpu / gpu) / 2)
    return replace(compared, explained=float(np.exp(np.mean(logs) + verdict.margin_of(np.array(logs)))))


def fitted(trial: Trial, recorded: Judgement) -> Judgement:
    """A recorded judgement with how its outputs fit the contract, as far as their sketches say."""
    return replace(recorded, fits=fits_of(trial, explained(trial), recorded.outputs))


def fits_of(trial: Trial, allowed: Mapping[str, Allowance], sketches: Mapping[str, Metrics]) -> dict[str, Fit]:
    """How each recorded output fits as a whole, of those that something is explained of."""
    return {
        name: of.fit_of_sketch(name, sketches[name], trial.scale(name), trial.contract.dtype(name))
        for name, of in allowed.items()
        if name in sketches
    }


def explained(trial: Trial) -> dict[str, Allowance]:
    """What the contract explains of each output, from the fewest runs; nothing where it names no sites."""
    golden, contract = trial.reference.golden, trial.contract
    if not contract.sites:
        return {}
    return allowances(list(islice(trial.runs(), RUNS[0])), golden, contract.roundoff)


def measure_contract(trial: Trial) -> dict[str, Metrics]:
    """What a kernel emulated under the trial's contract would measure; nothing for an op compared bit for bit."""
    if trial.op.bit_exact:
        return {}
    golden = trial.reference.golden
    return {name: measure(y, golden[name], trial.scale(name)) for name, y in emulate(trial).items()}
