"""Sums over rows and lanes of registers, in an order that does not depend on where a step happens to lie."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from tpu_kernels._lib.activations import fold_rows
from tpu_kernels._lib.chunk_dots import WHOLE, ones
from tpu_kernels._lib.decays import leading
from tpu_kernels._lib.recurrent_layout import GROUP, SUBLANES

SMALLEST_SUM = 2.0**-102  # its 24 bits end above 2^-126, below which TPUs flush to zero


def sum_rows(x: jax.Array) -> jax.Array:
    """[..., R, K] -> [..., 1, K], pairwise; the few that an odd factor of R leaves one by one."""
    while x.shape[-2] > 1 and x.shape[-2] % 2 == 0:
        half = x.shape[-2] // 2
        x = x[..., :half, :] + x[..., half:, :]
    return sum((x[..., n : n + 1, :] for n in range(1, x.shape[-2])), start=x[..., :1, :])


def fold_registers(x: jax.Array) -> jax.Array:
    """[R, K] -> [SUBLANES, K]: the sum of the registers that hold R rows, pairwise."""
    return fold_rows(x, SUBLANES)


def sum_folded(parts: Any) -> jax.Array:
    """[GROUP, SUBLANES, K] in memory -> [GROUP, K], pairwise: rows of registers are loaded apart, not moved."""
    sums = [parts[:, n, :] for n in range(SUBLANES)]
    while len(sums) > 1:
        sums = [a + b for a, b in zip(sums[::2], sums[1::2], strict=True)]
    return sums[0]


def sum_keys_of(parts: Any, slab: Any, n: Any, products: jax.Array) -> None:
    """Leave the sums over K of a slab's products [R, K] at step n in `parts`, for `sums_of_keys`.

    Transposed first: along lanes every sum would take one register by itself.
    """
    parts[slab.start // products.shape[0], n] = fold_registers(products.T)


def sums_of_keys(parts: Any) -> jax.Array:
    """[slabs, GROUP, SUBLANES, R] in memory -> [GROUP, V]."""
    return jnp.concatenate([sum_folded(parts.at[n]) for n in range(parts.shape[0])], axis=1)


def column_of(x: jax.Array, n: Any) -> jax.Array:
    """Column n of x [R, GROUP]."""
    if isinstance(n, int):
        return x[:, n : n + 1]
    is_column = lax.broadcasted_iota(jnp.int32, (1, GROUP), 1) == n
    return jnp.sum(jnp.where(is_column, x, 0.0), axis=1, keepdims=True)


def row_of(x: jax.Array, n: Any) -> jax.Array:
    """Row n of x [GROUP, C], as [1, C]: Mosaic loads no row where neither n nor the columns are known."""
    is_row = lax.broadcasted_iota(jnp.int32, (GROUP, 1), 0) == n
    return jnp.sum(jnp.where(is_row, x, 0.0), axis=0, keepdims=True)


def columns_by_products(x: jax.Array, width: int) -> Callable[[Any], jax.Array]:
    """n -> row n of x [GROUP, K] as a column, [K, width] of equal lanes: a product with 0 and 1.

    The matrix unit broadcasts then, and not the XLU, which takes two to four cycles a register. Exact where
    `multiplies_exactly` is; a row that is not finite makes every column NaN: 0 * NaN.
    """
    pieces = jnp.concatenate([piece.T for piece in bf16_pieces(x)], axis=1)
    return lambda n: column_by_product(pieces, n, width)


def column_by_product(pieces: jax.Array, n: Any, width: int) -> jax.Array:
    """Column n of each bfloat16 piece [R, GROUP] side by side, added up in all lanes: [R, width] float32."""
    step = lax.broadcasted_iota(jnp.int32, (pieces.shape[1], width), 0) % GROUP
    return jnp.dot(pieces, ones(step == n), preferred_element_type=jnp.float32)


def multiplies_exactly(x: jax.Array, is_bf16: bool) -> jax.Array:
    """Where float32 x is a finite sum of bfloat16, none too small for the matrix unit; or is one of these."""
    size = jnp.abs(x)
    return (size < jnp.inf) & (is_bf16 | (size >= SMALLEST_SUM) | (size == 0))


def bf16_pieces(x: jax.Array) -> list[jax.Array]:
    """x as a sum of bfloat16, each the first 8 bits of what is left.

    All have x's sign: no partial sum is rounded, in whatever order they are added.
    """
    if x.dtype == jnp.bfloat16:
        return [x]
    pieces = []
    for _ in range(WHOLE):
        piece = leading(x, 8)
        pieces.append(piece.astype(jnp.bfloat16))
        x = x - piece
    return pieces


def spread_bits(kept: jax.Array, width: int) -> jax.Array:
    """kept [GROUP, K], each 0 or 1, as int32 [K, width]: row n is bit n, the same in all lanes.

    A column takes the XLU two to four cycles a register to broadcast: this one serves GROUP steps.
    """
    row = lax.broadcasted_iota(jnp.int32, kept.shape, 0)
    bits = jnp.sum(jnp.where(kept > 0, jnp.left_shift(1, row), 0), axis=0, keepdims=True)
    return jnp.broadcast_to(bits, (width, kept.shape[1])).T


def bit_of(bits: jax.Array, n: Any) -> jax.Array:
    """Bit n of each, as 0 or 1."""
    return jnp.where(bits & jnp.left_shift(1, n) != 0, 1.0, 0.0)
