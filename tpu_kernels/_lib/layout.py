"""How kernels see an array in blocks that share a scale: as [A, R, C], in tiles of whole blocks.

A block that is longer than a tile is a whole axis, and its tiles are walked one after the other.
"""

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl

from op_arguments.quantize import Blocks
from tpu_kernels._lib.call import Block
from tpu_kernels._lib.chip import LANES, default_vmem, sublanes

SUBLANES = sublanes(jnp.int8)
MOST_BLOCK_ROWS = 512  # of a block that is not a whole axis
MOST_ROWS, MOST_COLUMNS = 8 * MOST_BLOCK_ROWS, 2**14  # of a tile


def tile_size() -> int:
    """The most elements of a tile: of float32, with two results of a byte and all twice buffered, 3/4 of the VMEM."""
    return default_vmem() // 16


ScaleBlock = tuple[int, int]
"""Rows and columns of an array [A, R, C] that share a scale."""


def is_transposed(rows: int, columns: int, tile_rows: int) -> bool:
    """Whether E8M0 scales [rows, columns], loaded in tiles of `tile_rows`, lie transposed in memory.

    XLA transposes arguments and results of a program where that pads less: a kernel that does not is given copies.
    """
    return pl.cdiv(rows, LANES) * columns < rows * pl.cdiv(columns, LANES) and tile_rows % LANES == 0


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
        by_rows = r in (1, rows) or (r % SUBLANES == 0 and r <= MOST_BLOCK_ROWS)
        by_columns = c in (1, columns) or c % LANES == 0 or c in (16, 32, 64)
        least = SUBLANES if r in (1, rows) else r, LANES if c in (1, columns) else _width(columns, c)
        if by_rows and by_columns and math.prod(least) <= tile_size() and all(block == 1 for block in lead_blocks):
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


def _width(columns: int, c: int) -> int:
    """Columns of a tile of several blocks of c columns: all, or as many as have a register of scales."""
    return _in_tiles(columns) if columns <= MOST_COLUMNS else LANES * c


def _in_tiles(columns: int) -> int:
    """Columns of a tile of all: whole pairs of registers, as Mosaic loads no single row of one at a changing place."""
    return pl.cdiv(columns, 2 * LANES) * 2 * LANES if columns > LANES else LANES


class Tiles(NamedTuple):
    """The tile [rows, columns] of an array [A, R, C], and walks of tiles whose scales are in VMEM together.

    spanned: the tiles of a walk share their blocks, so that they are walked twice; else they follow one another along
    R, so that their scales fill whole registers.
    """

    shape: tuple[int, int, int]
    rows: int
    columns: int
    steps_r: int
    steps_c: int
    spanned: bool

    @classmethod
    def of(cls, shape: tuple[int, int, int], blocks: Sequence[ScaleBlock], size: int | None = None) -> "Tiles":
        """Tiles of whole blocks, and of whole rows where those have several; but of parts of a longer whole axis.

        size: the most elements of one, if not `tile_size`.
        """
        size = size or tile_size()
        _, rows, columns = shape
        r, c = (max(sizes) for sizes in zip(*blocks, strict=True))
        in_tiles = pl.cdiv(rows, SUBLANES) * SUBLANES, _in_tiles(columns)
        is_held = r == rows and c == 1 and in_tiles[0] * LANES <= size
        longest = in_tiles[0] if is_held else MOST_ROWS
        if 1 < c < columns:
            most_c = _width(columns, c)
        else:
            # Eight rows of scales fill a register; where every element has one they take most of the memory.
            most_r = 8 * r if 1 < r < rows else min(in_tiles[0], longest) if c == 1 else SUBLANES * 4
            most_c = size // most_r // LANES * LANES
        tile_c = min(in_tiles[1], max(most_c, LANES))
        unit = r if 1 < r < rows else 4 * SUBLANES if size // tile_c >= 4 * SUBLANES else SUBLANES
        tile_r = min(in_tiles[0], max(min(size // tile_c, longest) // unit, 1) * unit)
        steps_r, steps_c = 1, pl.cdiv(columns, tile_c) if c == columns else 1
        if r == 1 < rows:
            tile_r = min(tile_r, MOST_ROWS // 4)
            tile_r -= tile_r % LANES if LANES < tile_r < in_tiles[0] else 0  # else their scales cannot be transposed
        elif r < rows > tile_r:
            tile_r = r << (tile_r // r).bit_length() - 1  # rows of scales that are parts of a register, or whole ones
        if r == rows:
            steps_r = pl.cdiv(rows, tile_r)
        elif r > 1:
            steps_r = min(8 // math.gcd(8, tile_r // r), pl.cdiv(rows, tile_r))
        return cls(shape, tile_r, tile_c, steps_r, steps_c, (r == rows and steps_r > 1) or steps_c > 1)

    @property
    def is_one_pass(self) -> bool:
        """Whether a tile has whole blocks, and fits VMEM."""
        return not self.spanned and self.rows * self.columns <= tile_size()

    @property
    def steps(self) -> int:
        """How many tiles a walk has."""
        return self.steps_r * self.steps_c

    @property
    def walks(self) -> tuple[int, int, int]:
        """How many walks there are along each axis."""
        a, rows, columns = self.shape
        return a, pl.cdiv(rows, self.rows * self.steps_r), pl.cdiv(columns, self.columns * self.steps_c)

    @property
    def is_ragged(self) -> bool:
        """Whether the last walk along R has fewer tiles than steps."""
        return pl.cdiv(self.shape[1], self.rows) % self.steps_r != 0

    def at(self, a: Any, i: Any, j: Any, step: Any) -> tuple[Any, Any, Any]:
        """The tile at a step of a walk: the last one again at steps beyond it, with the same scales."""
        row = i * self.steps_r + step // self.steps_c
        if self.is_ragged:
            row = jnp.minimum(row, pl.cdiv(self.shape[1], self.rows) - 1)
        return a, row, j * self.steps_c + step % self.steps_c

    def scales(self, block: ScaleBlock) -> tuple[int, int]:
        """How many rows and columns of scales a tile has."""
        _, rows, columns = self.shape
        r, c = block
        return 1 if r == rows else self.rows // r, 1 if c == columns else self.columns // c

    def shares(self, block: ScaleBlock) -> bool:
        """Whether tiles of a walk have parts of the same blocks."""
        _, rows, columns = self.shape
        return (block[0] == rows and self.steps_r > 1) or (block[1] == columns and self.steps_c > 1)

    def is_by_row(self, block: ScaleBlock) -> bool:
        """Whether each row has scales of its own, where there are several."""
        return 1 == block[0] < self.shape[1]

    def maxima(self, block: ScaleBlock) -> tuple[int, int]:
        """The rows and columns of maxima that a tile has: eight rows for a block that rows share, as a register has."""
        rows, _ = self.scales(block)
        return rows if self.is_by_row(block) else 8 * rows, self.scales_of_walk(block)[1]

    def maxima_of(self, block: ScaleBlock, array: Any = None) -> Block:
        """The maxima of a walk, the same at every step; of a result where there is no array."""
        a, rows, columns = self.shape
        shape = a, rows if self.is_by_row(block) else 8 * (rows // block[0]), columns // block[1]
        array = jax.ShapeDtypeStruct(shape, jnp.float32) if array is None else array
        return Block(array, (None, *self.maxima(block)), lambda a, i, j, step: (a, i, j))

    def scales_of_walk(self, block: ScaleBlock) -> tuple[int, int]:
        """The rows and columns of scales that a walk has in VMEM: whole registers."""
        rows, columns = self.scales(block)
        rows *= self.steps_r if 1 < block[0] < self.shape[1] else 1
        return pl.cdiv(rows, 8) * 8, pl.cdiv(columns, LANES) * LANES

    def elements_of(self, array: Any, index: Callable[..., Any]) -> Block:
        """An array [A, R, C] in tiles: `index(*steps)` says which."""
        return Block(array, (None, self.rows, self.columns), index)

    def scales_at(self, block: ScaleBlock, a: Any, i: Any, j: Any, step: Any) -> tuple[Any, Any, Any]:
        """Which scales a step needs, counted in `scales_of_walk`: a walk's, or a tile's where each row has one."""
        return a, self.at(a, i, j, step)[1] if self.is_by_row(block) else i, j

    def scales_of(self, array: Any, block: ScaleBlock) -> Block:
        """The scales [A, R / r, C / c] of a walk, the same at every step; of a tile where each row has one.

        Those of rows are [A, C / c, R] in memory where `has_transposed`.
        """
        scales = Block(array, (None, *self.scales_of_walk(block)), partial(self.scales_at, block))
        return scales.transposed() if self.has_transposed(block, array.dtype) else scales

    def has_transposed(self, block: ScaleBlock, dtype: Any) -> bool:
        """Whether the scales of rows are transposed in memory: those of a byte may be."""
        _, rows, columns = self.shape
        is_byte_of_row = self.is_by_row(block) and jnp.dtype(dtype).itemsize == 1
        return is_byte_of_row and is_transposed(rows, columns // block[1], self.rows)
