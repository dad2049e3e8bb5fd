"""The decays within a block of rows.

Gates are summed in two parts, of which the coarse one is exact: a difference of sums is as good as the gates between.
"""
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators

from typing import Any, NamedTuple

import triton
import triton.language as tl

from gpu_reference._lib.layout import load_tile
from gpu_reference._lib.probe import INTERPRETED, probe

LARGEST_GATE = tl.constexpr(128.0)  # exp(-128) is zero in float32
COARSE = tl.constexpr(1.5 * 2.0**13)  # a float32 added to it becomes a multiple of 2^-10
LARGEST_EXPONENT = tl.constexpr(88.0)  # exp of it is finite, so that times a zero it is zero


class Decays(NamedTuple):
    """The decays of a block of rows.

    from_start: from before the block to each row. to_end: from each row to after the block. kept + lost: of the whole
    block; kept is 1 or 0, whichever is nearer (1 beyond it).
    """

    from_start: Any
    to_end: Any
    kept: Any
    lost: Any


@triton.jit
def gate_parts(gate):
    """A gate as a multiple of 2^-10, whose sums over a block are exact, and the float32 that is left, whose sums are
    small. Gates beyond what exp resolves are clamped."""
    gate = gate.to(tl.float32)
    gate = tl.where(gate < -LARGEST_GATE, -LARGEST_GATE, gate)  # NaN stays
    gate = tl.where(gate > LARGEST_GATE, LARGEST_GATE, gate)
    coarse = (gate + COARSE) - COARSE
    return coarse, gate - coarse


@triton.jit
def gate_sums(gates, rows, ROWS: tl.constexpr):
    """The scalar gates summed since the block's first row, in two parts [R]; constant beyond the last row."""
    at = tl.arange(0, ROWS)
    coarse = tl.full((ROWS,), 0.0, tl.float32)
    fine = tl.full((ROWS,), 0.0, tl.float32)
    if gates.g is not None:
        row = rows.first + at
        gate_coarse, gate_fine = gate_parts(
            tl.load(gates.g + row * rows.heads + rows.head, mask=row < rows.end, other=0)
        )
        coarse += tl.cumsum(gate_coarse, axis=0)
        fine += tl.cumsum(gate_fine, axis=0)
    if gates.g_gamma is not None:
        count = tl.minimum(at + 1, rows.end - rows.first).to(tl.float32)
        gamma_coarse, gamma_fine = gate_parts(tl.load(gates.g_gamma + rows.head))
        coarse += gamma_coarse * count
        fine += gamma_fine * count
    return coarse, fine


@triton.jit
def decay(coarse, fine):
    """exp of a sum of gates in two parts."""
    return tl.exp(at_most(coarse + fine, LARGEST_EXPONENT))


@triton.jit
def at_most(x, limit):
    """x, no larger than a limit; NaN stays NaN, which `tl.minimum` drops on every GPU."""
    return tl.where(x > limit, limit, x)


@triton.jit
def causal_decay(is_causal, coarse, fine):
    """`decay` where is_causal, else 0: an exponent of what is not may be of any size."""
    return decay(tl.where(is_causal, coarse, float("-inf")), tl.where(is_causal, fine, 0.0))


@triton.jit
def scalar_decay(coarse, fine, SPLIT: tl.constexpr):
    """`decay` of scalar gates; in float64 where dots are not split, as the hardware's own float32 exp loses more, the
    steeper the gate is."""
    if SPLIT:
        result = decay(coarse, fine)
    else:
        result = tl.exp(at_most(coarse.to(tl.float64) + fine, LARGEST_EXPONENT)).to(tl.float32)
    return result


@triton.jit
def block_decays(gates, rows, key, keys, ROW_AXIS: tl.constexpr, SPLIT: tl.constexpr, ROWS: tl.constexpr):
    """The `Decays` of a block's rows [R]; with gk of `key`, [K, 1] or [1, K], in its shape and rows along ROW_AXIS."""
    if gates.gk is None:
        coarse, fine = gate_sums(gates, rows, ROWS)
        is_last = tl.arange(0, ROWS) == ROWS - 1
        last_coarse = tl.sum(tl.where(is_last, coarse, 0.0))
        last_fine = tl.sum(tl.where(is_last, fine, 0.0))
        decay_from_start = scalar_decay(coarse, fine, SPLIT)
        decay_to_end = scalar_decay(last_coarse - coarse, last_fine - fine, SPLIT)
    else:
        row = rows.first + tl.expand_dims(tl.arange(0, ROWS), 1 - ROW_AXIS)
        coarse, fine = gate_parts(load_tile(gates.gk, row, key, rows, keys))
        last_coarse = tl.sum(coarse, axis=ROW_AXIS, keep_dims=True)
        last_fine = tl.sum(fine, axis=ROW_AXIS, keep_dims=True)
        coarse = tl.cumsum(coarse, axis=ROW_AXIS)
        fine = tl.cumsum(fine, axis=ROW_AXIS)
        decay_from_start = decay(coarse, fine)
        decay_to_end = decay(last_coarse - coarse, last_fine - fine)
    whole = tl.exp(at_most(last_coarse.to(tl.float64) + last_fine, LARGEST_EXPONENT))
    kept = tl.where(whole < 0.5, 0.0, 1.0)
    kept_float32 = kept.to(tl.float32)
    lost = (whole - kept).to(tl.float32)
    if INTERPRETED:
        is_step = rows.first + tl.arange(0, ROWS) < rows.end
        is_kept = key < keys
        if gates.gk is not None:
            is_step = tl.expand_dims(is_step, 1 - ROW_AXIS) & is_kept
        else:
            is_kept = rows.first < rows.end
        # Sums beyond it may be of gates that have been clamped.
        probe("c", (coarse, fine), is_step & (coarse > -LARGEST_GATE), chunk_size=ROWS)
        decay_from_start = probe("decay", decay_from_start, is_step, chunk_size=ROWS)
        decay_to_end = probe("decay", decay_to_end, is_step, chunk_size=ROWS)
        lost = probe("kept", lost, is_kept, chunk_size=ROWS)
    return Decays(decay_from_start, decay_to_end, kept_float32, lost)


@triton.jit
def channel_sums(gk, rows, key, keys, ROW_AXIS: tl.constexpr, ROWS: tl.constexpr):
    """The gates of the channels `key`, [K, 1] or [1, K], summed since the block's first row, in two parts; rows along
    ROW_AXIS."""
    row = rows.first + tl.expand_dims(tl.arange(0, ROWS), 1 - ROW_AXIS)
    coarse, fine = gate_parts(load_tile(gk, row, key, rows, keys))
    return tl.cumsum(coarse, axis=ROW_AXIS), tl.cumsum(fine, axis=ROW_AXIS)


@triton.jit
def with_row(coarse, fine, gk, row, key, rows, keys):
    """Sums of gates in two parts, and the gates of another row."""
    gate_coarse, gate_fine = gate_parts(load_tile(gk, row, key, rows, keys))
    return coarse + gate_coarse, fine + gate_fine


@triton.jit
def pair_decays(coarse, fine, KEYS_FIRST: tl.constexpr, SPLIT: tl.constexpr):
    """exp(c_i - c_j) for pairs of a query i and a key j <= i, else 0: [i, j], or [j, i] with KEYS_FIRST. c [R]: in two
    parts."""
    at = tl.arange(0, coarse.shape[0])
    if KEYS_FIRST:
        is_causal = at[:, None] <= at[None, :]
        pair_coarse = coarse[None, :] - coarse[:, None]
        pair_fine = fine[None, :] - fine[:, None]
    else:
        is_causal = at[:, None] >= at[None, :]
        pair_coarse = coarse[:, None] - coarse[None, :]
        pair_fine = fine[:, None] - fine[None, :]
    return scalar_decay(tl.where(is_causal, pair_coarse, float("-inf")), tl.where(is_causal, pair_fine, 0.0), SPLIT)
