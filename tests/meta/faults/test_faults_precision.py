"""Losses of precision planted in the kernels: what a contract explains must find them, without integer data or ledger.

`docs/verdicts.md` has what each of them measures.
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
from tests.meta.faults.planting import Fault, gpu, having, named, pairs, plant, tpu

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
narrow_output = having(tier="smoke", out="bfloat16")
fp8 = having(tier="smoke", dtype="float8_e4m3fn", out="float32")
layer = having(dtype="float32", data="normal")
layer_bwd = having(dtype="bfloat16", T=60)


def gamma(c):
    return c.gates == "gamma" and c.dtype == "float32" and c.h0


SIMPLE_FWD, SIMPLE_BWD = "chunk_simple_gla_fwd", "chunk_simple_gla_bwd"
CHANNEL_FWD, CHANNEL_BWD = "chunk_gla_fwd", "chunk_gla_bwd"
FWD, BWD = f"{SIMPLE_FWD} {CHANNEL_FWD}", f"{SIMPLE_BWD} {CHANNEL_BWD}"
STEPS_FWD = "fused_recurrent_simple_gla_fwd fused_recurrent_gla_fwd"
STEPS_BWD = "fused_recurrent_simple_gla_bwd fused_recurrent_gla_bwd"
GPU_SUMS = "sums = «ADDED(sums, a, b, lhs, rhs, region, step, SCALING)»"
GPU_STATE = "return «decays.kept * state + (decays.lost * state + update)»"
TPU_STATE = (
    'return «decayed(state, decay, dot(load("v"), f32(load("k")) * decay.decay_to_end(scan.p.k), (0, 0), scan))»'
)

LOSSES = [
    # sums, all of them or of one step, visit, group
    Loss("sums", "tpu", "gmm", 'sums = «shown("acc", rows, sums)»', narrow_output),
    Loss("sums", "tpu", "tgmm", "acc[rows, columns] = «before + sums»", narrow_output),
    Loss("sums", "tpu", "gmm_quantized grouped_gemm",
         "return sums if total is None else «total + sums»", narrow_output),
    Loss("sums", "tpu", "tgmm_quantized grouped_dense_bwd",
         "before = jnp.where(first & (inner.start == 0), zero, «self.acc[rows, columns]»)", narrow_output),
    Loss("sums", "gpu", "gmm tgmm", GPU_SUMS, narrow_output),
    Loss("sums", "gpu", "grouped_gemm", GPU_SUMS, narrow_output),
    Loss("sums", "gpu", "gmm_quantized tgmm_quantized grouped_dense grouped_dense_bwd",
         "sums += «partial»", narrow_output),
    Loss("sums in one group", "tpu", "gmm", 'sums = «shown("acc", rows, sums)»', f32, "visits.group_ids[visit] == 1",
         "21 bits"),
    Loss("sums in one step", "tpu", "gmm", 'sums = «shown("acc", rows, sums)»', f32, "step == 1"),
    Loss("sums in one visit", "tpu", "gmm", 'sums = «shown("acc", rows, sums)»', f32, "visit == 2"),
    Loss("sums in one visit", "tpu", "tgmm", "acc[rows, columns] = «before + sums»", f32, "visit == 2"),
    Loss("sums in one step", "gpu", "gmm tgmm", GPU_SUMS, f32, "step == first + DEPTH"),
    Loss("sums in one group", "gpu", "gmm tgmm", GPU_SUMS, f32, "region.group == 1"),
    Loss("sums in one step", "gpu", "gmm_quantized", GPU_SUMS, fp8, "step == first + DEPTH"),
    Loss("partial sums", "tpu", "gmm", 'sums = «shown("partial", rows, sums)»', narrow_output),
    # scales
    Loss("sums before the scales", "gpu", "gmm_quantized tgmm_quantized",
         "partial = «_dot_of_step(a, b, SCALING.dot)»", fp8),
    Loss("sums before the scales", "tpu", "tgmm_quantized",
         "sums = «multiply(lhs[inner, rows], rhs[inner, columns], contract=(0, 0))»", fp8),
    Loss("sums before the scales", "tpu", "gmm_quantized",
         "sums = multiply(weights, x, contract[::-1]) if self.plan.transposed else «multiply(x, weights, contract)»",
         fp8),
    Loss("scales", "gpu", "gmm_quantized tgmm_quantized",
         "partial *= «tl.load(scales, mask=region.in_rows, other=0)»", fp8),
    Loss("scales", "tpu", "gmm_quantized", "else «scales.lhs[part, rows, :]»", fp8),
    Loss("scales", "tpu", "tgmm_quantized",
         "column = «as_columns(self.row_of_part(self.parts.lhs, first_row + inner.start, rows))»", fp8),
    # products, weights, and the output
    Loss("products with weights", "tpu", "unpermute", "else «taken * weights[:, j, None]»", bf16),
    Loss("products with weights", "torch", "unpermute", "else «taken * weights[:, j, None]»", bf16),
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
         "return «_sum_of(rows, weights, slots)».astype(rows.dtype)", bf16),
    Loss("output, twice rounded", "torch", "unpermute",
         "return «_sum_of(rows, weights, slots)».to(rows.dtype)", bf16),
    Loss("output, twice rounded", "gpu", SIMPLE_FWD, "store_tile(o, «scale * out», row", bf16),
    Loss("output, twice rounded", "tpu", f"{FWD} {BWD}",
         "ref[:, self.rows(i), :] = «x».astype(ref.dtype)", bf16),
    # the layer
    Loss("silu", "tpu", "moe_layer", "hidden = (weights * «jax.nn.silu(gate.astype(jnp.float32))» * up", layer),
    Loss("silu", "torch", "moe_layer", "(weights * «_silu(gate.float())» * up.float())", layer),
    Loss("weights", "tpu", "moe_layer", "hidden = («weights» * jax.nn.silu", layer),
    Loss("weights", "torch", "moe_layer", "(«weights» * _silu(gate.float()) * up.float())", layer),
    Loss("gradient of weights", "torch", "moe_layer_bwd",
         'dweights = «probe("dweights", (dhidden * silu * up).sum(1, keepdim=True))»', layer_bwd),
    # chunked scans
    Loss("scores", "tpu", FWD, 'return probe("A", «decay.scores(load, scan)», 1, 2)', bf16),
    Loss("scores", "gpu", FWD, "out += dot(«scores», v_rows, SPLIT)", bf16),
    Loss("scores", "gpu", BWD, "dv_tile += dot(«scores_t», do_rows, SPLIT)", bf16),
    Loss("state", "tpu", f"{FWD} {BWD}", TPU_STATE, bf16),
    Loss("state", "gpu", f"{FWD} {BWD}", GPU_STATE, bf16),
    Loss("state in one chunk", "tpu", FWD,
         'state[...] = probe("state", «_next_state(load, state[...], decay, scan)»)', f32, "i == 0"),
    Loss("state in one chunk", "gpu", FWD,
         "state = «next_state(state, k_columns, v_rows, decays.to_end, decays, SPLIT)»", bf16, "block == 0"),
    Loss("state in one head", "tpu", CHANNEL_FWD, TPU_STATE, f32,
         "jax.lax.broadcasted_iota(jnp.int32, state.shape, 0) == 1"),
    Loss("state in one head", "gpu", CHANNEL_FWD,
         "state = «next_state(state, k_columns, v_rows, decays.to_end, decays, SPLIT)»", bf16, "head == 1"),
    Loss("gradient of the state", "tpu", BWD,
         'return «decayed(dstate, decay, dot(load("do"), weighted, (0, 0), scan))»', bf16),
    Loss("decay", "tpu", SIMPLE_FWD, "return «finite_exp(jnp.where(i >= j, sums, -jnp.inf))»", bf16),
    Loss("decay", "tpu", CHANNEL_FWD, "self.halves.append(«finite_exp(jnp.where(second, until, after))»)", bf16),
    Loss("decay", "gpu", FWD, "return «tl.exp(at_most(coarse + fine, LARGEST_EXPONENT))»", bf16),
    Loss("decay of float64", "gpu", SIMPLE_FWD,
         "result = «tl.exp(at_most(coarse.to(tl.float64) + fine, LARGEST_EXPONENT)).to(tl.float32)»", f32),
    Loss("dA", "tpu", SIMPLE_BWD, 'dproducts = «dot(load("v"), load("do"), (1, 1), scan)»', bf16),
    Loss("dA", "tpu", CHANNEL_BWD, 'dpairs = «probe("dA", scan.p.scale * jnp.where(i < j, *dscores), 1, 2)»', bf16),
    Loss("dA", "gpu", BWD, "«products.to(tl.float32)»\n    products_t", bf16),
    Loss("dg", "tpu", SIMPLE_BWD, "jnp.sum(jnp.where(row < column, «sums + to_state», from_state)", bf16),
    Loss("dg", "tpu", CHANNEL_BWD, 'read = probe("dgate", dot(ones(i >= j, scan), «q * dq», (1, 0), scan), 1)', bf16),
    Loss("dg", "gpu", SIMPLE_BWD, "pairs = dot(is_before, «pairs_t», SPLIT)", bf16),
    Loss("dg", "gpu", CHANNEL_BWD, "dgate = sums_from(«q_columns * dq - k_columns * dk»)", bf16),
    Loss("dg_gamma", "tpu", SIMPLE_BWD, "return «steps».sum((0, 1))", gamma),
    Loss("dg_gamma", "torch", SIMPLE_BWD, "«step».sum((0, 1), dtype=torch.float64)", gamma),
    # steps
    Loss("decay", "tpu", f"{STEPS_FWD} {STEPS_BWD}", "left + («rest * state» + (kept + rest) * residue)", bf16),
    Loss("decay", "gpu", f"{STEPS_FWD} {STEPS_BWD}", "lost = «(decay - kept).to(tl.float32)»", bf16),
    Loss("state that is read", "tpu", STEPS_FWD, "fold_lanes(«after» * refs", bf16),
    Loss("products of a step", "tpu", STEPS_FWD, 'fold_lanes(«after * refs["q_rows"][pl.ds(n, 1), :]»)', bf16),
    Loss("products of a step", "gpu", STEPS_FWD, "tl.reshape(«q_row[None, :] * state», (", bf16),
    Loss("state", "gpu", f"{STEPS_FWD} {STEPS_BWD}", "result = «base + change»", bf16),
    Loss("dk", "tpu", STEPS_BWD, "dk[row, :] += sum_rows(«column_of(v, n) * pair[0]»)", bf16),
    Loss("dk", "gpu", STEPS_BWD, "dk_row = sum_over_values(«dstate * v_row[None, :]»)", bf16),
    Loss("dg", "tpu", STEPS_BWD, 'sum_rows(«pair[0] * refs["decayed"][rows.start + n, slab, :]»)', bf16),
    Loss("dg", "gpu", STEPS_BWD, "dgate_row = sum_over_values(«dstate * ((kept + lost) * before)»)", bf16),
]  # fmt: skip

FAULTS = named({
    "three passes of six": [
        tpu("gmm tgmm", "lax.Precision.HIGHEST if", "lax.Precision.HIGH if", f32),
        gpu("gmm tgmm", 'tl.dot(a, b, sums, input_precision="ieee")', 'tl.dot(a, b, sums, input_precision="bf16x3")',
            f32),
        tpu("moe_layer_bwd", "precision=lax.Precision.HIGHEST)", "precision=lax.Precision.HIGH)", layer_bwd),
        tpu("moe_layer", "precision=lax.Precision.HIGHEST)", "precision=lax.Precision.HIGH)", layer),
        tpu(f"{FWD} {BWD}", "precision=lax.Precision.HIGHEST)", "precision=lax.Precision.HIGH)", f32),
        gpu(f"{FWD} {BWD}", 'tl.dot(a_pieces, b_pieces, input_precision="ieee")',
            'tl.dot(a_pieces, b_pieces, input_precision="bf16x3")', f32),
    ],
    "TF32": [
        gpu("gmm tgmm", 'tl.dot(a, b, sums, input_precision="ieee")', 'tl.dot(a, b, sums, input_precision="tf32")',
            f32),
    ],
    "one pass of two": [
        gpu(f"{SIMPLE_FWD} {SIMPLE_BWD}", "tl.dot(a_high, b, tl.dot(a_low, b))", "tl.dot(a_high, b)", bf16),
        tpu(f"{FWD} {BWD}", "if m + n < 2]", "if m + n < 1]", bf16),
    ],
    "one pass of three": [
        gpu(f"{CHANNEL_FWD} {CHANNEL_BWD}", "tl.dot(a_high, b_high, tl.dot(a_high, b_low, tl.dot(a_low, b_high)))",
            "tl.dot(a_high, b_high)", bf16),
    ],
    "two passes of three": [
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
    "gpu-gmm-float16 sums in one step",
    "gpu-gmm_quantized-float16 scales",
    "gpu-tgmm_quantized-float16 sums before the scales",
    "gpu-unpermute-float16 products with weights",
    "tpu-unpermute-float16 output, twice rounded",
}
"""The quickest of each kind; all others are of the full tier."""


def tiered(p):
    """A parameter, of the full tier unless it is among `DEFAULT`."""
    marks = [mark for mark in p.marks if mark.name != "full"]
    return pytest.param(*p.values, id=p.id, marks=marks if p.id in DEFAULT else [*marks, pytest.mark.full])


TIERED = [tiered(p) for p in pairs(FAULTS, OPS)]


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
