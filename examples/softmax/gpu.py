"""Softmax over the last axis of x [M, N], a row a program, in Triton for a GPU."""

import torch
import triton
import triton.language as tl


def softmax(x):
    """As `golden.softmax`, in x's dtype; computed in float32."""
    out = torch.empty_like(x)
    _kernel[(x.shape[0],)](x, out, x.shape[1], triton.next_power_of_2(x.shape[1]))
    return out


@triton.jit
def _kernel(x_ptr, out_ptr, n, width: tl.constexpr):
    columns = tl.arange(0, width)
    at = tl.program_id(0).to(tl.int64) * n + columns
    x = tl.load(x_ptr + at, mask=columns < n, other=float("-inf")).to(tl.float32)
    e = tl.exp(x - tl.max(x, 0))
    tl.store(out_ptr + at, (e / tl.sum(e, 0)).to(out_ptr.dtype.element_ty), mask=columns < n)
