"""The grids of the grouped matmuls, quantised or not: which blocks a step has, and what all steps fetch.

gmm's steps are (column tile, visit, step along K); tgmm's (column tile, row tile of the result, visit). The visits are
innermost where what they share should stay: a group's weights, or the sums of a group.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
from jax.experimental import pallas as pl

from op_arguments.gmm import Problem
from op_arguments.quantized_gmm import QuantizedProblem
from tpu_kernels._lib.call import Block, bytes_of
from tpu_kernels._lib.tiles import Tile
from tpu_kernels._lib.visits import Visits


class Operands(NamedTuple):
    """What the kernels read, None for what a call does without."""

    lhs: Any
    rhs: Any
    lhs_scale: Any = None
    rhs_scale: Any = None
    lhs_powers: Any = None
    rhs_powers: Any = None
    existing_out: Any = None


def gmm_lhs(n_i: Any, visit: Any, k_i: Any, visits: Visits, *_: Any) -> Any:
    return visits.tile_ids[visit], k_i


def gmm_rhs(n_i: Any, visit: Any, k_i: Any, visits: Visits, *_: Any) -> Any:
    return visits.group_ids[visit], k_i, n_i


def gmm_rhs_transposed(n_i: Any, visit: Any, k_i: Any, visits: Visits, *_: Any) -> Any:
    return visits.group_ids[visit], n_i, k_i


def gmm_weights(tile: Tile, transpose_rhs: bool) -> tuple[tuple[int | None, ...], Callable[..., Any]]:
    """The block of rhs [G, K, N], or [G, N, K], in a step, and which one."""
    _, tk, tn = tile
    return ((None, tn, tk), gmm_rhs_transposed) if transpose_rhs else ((None, tk, tn), gmm_rhs)


def gmm_out(n_i: Any, visit: Any, k_i: Any, visits: Visits, *_: Any) -> Any:
    return visits.tile_ids[visit], n_i


def gmm_cost(p: Problem | QuantizedProblem, tile: Tile, operands: Operands, out: Block) -> pl.CostEstimate:
    """What gmm computes, reads and writes. A block is fetched anew when its index changes: with a single step over K,
    only at a new tile or a new group.
    """
    tiles_m, tiles_k, tiles_n = (pl.cdiv(size, step) for size, step in zip((p.m, p.k, p.n), tile, strict=True))
    visits = tiles_m + p.groups - 1
    rows, matrices = (p.m, p.groups) if tiles_k == 1 else (visits * tile[0], visits)
    lhs, rhs = operands.lhs.array, operands.rhs.array
    fetched = tiles_n * rows * p.k * lhs.dtype.itemsize + matrices * p.k * p.n * rhs.dtype.itemsize
    return _cost(p, fetched, operands, out)


def tgmm_lhs(n_i: Any, k_i: Any, visit: Any, visits: Visits, *_: Any) -> Any:
    return visits.tile_ids[visit], k_i


def tgmm_rhs(n_i: Any, k_i: Any, visit: Any, visits: Visits, *_: Any) -> Any:
    return visits.tile_ids[visit], n_i


def tgmm_out(n_i: Any, k_i: Any, visit: Any, visits: Visits, *_: Any) -> Any:
    return visits.group_ids[visit], k_i, n_i


def tgmm_cost(p: Problem | QuantizedProblem, tile: Tile, operands: Operands, out: Block) -> pl.CostEstimate:
    """As `gmm_cost`, of tgmm: for every column tile all of lhs is fetched, for every row tile all of rhs."""
    tiles_k, tiles_n = pl.cdiv(p.k, tile[1]), pl.cdiv(p.n, tile[2])
    fetched = tiles_n * bytes_of(operands.lhs.array) + tiles_k * bytes_of(operands.rhs.array)
    return _cost(p, fetched, operands, out)


def _cost(p: Problem | QuantizedProblem, fetched: int, operands: Operands, out: Block) -> pl.CostEstimate:
    """fetched: of lhs and rhs; of all else every element is read, or written, once."""
    once = sum(bytes_of(block.array) for block in (*jax.tree.leaves(operands[2:]), out))
    return pl.CostEstimate(flops=2 * p.m * p.k * p.n, transcendentals=0, bytes_accessed=fetched + once)
