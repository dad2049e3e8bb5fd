"""Arrays that are quantised where they are computed: an elementwise function of others, which memory never holds.

A tile of each array is computed in VMEM, and there it is measured and encoded as `_lib/blocks.py` does it.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from op_arguments.quantize import Quantized
from tpu_kernels._lib.activations import fold_nearby
from tpu_kernels._lib.blocks import Pass, Scaling, columnwise, divisor, quantize_tile, rowwise, stores_scales
from tpu_kernels._lib.call import Block, bytes_of, call, jit
from tpu_kernels._lib.chip import LANES
from tpu_kernels._lib.layout import SUBLANES, ScaleBlock, Tiles, tile_size

COLUMNS = 2 * LANES
"""That are computed together, of `SUBLANES` rows: what a function has between fits the registers."""

MOST_ROWS = 8 * LANES
"""Of a tile: what each row has, a factor and scales, takes a register for eight rows."""


class Computed(NamedTuple):
    """What a `Compute` returns: the arrays, and terms of which the sum over each row is wanted, or None."""

    arrays: tuple[jax.Array, ...]
    terms: jax.Array | None = None


Compute = Callable[..., Computed]
"""Of float32: a factor for each row, in every column of it, and rows of some arrays, to as many rows."""


class _Operands(NamedTuple):
    factors: Any
    arrays: list[Any]


class _Output(NamedTuple):
    """Of each array the pass's results, the sums, and the arrays themselves if tiles share blocks, else none."""

    results: list[list[Any]]
    sums: Any
    kept: list[Any]


class _Scratch(NamedTuple):
    """Memory of a tile: the arrays that are not kept, a value for each row in all lanes, and the pass's of each."""

    computed: list[Any]
    of_rows: Any
    given: list[list[Any]]


def tiles_computed(
    compute: Compute, arrays: Sequence[Any], blocks: Sequence[ScaleBlock], scaling: Scaling
) -> Tiles | None:
    """The tiles of `quantize_computed` for arrays [M, N]; None where it does not take them.

    A tile has whole rows, in whole registers, and whole blocks but of a whole column. VMEM holds given arrays twice,
    and computed ones once, or twice where memory keeps them.
    """
    m, n = arrays[0].shape
    if not (m and n) or m % LANES or n % COLUMNS:
        return None
    size = min(tile_size() * 3 // (2 * (len(arrays) + _count(compute, len(arrays)))), MOST_ROWS * n)
    most = size // (LANES * n)
    even = divisor(m // LANES, most)  # of tiles that share columns one with fewer rows costs all of them a mask
    tiles = Tiles.of((1, m, n), blocks, (even if 2 * even > most else most) * LANES * n)
    fits = tiles.columns == n and tiles.rows * n <= size and tiles.rows % LANES == 0
    return tiles if fits and stores_scales(tiles, scaling) else None


def _count(compute: Compute, arrays: int) -> int:
    """How many arrays `compute` computes of so many."""
    rows = jax.ShapeDtypeStruct((SUBLANES, COLUMNS), jnp.float32)
    return len(jax.eval_shape(compute, rows, *[rows] * arrays).arrays)


@jit("compute", "blocks", "scaling", "tiles", "interpret")
def quantize_computed(
    factors: jax.Array,
    *arrays: jax.Array,
    compute: Compute,
    blocks: tuple[ScaleBlock, ...],
    scaling: Scaling,
    tiles: Tiles,
    interpret: bool | pltpu.InterpretParams,
) -> tuple[list[list[Quantized]], jax.Array]:
    """The results of `compute`, each quantised in each of `blocks`, and the sums [M] of its terms over each row.

    factors [M] and arrays [M, N]: float32, what it computes from. Sums are 0 where it has no terms.
    blocks: by rows, and by columns if there are two. tiles: those of `tiles_computed`.
    """
    m, n = arrays[0].shape
    count = _count(compute, len(arrays))
    how = Pass(dict(zip((rowwise, columnwise), blocks, strict=False)), tiles, scaling, interpret)
    computed = jax.ShapeDtypeStruct((1, m, n), jnp.float32)
    sums = jax.ShapeDtypeStruct((1, 1, m), jnp.float32)
    results = [how.results(computed) for _ in range(count)]
    kept = [computed] * count if tiles.spanned else []

    def elements(array: Any) -> Block:
        return tiles.elements_of(array, tiles.at)

    def of_rows(array: Any) -> Block:
        return Block(array, (None, 1, tiles.rows), lambda *steps: (0, 0, tiles.at(*steps)[1]))

    found: _Output = call(
        partial(_kernel, compute=compute, how=how),
        name="quantize",
        grid=(*tiles.walks, tiles.steps),
        parallel=3,
        operands=_Operands(of_rows(factors.reshape(1, 1, m)), [elements(x[None]) for x in arrays]),
        out=_Output(results, of_rows(sums), list(map(elements, kept))),
        scratch=_Scratch(
            [pltpu.VMEM((tiles.rows, tiles.columns), jnp.float32) for _ in range(count - len(kept))],
            pltpu.VMEM((tiles.rows, LANES), jnp.float32),
            [how.memory() for _ in range(count)],
        ),
        cost=pl.CostEstimate(
            flops=(20 + how.operations) * m * n * count,
            transcendentals=m * n,
            bytes_accessed=bytes_of(factors, arrays, sums, kept, results),
        ),
        interpret=interpret,
    )
    quantized = [
        how.returned(x, stored) for x, stored in zip(found.kept or [computed] * count, found.results, strict=True)
    ]
    return [[Quantized(q.qvalue[0], q.scale[0]) for q in each] for each in quantized], found.sums[0, 0]


def _kernel(operands: _Operands, out: _Output, scratch: _Scratch, *, compute: Compute, how: Pass) -> None:
    tiles = how.tiles
    arrays = out.kept or scratch.computed
    scratch.of_rows[...] = jnp.broadcast_to(operands.factors[...], (LANES, tiles.rows)).T

    def compute_rows(i: Any, _: None) -> None:
        rows = pl.ds(pl.multiple_of(i * SUBLANES, SUBLANES), SUBLANES)
        factors = jnp.concatenate([scratch.of_rows[rows, :]] * (COLUMNS // LANES), axis=1)
        terms = []
        for first in range(0, tiles.columns, COLUMNS):
            columns = pl.ds(first, COLUMNS)
            computed = compute(factors, *(x[rows, columns] for x in operands.arrays))
            for x, values in zip(arrays, computed.arrays, strict=True):
                x[rows, columns] = values
            terms.append(jnp.zeros_like(factors) if computed.terms is None else computed.terms)
        sums = jnp.sum(fold_nearby(jnp.concatenate(terms), SUBLANES), axis=1, keepdims=True)
        scratch.of_rows[rows, :] = jnp.broadcast_to(sums, (SUBLANES, LANES))

    lax.fori_loop(0, tiles.rows // SUBLANES, compute_rows, None)
    out.sums[...] = scratch.of_rows[...].T[:1, :]
    quantize_tile(
        [how.tile(x, results, given) for x, results, given in zip(arrays, out.results, scratch.given, strict=True)]
    )
