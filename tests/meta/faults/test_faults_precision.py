"""Losses of precision planted in the kernels: what a contract explains must find them, without integer data or ledger.

`docs/verdicts.md` has what each of them measures, by `power.py` beside this.
"""

import re
from collections.abc import Callable
from dataclasses import replace
from typing import NamedTuple

import pytest

from parity.judging.judge import gates
from parity.op import Case
from parity.trial import Trial
from tests.matrix import OPS
from tests.meta.faults.planting import ROOT, Fault, gpu, having, named, pairs, plant, tpu

ROUNDED = {
    ("tpu", "float16"): "jax.lax.reduce_precision({}, 8, 10)",
    ("tpu", "21 bits"): "jax.lax.reduce_precision({}, 8, 20)",
    ("gpu", "float16"): "({}).to(tl.float16).to(tl.float32)",
    ("torch", "float16"): "({}).half().float()",
}
CHOICE = {"tpu": "jnp.where({}, {}, {})", "gpu": "tl.where({}, {}, {})"}


class Loss(NamedTuple):
    """A value that kernels are to round: between « and » in their code. by: "torch" is a GPU's host. only: where."""

    what: str
    by: str
    ops: str
    code: str
    where: Callable[[Case], bool]
    only: str = ""
    to: str = "float16"

    @property
    def fault(self) -> Fault:
        """It as a fault."""
        before, value, after = re.split("[«»]", self.code)
        rounded = ROUNDED[self.by, self.to].format(value)
        if self.only:
            rounded = CHOICE[self.by].format(self.only, rounded, value)
        planted = tpu if self.by == "tpu" else gpu
        fault = planted(self.ops, before + value + after, before + rounded + after, self.where)
        return replace(fault, name=f"{self.to} {self.what}")


f32 = having(tier="smoke", dtype="float32")
bf16 = having(tier="smoke", dtype="bfloat16")
of_bf16 = having(dtype="bfloat16")
decoding = having(T=1, dtype="float32")
of_model_bf16 = having(dtype="bfloat16", K=128, V=128, T=72)
narrow_output = having(tier="smoke", out="bfloat16")
fp8 = having(tier="smoke", dtype="float8_e4m3fn", out="float32")
narrow_input = having(tier="default", dtype="bfloat16")
layer = having(dtype="float32", data="normal")
layer_bwd = having(dtype="bfloat16", T=60)
two_chunks = having(dtype="bfloat16", T=50)  # at once


def two_heads(c):
    return c.tier == "default" and c.H > 1 and c.T > 1


def gamma(c):
    return c.gates == "gamma" and c.dtype == "float32" and c.h0


SIMPLE_FWD, SIMPLE_BWD = "chunk_simple_gla_fwd", "chunk_simple_gla_bwd"
CHANNEL_FWD, CHANNEL_BWD = "chunk_gla_fwd", "chunk_gla_bwd"
FWD, BWD = f"{SIMPLE_FWD} {CHANNEL_FWD}", f"{SIMPLE_BWD} {CHANNEL_BWD}"
STEPS_FWD = "fused_recurrent_simple_gla_fwd fused_recurrent_gla_fwd"
STEPS_BWD = "fused_recurrent_simple_gla_bwd fused_recurrent_gla_bwd"
GDN_FWD, GDN_BWD = "chunk_gated_delta_rule_fwd", "chunk_gated_delta_rule_bwd"
KDA_FWD, KDA_BWD = "chunk_kda_fwd", "chunk_kda_bwd"
DELTA_FWD, DELTA_BWD = f"{GDN_FWD} {KDA_FWD}", f"{GDN_BWD} {KDA_BWD}"
DELTA_STEPS_FWD = "fused_recurrent_gated_delta_rule_fwd fused_recurrent_kda_fwd"
DELTA_STEPS_BWD = "fused_recurrent_gated_delta_rule_bwd fused_recurrent_kda_bwd"
RULES_FWD, RULES_BWD = f"{DELTA_FWD} {DELTA_STEPS_FWD}", f"{DELTA_BWD} {DELTA_STEPS_BWD}"  # of the TPU, in chunks all
GATES_FWD, GATES_BWD = "softplus_gate bounded_gate", "softplus_gate_bwd bounded_gate_bwd"
CONV, CONV_BWD = "causal_conv1d", "causal_conv1d_bwd"
GPU_SUMS = "sums = «ADDED(sums, a, b, lhs, rhs, region, step, SCALING)»"
GPU_STATE = "return «decays.kept * state + (decays.lost * state + update)»"
GPU_WRITTEN = (
    "update = «tl.fma(tl.expand_dims(k_row, NEW_AXIS), tl.expand_dims(v_row, 1 - NEW_AXIS), (kept + lost) * residue)»"
)
TPU_STATE = 'return «decayed(state, decay, written_by(load("k"), load("v"), decay, "decay_to_end", scan))»'
TPU_SUMS = 'sums = «shown("acc", rows, sums)»'
SLOT_PRODUCTS = "else «taken * weights[:, j, None]»"
GPU_NEXT = "state = «next_state(state, k_columns, v_rows, decays.to_end, decays, SPLIT)»"
GPU_NEXT_DELTA = "state = «next_state(state, k_columns, v_new, decays.to_end, decays, SPLIT)»"
TPU_NEXT_DELTA = 'state[...] = block.probe(i, "h", «_next_state(s, state[...], scan)»)'
GPU_STEP_DELTA = "state = «tl.where(kept > 0, state, 0.0) + (lost * state + k_row * v_new[:, None])»"
GPU_CONV = "z = «tl.fma(tl.broadcast_to(weight, z.shape), seen, z)»"

LOSSES = [
    # sums, all of them or of one step, visit, group
    Loss("sums", "tpu", "gmm", TPU_SUMS, narrow_output),
    Loss("sums", "tpu", "tgmm", "acc[rows, columns] = «before + sums»", narrow_output),
    Loss("sums", "tpu", "gmm_quantized grouped_gemm",
         "return sums if total is None else «total + sums»", narrow_output),
    Loss("sums", "tpu", "tgmm_quantized grouped_dense_bwd",
         "return jnp.where(first, jnp.zeros((), self.acc.dtype), «self.acc[rows, columns]»)", narrow_output),
    Loss("sums", "gpu", "gmm tgmm", GPU_SUMS, narrow_output),
    Loss("sums", "gpu", "grouped_gemm", GPU_SUMS, narrow_output),
    Loss("sums", "gpu", "gmm_quantized tgmm_quantized grouped_dense grouped_dense_bwd",
         "sums += «partial»", narrow_output),
    Loss("sums in one group", "tpu", "gmm", TPU_SUMS, f32, "visits.group_ids[visit] == 1", "21 bits"),
    Loss("sums in one step", "tpu", "gmm", TPU_SUMS, f32, "step == 1"),
    Loss("sums in one visit", "tpu", "gmm", TPU_SUMS, f32, "visit == 2"),
    Loss("sums in one visit", "tpu", "tgmm", "acc[rows, columns] = «before + sums»", f32, "visit == 2"),
    Loss("sums in one step", "gpu", "gmm tgmm", GPU_SUMS, f32, "step == first + DEPTH"),
    Loss("sums in one group", "gpu", "gmm tgmm", GPU_SUMS, f32, "region.group == 1"),
    Loss("sums in one step", "gpu", "gmm_quantized", GPU_SUMS, fp8, "step == first + DEPTH"),
    Loss("partial sums", "tpu", "gmm", 'sums = «shown("partial", rows, sums)»', narrow_output),
    Loss("sums", "tpu", "grouped_dense", "return sums if total is None else «total + sums»", narrow_output),
    Loss("sums in one step", "tpu", "gmm_quantized grouped_gemm", "return «added(total, sums)»", fp8, "self.step == 1"),
    Loss("sums in one step", "gpu", "grouped_gemm", GPU_SUMS, fp8, "step == first + DEPTH"),
    Loss("sums in one group", "gpu", "gmm_quantized", GPU_SUMS, fp8, "region.group == 1"),
    Loss("sums in one group", "gpu", "grouped_gemm", GPU_SUMS, fp8, "region.group == 1"),
    Loss("sums in one expert", "tpu", "moe_layer moe_layer_bwd", TPU_SUMS, layer, "visits.group_ids[visit] == 1"),
    Loss("sums in one expert", "gpu", "moe_layer moe_layer_bwd", GPU_SUMS, layer, "region.group == 1"),
    # scales
    Loss("sums before the scales", "gpu", "gmm_quantized tgmm_quantized",
         "partial = «_dot_of_step(a, b, DOT)»", fp8),
    Loss("sums before the scales", "tpu", "tgmm_quantized",
         "return dot(a, b, contract) if self.is_widened else «product(a, b, contract)»", fp8),
    Loss("sums before the scales", "tpu", "gmm_quantized",
         "sums = multiply(weights, x, contract[::-1]) if self.plan.transposed else «multiply(x, weights, contract)»",
         fp8),
    Loss("scales", "gpu", "gmm_quantized tgmm_quantized",
         "partial *= «tl.load(scales, mask=region.in_rows, other=0)»", fp8),
    Loss("scales", "tpu", "gmm_quantized", "else «scales.lhs[part, rows, :]»", fp8),
    Loss("scales", "tpu", "tgmm_quantized",
         "[«as_columns(None if row is None else row[:, block.start : end])» for row in of_lhs]", fp8),
    # products, weights, and the output
    Loss("products with weights", "tpu", "unpermute", SLOT_PRODUCTS, bf16),
    Loss("products with weights", "torch", "unpermute", SLOT_PRODUCTS, bf16),
    Loss("products with weights in one slot", "tpu", "unpermute", SLOT_PRODUCTS, bf16, "j == 1"),
    Loss("output, twice rounded", "tpu", "gmm", "result = «sums».astype(out.dtype)", narrow_output),
    Loss("output, twice rounded", "tpu", "tgmm", "out[...] = «total».astype(out.dtype)", narrow_output),
    Loss("output, twice rounded", "tpu", "gmm_quantized grouped_gemm",
         "result = «total».astype(self.out.dtype)", narrow_output),
    Loss("output, twice rounded", "tpu", "tgmm_quantized grouped_dense_bwd",
         "self.out[rows, columns] = «total».astype(self.out.dtype)", narrow_output),
    Loss("output, twice rounded", "gpu", "gmm gmm_quantized grouped_dense",
         "result = «sums».to(out.dtype.element_ty)", narrow_output),
    Loss("output, twice rounded", "gpu", "tgmm tgmm_quantized",
         "tl.store(out_tile, «sums».to(out.dtype.element_ty), mask=in_out)", narrow_output),
    Loss("output, twice rounded", "tpu", "unpermute",
         "return «total».astype(rows.dtype)", bf16),
    Loss("output, twice rounded", "torch", "unpermute",
         "return «_sum_of(rows, weights, slots)».to(rows.dtype)", bf16),
    Loss("output, twice rounded", "gpu", SIMPLE_FWD, "store_tile(o, «scale * out», row", bf16),
    Loss("output, twice rounded", "gpu", CHANNEL_FWD, "store_tile(o, «scale * out», row", bf16),
    Loss("output, twice rounded", "gpu", "grouped_gemm", "result = «sums».to(out.dtype.element_ty)", narrow_output),
    Loss("output, twice rounded", "tpu", "grouped_dense", "result = «total».astype(self.out.dtype)", narrow_output),
    Loss("output, twice rounded", "tpu", f"{FWD} {BWD}",
         "ref[:, self.rows(i), :] = «x».astype(ref.dtype)", bf16),
    # the layer
    Loss("silu", "tpu", "moe_layer", "Computed((weights * «jax.nn.silu(gate)» * up", layer),
    Loss("silu", "torch", "moe_layer", "(weights * «_silu(gate.float())» * up.float())", layer),
    Loss("weights", "tpu", "moe_layer", "Computed((«weights» * jax.nn.silu", layer),
    Loss("weights", "torch", "moe_layer", "(«weights» * _silu(gate.float()) * up.float())", layer),
    Loss("gradient of weights", "torch", "moe_layer_bwd",
         'dweights = «probe("dweights", (dhidden * silu * up).sum(1, keepdim=True))»', layer_bwd),
    # chunked scans
    Loss("scores", "tpu", FWD, 'return probe("A", «decay.scores(load, scan)», 1, 2)', bf16),
    Loss("scores", "gpu", FWD, "out += dot(«scores», v_rows, SPLIT)", bf16),
    Loss("scores", "gpu", BWD, "dv_tile += scale * dot(«scores_t», do_rows, SPLIT)", bf16),
    Loss("state", "tpu", FWD, TPU_STATE, bf16),
    Loss("state", "tpu", BWD, 'block.probe(i, "state", «decayed(states[i], decay, term)»)', bf16),
    Loss("state", "gpu", f"{FWD} {BWD}", GPU_STATE, bf16),
    Loss("state in one chunk", "tpu", FWD,
         'state[...] = probe("state", «_next_state(load, state[...], decay, scan)»)', f32, "i == 0"),
    Loss("state in one chunk", "gpu", FWD, GPU_NEXT, bf16, "block == 0"),
    Loss("state in one head", "tpu", CHANNEL_FWD, TPU_STATE, f32,
         "jax.lax.broadcasted_iota(jnp.int32, state.shape, 0) == 1"),
    Loss("state in one head", "gpu", CHANNEL_FWD, GPU_NEXT, bf16, "head == 1"),
    Loss("state in one head", "tpu", SIMPLE_FWD, TPU_STATE, two_heads,
         "jax.lax.broadcasted_iota(jnp.int32, state.shape, 0) == 1"),
    Loss("state in one head", "gpu", SIMPLE_FWD, GPU_NEXT, two_heads, "head == 1"),
    Loss("gradient of the state", "tpu", BWD,
         'return «decayed(dstate, decay, written_by(load("q"), load("do"), decay, "decay_from_start", scan, '
         "scan.p.scale))»",
         bf16),
    Loss("decay", "tpu", FWD, "return decay_parts(exponent) if scan.precise else («finite_exp(exponent)»,)", bf16),
    Loss("decay", "gpu", FWD, "return «tl.exp(at_most(coarse + fine, LARGEST_EXPONENT))»", bf16),
    Loss("decay of float64", "gpu", SIMPLE_FWD,
         "result = «tl.exp(at_most(coarse.to(tl.float64) + fine, LARGEST_EXPONENT)).to(tl.float32)»", f32),
    Loss("decay as a column", "tpu", f"{SIMPLE_FWD} {SIMPLE_BWD}",
         "column = «dot_with_all(tile.swapaxes(1, 2), of_number, self._scan, 1)»", bf16),
    Loss("sums of gates", "tpu", f"{SIMPLE_FWD} {SIMPLE_BWD}",
         "both = «dot_with_all(gates, ones((step <= place % c) == (place < c)), scan, 1)»", bf16),
    Loss("what two chunks write", "tpu", SIMPLE_BWD,
         "return jnp.split(«dot(turned, diagonal, (1, 0), scan)», scan.at_once, 2)", two_chunks),
    Loss("dA", "tpu", SIMPLE_BWD, 'dproducts = «dot(load("v"), load("do"), (1, 1), scan)»', bf16),
    Loss("dA", "tpu", CHANNEL_BWD, 'dpairs = «probe("dA", scan.p.scale * jnp.where(i < j, *dscores), 1, 2)»', bf16),
    Loss("dA", "gpu", BWD, "«products.to(tl.float32)»\n    products_t", bf16),
    Loss("dg", "tpu", SIMPLE_BWD, "jnp.sum(jnp.where(row < column, «sums + to_state», from_state)", bf16),
    Loss("dg", "tpu", CHANNEL_BWD, 'read = probe("dgate", dot(ones(i >= j), «q * dq», (1, 0), scan), 1)', bf16),
    Loss("dg", "gpu", SIMPLE_BWD, "pairs = dot(is_before, «pairs_t», SPLIT)", bf16),
    Loss("dg", "gpu", CHANNEL_BWD, "dgate = sums_from(«q_columns * dq - k_columns * dk»)", bf16),
    Loss("dg_gamma", "tpu", SIMPLE_BWD, "return «steps».sum((0, 1))", gamma),
    Loss("dg_gamma", "torch", SIMPLE_BWD, "«step».sum((0, 1), dtype=torch.float64)", gamma),
    # steps
    Loss("decay", "tpu", f"{STEPS_FWD} {STEPS_BWD}", "return kept * state, «rest * state» + whole", f32),
    Loss("decay of a group", "tpu", f"{STEPS_FWD} {STEPS_BWD}",
         "one, left = ordered_two_sum(power, «power * high»)", bf16),
    Loss("decay", "gpu", f"{STEPS_FWD} {STEPS_BWD}", "lost = «(decay - kept).to(tl.float32)»", bf16),
    Loss("scores", "tpu", STEPS_FWD, 'scores = «_dot(q, refs["k_aligned"][group])»', bf16),
    Loss("state that is read", "tpu", STEPS_FWD, "_dot(q, piece) for piece in bf16_pieces(«state»)", bf16),
    Loss("products of a step", "tpu", STEPS_FWD,
         'products = «by_key(refs, "q", rows.start + n, plan) * after»', f32),
    Loss("products of a step", "gpu", STEPS_FWD, "tl.reshape(«q_row[None, :] * state», (", bf16),
    Loss("state", "gpu", f"{STEPS_FWD} {STEPS_BWD}", "result = «base + change»", bf16),
    Loss("scores of one step", "tpu", STEPS_FWD, 'scores = «_dot(q, refs["k_aligned"][group])»', bf16,
         "lax.broadcasted_iota(jnp.int32, (48, 128), 0) % 16 == 3"),
    Loss("what is written in a group", "tpu", STEPS_FWD, "jnp.zeros_like(state)), «exact», rest)", bf16),
    Loss("what is written in one step", "tpu", STEPS_FWD,
         "pair = decayed_sum(pair, decay, whole, «written»)", f32, "n == 3"),
    Loss("what is written in one step", "gpu", STEPS_FWD, GPU_WRITTEN, bf16, "row // layout.h == 3"),
    Loss("what is written in one head", "gpu", "fused_recurrent_simple_gla_fwd", GPU_WRITTEN, two_heads, "head == 1"),
    Loss("output, twice rounded", "tpu", STEPS_FWD,
         'found = «plan.p.scale * read_in_group(refs["state"][:, slab], refs, rows, slab, plan)»', bf16),
    Loss("output, twice rounded", "gpu", STEPS_FWD,
         "o_row = «scale * tl.sum(tl.sum(tl.reshape(q_row[None, :] * state, (BV, 4, BK // 4)), axis=1), axis=1)»",
         bf16),
    Loss("dk", "tpu", STEPS_BWD, "dk[n] += fold_registers(«_column(v, n, plan, relative) * after»)", bf16),
    Loss("dk", "gpu", STEPS_BWD, "dk_row = sum_over_values(«dstate * v_row[None, :]»)", bf16),
    Loss("dg", "tpu", STEPS_BWD, 'fold_registers(«after * refs["decayed"][rows.start + n, slab, :]»)', bf16),
    Loss("dg", "gpu", STEPS_BWD, "dgate_row = sum_over_values(«dstate * ((kept + lost) * before)»)", bf16),
    # chunked delta rules
    Loss("scores", "tpu", RULES_FWD, 'probe("P", «of_q[0]», 1, 2)', bf16),
    Loss("scores", "gpu", DELTA_FWD, "scores = «scores.to(tl.float32)»", bf16),
    Loss("inverse", "tpu", f"{DELTA_FWD} {DELTA_BWD}",
         't = probe("T", «inverse(probe("A", beta * raw, 1, 2), scan)», 1, 2)', bf16),
    Loss("inverse", "gpu", f"{DELTA_FWD} {DELTA_BWD}", "inverse = «_inverse(beta[:, None] * raw, LEVELS)»", bf16),
    Loss("errors of what is recalled", "tpu", RULES_FWD,
         'error = probe("error", «f32(self.load(i, "v")) - recalled», 1)', bf16),
    Loss("errors of what is recalled", "gpu", DELTA_FWD, "v_new = dot(t_rows, beta[:, None] * «error», SPLIT)", bf16),
    Loss("what is written", "tpu", RULES_FWD, 'probe("v_new", «_solution(t, raw, beta, beta * error, scan)», 1)', bf16),
    Loss("what is written", "gpu", DELTA_FWD, "v_new = «dot(t_rows, beta[:, None] * error, SPLIT)»", bf16),
    Loss("state", "tpu", f"{RULES_FWD} {RULES_BWD}",
         'return «decayed(state, s.decay, written_by(s.k, s.v_new, s.decay, "decay_to_end", scan))»', bf16),
    Loss("state", "gpu", f"{DELTA_FWD} {DELTA_BWD}", GPU_STATE, bf16),
    Loss("state in one chunk", "tpu", RULES_FWD, TPU_NEXT_DELTA, bf16, "i == 0"),
    Loss("state in one chunk", "gpu", DELTA_FWD, GPU_NEXT_DELTA, bf16, "block == 0"),
    Loss("state in one head", "tpu", RULES_FWD, TPU_NEXT_DELTA, bf16,
         "jax.lax.broadcasted_iota(jnp.int32, scan.state, 0) == 1"),
    Loss("state in one head", "gpu", DELTA_FWD, GPU_NEXT_DELTA, bf16, "head == 1"),
    Loss("gradient of the state", "tpu", RULES_BWD, 'probe("dh", «decayed(dend, decay, change)»)', bf16),
    Loss("gradient of the state", "gpu", DELTA_BWD,
         "dstate = «decays.kept * dstate + (decays.lost * dstate + change)»", bf16),
    Loss("decay", "tpu", DELTA_FWD,
         "return decay_parts(exponent) if scan.precise else («finite_exp(exponent)»,)", bf16),
    Loss("decay", "gpu", DELTA_FWD, "return «tl.exp(at_most(coarse + fine, LARGEST_EXPONENT))»", bf16),
    Loss("gradient of what is written", "tpu", RULES_BWD,
         'probe("dv_new", «scale * dot(s.p, do, (0, 0), scan) + from_end», 1)', bf16),
    Loss("gradient of what is written", "gpu", DELTA_BWD,
         "dv_new = «scale * dot(p_columns, do_rows, SPLIT) + read_state(k_rows, dstate, to_end, SPLIT)»", bf16),
    Loss("dA", "tpu", RULES_BWD, "jnp.where(row > column, «-dot(dupdate, s.v_new, (1, 1), scan)», 0.0)", bf16),
    Loss("dA", "gpu", DELTA_BWD, "da = tl.where(at[:, None] > at[None, :], «da.to(tl.float32)», 0.0)", bf16),
    Loss("dg", "tpu", RULES_BWD, "of_rows = «f32(q) * read + f32(k) * recalled», f32(k) * written", bf16),
    Loss("dg", "gpu", GDN_BWD, "sums_across(«p_t * dp_t + raw_t * draw_t», read, written, SPLIT)", bf16),
    Loss("dg", "gpu", KDA_BWD, "dgate = sums_from(«q_columns * dq + k_columns * (dk_later - dk_earlier)»)", bf16),
    Loss("dbeta", "tpu", RULES_BWD, "of_error = jnp.sum(«dupdate * s.error», axis=2, keepdims=True)", bf16),
    Loss("dbeta", "gpu", DELTA_BWD, "of_beta += tl.sum(«dupdate_rows * error_rows», axis=1)", bf16),
    Loss("output, twice rounded", "tpu", RULES_FWD,
         'block.store(i, "o", «plan.p.scale * (read + dot(s.p, s.v_new, (1, 0), scan))»)', bf16),
    Loss("output, twice rounded", "gpu", DELTA_FWD,
         "store_tile(o, «scale * out», row[:, None], value, rows, layout.v)", bf16),
    # delta rules step by step
    Loss("what is written in decoding", "tpu", DELTA_STEPS_FWD,
         'written[states] = «operands["beta"][states].astype(jnp.float32) * (written[states] - recalled)»', decoding),
    Loss("decay", "tpu", f"{DELTA_STEPS_FWD} {DELTA_STEPS_BWD}",
         "return kept, «(power - kept) + power * series»", bf16),
    Loss("decay", "gpu", f"{DELTA_STEPS_FWD} {DELTA_STEPS_BWD}", "lost = «(decay - kept).to(tl.float32)»", bf16),
    Loss("products of a step", "gpu", DELTA_STEPS_FWD, "_sum_over_keys(«(kept + lost) * k_row * state»)", bf16),
    Loss("errors of what is recalled", "gpu", DELTA_STEPS_FWD,
         "v_new = tl.load(inputs.beta + row).to(tl.float32) * «error»", bf16),
    Loss("state", "gpu", f"{DELTA_STEPS_FWD} {DELTA_STEPS_BWD}", GPU_STEP_DELTA, bf16),
    Loss("state in one step", "gpu", DELTA_STEPS_FWD, GPU_STEP_DELTA, bf16, "row // layout.h == 3"),
    Loss("state in one head", "gpu", DELTA_STEPS_FWD, GPU_STEP_DELTA, bf16, "head == 1"),
    Loss("gradient of the state", "gpu", DELTA_STEPS_BWD,
         "dstate = «tl.where(kept > 0, through, 0.0) + lost * through»", bf16),
    Loss("dk", "gpu", DELTA_STEPS_BWD, "dk_row = _sum_over_values(«dstate * v_new[:, None]»)", bf16),
    Loss("dg", "gpu", DELTA_STEPS_BWD, "_sum_over_values(«(kept + lost) * before * through»)", bf16),
    Loss("dbeta", "gpu", DELTA_STEPS_BWD, "tl.store(outs.dbeta + at_part, tl.sum(«dv_new * error»))", bf16),
    Loss("output, twice rounded", "gpu", DELTA_STEPS_FWD,
         "o_row = «scale * _sum_over_keys(q_row[None, :] * state)»", bf16),
    # gates
    Loss("softplus", "tpu", "softplus_gate", "-rate * «softplus(biased)» if bound is None", f32),
    Loss("softplus", "gpu", "softplus_gate", "g = -rate * «softplus(biased)» if", f32),
    Loss("sigmoid", "tpu", "bounded_gate", "bound * «sigmoid(rate * biased)»", f32),
    Loss("sigmoid", "gpu", "bounded_gate", "x.bound * «sigmoid(rate * biased)»", f32),
    Loss("rate", "tpu", f"{GATES_FWD} {GATES_BWD}", "else «jnp.exp(x.A_log[...])»", f32),
    Loss("rate", "gpu", f"{GATES_FWD} {GATES_BWD}",
         "rate = «exp(tl.load(x.A_log + column // x.per_head, mask=in_columns, other=0))»[None, :]", f32),
    Loss("rate of one head", "tpu", GATES_FWD, "else «jnp.exp(x.A_log[...])»", f32,
         "jax.lax.broadcasted_iota(jnp.int32, x.A_log.shape, 1) == 1"),
    Loss("rate of one head", "gpu", GATES_FWD,
         "rate = «exp(tl.load(x.A_log + column // x.per_head, mask=in_columns, other=0))»[None, :]", f32,
         "column == 1"),
    Loss("da", "tpu", "softplus_gate_bwd", "da, of_rate = «-grad * rate * sigmoid(biased)», ", f32),
    Loss("da", "gpu", "softplus_gate_bwd", "da = «-grad * rate * sigmoid(biased)»", f32),
    Loss("da", "tpu", "bounded_gate_bwd", "da, of_rate = «of_scaled * rate», of_scaled * scaled", f32),
    Loss("da", "gpu", "bounded_gate_bwd", "da = «of_scaled * rate»", f32),
    Loss("sums", "tpu", GATES_BWD, "fold_rows(«grid.own(terms)», FOLDED)", f32),
    Loss("dA_log", "gpu", GATES_BWD, "sum_rows(«tl.where(in_tile, of_rate, 0.0)», LEVELS)", f32),
    Loss("ddt_bias", "gpu", GATES_BWD, "sum_rows(«tl.where(in_tile, da, 0.0)», LEVELS)", f32),
    Loss("da, twice rounded", "tpu", GATES_BWD, "out.da[...] = «da».astype(out.da.dtype)", narrow_input),
    Loss("da, twice rounded", "gpu", GATES_BWD, "tl.store(outs.da + at_tile, «da».to(outs.da.dtype.element_ty)",
         narrow_input),
    # the convolution
    Loss("sums", "tpu", CONV, "return «total + left»", f32),
    Loss("sums", "gpu", CONV, GPU_CONV, f32),
    Loss("sums of 16 bits", "tpu", CONV, "else («total + term», 0.0)", narrow_input),
    Loss("sums of 16 bits", "gpu", CONV, GPU_CONV, narrow_input),
    Loss("sums of one tap", "gpu", CONV, GPU_CONV, f32, "column * 0 + tap == 1"),
    Loss("products of one tap", "tpu", CONV,
         "«read.weight[tap : tap + 1, at.columns] * seen[at.after(grid.halo - (grid.width - 1) + tap), :]»", f32,
         "tap == 1"),
    Loss("silu in one sequence", "tpu", CONV, "«z * sigmoid(z)» if silu else z", f32, "visit.start > 0"),
    Loss("silu in one sequence", "gpu", CONV, "result = «z * sigmoid(z)» if SILU else z", f32, "sequence == 1"),
    Loss("silu", "tpu", CONV, "«z * sigmoid(z)» if silu else z", f32),
    Loss("silu", "gpu", CONV, "result = «z * sigmoid(z)» if SILU else z", f32),
    Loss("output, twice rounded", "tpu", CONV, "return «z * sigmoid(z) if silu else z»", narrow_input),
    Loss("output, twice rounded", "gpu", CONV, "tl.store(y + row * conv.channels + column, «result».to(", narrow_input),
    Loss("gradient before the silu", "tpu", CONV_BWD, "return «grad * of_z * (1.0 + z * rest)»", f32),
    Loss("gradient before the silu", "gpu", CONV_BWD,
         "dz = tl.where(in_tile, «dz * sigmoid(z) * (1.0 + z * sigmoid(-z))», 0.0)", f32),
    Loss("dx", "gpu", CONV_BWD, "tl.where(meets, «tl.fma(tl.broadcast_to(weight, dz.shape), dz, dseen)», dseen)", f32),
    Loss("dx", "tpu", CONV_BWD, "«read.weight[tap : tap + 1, at.columns] * dz[at.after(grid.halo + later), :]»", f32),
    Loss("dweight", "tpu", CONV_BWD, "«seen[at.after(grid.halo - (grid.width - 1) + tap), :] * grad»", f32),
    Loss("dweight", "gpu", CONV_BWD, "sum_rows(tl.where(in_tile, «seen * dz», 0.0), LEVELS)", f32),
    Loss("dweight of one tile", "tpu", CONV_BWD,
         "out.dweight[tap, :, at.columns] = «fold_rows(terms[tap], FOLDED)»", f32, "visit.start > 0"),
    Loss("dweight of one tile", "gpu", CONV_BWD, "sum_rows(tl.where(in_tile, «seen * dz», 0.0), LEVELS)", f32,
         "segment == 1"),
    Loss("dbias", "tpu", CONV_BWD, "out.dbias[0, :, at.columns] = «fold_rows(terms[grid.width], FOLDED)»", f32),
    Loss("dbias", "gpu", CONV_BWD, "of_bias = tl.expand_dims(sum_rows(«dz», LEVELS), 0)", f32),
]  # fmt: skip

FAULTS = named({
    "three passes of six": [
        tpu("gmm tgmm", "lax.Precision.HIGHEST if", "lax.Precision.HIGH if", f32),
        gpu("gmm tgmm", 'tl.dot(a, b, sums, input_precision="ieee")', 'tl.dot(a, b, sums, input_precision="bf16x3")',
            f32),
        tpu("moe_layer_bwd", "precision=lax.Precision.HIGHEST)", "precision=lax.Precision.HIGH)", layer_bwd),
        tpu("moe_layer", "precision=lax.Precision.HIGHEST)", "precision=lax.Precision.HIGH)", layer),
        tpu(f"{FWD} {BWD}", "pieces = pieces if scan.split else WHOLE", "pieces = 2", f32),
        tpu(f"{DELTA_FWD} {DELTA_BWD}", "pieces = pieces if scan.split else WHOLE", "pieces = 2", f32),
        gpu(f"{DELTA_FWD} {DELTA_BWD}", 'tl.dot(a_pieces, b_pieces, input_precision="ieee")',
            'tl.dot(a_pieces, b_pieces, input_precision="bf16x3")', f32),
        gpu(f"{FWD} {BWD}", 'tl.dot(a_pieces, b_pieces, input_precision="ieee")',
            'tl.dot(a_pieces, b_pieces, input_precision="bf16x3")', f32),
    ],
    "TF32": [
        gpu("gmm tgmm", 'tl.dot(a, b, sums, input_precision="ieee")', 'tl.dot(a, b, sums, input_precision="tf32")',
            f32),
    ],
    "one pass of two": [
        gpu(f"{SIMPLE_FWD} {SIMPLE_BWD}", "tl.dot(a_high, b, tl.dot(a_low, b))", "tl.dot(a_high, b)", bf16),
        tpu(f"{FWD} {BWD}", "if m + n < pieces]", "if m + n < max(pieces - 1, 1)]", bf16),
        tpu(f"{DELTA_FWD} {DELTA_BWD}", "if m + n < pieces]", "if m + n < max(pieces - 1, 1)]", bf16),
    ],
    "one pass of three": [
        gpu(f"{DELTA_FWD} {DELTA_BWD}", "tl.dot(a_high, b_high, tl.dot(a_high, b_low, tl.dot(a_low, b_high)))",
            "tl.dot(a_high, b_high)", bf16),
        gpu(f"{CHANNEL_FWD} {CHANNEL_BWD}", "tl.dot(a_high, b_high, tl.dot(a_high, b_low, tl.dot(a_low, b_high)))",
            "tl.dot(a_high, b_high)", bf16),
    ],
    "two pieces of three": [
        tpu(GDN_BWD, "WHOLE = 3", "WHOLE = 2", of_bf16),
        tpu(GDN_BWD, "dot(t, given, axes, scan, WHOLE)", "dot(t, given, axes, scan)", of_bf16),
        tpu(GDN_BWD, 'read_state(k, dend, decay, "decay_to_end", scan, WHOLE)',
            'read_state(k, dend, decay, "decay_to_end", scan)', of_model_bf16),
    ],
    "two passes of three": [
        gpu(f"{GDN_FWD} {GDN_BWD} {KDA_FWD} {KDA_BWD}",
            "tl.dot(a_high, b_high, tl.dot(a_high, b_low, tl.dot(a_low, b_high)))",
            "tl.dot(a_high, b_high, tl.dot(a_high, b_low))", bf16),
        gpu(f"{CHANNEL_FWD} {CHANNEL_BWD}", "tl.dot(a_high, b_high, tl.dot(a_high, b_low, tl.dot(a_low, b_high)))",
            "tl.dot(a_high, b_high, tl.dot(a_high, b_low))", bf16),
    ],
})  # fmt: skip
FAULTS += [loss.fault for loss in LOSSES]

DEFAULT = {
    "gpu-chunk_simple_gla_fwd-one pass of two",
    "gpu-chunk_simple_gla_fwd-float16 scores",
    "gpu-chunk_simple_gla_fwd-float16 state",
    "gpu-chunk_simple_gla_fwd-float16 state in one chunk",
    "gpu-chunk_gla_fwd-float16 state in one head",
    "gpu-fused_recurrent_simple_gla_fwd-float16 decay",
    "gpu-fused_recurrent_simple_gla_bwd-float16 dg",
    "gpu-causal_conv1d-float16 silu in one sequence",
    "gpu-fused_recurrent_gated_delta_rule_fwd-float16 state in one head",
    "gpu-gmm-float16 sums in one step",
    "gpu-gmm_quantized-float16 scales",
    "gpu-tgmm_quantized-float16 sums before the scales",
    "gpu-unpermute-float16 products with weights",
    "tpu-bounded_gate_bwd-float16 sums",
    "tpu-unpermute-float16 output, twice rounded",
}
"""The quickest of each kind; all others are of the full tier."""


def tiered(p):
    """A parameter, of the full tier unless it is among `DEFAULT`."""
    marks = [mark for mark in p.marks if mark.name != "full"]
    return pytest.param(*p.values, id=p.id, marks=marks if p.id in DEFAULT else [*marks, pytest.mark.full])


TIERED = [tiered(p) for p in pairs(FAULTS, OPS)]


def test_the_documents_have_what_is_seen_of_every_loss():
    power = (ROOT / "docs" / "verdicts.md").read_text().partition("## Power")[2].partition("Not seen:")[0]
    documented = [row.split(" | ")[0].removeprefix("| ") for row in power.splitlines() if row.startswith("| ")]
    assert documented == ["planted", *dict.fromkeys(fault.name.removeprefix("float16 ") for fault in FAULTS)]


def test_the_default_tier_has_those_that_it_names():
    assert {p.id for p in TIERED if all(mark.name != "full" for mark in p.marks)} == DEFAULT


@pytest.mark.parametrize(("fault", "op"), TIERED)
def test_a_loss_of_precision_does_not_fit_the_contract(fault, op, tmp_path):
    kernel = getattr(plant(fault, tmp_path), op.name)
    cases = [case for case in op.cases if fault.where(case)]
    fits = {}
    for case in [case for case in cases if case.tier != "full"] or cases:
        fits[case.id] = gates(Trial(op, case, fault.backend, kernel)).fits
        if any(fit.verdict() for fit in fits[case.id].values()):
            return
    pytest.fail(f"not caught by any of {len(fits)} cases: {[str(f) for of in fits.values() for f in of.values()]}")
