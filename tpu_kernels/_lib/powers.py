"""MXFP8's scales: powers of two, which multiply the operands, in bfloat16, before the dot.

A scale is a byte, its exponent, for 32 elements. Where these lie along the lanes of a tile, words of four rows' bytes
are moved there (`powers_in_lanes`); where they lie along its rows, a row of scales is repeated (`powers_in_rows`).
"""

from collections.abc import Callable
from functools import partial, reduce
from typing import Any, TypeGuard

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from op_arguments.mxfp8 import E8M0, MX_BLOCK
from op_arguments.quantized_gmm import QuantizedProblem
from tpu_kernels._lib import chip
from tpu_kernels._lib.call import Block, bytes_of, call, rarely
from tpu_kernels._lib.chip import LANES, sublanes
from tpu_kernels._lib.formats import exponents
from tpu_kernels._lib.grids import Grid, Operands
from tpu_kernels._lib.layout import is_transposed
from tpu_kernels._lib.products import blocks, for_blocks, over_rows, repeated_row

SUBLANES = sublanes(jnp.int8)
E8M0_NAN, BFLOAT16_NAN = 0xFF, 0x7FC0
POWER_ROWS, POWER_COLUMNS = 512, 1024  # of a tile of scales when they are made bfloat16


def is_power(scale: jax.Array | None) -> TypeGuard[jax.Array]:
    """Whether a scale is MXFP8's, by which an operand is multiplied before the dot."""
    return scale is not None and scale.dtype == jnp.dtype(E8M0)


def powers_in_lanes(scale: jax.Array, size: int, tile: int, interpret: bool | pltpu.InterpretParams) -> jax.Array:
    """Pack E8M0 scales [A, R, size / 32] into int32 words [A, registers, R / 4, lanes].

    `tiles_of_register` tiles lie in each register, one after the other; a wider tile has several times 128 lanes.

    A word has those of four rows, so that one move along the lanes serves a whole 8-bit register: of 32 rows word i has
    2i, 16 + 2i, 2i + 1 and 17 + 2i, from the lowest byte on, which are a word each of two 16-bit registers.
    One NaN scale makes the whole row NaN, so a register records NaN once, in its first block's exponent.
    """
    a, rows, count = scale.shape
    width = tiles_of_register(size, tile) * pl.cdiv(tile, MX_BLOCK)
    registers, lanes = pl.cdiv(count, width), pl.cdiv(width, LANES) * LANES
    height = min(POWER_ROWS, pl.cdiv(rows, SUBLANES) * SUBLANES)
    transposed = is_transposed(rows, count, height)
    given = Block(scale, (None, height, count), lambda a, i: (a, i, 0))

    def pack(powers: Any, out: Any, _: None) -> None:
        def pack_rows(own: Any, has_nan: bool) -> jax.Array:
            own_exponents = exponents(powers[:, own] if transposed else powers[own, :], transposed)
            for rows in blocks(own.size, SUBLANES):
                words = pl.ds((own.start + rows.start) // 4, SUBLANES // 4)
                for n in range(registers):
                    part = own_exponents[rows.start : rows.start + SUBLANES, n * width : (n + 1) * width]
                    if has_nan:
                        is_nan = jnp.max(part, axis=1, keepdims=True) == E8M0_NAN
                        is_first = lax.broadcasted_iota(jnp.int32, part.shape, 1) == 0
                        part = jnp.where(is_nan & is_first, E8M0_NAN, part)
                    pairs = part[: SUBLANES // 2] | part[SUBLANES // 2 :] << 8
                    out[n, words, pl.ds(0, part.shape[1])] = pltpu.bitcast(pairs.astype(jnp.int16), jnp.int32)
            return own_exponents

        # In a loop each group of rows waits for its own lanes: packing took 1.6 times the cycles on tpu7x.
        parts = blocks(height, LANES if transposed else SUBLANES)
        largest = reduce(jnp.maximum, [pack_rows(own, has_nan=False) for own in parts])

        @rarely(jnp.max(largest) == E8M0_NAN)
        def mark() -> None:
            for own in parts:
                pack_rows(own, has_nan=True)

    out = jax.ShapeDtypeStruct((a, registers, words_of(rows), lanes), jnp.int32)
    words: jax.Array = call(
        pack,
        name="powers_in_lanes",
        grid=(a, pl.cdiv(rows, height)),
        parallel=2,
        operands=given.transposed() if transposed else given,
        out=Block(out, (None, registers, words_of(height), lanes), lambda a, i: (a, 0, i, 0)),
        cost=_cost(scale, out),
        interpret=interpret,
    )
    return words


def tiles_of_register(size: int, tile: int) -> int:
    """The number of tiles of an axis whose scales share a register of 128 lanes; 1 where one needs more."""
    return min(max(LANES // pl.cdiv(tile, MX_BLOCK), 1), pl.cdiv(size, tile))


def words_of(rows: int) -> int:
    """Rows of the words of `powers_in_lanes` for rows of an operand."""
    return pl.cdiv(rows, SUBLANES) * SUBLANES // 4


def powers_in_rows(scale: jax.Array, interpret: bool | pltpu.InterpretParams) -> jax.Array:
    """float8_e8m0fnu [A, blocks, C] in words [A, blocks, C], each twice: a row, repeated, is 32 rows of bfloat16."""
    a, count, columns = scale.shape
    height, width = min(POWER_ROWS, pl.cdiv(count, SUBLANES) * SUBLANES), min(POWER_COLUMNS, columns)

    def unpack(powers: Any, out: Any, _: None) -> None:
        def unpack_rows(own: Any) -> None:
            found = exponents(powers[own, :], transposed=False)
            bits = jnp.where(found == E8M0_NAN, BFLOAT16_NAN, found << 7)
            out[own, :] = bits | bits << 16

        for_blocks(height, SUBLANES, unpack_rows)

    out = jax.ShapeDtypeStruct(scale.shape, jnp.int32)
    tile = partial(Block, shape=(None, height, width), index=lambda a, i, j: (a, i, j))
    words: jax.Array = call(
        unpack,
        name="powers_in_rows",
        grid=(a, pl.cdiv(count, height), pl.cdiv(columns, width)),
        parallel=3,
        operands=tile(scale),
        out=tile(out),
        cost=_cost(scale, out),
        interpret=interpret,
    )
    return words


def _cost(scale: jax.Array, out: jax.ShapeDtypeStruct) -> pl.CostEstimate:
    return pl.CostEstimate(flops=4 * scale.size, transcendentals=0, bytes_accessed=bytes_of(scale, out))


def gmm_powers(operands: Operands, grid: Grid[QuantizedProblem]) -> dict[str, Block]:
    """The words of the scales of gmm's operands, with their blocks: in rows where K lies along rows, [G, K, N]."""
    k, (tm, tk, tn), found = grid.problem.k, grid.tile, {}
    shared = tiles_of_register(k, tk)
    if (scale := operands.lhs_scale) is not None:
        words = powers_in_lanes(scale[None], k, tk, grid.interpret)[0]
        found["lhs_powers"] = grid.block(words, "km-", (None, words_of(tm), words.shape[-1]), shared=shared)
    if (scale := operands.rhs_scale) is not None and grid.transpose_rhs:
        words = powers_in_lanes(scale, k, tk, grid.interpret)
        found["rhs_powers"] = grid.block(words, "gkn-", (None, None, words_of(tn), words.shape[-1]), shared=shared)
    elif scale is not None:
        words = powers_in_rows(scale, grid.interpret)
        found["rhs_powers"] = grid.block(words, "g-n", (None, words.shape[1], tn))
    return found


def tgmm_powers(operands: Operands, grid: Grid[QuantizedProblem]) -> dict[str, Block]:
    """As `gmm_powers`, of tgmm: blocks of M lie along the rows of both operands."""
    (tm, tk, tn), found = grid.tile, {}
    for name, scale, axes, width in (
        ("lhs_powers", operands.lhs_scale, "mk", tk),
        ("rhs_powers", operands.rhs_scale, "mn", tn),
    ):
        if scale is not None:
            words = powers_in_rows(scale[None], grid.interpret)[0]
            found[name] = grid.block(words, axes, (tm // MX_BLOCK, width))
    return found


def times_lanes(x: jax.Array, powers: Any, rows: Any, first: int, tile_lane: Any = 0) -> jax.Array:
    """x [R, C] in bfloat16 times the powers of these rows, as `powers_in_lanes` has them, one for 32 columns.

    x begins at column first of the tile, a multiple of 128. The tile's powers begin at lane tile_lane.
    """
    own = pl.ds(rows.start // 4, words_of(rows.size))
    registers = pl.cdiv(rows.size, SUBLANES)
    products = []
    for columns in blocks(x.shape[1], LANES):
        lane = (first + columns.start) // MX_BLOCK
        words = powers[own, pl.ds(lane // LANES * LANES, LANES)]
        index = tile_lane + lane % LANES + lax.broadcasted_iota(jnp.int32, words.shape, 1) // MX_BLOCK
        words = jnp.take_along_axis(words, index, axis=1, mode="promise_in_bounds")
        halves = [pltpu.bitcast(bits & 0x7F807F80, jnp.bfloat16) for bits in (words << 7, words >> 1)]
        halves = [half.reshape(registers, SUBLANES // 2, LANES) for half in halves]
        wide = jnp.concatenate(halves, axis=1).reshape(registers * SUBLANES, LANES)[: x.shape[0], : columns.size]
        product = x[:, columns.start : columns.start + columns.size] * wide
        if lane == 0:
            product += wide - wide  # NaN's exponent is infinity's here
        products.append(product)
    return jnp.concatenate(products, axis=1)


def times_rows(
    x: jax.Array, powers: Any, first: Any, columns: Any, is_own: Callable[[Any], jax.Array] | None = None
) -> jax.Array:
    """x [R, C] in bfloat16 times the powers of these columns, as `powers_in_rows` has them, one for 32 rows.

    x begins at block first of the powers' axis. A block that is not is_own counts for nothing: it may have NaN.
    """
    spread = []
    by_load = chip.generation() < 7  # where the matrix unit bounds, products wait longer for loads: 8% in gmm on tpu7x
    for block, rows in enumerate(blocks(x.shape[0], MX_BLOCK)):
        words = repeated_row(powers, first + block, columns, by_load)
        if is_own is not None:
            words = jnp.where(is_own(first + block), words, 0)
        wide = pltpu.bitcast(over_rows(words, MX_BLOCK // 2), jnp.bfloat16)
        spread.append(wide[: rows.size])
    return x * jnp.concatenate(spread, axis=0)
