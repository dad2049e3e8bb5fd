"""Tiles of the grouped matmuls: (tm, tk, tn) from a table or the caller, as Mosaic and the matrix unit need them."""

from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from op_arguments.gmm import Problem
from op_arguments.quantized_gmm import QuantizedProblem
from tpu_kernels._lib.chip import LANES, MXU, sublanes

Tile = tuple[int, int, int]


def is_small(existing_out: jax.Array | None, out_dtype: str) -> bool:
    """Whether a result takes so little memory that there is room for a larger tile: 16 bits, and none to add to."""
    return existing_out is None and jnp.dtype(out_dtype).itemsize == 2


def even_step(size: int, longest: int, unit: int = MXU) -> int:
    """Of the fewest steps along an axis the most even ones, of whole units; the matrix unit multiplies all of each."""
    steps = pl.cdiv(max(size, 1), longest)
    return max(size, 1) if steps == 1 else pl.cdiv(pl.cdiv(size, steps), unit) * unit


def fit_tile(tile: Tile, p: Problem | QuantizedProblem, narrowest: Any) -> Tile:
    """The tile, capped to the problem; what is left smaller is rounded up to whole registers, as Mosaic asks.

    narrowest: of the dtypes that the kernel takes. Its registers are whole ones of all wider dtypes too.
    """

    def fit(size: int, unit: int, whole: int) -> int:
        return min(pl.cdiv(size, unit) * unit, whole)

    tm, tk, tn = tile
    return fit(tm, sublanes(narrowest), p.m), fit(tk, LANES, p.k), fit(tn, LANES, p.n)
