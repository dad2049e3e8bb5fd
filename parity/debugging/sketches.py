"""Where the error of a recorded output comes from, as far as its sketch says: of the tensor there is none.

A record has the size of the error, a histogram, a map of tiles and the places of the worst elements, but no signs. So
no share of the error can be explained; but the inputs are drawn again, and a rounding whose emulation is as large and
has its worst elements at the same places is a likely one.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from parity.debugging.contrasts import Contrast, contrast, spelled
from parity.debugging.roundings import Emulator, Field, Rounding, one_more
from parity.dtypes import round_to
from parity.inputs import hashes
from parity.judging.fit import Fit, K
from parity.judging.judge import explained, fits_of
from parity.judging.metrics import Metrics, measure
from parity.judging.verdict import PASSING
from parity.ledger.schema import Record
from parity.trial import Trial

LARGEST_ROUNDING = 2.0**-5
"""|error| / M that roundings of bfloat16 operands, sums and results do not reach."""
AS_LARGE = 0.1
"""By how much, relatively, ε of a likely rounding may differ from the record's."""
SAME_PLACES = 0.75
"""The share of the worst elements that a likely rounding has at the record's places."""
FEW = 0.4
"""The share of all elements up to which it says something that the worst ones are all among them."""


@dataclass(frozen=True)
class Suspect:
    """Roundings, the places of the record's worst elements that they have too, and their ε over the record's."""

    roundings: tuple[Rounding, ...]
    shared: float
    ratio: float

    @property
    def likely(self) -> bool:
        """Whether the sketch could be theirs."""
        return self.shared >= SAME_PLACES and abs(self.ratio - 1) <= AS_LARGE


@dataclass(frozen=True)
class Place:
    """A worst element of a recorded output: what it should be, and how far it may be from that."""

    index: tuple[int, ...]
    golden: float
    allowed: float


@dataclass(frozen=True)
class Sketch:
    """A recorded case, explained as far as that goes.

    fault: why no rounding can be behind it, "" if one can. drawn: whether the inputs are drawn today as they were for
    the record; if not all that follows is empty. fit: how the output fits the contract of today, as a whole. common: of
    each axis the bins that the worst elements are in, where those hold few of all elements. suspect: the roundings that
    come nearest.
    """

    record: Record
    output: str
    metrics: Metrics
    contrasts: tuple[Contrast, ...]
    fault: str
    drawn: bool
    fit: Fit | None = None
    places: tuple[Place, ...] = ()
    common: tuple[tuple[str, str], ...] = ()
    suspect: Suspect | None = None

    @property
    def conclusion(self) -> str:
        """In one sentence, and what is left open in another."""
        if not self.drawn:
            return "the inputs are drawn differently today: size and place are all that this record says"
        if self.metrics.eta_max == 0:
            return "no error: every element is the golden, correctly rounded"
        if self.fault:
            return f"a logic fault, not a rounding: {self.fault}. Which one, its sketch cannot say"
        nearest = "no rounding of a named site is as large"
        if suspect := self.suspect:
            named = " and ".join(map(str, suspect.roundings))
            nearest = f"{named}, with {suspect.shared:.0%} of the worst elements at the same places"
            nearest += f" and {suspect.ratio:.2f} × ε"
            if suspect.likely:
                return f"likely {nearest}. Signs are not recorded: a run, explained, is the proof"
        if self.record.verdict in PASSING:
            return f"error within its bound, of roundings that no site has alone (nearest: {nearest})"
        return f"open (nearest: {nearest}). Without signs a rounding of no named site looks like a small fault of logic"


def explain_record(trial: Trial, record: Record, done: Callable[[int], None] = lambda emulations: None) -> Sketch:
    """Explain the worst output of a record of a trial's case and seed. `done` as in `explain`.

    Raises ValueError for an op that is compared bit for bit, and for a record without a sketch.
    """
    case = trial.case
    if trial.op.bit_exact:
        raise ValueError(f"record must have a sketch, got that of {case.id}, compared bit for bit: {record.verdict}")
    if not record.outputs:
        raise ValueError(f"the record of {case.id} must have a sketch, has none: its verdict is {record.verdict}")
    expected = trial.reference
    drawn = dict(record.inputs) == hashes(expected.inputs)
    drawn &= all(n in expected.golden and m.elements == expected.golden[n].size for n, m in record.outputs.items())
    allowed = explained(trial) if drawn else {}
    fits = fits_of(trial, allowed, record.outputs)
    output = max(
        record.outputs, key=lambda name: (fits[name].load if name in fits else 0.0, record.outputs[name].eta_max)
    )
    metrics = record.outputs[output]
    tiles = np.array(metrics.tiles, ndmin=2)
    rows, columns = (np.arange(size) for size in tiles.shape)
    contrasts = contrast(tiles, {"tile row": rows[:, None], "tile column": columns})
    if not drawn:
        return Sketch(record, output, metrics, contrasts, "", drawn)
    limit = K * allowed[output].sigma if output in allowed else record.bound * trial.scale(output).unit
    places = tuple(Place(index, float(expected.golden[output][index]), float(limit[index])) for index in metrics.worst)
    fault = _fault(metrics, trial.contract.roundoff)
    suspect = None if fault or not metrics.eta_max else _suspect(trial, output, metrics, done)
    common = _common(trial, output, metrics)
    return Sketch(record, output, metrics, contrasts, fault, drawn, fits.get(output), places, common, suspect)


def _fault(metrics: Metrics, roundoff: float) -> str:
    """Why no rounding makes this error; "" where one may."""
    if metrics.wrong_finiteness:
        return f"{metrics.wrong_finiteness:,} elements are finite and should not be, or are not and should be"
    largest = metrics.eta_max * roundoff
    return f"the largest error is {largest:.2g} of its sum of absolute terms" if largest > LARGEST_ROUNDING else ""


def _common(trial: Trial, output: str, metrics: Metrics) -> tuple[tuple[str, str], ...]:
    found = []
    for axis, labels in trial.axes(output).items():
        spread = np.broadcast_to(labels, trial.reference.golden[output].shape)
        bins = np.unique([spread[index] for index in metrics.worst])
        if bins.size and np.isin(spread, bins).mean() <= FEW:
            found.append((axis, spelled(bins)))
    return tuple(found)


def _suspect(trial: Trial, output: str, metrics: Metrics, done: Callable[[int], None]) -> Suspect | None:
    """The roundings that have most of the worst elements, found greedily; of as many those whose ε is nearest."""
    emulator, expected = Emulator(trial, output, done), trial.reference
    golden, dtype, scale = expected.golden[output], trial.contract.dtype(output), trial.scale(output)
    field = Field.of(round_to(golden, dtype), expected, output)
    places = set(metrics.worst)

    def tried(chosen: tuple[Rounding, ...]) -> Suspect:
        emulated = measure(round_to(emulator.run(chosen)[output], dtype), golden, scale)
        shared = len(places.intersection(emulated.worst)) / max(len(places), 1)
        return Suspect(chosen, shared, emulated.epsilon / metrics.epsilon if metrics.epsilon else 0.0)

    def rank(suspect: Suspect) -> tuple[float, float]:
        return suspect.shared, -abs(float(np.log(max(suspect.ratio, 1e-300))))

    best = Suspect((), 0.0, 0.0)
    candidates = [c for c in emulator.candidates() if emulator.may_explain(c, field, metrics.epsilon)]
    while not best.likely:
        nearest = max(map(tried, one_more(best.roundings, candidates)), key=rank, default=best)
        if nearest.shared <= best.shared:
            break
        best = nearest
    return best if best.roundings else None
