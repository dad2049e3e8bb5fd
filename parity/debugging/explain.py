"""Where the error of one case comes from: which rounding, at which site of the staged golden, or no rounding at all.

It needs the kernel's output and nothing else: no dumps, no debugging build. A loss of precision leaves a fingerprint:
rounding the same values at the same place errs by the same amounts, sign for sign. So the golden is run with every
candidate rounding in turn, and the set whose error field is the kernel's is the answer. An error that no rounding
makes is a fault of logic, and then *where* it is says most.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Set
from dataclasses import dataclass, replace

import numpy as np

from parity.debugging.attribution import MENDED, outputs_in_float64
from parity.debugging.contrasts import LOCAL, Contrast, Source, contrast, in_parts, likeness, source
from parity.debugging.instead import other_call
from parity.debugging.roundings import EXPLAINED, FEW, GAIN, Attribution, Field, attribute
from parity.dtypes import Floats, round_to
from parity.judging.fit import K
from parity.judging.judge import Judgement, explained, judge, judge_twin
from parity.judging.metrics import eta
from parity.op import Op
from parity.trial import Trial


@dataclass(frozen=True)
class Explanation:
    """One case on one backend, explained.

    kind: "exact", "rounding" (of the named sites), "noise" (within the bound, and not all of it named), "precision"
    (beyond it, by no rounding of a named site), "unstable" (float64 mends nearly all of it), "logic", "overflow"
    (finite in float64 alone), "unknown" (one of these: there is no float64 evaluation; `why`, if that is said), "form"
    (no result of the golden's form). twin: the same case on integer data.
    source: what of the sums the error is made of, where one thing is all of it. alike: what of the golden the output
    has where it is wrong, in words. errors: of the output's elements, in what `symbol` says: |δ|/σ or, without a
    contract's sites, η.
    """

    judged: Judgement
    twin: Judgement | None
    attribution: Attribution
    contrasts: tuple[Contrast, ...]
    kind: str
    source: Source | None = None
    errors: Floats | None = None
    symbol: str = "η"
    alike: str = ""
    why: str = ""

    @property
    def region(self) -> str:
        """Where the error is, in words."""
        first = next(iter(self.contrasts), None)
        return f"in {first.axis} {first.bin}" if first and first.contrast >= LOCAL else "everywhere"

    @property
    def conclusion(self) -> str:
        """In one sentence."""
        named = " and ".join(map(str, self.attribution.roundings))
        share = f"{max(self.attribution.explained, 0.0):.0%} explained"
        source = f": {self.source or self.alike}" if self.source or self.alike else ""
        nearest = f" (nearest: {named}, {share})" if named and self.attribution.explained >= GAIN else ""
        return {
            "exact": "no error: every element is the golden, correctly rounded",
            "rounding": f"error {self.attribution.where}{' ' if self.attribution.where else ''}= {named}, {share}",
            "noise": f"error within its bound, of many roundings of which none stands out{nearest}",
            "precision": f"precision is lost {self.region}, by no named site's rounding alone: in float64 the kernel "
            f"keeps its contract{nearest}",
            "unstable": f"precision is lost {self.region}, by an unstable computation: in float64 the error is less "
            f"than {MENDED:g} of it, and still beyond the contract",
            "logic": f"not explained by rounding: a logic fault {self.region}{source}; "
            "in float64 the kernel is wrong too",
            "overflow": f"not finite {self.region}, where in float64 the kernel is and keeps its contract: a narrower "
            "dtype overflows (parity stages says where)",
            "form": f"nothing to explain: {self.judged.verdict.reason}",
            "unknown": f"error {self.region}, not explained by a rounding at the golden's sites{nearest}: a fault of "
            f"logic, or precision lost elsewhere{self.why and f' ({self.why})'}",
        }[self.kind]


def explain(
    trial: Trial,
    done: Callable[[int], None] = lambda emulations: None,
    *,
    judged: Judgement | None = None,
    output: str = "",
    ops: Iterable[Op] = (),
) -> Explanation:
    """Explain the error of an output of a trial: by default of the one that is furthest off.

    done: called with the number of emulations made so far. judged: the verdict, where it is known. ops: the matrix, see
    `lines_compared_bit_for_bit`. Raises ValueError for an op that is compared bit for bit (`parity.debugging.bits` is
    for those) and for an output that the op does not have, ImportError where the backend's framework is missing.
    """
    if trial.op.bit_exact:
        raise ValueError(f"case must be of an op whose results are rounded, got {trial.case.id} of a bit-exact one")
    judged = judged or judge(trial)
    name = output_named(trial, output) or judged.output
    judged = replace(judged, output=name)
    expected, ys = trial.reference, {} if judged.ended else trial.run()
    whole = {n: y for n, y in ys.items() if n in expected.golden and y.shape == expected.golden[n].shape}
    if name not in whole:
        return Explanation(judged, None, Attribution((), 0.0), (), "form")
    fields = {n: Field.of(y, expected, n) for n, y in whole.items()}
    field = fields[name]
    errors, symbol = _errors(trial, name, whole[name], field)
    axes = trial.axes(name)
    contrasts = contrast(errors, {**axes, **in_parts(errors.shape, axes)})
    attribution = attribute(trial, name, fields, done)
    kind, why = _kind(trial, judged, attribution, field, frozenset(ops))
    if kind in ("precision", "unknown") and contrasts:
        more = _in_bins(trial, name, field, contrasts[0], done) or attribute(trial, name, fields, done, at_visits=True)
        if more.explained >= EXPLAINED:
            attribution, kind = more, "rounding"
    twin = judged.twin or judge_twin(trial) or (judged if trial.exact else None)
    found, alike = None, ""
    if kind == "logic":
        found = source(trial, name, field) if field.power else None
        y = whole[name]
        alike = "" if found else likeness(y, expected.golden[name], axes) or str(other_call(trial, name, y) or "")
    return Explanation(judged, twin, attribution, contrasts, kind, found, errors, symbol, alike, why)


def _in_bins(trial: Trial, name: str, whole: Field, first: Contrast, done: Callable[[int], None]) -> Attribution | None:
    """The roundings that make the error in the bins that carry it, where that explains it; else None."""
    if first.contrast < LOCAL or first.inside is None or first.share < EXPLAINED:
        return None
    part = whole.within(first.inside)
    if part.error.size < FEW:
        return None
    found = attribute(trial, name, {name: part}, done)
    if found.explained < EXPLAINED:
        found = attribute(trial, name, {name: part}, done, at_visits=True)
    return replace(found, where=f"in {first.axis} {first.bin}") if found.explained >= EXPLAINED else None


def output_named(trial: Trial, output: str) -> str:
    """The output of that name, "" where none is asked for. Raises ValueError for one that the op does not have."""
    if output and output not in trial.reference.golden:
        raise ValueError(f"output must be one of {', '.join(trial.reference.golden)}, got {output!r}")
    return output


def _errors(trial: Trial, name: str, y: np.ndarray, field: Field) -> tuple[Floats, str]:
    """|δ| of each element in σ of its contract or, where that names no sites, in η; infinite where it is wrong."""
    allowed = explained(trial).get(name)
    golden = trial.reference.golden[name]
    errors = allowed.sigmas(y) if allowed else eta(y, golden, trial.scale(name))
    return np.where(field.wrong, np.inf, np.nan_to_num(errors, posinf=np.inf)), "|δ|/σ" if allowed else "η"


def _kind(trial: Trial, judged: Judgement, attribution: Attribution, field: Field, ops: Set[Op]) -> tuple[str, str]:
    """What the error is: a rounding that was found or, of a kernel that fails, logic where float64 does not mend it.

    With it why that is unknown, of a kernel that cannot be followed.
    """
    if not field.power and not field.wrong.any():
        return "exact", ""
    if attribution.explained >= EXPLAINED and not field.wrong.any():
        return "rounding", ""
    if judged.verdict.passed:
        return "noise", ""
    try:
        exact = outputs_in_float64(trial, ops)[judged.output]
    except Exception as error:  # whatever a broken kernel raises where each of its steps is followed
        return "unknown", str(error) if isinstance(error, NotImplementedError) else ""
    if not _keeps_contract(trial, judged.output, exact):
        return "unstable" if _is_mended(trial, judged.output, exact, field) else "logic", ""
    return "overflow" if field.wrong.any() else "precision", ""


def _is_mended(trial: Trial, name: str, exact: Floats, field: Field) -> bool:
    """Whether float64 leaves little of an output's error, and little of each element's that it leaves most of.

    The second, for what a kernel reads beyond its arrays is another number in each run.
    """
    left = Field.of(exact, trial.reference, name)
    if field.wrong.any() or left.wrong.any() or left.size >= MENDED * field.size:
        return False
    most = np.abs(left.error) >= left.largest / 2
    return bool(np.all(np.abs(left.error[most]) < MENDED * np.abs(field.error[most])))


def _keeps_contract(trial: Trial, name: str, exact: Floats) -> bool:
    """Whether an output of a kernel in float64, rounded once to its dtype, is within its contract."""
    golden = trial.reference.golden[name]
    if exact.shape != golden.shape or (np.isfinite(exact) != np.isfinite(golden)).any():
        return False
    y = round_to(exact, trial.contract.dtype(name))
    if (allowed := explained(trial).get(name)) is None:
        return bool((eta(y, golden, trial.scale(name)) <= trial.bound).all())
    fit = allowed.fit(name, y, {})
    return fit.sigmas <= K and fit.load <= 1
