"""Gated linear attention with one decay per head and step, on the TPU. Defined in `cpu_golden/simple_gla.py`.

    S_t = exp(g_t + g_gamma) S_{t-1} + k_t v_tᵀ        o_t = scale · q_tᵀ S_t

The chunked forms are scans of `chunk_scan`, the recurrent ones of `fused_recurrent`: precision, blocks and limits are
said there.
"""

from typing import Unpack

from jax import Array

from op_arguments.gla import Output, SimpleGrads
from op_arguments.options import fused, options_of
from tpu_kernels._lib.autograd import differentiable
from tpu_kernels._lib.scans import ChunkBwd, ChunkFwd, StepBwd, StepFwd
from tpu_kernels.chunk_scan import chunk_bwd, chunk_fwd
from tpu_kernels.fused_recurrent import recurrent_bwd, recurrent_fwd

Gate = Array | None


@options_of(chunk_fwd)
def chunk_simple_gla_fwd(
    q: Array, k: Array, v: Array, *, g: Gate = None, g_gamma: Gate = None, **options: Unpack[ChunkFwd]
) -> Output:
    """o and, with output_final_state, ht of the recurrence, `chunk_size` steps at a time.

    Arguments, result and errors as `cpu_golden.simple_gla.chunk_simple_gla_fwd`. Here q, k and v are all float32 or all
    bfloat16, and so is o; g is float32 or of their dtype; states and g_gamma are float32.
    fused: None is one kernel where its blocks fit VMEM; `_lib.chunk_plan.chunk_route` says why. Values, those of
    cu_seqlens, are checked outside tracing only.
    Also raises ValueError or TypeError as `op_arguments.gla.check_precision` and `check_fused`.
    """
    return chunk_fwd(q, k, v, gates={"g": g, "g_gamma": g_gamma}, **options)


@options_of(chunk_bwd)
def chunk_simple_gla_bwd(
    q: Array, k: Array, v: Array, do: Array, *, g: Gate = None, g_gamma: Gate = None, **options: Unpack[ChunkBwd]
) -> SimpleGrads:
    """The gradients of `chunk_simple_gla_fwd`'s arguments, in their dtypes, given do [B, T, H, V] in q's dtype.

    dht [N, H, K, V] float32: the gradient of ht. Other arguments and errors as `chunk_simple_gla_fwd`'s, with
    `op_arguments.gla.check_gradients`.
    """
    return SimpleGrads(**chunk_bwd(q, k, v, do, gates={"g": g, "g_gamma": g_gamma}, **options).named)


chunk_simple_gla = differentiable(chunk_simple_gla_fwd, chunk_simple_gla_bwd)
fused_chunk_simple_gla_fwd = fused(chunk_simple_gla_fwd)
fused_chunk_simple_gla_bwd = fused(chunk_simple_gla_bwd)
fused_chunk_simple_gla = fused(chunk_simple_gla)


@options_of(recurrent_fwd)
def fused_recurrent_simple_gla_fwd(
    q: Array, k: Array, v: Array, *, g: Gate = None, g_gamma: Gate = None, **options: Unpack[StepFwd]
) -> Output:
    """o and, with output_final_state, ht of the recurrence, as precise as one step after the other.

    There is no precision to choose. Arguments and errors as `chunk_simple_gla_fwd`'s.
    """
    return recurrent_fwd(q, k, v, gates={"g": g, "g_gamma": g_gamma}, **options)


@options_of(recurrent_bwd)
def fused_recurrent_simple_gla_bwd(
    q: Array, k: Array, v: Array, do: Array, *, g: Gate = None, g_gamma: Gate = None, **options: Unpack[StepBwd]
) -> SimpleGrads:
    """The gradients of `fused_recurrent_simple_gla_fwd`'s arguments; as `chunk_simple_gla_bwd`."""
    return SimpleGrads(**recurrent_bwd(q, k, v, do, gates={"g": g, "g_gamma": g_gamma}, **options).named)


fused_recurrent_simple_gla = differentiable(fused_recurrent_simple_gla_fwd, fused_recurrent_simple_gla_bwd)
