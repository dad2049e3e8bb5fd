"""Where an error is: which bins of which axis carry it, and what a wrong output has there instead of its golden."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from itertools import groupby, pairwise
from typing import Any

import numpy as np

from parity.debugging.roundings import ALIKE, EXPLAINED, Field
from parity.dtypes import Floats
from parity.op import outputs
from parity.trial import Trial

PARTS = 8
"""What an axis is cut into, to see where on it the error is."""
LOCAL = 2.0
"""The contrast from which on an error is said to be where it is largest, and not everywhere."""
MANY = 8
"""Elements from which on it is no chance that they are a multiple of others."""
MOST_BINS = 64
"""Bins of an axis that is summed over, each of which takes a run of the golden; of more none is tried."""


@dataclass(frozen=True)
class Contrast:
    """The bins of an axis that carry the error: rms |δ|/σ in them (η where no contract says σ), over the others'."""

    axis: str
    bin: str  # or several
    share: float  # of the sum of squares
    contrast: float  # infinite where the others have no error
    inside: np.ndarray | None = field(default=None, repr=False, compare=False)  # which elements are in them


@dataclass(frozen=True)
class Source:
    """What an input adds to the sums in a bin of an axis: the error is `factor` times that (-1: it is missing)."""

    tensor: str
    axis: str
    bin: str
    factor: float
    explained: float

    def __str__(self) -> str:
        what = {-1.0: "is missing", 1.0: "counts twice"}.get(
            round(self.factor, 2), f"counts {1 + self.factor:.3g} times"
        )
        return f"what {self.tensor} adds in {self.axis} {self.bin} {what}"


def contrast(errors: Floats, axes: Mapping[str, np.ndarray]) -> tuple[Contrast, ...]:
    """Of each axis the bins that carry the error, the axis that says most about it first.

    axes: by name, labels that broadcast to `errors`, of the bin that each element is in. Of the bins in the order of
    their rms η those before one of the borders are named: the border that takes most from knowing how many elements
    there are on either side to knowing how much of the error (the Kullback-Leibler divergence of the two). An axis with
    a single bin is left out.
    """
    power = np.minimum(np.where(np.isfinite(errors), np.abs(errors), 1e100), 1e100) ** 2
    total = float(power.sum())
    found: list[tuple[float, Contrast]] = []
    for axis, labels in axes.items():
        bins, first, index = np.unique(labels, return_index=True, return_inverse=True)
        index = np.broadcast_to(index.reshape(labels.shape), errors.shape).ravel()
        if not total or bins.size < 2:
            continue
        inside, sizes = np.bincount(index, power.ravel(), bins.size), np.bincount(index, minlength=bins.size)
        order = np.argsort(-inside / np.maximum(sizes, 1), kind="stable")
        share, rest = (np.cumsum(x)[:-1] / total for x in (inside[order], inside[order[::-1]]))
        size = np.cumsum(sizes[order])[:-1] / errors.size
        gain = np.where((size > 0) & (size < 1), _divergence(share, rest[::-1], size), -1.0)
        border = int(gain.argmax())
        if gain[border] < 0:
            continue
        s, r, f = float(share[border]), float(rest[::-1][border]), float(size[border])
        ratio = float(np.sqrt(s / f * (1 - f) / r)) if r else float("inf")
        s /= s + r
        found.append(
            (
                float(gain[border]),
                Contrast(
                    axis,
                    spelled(bins[sorted(order[: border + 1], key=first.__getitem__)]),
                    s,
                    ratio,
                    np.isin(index, order[: border + 1]).reshape(errors.shape),
                ),
            )
        )
    return tuple(c for _, c in sorted(found, key=lambda pair: -pair[0]))


def _divergence(share: Floats, rest: Floats, size: Floats) -> Floats:
    with np.errstate(divide="ignore", invalid="ignore"):
        terms = share * np.log(share / size), rest * np.log(rest / (1 - size))
    return np.nan_to_num(terms[0]) + np.nan_to_num(terms[1])


def spelled(bins: Iterable[Any]) -> str:
    """Bins in words: numbers as ranges; of many the first few."""
    names = [str(bin_) for bin_ in bins]
    numbers = sorted(int(name) for name in names if name.isdigit())
    runs = [[n for _, n in run] for _, run in groupby(enumerate(numbers), lambda at: at[1] - at[0])]
    found = [f"{run[0]}-{run[-1]}" if len(run) > 1 else str(run[0]) for run in runs]
    found += [name for name in names if not name.isdigit()]
    return ", ".join(found[:4]) + (f" and {len(found) - 4} more" if len(found) > 4 else "")


def in_parts(shape: tuple[int, ...], axes: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Labels of `PARTS` parts of each axis of an array along which no label of `axes` changes."""
    parts = {}
    for n, size in enumerate(shape):
        if any(labels.ndim >= len(shape) - n and labels.shape[n - len(shape)] > 1 for labels in axes.values()):
            continue
        edges = np.unique(np.linspace(0, size, min(PARTS, size) + 1).astype(int))
        names = [f"{low}-{high - 1}" if high - low > 1 else str(low) for low, high in pairwise(edges)]
        labels = np.repeat(np.array(names), np.diff(edges))
        parts[f"axis {n}"] = np.expand_dims(labels, tuple(a for a in range(len(shape)) if a != n))
    return parts


def likeness(y: np.ndarray, golden: Floats, axes: Mapping[str, np.ndarray]) -> str:
    """What a wrong output is instead of its golden, in words: "" where it is nothing that is known.

    Bin by bin of each axis of labels: a multiple of the golden (0: it is missing), or the golden of another bin; the
    golden one step further along a dimension; its transpose. An axis explains the output where every bin of it is such
    a one or right.
    """
    value = y.astype(np.float64)
    if not (np.isfinite(value).all() and np.isfinite(golden).all()):
        return ""
    if y.ndim >= 2 and y.shape[-1] == y.shape[-2] and _same(value, golden.swapaxes(-1, -2)):
        return "it is the golden, transposed"
    for axis, labels in {"": np.zeros((1,) * y.ndim, int), **axes}.items():
        bins = np.unique(labels)
        inside = {bin_: np.broadcast_to(labels == bin_, y.shape) for bin_ in bins} if bins.size <= MOST_BINS else {}
        found: dict[str, list[str]] = {}
        for bin_, here in inside.items():
            if _same(value[here], golden[here]):
                continue
            found.setdefault(_instead(value[here], golden, here, bin_, inside), []).append(str(bin_))
        if found and "" not in found:
            return "; ".join(f"{axis} {spelled(of)} {what}" if axis else f"it {what}" for what, of in found.items())
    for n, size in enumerate(y.shape):
        later, earlier = np.arange(1, size), np.arange(size - 1)
        for taken, given, way in ((later, earlier, "before"), (earlier, later, "after")):
            if size > MANY and _same(np.take(value, taken, n), np.take(golden, given, n)):
                return f"each element along axis {n} is the golden's one {way}"
    return ""


def _same(value: Floats, golden: Floats) -> bool:
    rest = float(((value - golden) ** 2).sum())
    return value.size > 0 and rest <= ALIKE**2 * float((golden**2).sum())


def _instead(value: Floats, golden: Floats, here: np.ndarray, bin_: Any, inside: Mapping[Any, np.ndarray]) -> str:
    """What a bin has that does not have its golden."""
    own = golden[here]
    power = float((own**2).sum())
    factor = float((value * own).sum()) / power if power else 0.0
    if not value.any():
        return "is 0"
    if value.size >= MANY and _same(value, factor * own):
        return f"is {factor:.4g} times the golden"
    for other, there in inside.items():
        if other != bin_ and there.sum() == here.sum() >= MANY and _same(value, golden[there]):
            return f"has the golden of {other}"
    return ""


def source(trial: Trial, name: str, field: Field) -> Source | None:
    """What the error is a multiple of, of all that the inputs of an op add to its sums bin by bin; None if of nothing.

    The bins are those that `Op.axes` has of inputs; without one of them the golden lacks what it adds. (Of a few
    elements anything is a multiple.)
    """
    if field.error.size < MOST_BINS:
        return None
    op, case = trial.op, trial.case
    labels = op.axes(case, trial.inputs)
    best = None
    given = {t: x for t, x in trial.inputs.items() if x is not None and t in labels}
    for tensor, axis in ((t, axis) for t in given for axis in labels[t]):
        x, bins = given[tensor], np.unique(labels[tensor][axis])
        for bin_ in bins if 1 < bins.size <= MOST_BINS else []:
            without = {**trial.inputs, tensor: np.where(labels[tensor][axis] == bin_, np.zeros((), x.dtype), x)}
            with np.errstate(invalid="ignore", over="ignore"):
                rest = outputs(op.golden(**without, **op.arguments(case)))[name]
            added = (field.golden - rest[field.scored]) / field.magnitude
            product, power = float(np.mean(added * field.error)), float(np.mean(added**2))
            if not power or not np.isfinite(product):
                continue
            explained = product**2 / (power * field.power)
            if explained > (best.explained if best else EXPLAINED):
                best = Source(tensor, axis, str(bin_), product / power, explained)
    return best
