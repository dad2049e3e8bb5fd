"""Operands of grouped matmuls as pairs (qvalue, scale), the scale None where they are not quantised.

In fp8 they follow the recipe of DeepSeek-V3 (arXiv:2412.19437, section 3.3).
"""

from typing import Any

import numpy as np

from cpu_golden import Array
from cpu_golden.gmm import gmm, tgmm
from cpu_golden.quantize import fp8_quantize
from cpu_golden.quantized_gmm import gmm_quantized, tgmm_quantized
from op_arguments.quantize import Quantized


def product(lhs: Quantized, rhs: Quantized, group_sizes: Array, **arguments: Any) -> Array:
    """`gmm`, or where an operand is quantised `gmm_quantized`."""
    if lhs.scale is None and rhs.scale is None:
        return gmm(_wide(lhs), _wide(rhs), group_sizes, **arguments)
    return gmm_quantized(*lhs, *rhs, group_sizes, **arguments)


def weight_product(lhs: Quantized, rhs: Quantized, group_sizes: Array, **arguments: Any) -> Array:
    """`tgmm`, or where an operand is quantised `tgmm_quantized`."""
    if lhs.scale is None and rhs.scale is None:
        return tgmm(_wide(lhs), _wide(rhs), group_sizes, **arguments)
    return tgmm_quantized(*lhs, *rhs, group_sizes, **arguments)


def _wide(x: Quantized) -> Array:
    """What is not quantised in float64: dout has the dtype of the result, which need not be that of lhs and rhs."""
    wide: Array = x.qvalue.astype(np.float64)
    return wide


def by_rows(x: Array, block_size: int | None) -> Quantized:
    """x [M, K] with one scale per row and block of K."""
    return fp8_quantize(x, 1, block_size, check_finite=False)


def by_columns(x: Array, block_size: int | None) -> Quantized:
    """x [M, K] with one scale per column and block of M, of a whole number of blocks: rows of zeros follow."""
    return fp8_quantize(padded(x, block_size), 0, block_size, check_finite=False)


def weights(rhs: Array, block_size: int | None) -> Quantized:
    """rhs [G, K, N] with one scale per block of K and of N."""
    return fp8_quantize(rhs, (1, 2), block_size, check_finite=False)


def padded(x: Array, block_size: int | None) -> Array:
    """x with rows of zeros up to a multiple of block_size."""
    missing = 0 if block_size is None else -x.shape[0] % block_size
    return np.pad(x, [(0, missing), (0, 0)])
