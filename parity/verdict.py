"""Verdicts: pure functions that turn measurements into a named outcome.

Against the golden: G1 shape, dtype, finiteness and repeatability; G2 integer data exact; G3 every element within the
a-priori bound. Between the backends: the parity rule ε_TPU ≤ ε_GPU (G5), on paired seeds.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from parity.dtypes import Floats, round_to
from parity.metrics import Metrics, Scale, eta, explained_by

Z = 4.0
"""Standard errors that a difference must exceed before it counts."""
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


PASSING = ("AGREES", "EXACT", "WIN", "TIE")


def form(y: np.ndarray, again: np.ndarray, golden: Floats, dtype: str) -> Verdict | None:
    """G1: the verdict on an output's shape, dtype, finiteness and repeatability (`again`: a second run), if bad."""
    if y.shape != golden.shape:
        return Verdict("WRONG SHAPE", "G1", f"golden {list(golden.shape)}, got {list(y.shape)}")
    if str(y.dtype) != dtype:
        return Verdict("WRONG DTYPE", "G1", f"asked for {dtype}, got {y.dtype}")
    if again.tobytes() != y.tobytes():
        return Verdict("NOT REPEATABLE", "G1", "two runs on the same inputs differ")
    wrong = np.isfinite(golden) != np.isfinite(y.astype(np.float64))
    if wrong.any():
        index = tuple(int(i) for i in np.argwhere(wrong)[0])
        reason = f"{int(wrong.sum())} elements finite in one and not in the other, first at {list(index)}"
        return Verdict("NON-FINITE", "G1", reason)
    return None


def exactness(y: np.ndarray, golden: Floats) -> Verdict:
    """G2: an output of integer data must equal its golden. Raises ValueError where y's dtype cannot hold the golden."""
    if np.any(golden.astype(y.dtype).astype(np.float64) != golden):
        raise ValueError(f"golden must be exact in {y.dtype} on integer data, got values that are not")
    wrong = int((y.astype(np.float64) != golden).sum())
    if wrong:
        return Verdict(
            "LOGIC FAULT", "G2", f"{wrong} of {y.size} elements differ on integer data, where every sum is exact"
        )
    return Verdict("EXACT", "G2", "equal to the golden")


def agreement(metrics: Metrics, bound: float) -> Verdict:
    """G3: every η within the a-priori bound."""
    if metrics.eta_max > bound:
        return Verdict("OUT OF BOUND", "G3", f"η = {metrics.eta_max:.3g} (bound {bound:.3g})")
    return Verdict("AGREES", "G3", f"η = {metrics.eta_max:.3g} (bound {bound:.3g})")


def mistrusted(golden: Floats, scale: Scale, dtype: str, bound: float) -> Verdict | None:
    """The verdict on the case itself where an obviously wrong output would pass its bound."""
    for name, wrong in wrong_outputs(golden):
        differs = np.nonzero(explained_by(round_to(wrong, dtype), golden) != 0)
        if not np.any(eta(round_to(wrong[differs], dtype), golden[differs], scale.at(differs)) > bound):
            return Verdict("MISTRUSTED", "G3", f"an output that is {name} would pass (bound {bound:.3g})")
    return None


def wrong_outputs(golden: Floats) -> Iterator[tuple[str, Floats]]:
    """Outputs that no case may let pass, by what is wrong with them; only those that differ from the golden."""
    rows = golden.reshape(-1, 1) if golden.ndim < 2 else golden
    nonzero = np.argwhere(np.nan_to_num(rows, posinf=1, neginf=1) != 0)
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
class Parity:
    """ε_TPU against ε_GPU over paired seeds: the verdict, their ratio and its interval."""

    verdict: Verdict
    ratio: float
    low: float
    high: float


def parity(tpu: Sequence[Metrics], gpu: Sequence[Metrics], *, narrow_output: bool, tau: float = 0.0) -> Parity:
    """G5: WIN, TIE or LOSS of the TPU's error against the GPU's, from the same seeds in the same order.

    The statistic T is ε, or the misround rate where the output is narrower than the accumulator (`narrow_output`) and ε
    is nothing but its rounding on both backends.
    LOSS where mean(ln T_TPU - ln T_GPU) > ln(1 + τ) + z·max(sd, noise)/√S, unless ε_TPU is within 1.05 of the floor;
    WIN where the mean is below the negative margin. sd is the spread over S seeds; noise is what one seed's sampling
    alone causes: 1.26/√N of ε over N elements, the square root of 1/count + 1/count of the misrounded elements.
    Raises ValueError for unpaired or missing seeds.
    """
    if len(tpu) != len(gpu) or not tpu:
        raise ValueError(f"tpu and gpu must be paired seeds, at least one, got {len(tpu)} and {len(gpu)}")
    narrow = narrow_output and all(_excess(m) < 0.05 * m.floor for m in (*tpu, *gpu))
    statistic, noise = (_misround_rate, _misround_noise) if narrow else (_epsilon, _epsilon_noise)
    logs = np.array([np.log(statistic(t)) - np.log(statistic(g)) for t, g in zip(tpu, gpu, strict=True)])
    spread = float(logs.std(ddof=1)) if len(logs) > 1 else 0.0
    margin = Z * max(spread, *(noise(t, g) for t, g in zip(tpu, gpu, strict=True))) / np.sqrt(len(logs))
    mean = float(logs.mean())
    ratio, low, high = (float(np.exp(x)) for x in (mean, mean - margin, mean + margin))
    at_floor = not narrow and all(t.epsilon <= 1.05 * t.floor for t in tpu)
    if mean > np.log1p(tau) + margin and not at_floor:
        outcome = "LOSS"
    elif mean < -margin:
        outcome = "WIN"
    else:
        outcome = "TIE"
    reason = f"{'misround rate' if narrow else 'ε'} {ratio:.3g}× [{low:.3g}, {high:.3g}] τ={tau:g}"
    return Parity(Verdict(outcome, "G5", reason), ratio, low, high)


def _excess(m: Metrics) -> float:
    """What the computation adds to the floor of the output's rounding."""
    return float(np.sqrt(max(m.epsilon**2 - m.floor**2, 0.0)))


def _epsilon(m: Metrics) -> float:
    return max(m.epsilon, float(np.finfo(np.float64).tiny))


def _epsilon_noise(t: Metrics, g: Metrics) -> float:
    return 1.26 / float(np.sqrt(max(t.elements, 1)))


def _misround_rate(m: Metrics) -> float:
    """With half an element added, so that a faultless seed has a logarithm."""
    return (m.misrounded * m.elements + 0.5) / (m.elements + 1)


def _misround_noise(t: Metrics, g: Metrics) -> float:
    return float(np.sqrt(sum(1 / (m.misrounded * m.elements + 0.5) for m in (t, g))))
