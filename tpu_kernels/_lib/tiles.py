"""Tiles of the grouped matmuls: (tm, tk, tn) from a table or the caller, as Mosaic and the matrix unit need them."""

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from op_arguments.gmm import Problem
from op_arguments.quantized_gmm import QuantizedProblem
from tpu_kernels._lib import chip
from tpu_kernels._lib.chip import LANES, MXU, default_vmem, sublanes

PARTS = 16
Tile = tuple[int, int, int]


class Table(NamedTuple):
    """A look-up (m, k, n) -> tile as its values: equal ones are one static argument of `jit`, two functions are two."""

    tiles: tuple[tuple[Tile, Any], ...]

    @classmethod
    def of(cls, tiling: Callable[[int, int, int], Any], shapes: Iterable[Tile]) -> "Table":
        """What `tiling` gives for these (m, k, n), right or wrong: who looks a tile up checks it."""
        found = ((shape, tiling(*shape)) for shape in sorted(shapes))
        return cls(tuple((shape, tuple(tile) if isinstance(tile, list) else tile) for shape, tile in found))

    def __call__(self, m: int, k: int, n: int) -> Any:
        return dict(self.tiles)[m, k, n]


def is_small(out_dtype: str, *beside: jax.Array | None) -> bool:
    """Whether a result takes so little memory that there is room for a larger tile: 16 bits, and none beside it."""
    return all(array is None for array in beside) and jnp.dtype(out_dtype).itemsize == 2


def even_step(size: int, longest: int, unit: int = MXU) -> int:
    """Of the fewest steps along an axis the most even ones, of whole units; the matrix unit multiplies all of each."""
    steps = pl.cdiv(max(size, 1), longest)
    return max(size, 1) if steps == 1 else pl.cdiv(pl.cdiv(size, steps), unit) * unit


def fit_tile(tile: Tile, p: Problem | QuantizedProblem, narrowest: Any) -> Tile:
    """The tile, capped to the problem, and no less than 1; what is smaller is rounded up to whole registers for Mosaic.

    narrowest: of the dtypes that the kernel takes. Its registers are whole ones of all wider dtypes too.
    """

    def fit(size: int, unit: int, whole: int) -> int:
        return min(pl.cdiv(size, unit) * unit, max(whole, 1))

    tm, tk, tn = tile
    return fit(tm, sublanes(narrowest), p.m), fit(tk, LANES, p.k), fit(tn, LANES, p.n)


def scaled_gmm_tiles(block: int, small: bool, alone: bool, mxfp8: bool, m: int, k: int, n: int) -> Tile:
    """As large as VMEM allows, as for `gmm`, but no more than PARTS blocks of scales: each is code of its own.

    alone: nothing is added to, so that there is room for more columns, in place of longer steps where scales are many
    (an operand is then scaled and fetched less often), and for more rows, which pay on v6e if scales are few, and for
    MXFP8: a step begins and ends with work under which nothing is multiplied, and HBM bounds small tiles of fp8 on
    tpu7x. small: the result takes 16 bits besides, which leaves room for still more columns.
    """
    if default_vmem() < 2**25:
        return 256, min(1024, PARTS * block), 512
    few = block >= MXU and not mxfp8
    tm = 1024 if alone and (mxfp8 or few or chip.generation() > 6) else 512
    longest = min(1024 if alone and not few and n > 1024 else 2048, PARTS * block)
    tk = even_step(k, longest, max(block, MXU) if block < k else MXU)
    weights = 2**21 if alone and not mxfp8 else 2**20
    # v6e keeps the sums of many short blocks in VMEM, for all columns.
    most = 1024 if block < LANES or (alone and not small and tk > 512) else 2048
    return tm, tk, even_step(n, min(max(weights // tk // 512 * 512, 512), most))


def scaled_tgmm_tiles(narrow: bool, small: bool, m: int, k: int, n: int) -> Tile:
    """As large an output block as VMEM allows, and twice as many rows where both operands are narrow.

    A step has costs that do not grow with its rows: the scales of whole columns, and results to store.
    small: there is room for a block twice as large.
    """
    if default_vmem() < 2**25:
        return 512, 512, 512
    tm = 1024 if narrow else 512
    if k <= 512:
        return tm, 512, 2048
    if n <= (1024 if small else 512):
        return tm, 2048, max(n, 512)
    return tm, 1024, even_step(n, 2048 if small else 1024)
