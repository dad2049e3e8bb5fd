"""Operands of grouped matmuls as pairs (qvalue, scale), the scale None where they are not quantised."""

from typing import Any

import jax
import jax.numpy as jnp

from op_arguments.probe import probing
from op_arguments.quantize import Quantized
from tpu_kernels._lib.arguments import Interpret, Shard
from tpu_kernels.gmm import gmm_onto, tgmm
from tpu_kernels.quantize import fp8_dual_quantize, fp8_quantize
from tpu_kernels.quantized_gmm import gmm_quantized_onto, tgmm_quantized


def product(
    lhs: Quantized, rhs: Quantized, shard: Shard, addend: jax.Array | None = None, **arguments: Any
) -> jax.Array:
    """`gmm`, or where an operand is quantised `gmm_quantized`; addend: see `gmm_onto`."""
    of_shard = arguments | {"group_offset": shard.group_offset}
    if lhs.scale is None and rhs.scale is None:
        return gmm_onto(addend, *_same_dtype(lhs.qvalue, rhs.qvalue), shard.group_sizes, **of_shard)
    return gmm_quantized_onto(addend, *lhs, *rhs, shard.group_sizes, **of_shard)


def weight_product(lhs: Quantized, rhs: Quantized, shard: Shard, **arguments: Any) -> jax.Array:
    """`tgmm`, or where an operand is quantised `tgmm_quantized`."""
    if lhs.scale is None and rhs.scale is None:
        return tgmm(
            *_same_dtype(lhs.qvalue, rhs.qvalue), shard.group_sizes, group_offset=shard.group_offset, **arguments
        )
    return tgmm_quantized(*lhs, *rhs, shard.group_sizes, group_offset=shard.group_offset, **arguments)


def _same_dtype(a: jax.Array, b: jax.Array) -> tuple[jax.Array, jax.Array]:
    """a and b in the narrowest dtype that holds both exactly: dout has the result's dtype, not always lhs's."""
    dtype = jnp.promote_types(a.dtype, b.dtype)
    return a.astype(dtype), b.astype(dtype)


@probing(None)  # a layer has no sites within a quantiser
def quantized(x: jax.Array, axis: int | tuple[int, ...], block_size: int | None, interpret: Interpret) -> Quantized:
    """x in e4m3, by blocks along `axis`."""
    # The values of x may be at hand or not; a training step saturates infinities in either case.
    return fp8_quantize(x, axis, block_size, check_finite=False, interpret=interpret)


@probing(None)
def dual_quantized(x: jax.Array, block_size: int | None, interpret: Interpret) -> tuple[Quantized, Quantized]:
    """x [M, …] by rows, and by columns with rows of zeros up to a multiple of the block."""
    rows = x.shape[0]
    both = fp8_dual_quantize(padded(x, block_size), block_size, check_finite=False, interpret=interpret)
    return (
        Quantized(both.rowwise[:rows], both.rowwise_scale[:rows]),
        Quantized(both.columnwise, both.columnwise_scale),
    )


def padded(x: jax.Array, block_size: int | None) -> jax.Array:
    """x with rows of zeros up to a multiple of block_size."""
    rows = x.shape[0]
    return x if block_size is None else with_rows(x, rows + -rows % block_size)


def with_rows(x: jax.Array, rows: int) -> jax.Array:
    """x with rows of zeros up to `rows` of them."""
    return x if x.shape[0] == rows else jnp.pad(x, [(0, rows - x.shape[0]), (0, 0)])
