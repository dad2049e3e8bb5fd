"""Judgements and the ledger: recorded, looked up again, and held against what was recorded before."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import cache
from pathlib import Path

from parity.backends import EMULATED, is_here, runner
from parity.inputs import hashes
from parity.judging import verdict
from parity.judging.judge import Judgement, compare, judge, measure_contract
from parity.judging.metrics import Metrics
from parity.judging.verdict import Verdict
from parity.ledger.freshness import Freshness, freshness, in_units_of
from parity.ledger.provenance import here
from parity.ledger.read import read_all
from parity.ledger.schema import Ledger, Provenance, Record
from parity.op import BACKENDS, Backend, Case, Op
from parity.trial import Trial

SEEDS = 8
"""Paired seeds that the backends are compared on, where no other number is asked for."""


class Book:
    """The records under `root`, read when they are first asked for. Raises `RecordError` where they are not sound."""

    def __init__(self, root: Path, utc: str | None = None) -> None:
        self.root = root
        self.utc = utc
        self._ledgers: dict[tuple[Backend, str], dict[str, Ledger]] = {}

    def record(self, trial: Trial, judged: Judgement) -> Record:
        """A trial's judgement, of this process, as a record, with the ε of its emulated contract beside it."""
        contract = measure_contract(trial).get(judged.output)
        return Record(
            case=_unseeded(trial.case),
            seed=trial.case.seed,
            contract=trial.contract.name,
            inputs=hashes(trial.inputs),
            tiles=_tiles(trial.case),
            verdict=judged.verdict.outcome,
            bound=judged.bound,
            outputs=dict(judged.outputs),
            contract_epsilon=contract.epsilon if contract else None,
            seconds=round(judged.seconds, 3),
            provenance=self._here(trial),
        )

    def find(
        self, trial: Trial, *, real: bool, kind: str | None = None, measured: Mapping[str, Metrics] | None = None
    ) -> tuple[Record, Freshness] | None:
        """The newest record of a trial on a real or an emulated device, and whether it still speaks for the code.

        kind: only that of this device kind. measured: what the trial's outputs have come to just now, where it has been
        run.
        """
        key = _unseeded(trial.case), trial.case.seed
        found = [
            ledger[key]
            for device, ledger in self._of(trial.backend, trial.op).items()
            if kind in (None, device) and key in ledger and ledger[key].provenance.real == real
        ]
        if not found:
            return None
        record = max(found, key=lambda r: r.provenance.utc)
        now = self._here(trial), hashes(trial.inputs), trial.contract.name, _tiles(trial.case)
        floors = {name: m.floor for name, m in measured.items()} if measured else trial.floors
        return record, freshness(record, *now, floors, measured)

    def check(self, trial: Trial, judged: Judgement, *, strict: bool) -> tuple[Judgement, str]:
        """A judgement held against its record, and the record's status.

        A regression turns a pass into a failure; so does a stale record if `strict`.
        """
        found = self.find(trial, real=judged.real, measured=judged.outputs)
        if found is None:
            return judged, "NO-RECORD"
        record, fresh = found
        if not judged.verdict.passed or fresh.status == "INVALID":
            return judged, fresh.status
        then = record.outputs
        pairs = {name: (m, in_units_of(m, then[name])) for name, m in judged.outputs.items() if name in then}
        worse = {n: verdict.regression(*p, narrow_output=trial.contract.is_narrow(n)) for n, p in pairs.items()}
        if regressed := {name: decided for name, decided in worse.items() if decided}:
            output = max(
                regressed, key=lambda name: pairs[name][0].epsilon / max(pairs[name][1].epsilon, verdict.LEAST)
            )
            reason = f"{output}: {regressed[output].reason}; moved since: {fresh.reason or 'nothing that is recorded'}"
            decided = replace(regressed[output], reason=reason)
            return replace(judged, verdict=decided, output=output), fresh.status
        if strict and fresh.status == "STALE":
            return replace(judged, verdict=Verdict("STALE", "G0", fresh.reason)), fresh.status
        return judged, fresh.status

    def decide(self, trial: Trial, seeds: int = SEEDS) -> Judgement:
        """The verdict on a trial, as a test of the matrix comes to it: by its gates, its record and, where the default
        tier compares the case, over seeds beside the other backend.

        A LOSS, TAIL or BIAS is the TPU's verdict, UNFIT the GPU's, OFF CONTRACT over the seeds that of whose it is.
        Without the other backend's framework nothing is compared; seeds whose valid records are there are not run
        again. Raises as `judge`.
        """
        judged, status = judge(trial), ""
        if trial.case.data == "integers" or judged.ended:
            return judged
        if self.root.exists():
            judged, status = self.check(trial, judged, strict=False)
        (other,) = {*BACKENDS} - {trial.backend}
        is_drawn = trial.other is None and trial.given is None
        can_compare = is_drawn and not judged.real and is_here(other, real=False)
        if not judged.verdict.passed or not can_compare or not trial.op.representative(trial.case):
            return judged
        sides = {other: Trial(trial.op, trial.case, other), **({trial.backend: trial} if status == "VALID" else {})}
        recorded = {backend: self._valid(side, seeds) for backend, side in sides.items()}
        known = {backend: found for backend, found in recorded.items() if len(found) == seeds}
        comparison = compare(trial.op, trial.case, seeds, known).comparison
        whose = "gpu" if comparison.verdict.outcome == "UNFIT" else "tpu"
        if comparison.verdict.passed or whose != trial.backend:
            return judged
        return replace(judged, verdict=comparison.verdict, output=comparison.output or judged.output)

    def kinds(self, backend: Backend) -> list[str]:
        """The real device kinds of a backend that have ledgers here."""
        found = ((kind, next(iter(ledger.values()))) for (kind, _), ledger in read_all(self.root, backend).items())
        return sorted({kind for kind, record in found if record.provenance.real})

    def holds(self, trial: Trial, seeds: int, kind: str) -> bool:
        """Whether a device kind has recorded `seeds` seeds of a trial, its own first."""
        ledger = self._of(trial.backend, trial.op).get(kind, {})
        return all((_unseeded(trial.case), trial.case.seed + n) in ledger for n in range(seeds))

    def seeds(self, trial: Trial, seeds: int, *, real: bool, kind: str | None = None) -> Iterator[Judgement | Verdict]:
        """The recorded judgements of `seeds` seeds, the trial's own first, on a real or an emulated device.

        kind: only those of this device kind. A verdict of G0 stands for each that is missing or invalid.
        """
        backend = trial.backend
        for drawn in (trial.case.with_seed(trial.case.seed + n) for n in range(seeds)):
            found = self.find(trial.with_case(drawn), real=real, kind=kind)
            if found is None:
                yield Verdict("NO-RECORD", "G0", f"no {'' if real else 'emulated '}{backend} has recorded {drawn.id}")
            elif found[1].status == "INVALID":
                yield Verdict("INVALID", "G0", f"the {backend}'s record of {drawn.id}: {found[1].reason}")
            else:
                record = found[0]
                output = max(record.outputs, key=lambda name: record.outputs[name].eta_max, default="")
                device = record.provenance.device_kind
                outcome = Verdict(record.verdict, "G0", f"recorded on {device}")
                yield Judgement(drawn, backend, real, outcome, output, record.bound, record.outputs, device=device)

    def _valid(self, trial: Trial, seeds: int) -> list[Judgement]:
        """The recorded judgements of those of `seeds` emulated seeds whose records speak for the code at hand."""
        drawn = [trial.with_seed(trial.case.seed + n) for n in range(seeds)]
        found = [each for each in drawn if (record := self.find(each, real=False)) and record[1].status == "VALID"]
        if len(found) < seeds:
            return []
        return [j for j in self.seeds(trial, seeds, real=False) if isinstance(j, Judgement)]

    def _of(self, backend: Backend, op: Op) -> dict[str, Ledger]:
        """The ledgers of an op by device kind; reading those of every op would take seconds."""
        if (backend, op.name) not in self._ledgers:
            found = read_all(self.root, backend, op.name)
            self._ledgers[backend, op.name] = {kind: ledger for (kind, _), ledger in found.items()}
        return self._ledgers[backend, op.name]

    def _here(self, trial: Trial) -> Provenance:
        return _provenance(trial.op, trial.backend, self.utc)


@cache
def _provenance(op: Op, backend: Backend, utc: str | None) -> Provenance:
    try:
        device_kind, real = runner(backend).device_kind, runner(backend).real
    except ImportError:  # a host without the backend's framework can still check what others have recorded
        device_kind, real = EMULATED, False
    return here(op, backend, device_kind, real, utc)


def _unseeded(case: Case) -> str:
    """What records call a case: its seed stands beside it."""
    return case.with_seed(0).id


def _tiles(case: Case) -> str | None:
    tiling = dict(case.options).get("tiling")
    return "x".join(map(str, tiling)) if isinstance(tiling, tuple) else None
