"""Tiles of the grouped matmuls: (tm, tk, tn) from a table or the caller, as the kernels need them."""

from collections.abc import Callable, Sequence

import triton

from op_arguments.gmm import Problem
from op_arguments.quantized_gmm import QuantizedProblem

Tile = tuple[int, int, int]
LARGEST_TILE = 128  # per axis: 128 x 128 float32 sums are 64 registers a thread with eight warps


def first_filled(tiles: Sequence[Tile], p: Problem | QuantizedProblem) -> Callable[[int, int, int], Tile]:
    """A look-up table: the first of `tiles` whose tm an average group fills, else the last."""

    def table(m: int, k: int, n: int) -> Tile:
        rows = m // max(p.groups, 1)
        return next((tile for tile in tiles if tile[0] <= rows), tiles[-1])

    return table


def fitted(tile: Tile, p: Problem | QuantizedProblem) -> Tile:
    """The chosen tile as the kernels need it: powers of two, not far beyond the problem's own size."""
    tm, tk, tn = (min(block_of(t), block_of(size), LARGEST_TILE) for t, size in zip(tile, (p.m, p.k, p.n), strict=True))
    return tm, tk, tn


def block_of(size: int) -> int:
    """The block that holds `size` elements: a power of two, at least 16 (the smallest operand of a dot)."""
    return max(int(triton.next_power_of_2(size)), 16)
