"""Losses of precision planted in the kernels: what a contract explains must find them, without integer data or ledger.

`docs/verdicts.md` has what each of them measures.
"""

from collections.abc import Callable

import pytest

from parity.judging.judge import gates
from parity.op import Case
from parity.trial import Trial
from tests.matrix import OPS
from tests.meta.faults.planting import Fault, gpu, named, pairs, plant, smoke, tpu

ROUNDED = {
    ("tpu", "bfloat16"): "jax.lax.reduce_precision({}, 8, 7)",
    ("tpu", "float16"): "jax.lax.reduce_precision({}, 8, 10)",
    ("tpu", "21 bits"): "jax.lax.reduce_precision({}, 8, 20)",
    ("gpu", "bfloat16"): "({}).to(tl.bfloat16).to(tl.float32)",
    ("gpu", "float16"): "({}).to(tl.float16).to(tl.float32)",
    ("torch", "bfloat16"): "({}).bfloat16().float()",
    ("torch", "float16"): "({}).half().float()",
}
CHOICE = {"tpu": "jnp.where({}, {}, {})", "gpu": "tl.where({}, {}, {})"}


def rounds(
    to: str, by: str, ops: str, code: str, value: str, where: Callable[[Case], bool] = smoke, *, only: str = ""
) -> Fault:
    """A fault that rounds `value`, a part of `code`, to a dtype; only: where that is. by: "torch" is a GPU's host."""
    assert code.count(value) == 1, f"{value!r} is not once in {code!r}"
    rounded = ROUNDED[by, to].format(value)
    if only:
        rounded = CHOICE[by].format(only, rounded, value)
    return (tpu if by == "tpu" else gpu)(ops, code, code.replace(value, rounded), where)


def f32(c):
    return c.tier == "smoke" and c.dtype == "float32"


def bf16(c):
    return c.tier == "smoke" and c.dtype == "bfloat16"


def narrow_output(c):
    return c.tier == "smoke" and c.out == "bfloat16"


def fp8(c):
    return c.tier == "smoke" and c.dtype == "float8_e4m3fn" and c.out == "float32"


def layer_bwd(c):
    return c.dtype == "bfloat16" and c.T == 60


SUMS = 'sums = shown("acc", rows, sums)', 'shown("acc", rows, sums)'
GPU_SUMS = (
    "sums = ADDED(sums, a, b, lhs, rhs, region, step, SCALING)",
    "ADDED(sums, a, b, lhs, rhs, region, step, SCALING)",
)
SIMPLE, CHANNEL = "chunk_simple_gla_fwd chunk_simple_gla_bwd", "chunk_gla_fwd chunk_gla_bwd"

FAULTS = named({
    "three passes of six": [
        tpu("gmm tgmm", "lax.Precision.HIGHEST if", "lax.Precision.HIGH if", f32),
        gpu("gmm tgmm", 'tl.dot(a, b, sums, input_precision="ieee")', 'tl.dot(a, b, sums, input_precision="bf16x3")',
            f32),
        tpu("moe_layer_bwd", "precision=lax.Precision.HIGHEST)", "precision=lax.Precision.HIGH)", layer_bwd),
        tpu(SIMPLE, "precision=lax.Precision.HIGHEST)", "precision=lax.Precision.HIGH)", f32),
        gpu(f"{SIMPLE} {CHANNEL}", 'tl.dot(a_pieces, b_pieces, input_precision="ieee")',
            'tl.dot(a_pieces, b_pieces, input_precision="bf16x3")', f32),
    ],
    "TF32": [
        gpu("gmm tgmm", 'tl.dot(a, b, sums, input_precision="ieee")', 'tl.dot(a, b, sums, input_precision="tf32")',
            f32),
    ],
    "one pass of two": [
        gpu(SIMPLE, "tl.dot(a_high, b, tl.dot(a_low, b))", "tl.dot(a_high, b)", bf16),
    ],
    "one pass of three": [
        gpu(CHANNEL, "tl.dot(a_high, b_high, tl.dot(a_high, b_low, tl.dot(a_low, b_high)))", "tl.dot(a_high, b_high)",
            bf16),
    ],
    "two passes of three": [
        gpu(CHANNEL, "tl.dot(a_high, b_high, tl.dot(a_high, b_low, tl.dot(a_low, b_high)))",
            "tl.dot(a_high, b_high, tl.dot(a_high, b_low))", bf16),
    ],
    "float16 sums": [
        rounds("float16", "tpu", "gmm", *SUMS, narrow_output),
        rounds("float16", "gpu", "gmm tgmm", *GPU_SUMS, narrow_output),
        rounds("float16", "gpu", "grouped_gemm", *GPU_SUMS, narrow_output),
        rounds("float16", "gpu", "gmm_quantized tgmm_quantized grouped_dense", "sums += partial", "partial",
               narrow_output),
    ],
    "three bits fewer in one group's sums": [
        rounds("21 bits", "tpu", "gmm", *SUMS, f32, only="visits.group_ids[visit] == 1"),
    ],
    "float16 before the scales": [
        rounds("float16", "gpu", "gmm_quantized", "partial = _dot_of_step(a, b, SCALING.dot)",
               "_dot_of_step(a, b, SCALING.dot)", fp8),
    ],
    "bfloat16 products with weights": [
        rounds("bfloat16", "tpu", "unpermute", *["taken * weights[:, j, None]"] * 2, bf16),
        rounds("bfloat16", "torch", "unpermute", *["taken * weights[:, j, None]"] * 2, bf16),
    ],
    "the output is rounded twice": [
        rounds("float16", "gpu", "gmm_quantized", "result = sums.to(out.dtype.element_ty)", "sums", narrow_output),
        rounds("float16", "tpu", "unpermute", "return _sum_of(rows, weights, slots).astype(rows.dtype)",
               "_sum_of(rows, weights, slots)", bf16),
        rounds("float16", "torch", "unpermute", "return _sum_of(rows, weights, slots).to(rows.dtype)",
               "_sum_of(rows, weights, slots)", bf16),
        rounds("float16", "gpu", "chunk_simple_gla_fwd", "(scale * out).to(o.dtype.element_ty)", "scale * out", bf16),
    ],
    "float16 scores": [
        rounds("float16", "tpu", "chunk_simple_gla_fwd", 'return probe("A", decay.scores(load, scan), 1, 2)',
               "decay.scores(load, scan)", bf16),
        rounds("float16", "gpu", "chunk_simple_gla_fwd chunk_gla_fwd", "out += dot(scores, v_rows, SPLIT)", "scores",
               bf16),
    ],
    "a bfloat16 state in one chunk": [
        gpu("chunk_simple_gla_fwd", "state = next_state(state, k_columns, v_rows, decays.to_end, decays, SPLIT)",
            "state = next_state(state, k_columns, v_rows, decays.to_end, decays, SPLIT)\n"
            "state = tl.where(block == 0, state.to(tl.bfloat16).to(tl.float32), state)", bf16),
    ],
    "a bfloat16 state in one head": [
        gpu("chunk_gla_fwd", "state = next_state(state, k_columns, v_rows, decays.to_end, decays, SPLIT)",
            "state = next_state(state, k_columns, v_rows, decays.to_end, decays, SPLIT)\n"
            "state = tl.where(head == 1, state.to(tl.bfloat16).to(tl.float32), state)", bf16),
    ],
    "a bfloat16 decay": [
        rounds("bfloat16", "gpu", "chunk_simple_gla_fwd",
               "return tl.exp(at_most(coarse + fine, LARGEST_EXPONENT))",
               "tl.exp(at_most(coarse + fine, LARGEST_EXPONENT))", bf16),
        rounds("bfloat16", "gpu", "fused_recurrent_simple_gla_fwd", "lost = (decay - kept).to(tl.float32)",
               "(decay - kept).to(tl.float32)", bf16),
    ],
    "bfloat16 products of a step": [
        rounds("bfloat16", "gpu", "fused_recurrent_simple_gla_fwd", "tl.reshape(q_row[None, :] * state, (",
               "q_row[None, :] * state", bf16),
    ],
})  # fmt: skip

QUICK = ("tpu-unpermute-", "gpu-unpermute-", "gpu-chunk_simple_gla_fwd-", "gpu-fused_recurrent_simple_gla_fwd-")


def tiered(p):
    """A parameter, of the full tier unless its kernel and its golden, which runs often, are quick."""
    return p if p.id.startswith(QUICK) else pytest.param(*p.values, id=p.id, marks=[*p.marks, pytest.mark.full])


@pytest.mark.parametrize(("fault", "op"), [tiered(p) for p in pairs(FAULTS, OPS)])
def test_a_loss_of_precision_does_not_fit_the_contract(fault, op, tmp_path):
    kernel = getattr(plant(fault, tmp_path), op.name)
    fits = {}
    for case in (c for c in op.cases if c.tier != "full" and fault.where(c)):
        fits[case.id] = gates(Trial(op, case, fault.backend, kernel)).fits
        if any(fit.verdict() for fit in fits[case.id].values()):
            return
    pytest.fail(f"not caught by any of {len(fits)} cases: {[str(f) for of in fits.values() for f in of.values()]}")
