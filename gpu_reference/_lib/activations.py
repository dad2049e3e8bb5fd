"""Functions of one element, without an overflow, and sums over many in pairs: what gates and convolutions share.

The hardware's own exp loses more, the larger its argument is: it is asked for that of a remainder below 1 alone.
"""
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators

import torch
import triton
import triton.language as tl
from torch import Tensor

LOG2_E = tl.constexpr(1.4426950408889634)
LN2_HIGH = tl.constexpr(45426 / 65536)  # times any exponent of a float32 this is exact
LN2_LOW = tl.constexpr(0.6931471805599453 - 45426 / 65536)
VANISHING = tl.constexpr(-150.0)  # its exp is no float32


@triton.jit
def exp(x):
    """exp(x) of float32 x: a power of two times the exp of a remainder."""
    x = tl.where(x < VANISHING, VANISHING, x)
    power = tl.floor(x * LOG2_E + 0.5)
    rest = (x - power * LN2_HIGH) - power * LN2_LOW
    return tl.exp(rest) * tl.exp2(power)


@triton.jit
def sigmoid(x):
    """1 / (1 + exp(-x)); near 1 as what it lacks of 1, or the rounding of 1 + exp(-x) would be twice its own."""
    small = exp(-tl.abs(x))
    lesser = tl.div_rn(small, 1.0 + small)
    return tl.where(x < 0, lesser, 1.0 - lesser)


@triton.jit
def softplus(x):
    """log(1 + exp(x)), as precise where it is small: log(1 + e) is twice the artanh of s = e / (2 + e), by its series.

    Written as e less something smaller, whose roundings weigh less.
    """
    e = exp(-tl.abs(x))
    s = tl.div_rn(e, 2.0 + e)
    square = s * s
    series = tl.full(s.shape, 1.0 / 19, tl.float32)
    for nth in tl.static_range(8):
        series = series * square + 1.0 / (17 - 2 * nth)
    return tl.where(x < 0, 0.0, x) + (e - s * (e - 2.0 * square * series))


@triton.jit
def sum_rows(x, LEVELS: tl.constexpr):
    """[2 ** LEVELS, C] -> [C], in pairs."""
    for _ in tl.static_range(LEVELS):
        x = tl.sum(tl.reshape(x, (x.shape[0] // 2, 2, x.shape[1])), axis=1)
    return tl.reshape(x, (x.shape[1],))


def sum_rows_in_pairs(x: Tensor) -> Tensor:
    """[R, ...] -> [...]: the sum over the first axis, of any length, in pairs."""
    while len(x) > 1:
        half, is_odd = divmod(len(x), 2)
        pairs = x.narrow(0, 0, half) + x.narrow(0, half, half)
        x = torch.cat([pairs, x.narrow(0, 2 * half, 1)]) if is_odd else pairs
    return x.squeeze(0) if len(x) else x.new_zeros(x.shape[1:])
