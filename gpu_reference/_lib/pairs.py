"""Operands of grouped matmuls as pairs (qvalue, scale), the scale None where they are not quantised.

What quantisers show to a probe is hidden here: the goldens of layers have no such sites.
"""

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from gpu_reference.gmm import gmm, tgmm
from gpu_reference.quantize import fp8_dual_quantize, fp8_quantize
from gpu_reference.quantized_gmm import gmm_quantized, tgmm_quantized
from op_arguments.probe import probing
from op_arguments.quantize import Quantized


def product(lhs: Quantized, rhs: Quantized, group_sizes: Tensor, **arguments: Any) -> Tensor:
    if lhs.scale is None and rhs.scale is None:
        return gmm(*_same_dtype(lhs.qvalue, rhs.qvalue), group_sizes, **arguments)
    return gmm_quantized(*lhs, *rhs, group_sizes, **arguments)


def weight_product(lhs: Quantized, rhs: Quantized, group_sizes: Tensor, **arguments: Any) -> Tensor:
    if lhs.scale is None and rhs.scale is None:
        return tgmm(*_same_dtype(lhs.qvalue, rhs.qvalue), group_sizes, **arguments)
    return tgmm_quantized(*lhs, *rhs, group_sizes, **arguments)


def _same_dtype(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    """a and b in the narrowest dtype that holds both exactly: dout has the result's dtype, not always lhs's."""
    dtype = torch.promote_types(a.dtype, b.dtype)
    return a.to(dtype), b.to(dtype)


@probing(None)
def quantized(x: Tensor, axis: int | tuple[int, ...], block_size: int | None) -> Quantized:
    # Values of x are at hand on some devices only; a training step saturates infinities on all of them.
    return fp8_quantize(x, axis, block_size, check_finite=False)


@probing(None)
def dual_quantized(x: Tensor, block_size: int | None) -> tuple[Quantized, Quantized]:
    """x [M, …] by rows, and by columns with rows of zeros up to a multiple of the block."""
    rows = x.shape[0]
    both = fp8_dual_quantize(padded(x, block_size), block_size, check_finite=False)
    return (
        Quantized(both.rowwise[:rows], both.rowwise_scale[:rows]),
        Quantized(both.columnwise, both.columnwise_scale),
    )


def padded(x: Tensor, block_size: int | None) -> Tensor:
    """x with rows of zeros up to a multiple of block_size."""
    rows = x.shape[0]
    return x if block_size is None else with_rows(x, rows + -rows % block_size)


def with_rows(x: Tensor, rows: int) -> Tensor:
    """x with rows of zeros up to `rows` of them."""
    return x if x.shape[0] == rows else pad(x, (0, 0, 0, rows - x.shape[0]))
