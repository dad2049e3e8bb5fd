"""Where the bits of a case are not the golden's, and what change of the golden makes the same ones.

The counterpart of `explain` for what must come out bit for bit. The staged golden of a quantiser is run with one
value changed at one site (a scale doubled, the columnwise scales in the place of the rowwise ones, ties rounded the
other way): a change that makes the kernel's own codes is what is wrong with it.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import ml_dtypes
import numpy as np

from parity.debugging.contrasts import LOCAL, Contrast, contrast, in_parts
from parity.debugging.roundings import EXPLAINED, ROUNDINGS, rounded
from parity.dtypes import Floats, round_to
from parity.judging.judge import Judgement, judge
from parity.judging.metrics import tile_map
from parity.judging.stages import staged
from parity.judging.verdict import other_bits
from parity.trial import Trial

Values = Mapping[str, Floats]
"""What the golden has at each site."""


@dataclass(frozen=True)
class Change:
    """Another value at a site of the staged golden. is_rounding: the same one, rounded otherwise."""

    site: str
    what: str
    is_rounding: bool
    value: Floats

    def __str__(self) -> str:
        return f"{self.what} at {self.site}"


@dataclass(frozen=True)
class Place:
    """An element, and the bits of both."""

    index: tuple[int, ...]
    golden: str
    got: str


@dataclass(frozen=True)
class Difference:
    """One output whose bits are not the golden's.

    wrong: how many elements. looks: what they have in common, in words. contrasts: as of an error, `contrast` being how
    many times as often elements of these bins are wrong. tiles: the share of wrong ones in each.
    """

    output: str
    elements: int
    wrong: int
    looks: str
    worst: Place
    contrasts: tuple[Contrast, ...]
    tiles: tuple[tuple[float, ...], ...]

    @property
    def region(self) -> str:
        """Where they are, in words."""
        if self.wrong == self.elements:
            return "everywhere"
        local = (c for c in self.contrasts if c.contrast >= LOCAL and not c.bin.endswith(" more"))
        first = next(local, None)
        return f"in {first.axis} {first.bin}" if first else "all over"


@dataclass(frozen=True)
class BitsExplanation:
    """A case that is compared bit for bit, on one backend.

    same: the outputs that have the golden's bits. differences: the others, as the golden has them in order. change: the
    one that comes nearest to the kernel's outputs, and what share of the wrong elements it explains.
    """

    judged: Judgement
    same: tuple[str, ...]
    differences: tuple[Difference, ...]
    change: Change | None
    explained: float

    @property
    def conclusion(self) -> str:
        """In one sentence."""
        if not self.differences:
            if self.judged.verdict.passed:
                return "no difference: every bit is the golden's"
            return f"not explained by rounding: a logic fault: {self.judged.verdict.reason}"
        first = self.differences[0]
        where = f"{first.region} of {first.output}"
        best = f"{self.change}, {self.explained:.0%} explained" if self.change else ""
        if self.explained < EXPLAINED:
            nearest = f" (nearest: {best})" if best else ""
            return f"not explained by rounding: a logic fault {where}: {first.looks}{nearest}"
        if self.change and self.change.is_rounding:
            return f"rounded otherwise: {best}; {where}"
        return f"not explained by rounding: a logic fault {where}: {best}"


def explain_bits(trial: Trial, done: Callable[[int], None] = lambda runs: None) -> BitsExplanation:
    """Explain what of a trial's outputs is other than its golden's bits. `done`: as in `explain.explain`.

    Raises ImportError where the backend's framework is missing.
    """
    judged, got, golden = judge(trial), trial.run(), trial.reference.golden
    if any(n not in golden or (y.shape, y.dtype) != (golden[n].shape, golden[n].dtype) for n, y in got.items()):
        return BitsExplanation(judged, (), (), None, 0.0)
    wrong = {name: other_bits(got[name], golden[name]) for name in golden if name in got}
    sites = values(trial)
    differences = tuple(
        _difference(name, got[name], golden[name], wrong[name], trial.axes(name), sites.get(name))
        for name in wrong
        if wrong[name].any()
    )
    same = tuple(name for name in wrong if not wrong[name].any())
    with np.errstate(all="ignore"):
        change, explained = _nearest(trial, got, sites, done) if differences else (None, 0.0)
    return BitsExplanation(judged, same, differences, change, explained)


def values(trial: Trial) -> Values:
    """What the golden has at each site, in order; nothing where it has no stages."""
    if "stages" not in inspect.signature(trial.op.golden).parameters:
        return {}
    seen: dict[str, Floats] = {}

    def watch(site: str, value: Floats) -> Floats:
        seen[site] = value.copy()
        return value

    with np.errstate(all="ignore"):
        staged(trial, watch)
    return seen


# ---------------------------------------------------------------------------------------------------- what is changed


def _nearest(
    trial: Trial,
    got: Mapping[str, np.ndarray],
    sites: Values,
    done: Callable[[int], None],
) -> tuple[Change | None, float]:
    """The change that comes nearest to what a kernel returned, and the share of the wrong elements that it explains.

    One that spoils as much as it explains explains nothing."""
    goldens = trial.reference.golden
    total = sum(int(other_bits(got[name], golden).sum()) for name, golden in goldens.items())
    best: Change | None = None
    least = total
    for n, change in enumerate(_changes(sites, goldens)):
        done(n + 1)
        changed = staged(trial, partial(_put, change))
        left = sum(int(other_bits(got[name], y).sum()) for name, y in changed.items())
        if left < least:
            best, least = change, left
    return best, 1 - least / total


def _put(change: Change, site: str, value: Floats) -> Floats:
    return change.value if site == change.site else value


def _changes(sites: Values, golden: Mapping[str, np.ndarray]) -> Iterator[Change]:
    for site, value in [*sites.items()][::-1]:  # of changes that do the same the one nearest to the output is named
        for what, factor in (("twice", 2.0), ("half", 0.5)):
            yield Change(site, f"{what} the value", False, value * factor)
        for other, its in sites.items():
            if other != site and not golden.keys() & {other, site} and its.shape == value.shape:
                yield Change(site, f"{other} in the place of the value", False, its)
        if site in golden:
            neighbours = Neighbours.of(value, golden[site].dtype)
            for what, rule in _RULES.items():
                yield Change(site, what, True, rule(neighbours))
        for dtype in ROUNDINGS:
            if dtype != "bf16x2":
                yield Change(site, f"{dtype} before" if site in golden else dtype, True, rounded(value, dtype))


@dataclass(frozen=True)
class Neighbours:
    """Values, and those of a dtype next to them: the nearest (ties to even), and the ones on either side."""

    value: Floats
    nearest: Floats
    below: Floats
    above: Floats

    @classmethod
    def of(cls, value: Floats, dtype: np.dtype[Any]) -> Neighbours:
        """The neighbours of float64 values in a dtype."""
        with np.errstate(all="ignore"):
            if dtype.kind == "i":
                return cls(value, np.rint(value), np.floor(value), np.ceil(value))
            near = round_to(value, str(dtype))
            nearest = near.astype(np.float64)
            info = ml_dtypes.finfo(dtype)  # its ends are finite: not every format has infinities
            down, up = (np.nextafter(near, np.full_like(near, end)) for end in (info.min, info.max))
        below = np.where(nearest > value, down.astype(np.float64), nearest)
        above = np.where(nearest < value, up.astype(np.float64), nearest)
        return cls(value, nearest, below, above)

    @property
    def ties(self) -> np.ndarray:
        """Which lie halfway between both."""
        with np.errstate(invalid="ignore"):
            return (self.below < self.above) & (self.value - self.below == self.above - self.value)


def _inner(x: Neighbours) -> Floats:
    return np.where(x.value < 0, x.above, x.below)


def _outer(x: Neighbours) -> Floats:
    return np.where(x.value < 0, x.below, x.above)


_RULES: Mapping[str, Callable[[Neighbours], Floats]] = {
    "ties away from zero": lambda x: np.where(x.ties, _outer(x), x.nearest),
    "ties towards zero": lambda x: np.where(x.ties, _inner(x), x.nearest),
    "ties upwards": lambda x: np.where(x.ties, x.above, x.nearest),
    "ties downwards": lambda x: np.where(x.ties, x.below, x.nearest),
    "ties to odd": lambda x: np.where(x.ties, x.below + x.above - x.nearest, x.nearest),
    "cut towards zero": _inner,
    "rounded away from zero": _outer,
    "rounded down": lambda x: x.below,
    "rounded up": lambda x: x.above,
}
"""Roundings to a dtype that are none to nearest even."""


# ------------------------------------------------------------------------------------------- what the differences are


def _difference(
    name: str,
    y: np.ndarray,
    golden: np.ndarray,
    wrong: np.ndarray,
    axes: Mapping[str, np.ndarray],
    unrounded: Floats | None,
) -> Difference:
    off = np.where(wrong, 1.0, 0.0)
    labels = {**axes, **in_parts(y.shape, {}), **_kinds(golden, unrounded)}
    contrasts = tuple(replace(c, contrast=c.contrast**2) for c in contrast(off, labels))
    steps = np.where(wrong, np.abs(_order(y) - _order(golden)), -1)
    index = tuple(int(i) for i in np.unravel_index(int(steps.argmax()), y.shape))
    worst = Place(index, _spelled(golden, index), _spelled(y, index))
    tiles = tuple(tuple(rms**2 for rms in row) for row in tile_map(off))
    return Difference(name, y.size, int(wrong.sum()), _looks(y, golden, wrong), worst, contrasts, tiles)


def _kinds(golden: np.ndarray, unrounded: Floats | None) -> dict[str, np.ndarray]:
    """Labels of each element by the golden's sign, and by how far it had to be rounded."""
    labels = {"sign": np.where(np.signbit(_as_float64(golden)), "negative", "positive")}
    if unrounded is not None:
        x = Neighbours.of(unrounded, golden.dtype)
        labels["rounding"] = np.where(x.ties, "ties", np.where(x.below == x.above, "exact", "inexact"))
    return labels


def _looks(y: np.ndarray, golden: np.ndarray, wrong: np.ndarray) -> str:
    """What the wrong elements have in common, in words."""
    got, true = _as_float64(y[wrong]), _as_float64(golden[wrong])
    some = "all of them" if wrong.all() else "those"
    if (np.isnan(got) != np.isnan(true)).all():
        return "NaN in the golden alone" if np.isnan(true).all() else "NaN in one and not in the other"
    if np.isnan(got).all():
        return "the codes of NaN differ"
    if ((got == 0) & (true == 0)).all():
        return "the signs of zero differ"
    if np.array_equal(got, -true):
        return "signs differ"
    if _is_permuted(y, golden):
        return "the golden's own numbers, at other places"
    with np.errstate(all="ignore"):
        ratio = got / true
    if wrong.sum() > 1 and (ratio == ratio[0]).all() and np.isfinite(ratio[0]) and ratio[0]:
        return f"{some} {ratio[0]:g} times the golden's"
    order = _order(y)[wrong] - _order(golden)[wrong]
    least, most = int(np.abs(order).min()), int(np.abs(order).max())
    inward = (np.abs(got) < np.abs(true)).all()
    outward = (np.abs(got) > np.abs(true)).all()
    way = ", towards zero" if inward else ", away from zero" if outward else ""
    apart = f"{most:,} code{'s' if most > 1 else ''}" if least == most else f"{least:,} to {most:,} codes"
    return f"{some} off by {apart}{way}"


def _is_permuted(y: np.ndarray, golden: np.ndarray) -> bool:
    """Whether an output is the golden's elements in another order."""
    a, b = (np.sort(np.ascontiguousarray(x).view(f"u{x.dtype.itemsize}").ravel()) for x in (y, golden))
    return bool(np.array_equal(a, b)) and a.size > 1


def _order(x: np.ndarray) -> np.ndarray:
    """The place of each element among the values of its dtype, in order: neighbours differ by 1."""
    if x.dtype.kind in "iu":
        return x.astype(np.int64)
    bits = np.ascontiguousarray(x).view(f"u{x.dtype.itemsize}").reshape(x.shape).astype(np.int64)
    if "e8m0" in x.dtype.name:  # it has no sign
        return bits
    sign = 1 << (8 * x.dtype.itemsize - 1)
    return np.where(bits & sign, -(bits & (sign - 1)), bits)


def _as_float64(x: np.ndarray) -> Floats:
    with np.errstate(invalid="ignore"):  # signalling NaNs
        return x.astype(np.float64)


def _spelled(x: np.ndarray, index: tuple[int, ...]) -> str:
    code = int(np.ascontiguousarray(x[index]).view(f"u{x.dtype.itemsize}").item())
    return f"{x[index]} ({code:#0{2 + 2 * x.dtype.itemsize}x})"
