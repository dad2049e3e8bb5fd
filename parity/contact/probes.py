"""What a device's functions are, found by calling them: errors in ulps, roundings, NaN, subnormals.

A probe computes on the device through `Device`, whose functions take and return NumPy arrays, and compares with
float64.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import ml_dtypes
import numpy as np

from parity.contact.assumptions import Assumption
from parity.dtypes import numpy_dtype

SAMPLES = 2**20
"""Of float32's 2^32 bit patterns, evenly spread from a random first one."""
SMALLEST_NORMAL = float(np.finfo(np.float32).tiny)
LARGEST = float(np.finfo(np.float32).max)


class Device(Protocol):
    """A device's functions, each by a kernel of its own."""

    def unary(self, x: np.ndarray, *, function: str) -> np.ndarray:
        """`function` of each element of float32 x [n]: exp, exp2, log, reciprocal, rsqrt, minimum (of x and 1), kept
        (x · 1)."""

    def convert(self, x: np.ndarray, *, dtype: str) -> np.ndarray:
        """float32 x [n] in a narrower dtype."""

    def dot(self, a: np.ndarray, b: np.ndarray) -> np.ndarray:
        """a [16, K] @ b [K, 16] of bfloat16, in float32."""


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
PROPERTIES = {
    "to_bfloat16 rounds to nearest even": lambda device: _rounds(device, "bfloat16"),
    "to_float8_e4m3fn rounds to nearest even": lambda device: _rounds(device, "float8_e4m3fn"),
    "minimum keeps NaN": lambda device: _keeps_nan(device),
    "dot of one sign is rounded to nearest": lambda device: _dot_rounds(device),
    "subnormals are kept": lambda device: _keeps_subnormals(device),
}
NAMES = (*TRUTHS, *PROPERTIES)
"""Of all probes, those first on which most kernels rest."""


def measure(device: Device, assumption: Assumption) -> Measured:
    """What an assumption comes to on a device: share 1 and below is as assumed."""
    if assumption.name in TRUTHS:
        return _errors(device, assumption)
    holds, detail = PROPERTIES[assumption.name](device)
    as_assumed = holds == assumption.holds
    return Measured(0.0 if as_assumed else float("inf"), detail, {"holds": holds})


def samples() -> np.ndarray:
    """Evenly spread float32 bit patterns, and every power of two."""
    step = 2**32 // SAMPLES
    first = int(np.random.default_rng(0).integers(step))
    patterns = np.arange(first, 2**32, step, dtype=np.uint64).astype(np.uint32)
    return np.concatenate([patterns.view(np.float32), np.ldexp(np.float32(1), np.arange(-126, 128)).astype(np.float32)])


def _errors(device: Device, assumption: Assumption) -> Measured:
    x = samples()
    with np.errstate(all="ignore"):
        truth = TRUTHS[assumption.name](x.astype(np.float64))
        got = device.unary(x, function=assumption.name).astype(np.float64)
        normal = (np.abs(truth) >= SMALLEST_NORMAL) & (np.abs(truth) <= LARGEST) & (np.abs(x) >= SMALLEST_NORMAL)
        x, truth, got = x[normal].astype(np.float64), truth[normal], got[normal]
        off = np.abs(got - truth) / np.spacing(np.abs(truth).astype(np.float32)).astype(np.float64)
    off = np.where(np.isfinite(off), off, np.inf)
    share = off / (assumption.ulps + assumption.slope * np.abs(x))
    worst = int(share.argmax())
    detail = f"{off[worst]:.3g} ulp at {x[worst]:.9g}, largest {off.max():.3g} ulp of {len(x)} arguments"
    # Of an error that grows with the argument what is left beside the assumed slope.
    figures = {"ulps": float(max((off - assumption.slope * np.abs(x)).max(), 0.5))}
    return Measured(float(share[worst]), detail, figures)


def _rounds(device: Device, dtype: str) -> tuple[bool, str]:
    x = samples()
    with np.errstate(all="ignore"):
        x = x[np.abs(x) <= float(ml_dtypes.finfo(numpy_dtype(dtype)).max)]
        expected, got = x.astype(numpy_dtype(dtype)), device.convert(x, dtype=dtype)
    wrong = np.flatnonzero(expected.view(f"u{expected.itemsize}") != got.view(f"u{got.itemsize}"))
    if not len(wrong):
        return True, f"all of {len(x)} numbers"
    at = wrong[0]
    return False, f"{len(wrong)} of {len(x)} otherwise, first {x[at]:.9g}: {float(got[at])} for {float(expected[at])}"


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


def _keeps_subnormals(device: Device) -> tuple[bool, str]:
    x = np.ldexp(np.float32(1), np.arange(-149, -126)).astype(np.float32)
    x = np.resize(x, 128)
    got = device.unary(x, function="kept")
    return bool(np.array_equal(got, x)), f"{int((got != 0).sum())} of {len(x)} are left"
