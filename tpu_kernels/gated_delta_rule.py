"""The gated delta rule, one decay per head and step, on the TPU. Defined in `cpu_golden/gated_delta_rule.py`.

    S ← exp(g_t) S        S ← S + k_t (beta_t (v_t - Sᵀ k_t))ᵀ        o_t = scale · Sᵀ q_t

The chunked form is a scan of `chunk_delta_rule`: precision, blocks and limits are said there. The recurrent one is in
`recurrent_delta_rule`: few steps at a time, and as precise as one after the other.
"""

from typing import Unpack

from jax import Array

from op_arguments.delta_rule import DeltaGrads, DeltaTensors
from op_arguments.gla import Output
from op_arguments.options import options_of
from tpu_kernels._lib.delta import ChunkBwd, ChunkFwd, StepBwd, StepFwd, differentiable
from tpu_kernels.chunk_delta_rule import chunk_delta_bwd, chunk_delta_fwd
from tpu_kernels.recurrent_delta_rule import recurrent_delta_bwd, recurrent_delta_fwd


@options_of(chunk_delta_fwd)
def chunk_gated_delta_rule_fwd(
    q: Array, k: Array, v: Array, *, g: Array, beta: Array, **options: Unpack[ChunkFwd]
) -> Output:
    """o and, with output_final_state, ht of the recurrence, `chunk_size` steps at a time.

    Arguments, result and errors as `cpu_golden.gated_delta_rule.chunk_gated_delta_rule_fwd`. Here q, k and v are all
    float32 or all bfloat16, and so is o; g and beta are float32 or of their dtype; states are float32. Values, those of
    cu_seqlens, are checked outside tracing only.
    """
    return chunk_delta_fwd(DeltaTensors(q, k, v, g, beta), False, **options)


@options_of(chunk_delta_bwd)
def chunk_gated_delta_rule_bwd(
    q: Array, k: Array, v: Array, do: Array, *, g: Array, beta: Array, **options: Unpack[ChunkBwd]
) -> DeltaGrads:
    """The gradients of `chunk_gated_delta_rule_fwd`'s arguments, in their dtypes, given do [B, T, HV, V] in q's dtype.

    dht [N, HV, K, V] float32: the gradient of ht. Other arguments and errors as `chunk_gated_delta_rule_fwd`'s, with
    `op_arguments.delta_rule.check_delta_gradients`.
    """
    return chunk_delta_bwd(DeltaTensors(q, k, v, g, beta), do, False, **options)


chunk_gated_delta_rule = differentiable(chunk_gated_delta_rule_fwd, chunk_gated_delta_rule_bwd, per_channel=False)


@options_of(recurrent_delta_fwd)
def fused_recurrent_gated_delta_rule_fwd(
    q: Array, k: Array, v: Array, *, g: Array, beta: Array, **options: Unpack[StepFwd]
) -> Output:
    """o and, with output_final_state, ht of the recurrence, as precise as one step after the other.

    Arguments, dtypes, result and errors as `chunk_gated_delta_rule_fwd`'s, without chunk_size.
    """
    return recurrent_delta_fwd(DeltaTensors(q, k, v, g, beta), False, **options)


@options_of(recurrent_delta_bwd)
def fused_recurrent_gated_delta_rule_bwd(
    q: Array, k: Array, v: Array, do: Array, *, g: Array, beta: Array, **options: Unpack[StepBwd]
) -> DeltaGrads:
    """The gradients of `fused_recurrent_gated_delta_rule_fwd`'s arguments; as `chunk_gated_delta_rule_bwd`."""
    return recurrent_delta_bwd(DeltaTensors(q, k, v, g, beta), do, False, **options)


fused_recurrent_gated_delta_rule = differentiable(
    fused_recurrent_gated_delta_rule_fwd, fused_recurrent_gated_delta_rule_bwd, per_channel=False
)
