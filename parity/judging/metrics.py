"""How far an output is from its golden: pure functions of arrays.

The error of one element is measured as the *compute error that explains it*: the smallest |δ| for which the golden
plus δ, correctly rounded to the output dtype, is what the kernel returned.

    η = min{ |δ| : RN_out(g + δ) = y } / (u_c · M + ω)

It is 0 for a correctly rounded result in any output dtype, and it counts everything else in units of the
accumulator's roundoff over M, so a bfloat16 output hides nothing: an error that a tolerance of half an output ulp
would swallow shows as soon as it moves a rounding. ω = (fan-in + 1) · smallest normal float32 allows for units that
flush subnormals.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from parity.blocks import in_blocks
from parity.dtypes import UNIT_ROUNDOFF, Floats, neighbour, round_to

REVISION = 1

HISTOGRAM = np.arange(-32.0, 33.0)
"""Edges, in log2 η, of the 64 bins; zeros and what lies below go to the first, what lies above to the last."""
MAP = 8
"""Tiles along each of the last two axes of the η map."""
TOP = 8
"""Worst elements kept."""
UNDERFLOW = 1024 * float(np.finfo(np.float32).tiny)
"""What units that flush subnormals may lose in a sum of a thousand terms: in an element, and in each label."""


@dataclass(frozen=True)
class Scale:
    """What errors are measured in: the magnitude M of each element, the accumulator's roundoff u_c, the fan-in."""

    magnitude: Floats
    roundoff: float
    fan_in: int

    @property
    def unit(self) -> Floats:
        """u_c · M + ω, the compute error that counts as η = 1."""
        return self.roundoff * self.magnitude + (self.fan_in + 1) * float(np.finfo(np.float32).tiny)

    def at(self, index: Any) -> Scale:
        """The scale of some elements."""
        return Scale(self.magnitude[index], self.roundoff, self.fan_in)


@dataclass(frozen=True)
class Metrics:
    """One output of one case and seed against its golden. Errors e = (y - g) / M and f = (RN_out(g) - g) / M."""

    elements: int
    scored: int  # of them: finite in both, with something summed behind them; what E, F, ρ and bias are taken over
    epsilon: float  # E = rms(e), this is ε
    floor: float  # F = rms(f), a correctly rounded result's
    misrounded: float  # ρ, share of elements that are not RN_out(g)
    eta_max: float
    eta_q999: float
    bias: float  # mean(e) / rms(e)
    wrong_finiteness: int  # elements finite in one and not in the other
    differing: int  # elements with η > 0
    worst: tuple[tuple[int, ...], ...]  # indices, worst first
    histogram: tuple[int, ...]  # of η > 0, `HISTOGRAM`
    tiles: tuple[tuple[float, ...], ...]  # rms η over `MAP` x `MAP` tiles of the last two axes

    def power(self, shape: tuple[int, ...]) -> float:
        """The mean square of η over an output of this shape, from its tiles."""
        if not self.tiles:
            return 0.0
        rows, columns = (np.diff(edges) for edges in _edges(shape))
        return float(np.average(np.square(self.tiles), weights=np.outer(rows, columns)))


def is_measurable(y: np.ndarray, golden: Floats) -> bool:
    """Whether an output can be measured against its golden: one of its shape, of floating point numbers."""
    return y.shape == golden.shape and str(y.dtype) in UNIT_ROUNDOFF


def wrong_finiteness(y: np.ndarray, golden: Floats) -> np.ndarray:
    """Which elements are finite in one of y and its golden and not in the other: bool, of their shape."""
    with np.errstate(invalid="ignore"):  # signalling NaNs
        result: np.ndarray = np.isfinite(golden) != np.isfinite(y.astype(np.float64))
    return result


def explained_by(y: np.ndarray, golden: Floats) -> Floats:
    """|δ|: the smallest change of `golden` (float64) that one correct rounding to y's dtype turns into `y`.

    NaN where either is not finite.
    """
    return in_blocks(_explained, y, golden, dtype=np.float64)


def _explained(y: np.ndarray, golden: Floats) -> Floats:
    with np.errstate(invalid="ignore"):  # signalling NaNs
        value = y.astype(np.float64)
        above = golden > value
        gap = np.abs(neighbour(y, above) - value)
        if not np.isfinite(gap).all():  # of the largest number, which rounds as if there were a next
            gap = np.where(np.isfinite(gap), gap, np.abs(neighbour(y, ~above) - value))
        beyond = np.abs(golden - value) - gap / 2
    return np.where(np.isfinite(value) & np.isfinite(golden), np.maximum(beyond, 0), np.nan)


def eta(y: np.ndarray, golden: Floats, scale: Scale) -> Floats:
    """η of every element, 0 where neither side is finite; see the module's docstring."""
    with np.errstate(invalid="ignore"):
        return np.nan_to_num(explained_by(y, golden) / scale.unit, nan=0.0, posinf=np.inf)


def measure(y: np.ndarray, golden: Floats, scale: Scale) -> Metrics:
    """`Metrics` of an output `y` in its own dtype against its float64 golden of the same shape."""
    with np.errstate(invalid="ignore"):  # signalling NaNs
        value = y.astype(np.float64)
    wrong = wrong_finiteness(y, golden)
    scored = np.isfinite(golden) & ~wrong & (scale.magnitude > 0)
    rounded = round_to(golden[scored], str(y.dtype))
    e = (value[scored] - golden[scored]) / scale.magnitude[scored]
    errors = np.where(wrong, np.inf, eta(y, golden, scale))
    epsilon = _rms(e)
    order = _largest(errors.ravel(), TOP)
    return Metrics(
        elements=y.size,
        scored=int(scored.sum()),
        epsilon=epsilon,
        floor=floor(golden[scored], scale.at(scored), str(y.dtype)),
        misrounded=float(np.mean(y[scored] != rounded)) if e.size else 0.0,
        eta_max=float(errors.max(initial=0.0)),
        eta_q999=_nth_largest(errors, max(1, errors.size - math.ceil(0.999 * (errors.size - 1)))),
        bias=float(e.mean() / epsilon) if epsilon else 0.0,
        wrong_finiteness=int(wrong.sum()),
        differing=int((errors > 0).sum()),
        worst=tuple(tuple(int(i) for i in np.unravel_index(flat, y.shape)) for flat in order),
        histogram=histogram(errors),
        tiles=tile_map(errors),
    )


def floor(golden: Floats, scale: Scale, dtype: str) -> float:
    """F: the ε of a golden that is correctly rounded to `dtype`."""
    scored = np.isfinite(golden) & (scale.magnitude > 0)
    exact = golden[scored]
    return _rms((round_to(exact, dtype).astype(np.float64) - exact) / scale.magnitude[scored])


def histogram(errors: Floats) -> tuple[int, ...]:
    """Counts of η > 0 in the bins of `HISTOGRAM`."""
    logs = np.floor(np.log2(errors[errors > 0]))
    bins = np.clip(logs, HISTOGRAM[0], HISTOGRAM[-2]) - HISTOGRAM[0]
    return tuple(int(count) for count in np.bincount(bins.astype(int), minlength=len(HISTOGRAM) - 1))


def tile_map(errors: Floats) -> tuple[tuple[float, ...], ...]:
    """rms η over `MAP` x `MAP` tiles of the last two axes, all leading axes together."""
    if not errors.size:
        return ()
    squares = np.square(errors.reshape(-1, *((1, 1, *errors.shape)[-2:]))).mean(axis=0)
    rows, columns = _edges(errors.shape)
    sums = np.add.reduceat(np.add.reduceat(squares, rows[:-1], axis=0), columns[:-1], axis=1)
    means = sums / np.outer(np.diff(rows), np.diff(columns))
    return tuple(tuple(row) for row in np.sqrt(means).tolist())


def _edges(shape: tuple[int, ...]) -> list[np.ndarray]:
    """Where tiles begin and end along the last two axes."""
    return [np.linspace(0, size, min(MAP, size) + 1).astype(int) for size in (1, 1, *shape)[-2:]]


def _largest(values: Floats, count: int) -> Any:
    """Indices of the `count` largest values, none of which is below 0, largest first, equal ones in order."""
    threshold = _nth_largest(values, count)
    candidates = np.concatenate([np.flatnonzero(values > threshold), np.flatnonzero(values == threshold)[:count]])
    return candidates[np.argsort(-values[candidates], kind="stable")][:count]


def _nth_largest(values: Floats, nth: int) -> float:
    """The nth largest of values of which none is below 0. Zeros, mostly many, are left out: equal values take long."""
    above = values[values > 0]
    return float(np.partition(above, -nth)[-nth]) if len(above) >= nth else 0.0


def _rms(values: Floats) -> float:
    return float(np.sqrt(np.mean(np.square(values)))) if values.size else 0.0
