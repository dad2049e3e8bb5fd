"""Gated linear attention with one decay per head and step ("simple GLA"), in Triton; see `cpu_golden/simple_gla.py`.

    S_t = a_t S_{t-1} + k_t v_tᵀ        o_t = scale · q_tᵀ S_t        a_t = exp(g_t + g_gamma)

The arithmetic is in `chunk_scan` and `fused_recurrent`; the options are those of `op_arguments.gla`.
"""

from typing import Unpack

from torch import Tensor

from gpu_reference._lib.autograd import differentiable
from gpu_reference.chunk_scan import chunk_bwd, chunk_fwd
from gpu_reference.fused_recurrent import recurrent_bwd, recurrent_fwd
from op_arguments.gla import ChunkBwd, ChunkFwd, Output, SimpleGrads, StepBwd, StepFwd
from op_arguments.options import fused, options_of

Gate = Tensor | None


@options_of(chunk_fwd)
def chunk_simple_gla_fwd(
    q: Tensor, k: Tensor, v: Tensor, *, g: Gate = None, g_gamma: Gate = None, **options: Unpack[ChunkFwd]
) -> Output:
    """The recurrence by blocks of steps: o [B, T, H, V] and, with output_final_state, ht [N, H, K, V].

    Arguments, result and errors as `cpu_golden.simple_gla.chunk_simple_gla_fwd`; here: tensors of any strides, o in q's
    dtype, ht in float32; `fused` and further errors as `chunk_scan.chunk_fwd`.
    """
    return chunk_fwd(q, k, v, gates={"g": g, "g_gamma": g_gamma}, **options)


@options_of(chunk_bwd)
def chunk_simple_gla_bwd(
    q: Tensor, k: Tensor, v: Tensor, do: Tensor, *, g: Gate = None, g_gamma: Gate = None, **options: Unpack[ChunkBwd]
) -> SimpleGrads:
    """The gradients of `chunk_simple_gla_fwd`, for a gradient do [B, T, H, V] of o and dht [N, H, K, V] of ht.

    Arguments, result and errors as `cpu_golden.simple_gla.chunk_simple_gla_bwd`; here: gradients in their arguments'
    dtypes; memory as `chunk_scan.chunk_bwd`.
    """
    return SimpleGrads(**chunk_bwd(q, k, v, do, gates={"g": g, "g_gamma": g_gamma}, **options).named)


@options_of(recurrent_fwd)
def fused_recurrent_simple_gla_fwd(
    q: Tensor, k: Tensor, v: Tensor, *, g: Gate = None, g_gamma: Gate = None, **options: Unpack[StepFwd]
) -> Output:
    """The recurrence step by step: o [B, T, H, V] and, with output_final_state, ht [N, H, K, V].

    Arguments, result and errors as `cpu_golden.simple_gla.fused_recurrent_simple_gla_fwd`; here: dtypes as
    `chunk_simple_gla_fwd`, further errors as `fused_recurrent.recurrent_fwd`.
    """
    return recurrent_fwd(q, k, v, gates={"g": g, "g_gamma": g_gamma}, **options)


@options_of(recurrent_bwd)
def fused_recurrent_simple_gla_bwd(
    q: Tensor, k: Tensor, v: Tensor, do: Tensor, *, g: Gate = None, g_gamma: Gate = None, **options: Unpack[StepBwd]
) -> SimpleGrads:
    """The gradients of `fused_recurrent_simple_gla_fwd`, for a gradient do of o and dht of ht.

    Arguments, result and errors as `cpu_golden.simple_gla.fused_recurrent_simple_gla_bwd`; here: gradients in their
    arguments' dtypes; memory as `fused_recurrent.recurrent_bwd`.
    """
    return SimpleGrads(**recurrent_bwd(q, k, v, do, gates={"g": g, "g_gamma": g_gamma}, **options).named)


chunk_simple_gla = differentiable(chunk_simple_gla_fwd, chunk_simple_gla_bwd)
fused_chunk_simple_gla_fwd = fused(chunk_simple_gla_fwd)
fused_chunk_simple_gla_bwd = fused(chunk_simple_gla_bwd)
fused_chunk_simple_gla = fused(chunk_simple_gla)
fused_recurrent_simple_gla = differentiable(fused_recurrent_simple_gla_fwd, fused_recurrent_simple_gla_bwd)
