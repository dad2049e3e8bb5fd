"""Verdicts: pure functions that turn measurements into a named outcome.

Against the golden: G1 shape, dtype, finiteness and repeatability; G2 integer data exact; G3 the contract kept
(`parity.judging.fit`), and every element within the derived bound. Between the backends, on paired seeds: G4 the GPU's
record keeps its contract; G5 the parity rule ε_TPU ≤ ε_GPU; G6 the tail; G7 the bias.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
from scipy import special

from parity.blocks import ELEMENTS
from parity.dtypes import Floats, numpy_dtype, round_to
from parity.judging.metrics import UNDERFLOW, Metrics, explained_by, wrong_finiteness
from parity.op import Expected

Z = 4.0
"""Standard errors that a difference must exceed before it counts, or calls for `SEEDS`."""
SEEDS = 64
"""Seeds that the rule ε_TPU ≤ ε_GPU takes to fail, where both backends are at hand: of eight, whose spread is known no
better than to a third, a tie is beyond four standard errors once in 400 times."""
FALSE = 1e-3
"""False failures that a whole tier may have."""
SAME = 1.02
"""A ratio that is no loss, however sure: so much do contracts leave out, the order of a sum or the series of an exp."""
COMPARED = 1e4
"""Outputs that a tier compares, rounded up to a power of ten."""
TAIL = 1.5
"""How many times the GPU's the TPU's 99.9 % quantile of η may be."""
LEAST = 2.0**-40
"""What ε counts as where it is less, 2^-16 of a float32 roundoff: a seed that comes out exactly has no logarithm."""
TILE = 128
"""Rows and columns of the tile that `wrong_outputs` drops."""


@dataclass(frozen=True)
class Verdict:
    """An outcome by name, the gate that decided it, and one line that says why."""

    outcome: str
    gate: str
    reason: str

    @property
    def passed(self) -> bool:
        """Whether the case counts as passed."""
        return self.outcome in PASSING


PASSING = ("AGREES", "EXACT", "WIN", "TIE", *(f"EXPECTED {outcome}" for outcome in Expected.FAILURES))


def form(y: np.ndarray, again: np.ndarray, golden: Floats, dtype: str) -> Verdict | None:
    """G1: the verdict on an output's shape, dtype, finiteness and repeatability (`again`: a second run), if bad."""
    if y.shape != golden.shape:
        return Verdict("WRONG SHAPE", "G1", f"golden {list(golden.shape)}, got {list(y.shape)}")
    if str(y.dtype) != dtype:
        return Verdict("WRONG DTYPE", "G1", f"asked for {dtype}, got {y.dtype}")
    if again.tobytes() != y.tobytes():
        return Verdict("NOT REPEATABLE", "G1", "two runs on the same inputs differ")
    wrong = wrong_finiteness(y, golden)
    if wrong.any():
        index = tuple(int(i) for i in np.argwhere(wrong)[0])
        reason = f"{int(wrong.sum())} elements finite in one and not in the other, first at {list(index)}"
        return Verdict("NON-FINITE", "G1", reason)
    return None


def holds(dtype: str, golden: Floats) -> bool:
    """Whether a dtype has every value of a golden: only then an output can be held to equal it."""
    with np.errstate(over="ignore", invalid="ignore"):
        return bool(np.all(golden.astype(numpy_dtype(dtype)).astype(np.float64) == golden))


def exactness(y: np.ndarray, golden: Floats) -> Verdict:
    """G2: an output of integer data must equal its golden."""
    wrong = int((y.astype(np.float64) != golden).sum())
    if wrong:
        return Verdict(
            "LOGIC FAULT", "G2", f"{wrong} of {y.size} elements differ on integer data, where every sum is exact"
        )
    return Verdict("EXACT", "G2", "equal to the golden")


def identity(y: np.ndarray, golden: np.ndarray) -> Verdict:
    """G2 of an op that is compared bit for bit: y and its golden of the same shape and dtype have no `other_bits`."""
    wrong = np.argwhere(other_bits(y, golden))
    if not len(wrong):
        return Verdict("EXACT", "G2", "the golden's bits")
    index = tuple(int(i) for i in wrong[0])
    values = ", ".join(f"{name} {x[index]} ({_bits(x)[index]:#x})" for name, x in (("golden", golden), ("got", y)))
    return Verdict(
        "OTHER BITS", "G2", f"{len(wrong)} of {y.size} elements differ in their bits, first at {list(index)}: {values}"
    )


def other_bits(y: np.ndarray, golden: np.ndarray) -> np.ndarray:
    """Which elements of y are other bytes than the golden's, of the same shape and dtype.

    A NaN's sign and payload mean nothing, except in a format of 8 bits, where they are part of the code.
    """
    differ: np.ndarray = _bits(y) != _bits(golden)
    if y.dtype.itemsize > 1:
        differ &= ~(np.isnan(y) & np.isnan(golden))
    return differ


def _bits(x: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(x).view(f"u{x.dtype.itemsize}").reshape(x.shape)


def agreement(metrics: Metrics, bound: float) -> Verdict:
    """G3: every η within the derived bound."""
    if metrics.eta_max > bound:
        return Verdict("OUT OF BOUND", "G3", f"η = {metrics.eta_max:.3g} (bound {bound:.3g})")
    return Verdict("AGREES", "G3", f"η = {metrics.eta_max:.3g} (bound {bound:.3g})")


def mistrusted(golden: Floats, unit: Floats, dtype: str, bound: float) -> Verdict | None:
    """The verdict on the case itself where an obviously wrong output would pass, and `form` as well.

    It passes where no element errs by more than `bound` units.
    """
    for name, wrong in wrong_outputs(golden, bound * UNDERFLOW):
        if not _is_caught(wrong, golden, unit, dtype, bound):
            return Verdict("MISTRUSTED", "G3", f"an output that is {name} would pass (bound {bound:.3g})")
    return None


def _is_caught(wrong: Floats, golden: Floats, unit: Floats, dtype: str, bound: float) -> bool:
    """Whether an element errs by more than `bound` units, rounded to `dtype`; the first block mostly has one."""
    wrong, golden, unit = (x.reshape(-1) for x in (wrong, golden, unit))
    where = np.flatnonzero(wrong != golden)
    for first in range(0, len(where), ELEMENTS):
        at = where[first : first + ELEMENTS]
        y = round_to(wrong[at], dtype)
        if (explained_by(y, golden[at]) > bound * unit[at]).any() or wrong_finiteness(y, golden[at]).any():
            return True
    return False


def wrong_outputs(golden: Floats, flushed: float = 0.0) -> Iterator[tuple[str, Floats]]:
    """Outputs that no case may let pass, by what is wrong with them; only those that differ from the golden.

    flushed: what units that flush subnormals may leave of an element; the last tile is the last with a larger one.
    """
    rows = golden.reshape(-1, 1) if golden.ndim < 2 else golden
    sizes = np.abs(np.nan_to_num(rows, posinf=1, neginf=1))
    nonzero = np.argwhere(sizes > (flushed if sizes.max(initial=0.0) > flushed else 0.0))
    if not len(nonzero):
        return
    yield "all zero", np.zeros_like(golden)
    yield "negated", -golden
    *lead, row, column = nonzero[-1]
    dropped = rows.copy()
    dropped[(*lead, slice(row // TILE * TILE, None), slice(column // TILE * TILE, None))] = 0
    yield "without its last tile", dropped.reshape(golden.shape)
    rolled = np.roll(rows, 1, axis=-2).reshape(golden.shape)
    if not np.array_equal(rolled, golden, equal_nan=True):
        yield "permuted in its rows", rolled


@dataclass(frozen=True)
class Comparison:
    """ε_TPU against ε_GPU over paired seeds: the verdict, the ratio that decided it, its interval, and the output.

    explained: what the ratio is at most by contract, where a declaration asks for it.
    """

    verdict: Verdict
    ratio: float = float("nan")
    low: float = float("nan")
    high: float = float("nan")
    output: str = ""
    explained: float = float("nan")

    def of_output(self, name: str, *, alone: bool) -> Comparison:
        """It, of the output of that name, which the reason has where there are others."""
        reason = self.verdict.reason if alone else f"{name}: {self.verdict.reason}"
        return replace(self, output=name, verdict=replace(self.verdict, reason=reason))


def compare(tpu: Sequence[Metrics], gpu: Sequence[Metrics], *, narrow_output: bool, tau: float = 0.0) -> Comparison:
    """The rule ε_TPU ≤ ε_GPU (G5 to G7), from the same seeds in the same order.

    `narrow_output`: the output is narrower than the accumulator. τ: how much larger ε_TPU may be. Raises ValueError for
    unpaired or missing seeds.
    """
    if len(tpu) != len(gpu) or not tpu:
        raise ValueError(f"tpu and gpu must be paired seeds, at least one, got {len(tpu)} and {len(gpu)}")
    decided = parity(tpu, gpu, Statistic.of((*tpu, *gpu), narrow_output), tau)
    worse = tail(tpu, gpu, tau) or bias(tpu, gpu)
    return replace(decided, verdict=worse) if decided.verdict.passed and worse else decided


def unfit(off: Verdict) -> Verdict:
    """G4: UNFIT where the GPU is what is off its contract.

    A TF32 or a broken result of its must never make the rule easy.
    """
    return replace(off, outcome="UNFIT", gate="G4")


def parity(tpu: Sequence[Metrics], gpu: Sequence[Metrics], statistic: Statistic, tau: float) -> Comparison:
    """G5: WIN, TIE or LOSS.

    LOSS where mean(ln T_TPU - ln T_GPU) > ln(1 + τ) + z·max(sd, noise)/√S, unless it is below ln(1 + τ) + ln `SAME` or
    ε_TPU is within 1.05 of the floor; WIN where the mean is below the negative margin. sd is the spread over S seeds,
    noise what sampling alone causes.
    """
    mean, margin = _log_ratio(tpu, gpu, statistic)
    ratio, low, high = (float(np.exp(x)) for x in (mean, mean - margin, mean + margin))
    at_floor = not statistic.narrow and all(t.epsilon <= 1.05 * t.floor for t in tpu)
    if mean > np.log1p(tau) + max(margin, np.log(SAME)) and not at_floor:
        outcome = "LOSS"
    elif mean < -margin:
        outcome = "WIN"
    else:
        outcome = "TIE"
    reason = f"{statistic.name} {ratio:.3g}× [{low:.3g}, {high:.3g}] τ={tau:g}"
    return Comparison(Verdict(outcome, "G5", reason), ratio, low, high)


def tail(tpu: Sequence[Metrics], gpu: Sequence[Metrics], tau: float) -> Verdict | None:
    """G6: TAIL where the 99.9 % quantile of η exceeds 1.5·(1 + τ) times the GPU's by more than sampling does."""
    mean, margin = tail_log_ratio(tpu, gpu)
    if mean > np.log(TAIL * (1 + tau)) + margin:
        return Verdict("TAIL", "G6", f"the 99.9 % quantile of η is {np.exp(mean):.3g}× the GPU's")
    return None


def tail_log_ratio(a: Sequence[Metrics], b: Sequence[Metrics]) -> tuple[float, float]:
    """The mean over seeds of ln q_a - ln q_b, and z standard errors of it; q: the 99.9 % quantile of η, 1 at least.

    The quantile of N normal errors lies at 3.29 standard deviations, where the density is 0.00356, and so varies by
    2.7/√N of itself. In a few elements it is the largest error, which says nothing.
    """
    logs = np.array([np.log(max(x.eta_q999, 1) / max(y.eta_q999, 1)) for x, y in _pairs(a, b)])
    return float(logs.mean()), margin_of(logs, max(2.7 * (2 / max(x.scored, 1)) ** 0.5 for x in a))


def bias(tpu: Sequence[Metrics], gpu: Sequence[Metrics]) -> Verdict | None:
    """G7: BIAS where |bias|·√N exceeds 6 and the GPU's by more than sampling does."""
    ours, theirs = Bias.of(tpu), Bias.of(gpu)
    if ours.exceeds(theirs):
        return Verdict("BIAS", "G7", f"|bias|·√N = {ours.size:.3g} ± {ours.noise:.2g} (the GPU's {theirs.size:.3g})")
    return None


@dataclass(frozen=True)
class Bias:
    """How far errors have a sign in common.

    size: |mean e| / rms e · √N over all seeds together.
    noise: its standard error where they have none. 1 if the N elements err each on its own; more, as the seeds show, if
    some err together: an error in a weight of a token is in all elements of the token, whose mean then is that of a
    few large numbers.
    """

    size: float
    noise: float = 1.0

    @classmethod
    def of(cls, measured: Sequence[Metrics]) -> Bias:
        """The bias of a kernel that was measured on these seeds."""
        means = np.array([m.bias for m in measured])
        scored = sum(m.scored for m in measured)
        spread = float(means.std(ddof=1)) if len(means) > 1 else 0.0
        size = abs(float(means.mean())) * float(np.sqrt(scored))
        return cls(size, max(spread * float(np.sqrt(scored / len(means))), 1.0))

    def exceeds(self, other: Bias) -> bool:
        """Whether it counts beside a reference's."""
        return self.size > 6 * self.noise and self.size > other.size + Z * max(self.noise, other.noise)


def is_expected(expected: Expected, compared: Comparison) -> bool:
    """Whether it is the declared failure."""
    of_ratio = compared.low, compared.high, compared.explained
    return expected.admits(compared.verdict.outcome, compared.output, *of_ratio)


def held_to(expected: Expected | None, compared: Comparison) -> Verdict:
    """The verdict on an output's comparison where a failure is declared: the declared one passes, and a pass fails.

    Every other verdict stays as it is.
    """
    decided = compared.verdict
    if expected is None or (expected.explained and decided.passed):
        return decided
    why = ": ".join(filter(None, (expected.output, expected.reason)))
    if expected.explained:
        why = f"at most {compared.explained:.3g}× by contract: {why}"
    if is_expected(expected, compared):
        return replace(decided, outcome=f"EXPECTED {expected.verdict}", reason=f"{decided.reason}; {why}")
    if decided.passed:
        reason = f"{decided.outcome} {decided.reason}, declared {expected.verdict}: {why}"
        return replace(decided, outcome="UNEXPECTED PASS", reason=reason)
    return replace(decided, reason=f"{decided.reason}; {why}") if expected.explained else decided


def regression(now: Metrics, then: Metrics, *, narrow_output: bool) -> Verdict | None:
    """REGRESSION where the error has grown since it was recorded on the same inputs, by more than sampling does."""
    statistic = Statistic.of((now, then), narrow_output)
    mean, margin = _log_ratio([now], [then], statistic)
    at_floor = not statistic.narrow and now.epsilon <= 1.05 * now.floor
    if mean > margin and not at_floor:
        return Verdict("REGRESSION", "G5", f"{statistic.name} is {np.exp(mean):.3g}× what the ledger has")
    return None


@dataclass(frozen=True)
class Statistic:
    """T, what is compared: ε, or where nothing but the rounding of a narrow output is left of it, the misround rate."""

    narrow: bool

    @classmethod
    def of(cls, measured: Sequence[Metrics], narrow_output: bool) -> Statistic:
        """What to compare these by: the misround rate only where ε is the output's rounding on all of them."""
        excess = [np.sqrt(max((m.epsilon - m.floor) * (m.epsilon + m.floor), 0.0)) for m in measured]
        return cls(narrow_output and all(x < 0.05 * m.floor for x, m in zip(excess, measured, strict=True)))

    @property
    def name(self) -> str:
        """In words."""
        return "misround rate" if self.narrow else "ε"

    def log(self, m: Metrics) -> float:
        """ln T; half an element is added to a count, so that a faultless seed has a logarithm."""
        if self.narrow:
            return float(np.log((m.misrounded * m.scored + 0.5) / (m.scored + 1)))
        return float(np.log(max(m.epsilon, LEAST)))

    def noise(self, a: Metrics, b: Metrics) -> float:
        """Standard deviation of ln T_a - ln T_b from sampling: 1.26/√N of ε, 1/count + 1/count of a count."""
        if self.narrow:
            return float(np.sqrt(sum(1 / (m.misrounded * m.scored + 0.5) for m in (a, b))))
        return 1.26 / float(np.sqrt(max(a.scored, 1)))


def _pairs(a: Sequence[Metrics], b: Sequence[Metrics]) -> list[tuple[Metrics, Metrics]]:
    return list(zip(a, b, strict=True))


def _log_ratio(a: Sequence[Metrics], b: Sequence[Metrics], statistic: Statistic) -> tuple[float, float]:
    """The mean over seeds of ln T_a - ln T_b, and z standard errors of it."""
    logs = np.array([statistic.log(x) - statistic.log(y) for x, y in _pairs(a, b)])
    return float(logs.mean()), margin_of(logs, max(statistic.noise(x, y) for x, y in _pairs(a, b)))


def margin_of(logs: np.ndarray, noise: float = 0.0) -> float:
    """z standard errors of a mean over seeds: by their own spread, and by `noise` where that is larger."""
    spread = float(logs.std(ddof=1)) if len(logs) > 1 else 0.0
    return _z(len(logs)) * max(spread, noise) / float(np.sqrt(len(logs)))


def _z(seeds: int) -> float:
    """Standard errors by which a mean over so many seeds must differ: of `SEEDS` Student's quantile, so that a tier of
    ties fails falsely no more than once in a thousand times."""
    return Z if seeds < SEEDS else float(-special.stdtrit(seeds - 1, FALSE / COMPARED))
