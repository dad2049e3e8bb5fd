"""Gated linear attention with one decay per key channel and step, in Triton; defined in `cpu_golden/gla.py`.

    S_t = diag(a_t) S_{t-1} + k_t v_tᵀ        o_t = scale · q_tᵀ S_t        a_t = exp(gk_t)

The arithmetic is in `chunk_scan` and `fused_recurrent`; the options are those of `op_arguments.gla`.
"""

from typing import Unpack

from torch import Tensor

from gpu_reference._lib.autograd import differentiable
from gpu_reference.chunk_scan import chunk_bwd, chunk_fwd
from gpu_reference.fused_recurrent import recurrent_bwd, recurrent_fwd
from op_arguments.gla import ChunkBwd, ChunkFwd, Grads, Output, StepBwd, StepFwd
from op_arguments.options import options_of


@options_of(chunk_fwd)
def chunk_gla_fwd(q: Tensor, k: Tensor, v: Tensor, *, gk: Tensor, **options: Unpack[ChunkFwd]) -> Output:
    """The recurrence by blocks of steps: o [B, T, H, V] and, with output_final_state, ht [N, H, K, V].

    Arguments, result and errors as `cpu_golden.gla.chunk_gla_fwd`; here: tensors of any strides, o in q's
    dtype, ht in float32; `fused` and further errors as `chunk_scan.chunk_fwd`.
    """
    return chunk_fwd(q, k, v, gates={"gk": gk}, **options)


@options_of(chunk_bwd)
def chunk_gla_bwd(q: Tensor, k: Tensor, v: Tensor, do: Tensor, *, gk: Tensor, **options: Unpack[ChunkBwd]) -> Grads:
    """The gradients of `chunk_gla_fwd`, for a gradient do [B, T, H, V] of o and dht [N, H, K, V] of ht.

    Arguments, result and errors as `cpu_golden.gla.chunk_gla_bwd`; here: gradients in their arguments'
    dtypes; memory as `chunk_scan.chunk_bwd`.
    """
    return Grads(**chunk_bwd(q, k, v, do, gates={"gk": gk}, **options).named)


@options_of(recurrent_fwd)
def fused_recurrent_gla_fwd(q: Tensor, k: Tensor, v: Tensor, *, gk: Tensor, **options: Unpack[StepFwd]) -> Output:
    """The recurrence step by step: o [B, T, H, V] and, with output_final_state, ht [N, H, K, V].

    Arguments, result and errors as `cpu_golden.gla.fused_recurrent_gla_fwd`; here: dtypes as
    `chunk_gla_fwd`, further errors as `fused_recurrent.recurrent_fwd`.
    """
    return recurrent_fwd(q, k, v, gates={"gk": gk}, **options)


@options_of(recurrent_bwd)
def fused_recurrent_gla_bwd(
    q: Tensor, k: Tensor, v: Tensor, do: Tensor, *, gk: Tensor, **options: Unpack[StepBwd]
) -> Grads:
    """The gradients of `fused_recurrent_gla_fwd`, for a gradient do of o and dht of ht.

    Arguments, result and errors as `cpu_golden.gla.fused_recurrent_gla_bwd`; here: gradients in their
    arguments' dtypes; memory as `fused_recurrent.recurrent_bwd`.
    """
    return Grads(**recurrent_bwd(q, k, v, do, gates={"gk": gk}, **options).named)


chunk_gla = differentiable(chunk_gla_fwd, chunk_gla_bwd)
fused_recurrent_gla = differentiable(fused_recurrent_gla_fwd, fused_recurrent_gla_bwd)
