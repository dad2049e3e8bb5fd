"""Kimi Delta Attention, one decay per key channel (Kimi Linear, arXiv:2510.26692): the definition, in float64.

    S ← diag(exp(g_t)) S        S ← S + k_t (beta_t (v_t - Sᵀ k_t))ᵀ        o_t = scale · Sᵀ q_t

for every value head, S [K, V]; value head i reads q and k of head i // (HV / H). The decay comes before the error
v - Sᵀ k, and beta, up to 2, is not clipped. g [B, T, HV, K] are natural logarithms per step, not summed.
"""

from typing import Unpack

from cpu_golden import Array
from cpu_golden._lib.delta import ChunkBwd, ChunkFwd, StepBwd, StepFwd, backward, forward
from cpu_golden.chunk_delta_rule import chunk_backward, chunk_forward
from cpu_golden.recurrent_delta_rule import recurrent_backward, recurrent_forward
from op_arguments.delta_rule import DeltaGrads, DeltaTensors
from op_arguments.gla import Output
from op_arguments.options import options_of


@options_of(forward, chunk_forward)
def chunk_kda_fwd(q: Array, k: Array, v: Array, *, g: Array, beta: Array, **options: Unpack[ChunkFwd]) -> Output:
    """o and, with output_final_state, ht of the recurrence with g [B, T, HV, K], `chunk_size` steps at a time.

    Arguments, result, sites and errors else as `gated_delta_rule.chunk_gated_delta_rule_fwd`.
    """
    return forward(chunk_forward, DeltaTensors(q, k, v, g, beta), True, **options)


@options_of(backward, chunk_backward)
def chunk_kda_bwd(
    q: Array, k: Array, v: Array, do: Array, *, g: Array, beta: Array, **options: Unpack[ChunkBwd]
) -> DeltaGrads:
    """The gradients of `chunk_kda_fwd`'s arguments, in their shapes.

    Arguments, result, sites and errors else as `gated_delta_rule.chunk_gated_delta_rule_bwd`.
    """
    return backward(chunk_backward, DeltaTensors(q, k, v, g, beta), do, True, **options)


@options_of(forward, recurrent_forward)
def fused_recurrent_kda_fwd(
    q: Array, k: Array, v: Array, *, g: Array, beta: Array, **options: Unpack[StepFwd]
) -> Output:
    """o and, with output_final_state, ht of the recurrence with g [B, T, HV, K], step by step.

    Arguments, result, sites and errors else as `gated_delta_rule.fused_recurrent_gated_delta_rule_fwd`.
    """
    return forward(recurrent_forward, DeltaTensors(q, k, v, g, beta), True, **options)


@options_of(backward, recurrent_backward)
def fused_recurrent_kda_bwd(
    q: Array, k: Array, v: Array, do: Array, *, g: Array, beta: Array, **options: Unpack[StepBwd]
) -> DeltaGrads:
    """The gradients of `fused_recurrent_kda_fwd`'s arguments, in their shapes.

    Arguments, result, sites and errors else as `gated_delta_rule.fused_recurrent_gated_delta_rule_bwd`.
    """
    return backward(recurrent_backward, DeltaTensors(q, k, v, g, beta), do, True, **options)
