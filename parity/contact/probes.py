"""What a device's functions are, found by calling them: errors in ulps, roundings, NaN, subnormals.

A probe computes on the device through `Device`, whose functions take and return NumPy arrays, and compares with
float64.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import ml_dtypes
import numpy as np

from parity.contact.assumptions import DOT_ROUNDS, FP8_SUMS, Assumption
from parity.dtypes import numpy_dtype

SAMPLES = 2**20
"""Of float32's 2^32 bit patterns, that are tried at a time."""
SMALLEST_NORMAL, LARGEST = float(np.finfo(np.float32).tiny), float(np.finfo(np.float32).max)
MARGIN = 1024 * float(np.finfo(np.float32).eps)
"""How much farther inside of float32's normal range a result is compared: what is off by as much as a contract may
allow is flushed below it, and infinite above."""


class Device(Protocol):
    """A device's functions, each by a kernel of its own."""

    def unary(self, x: np.ndarray, *, function: str) -> np.ndarray:
        """`function` of each element of float32 x [n]: exp, exp2, log, reciprocal, rsqrt, minimum (of x and 1), kept
        (x · 1)."""

    def convert(self, x: np.ndarray, *, dtype: str) -> np.ndarray:
        """float32 x [n] in a narrower dtype."""

    def dot(self, a: np.ndarray, b: np.ndarray) -> np.ndarray:
        """a [M, K] @ b [K, 16] of bfloat16 or e4m3, in float32."""


@dataclass(frozen=True)
class Measured:
    """What a probe found: the worst share of what the assumption allows, and the figures that would replace it."""

    share: float
    detail: str
    figures: Mapping[str, Any]


TRUTHS: Mapping[str, Callable[[np.ndarray], np.ndarray]] = {
    "exp": np.exp,
    "exp2": np.exp2,
    "log": np.log,
    "reciprocal": lambda x: 1 / x,
    "rsqrt": lambda x: 1 / np.sqrt(x),
}
CONVERSIONS = {f"to_{dtype} rounds to nearest even": dtype for dtype in ("bfloat16", "float8_e4m3fn")}
PROPERTIES: Mapping[str, Callable[[Device], tuple[bool, str]]] = {
    "minimum keeps NaN": lambda device: _keeps_nan(device),
    DOT_ROUNDS: lambda device: _dot_rounds(device),
    FP8_SUMS: lambda device: _sums_fp8(device),
    "subnormals are kept": lambda device: _keeps_subnormals(device),
}
NAMES = (*TRUTHS, *CONVERSIONS, *PROPERTIES)
"""Of all probes, those first on which most kernels rest."""


def measure(device: Device, assumption: Assumption, seconds: float = 0.0) -> Measured:
    """What an assumption comes to on a device: share 1 and below is as assumed.

    seconds: how long float32 bit patterns are tried, `SAMPLES` evenly spread ones at least and each once at most.
    """
    if assumption.name in TRUTHS:
        return _errors(device, assumption, seconds)
    figures: dict[str, Any]
    if assumption.name in CONVERSIONS:
        holds, detail, tried = _rounds(device, CONVERSIONS[assumption.name], seconds)
        figures = {"holds": holds, "patterns": tried}
    else:
        holds, detail = PROPERTIES[assumption.name](device)
        figures = {"holds": holds}
    return Measured(0.0 if holds == assumption.holds else float("inf"), detail, figures)


def patterns(seconds: float) -> Iterator[np.ndarray]:
    """float32 [SAMPLES] after float32 [SAMPLES], evenly spread bit patterns each, until time or patterns are over.

    All together are every pattern once; where the time is over sooner they are as evenly spread as they can be.
    """
    ends = time.monotonic() + seconds
    step = 2**32 // SAMPLES
    for nth in range(step):
        first = int(f"{nth:0{step.bit_length() - 1}b}"[::-1], 2)  # halves the gaps, again and again
        yield np.arange(first, 2**32, step, dtype=np.uint64).astype(np.uint32).view(np.float32)
        if time.monotonic() >= ends:
            return


def _errors(device: Device, assumption: Assumption, seconds: float) -> Measured:
    """Errors at patterns, and at every power of two."""
    of_device, truth = partial(device.unary, function=assumption.name), TRUTHS[assumption.name]
    powers = np.ldexp(np.float32(1), np.arange(-126, 128)).astype(np.float32)
    share, at, off_there, largest, beside, tried = -1.0, 0.0, 0.0, 0.0, 0.5, 0
    for x in itertools.chain([powers], patterns(seconds)):
        kept, off = _ulps(x, truth, of_device)
        tried += len(x)
        if not len(kept):
            continue
        shares = off / (assumption.ulps + assumption.slope * np.abs(kept))
        worst = int(shares.argmax())
        if shares[worst] > share:
            share, at, off_there = float(shares[worst]), float(kept[worst]), float(off[worst])
        largest = max(largest, float(off.max()))
        # Of an error that grows with the argument what is left beside the assumed slope.
        beside = max(beside, float((off - assumption.slope * np.abs(kept)).max()))
    detail = f"{off_there:.3g} ulp at {at:.9g}, largest {largest:.3g} ulp of {tried:,} arguments"
    return Measured(share, detail, {"ulps": beside, "patterns": tried})


def _ulps(
    x: np.ndarray, truth: Callable[[np.ndarray], np.ndarray], of_device: Callable[[np.ndarray], np.ndarray]
) -> tuple[np.ndarray, np.ndarray]:
    """The arguments whose results are safely normal, and how far off these are; infinite where they are not finite."""
    with np.errstate(all="ignore"):
        exact = truth(x.astype(np.float64))
        got = of_device(x).astype(np.float64)
        size = np.abs(exact)
        safe = (size >= SMALLEST_NORMAL * (1 + MARGIN)) & (size <= LARGEST * (1 - MARGIN))
        safe &= np.abs(x) >= SMALLEST_NORMAL
        x, exact, got = x[safe].astype(np.float64), exact[safe], got[safe]
        off = np.abs(got - exact) / np.spacing(np.abs(exact).astype(np.float32)).astype(np.float64)
    return x, np.where(np.isfinite(off), off, np.inf)


def _rounds(device: Device, dtype: str, seconds: float) -> tuple[bool, str, int]:
    """Whether conversions are to nearest even, and of how many patterns."""
    wrong, first, tried = 0, "", 0
    for x in patterns(seconds):
        with np.errstate(all="ignore"):
            x = x[np.abs(x) <= float(ml_dtypes.finfo(numpy_dtype(dtype)).max)]
            expected, got = x.astype(numpy_dtype(dtype)), device.convert(x, dtype=dtype)
        different = np.flatnonzero(expected.view(f"u{expected.itemsize}") != got.view(f"u{got.itemsize}"))
        tried += SAMPLES
        if len(different) and not wrong:
            at = different[0]
            first = f", first {x[at]:.9g}: {float(got[at])} for {float(expected[at])}"
        wrong += len(different)
    found = f"{wrong:,} otherwise{first}" if wrong else "all so"
    return not wrong, f"{found}, of the numbers among {tried:,} patterns", tried


def _keeps_nan(device: Device) -> tuple[bool, str]:
    got = device.unary(np.full(128, np.nan, np.float32), function="minimum")
    return bool(np.isnan(got).all()), f"min(NaN, 1) is {got[0]:g}"


def _dot_rounds(device: Device) -> tuple[bool, str]:
    """Sums of one sign: truncation leaves every one of them too small, rounding to nearest half of them."""
    rng = np.random.default_rng(1)
    a, b = (rng.uniform(0.5, 1, shape).astype(ml_dtypes.bfloat16) for shape in ((16, 512), (512, 16)))
    exact = a.astype(np.float64) @ b.astype(np.float64)
    off = (device.dot(a, b) - exact) / np.spacing(exact.astype(np.float32))
    below = float((off < 0).mean())
    return below < 0.9, f"{below:.0%} of 256 sums too small, by {-off.min():.3g} ulp at most"


def _sums_fp8(device: Device) -> tuple[bool, str]:
    """Of 64 rows, which warps multiply together: of fewer Triton multiplies fp8 as float16."""
    rng = np.random.default_rng(1)
    a, b = (rng.standard_normal(shape).astype(ml_dtypes.float8_e4m3fn) for shape in ((64, 512), (512, 16)))
    exact = a.astype(np.float64) @ b.astype(np.float64)
    off = np.abs(device.dot(a, b) - exact) / (np.abs(a.astype(np.float64)) @ np.abs(b.astype(np.float64)))
    return bool(off.max() < 2.0**-18), f"1,024 sums of 512 products are off by up to {off.max():.2g} of their terms"


def _keeps_subnormals(device: Device) -> tuple[bool, str]:
    x = np.ldexp(np.float32(1), np.arange(-149, -126)).astype(np.float32)
    x = np.resize(x, 128)
    got = device.unary(x, function="kept")
    return bool(np.array_equal(got, x)), f"{int((got != 0).sum())} of {len(x)} are left"
