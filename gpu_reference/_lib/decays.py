"""Gates, natural logs of decays, as kernels take them; and the decay of one step.

A decay near 1 is kept as its difference from 1: one whose error is 2^-25 has lost as many of its 24 bits after n steps
as n has.
"""
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from gpu_reference._lib.probe import INTERPRETED, probe

FLOAT32_MAX = tl.constexpr(torch.finfo(torch.float32).max)


class Gates(NamedTuple):
    """g [B, T, H] and g_gamma [H], which add, or gk [B, T, H, K]; None: it is not there."""

    g: Any = None
    g_gamma: Any = None
    gk: Any = None


@triton.jit
def no_decay(gk, BK: tl.constexpr):
    """`step_decay` where nothing decays."""
    kept = tl.full((BK, 1), 1.0, tl.float32) if gk is not None else tl.full((), 1.0, tl.float32)
    return kept, kept - 1.0


@triton.jit
def step_decay(gates, row, head, key, keys, NEW_AXIS: tl.constexpr):
    """exp(gate) as a sum kept + lost: 1 or 0, whichever is nearer (1 beyond it), and the float32 that is left.

    Scalars; with gk for the channels `key`, with a new axis. In float64: the hardware's own float32 exp loses more, the
    steeper the gate is.
    """
    gate = tl.full((), 0.0, tl.float64)
    if gates.g is not None:
        gate += tl.load(gates.g + row).to(tl.float32).to(tl.float64)
    if gates.g_gamma is not None:
        gate += tl.load(gates.g_gamma + head).to(tl.float64)
    if gates.gk is not None:
        gate = tl.load(gates.gk + row * keys + key, mask=key < keys, other=0).to(tl.float32).to(tl.float64)
    decay = tl.exp(gate)
    decay = tl.where(decay > FLOAT32_MAX, FLOAT32_MAX, decay)  # finite times a state of zero is zero
    kept = tl.where(decay < 0.5, 0.0, 1.0)
    lost = (decay - kept).to(tl.float32)
    if INTERPRETED:
        lost = probe("kept", lost) if gates.gk is None else probe("kept", lost, key < keys)
    kept = kept.to(tl.float32)
    if gates.gk is not None:
        kept = tl.expand_dims(kept, NEW_AXIS)
        lost = tl.expand_dims(lost, NEW_AXIS)
    return kept, lost
