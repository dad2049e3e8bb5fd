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

FRACTION, STEP = 13, 32
"""Bits of an fp8 sum's fraction that tensor cores of Ada and Hopper keep, and products that they add at a time."""


def fp8_in_14_digits(a: np.ndarray, b: np.ndarray) -> Floats:
    """a [I, J] @ b [J, L] of fp8 as the tensor cores of sm_89 and sm_90 sum it, in float64.

    The products of a step and the sum before it are cut off at 2^-13 of the largest of them, by the exponents of
    operands, and the new sum at its own 14th digit. Bit for bit what `tl.dot` returns on an H200 (wgmma), for normal,
    wide, positive and subnormal operands of e4m3 and e5m2; Khattak & Mikaitis 2025, "Accurate Models of NVIDIA Tensor
    Cores" (arXiv:2512.07004).
    """
    total = np.zeros((a.shape[0], b.shape[1]), np.float32)
    rows = max(1, PRODUCTS // (STEP * b.shape[1]))
    for start in range(0, len(total), rows):
        for first in range(0, a.shape[1], STEP):
            at = slice(start, start + rows), slice(first, first + STEP)
            total[at[0]] = _fp8_step(total[at[0]], a[at], b[at[1]].T)
    return total.astype(np.float64)


PRODUCTS = 2**20
"""Products that are in memory at a time."""


def _fp8_step(total: np.ndarray, a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """total [I, L] + a [I, J] @ b [L, J].T: every number here has at most 24 digits, so float32 is exact."""
    products = a.astype(np.float32)[:, None] * b.astype(np.float32)
    of_products = _exponents(a)[:, None] + _exponents(b)
    of_products[products == 0] = NONE
    unit = np.maximum(of_products.max(axis=2), np.where(total == 0, NONE, _exponents(total))) - FRACTION
    with np.errstate(invalid="ignore"):  # NaN and infinity stay what they are
        products = np.ldexp(products, -unit[..., None], out=products)
        cut = np.trunc(products, out=products).sum(axis=2) + np.trunc(np.ldexp(total, -unit))
        return cut_off(np.ldexp(cut, unit), FRACTION + 1).astype(np.float32)


NONE = -100
"""The exponent of zero: below that of every product of fp8."""


def _exponents(x: np.ndarray) -> np.ndarray:
    """e of each x = m 2^e with 1 ≤ |m| < 2, or of its dtype's smallest normal number, where that is larger."""
    least = np.frexp(np.float64(ml_dtypes.finfo(x.dtype).smallest_normal))[1] - 1
    return np.maximum(np.frexp(x.astype(np.float32))[1] - 1, least)


PASSES: Mapping[str, Passes] = {"bf16x6": mxu_x6, "bf16x3x3": whole_float32, "bf16x3": bf16x3, "bf16x2": bf16x3}
"""By the name of a contract's dot; all others take one pass."""
