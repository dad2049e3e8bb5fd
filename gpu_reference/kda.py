"""Kimi Delta Attention, one decay per key channel and step, in Triton; see `cpu_golden/kda.py`.

    S ← diag(exp(g_t)) S        S ← S + k_t (beta_t (v_t - Sᵀ k_t))ᵀ        o_t = scale · Sᵀ q_t

The arithmetic is in `chunk_delta_rule` and `recurrent_delta_rule`; the options are those of `op_arguments.delta_rule`.
"""

from typing import Unpack

from torch import Tensor

from gpu_reference._lib.autograd import differentiable
from gpu_reference.chunk_delta_rule import chunk_delta_bwd, chunk_delta_fwd
from gpu_reference.recurrent_delta_rule import recurrent_delta_bwd, recurrent_delta_fwd
from op_arguments.delta_rule import ChunkDeltaBwd, ChunkDeltaFwd, DeltaBwd, DeltaFwd, DeltaGrads, DeltaTensors
from op_arguments.gla import Output
from op_arguments.options import options_of


@options_of(chunk_delta_fwd)
def chunk_kda_fwd(
    q: Tensor, k: Tensor, v: Tensor, *, g: Tensor, beta: Tensor, **options: Unpack[ChunkDeltaFwd]
) -> Output:
    """The recurrence by blocks of steps: o [B, T, HV, V] and, with output_final_state, ht [N, HV, K, V].

    Arguments, result and errors as `cpu_golden.kda.chunk_kda_fwd`; here: tensors of any
    strides, o in q's dtype, ht in float32; further errors as `chunk_delta_rule.chunk_delta_fwd`.
    """
    return chunk_delta_fwd(DeltaTensors(q, k, v, g, beta), True, **options)


@options_of(chunk_delta_bwd)
def chunk_kda_bwd(
    q: Tensor, k: Tensor, v: Tensor, do: Tensor, *, g: Tensor, beta: Tensor, **options: Unpack[ChunkDeltaBwd]
) -> DeltaGrads:
    """The gradients of `chunk_kda_fwd`, for a gradient do [B, T, HV, V] of o and dht [N, HV, K, V] of ht.

    Arguments, result and errors as `cpu_golden.kda.chunk_kda_bwd`; here: gradients in their
    arguments' dtypes; memory as `chunk_delta_rule.chunk_delta_bwd`.
    """
    return chunk_delta_bwd(DeltaTensors(q, k, v, g, beta), do, True, **options)


@options_of(recurrent_delta_fwd)
def fused_recurrent_kda_fwd(
    q: Tensor, k: Tensor, v: Tensor, *, g: Tensor, beta: Tensor, **options: Unpack[DeltaFwd]
) -> Output:
    """The recurrence step by step: o [B, T, HV, V] and, with output_final_state, ht [N, HV, K, V].

    Arguments, result and errors as `cpu_golden.kda.fused_recurrent_kda_fwd`; here: dtypes
    and further errors as `chunk_kda_fwd`.
    """
    return recurrent_delta_fwd(DeltaTensors(q, k, v, g, beta), True, **options)


@options_of(recurrent_delta_bwd)
def fused_recurrent_kda_bwd(
    q: Tensor, k: Tensor, v: Tensor, do: Tensor, *, g: Tensor, beta: Tensor, **options: Unpack[DeltaBwd]
) -> DeltaGrads:
    """The gradients of `fused_recurrent_kda_fwd`, for a gradient do of o and dht of ht.

    Arguments, result and errors as `cpu_golden.kda.fused_recurrent_kda_bwd`; here:
    gradients in their arguments' dtypes; memory as `recurrent_delta_rule.recurrent_delta_bwd`.
    """
    return recurrent_delta_bwd(DeltaTensors(q, k, v, g, beta), do, True, **options)


chunk_kda = differentiable(chunk_kda_fwd, chunk_kda_bwd)
fused_recurrent_kda = differentiable(fused_recurrent_kda_fwd, fused_recurrent_kda_bwd)
