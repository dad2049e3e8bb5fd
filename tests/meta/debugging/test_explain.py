"""Explanations: losses of precision planted in the real kernels are named, faults of logic are not taken for one."""

import re
from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
import pytest

from parity import matrix
from parity.cli import main
from parity.debugging.contrasts import contrast, likeness, spelled
from parity.debugging.explain import explain
from parity.debugging.roundings import (
    DOT,
    PASSES,
    Emulator,
    Field,
    Rounding,
    attribute,
    in_three_passes,
    one_more,
    rounded,
)
from parity.debugging.sketches import explain_record
from parity.inputs import hashes
from parity.judging.judge import judge
from parity.judging.reference import reference
from parity.ledger.book import Book
from parity.op import Array, Case, Contract, Op
from parity.trial import Trial
from tests.matrix import OPS
from tests.meta.faults.planting import Edit, edited, places, with_sources
from tests.meta.faults.planting import plant as plant_fault
from tests.meta.faults.test_faults import FAULTS
from tests.meta.faults.test_faults_gla import FAULTS as FAULTS_GLA
from tests.meta.faults.test_faults_quantized import FAULTS as FAULTS_QUANTIZED
from tests.support.interpreter import INTERPRETED

OP = {op.name: op for op in OPS}


@dataclass(frozen=True)
class Loss:
    """Every `old` of `edits` becomes its `new` in the op's code: these roundings are then its error, and no others.

    `sites` as "dtype at site", the output's own dtype left out.
    """

    name: str
    backend: str
    op: str
    edits: dict[str, str]
    sites: set[str]
    where: Callable[[Case], bool]
    tier: str = "full"


def f32(c):
    return c.tier == "smoke" and c.dtype == c.out == "float32"


def bf16(c):
    return c.tier == "smoke" and c.dtype == c.out == "bfloat16"


def fp8(c):
    return c.tier == "smoke" and c.dtype == "float8_e4m3fn" and c.out == "float32"


def plant(loss, folder):
    """The op with the loss in it."""
    target = getattr(OP[loss.op], loss.backend)
    found = [Edit(place, old, new) for old, new in loss.edits.items() for place in places(target, old)]
    assert {edit.old for edit in found} == loss.edits.keys(), f"{loss.edits} must occur in what {target} reaches"
    return getattr(with_sources(edited(found), loss.backend, [loss.op], folder), loss.op)


def jnp_rounded(x, bits=7):
    """The JAX expression x, rounded to a mantissa of so many bits."""
    return f"jax.lax.reduce_precision({x}, 8, {bits})"


TL_BF16 = ".to(tl.bfloat16).to(tl.float32)"


def in_gmm(name, backend, old, new, sites, where=f32, ops=("gmm", "tgmm"), default=()):
    tiers = {op: "default" if op in default else "full" for op in ops}
    return [Loss(name, backend, op, {old: new}, sites, where, tiers[op]) for op in ops]


def in_quantized(name, backend, old, new, sites, op="gmm", tier="full"):
    return [Loss(name, backend, f"{op}_quantized", {old: new}, sites, fp8, tier)]


def in_gla(name, backend, op, old, new, sites, where=f32, tier="full", also=()):
    return [Loss(name, backend, op, {old: new, **dict(also)}, sites, where, tier)]


def load_of(name, bits=7):
    """How the TPU's chunked kernels load rows, and that with the tensor of that name rounded."""
    old = "        x = jnp.stack([of_head[rows] for of_head in ref]) if isinstance(ref, tuple) else ref[:, rows, :]\n"
    return old, f'{old}        x = {jnp_rounded("x", bits)} if name == "{name}" else x\n'


SIMPLE, BACKWARD, CHANNELS = "chunk_simple_gla_fwd", "chunk_simple_gla_bwd", "chunk_gla_fwd"
STEPS, STEPS_BACKWARD = "fused_recurrent_simple_gla_fwd", "fused_recurrent_simple_gla_bwd"

HIGHEST = "precision = lax.Precision.HIGHEST if"
TPU_DOT = "    return lax.dot_general(a, b, axes, precision"
IEEE = 'tl.dot(a, b, sums, input_precision="ieee")'
WHOLE_PIECES = "pieces = pieces if scan.split else WHOLE"
PIECES = 'pieces = tl.dot(a_pieces, b_pieces, input_precision="ieee")'
TPU_EXP = "jnp.exp(jnp.minimum(x, WHOLE_EXPONENT))"
GPU_EXP = "tl.exp(at_most(coarse.to(tl.float64) + fine, LARGEST_EXPONENT)).to(tl.float32)"
LAST_SUMS = "last = hi[:, :, c - 1 : c]"
TPU_NEXT_STATE = "_next_state(load, state[...], decay, scan)"
TPU_PREVIOUS_DSTATE = "_previous_dstate(load, dstate[...], decay, scan)"
NEXT_STATE = "state = next_state(state, k_columns, v_rows, decays.to_end, decays, SPLIT)"
NEXT_DSTATE = "dstate = next_state(dstate, q_columns, do_rows, decays.from_start * scale, decays, SPLIT)"
TPU_SCALE, GPU_SCALE = (
    "row_of(self.operands.lhs_scale, i, some)",
    "partial *= tl.load(scales, mask=region.in_rows, other=0)",
)
GPU_COLUMN_SCALE = "partial *= tl.load(scales, mask=region.in_columns, other=0)"
WIDE_SUMS = "sums.astype(jnp.float32)"
SCALED = f"    sums = {WIDE_SUMS}\n    if columns"
GPU_RESIDUE = "return result, (base - (result - added)) + (change - added)"
V_ROWS = "v_rows = load_tile(inputs.v, row[:, None], value, rows, layout.v)"
TPU_SUM = "total, left + change"
TPU_STEP = f"    return ordered_two_sum({TPU_SUM})\n"

LOSSES = [
    # dots: passes, operands, sums
    *in_gmm("one pass", "tpu", HIGHEST, "precision = lax.Precision.DEFAULT if", {"bfloat16 at lhs", "bfloat16 at rhs"}),
    *in_gmm("a pass fewer", "tpu", HIGHEST, "precision = lax.Precision.HIGH if", {"bf16x3 cut at dot"},
            default=["gmm"]),
    *in_gmm("lhs in bf16", "tpu", TPU_DOT, f"    a = {jnp_rounded('a')}\n{TPU_DOT}", {"bfloat16 at lhs"}),
    *in_gmm("rhs in tf32", "tpu", TPU_DOT, f"    b = {jnp_rounded('b', 10)}\n{TPU_DOT}", {"tf32 at rhs"}),
    *in_gmm("tf32", "gpu", IEEE, IEEE.replace("ieee", "tf32"), {"tf32 cut at lhs", "tf32 cut at rhs"}),
    *in_gmm("lhs in bf16", "gpu", IEEE, IEEE.replace("(a, b,", "(a.to(tl.bfloat16).to(a.dtype), b,"),
            {"bfloat16 at lhs"}),
    *in_gmm("sums in bf16", "gpu", IEEE, IEEE + TL_BF16, {"bfloat16 at acc"}),
    # tiles of rows that do not begin where groups do
    *in_gmm("sums in bf16", "tpu", "acc[rows, columns] = before + sums",
            f"acc[rows, columns] = {jnp_rounded('before + sums')}", {"bfloat16 at acc"}, f32, ["tgmm"]),
    *in_gmm("a tile's sum in bf16", "tpu", "acc[rows, columns] = before + sums",
            f"acc[rows, columns] = before + {jnp_rounded('sums')}", {"bfloat16 at partial"}, ops=["tgmm"]),
    *in_gmm("rounded twice", "tpu", "result = sums.astype(out.dtype)",
            f"result = {jnp_rounded('sums', 10)}.astype(out.dtype)", {"tf32 at out"}, bf16, ["gmm"], ["gmm"]),
    *in_gmm("rounded twice", "tpu", "out[...] = total.astype(out.dtype)",
            f"out[...] = {jnp_rounded('total', 10)}.astype(out.dtype)", {"tf32 at out"}, bf16, ["tgmm"]),
    # scales
    *in_quantized("lhs_scale in bf16", "tpu", TPU_SCALE, jnp_rounded(TPU_SCALE), {"bfloat16 at lhs_scale"}),
    *in_quantized("lhs_scale in bf16", "gpu", GPU_SCALE, GPU_SCALE + TL_BF16, {"bfloat16 at lhs_scale"}),
    *in_quantized("rhs_scale in bf16", "tpu", "over_rows(row, sums", f"over_rows({jnp_rounded('row')}, sums",
                  {"bfloat16 at rhs_scale"}, "tgmm"),
    *in_quantized("rhs_scale in bf16", "gpu", GPU_COLUMN_SCALE, GPU_COLUMN_SCALE + TL_BF16,
                  {"bfloat16 at rhs_scale"}, "tgmm"),
    *in_quantized("a block's sum and the whole in bf16", "tpu", SCALED,
                  SCALED.replace(WIDE_SUMS, jnp_rounded(WIDE_SUMS)), {"bfloat16 at inner", "bfloat16 at out"}),
    *in_quantized("a block's sum in bf16", "gpu", "partial = _dot_of_step(a, b, DOT)",
                  f"partial = _dot_of_step(a, b, DOT){TL_BF16}",
                  {"bfloat16 at inner"}),
    *in_quantized("the sum of blocks in bf16", "tpu", "else total + sums", f"else {jnp_rounded('total + sums')}",
                  {"bfloat16 at acc"}),
    *in_quantized("the sum of blocks in bf16", "gpu", "sums += partial",
                  f"sums = (sums + partial){TL_BF16}", {"bfloat16 at acc"}, "tgmm"),
    # gated linear attention: states, scores, gates, operands, dots
    *in_gla("state in bf16", "tpu", SIMPLE, TPU_NEXT_STATE, jnp_rounded(TPU_NEXT_STATE), {"bfloat16 at state"},
            tier="default"),
    *in_gla("state in bf16", "gpu", CHANNELS, NEXT_STATE, NEXT_STATE + TL_BF16, {"bfloat16 at state"}),
    *in_gla("state in bf16", "tpu", CHANNELS, TPU_NEXT_STATE, jnp_rounded(TPU_NEXT_STATE), {"bfloat16 at state"}),
    *in_gla("P in bf16", "tpu", SIMPLE, "decay.scores(load, scan)", jnp_rounded("decay.scores(load, scan)"),
            {"bfloat16 at A"}),
    *in_gla("P in bf16", "gpu", SIMPLE, "dot(scores, v_rows, SPLIT)", f"dot(scores{TL_BF16}, v_rows, SPLIT)",
            {"bfloat16 at A"}, tier="default"),
    *in_gla("P in bf16", "gpu", CHANNELS, "dot(scores, v_rows, SPLIT)", f"dot(scores{TL_BF16}, v_rows, SPLIT)",
            {"bfloat16 at A"}),
    *in_gla("cumsum in bf16", "tpu", SIMPLE, LAST_SUMS,
            f"hi, lo = {jnp_rounded('hi + lo')}, jnp.zeros_like(lo)\n    {LAST_SUMS}", {"bfloat16 at c"}),
    *in_gla("cumsum in bf16", "gpu", SIMPLE, "    return coarse, fine\n\n\n@triton.jit\ndef decay(",
            f"    return (coarse + fine){TL_BF16}, fine * 0\n\n\n@triton.jit\ndef decay(", {"bfloat16 at c"}),
    *in_gla("exp of a bf16", "tpu", SIMPLE, TPU_EXP, f"jnp.exp({jnp_rounded('jnp.minimum(x, WHOLE_EXPONENT)')})",
            {"bfloat16 at exponent"}),
    *in_gla("exp of a bf16", "gpu", SIMPLE, GPU_EXP, f"tl.exp(at_most((coarse + fine){TL_BF16}, LARGEST_EXPONENT))",
            {"bfloat16 at exponent"}),
    *in_gla("exp to 2^-12", "tpu", SIMPLE, TPU_EXP, jnp_rounded(TPU_EXP, 10), {"tf32 at decay"}),
    *in_gla("exp to 2^-9", "gpu", SIMPLE, GPU_EXP, GPU_EXP.replace(".to(tl.float32)", TL_BF16), {"bfloat16 at decay"}),
    *in_gla("the state's decay in bf16", "gpu", SIMPLE, "(whole - kept).to(tl.float32)", f"(whole - kept){TL_BF16}",
            {"bfloat16 at kept"}),
    *in_gla("q in bf16", "tpu", SIMPLE, *load_of("q"), {"bfloat16 at q"}),
    *in_gla("k in bf16", "tpu", CHANNELS, *load_of("k"), {"bfloat16 at k"}),
    *in_gla("v in tf32", "tpu", SIMPLE, *load_of("v", 10), {"tf32 at v"}),
    *in_gla("v in bf16", "gpu", CHANNELS, V_ROWS, f"{V_ROWS}.to(tl.bfloat16).to(inputs.v.dtype.element_ty)",
            {"bfloat16 at v"}),
    *in_gla("a pass fewer", "tpu", SIMPLE, WHOLE_PIECES, "pieces = 2", {"bf16x3 at dot"},
            also=[("if contract == (1, 1) and", "if False and")]),  # there all four products of two pieces are added
    *in_gla("one pass", "tpu", SIMPLE, WHOLE_PIECES, "pieces = 1", {"bfloat16 at lhs", "bfloat16 at rhs"}),
    *in_gla("tf32", "gpu", SIMPLE, 'input_precision="ieee"', 'input_precision="tf32"',
            {"tf32 cut at lhs", "tf32 cut at rhs"}),
    *in_gla("partial sums in bf16", "gpu", SIMPLE, PIECES, f"{PIECES}.to(tl.bfloat16)", {"bfloat16 at partial"}),
    *in_gla("sums in bf16", "gpu", SIMPLE, "axis=0).to(tl.float32)\n", f"axis=0){TL_BF16}\n", {"bfloat16 at acc"}),
    *in_gla("rounded twice", "gpu", SIMPLE, "store_tile(o, scale * out,", "store_tile(o, (scale * out).to(tl.float16),",
            {"tf32 at out"}, bf16),
    *in_gla("dS in bf16", "tpu", BACKWARD, TPU_PREVIOUS_DSTATE, jnp_rounded(TPU_PREVIOUS_DSTATE),
            {"bfloat16 at dstate"}),
    *in_gla("dS in bf16", "gpu", BACKWARD, NEXT_DSTATE, NEXT_DSTATE + TL_BF16, {"bfloat16 at dstate"}),
    *in_gla("do in bf16", "tpu", BACKWARD, *load_of("do"), {"bfloat16 at do"}),
    # … step by step
    *in_gla("state in bf16", "gpu", STEPS, f"    {GPU_RESIDUE}",
            f"    narrow = result{TL_BF16}\n    {GPU_RESIDUE.replace('result, ', 'narrow, (result - narrow) + ')}",
            {"bfloat16 at state"}, tier="default"),
    *in_gla("state in bf16, and with it the one it begins with", "tpu", STEPS, TPU_STEP,
            f"    state, lost = ordered_two_sum({TPU_SUM})\n    return {jnp_rounded('state')}, "
            f"lost + (state - {jnp_rounded('state')})\n",
            {"bfloat16 at state", "bfloat16 at initial_state"},
            also=[("if given is None else given[...]", f"if given is None else {jnp_rounded('given[...]')}")]),
    *in_gla("the state's decay in bf16", "tpu", STEPS_BACKWARD, "    kept, rest = decay\n",
            f"    kept, rest = decay\n    rest = {jnp_rounded('rest')}\n", {"bfloat16 at kept"}),
]  # fmt: skip


def marks(backend, tier):
    return [getattr(pytest.mark, backend), *([pytest.mark.full] if tier == "full" else [])]


@pytest.mark.parametrize(
    "loss",
    [
        pytest.param(loss, id=f"{loss.backend}-{loss.op}-{loss.name}", marks=marks(loss.backend, loss.tier))
        for loss in LOSSES
    ],
)
def test_a_loss_of_precision_is_named(loss, tmp_path):
    op = OP[loss.op]
    case = next(case for case in op.cases if loss.where(case))
    found = explain(Trial(op, case, loss.backend, plant(loss, tmp_path)))
    named = {f"{r.dtype} at {r.site}" for r in found.attribution.roundings}
    assert (found.kind, named - {f"{case.out} at out"}) == ("rounding", loss.sites), found.conclusion
    assert found.attribution.explained > 0.98


REGIONS = {
    ("tpu", "gmm", "the last tile is never visited"): "in group 5",
    ("gpu", "tgmm", "the last tile is never visited"): "in group 0-1",  # those shorter than a step: nothing is left
    ("tpu", "gmm", "a partial K tile is dropped"): "everywhere: what lhs adds in K block 1 is missing",
    ("gpu", "gmm", "a partial K tile is dropped"): "everywhere",  # 8 products, of the 72 of a block
    ("tpu", "tgmm", "an empty group is left unwritten"): "in group 3",
    ("gpu", "tgmm", "an empty group is left unwritten"): "in group 3",
    ("tpu", "gmm", "inactive rows are not zeroed"): "in group none",
    ("gpu", "gmm", "inactive rows are not zeroed"): "in group none",
    ("tpu", "gmm", "a group boundary inside a tile is off by one"): "in expert boundary last row",
    ("tpu", "gmm", "two groups are swapped"): "in group 0-1",
    ("gpu", "gmm", "two groups are swapped"): "in group 0-1",
    ("tpu", "tgmm", "two groups are swapped"): "in group 0-1",
    ("gpu", "tgmm", "two groups are swapped"): "in group 0-1",
    ("tpu", SIMPLE, "the mask comes after exp"): "in step of the chunk 0-8",  # beyond them too little has decayed
    ("gpu", SIMPLE, "the mask comes after exp"): "in step of the chunk 0-8",
    ("tpu", BACKWARD, "the final state is missing from dg"): "in sequence 1",  # whose final state counts most
    ("gpu", BACKWARD, "the final state is missing from dg"): "in sequence 1",
    ("tpu", BACKWARD, "the scan back is off by one chunk"): "in sequence boundary first step",
    ("tpu", SIMPLE, "every sequence starts from the first one's state"): "in sequence 1",
    ("gpu", SIMPLE, "every sequence starts from the first one's state"): "in sequence 1",
    ("tpu", SIMPLE, "an empty sequence's final state is not written"): "in sequence 0, 3",
    ("tpu", "gmm_quantized", "the K tail is dropped"): "everywhere: what lhs adds in K block 1 is missing",
}
"""Where some of the faults are; of the others it is not said here."""
NO_LOGIC = ("bfloat16", "rounded", "in float32", "block_size", "not masked")
"""Precision; and what reads beyond a tensor, where there may be anything."""
IN_DEFAULT = [("tpu", "gmm", "a partial K tile is dropped")]

LOGIC = [
    pytest.param(
        fault, name, id=f"{fault.backend}-{name}-{fault.name}", marks=[*INTERPRETED[fault.backend], *tier],
    )
    for fault in (*FAULTS, *FAULTS_GLA, *FAULTS_QUANTIZED)
    for name in fault.ops
    if not OP[name].bit_exact and not any(words in fault.name for words in NO_LOGIC)
    for tier in ([] if (fault.backend, name, fault.name) in IN_DEFAULT else [pytest.mark.full],)
]  # fmt: skip


@pytest.mark.parametrize(("fault", "name"), LOGIC)
def test_a_fault_of_logic_is_not_taken_for_a_rounding(fault, name, tmp_path):
    op, kernel = OP[name], getattr(plant_fault(fault, tmp_path), name)
    cases = (case for case in op.cases if case.tier != "full" and fault.where(case))
    cases = cases if fault.data is None else (case.with_data(fault.data) for case in cases)
    case = next(case for case in cases if not judge(Trial(op, case, fault.backend, kernel)).verdict.passed)
    found = explain(Trial(op, case, fault.backend, kernel))
    kind, said = "logic", "not explained by rounding: a logic fault"
    if fault.name == "the mask comes after exp":  # which overflows in float32, and not in float64
        kind, said = "overflow", "not finite"
    assert found.kind == kind, found.conclusion
    region = REGIONS.get((fault.backend, name, fault.name), "")
    assert found.conclusion.startswith(f"{said} {region}"), found.conclusion


def test_there_are_enough_of_both():
    assert len(LOSSES) >= 40 and len({loss.op for loss in LOSSES}) >= 8
    assert {loss.backend for loss in LOSSES} == {"tpu", "gpu"}
    assert len(LOGIC) >= 40
    assert len(REGIONS.keys() & {(p.values[0].backend, p.values[1], p.values[0].name) for p in LOGIC}) == len(REGIONS)


SMALL = "gmm-M150_K120_N96_G6-f32-tiling64x128x128-zipf-s0"


def field_of(op, case, roundings, factor=1.0):
    """The field of a kernel that makes these roundings of the golden, its error `factor` times as large."""
    expected = reference(op, case)
    emulated = Emulator(Trial(op, case, "gpu"), "out", lambda emulations: None).run(roundings)["out"]
    y = expected.golden["out"] + factor * (emulated - expected.golden["out"])
    return Field.of(y.astype(np.float32), expected, "out")


def test_the_smallest_set_is_found_jointly_and_by_its_signs():
    op, case = matrix.find(OPS, SMALL)
    both = Rounding("lhs", "bfloat16"), Rounding("rhs", "bfloat16 cut")
    found = attribute(Trial(op, case, "gpu"), "out", {"out": field_of(op, case, both)})
    assert set(found.roundings) == set(both)
    assert found.explained > 0.999 and found.steps[0] < 0.9 and found.steps[1] == found.explained
    # As large and in the same places, but of the other sign: no rounding's.
    turned = attribute(Trial(op, case, "gpu"), "out", {"out": field_of(op, case, both, factor=-1.0)})
    assert turned.roundings == () and turned.explained == 0
    # What explains less than 2 % is not named.
    little = *both[:1], Rounding("rhs", "tf32")
    assert attribute(Trial(op, case, "gpu"), "out", {"out": field_of(op, case, little)}).roundings == both[:1]


def test_the_bins_that_carry_the_error_are_named():
    errors = np.ones((4, 6))
    errors[[0, 1, 3], :2] = 3.0
    rows, columns = np.arange(4)[:, None], np.where(np.arange(6) < 2, "left", "right")
    by_column, by_row = contrast(errors, {"rows": rows, "columns": columns, "all": np.zeros((1, 1), int)})
    assert (by_column.axis, by_column.bin, by_column.share) == ("columns", "left", 56 / 72)
    assert by_column.contrast == pytest.approx(np.sqrt((56 / 8) / (16 / 16)))
    assert (by_row.axis, by_row.bin) == ("rows", "0-1, 3")
    assert by_row.contrast == pytest.approx(np.sqrt((66 / 18) / (6 / 6)))
    assert contrast(np.zeros((4, 6)), {"rows": rows}) == ()
    errors[:] = np.where(rows == 2, np.inf, 0)
    (only,) = contrast(errors, {"rows": rows})
    assert (only.bin, only.contrast, only.share) == ("2", float("inf"), 1.0)
    assert spelled(np.array([4, 1, 2, 3, 7])) == "1-4, 7"
    assert spelled(np.array(["first", "1", "0"])) == "0-1, first"


def test_what_a_wrong_output_is_instead_is_said():
    golden = np.random.default_rng(0).normal(size=(4, 6, 6))
    heads = {"head": np.arange(4)[:, None, None]}
    assert likeness(golden[[0, 2, 1, 3]], golden, heads) == "head 1 has the golden of 2; head 2 has the golden of 1"
    scaled = golden * np.array([1, 2, 2, 0])[:, None, None]
    assert likeness(scaled, golden, heads) == "head 1-2 is 2 times the golden; head 3 is 0"
    assert likeness(-golden, golden, heads) == "it is -1 times the golden"
    assert likeness(golden.swapaxes(1, 2), golden, heads) == "it is the golden, transposed"
    rows = np.random.default_rng(1).normal(size=(20, 3))
    assert likeness(np.roll(rows, 1, axis=0), rows, {}) == "each element along axis 0 is the golden's one before"
    assert likeness(golden + np.eye(6), golden, heads) == ""


@pytest.mark.full
def test_a_rounding_at_one_visit_of_a_site_is_named():
    """The second of the steps of 64 along K alone, which is the fourth of 32."""
    op, case = matrix.find(OPS, "gmm-M300_K200_N160_G6-f32-tiling64x128x128-zipf-s0")
    trial = Trial(op, case, "gpu")
    once = (Rounding("acc", "float16", 64, 1),)
    fields = {"out": field_of(op, case, once)}
    found = attribute(trial, "out", fields, at_visits=True)
    assert found.explained > 0.99 and [(r.site, r.depth * (r.visit + 1)) for r in found.roundings] == [("acc", 128)]
    assert attribute(trial, "out", fields).explained < 0.9


NAMED_AXES = [op for op in OPS if not op.bit_exact and op.axes is not Op.axes]
USUAL = ("tgmm", "grouped_gemm", "chunk_simple_gla_bwd", "chunk_gated_delta_rule_bwd")


@pytest.mark.parametrize(
    "op", [pytest.param(op, id=op.name, marks=[pytest.mark.full] * (op.name not in USUAL)) for op in NAMED_AXES]
)
def test_axes_are_of_outputs_and_inputs(op):
    seen = {}
    for case in (case for case in op.cases if case.tier != "full"):
        seen.setdefault((case.data, case.options[:4], 0 in dict(case.dims).values()), case)
    for case in list(seen.values())[:12]:
        expected = reference(op, case)
        for tensor, axes in op.axes(case, expected.inputs).items():
            of = expected.golden.get(tensor, expected.inputs.get(tensor))
            for labels in axes.values() if of is not None else ():
                assert np.broadcast_to(labels, of.shape).shape == of.shape


def test_roundings():
    third = np.array([1 / 3, -1 / 3])
    assert rounded(third, "bfloat16 cut").tolist() == [85 / 256, -85 / 256]
    assert rounded(third, "bfloat16").tolist() == [171 / 512, -171 / 512]
    assert np.abs(rounded(third, "bf16x2") - third).max() < 2**-18 / 3


@pytest.mark.parametrize(("passes", "first_piece"), [("bf16x3", "bfloat16"), ("bf16x3 cut", "bfloat16 cut")])
def test_three_passes_leave_out_the_product_of_second_pieces(passes, first_piece):
    a, b = np.array([[1 / 3, 1 / 7]]), np.array([[1 / 5], [1 / 11]])
    pieces = {}
    for name, x in (("a", a), ("b", b)):
        pieces[name] = [first := rounded(x, first_piece), rounded(x - first, "bfloat16")]
    expected = sum(pieces["a"][m] @ pieces["b"][n] for m, n in ((0, 0), (0, 1), (1, 0)))
    assert in_three_passes("lhs", a, passes) @ in_three_passes("rhs", b, passes) == pytest.approx(expected, rel=1e-15)


@pytest.mark.full
@pytest.mark.gpu
def test_a_record_says_which_rounding_is_likely(tmp_path):
    op, case = matrix.find(OPS, SMALL)

    def recorded(kernel):
        trial = Trial(op, case, "gpu", kernel)
        return Book(tmp_path).record(trial, judge(trial))

    loss = next(loss for loss in LOSSES if (loss.backend, loss.op, loss.name) == ("gpu", "gmm", "tf32"))
    record = recorded(plant(loss, tmp_path))
    found = explain_record(Trial(op, case, "gpu"), record)
    assert {f"{r.dtype} at {r.site}" for r in found.suspect.roundings} == loss.sites
    assert found.suspect.likely and found.suspect.shared == 1
    assert found.conclusion.startswith("likely tf32 cut at") and "Signs are not recorded" in found.conclusion
    assert found.places[0].golden == reference(op, case).golden["out"][found.places[0].index]
    fault = next(f for f in FAULTS if (f.backend, f.name) == ("gpu", "two groups are swapped"))
    found = explain_record(Trial(op, case, "gpu"), recorded(plant_fault(fault, tmp_path).gmm))
    assert found.conclusion.startswith("a logic fault, not a rounding") and found.suspect is None
    assert any(axis == "group" and set(bins) <= set("01, -") for axis, bins in found.common)
    healthy = explain_record(Trial(op, case, "gpu"), recorded(None))
    assert not healthy.fault and healthy.conclusion.startswith(("error within its bound", "likely float32"))
    others = explain_record(Trial(op, case, "gpu"), replace(record, inputs={"lhs": hashes({"x": np.zeros(3)})["x"]}))
    assert not others.drawn and others.suspect is None and "drawn differently" in others.conclusion
    with pytest.raises(ValueError, match="must have a sketch"):
        explain_record(Trial(op, case, "gpu"), replace(record, outputs={}))


@pytest.mark.gpu
def test_the_command(capsys, pytestconfig):
    case = next(case.id for case in OP["gmm"].cases if bf16(case))
    assert main(["--root", str(pytestconfig.rootpath), "explain", case, "--backend", "gpu"]) == 0
    out = capsys.readouterr().out
    assert "AGREES" in out and "error = bfloat16 at out, 100% explained" in out and "integer twin: EXACT" in out
    assert "misrounded elements" in out and "of the tpu" not in out and "recorded" in out  # beside the other's record
    assert "worst out[" in out and "column block" in out and "rms |δ|/σ by tile" in out
    assert "σ (bound" in out and "× its contract by " in out
    assert out.count("\n") < 40, "one screen"


@pytest.mark.full
def test_the_command_on_a_record(capsys, pytestconfig):
    explain_case = ["--root", str(pytestconfig.rootpath), "explain"]
    case = next(case.id for case in OP["gmm"].cases if bf16(case))
    assert main([*explain_case, case, "--backend", "gpu", "--record"]) == 0
    out = capsys.readouterr().out
    assert re.search(r"^out: [0-9.]+ × its contract$", out, re.M)
    assert "AGREES  recorded 20" in out and "rms η by tile" in out and "its contract, emulated" in out
    for wrong, message in (
        ([f"{case[:-1]}9999", "--record"], "in the ledger of tpu"),
        ([case, "--record", "-"], "revision"),
    ):
        with pytest.raises(SystemExit):
            main([*explain_case, *wrong])
        assert message in capsys.readouterr().err


def test_a_case_is_found_by_its_id():
    case = next(case for case in OP["tgmm"].cases if case.tier == "smoke")
    assert matrix.find(OPS, case.id) == (OP["tgmm"], case)
    assert matrix.find(OPS, case.with_seed(7).id)[1] == case.with_seed(7)
    assert matrix.find(OPS, case.with_data("integers").id)[1] == case.with_data("integers")
    assert matrix.find(OPS, case.id.removesuffix("-s0"))[1] == case
    with pytest.raises(ValueError, match="case must be the id of a case of the matrix"):
        matrix.find(OPS, "tgmm-M1")
    with pytest.raises(ValueError, match="bit-exact"):
        op = OP["fp8_quantize"]
        explain(Trial(op, op.cases[0], "gpu"))


@pytest.mark.gpu
def test_what_a_case_promises_is_named_too():
    """Its dots are to be in three passes of pieces rounded to nearest."""
    op = OP[SIMPLE]
    found = explain(Trial(op, next(case for case in op.cases if case.precision == "bf16x3"), "gpu"))
    assert found.conclusion.startswith("error = bf16x3 at dot, ")
    assert found.attribution.explained > 0.98


TOTAL = Op(
    "total",
    golden=lambda x, stages=lambda site, value: value: stages("dot", x.astype(np.float64).sum(axis=1)),
    tpu="kernels:total",
    gpu="kernels:total",
    inputs=lambda case: {"x": Array((case.M, case.N), case.dtype)},
    contract=lambda case, backend: Contract(out=case.out, sites={"dot": "float32"}),
)


def explained_total(kernel):
    """What is said of a kernel in the place of the sum of rows."""
    (case,) = TOTAL.grid([dict(M=64, N=8)], dtype=["float32"])
    return explain(Trial(TOTAL, case, "gpu", other=kernel))


@pytest.mark.gpu
def test_a_site_of_any_name_is_named():
    """Also one that is called as the product of both operands is."""
    found = explained_total(lambda x: x.double().sum(1).bfloat16().float())
    assert found.conclusion.startswith("error = bfloat16 at dot, 100% explained")


@pytest.mark.gpu
def test_what_only_an_interpreter_could_say_is_left_open(monkeypatch):
    """As on a host with a GPU, where Triton compiles."""
    monkeypatch.setattr("parity.backends.emulation.tensor_core.interprets", lambda: False)
    found = explained_total(lambda x: x[:, 1:].sum(1))
    assert found.kind == "unknown"
    assert "a fault of logic, or precision lost elsewhere (a Triton kernel is followed" in found.conclusion


@pytest.mark.tpu
def test_what_no_site_has_is_no_loss_where_the_case_passes():
    """Six passes are six roundings of which the golden has none."""
    op = OP["tgmm"]
    found = explain(Trial(op, next(case for case in op.cases if f32(case)), "tpu"))
    assert (found.kind, found.judged.verdict.outcome) == ("noise", "AGREES")
    assert found.conclusion.startswith("error within its bound")


def test_passes_leave_no_other_rounding_of_an_operand():
    passes, rhs, out = Rounding(DOT, PASSES[0]), Rounding("rhs", "bfloat16"), Rounding("out", "bfloat16")
    assert one_more((passes,), [rhs, out]) == [(passes, out)]
    assert one_more((rhs,), [passes, out]) == [(rhs, out)]
