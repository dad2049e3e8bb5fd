"""Gated linear attention with one decay per head and step ("simple GLA"): the definition, in float64.

    S_t = a_t S_{t-1} + k_t v_tᵀ        o_t = scale · q_tᵀ S_t        a_t = exp(g_t + g_gamma)

for every head, S [K, V]: the gate of step t decays the state before it, and o_t sees k_t v_tᵀ undecayed. g is a gate
per step (Mamba-2: Dao & Gu 2024, arXiv:2405.21060), g_gamma one per head for all steps (RetNet: Sun et al. 2023,
arXiv:2307.08621; Lightning Attention: Qin et al. 2024, arXiv:2401.04658). Both are natural logarithms per step, not
summed; where both are given they add, and without any nothing decays.
"""

from typing import Unpack

from cpu_golden import Array
from cpu_golden._lib.scans import ChunkBwd, ChunkFwd, StepBwd, StepFwd, backward, forward
from cpu_golden.chunk_scan import chunk_backward, chunk_forward
from cpu_golden.fused_recurrent import backward_definition, forward_definition, recurrent_backward, recurrent_forward
from op_arguments import gla
from op_arguments.gla import Output, SimpleGrads
from op_arguments.options import options_of

Gate = Array | None


@options_of(forward, chunk_forward)
def chunk_simple_gla_fwd(
    q: Array, k: Array, v: Array, *, g: Gate = None, g_gamma: Gate = None, **options: Unpack[ChunkFwd]
) -> Output:
    """o and, with output_final_state, ht of the recurrence, `chunk_size` steps at a time.

    q, k [B, T, H, K] and v [B, T, H, V]: float32, bfloat16 or float64, all three the same. g [B, T, H]: float32, q's
    dtype or float64; g_gamma [H]: float32 or float64. Options as `op_arguments.gla` has them, float64 where float32 is.
    Returns float64 o [B, T, H, V] and ht [N, H, K, V]; an empty sequence's is its initial state.
    Stages: depth, chunk_size, kept_whole, values_decayed. Sites: those of `chunk_scan.chunk_forward`.
    Raises ValueError or TypeError as `op_arguments.gla.check_forward`.
    """
    return forward(chunk_forward, q, k, v, {"g": g, "g_gamma": g_gamma}, **options)


@options_of(backward, chunk_backward)
def chunk_simple_gla_bwd(
    q: Array, k: Array, v: Array, do: Array, *, g: Gate = None, g_gamma: Gate = None, **options: Unpack[ChunkBwd]
) -> SimpleGrads:
    """The gradients of `chunk_simple_gla_fwd`, for a gradient do [B, T, H, V] of o and dht [N, H, K, V] of ht.

    do has q's dtype, dht is float32 or float64; everything else as the forward pass. Returns float64 gradients shaped
    as their arguments: dg [B, T, H] of every step, dg_gamma [H] their sum over B and T (each where that gate was
    given), dh0 [N, H, K, V] where initial_state was.
    Stages: depth, chunk_size, kept_whole, values_decayed, channels. Sites: those of `chunk_scan.chunk_backward`; out is
    dq, dk, dv and the gradient of the gates.
    Raises ValueError or TypeError as `op_arguments.gla.check_gradients`.
    """
    return SimpleGrads(**backward(chunk_backward, q, k, v, do, {"g": g, "g_gamma": g_gamma}, **options).named)


fused_chunk_simple_gla_fwd = chunk_simple_gla_fwd
fused_chunk_simple_gla_bwd = chunk_simple_gla_bwd


@options_of(forward, recurrent_forward)
def fused_recurrent_simple_gla_fwd(
    q: Array, k: Array, v: Array, *, g: Gate = None, g_gamma: Gate = None, **options: Unpack[StepFwd]
) -> Output:
    """o and, with output_final_state, ht of the recurrence, step by step.

    Arguments, result and errors as `chunk_simple_gla_fwd`. With reverse ht is the state of the first step.
    Sites: those of `fused_recurrent.recurrent_forward`.
    """
    return forward(recurrent_forward, q, k, v, {"g": g, "g_gamma": g_gamma}, **options)


@options_of(backward, recurrent_backward)
def fused_recurrent_simple_gla_bwd(
    q: Array, k: Array, v: Array, do: Array, *, g: Gate = None, g_gamma: Gate = None, **options: Unpack[StepBwd]
) -> SimpleGrads:
    """The gradients of `fused_recurrent_simple_gla_fwd`; arguments, result and errors as `chunk_simple_gla_bwd`.

    Sites: those of `fused_recurrent.recurrent_backward`; out is dq, dk, dv, the gradient of the gates.
    """
    return SimpleGrads(**backward(recurrent_backward, q, k, v, do, {"g": g, "g_gamma": g_gamma}, **options).named)


@options_of(forward)
def simple_gla_fwd_definition(
    q: Array, k: Array, v: Array, *, g: Gate = None, g_gamma: Gate = None, **options: Unpack[gla.StepFwd]
) -> Output:
    """The recurrence step by step. Arguments, result and errors as `fused_recurrent_simple_gla_fwd`."""
    return forward(forward_definition, q, k, v, {"g": g, "g_gamma": g_gamma}, **options)


@options_of(backward)
def simple_gla_bwd_definition(
    q: Array, k: Array, v: Array, do: Array, *, g: Gate = None, g_gamma: Gate = None, **options: Unpack[gla.StepBwd]
) -> SimpleGrads:
    """The derivative of the recurrence step by step. Arguments, result, errors as `fused_recurrent_simple_gla_bwd`."""
    return SimpleGrads(**backward(backward_definition, q, k, v, do, {"g": g, "g_gamma": g_gamma}, **options).named)
