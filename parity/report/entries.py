"""What the report has of each case: plain data, made where the case was judged, so that it can come from a worker."""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any

from parity import matrix
from parity.backends import runner
from parity.debugging.contrasts import Contrast
from parity.debugging.explain import explain
from parity.judging.judge import Compared, Judgement
from parity.ledger.provenance import here
from parity.op import Backend, Op
from parity.report import text
from parity.trial import Trial

FAILING = 8
"""Failing cases whose error is explained."""
WORST = 3
"""Cases that passed and are explained all the same: those nearest to their bounds."""
QUICK = 2.0
"""Seconds of a kernel's run beyond which a case that passed is not explained: that takes some twenty runs."""
AXES = 5
"""Axes of an explained case of which is said where on them the error is."""
SECONDS = 60.0
"""No explanation is begun after that long."""


@dataclass(frozen=True)
class Measured:
    """One backend's kernel on a case: of several seeds the worst, of several outputs the one that decided."""

    backend: Backend
    real: bool
    outcome: str
    reason: str
    contract: str  # dot/accumulator/output
    bound: float
    seconds: float
    seed: int
    output: str
    figures: Mapping[str, float]  # those of `Metrics` by name; empty where the output could not be compared
    histogram: tuple[int, ...] = ()
    tiles: tuple[tuple[float, ...], ...] = ()
    load: float = 0.0  # the share that the output has used up of what it may err
    fit: str = ""  # how it fits its contract, in words
    worst: str = ""  # the worst element in words
    provenance: Mapping[str, Any] = field(default_factory=dict)  # empty of what the ledger has, not this process


@dataclass(frozen=True)
class Entry:
    """One judgement: of a backend's kernel against the golden, or of both against each other (`compared`)."""

    op: str
    case: str
    model: str
    side: str  # the backend; where it is the comparison that was judged, "tpu : gpu"
    outcome: str
    reason: str  # with its gate
    passed: bool | None  # None: not judged
    rerun: str
    seeds: int = 1
    epsilon: Mapping[str, float] = field(default_factory=dict)  # by backend, rms over seeds and outputs
    ratio: tuple[float, float, float] | None = None  # T_TPU / T_GPU and its interval
    measured: tuple[Measured, ...] = ()
    record: str = ""  # the status of its record in the ledger
    attribution: tuple[str, ...] = ()  # where its error comes from, then which bins of each axis carry it

    @property
    def load(self) -> float:
        """How near it came to a bound."""
        return max((m.load for m in self.measured), default=0.0)

    def plain(self) -> dict[str, Any]:
        """As data that any serialiser takes."""
        return dataclasses.asdict(self)

    @classmethod
    def from_plain(cls, data: Mapping[str, Any]) -> Entry:
        """What `plain` gave."""
        return cls(**{**data, "measured": tuple(Measured(**m) for m in data["measured"])})


COMPARED = "tpu : gpu"
"""The side of an entry that compares the backends."""
_FIGURES = ("epsilon", "floor", "misrounded", "bias", "eta_max", "eta_q999", "elements", "differing")


def of_judgement(op: Op, judged: Judgement, rerun: str, record: str = "") -> Entry:
    """The entry of one backend against the golden."""
    measured = () if judged.ended else (_measured(op, judged),)
    return Entry(
        op=op.name,
        case=judged.case.id,
        model=judged.case.model,
        side=judged.backend,
        outcome=judged.verdict.outcome,
        reason=f"{judged.verdict.gate}: {judged.verdict.reason}",
        passed=judged.verdict.passed,
        rerun=rerun,
        epsilon={m.backend: m.figures["epsilon"] for m in measured if m.figures},
        measured=measured,
        record=record,
    )


def of_comparison(op: Op, compared: Compared, rerun: str) -> Entry:
    """The entry of the rule ε_TPU ≤ ε_GPU on one case."""
    decided = compared.comparison
    worst = [max(judged, key=_severity) for judged in compared.judged.values() if judged]
    return Entry(
        op=op.name,
        case=compared.case.id,
        model=compared.case.model,
        side=COMPARED,
        outcome=decided.verdict.outcome,
        reason=f"{decided.verdict.gate}: {decided.verdict.reason}",
        passed=decided.verdict.passed,
        rerun=rerun,
        seeds=len(compared.judged["tpu"]),
        epsilon={j.backend: compared.epsilon(j.backend) for j in worst if j.metrics},
        ratio=(decided.ratio, decided.low, decided.high) if decided.ratio == decided.ratio else None,
        measured=tuple(_measured(op, judged) for judged in worst if not judged.ended),
    )


def without_judgement(op: str, case: str, side: str, outcome: str, reason: str, rerun: str) -> Entry:
    """The entry of a case (its id) that came to no judgement: "SKIPPED", or what became of its kernel or process."""
    return Entry(op, case, "", side, outcome, reason, None if outcome == "SKIPPED" else False, rerun)


def _severity(judged: Judgement) -> tuple[bool, float]:
    return not judged.verdict.passed, judged.load


def _measured(op: Op, judged: Judgement) -> Measured:
    m, recorded = judged.metrics, judged.verdict.gate == "G0"
    worst = ""
    if judged.worst:
        worst = text.worst_element(judged)
        if where := text.where_beyond(judged):
            worst += f"; {where}"
    return Measured(
        backend=judged.backend,
        real=judged.real,
        outcome=judged.verdict.outcome,
        reason=f"{judged.verdict.gate}: {judged.verdict.reason}",
        contract=op.contract(judged.case, judged.backend).name,
        bound=float(judged.bound),
        seconds=judged.seconds,
        seed=judged.case.seed,
        output=judged.output,
        load=judged.load if m else 0.0,
        fit=str(judged.fit) if judged.fit else "",
        figures={name: getattr(m, name) for name in _FIGURES} if m else {},
        histogram=m.histogram if m and any(m.histogram) else (),
        tiles=m.tiles if m and any(map(any, m.tiles)) else (),
        worst=worst,
        provenance={} if recorded else _provenance(op, judged.backend),
    )


@cache
def _provenance(op: Op, backend: Backend) -> Mapping[str, Any]:
    # Workers begin at different seconds; the report names the time of the whole run.
    found = dataclasses.asdict(here(op, backend, runner(backend).device_kind, runner(backend).real))
    return {name: value for name, value in found.items() if name not in ("schema", "utc")}


def attribute(
    ops: Iterable[Op], entries: Sequence[Entry], begun: Callable[[str], None] = lambda case: None
) -> tuple[Entry, ...]:
    """The entries, the worst of them with where their error comes from.

    Explained are up to `FAILING` that failed and, of quick kernels, the `WORST` nearest to their bounds; none is begun
    after `SECONDS`.
    `begun` is called with the id of each case before it is explained, which takes seconds.
    """
    ops = tuple(ops)
    rounded = {op.name for op in ops if not op.bit_exact}
    measured = [n for n, entry in enumerate(entries) if entry.op in rounded and any(m.tiles for m in entry.measured)]
    failed = [n for n in measured if entries[n].passed is False]
    quick = [n for n in measured if entries[n].passed and all(m.seconds < QUICK for m in entries[n].measured)]
    passed = sorted(quick, key=lambda n: -entries[n].load)
    until = time.monotonic() + SECONDS
    explained = list(entries)
    for n in [*failed[:FAILING], *_one_of_each_case(passed, entries)]:
        if time.monotonic() > until:
            break
        begun(entries[n].case)
        explained[n] = replace(entries[n], attribution=tuple(_explain(ops, entries[n])))
    return tuple(explained)


def _one_of_each_case(numbers: Iterable[int], entries: Sequence[Entry]) -> list[int]:
    """Of entries in order of interest, the first `WORST` that are of different cases."""
    first: dict[str, int] = {}
    for n in numbers:
        first.setdefault(entries[n].case, n)
    return list(first.values())[:WORST]


def _explain(ops: Iterable[Op], entry: Entry) -> Iterator[str]:
    # A comparison that fails is the TPU's, unless the GPU is no reference.
    suspect = "gpu" if entry.outcome == "UNFIT" else "tpu"
    of = max(entry.measured, key=lambda m: (m.outcome == entry.outcome, m.backend == suspect))
    try:
        op, case = matrix.find(ops, entry.case)
        found = explain(Trial(op, case.with_seed(of.seed), of.backend))
    except Exception as error:  # a kernel may raise anything; the report is of the others too
        yield f"{of.backend}: not explained: {type(error).__name__}: {error}"
        return
    yield f"{of.backend}: {found.conclusion}"
    yield from (_contrast(c) for c in found.contrasts[:AXES])


def _contrast(c: Contrast) -> str:
    if math.isinf(c.contrast):
        return f"{c.axis} {c.bin}: all of the error"
    return f"{c.axis} {c.bin}: {c.contrast:.3g}× the η of the rest, {c.share:.0%} of the error"
