"""Gated linear attention with one decay per step and channel of k, on the TPU. Defined in `cpu_golden/gla.py`.

    S_t = diag(exp(gk_t)) S_{t-1} + k_t v_tᵀ        o_t = scale · q_tᵀ S_t

The chunked forms are scans of `chunk_scan`, the recurrent ones of `fused_recurrent`: precision, blocks and limits are
said there.
"""

from typing import Unpack

from jax import Array

from op_arguments.gla import Grads, Output
from op_arguments.options import options_of
from tpu_kernels._lib.autograd import differentiable
from tpu_kernels._lib.scans import ChunkBwd, ChunkFwd, StepBwd, StepFwd
from tpu_kernels.chunk_scan import chunk_bwd, chunk_fwd
from tpu_kernels.fused_recurrent import recurrent_bwd, recurrent_fwd


@options_of(chunk_fwd)
def chunk_gla_fwd(q: Array, k: Array, v: Array, *, gk: Array, **options: Unpack[ChunkFwd]) -> Output:
    """o and, with output_final_state, ht of the recurrence, `chunk_size` steps at a time.

    Arguments, result and errors as `cpu_golden.gla.chunk_gla_fwd`. Here q, k and v are all float32 or all bfloat16, and
    so is o; gk is float32 or of their dtype; states are float32.
    fused: None is one kernel where its blocks fit VMEM; `_lib.chunk_plan.chunk_route` says why. Values, those of
    cu_seqlens, are checked outside tracing only.
    Also raises ValueError or TypeError as `op_arguments.gla.check_precision` and `check_fused`.
    """
    return chunk_fwd(q, k, v, gates={"gk": gk}, **options)


@options_of(chunk_bwd)
def chunk_gla_bwd(q: Array, k: Array, v: Array, do: Array, *, gk: Array, **options: Unpack[ChunkBwd]) -> Grads:
    """The gradients of `chunk_gla_fwd`'s arguments, in their dtypes, given do [B, T, H, V] in q's dtype.

    dht [N, H, K, V] float32: the gradient of ht. Other arguments and errors as `chunk_gla_fwd`'s, with
    `op_arguments.gla.check_gradients`.
    """
    return Grads(**chunk_bwd(q, k, v, do, gates={"gk": gk}, **options).named)


@options_of(recurrent_fwd)
def fused_recurrent_gla_fwd(q: Array, k: Array, v: Array, *, gk: Array, **options: Unpack[StepFwd]) -> Output:
    """o and, with output_final_state, ht of the recurrence, as precise as one step after the other.

    There is no precision to choose. Arguments and errors as `chunk_gla_fwd`'s.
    """
    return recurrent_fwd(q, k, v, gates={"gk": gk}, **options)


@options_of(recurrent_bwd)
def fused_recurrent_gla_bwd(q: Array, k: Array, v: Array, do: Array, *, gk: Array, **options: Unpack[StepBwd]) -> Grads:
    """The gradients of `fused_recurrent_gla_fwd`'s arguments; as `chunk_gla_bwd`."""
    return Grads(**recurrent_bwd(q, k, v, do, gates={"gk": gk}, **options).named)


chunk_gla = differentiable(chunk_gla_fwd, chunk_gla_bwd)
fused_recurrent_gla = differentiable(fused_recurrent_gla_fwd, fused_recurrent_gla_bwd)
