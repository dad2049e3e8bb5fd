"""Operands of 8 bits: multiplied as they are where the matrix unit can, else widened, exactly."""

from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import tpu as pltpu

from tpu_kernels._lib import chip
from tpu_kernels._lib.chip import sublanes
from tpu_kernels._lib.grids import Operands
from tpu_kernels._lib.products import blocks, dot

EXACT_SUMS = 1024  # 127² · 1024 < 2^24: sums of so many int8 products are exact in float32


def are_narrow(lhs: jax.Array, rhs: jax.Array) -> bool:
    """Whether both are of 8 bits."""
    return lhs.dtype.itemsize == rhs.dtype.itemsize == 1


def unit_of(narrow: Any, wide: str) -> int:
    """What `widen` divides numbers by.

    v5e, v5p and v6e have an instruction for e4m3b11fnuz, and not for e4m3fn. The same bits are 1/16 of the value there,
    and the operand's scales make up for it (`scales_in_units`).
    """
    return 16 if narrow == jnp.float8_e4m3fn and wide == "bfloat16" and chip.generation() in (5, 6) else 1


def widen(x: jax.Array, dtype: Any) -> jax.Array:
    """x / `unit_of` in a dtype that holds all its values. NaN stays NaN; the sign of a zero may be lost.

    The bits of e4m3fn mean the same multiple of a number in e4m3b11fnuz, but for those of NaN and -0: -0's bits are its
    NaN. So -0 becomes 0, and NaN, all ones but for the sign, becomes -0; of four elements at a time.
    """
    unit = unit_of(x.dtype, jnp.dtype(dtype).name)
    if unit == 1:
        return x.astype(dtype)
    if x.shape[0] % sublanes(x.dtype):
        return x.astype(dtype) * jnp.asarray(1 / unit, dtype)
    bits = pltpu.bitcast(x, jnp.int32)
    magnitude = bits & 0x7F7F7F7F
    is_nan = lax.shift_right_logical(magnitude + 0x01010101, 7) & 0x01010101
    sign = bits & (magnitude + 0x7F7F7F7F) & ~0x7F7F7F7F  # of what is not 0
    return pltpu.bitcast((magnitude + is_nan) | sign, jnp.float8_e4m3b11fnuz).astype(dtype)


def widen_whole(x: jax.Array) -> jax.Array:
    """x in bfloat16, where powers of two of its blocks are to follow: with a unit these might get too large."""
    unit = unit_of(x.dtype, "bfloat16")
    return widen(x, jnp.bfloat16) * jnp.bfloat16(unit) if unit > 1 else x.astype(jnp.bfloat16)


def scales_in_units(operands: Operands) -> Iterator[jax.Array | None]:
    """The scales of what is multiplied, of lhs and of rhs."""
    path = product_path(operands.lhs, operands.rhs)
    for narrow, scale in ((operands.lhs, operands.lhs_scale), (operands.rhs, operands.rhs_scale)):
        unit = unit_of(narrow.dtype, path)
        yield scale if scale is None or unit == 1 else scale * unit


def product(a: jax.Array, b: jax.Array, contract: tuple[int, int]) -> jax.Array:
    """Sums over axis `contract[0]` of a and `contract[1]` of b: int32 of two int8 operands, else float32."""
    path = product_path(a, b)
    if path in ("fp8", "int8") and not (contract == (1, 1) and b.shape[0] == 1):
        axes = (((contract[0],), (contract[1],)), ((), ()))
        return lax.dot_general(a, b, axes, preferred_element_type=jnp.int32 if path == "int8" else jnp.float32)
    wide = jnp.dtype("bfloat16" if path in ("fp8", "int8") else path)
    if a.dtype != jnp.int8 or b.dtype != jnp.int8:
        return dot(widen(a, wide), widen(b, wide), contract)
    total = jnp.zeros((), jnp.int32)
    for part in blocks(a.shape[contract[0]], EXACT_SUMS):
        last = part.start + part.size
        x, y = (lax.slice_in_dim(o, part.start, last, axis=axis) for o, axis in zip((a, b), contract, strict=True))
        total += dot(x.astype(wide), y.astype(wide), contract).astype(jnp.int32)
    return total


def product_path(lhs: jax.Array, rhs: jax.Array) -> str:
    """What `product` multiplies them as: `chip.matmul_path` on the TPU that a kernel is traced for."""
    return chip.matmul_path(lhs.dtype, rhs.dtype, chip.generation())[0]


def widened_to(lhs: jax.Array, rhs: jax.Array) -> Any | None:
    """What a kernel widens both operands to, once, before it multiplies; None where `product` takes them as they are.

    That also widens, for each block of the result anew, which costs little for int8 alone.
    """
    path = product_path(lhs, rhs)
    return None if path in ("fp8", "int8") or lhs.dtype == rhs.dtype == jnp.int8 else jnp.dtype(path)


def sum_dtype(lhs: jax.Array, rhs: jax.Array, scaled: bool) -> Any:
    """What sums are kept in from tile to tile; scaled: on the way, by scales that change."""
    exact = lhs.dtype == rhs.dtype == jnp.int8 and not scaled
    return jnp.int32 if exact else jnp.float32
