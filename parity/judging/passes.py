"""How matrix units multiply operands that are wider than they are: in passes over narrow pieces of them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import ml_dtypes
import numpy as np

from cpu_golden.stages import Passes, single_pass
from parity.dtypes import Floats, cut_off, round_to

Pair = tuple[Floats, Floats]


def leading(x: Floats) -> Floats:
    """The leading 8 bits of x, as the MXU's mask leaves them."""
    return cut_off(x, 8)


def nearest(x: Floats) -> Floats:
    """x rounded to bfloat16."""
    return round_to(x, "bfloat16").astype(np.float64)


def mxu_x6(a: Floats, b: Floats, depth: int | None, first: int) -> Iterator[Pair]:
    """Six passes over each filling of the MXU: see `parity.backends.emulation.mxu`."""
    for x, y in single_pass(a, b, depth, first):
        (x1, x_rest), (y1, y_rest) = ((part, whole - part) for whole in (x, y) for part in (leading(whole),))
        if x_rest.any() or y_rest.any():
            x2, y2 = leading(x_rest), leading(y_rest)
            yield from ((nearest(x_rest - x2), y1), (x1, nearest(y_rest - y2)), (nearest(x_rest), nearest(y_rest)))
            yield from ((x2, y1), (x1, y2))
        yield x1, y1


def in_pieces(pairs: Sequence[tuple[int, int]]) -> Passes:
    """Operands in bfloat16 pieces, `pairs` of which are multiplied, one after the other over the whole sum."""

    def passes(a: Floats, b: Floats, depth: int | None, first: int) -> Iterator[Pair]:
        count = 1 + max(max(pair) for pair in pairs)
        lhs, rhs = _pieces(a, count), _pieces(b, count)
        kept = [(x, y) for x, y in ((lhs[m], rhs[n]) for m, n in pairs) if x.any() and y.any()]
        if not kept:
            return single_pass(a, b, depth, first)
        return single_pass(
            np.concatenate([x for x, _ in kept], axis=-1), np.concatenate([y for _, y in kept], axis=-2), depth, first
        )

    return passes


def _pieces(x: Floats, count: int) -> list[Floats]:
    pieces = []
    for _ in range(count):
        pieces.append(nearest(x))
        x = x - pieces[-1]
    return pieces


bf16x3 = in_pieces(((1, 0), (0, 1), (0, 0)))
whole_float32 = in_pieces(((2, 0), (1, 1), (1, 0), (0, 2), (0, 1), (0, 0)))
"""Operands in three pieces: all of a float32, and all products but those below the last piece's."""


def cut_at_26_digits(total: Floats, a: Floats, b: Floats) -> Floats:
    """total [..., I, L] + a [..., I, J] @ b [..., J, L] of 16 bits as NVIDIA's tensor cores add one step's products.

    All are cut off at 2^-25 of the largest, by the exponents of operands: where products cancel, what is left of them
    errs by more than its own rounding. The new sum, which is a site toward zero, is not cut. With that it is bit for
    bit what `tl.dot` returns on an H200; Khattak & Mikaitis 2025, "Accurate Models of NVIDIA Tensor Cores"
    (arXiv:2512.07004).
    """
    return _aligned(total, a, b, _exponents(a), _exponents(b), 25)


FRACTION, STEP = 13, 32
"""Bits of an fp8 sum's fraction that tensor cores of Ada and Hopper keep, and products that they add at a time."""


def fp8_in_14_digits(a: np.ndarray, b: np.ndarray) -> Floats:
    """a [I, J] @ b [J, L] of fp8 as the tensor cores of sm_89 and sm_90 sum it, in float64.

    As `cut_at_26_digits` at 2^-13, and each new sum is cut off at its own 14th digit. Bit for bit what `tl.dot`
    returns on an H200 (wgmma), for normal, wide, positive and subnormal operands of e4m3 and e5m2.
    """
    total = np.zeros((a.shape[0], b.shape[1]))
    for first in range(0, a.shape[1], STEP):
        x, y = a[:, first : first + STEP], b[first : first + STEP]
        of_x, of_y = (_exponents(v.astype(np.float64), float(ml_dtypes.finfo(v.dtype).smallest_normal)) for v in (x, y))
        added = _aligned(total, x.astype(np.float64), y.astype(np.float64), of_x, of_y, FRACTION)
        with np.errstate(invalid="ignore"):
            total = cut_off(added, FRACTION + 1)
    return total


def _aligned(total: Floats, a: Floats, b: Floats, of_a: np.ndarray, of_b: np.ndarray, fraction: int) -> Floats:
    """The sum of `total` and the products, each cut off at 2^-fraction of the largest; of_a, of_b: exponents."""
    steps = range(a.shape[-1])
    top = _exponents(total)
    for j in steps:
        np.maximum(top, of_a[..., :, j, None] + of_b[..., None, j, :], out=top)
    unit = np.ldexp(1.0, np.maximum(top, NONE // 2) - fraction)
    with np.errstate(invalid="ignore"):  # NaN and infinity stay what they are
        cut = np.trunc(total / unit)
        for j in steps:
            cut += np.trunc(a[..., :, j, None] * b[..., None, j, :] / unit)
        return cut * unit


NONE = -1000
"""The exponent of zero: below that of every product."""


def _exponents(x: Floats, least: float = 0.0) -> np.ndarray:
    """e of each x = m 2^e with 1 ≤ |m| < 2, or of `least`, the smallest normal number, where that is larger."""
    found: np.ndarray = np.frexp(np.maximum(np.abs(x), least))[1] - 1
    return np.where(x == 0, NONE, found)


PASSES: Mapping[str, Passes] = {"bf16x6": mxu_x6, "bf16x3x3": whole_float32, "bf16x3": bf16x3, "bf16x2": bf16x3}
"""By the name of a contract's dot; all others take one pass."""
