"""Causal flash attention of q, k, v [H, T, D], 64 rows of a head a program, in Triton for a GPU."""

import torch
import triton
import triton.language as tl
from result import Attention

BLOCK = 64


def attention(q, k, v, out):
    """As `golden.attention`: out of the dtype of that name, lse in float32; P in v's dtype, all else in float32."""
    heads, length, width = q.shape
    result = Attention(q.new_empty(q.shape, dtype=getattr(torch, out)), q.new_empty(q.shape[:2], dtype=torch.float32))
    grid = (triton.cdiv(length, BLOCK), heads)
    _kernel[grid](q, k, v, *result, length, width**-0.5, width, BLOCK)
    return result


@triton.jit
def _kernel(q_ptr, k_ptr, v_ptr, out_ptr, lse_ptr, length, scale, width: tl.constexpr, block: tl.constexpr):
    i, head = tl.program_id(0), tl.program_id(1).to(tl.int64) * length
    rows, columns = i * block + tl.arange(0, block), tl.arange(0, width)
    tile = (head + rows)[:, None] * width + columns
    q = tl.load(q_ptr + tile, mask=rows[:, None] < length, other=0.0)
    top = tl.full([block], float("-inf"), tl.float32)
    mass = tl.zeros([block], tl.float32)
    acc = tl.zeros([block, width], tl.float32)
    for j in range(i + 1):
        keys = j * block + tl.arange(0, block)
        at = (head + keys)[:, None] * width + columns
        k = tl.load(k_ptr + at, mask=keys[:, None] < length, other=0.0)
        v = tl.load(v_ptr + at, mask=keys[:, None] < length, other=0.0)
        scores = tl.dot(q, tl.trans(k)) * scale
        scores = tl.where(keys <= rows[:, None], scores, float("-inf"))
        before = top
        top = tl.maximum(before, tl.max(scores, 1))
        shrink = tl.exp(before - top)
        e = tl.exp(scores - top[:, None])
        mass = shrink * mass + tl.sum(e, 1)
        acc = tl.dot(e.to(v.dtype), v, shrink[:, None] * acc)
    tl.store(out_ptr + tile, (acc / mass[:, None]).to(out_ptr.dtype.element_ty), mask=rows[:, None] < length)
    tl.store(lse_ptr + head + rows, top + tl.log(mass), mask=rows < length)
