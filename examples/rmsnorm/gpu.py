"""RMSNorm of x [M, N] and its gradients, in Triton for a GPU."""

import torch
import triton
import triton.language as tl
from result import Gradients

EPS = 1e-6
ROWS = 8


def rmsnorm(x, weight):
    """As `golden.rmsnorm`, in x's dtype, a row a program; computed in float32."""
    y = torch.empty_like(x)
    _forward[(x.shape[0],)](x, weight, y, x.shape[1], EPS, triton.next_power_of_2(x.shape[1]))
    return y


def rmsnorm_bwd(x, weight, dy):
    """As `golden.rmsnorm_bwd`, dx in x's dtype and dweight in float32, eight rows a program; computed in float32."""
    rows, width = x.shape
    dx = torch.empty_like(x)
    partial = x.new_empty((triton.cdiv(rows, ROWS), width), dtype=torch.float32)
    _backward[(len(partial),)](x, weight, dy, dx, partial, rows, width, EPS, triton.next_power_of_2(width), ROWS)
    return Gradients(dx, partial.sum(0))


@triton.jit
def _forward(x_ptr, weight_ptr, y_ptr, n, eps, width: tl.constexpr):
    columns = tl.arange(0, width)
    at = tl.program_id(0).to(tl.int64) * n + columns
    x = tl.load(x_ptr + at, mask=columns < n, other=0.0).to(tl.float32)
    weight = tl.load(weight_ptr + columns, mask=columns < n, other=0.0).to(tl.float32)
    y = x * (1 / tl.sqrt(tl.sum(x * x, 0) / n + eps)) * weight
    tl.store(y_ptr + at, y.to(y_ptr.dtype.element_ty), mask=columns < n)


@triton.jit
def _backward(
    x_ptr, weight_ptr, dy_ptr, dx_ptr, partial_ptr, rows, n, eps, width: tl.constexpr, count: tl.constexpr
):  # fmt: skip
    columns = tl.arange(0, width)
    program = tl.program_id(0).to(tl.int64)
    weight = tl.load(weight_ptr + columns, mask=columns < n, other=0.0).to(tl.float32)
    dweight = tl.zeros([width], tl.float32)
    for i in range(count):
        row = program * count + i
        at, inside = row * n + columns, columns < tl.where(row < rows, n, 0)
        x = tl.load(x_ptr + at, mask=inside, other=0.0).to(tl.float32)
        dy = tl.load(dy_ptr + at, mask=inside, other=0.0).to(tl.float32)
        rstd = 1 / tl.sqrt(tl.sum(x * x, 0) / n + eps)
        normed = x * rstd
        g = dy * weight
        dx = rstd * (g - normed * (tl.sum(g * normed, 0) / n))
        tl.store(dx_ptr + at, dx.to(dx_ptr.dtype.element_ty), mask=inside)
        dweight += dy * normed
    tl.store(partial_ptr + program * n + columns, dweight, mask=columns < n)
