"""Kimi Delta Attention, one decay per key channel and step, in Triton; see `cpu_golden/kda.py`.

    S ← diag(exp(g_t)) S        S ← S + k_t (beta_t (v_t - Sᵀ k_t))ᵀ        o_t = scale · Sᵀ q_t

The functions are those of `gated_delta_rule`, whose precision and memory are theirs, with g [B, T, HV, K].
"""

from gpu_reference import gated_delta_rule
from gpu_reference._lib.autograd import differentiable
from gpu_reference.chunk_delta_rule import chunk_delta_bwd, chunk_delta_fwd
from gpu_reference.recurrent_delta_rule import recurrent_delta_bwd, recurrent_delta_fwd
from op_arguments.delta_rule import per_channel

chunk_kda_fwd = per_channel(gated_delta_rule.chunk_gated_delta_rule_fwd, chunk_delta_fwd)
chunk_kda_bwd = per_channel(gated_delta_rule.chunk_gated_delta_rule_bwd, chunk_delta_bwd)
chunk_kda = differentiable(chunk_kda_fwd, chunk_kda_bwd)

fused_recurrent_kda_fwd = per_channel(gated_delta_rule.fused_recurrent_gated_delta_rule_fwd, recurrent_delta_fwd)
fused_recurrent_kda_bwd = per_channel(gated_delta_rule.fused_recurrent_gated_delta_rule_bwd, recurrent_delta_bwd)
fused_recurrent_kda = differentiable(fused_recurrent_kda_fwd, fused_recurrent_kda_bwd)
