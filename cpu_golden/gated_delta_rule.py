"""The gated delta rule, one decay per head and step (Yang et al. 2024, arXiv:2412.06464): the definition, in float64.

    S ← exp(g_t) S        S ← S + k_t (beta_t (v_t - Sᵀ k_t))ᵀ        o_t = scale · Sᵀ q_t

for every value head, S [K, V]; value head i reads q and k of head i // (HV / H). The decay comes before the error
v - Sᵀ k, and beta, up to 2, is not clipped. g [B, T, HV] are natural logarithms per step, not summed.
"""

from typing import Unpack

from cpu_golden import Array
from cpu_golden._lib.delta import ChunkBwd, ChunkFwd, StepBwd, StepFwd, backward, forward
from cpu_golden.chunk_delta_rule import chunk_backward, chunk_forward
from cpu_golden.recurrent_delta_rule import (
    backward_definition,
    forward_definition,
    recurrent_backward,
    recurrent_forward,
)
from op_arguments import delta_rule
from op_arguments.delta_rule import DeltaGrads, DeltaTensors
from op_arguments.gla import Output
from op_arguments.options import options_of


@options_of(forward, chunk_forward)
def chunk_gated_delta_rule_fwd(
    q: Array, k: Array, v: Array, *, g: Array, beta: Array, **options: Unpack[ChunkFwd]
) -> Output:
    """o and, with output_final_state, ht of the recurrence, `chunk_size` steps at a time.

    q, k [B, T, H, K] and v [B, T, HV, V]: float32, bfloat16 or float64, all three the same. g [B, T, HV] and beta
    [B, T, HV]: float32, q's dtype or float64. Options as `op_arguments.delta_rule` has them, float64 where float32 is.
    Returns float64 o [B, T, HV, V] and ht [N, HV, K, V]; an empty sequence's is its initial state.
    Stages and sites: those of `chunk_delta_rule.chunk_forward` and `_lib.delta.forward`.
    Raises ValueError or TypeError as `op_arguments.delta_rule.check_delta_forward`.
    """
    return forward(chunk_forward, DeltaTensors(q, k, v, g, beta), False, **options)


@options_of(backward, chunk_backward)
def chunk_gated_delta_rule_bwd(
    q: Array, k: Array, v: Array, do: Array, *, g: Array, beta: Array, **options: Unpack[ChunkBwd]
) -> DeltaGrads:
    """The gradients of `chunk_gated_delta_rule_fwd`, for a gradient do [B, T, HV, V] of o and dht [N, HV, K, V] of ht.

    do has q's dtype, dht is float32 or float64; everything else as the forward pass. Returns float64 gradients shaped
    as their arguments; dq and dk are sums over the value heads that share a head of keys.
    Stages and sites: those of `chunk_delta_rule.chunk_backward` and `_lib.delta.backward`.
    Raises ValueError or TypeError as `op_arguments.delta_rule.check_delta_forward`.
    """
    return backward(chunk_backward, DeltaTensors(q, k, v, g, beta), do, False, **options)


@options_of(forward, recurrent_forward)
def fused_recurrent_gated_delta_rule_fwd(
    q: Array, k: Array, v: Array, *, g: Array, beta: Array, **options: Unpack[StepFwd]
) -> Output:
    """o and, with output_final_state, ht of the recurrence, step by step.

    Arguments, result and errors as `chunk_gated_delta_rule_fwd`.
    Sites: those of `recurrent_delta_rule.recurrent_forward` and `_lib.delta.forward`.
    """
    return forward(recurrent_forward, DeltaTensors(q, k, v, g, beta), False, **options)


@options_of(backward, recurrent_backward)
def fused_recurrent_gated_delta_rule_bwd(
    q: Array, k: Array, v: Array, do: Array, *, g: Array, beta: Array, **options: Unpack[StepBwd]
) -> DeltaGrads:
    """The gradients of `fused_recurrent_gated_delta_rule_fwd`.

    Arguments, result and errors as `chunk_gated_delta_rule_bwd`.
    Sites: those of `recurrent_delta_rule.recurrent_backward` and `_lib.delta.backward`.
    """
    return backward(recurrent_backward, DeltaTensors(q, k, v, g, beta), do, False, **options)


@options_of(forward)
def gated_delta_rule_fwd_definition(
    q: Array, k: Array, v: Array, *, g: Array, beta: Array, **options: Unpack[delta_rule.DeltaFwd]
) -> Output:
    """The recurrence step by step, with g [B, T, HV, K] that of `kda`.

    Arguments, result and errors else as `fused_recurrent_gated_delta_rule_fwd`.
    """
    return forward(forward_definition, DeltaTensors(q, k, v, g, beta), g.ndim == 4, **options)


@options_of(backward)
def gated_delta_rule_bwd_definition(
    q: Array, k: Array, v: Array, do: Array, *, g: Array, beta: Array, **options: Unpack[delta_rule.DeltaBwd]
) -> DeltaGrads:
    """The derivative of the recurrence step by step, with g [B, T, HV, K] that of `kda`.

    Arguments, result and errors else as `fused_recurrent_gated_delta_rule_bwd`.
    """
    return backward(backward_definition, DeltaTensors(q, k, v, g, beta), do, g.ndim == 4, **options)
