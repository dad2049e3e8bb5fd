"""Rows divided by their length: x · (Σx² + 1e-6)^-½, and the gradient of that."""
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators

import math
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from gpu_reference._lib.launch import Launch
from gpu_reference._lib.probe import INTERPRETED, probe
from gpu_reference._lib.tiles import block_of, cdiv
from op_arguments.delta_rule import NORM_EPS

BLOCK_ELEMENTS = 4096  # of a program: 32 registers a thread with four warps


def norm_launch(x: Tensor, normal: Tensor, rstd: Tensor) -> Launch:
    """The kernel that fills normal [..., K] float32 and rstd [...], what the rows of x [..., K] are multiplied by."""
    return _launch(_norm_kernel, x.shape, x=x, normal=normal, rstd=rstd, EPS=NORM_EPS)


def norm_gradient_launch(normal: Tensor, rstd: Tensor, grad: Tensor, out: Tensor) -> Launch:
    """The kernel that fills out [..., K] with the gradient of what `norm_launch` was given, from that of `normal`."""
    return _launch(_norm_gradient_kernel, normal.shape, normal=normal, rstd=rstd, grad=grad, out=out)


def _launch(kernel: Any, shape: torch.Size, **own: Any) -> Launch:
    count, columns = math.prod(shape[:-1]), shape[-1]
    block = block_of(columns)
    rows = max(BLOCK_ELEMENTS // block, 1)
    arguments = own | {"count": count, "columns": columns, "ROWS": rows, "BK": block}
    return Launch(kernel, (cdiv(count, rows),), arguments, {"num_warps": 4, "enable_fp_fusion": True})


@triton.jit
def _norm_kernel(x, normal, rstd, count, columns, EPS: tl.constexpr, ROWS: tl.constexpr, BK: tl.constexpr):
    """One program per block of rows."""
    row, at, is_row, is_element = _block(count, columns, ROWS, BK)
    values = tl.load(x + at, mask=is_element, other=0).to(tl.float32)
    factor = tl.div_rn(1.0, tl.sqrt_rn(tl.sum(values * values, axis=1) + EPS))
    if INTERPRETED:
        factor = probe("rstd", factor, is_row)
    tl.store(rstd + row, factor, mask=is_row)
    tl.store(normal + at, values * factor[:, None], mask=is_element)


@triton.jit
def _norm_gradient_kernel(normal, rstd, grad, out, count, columns, ROWS: tl.constexpr, BK: tl.constexpr):
    """One program per block of rows."""
    row, at, is_row, is_element = _block(count, columns, ROWS, BK)
    direction = tl.load(normal + at, mask=is_element, other=0)
    given = tl.load(grad + at, mask=is_element, other=0).to(tl.float32)
    factor = tl.load(rstd + row, mask=is_row, other=0)
    along = tl.sum(given * direction, axis=1)
    tl.store(out + at, factor[:, None] * (given - direction * along[:, None]), mask=is_element)


@triton.jit
def _block(count, columns, ROWS: tl.constexpr, BK: tl.constexpr):
    """A program's rows (int64), where their elements are, and which of both there are."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, BK)[None, :]
    is_row = row < count
    return row, row[:, None] * columns + column, is_row, is_row[:, None] & (column < columns)
