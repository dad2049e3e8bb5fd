"""`parity stages`: precision that is lost on one source line of a real kernel is that line's, and a fault of logic is
found at the stage where it enters."""

import ast
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from parity.cli import main
from parity.cli.stages import conclusion, screen
from parity.debugging.attribution import (
    Ranking,
    Share,
    at_sites,
    lines_compared_bit_for_bit,
    program,
    rank,
    statement,
)
from parity.debugging.attribution.locate import Located, locate
from parity.debugging.attribution.program import Line, Mark, Run
from parity.debugging.attribution.walk import Evaluation, Stage, unseen, walk
from parity.debugging.explain import explain
from parity.judging.reference import reference
from parity.trial import Trial
from tests.matrix import OPS
from tests.meta.faults.planting import ROOT, Fault, plant, trial_of
from tests.meta.faults.test_faults_delta_rule import FAULTS as FAULTS_DELTA_RULE
from tests.support.calls import point
from tests.support.interpreter import INTERPRETED, interpreted
from tests.support.stages import check_a_probe_leaves_nothing, traced, walked

OP = {op.name: op for op in OPS}
CHUNK, CHUNK_BACKWARD = "chunk_simple_gla_fwd", "chunk_simple_gla_bwd"
CHANNELS_BACKWARD = "chunk_gla_bwd"
STEPS, STEPS_BACKWARD = "fused_recurrent_simple_gla_fwd", "fused_recurrent_gla_bwd"
LINEAR_ATTENTIONS = [op.name for op in OPS if "gla" in op.name]


def smoke(op, dtype="float32"):
    return next(case for case in op.cases if case.tier == "smoke" and case.dtype == case.out == dtype)


def module_of(op):
    """Where the op's kernels are."""
    if "gla" not in op:
        return "gmm"
    return "fused_recurrent" if "recurrent" in op else "chunk_scan"


def planted(backend, op, old, new, where, *marks):
    """A case of `test_…`: `old` becomes `new`, and `where` is what must be named."""
    fault = Fault(f"{new} for {old}", backend, (op,), old, new)
    return pytest.param(fault, where, id=f"{backend}-{op}-{where}", marks=[*INTERPRETED[backend], *marks])


FULL = pytest.mark.full
TPU_DOT = "    return lax.dot_general(a, b, axes, precision"
BF16 = ".astype(jnp.bfloat16).astype(jnp.float32)"
GPU_BF16 = ".to(tl.bfloat16).to(tl.float32)"
GPU_DOT = 'return tl.dot(a, b, sums, input_precision="ieee")'
SCORES = "scores = dot(q_rows, k_columns, SPLIT) * pair_decays(coarse, fine, False, SPLIT)"
NEXT = "return decays.kept * state + (decays.lost * state + update)"
PREVIOUS = "_previous_dstate(load, dstate[...], decay, scan)"
PAIRS = "times(self.between(), products)"
OF_PAIRS = "scan.p.scale * jnp.where(i < j, *dscores)"
OLD_DSTATE = "dstate = next_state(dstate, q_columns, do_rows, decays.from_start * scale, decays, SPLIT)"
DSTATE_UPDATE = "update = tl.fma(q_row[:, None], do_row[None, :], (kept + lost) * residue)"

LOSSES = [
    planted("tpu", "gmm", TPU_DOT, f"    a = a{BF16}\n{TPU_DOT}", f"a = a{BF16}"),
    planted("tpu", "gmm", "precision = lax.Precision.HIGHEST if", "precision = lax.Precision.DEFAULT if",
            "return lax.dot_general(", FULL),
    planted("tpu", "gmm", "acc[rows, columns] = sums\n", f"acc[rows, columns] = sums{BF16}\n",
            f"acc[rows, columns] = sums{BF16}", FULL),
    planted("tpu", "tgmm", TPU_DOT, f"    b = lax.reduce_precision(b, 8, 10)\n{TPU_DOT}",
            "b = lax.reduce_precision(b, 8, 10)", FULL),
    planted("tpu", "tgmm", "acc[rows, columns] = before + sums", f"acc[rows, columns] = (before + sums){BF16}",
            f"acc[rows, columns] = (before + sums){BF16}", FULL),
    planted("tpu", CHUNK, 'probe("state", _next_state(load, state[...], decay, scan))',
            f'probe("state", _next_state(load, state[...], decay, scan){BF16})',
            f'state[...] = probe("state", _next_state(load, state[...], decay, scan){BF16})', FULL),
    planted("tpu", CHUNK, 'return probe("A", decay.scores(load, scan), 1, 2)',
            f'return probe("A", decay.scores(load, scan){BF16}, 1, 2)',
            f'return probe("A", decay.scores(load, scan){BF16}, 1, 2)', FULL),
    planted("tpu", CHUNK_BACKWARD, PREVIOUS, PREVIOUS + BF16,
            f'dstate[...] = probe("dstate", {PREVIOUS}{BF16})', FULL),
    planted("tpu", CHUNK_BACKWARD, PAIRS, f"({PAIRS}){BF16}", f'scores = probe("A", ({PAIRS}){BF16}, 1, 2)', FULL),
    planted("tpu", CHANNELS_BACKWARD, OF_PAIRS, OF_PAIRS + BF16, f'dpairs = probe("dA", {OF_PAIRS}{BF16}, 1, 2)', FULL),
    planted("tpu", STEPS, "power * series\n", f"(power * series){BF16}\n",
            f"return kept, (power - kept) + (power * series){BF16}", FULL),
    planted("tpu", STEPS_BACKWARD, 'column_of(do, n) * (plan.p.scale * refs["q_rows"][row, :])',
            f'(column_of(do, n) * (plan.p.scale * refs["q_rows"][row, :])){BF16}',
            f'whole = added(pair, 1.0, (column_of(do, n) * (plan.p.scale * refs["q_rows"][row, :])){BF16}', FULL),
    planted("gpu", CHUNK_BACKWARD, OLD_DSTATE, OLD_DSTATE + GPU_BF16, OLD_DSTATE + GPU_BF16, FULL),
    planted("gpu", CHANNELS_BACKWARD, "products = products.to(tl.float32)", f"products = products{GPU_BF16}",
            f"products = products{GPU_BF16}", FULL),
    planted("gpu", STEPS, "lost = (decay - kept).to(tl.float32)", f"lost = (decay - kept){GPU_BF16}",
            f"lost = (decay - kept){GPU_BF16}"),
    planted("gpu", STEPS_BACKWARD, DSTATE_UPDATE, DSTATE_UPDATE + GPU_BF16, f"{DSTATE_UPDATE}{GPU_BF16}", FULL),
    planted("gpu", "gmm", GPU_DOT, GPU_DOT.replace("dot(a,", f"dot(a{GPU_BF16},"),
            GPU_DOT.replace("dot(a,", f"dot(a{GPU_BF16},"), FULL),
    planted("gpu", "gmm", GPU_DOT, GPU_DOT.replace("ieee", "tf32"),
            GPU_DOT.replace("ieee", "tf32"), FULL),
    planted("gpu", "tgmm", GPU_DOT, GPU_DOT + GPU_BF16, GPU_DOT + GPU_BF16, FULL),
    planted("gpu", CHUNK, SCORES, f"scores = ({SCORES[9:]}){GPU_BF16}", f"scores = ({SCORES[9:]}){GPU_BF16}", FULL),
    planted("gpu", CHUNK, NEXT, f"return ({NEXT[7:]}){GPU_BF16}",
            f"return ({NEXT[7:]}){GPU_BF16}", FULL),
]  # fmt: skip


def test_a_call_that_rounds_what_another_has_split_has_no_share(tmp_path):
    """Alone it loses what all of the kernel does not: 400 times the error of its line."""
    line, one, other = (Line(str(tmp_path / "kernel.py"), number) for number in (1, 2, 3))
    (tmp_path / "kernel.py").write_text("split\none\nother\n")
    none = Run({}, {}, [])
    ranking = Ranking((Share(line, 0.9, callers=((one, 400.0), (other, 0.9))),), 1e-8, 1e-18, none, none)
    stage = Stage("out", wrong=0.0, error=1e-8, expected=1e-8, numbers=1)
    shown = screen(Located("out", (stage,), none, ranking), tmp_path).plain
    assert "not alone  by kernel.py:2" in shown and "90.0%  by kernel.py:3" in shown


@pytest.mark.parametrize(("loss", "line"), LOSSES)
def test_the_line_that_loses_precision_is_the_first(loss, line, tmp_path):
    op = OP[loss.ops[0]]
    case, kernel = smoke(op), getattr(plant(loss, tmp_path), op.name)
    expected = reference(op, case)
    ranking = rank(traced(op, case, loss.backend, kernel), expected.golden, expected.magnitude)
    first = ranking.shares[0]
    assert statement(first.line).startswith(line), [(statement(s.line), s.share) for s in ranking.shares[:3]]
    assert first.share > 0.9 and 0.9 < ranking.together < 1.1
    stages = walk(Evaluation.of_runs(Trial(op, case, loss.backend), ranking.none, ranking.all))
    found = Located("out", stages, ranking.none, ranking)
    assert stages[-1].is_off and not stages[-1].wrong
    shown = screen(found, tmp_path).plain
    assert f"planted_{loss.backend}.py:{first.line.number}  {line[:99]}" in shown
    assert conclusion(found, tmp_path).startswith(f"precision is lost at {stages[-1].site}")


FAULTS = [
    planted("tpu", "gmm", "sums += jnp.where(step == 0, 0.0, acc[rows, columns])",
            "sums += jnp.where(step <= 1, 0.0, acc[rows, columns])", "acc"),
    planted("tpu", "gmm", "contract=(1, 1 if transpose_rhs else 0))",
            "contract=(1, 1 if transpose_rhs else 0)) * 2", "partial", FULL),
    planted("tpu", "gmm", "result = sums.astype(out.dtype)", "result = 2 * sums.astype(out.dtype)", "out", FULL),
    planted("tpu", "tgmm", "before = jnp.where(first, 0.0, before)",
            "before = jnp.where(first & (visit == 0), 0.0, before)", "acc", FULL),
    planted("tpu", CHUNK, 'refs["decays"], _exp(until, scan),',
            'refs["decays"], finite_exp(2 * until),', "decay", FULL),
    planted("tpu", CHUNK, "return times(self.between(), dot(load(\"q\"), load(\"k\"), (1, 1), scan))",
            "return dot(load(\"q\"), load(\"k\"), (1, 1), scan)", "A", FULL),
    planted("tpu", CHUNK, "return reduce(lambda rest, part: part * state + rest, reversed(decay.whole), term)",
            "return term", "state", FULL),
    planted("tpu", CHUNK_BACKWARD, "return decayed(dstate, decay, written_by(",
            "return decayed(dstate, decay, 2 * written_by(", "dstate", FULL),
    planted("tpu", CHUNK_BACKWARD, PAIRS, "products", "A", FULL),
    planted("tpu", CHUNK_BACKWARD, "whole = reduce(jnp.add, self.whole)", "whole = 1.0", "dgate", FULL),
    planted("tpu", CHUNK_BACKWARD, 'store("dq", dq + dot(dscores, load("k"), (0, 0), scan))', 'store("dq", dq)', "dq",
            FULL),
    planted("tpu", CHANNELS_BACKWARD, OF_PAIRS, OF_PAIRS.replace("i < j", "i <= j + 1"), "dA", FULL),
    planted("tpu", STEPS, "return kept * state, rest * state + whole", "return kept * state, whole", "state",
            FULL),
    planted("tpu", STEPS_BACKWARD, "refs[\"dgate_parts\"][n] += fold_registers(after *",
            "refs[\"dgate_parts\"][n] += fold_registers(2 * after *", "dgate", FULL),
    planted("gpu", CHUNK_BACKWARD, OLD_DSTATE, OLD_DSTATE.replace("from_start * scale", "from_start"), "dstate", FULL),
    planted("gpu", CHUNK_BACKWARD, "dk_tile = sums.dk * decays.to_end", "dk_tile = sums.dk", "dk", FULL),
    planted("gpu", CHANNELS_BACKWARD, "past = (decays.kept + decays.lost) * past_block[:, None]",
            "past = decays.lost * past_block[:, None]", "dgate", FULL),
    planted("gpu", STEPS, "lost = (decay - kept).to(tl.float32)", "lost = (1.01 * decay - kept).to(tl.float32)",
            "kept", FULL),
    planted("gpu", STEPS_BACKWARD, DSTATE_UPDATE, DSTATE_UPDATE.replace("q_row[:, None]", "2 * q_row[:, None]"),
            "dstate", FULL),
    planted("gpu", "gmm", GPU_DOT, GPU_DOT.replace("b, sums,", "b, tl.zeros_like(sums),"), "acc", FULL),
    planted("gpu", "gmm", "result = sums.to(out.dtype.element_ty)",
            "result = (2 * sums).to(out.dtype.element_ty)", "out", FULL),
    planted("gpu", "tgmm", GPU_DOT, GPU_DOT.replace("b, sums,", "b, tl.zeros_like(sums),"), "acc"),
    planted("gpu", CHUNK, SCORES, "scores = dot(q_rows, k_columns, SPLIT)", "A", FULL),
    planted("gpu", CHUNK, NEXT, "return update", "state", FULL),
]  # fmt: skip


@pytest.mark.parametrize(("fault", "site"), FAULTS)
def test_a_fault_of_logic_is_found_where_it_enters(fault, site, tmp_path):
    op = OP[fault.ops[0]]
    # Of tgmm all that a kernel computes is kept: for the smoke case 430 MB.
    case = point(op, "float32", M=200, K=64, N=32, G=2, tiling=(64, 128, 128)) if op.name == "tgmm" else smoke(op)
    kernel = getattr(plant(fault, tmp_path), op.name)
    stages, found = walked(op, case, fault.backend, kernel)
    assert (stages[-1].site, stages[-1].wrong > 0) == (site, True), stages
    assert conclusion(found, tmp_path).partition(" (wrong)")[0].endswith(site)


def sites(backend, op, dtype="float32"):
    """The sites that a right kernel of a smoke case has, its outputs last."""
    if op == "tgmm" or op == "gmm":
        return (("partial", "acc") if backend == "tpu" else ("acc",)) + ("out",)
    backward = op.endswith("bwd")
    outs = ("dq", "dk", "dv", "dg" if "simple" in op else "dgk", "dh0") if backward else ("o", "ht")
    if "recurrent" in op:
        return ("kept", "state", *(("dstate", "dgate") if backward else ()), *outs)
    # What the TPU's matrix unit sums is one float32.
    of_sums = backend == "tpu" and (dtype == "bfloat16" or "simple" not in op)
    gates = ("exponent" if of_sums else "c", "decay")
    if not backward:
        return (*gates, "A", "state", *outs) if backend == "tpu" else (*gates, "A", "kept", "state", *outs)
    if backend == "tpu":
        return (*gates, "state", "dstate", "A", "dA", "dgate", *outs)
    # In float32 K has two tiles: of A and of the state's part in dg no program has the whole sum.
    of_pairs = ("dA",) if (dtype, "simple" in op) == ("float32", True) else ("A", "dA", "dgate")
    return (*gates, "kept", "state", "dstate", *of_pairs, *outs)


IN_DEFAULT = [("tpu", "gmm", "bfloat16"), ("gpu", "gmm", "bfloat16"), ("gpu", "fused_recurrent_gla_fwd", "float32"),
              ("tpu", CHANNELS_BACKWARD, "float32")]  # fmt: skip
RIGHT = [
    pytest.param(backend, op, dtype, marks=[*INTERPRETED[backend], *tier])
    for backend in ("tpu", "gpu")
    for op in ("gmm", "tgmm", *LINEAR_ATTENTIONS)
    for dtype in ("float32", "bfloat16")
    for tier in ([] if (backend, op, dtype) in IN_DEFAULT else [FULL],)
]


@pytest.mark.parametrize(("backend", "name", "dtype"), RIGHT)
def test_no_stage_of_a_right_kernel_is_off(backend, name, dtype):
    op = OP[name]
    stages, _ = walked(op, smoke(op, dtype), backend)
    assert tuple(stage.site for stage in stages) == sites(backend, name, dtype)
    assert not any(stage.is_off for stage in stages), stages


UNUSUAL = [
    pytest.param(backend, op, words, marks=[*INTERPRETED[backend], FULL])
    for backend in ("tpu", "gpu")
    for op, *words in [
        (CHUNK_BACKWARD, "f32", "both", "unfused"),
        (CHUNK_BACKWARD, "f32", "gamma", "unfused"),
        (CHUNK_BACKWARD, "f32", "both", "N5", "chunk16"),
        (CHUNK_BACKWARD, "f32", "steep"),
        (CHUNK_BACKWARD, "f32", "none", "chunk32"),
        (CHUNK, "f32", "gamma", "unfused"),
        (CHANNELS_BACKWARD, "f32", "unfused"),
        (CHANNELS_BACKWARD, "f32", "N5"),
        (CHANNELS_BACKWARD, "f32", "steep"),
        (CHANNELS_BACKWARD, "f32", "resets"),
        ("fused_recurrent_simple_gla_bwd", "f32", "both", "N5", "reverse"),
        ("fused_recurrent_simple_gla_fwd", "f32", "T3", "gamma"),
        (STEPS_BACKWARD, "f32", "steep"),
    ]
]


@pytest.mark.parametrize(("backend", "name", "words"), UNUSUAL)
def test_nor_where_routes_gates_and_lengths_are_others(backend, name, words):
    """Packed sequences, rows that are no steps, gates that are clamped: no value is marked that is none."""
    op = OP[name]
    case = next(case for case in op.cases if all(any(word in part for part in case.id.split("-")) for word in words))
    stages, _ = walked(op, case, backend)
    assert {"state", "kept", "decay"} & {stage.site for stage in stages}
    assert not any(stage.is_off for stage in stages), stages


@pytest.mark.gpu
@interpreted
@pytest.mark.parametrize("name", [CHUNK_BACKWARD, pytest.param(CHANNELS_BACKWARD, marks=FULL)])
def test_nor_in_a_small_backward_pass(name):
    (case,) = OP[name].grid([dict(B=1, T=20, H=1, K=16, V=16)], dtype=["float32"], h0=[True])
    stages, _ = walked(OP[name], case, "gpu")
    assert "dA" in {stage.site for stage in stages} and not any(stage.is_off for stage in stages), stages


@FULL
@pytest.mark.gpu
@interpreted
def test_it_is_said_of_which_values_a_kernel_has_parts_alone(tmp_path):
    """In float32 K has two tiles, each in a program of its own, and neither has a whole score."""
    _, found = walked(OP[CHUNK_BACKWARD], smoke(OP[CHUNK_BACKWARD]), "gpu")
    assert unseen(found.none.marks) == ("A", "dgate")
    assert "not compared: A, dgate: no program of the kernel has the whole" in screen(found, tmp_path).plain


@FULL
@pytest.mark.gpu
@interpreted
def test_values_in_three_pieces_are_the_ones_that_they_stand_for():
    op = OP["chunk_gated_delta_rule_bwd"]
    case = next(c for c in op.cases if c.tier != "full" and c.l2norm and c.chunk == 32 and c.dtype == "float32")
    stages, _ = walked(op, case, "gpu")
    assert {"dP", "dq"} <= {stage.site for stage in stages} and not any(stage.is_off for stage in stages), stages


DELTA_RULE, POWERS = "chunk_gated_delta_rule_fwd", "the inverse comes from powers"


@FULL
@pytest.mark.gpu
@interpreted
def test_no_stage_is_wrong_where_every_output_is_right(tmp_path):
    """Powers of equal keys reach 1e15 and cancel: float64 keeps what is left of T, not each of its numbers."""
    trial, _ = trial_of(FAULTS_DELTA_RULE, POWERS, "gpu", DELTA_RULE, tmp_path)
    stages, found = walked(trial.op, trial.case, "gpu", trial.kernel)
    assert (stages[-1].site, stages[-1].wrong, stages[-1].is_off) == ("T", 0.0, True), stages
    assert conclusion(found, tmp_path).startswith("precision is lost at T")


@FULL
@pytest.mark.tpu
def test_what_float64_mends_but_for_a_little_is_lost_precision(tmp_path):
    """The same powers of longer chunks: what is left in float64 is beyond the contract."""
    trial, _ = trial_of(FAULTS_DELTA_RULE, POWERS, "tpu", DELTA_RULE, tmp_path)
    found = locate(trial, "o", frozenset())
    assert [stage.site for stage in found.stages if stage.is_off] == ["T"] and not any(s.wrong for s in found.stages)
    assert "planted_tpu.py" in conclusion(found, tmp_path)
    explained = explain(trial, ops=OPS)
    assert explained.kind == "unstable" and "float64" in explained.conclusion


def test_values_that_are_not_finite_are_left_out_of_a_stage():
    values = [np.array([np.inf, np.inf, np.nan, 1.0, 2.0, 2.0]), np.array([np.inf, -np.inf, 1.0, 1.5, 2.0, np.inf])]
    exact, own = (Run({}, {}, [Mark("state", x, ())]) for x in values)
    goldens = {(): ({"state": np.array([1.0, 2.0])}, {"state": 0.25})}
    pairs = {"state": [*zip(exact.marks, own.marks, strict=True)]}
    with np.errstate(all="raise"):
        stage = Evaluation(None, exact, own, pairs, goldens, {}).stage("state", False)
        assert at_sites(own, exact) == {"state": 0.125}
    assert (stage.wrong, stage.numbers) == (0.0, 3)
    assert stage.error == pytest.approx(np.sqrt(0.125 / 3))


def test_a_site_is_unseen_only_without_any_value():
    marks = [Mark("A", np.array([np.nan]), ()), Mark("dA", np.array([np.nan]), ()), Mark("dA", np.array([1.0]), ())]
    assert unseen(marks) == ("A",) and unseen(marks[1:]) == ()


EVALUATED = [
    pytest.param(backend, op, dtype, marks=[*INTERPRETED[backend], *tier])
    for backend, op, dtype, tier in [
        ("tpu", "gmm", "float32", []),
        ("tpu", "tgmm", "float32", [FULL]),
        ("gpu", "gmm", "bfloat16", []),
        ("gpu", "tgmm", "float32", [FULL]),
        ("gpu", CHUNK, "float32", [FULL]),
        ("gpu", "chunk_simple_gla_bwd", "bfloat16", [FULL]),
        ("gpu", "fused_recurrent_gla_bwd", "float32", [FULL]),
    ]
]


@pytest.mark.parametrize(("backend", "name", "dtype"), EVALUATED)
def test_a_program_is_the_kernel_or_with_no_line_exact(backend, name, dtype):
    """Bit for bit: both, and so every number in between, would go wrong with a wrong operation of the evaluator."""
    op = OP[name]
    case = smoke(op, dtype)
    expected, of = reference(op, case), traced(op, case, backend)
    got = Trial(op, case, backend).run()
    everything, none = of.run(lambda place: True), of.run(lambda place: False)
    for output, golden in expected.golden.items():
        np.testing.assert_array_equal(everything.outputs[output], got[output].astype(np.float64))
        off = np.abs(none.outputs[output] - golden)
        assert (off <= 1e-13 * expected.magnitude[output]).all(), off.max()


@pytest.mark.tpu
def test_an_output_that_aliases_an_input_begins_with_it():
    from jax.experimental import pallas as pl

    def double_the_second(x, out):
        @pl.when(pl.program_id(0) == 1)
        def _():
            out[...] = 2 * x[...]

    def kernel(x):
        rows = pl.BlockSpec((8, 128), lambda i: (i, 0))
        call = pl.pallas_call(double_the_second, x, grid=(3,), in_specs=[rows], out_specs=rows,
                              input_output_aliases={0: 0}, interpret=True)  # fmt: skip
        return call(x)

    x = np.arange(24 * 128, dtype=np.float32).reshape(24, 128)
    of_x = SimpleNamespace(backend="tpu", kernel=kernel, inputs={"x": x}, arguments={})
    run = program(of_x).run(lambda place: False)
    np.testing.assert_array_equal(run.outputs["out"], np.repeat([[1.0], [2.0], [1.0]], 8, axis=0) * x)


@pytest.mark.tpu
@pytest.mark.parametrize(
    "name",
    [
        pytest.param(op, marks=[] if op in ("gmm", "chunk_gla_bwd") else [FULL])
        for op in ("gmm", "tgmm", *LINEAR_ATTENTIONS)
    ],
)
def test_a_probe_leaves_nothing_where_there_is_none(name, tmp_path):
    modules = [module_of(name), *(["_lib.chunk_decays"] if module_of(name) == "chunk_scan" else [])]
    check_a_probe_leaves_nothing(OP[name], smoke(OP[name]), modules, tmp_path)


@pytest.mark.parametrize("path", sorted((ROOT / "gpu_reference").rglob("*.py")), ids=lambda path: path.stem)
def test_a_compiled_triton_kernel_shows_nothing(path):
    """A condition that is constant is decided when a kernel is compiled: nothing of what it guards is, where it is
    false."""
    kernels = [
        node
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.FunctionDef) and "triton.jit" in map(ast.unparse, node.decorator_list)
    ]
    guards = [
        node
        for kernel in kernels
        for node in ast.walk(kernel)
        if isinstance(node, ast.If) and ast.unparse(node.test) == "INTERPRETED"
    ]
    shown, guarded = (
        {call for tree in trees for call in ast.walk(tree)
         if isinstance(call, ast.Call) and ast.unparse(call.func) == "probe"}
        for trees in (kernels, [statement for guard in guards for statement in guard.body])
    )  # fmt: skip
    assert shown == guarded


@pytest.mark.gpu
@interpreted
def test_the_command(capsys):
    case = smoke(OP["gmm"], "bfloat16")
    assert main(["--root", str(ROOT), "stages", case.id, "--backend", "gpu"]) == 0
    out = capsys.readouterr().out
    line = "result = sums.to(out.dtype.element_ty)"
    assert "most of the error of out is made by gpu_reference/_lib/products.py:" in out and line in out
    assert "acc        error" in out and "the lines one by one explain 100% of its mean square" in out


@pytest.mark.gpu
@interpreted
def test_the_command_of_what_is_compared_bit_for_bit(capsys):
    case = next(case for case in OP["mxfp8_quantize"].cases if case.M == 37)
    assert main(["--root", str(ROOT), "stages", case.id, "--backend", "gpu"]) == 0
    out = capsys.readouterr().out
    assert "no stage is off: every bit is the golden's" in out and "output qvalue" in out
    assert "  absmax                   0 of 90 values are not the golden's" in out


def test_ops_without_a_kernel_for_the_backend_are_passed_over():
    """In another's matrix an op may have a kernel for the other backend alone."""
    elsewhere = [replace(OP["fp8_quantize"], gpu=""), replace(OP["int8_quantize"], gpu="nothing_here:at_all")]
    fixed = lines_compared_bit_for_bit([*elsewhere, OP["mxfp8_quantize"]], OP["gmm"], "gpu")
    assert {Path(line.file).stem for line in fixed} >= {"mxfp8", "formats"}
    assert not any(Path(line.file).stem in ("gmm", "launch") for line in fixed)


@pytest.mark.full
@pytest.mark.tpu
def test_no_stage_of_a_right_matmul_of_quantised_operands_is_off():
    """The quantiser's scales stay float32 where nothing else rounds, wherever its code is."""
    op = OP["grouped_dense_bwd"]
    case = next(c for c in op.cases if c.quantize and c.block_size == 128 and c.groups == "short")
    stages, _ = walked(op, case, "tpu")
    assert [stage.site for stage in stages][:2] == ["dlhs", "drhs"]
    assert not any(stage.is_off for stage in stages), stages


def test_a_statement_is_quoted_in_one_line(tmp_path):
    file = tmp_path / "kernel.py"
    file.write_text("def f(x):\n    y = g(\n        x,\n    )\n    return y\n")
    assert statement(Line(str(file), 3)) == "y = g( x, )"
    assert statement(Line(str(file), 5)) == "return y"
    assert statement(Line("<string>", 1)) == ""
