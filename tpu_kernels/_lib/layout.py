"""How kernels see an array in blocks that share a scale: as [A, R, C], in tiles of whole blocks.

A block that is longer than a tile is a whole axis, and its tiles are walked one after the other.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl

from op_arguments.quantize import Blocks
from tpu_kernels._lib.call import Block
from tpu_kernels._lib.chip import LANES, sublanes

SUBLANES = sublanes(jnp.int8)
TILE_ROWS, TILE_COLUMNS = 512, 1024
_TILE = TILE_ROWS * TILE_COLUMNS

ScaleBlock = tuple[int, int]
"""Rows and columns of an array [A, R, C] that share a scale."""


class Layout(NamedTuple):
    """How a kernel sees an array: its shape as [A, R, C], and the rows r and columns c of a block.

    split is None where that is a plain reshape. Else it is the shape with each axis split into (blocks, elements of a
    block): the elements are brought to the front, as R, and every column is a block.
    """

    shape: tuple[int, int, int]
    block: ScaleBlock
    split: tuple[int, ...] | None

    @classmethod
    def of(cls, shape: tuple[int, ...], blocks: Blocks) -> "Layout":
        """How an array of `shape` is seen: as it is, where its blocks are whole registers or whole axes."""
        lead, (rows, columns) = shape[:-2], ((1, *shape)[-2:])
        lead_blocks, (r, c) = blocks[:-2], ((1, *blocks)[-2:])
        if r == rows and any(block > 1 for block in lead_blocks) and lead_blocks == lead:
            lead, rows, r = (), rows * int(np.prod(lead)), r * int(np.prod(lead))
            lead_blocks = ()
        by_rows = r in (1, rows) or (r % SUBLANES == 0 and r <= TILE_ROWS)
        by_columns = c in (1, columns) or (c % LANES == 0 and c <= TILE_COLUMNS) or c in (16, 32, 64)
        if by_rows and by_columns and all(block == 1 for block in lead_blocks):
            return cls((int(np.prod(lead)), rows, columns), (r, c), None)
        split = tuple(part for size, block in zip(shape, blocks, strict=True) for part in (size // block, block))
        elements = int(np.prod(blocks))
        return cls((1, elements, int(np.prod(split[::2]))), (elements, 1), split)

    def view(self, x: jax.Array) -> jax.Array:
        """x as [A, R, C]."""
        if self.split is not None:
            axes = range(len(self.split))
            x = x.reshape(self.split).transpose(*axes[1::2], *axes[::2])
        return x.reshape(self.shape)

    def restore(self, x: jax.Array, shape: tuple[int, ...]) -> jax.Array:
        """What `view` made of an array of `shape`, back."""
        if self.split is not None:
            rank = len(shape)
            order = [i for axis in range(rank) for i in (rank + axis, axis)]
            x = x.reshape(self.split[1::2] + self.split[::2]).transpose(order)
        return x.reshape(shape)


class Tiles(NamedTuple):
    """The tile [rows, columns] of an array [A, R, C], and how many of them along each axis share their blocks."""

    shape: tuple[int, int, int]
    rows: int
    columns: int
    steps_r: int
    steps_c: int

    @classmethod
    def of(cls, shape: tuple[int, int, int], blocks: Sequence[ScaleBlock]) -> "Tiles":
        """Tiles of whole blocks; a block that is a whole axis, and longer than a tile can be, is walked in steps."""
        _, rows, columns = shape
        r, c = (max(sizes) for sizes in zip(*blocks, strict=True))
        most_r, most_c = TILE_ROWS, TILE_COLUMNS
        if len(blocks) == 1 and c == columns and r == 1:
            most_c = 8 * TILE_COLUMNS
            most_r = min(TILE_ROWS, _TILE // min(columns, most_c) // SUBLANES * SUBLANES)
        elif len(blocks) == 1 and r == rows and c == 1:
            most_r = 8 * TILE_ROWS
            most_c = min(TILE_COLUMNS, _TILE // min(rows, most_r) // LANES * LANES)
        tile_r, tile_c = min(pl.cdiv(rows, SUBLANES) * SUBLANES, most_r), min(columns, most_c)
        if r < rows:
            tile_r = max(tile_r // r * r // SUBLANES * SUBLANES, SUBLANES)
        if LANES <= c < columns:
            tile_c = tile_c // c * c
        steps_r = pl.cdiv(rows, tile_r) if r == rows else 1
        return cls(shape, tile_r, tile_c, steps_r, pl.cdiv(columns, tile_c) if c == columns else 1)

    @property
    def steps(self) -> int:
        """How many tiles share their blocks: a walk of them is one pass."""
        return self.steps_r * self.steps_c

    @property
    def walks(self) -> tuple[int, int, int]:
        """How many walks there are along each axis."""
        a, rows, columns = self.shape
        return a, pl.cdiv(rows, self.rows * self.steps_r), pl.cdiv(columns, self.columns * self.steps_c)

    def at(self, a: Any, i: Any, j: Any, step: Any) -> tuple[Any, Any, Any]:
        """The tile at a step of a walk."""
        return a, i * self.steps_r + step // self.steps_c, j * self.steps_c + step % self.steps_c

    def scales(self, block: ScaleBlock) -> tuple[int, int]:
        """How many rows and columns of scales a tile has."""
        _, rows, columns = self.shape
        r, c = block
        return 1 if r == rows else self.rows // r, 1 if c == columns else self.columns // c

    def elements_of(self, array: Any, index: Callable[..., Any]) -> Block:
        """An array [A, R, C] in tiles: `index(*steps)` says which."""
        return Block(array, (None, self.rows, self.columns), index)

    def scales_of(self, array: Any, block: ScaleBlock) -> Block:
        """The scales of a walk, the same at every step, of an array as `by_walk` returns it."""
        return Block(array, (None, None, None, *self.scales(block)), lambda a, i, j, step: (a, i, j, 0, 0))

    def by_walk(self, scale: jax.Array, block: ScaleBlock) -> jax.Array:
        """Scales [A, R / r, C / c] as [A, walks of rows, walks of columns, rows, columns], which fit any tile."""
        rows, columns = self.scales(block)
        a, walks_r, walks_c = self.walks
        missing = [(0, 0), (0, walks_r * rows - scale.shape[1]), (0, walks_c * columns - scale.shape[2])]
        return jnp.pad(scale, missing).reshape(a, walks_r, rows, walks_c, columns).transpose(0, 1, 3, 2, 4)

    def from_walks(self, scale: jax.Array, block: ScaleBlock) -> jax.Array:
        """The reverse of `by_walk`."""
        a, walks_r, walks_c, rows, columns = scale.shape
        flat = scale.transpose(0, 1, 3, 2, 4).reshape(a, walks_r * rows, walks_c * columns)
        return flat[:, : self.shape[1] // block[0], : self.shape[2] // block[1]]
