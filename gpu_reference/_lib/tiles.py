"""Tiles of the grouped matmuls: (tm, tk, tn) from a table or the caller, as the kernels need them."""

from collections.abc import Sequence
from typing import NamedTuple

from op_arguments import Tiling, resolve_tiling
from op_arguments.gmm import Problem
from op_arguments.quantized_gmm import QuantizedProblem

Candidate = tuple[int, int, int]
"""(tm, tk, tn) of a table or a caller."""

LARGEST_TILE = 128  # per axis: 128 x 128 float32 sums are 64 registers a thread with eight warps
STEP_BYTES = 48 * 1024  # of both operands' tiles in a step: gfx942 has 64 KiB of shared memory for all of a program


class Tile(NamedTuple):
    """How much of each size a program of a grouped matmul takes at once: rows, and columns of lhs and of rhs."""

    m: int
    k: int
    n: int


def chosen(tiling: Tiling | None, default: Candidate, p: Problem | QuantizedProblem) -> Candidate:
    """The caller's tile, else the default. Raises as `resolve_tiling`."""
    return resolve_tiling(tiling, lambda m, k, n: default, p.m, p.k, p.n)


def first_filled(tiles: Sequence[Candidate], p: Problem | QuantizedProblem) -> Candidate:
    """The first of `tiles` whose tm an average group fills, else the last."""
    rows = p.m // max(p.groups, 1)
    return next((tile for tile in tiles if tile[0] <= rows), tiles[-1])


def fitted(tile: Candidate, p: Problem | QuantizedProblem, columns: int = LARGEST_TILE) -> Tile:
    """The chosen tile as the kernels need it: powers of two, not far beyond the problem's own size, nor beyond
    LARGEST_TILE and so many columns."""
    most = (LARGEST_TILE, LARGEST_TILE, columns)
    of = zip(tile, (p.m, p.k, p.n), most, strict=True)
    return Tile(*(min(block_of(t), block_of(size), largest) for t, size, largest in of))


def step_of(rows: int, depth: int, columns: int, element_size: int) -> int:
    """A step's depth, no longer than its tiles [rows, depth] and [depth, columns] fit in shared memory everywhere."""
    while depth > 16 and (rows + columns) * depth * element_size > STEP_BYTES:
        depth //= 2
    return depth


def cdiv(size: int, tile: int) -> int:
    """How many tiles hold `size` elements. Triton's own takes the host 1.5 µs, and a gmm has twelve of these two."""
    return -(-size // tile)


def next_power_of_2(size: int) -> int:
    """The least power of two that is no smaller than `size`, 0 for 0."""
    return 1 << (size - 1).bit_length() if size else 0


def block_of(size: int) -> int:
    """The block that holds `size` elements: a power of two, at least 16 (the smallest operand of a dot)."""
    return max(next_power_of_2(size), 16)
