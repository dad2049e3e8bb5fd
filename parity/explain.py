"""Where the error of one case comes from: which rounding, at which site of the staged golden, or no rounding at all.

It needs the kernel's output and nothing else: no dumps, no debugging build. A loss of precision leaves a fingerprint:
rounding the same values at the same place errs by the same amounts, sign for sign. So the golden is run with every
candidate rounding in turn, and the set whose error field is the kernel's is the answer. An error that no rounding
makes is a fault of logic, and then *where* it is says most.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import numpy as np

from parity.backends import load_kernel, runner
from parity.dtypes import UNIT_ROUNDOFF, Floats, round_to
from parity.judge import Judgement, Reference, judge, reference
from parity.metrics import Scale, eta
from parity.op import Backend, Case, Op, outputs

ROUNDINGS: Mapping[str, float] = {
    "bfloat16": UNIT_ROUNDOFF["bfloat16"],
    "tf32": UNIT_ROUNDOFF["tf32"],
    "bf16x2": UNIT_ROUNDOFF["bfloat16"] ** 2,
    "bfloat16 cut": 2 * UNIT_ROUNDOFF["bfloat16"],
    "tf32 cut": 2 * UNIT_ROUNDOFF["tf32"],
    "float32": UNIT_ROUNDOFF["float32"],
}
"""What a kernel may round to, and its unit roundoff: to nearest, to two pieces, or (cut) towards zero."""
PLAUSIBLE = (0.05, 3.0)
"""The sizes of an error field, of the one to explain, that are tried: smaller ones explain nothing, larger ones too
much. Of a narrow output even a small one decides roundings."""
GAIN = 0.02
"""A rounding that explains less of the error than this is not named."""
ALIKE = 0.005
"""Roundings whose shares differ by less do the same."""
EXPLAINED = 0.9
"""From this share of the mean square error on the error is explained."""
DEPTHS = (16, 64, 128, 256, 512)
"""Products that are summed before a sum is rounded, besides the contract's: the depths of units and of tiles."""
LARGEST_ROUNDING = 2.0**-5
"""|error| / M that roundings of bfloat16 operands, sums and results do not reach."""
SIGNIFICANT_BITS = {"bfloat16": 8, "tf32": 11}
DOT = "dot"
"""Not a site but the product of lhs and rhs: three bfloat16 passes leave out that of what remains of both."""
PARTS = 8
"""What an axis is cut into, to see where on it the error is."""


@dataclass(frozen=True)
class Rounding:
    """A rounding at a site of the staged golden. depth: products summed before it, None where it is no sum."""

    site: str
    dtype: str
    depth: int | None = None

    def __str__(self) -> str:
        summed = f" (every {self.depth} products)" if self.depth else ""
        return f"{self.dtype} at {self.site}{summed}"


@dataclass(frozen=True)
class Attribution:
    """Roundings that make the kernel's error, the largest first, and the share of its mean square that they explain."""

    roundings: tuple[Rounding, ...]
    explained: float


@dataclass(frozen=True)
class Contrast:
    """The bin of an axis that carries most of the error: rms η in it, over rms η in the others."""

    axis: str
    bin: str
    share: float  # of the sum of squares of η
    contrast: float


@dataclass(frozen=True)
class Explanation:
    """One case on one backend, explained.

    kind: "exact", "rounding" (of the named sites), "noise" (within the bound, and not all of it named), "precision"
    (beyond it, by no rounding of a named site), "logic".
    """

    judged: Judgement
    twin: Judgement | None
    attribution: Attribution
    contrasts: tuple[Contrast, ...]
    kind: str

    @property
    def conclusion(self) -> str:
        """In one sentence."""
        named = " and ".join(map(str, self.attribution.roundings)) or "no rounding"
        share = f"{self.attribution.explained:.0%} explained"
        where = f" in {self.contrasts[0].axis} {self.contrasts[0].bin}" if self.contrasts else ""
        return {
            "exact": "no error: every element is the golden, correctly rounded",
            "rounding": f"error = {named}, {share}",
            "noise": f"error within its bound, of roundings that no site has (best: {named}, {share})",
            "precision": f"precision is lost, by no rounding of a named site alone (best: {named}, {share})",
            "logic": f"not explained by rounding: a logic fault{where} (best: {named}, {share})",
        }[self.kind]


def explain(
    op: Op,
    case: Case,
    backend: Backend,
    kernel: Callable[..., Any] | None = None,
    done: Callable[[int], None] = lambda emulations: None,
) -> Explanation:
    """Explain the error of a case's worst output. `done` is called with the number of emulations made so far.

    Raises ValueError for an op that is compared bit for bit, ImportError where the backend's framework is missing.
    """
    if op.bit_exact:
        raise ValueError(f"case must be of an op whose results are rounded, got {case.id} of a bit-exact one")
    kernel = kernel or load_kernel(getattr(op, backend))
    judged = judge(op, case, backend, kernel)
    expected = reference(op, case)
    name = judged.output
    y = outputs(runner(backend).run(kernel, expected.inputs, {**op.arguments(case), **op.route(case)})).get(name)
    if y is None or y.shape != expected.golden[name].shape:
        return Explanation(judged, None, Attribution((), 0.0), (), "logic")
    field = Field.of(y, expected, name)
    scale = Scale(expected.magnitude[name], op.contract(case, backend).roundoff, expected.chain[name])
    contrasts = contrast(np.where(field.wrong, np.inf, eta(y, expected.golden[name], scale)), _parts(y.shape))
    attribution = attribute(op, case, backend, name, field, done)
    twin = judge(op, case.with_data("integers"), backend, kernel) if case.data != "integers" else judged
    return Explanation(judged, twin, attribution, contrasts, _kind(judged, twin, attribution, field))


def _kind(judged: Judgement, twin: Judgement, attribution: Attribution, field: Field) -> str:
    if not field.power and not field.wrong.any():
        return "exact"
    if attribution.explained >= EXPLAINED:
        return "rounding"
    if judged.verdict.passed:
        return "noise"
    too_large = field.largest > LARGEST_ROUNDING or field.wrong.any()
    return "logic" if too_large or not twin.verdict.passed else "precision"


# ------------------------------------------------------------------------------------------------- which rounding


@dataclass(frozen=True)
class Field:
    """The signed error (y - g) / M of the elements that can be scored. wrong: those finite in one and not the other."""

    error: Floats
    scored: np.ndarray
    wrong: np.ndarray
    golden: Floats
    magnitude: Floats
    dtype: str

    @classmethod
    def of(cls, y: np.ndarray, expected: Reference, name: str) -> Field:
        """The field of an output."""
        golden, magnitude = expected.golden[name], expected.magnitude[name]
        value = y.astype(np.float64)
        wrong = np.isfinite(golden) != np.isfinite(value)
        scored = np.isfinite(golden) & ~wrong & (magnitude > 0)
        error = (value[scored] - golden[scored]) / magnitude[scored]
        return cls(error, scored, wrong, golden[scored], magnitude[scored], str(y.dtype))

    @property
    def power(self) -> float:
        """Its mean square."""
        return float(np.mean(self.error**2)) if self.error.size else 0.0

    @property
    def largest(self) -> float:
        """Its largest absolute value."""
        return float(np.abs(self.error).max(initial=0.0))

    @property
    def size(self) -> float:
        """Its root mean square."""
        return float(np.sqrt(self.power))

    def size_of(self, value: Floats) -> float:
        """The root mean square error of `value`, not rounded, over the same elements."""
        return float(np.sqrt(np.mean(((value[self.scored] - self.golden) / self.magnitude) ** 2)))

    def share_of(self, value: Floats) -> float:
        """The share of its mean square that goes when the error of `value`, rounded as the output is, is taken away."""
        with np.errstate(over="ignore", invalid="ignore"):
            rounded = round_to(value[self.scored], self.dtype).astype(np.float64)
            rest = self.error - (rounded - self.golden) / self.magnitude
        share = 1 - float(np.mean(rest**2)) / self.power
        return share if np.isfinite(share) else 0.0


def attribute(
    op: Op,
    case: Case,
    backend: Backend,
    name: str,
    field: Field,
    done: Callable[[int], None] = lambda emulations: None,
) -> Attribution:
    """The smallest set of roundings, found greedily, whose error field is the one that was measured.

    The output's own dtype is among them where it is narrower than the sums. Stops where the next one explains less
    than `GAIN` of the mean square.
    """
    narrow = op.contract(case, backend).is_narrow(name)
    own = (Rounding("out", op.contract(case, backend).dtype(name)),) if narrow else ()
    if not field.power:
        return Attribution(own, 0.0)
    emulator = _Emulator(op, case, backend, name, done)
    best: tuple[Rounding, ...] = ()
    explained = field.share_of(emulator.run(best)) if narrow else 0.0
    candidates = [c for c in emulator.candidates() if emulator.may_explain(c, field)] if explained < 1 - GAIN else []
    while explained < 1 - GAIN:
        taken = {r.site for r in best}
        depth = next((r.depth for r in best if r.depth), None)
        left = [c for c in candidates if c.site not in taken and (not c.depth or depth in (None, c.depth))]
        tried = {chosen: field.share_of(emulator.run(chosen)) for chosen in ((*best, c) for c in left)}
        most = max(tried.values(), default=0.0)
        if most < explained + GAIN:
            break
        best = next(chosen for chosen in tried if tried[chosen] >= most - ALIKE)
        explained = tried[best]
    return Attribution(best + own, explained)


class _Emulator:
    """One output of the staged golden of a case, with some roundings and no others."""

    def __init__(self, op: Op, case: Case, backend: Backend, name: str, done: Callable[[int], None]) -> None:
        self.op, self.case, self.name, self.done = op, case, name, done
        self.contract = op.contract(case, backend)
        self.inputs = reference(op, case).inputs
        self.emulations = 0
        self.sizes: dict[tuple[str, int | None], float] = {}

    def candidates(self) -> list[Rounding]:
        """Every rounding that a kernel might make: plain sites before sums, those nearest to the output first.

        Of roundings that do the same the simplest are thus the first. A sum is what has more sites in smaller steps.
        """
        shallow, deep = self._visits(self.contract.depth), self._visits(2 * self.contract.depth)
        sums = [site for site in shallow if shallow[site] != deep[site]]
        plain = [site for site in shallow if site not in sums]
        found = [
            Rounding(site, dtype, depth)
            for site in [*reversed(plain), *reversed(sums)]
            for dtype in ROUNDINGS
            for depth in (dict.fromkeys([self.contract.depth, *DEPTHS]) if site in sums else [None])
        ]
        return found + ([Rounding(DOT, "bf16x3")] if {"lhs", "rhs"} <= shallow.keys() else [])

    def _visits(self, depth: int) -> Counter[str]:
        seen: Counter[str] = Counter()

        def count(site: str, value: Floats) -> Floats:
            seen[site] += 1
            return value

        self._golden(depth, count)
        return seen

    def may_explain(self, candidate: Rounding, field: Field) -> bool:
        """Whether an error of the candidate's size can be a part of the field: errors grow with the unit roundoff."""
        key = candidate.site, candidate.depth
        known = "bf16x3" if candidate.site == DOT else "bfloat16"
        if key not in self.sizes:
            self.sizes[key] = field.size_of(self.run((replace(candidate, dtype=known),)))
        size = self.sizes[key] * ROUNDINGS.get(candidate.dtype, 1.0) / ROUNDINGS.get(known, 1.0)
        return PLAUSIBLE[0] * field.size < size < PLAUSIBLE[1] * field.size

    def run(self, chosen: tuple[Rounding, ...]) -> Floats:
        """The output with the chosen roundings."""
        self.emulations += 1
        self.done(self.emulations)
        depth = next((r.depth for r in chosen if r.depth), self.contract.depth)
        dtypes = {r.site: r.dtype for r in chosen}
        if DOT not in dtypes:
            return self._golden(depth, _rounding(dtypes))
        pieces, rests, nothing = (
            self._golden(depth, _rounding(dtypes | {"lhs": to, "rhs": to}))
            for to in ("pieces of bf16", "rest of bf16", "zero")
        )
        return pieces - (rests - nothing)

    def _golden(self, depth: int, rounding: Callable[[str, Floats], Floats]) -> Floats:
        steps = self.op.steps(self.case, replace(self.contract, depth=depth))
        arguments = {**self.op.arguments(self.case), **steps}
        with np.errstate(invalid="ignore", over="ignore"):
            return outputs(self.op.golden(**self.inputs, **arguments, rounding=rounding))[self.name]


def _rounding(dtypes: Mapping[str, str]) -> Callable[[str, Floats], Floats]:
    def rounding(site: str, value: Floats) -> Floats:
        dtype = dtypes.get(site)
        return value if dtype is None else rounded(value, dtype)

    return rounding


def rounded(value: Floats, dtype: str) -> Floats:
    """float64 values rounded to a dtype, as one of `ROUNDINGS`, or to what a dot in passes makes of an operand."""
    if dtype == "zero":
        return np.zeros_like(value)
    if dtype.endswith(" cut"):
        return _cut(value, SIGNIFICANT_BITS[dtype.removesuffix(" cut")])
    if dtype in ("pieces of bf16", "rest of bf16"):  # the first one cut off
        first = rounded(value, "bfloat16 cut")
        return rounded(value - first, "bfloat16") + (first if dtype == "pieces of bf16" else 0)
    return round_to(value, dtype).astype(np.float64)


def _cut(value: Floats, bits: int) -> Floats:
    mantissa, exponent = np.frexp(value)
    return np.ldexp(np.trunc(np.ldexp(mantissa, bits)), exponent - bits)


# ------------------------------------------------------------------------------------------------------- and where


def contrast(errors: Floats, axes: Mapping[str, Mapping[str, np.ndarray]]) -> tuple[Contrast, ...]:
    """Of each axis the bin whose rms η stands out most, the axis that stands out most first.

    axes: by name, the bins of each, by name, as masks that broadcast to `errors`. An axis of a single bin has no
    contrast and is left out.
    """
    power = np.where(np.isfinite(errors), np.minimum(errors, 1e100), 1e100) ** 2
    total = float(power.sum())
    found = []
    for axis, bins in axes.items():
        masks = {name: np.broadcast_to(mask, errors.shape) for name, mask in bins.items()}
        masks = {name: mask for name, mask in masks.items() if mask.any() and not mask.all()}
        if not total or not masks:
            continue
        inside = {name: float(power[mask].sum()) for name, mask in masks.items()}
        ratios = {
            name: np.sqrt(inside[name] / mask.sum()) / max(np.sqrt((total - inside[name]) / (~mask).sum()), 1e-300)
            for name, mask in masks.items()
        }
        worst = max(ratios, key=lambda name: (ratios[name], inside[name]))
        found.append(Contrast(axis, worst, inside[worst] / total, float(ratios[worst])))
    return tuple(sorted(found, key=lambda c: -c.contrast))


def _parts(shape: tuple[int, ...]) -> dict[str, dict[str, np.ndarray]]:
    """Each axis of an array in `PARTS` parts, as `contrast` takes them."""
    axes: dict[str, dict[str, np.ndarray]] = {}
    for n, size in enumerate(shape):
        edges = np.unique(np.linspace(0, size, min(PARTS, size) + 1).astype(int))
        position = np.expand_dims(np.arange(size), [a for a in range(len(shape)) if a != n])
        axes[f"axis {n}"] = {
            (f"{low}-{high - 1}" if high - low > 1 else str(low)): (position >= low) & (position < high)
            for low, high in pairwise(edges)
        }
    return axes
