"""Gated linear attention with one decay per key channel: the definition, in float64.

    S_t = diag(a_t) S_{t-1} + k_t v_tᵀ        o_t = scale · q_tᵀ S_t        a_t = exp(gk_t)

for every head, S [K, V] (Yang et al. 2023, arXiv:2312.06635): the gates of step t decay the state before it, and o_t
sees k_t v_tᵀ undecayed. gk [B, T, H, K] are natural logarithms per step, not summed.
"""

from typing import Unpack

from cpu_golden import Array
from cpu_golden._lib.scans import ChunkBwd, ChunkFwd, StepBwd, StepFwd, backward, forward
from cpu_golden.chunk_scan import chunk_backward, chunk_forward
from cpu_golden.fused_recurrent import backward_definition, forward_definition, recurrent_backward, recurrent_forward
from op_arguments import gla
from op_arguments.gla import Grads, Output
from op_arguments.options import options_of


@options_of(forward, chunk_forward)
def chunk_gla_fwd(q: Array, k: Array, v: Array, *, gk: Array, **options: Unpack[ChunkFwd]) -> Output:
    """o and, with output_final_state, ht of the recurrence, `chunk_size` steps at a time.

    q, k [B, T, H, K] and v [B, T, H, V]: float32, bfloat16 or float64, all three the same. gk [B, T, H, K]:
    float32, q's dtype or float64. Options as `op_arguments.gla` has them, float64 where float32 is. Returns float64 o
    [B, T, H, V] and ht [N, H, K, V]; an empty sequence's is its initial state.
    Stages: depth, chunk_size, kept_whole. Sites: those of `chunk_scan.chunk_forward`.
    Raises ValueError or TypeError as `op_arguments.gla.check_forward`.
    """
    return forward(chunk_forward, q, k, v, {"gk": gk}, **options)


@options_of(backward, chunk_backward)
def chunk_gla_bwd(q: Array, k: Array, v: Array, do: Array, *, gk: Array, **options: Unpack[ChunkBwd]) -> Grads:
    """The gradients of `chunk_gla_fwd`, for a gradient do [B, T, H, V] of o and dht [N, H, K, V] of ht.

    do has q's dtype, dht is float32 or float64; everything else as the forward pass. Returns float64 gradients shaped
    as their arguments, dh0 only where initial_state was given.
    Stages: depth, chunk_size, kept_whole, channels. Sites: those of `chunk_scan.chunk_backward`; out is dq, dk, dv and
    dgk.
    Raises ValueError or TypeError as `op_arguments.gla.check_gradients`.
    """
    return Grads(**backward(chunk_backward, q, k, v, do, {"gk": gk}, **options).named)


@options_of(forward, recurrent_forward)
def fused_recurrent_gla_fwd(q: Array, k: Array, v: Array, *, gk: Array, **options: Unpack[StepFwd]) -> Output:
    """o and, with output_final_state, ht of the recurrence, step by step.

    Arguments, result and errors as `chunk_gla_fwd`. With reverse ht is the state of the first step.
    Sites: those of `fused_recurrent.recurrent_forward`.
    """
    return forward(recurrent_forward, q, k, v, {"gk": gk}, **options)


@options_of(backward, recurrent_backward)
def fused_recurrent_gla_bwd(q: Array, k: Array, v: Array, do: Array, *, gk: Array, **options: Unpack[StepBwd]) -> Grads:
    """The gradients of `fused_recurrent_gla_fwd`; arguments, result and errors as `chunk_gla_bwd`.

    Sites: those of `fused_recurrent.recurrent_backward`; out is dq, dk, dv and dgk.
    """
    return Grads(**backward(recurrent_backward, q, k, v, do, {"gk": gk}, **options).named)


@options_of(forward)
def gla_fwd_definition(q: Array, k: Array, v: Array, *, gk: Array, **options: Unpack[gla.StepFwd]) -> Output:
    """The recurrence step by step. Arguments, result and errors as `fused_recurrent_gla_fwd`."""
    return forward(forward_definition, q, k, v, {"gk": gk}, **options)


@options_of(backward)
def gla_bwd_definition(q: Array, k: Array, v: Array, do: Array, *, gk: Array, **options: Unpack[gla.StepBwd]) -> Grads:
    """The derivative of the recurrence step by step. Arguments, result, errors as `fused_recurrent_gla_bwd`."""
    return Grads(**backward(backward_definition, q, k, v, do, {"gk": gk}, **options).named)
