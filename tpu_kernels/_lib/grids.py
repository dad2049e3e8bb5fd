"""The grids of the grouped matmuls, quantised or not: which blocks a step has, and what all steps fetch."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial, wraps
from typing import Any, Generic, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from op_arguments.gmm import Problem
from op_arguments.quantized_gmm import QuantizedProblem
from tpu_kernels._lib.arguments import Shard, kernel_dtype, kernel_operand
from tpu_kernels._lib.call import Block, bytes_of, call, jit
from tpu_kernels._lib.tiles import Tile
from tpu_kernels._lib.visits import Visits, group_metadata

P = TypeVar("P", Problem, QuantizedProblem)
Listed = tuple[Visits, jax.Array]
"""Visits, and how many there are."""


class Operands(NamedTuple):
    """What a grouped matmul reads, None for what it does without: arrays, their `Block`s, or references in a kernel.

    A scale is as the caller has it, then as `_lib/scales.py` lays it out; MXFP8's are powers (`_lib/powers.py`) then.
    addend [M, N] float32 is added to gmm's sums before they are rounded.
    """

    lhs: Any
    rhs: Any
    lhs_scale: Any = None
    rhs_scale: Any = None
    lhs_powers: Any = None
    rhs_powers: Any = None
    existing_out: Any = None
    addend: Any = None

    @property
    def in_powers(self) -> bool:
        """Whether an operand is multiplied by powers of two before the dot."""
        return self.lhs_powers is not None or self.rhs_powers is not None


@dataclass(frozen=True)
class Grid(Generic[P]):
    """A grouped matmul in steps, each of a tile (tm, tk, tn); contracting is tgmm, which sums over the ragged axis.

    gmm's steps are (column tile, visit, step along K); tgmm's (column tile, row tile of the result, visit). The visits
    are innermost where what they share should stay: a group's weights, or the sums of a group.
    """

    problem: P
    tile: Tile
    interpret: bool | pltpu.InterpretParams
    contracting: bool = False
    transpose_rhs: bool = False

    @property
    def summed(self) -> tuple[int, int]:
        """The length of the axis that is summed over, and a tile's."""
        return (self.problem.m, self.tile[0]) if self.contracting else (self.problem.k, self.tile[1])

    @property
    def out_axes(self) -> str:
        """Those of the result, as in `block`."""
        return "gkn" if self.contracting else "mn"

    @property
    def out_shape(self) -> tuple[int, ...]:
        """[G, K, N] or [M, N]."""
        p = self.problem
        return (p.groups, p.k, p.n) if self.contracting else (p.m, p.n)

    @property
    def part(self: "Grid[QuantizedProblem]") -> int:
        """How deep a dot is where scales change: none does within it."""
        return min(self.problem.block, self.summed[1])

    def block(self, array: Any, axes: str, shape: tuple[int | None, ...] | None = None, shared: int = 1) -> Block:
        """A step's block of an array with these axes: m, k and n in tiles, g the visit's group, - without steps.

        shape: where the block's is not that of the tile. shared: how many tiles along k have the same block.
        """
        tm, tk, tn = self.tile
        if shape is None:
            sizes = {"m": tm, "k": tk, "n": tn, "g": None}
            shape = tuple(sizes[axis] for axis in axes)
        return Block(kernel_operand(array), shape, partial(self._index, axes, shared))

    def _index(
        self, axes: str, shared: int, n: Any, second: Any, third: Any, visits: Visits, *_: Any
    ) -> tuple[Any, ...]:
        k, visit = (second, third) if self.contracting else (third, second)
        of_visit = {"m": visits.tile_ids, "g": visits.group_ids}
        of_step = {"k": k if shared == 1 else lax.div(k, shared), "n": n, "-": 0}
        return tuple(of_visit[axis][visit] if axis in of_visit else of_step[axis] for axis in axes)

    def blocks(self, operands: Operands) -> Operands:
        """lhs, rhs and what is laid out as the result with their blocks; scales are for who knows how they are."""
        rhs = "mn" if self.contracting else "gnk" if self.transpose_rhs else "gkn"
        beside = {"existing_out": operands.existing_out, "addend": operands.addend}
        found = {name: self.block(array, self.out_axes) for name, array in beside.items() if array is not None}
        return Operands(self.block(operands.lhs, "mk"), self.block(operands.rhs, rhs), **found)

    def visits(self, shard: Shard) -> Listed:
        """Those of the shard's groups."""
        p, cover = self.problem, "groups" if self.contracting else "tiles"
        found = group_metadata(
            shard, m=p.m, tm=self.tile[0], num_groups=p.groups, cover=cover, interpret=self.interpret
        )
        return Visits(found.group_ids, found.tile_ids, found.group_offsets, shard.group_offset), found.num_visits[0]

    def call(
        self, kernel: Any, *, name: str, listed: Listed, operands: Operands, scratch: Any, scalars: tuple[Any, ...] = ()
    ) -> jax.Array:
        """The result that `kernel(visits, *scalars, operands, out, scratch)` fills; operands: with their blocks."""
        p, (_, tk, tn), (visits, num_visits) = self.problem, self.tile, listed
        columns, depth = pl.cdiv(p.n, tn), pl.cdiv(p.k, tk)
        out = self.block(jax.ShapeDtypeStruct(self.out_shape, kernel_dtype(p.out_dtype)), self.out_axes)
        result: jax.Array = call(
            kernel,
            name=name,
            grid=(columns, depth, num_visits) if self.contracting else (columns, num_visits, depth),
            parallel=2 if self.contracting else 1,
            scalars=(visits, *scalars),
            operands=operands,
            out=out,
            scratch=scratch,
            cost=self._cost(operands, out),
            interpret=self.interpret,
            sized_by="tiling",
        )
        return result.astype(p.out_dtype)

    def _cost(self, operands: Operands, out: Block) -> pl.CostEstimate:
        """What all steps compute, read and write.

        A block is fetched anew when its index changes: in gmm with a single step over K only at a new tile or a new
        group; in tgmm for every column tile all of lhs, for every row tile all of rhs. All else is read, or written,
        once.
        """
        p, lhs, rhs = self.problem, operands.lhs.array, operands.rhs.array
        tiles_m, tiles_k, tiles_n = (pl.cdiv(size, step) for size, step in zip((p.m, p.k, p.n), self.tile, strict=True))
        if self.contracting:
            fetched = tiles_n * bytes_of(lhs) + tiles_k * bytes_of(rhs)
        else:
            visits = tiles_m + p.groups - 1
            rows, matrices = (p.m, p.groups) if tiles_k == 1 else (visits * self.tile[0], visits)
            fetched = tiles_n * rows * p.k * lhs.dtype.itemsize + matrices * p.k * p.n * rhs.dtype.itemsize
        once = bytes_of(operands[2:], out)
        return pl.CostEstimate(flops=2 * p.m * p.k * p.n, transcendentals=0, bytes_accessed=fetched + once)


def grouped_matmul(multiply: Callable[..., jax.Array]) -> Callable[..., jax.Array]:
    """A compiled function of (operands, shard, grid=…) that lists the visits for multiply(operands, listed, grid=…).

    It calls multiply only where there is something to multiply. A sum over nothing is one over a single zero: gmm
    stores it in active rows.
    """

    @jit("grid")
    @wraps(multiply)
    def multiplied(operands: Operands, shard: Shard, *, grid: Grid[Any]) -> jax.Array:
        p, existing_out = grid.problem, operands.existing_out
        if 0 in (p.m, p.groups, *grid.out_shape):
            return jnp.zeros(grid.out_shape, p.out_dtype) if existing_out is None else existing_out
        if p.k == 0:
            lhs, rhs = (jnp.zeros([max(size, 1) for size in x.shape], x.dtype) for x in (operands.lhs, operands.rhs))
            operands = Operands(lhs, rhs, existing_out=existing_out, addend=operands.addend)
            grid = replace(grid, problem=replace(p, k=1))
        return multiply(operands, grid.visits(shard), grid=grid)

    return multiplied
