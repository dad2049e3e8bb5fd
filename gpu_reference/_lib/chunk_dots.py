"""The dots of the chunked scans, to float32 or by bfloat16 parts, and the state that they add to."""
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators

import triton
import triton.language as tl

from gpu_reference._lib.hardware import is_interpreted, is_older

PIECE = tl.constexpr(8)
"""Products that a float32 dot sums one after the other, before sums are added in float64."""
DEPTH = tl.constexpr(8 if is_interpreted() or not is_older(triton.__version__, 3, 8) else 16)
"""Of a float32 dot: Triton before 3.8 compiles none below 16. There every second product is 0, and sums are alike."""


@triton.jit
def dot(a, b, SPLIT: tl.constexpr):
    """a [M, D] @ b [D, N] in float32.

    Without SPLIT both are float32, and no chain of additions in that is longer than PIECE: a batch of short products,
    since Triton would make one chain of a dot and what is added to it. With SPLIT a bfloat16 operand is taken as it is,
    a float32 one in two bfloat16 parts, and the product of two second parts is left out.
    """
    if not SPLIT:
        if DEPTH > PIECE:
            a = tl.reshape(tl.join(a, tl.zeros_like(a)), (a.shape[0], a.shape[1] * 2))
            b = tl.reshape(tl.permute(tl.join(b, tl.zeros_like(b)), (0, 2, 1)), (b.shape[0] * 2, b.shape[1]))
        if a.shape[1] > DEPTH:
            a_pieces = tl.permute(tl.reshape(a, (a.shape[0], a.shape[1] // DEPTH, DEPTH)), (1, 0, 2))
            b_pieces = tl.reshape(b, (b.shape[0] // DEPTH, DEPTH, b.shape[1]))
            pieces = tl.dot(a_pieces, b_pieces, input_precision="ieee")
            result = tl.sum(pieces.to(tl.float64), axis=0).to(tl.float32)
        else:
            result = tl.dot(a, b, input_precision="ieee")
    elif a.dtype == tl.bfloat16:
        if b.dtype == tl.bfloat16:
            result = tl.dot(a, b)
        else:
            b_high, b_low = halves(b)
            result = tl.dot(a, b_high, tl.dot(a, b_low))
    elif b.dtype == tl.bfloat16:
        a_high, a_low = halves(a)
        result = tl.dot(a_high, b, tl.dot(a_low, b))
    else:
        a_high, a_low = halves(a)
        b_high, b_low = halves(b)
        result = tl.dot(a_high, b_high, tl.dot(a_high, b_low, tl.dot(a_low, b_high)))
    return result


@triton.jit
def added_dot(total, a, b, SPLIT: tl.constexpr):
    """total + a @ b: of bfloat16 operands one sum of the matrix unit, which compiled it would be in any case."""
    if SPLIT and a.dtype == tl.bfloat16 and b.dtype == tl.bfloat16:
        result = tl.dot(a, b, total)
    else:
        result = total + dot(a, b, SPLIT)
    return result


@triton.jit
def halves(x):
    """float32 as a sum of two bfloat16, to 2^-17 of it."""
    high = x.to(tl.bfloat16)
    return high, (x - high.to(tl.float32)).to(tl.bfloat16)


@triton.jit
def next_state(state, k_columns, v_rows, weight, decays, SPLIT: tl.constexpr):
    """(kept + lost) state + (weight k)^T v [K, V]: the state after a block, whose `Decays` have kept and lost.

    weight is [R] where these are scalars, or [K, R] where they are [K, 1]. A decay near 1 is 1 + lost: it acts on a
    slow head's state in every block, and an error in it would add up.
    """
    update = update_of(k_columns, v_rows, weight, SPLIT)
    return decays.kept * state + (decays.lost * state + update)


@triton.jit
def update_of(k_columns, v_rows, weight, SPLIT: tl.constexpr):
    """(weight k)^T v [K, V], weight as in `next_state`."""
    if len(weight.shape) == 1:
        update = dot(k_columns, weight[:, None] * v_rows.to(tl.float32), SPLIT)
    else:
        update = dot(weight * k_columns.to(tl.float32), v_rows, SPLIT)
    return update


@triton.jit
def read_state(q_rows, state, weight, SPLIT: tl.constexpr):
    """(weight q) state [R, V]; weight is [R], or [R, K] where each channel has its own."""
    if len(weight.shape) == 1:
        result = weight[:, None] * dot(q_rows, state, SPLIT)
    else:
        result = dot(weight * q_rows.to(tl.float32), state, SPLIT)
    return result
