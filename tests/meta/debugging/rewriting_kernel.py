"""A Triton kernel that stores to memory again after it read it, launched twice."""

import torch
import triton
import triton.language as tl


@triton.jit
def _scaled(x, buffer, out, size: tl.constexpr):
    at = tl.arange(0, size)
    tl.store(buffer + at, tl.load(x + at) * 1.1)
    tl.store(buffer + at, tl.load(buffer + at) * 1.3)
    tl.store(out + at, tl.load(buffer + at) * 1.7)


def scaled_twice(x):
    """x · 2.431²."""
    buffer, once, out = (torch.empty_like(x) for _ in range(3))
    _scaled[(1,)](x, buffer, once, len(x))
    once.mul_(0.9)
    _scaled[(1,)](once, buffer, out, len(x))
    return {"out": out}
