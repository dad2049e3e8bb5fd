"""The recipe of DeepSeek-V3 (arXiv:2412.19437, section 3.3): what a matmul in fp8 is given."""

import numpy as np

from cpu_golden import Array
from cpu_golden.quantize import fp8_quantize
from op_arguments.quantize import Quantized


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
