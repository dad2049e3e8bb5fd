"""How matrix units multiply operands that are wider than they are: in passes over narrow pieces of them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

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

PASSES: Mapping[str, Passes] = {"bf16x6": mxu_x6, "bf16x3x3": whole_float32, "bf16x3": bf16x3, "bf16x2": bf16x3}
"""By the name of a contract's dot; all others take one pass."""
