"""`parity stages`: precision that is lost on one source line of a real kernel is that line's, and a fault of logic is
found at the stage where it enters."""

import ast
from pathlib import Path

import numpy as np
import pytest

from parity.backends import load_kernel, runner
from parity.cli import main
from parity.judge import reference
from parity.lines import Ranking, mean_square, program, rank, statement
from parity.lines.command import conclusion, screen
from parity.lines.program import Line
from parity.lines.walk import walk
from parity.op import outputs
from tests.matrix import OPS
from tests.meta.test_faults import ROOT, Fault, plant

OP = {op.name: op for op in OPS}
CHUNK = "chunk_simple_gla_fwd"


def smoke(op, dtype="float32"):
    return next(case for case in op.cases if case.tier == "smoke" and case.dtype == case.out == dtype)


def arguments(op, case):
    return {**op.arguments(case), **op.route(case)}


def traced(op, case, backend, kernel=None):
    kernel = kernel or load_kernel(getattr(op, backend))
    return program(backend, kernel, reference(op, case).inputs, arguments(op, case))


def planted(backend, op, old, new, where, *marks):
    """A case of `test_…`: `old` becomes `new`, and `where` is what must be named."""
    module, public = ("chunk_scan", "simple_gla") if op == CHUNK else ("gmm", "")
    fault = Fault(f"{new} for {old}", backend, (op,), old, new, module=module, public=public)
    return pytest.param(fault, where, id=f"{backend}-{op}-{where}", marks=[getattr(pytest.mark, backend), *marks])


FULL = pytest.mark.full
TPU_DOT = "    return lax.dot_general(a, b, axes, precision"
BF16 = ".astype(jnp.bfloat16).astype(jnp.float32)"
GPU_BF16 = ".to(tl.bfloat16).to(tl.float32)"
GMM_DOT = """
        sums = tl.dot(a, b, sums, input_precision="ieee")
        if DEBUG is not None:
            sums = DEBUG("acc", sums, in_group"""
TGMM_DOT = GMM_DOT.replace("in_group", "in_k")
SCORES = "scores = dot(q_rows, k_columns, SPLIT) * pair_decays(coarse, fine, False, SPLIT)"
NEXT = "return kept * state + (lost * state + update)"

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
    planted("tpu", CHUNK, 'watch("state", _next_state(load, state[...], decay, scan))',
            f'watch("state", _next_state(load, state[...], decay, scan){BF16})',
            f'state[...] = watch("state", _next_state(load, state[...], decay, scan){BF16})', FULL),
    planted("tpu", CHUNK, 'scores = watch("A", decay.scores(load, scan), 1, 2)',
            f'scores = watch("A", decay.scores(load, scan){BF16}, 1, 2)',
            f'scores = watch("A", decay.scores(load, scan){BF16}, 1, 2)', FULL),
    planted("gpu", "gmm", GMM_DOT, GMM_DOT.replace("dot(a,", f"dot(a{GPU_BF16},"),
            f'sums = tl.dot(a{GPU_BF16}, b, sums, input_precision="ieee")', FULL),
    planted("gpu", "gmm", GMM_DOT, GMM_DOT.replace("ieee", "tf32"),
            'sums = tl.dot(a, b, sums, input_precision="tf32")', FULL),
    planted("gpu", "tgmm", TGMM_DOT, TGMM_DOT.replace('="ieee")', f'="ieee"){GPU_BF16}'),
            f'sums = tl.dot(a, b, sums, input_precision="ieee"){GPU_BF16}'),
    planted("gpu", CHUNK, SCORES, f"scores = ({SCORES[9:]}){GPU_BF16}", f"scores = ({SCORES[9:]}){GPU_BF16}", FULL),
    planted("gpu", CHUNK, NEXT, f"return (kept * state + (lost * state + update)){GPU_BF16}",
            f"return (kept * state + (lost * state + update)){GPU_BF16}", FULL),
]  # fmt: skip


@pytest.mark.parametrize(("loss", "line"), LOSSES)
def test_the_line_that_loses_precision_is_the_first(loss, line, tmp_path):
    pytest.importorskip("jax" if loss.backend == "tpu" else "triton")
    op = OP[loss.ops[0]]
    case, kernel = smoke(op), getattr(plant(loss, tmp_path), op.name)
    expected = reference(op, case)
    ranking = rank(traced(op, case, loss.backend, kernel), expected.golden, expected.magnitude)
    first = ranking.shares[0]
    assert statement(first.line).startswith(line), [(statement(s.line), s.share) for s in ranking.shares[:3]]
    assert first.share > 0.9 and 0.9 < ranking.together < 1.1
    stages = walk(op, case, loss.backend, expected, ranking)
    assert stages[-1].is_off and not stages[-1].wrong
    shown = screen("", stages, ranking, tmp_path).plain
    assert f"planted_{loss.backend}.py:{first.line.number}  {line[:99]}" in shown
    assert conclusion(stages, ranking, tmp_path).startswith(f"precision is lost at {stages[-1].site}")


FAULTS = [
    planted("tpu", "gmm", "sums += jnp.where(step == 0, 0.0, acc[rows, columns])",
            "sums += jnp.where(step <= 1, 0.0, acc[rows, columns])", "acc"),
    planted("tpu", "gmm", "contract=(1, 1 if transpose_rhs else 0))",
            "contract=(1, 1 if transpose_rhs else 0)) * 2", "partial", FULL),
    planted("tpu", "gmm", "result = sums.astype(out.dtype)", "result = 2 * sums.astype(out.dtype)", "out", FULL),
    planted("tpu", "tgmm", "before = jnp.where(first, 0.0, before)",
            "before = jnp.where(first & (visit == 0), 0.0, before)", "acc", FULL),
    planted("tpu", CHUNK, 'refs["from_start"][...] = _exp(hi + lo)', 'refs["from_start"][...] = _exp(2 * (hi + lo))',
            "decay", FULL),
    planted("tpu", CHUNK, "return _dot(load(\"q\"), load(\"k\"), (1, 1), scan) * self.between()",
            "return _dot(load(\"q\"), load(\"k\"), (1, 1), scan)", "A", FULL),
    planted("tpu", CHUNK, "return reduce(lambda rest, part: part * state + rest, reversed(decay.whole), term)",
            "return term", "state", FULL),
    planted("gpu", "gmm", GMM_DOT, GMM_DOT.replace("b, sums,", "b, tl.zeros_like(sums),"), "acc", FULL),
    planted("gpu", "gmm", "    result = sums.to(out.dtype.element_ty)\n    store_rows(",
            "    result = (2 * sums).to(out.dtype.element_ty)\n    store_rows(", "out", FULL),
    planted("gpu", "tgmm", TGMM_DOT, TGMM_DOT.replace("b, sums,", "b, tl.zeros_like(sums),"), "acc"),
    planted("gpu", CHUNK, SCORES, "scores = dot(q_rows, k_columns, SPLIT)", "A", FULL),
    planted("gpu", CHUNK, NEXT, "return update", "state", FULL),
]  # fmt: skip


@pytest.mark.parametrize(("fault", "site"), FAULTS)
def test_a_fault_of_logic_is_found_where_it_enters(fault, site, tmp_path):
    pytest.importorskip("jax" if fault.backend == "tpu" else "triton")
    op = OP[fault.ops[0]]
    case, kernel = smoke(op), getattr(plant(fault, tmp_path), op.name)
    stages, ranking = walked(op, case, fault.backend, kernel)
    assert (stages[-1].site, stages[-1].wrong > 0) == (site, True), stages
    assert conclusion(stages, ranking, tmp_path).startswith(f"a logic fault enters at {site}")


def walked(op, case, backend, kernel=None):
    """The stages, of a ranking without lines."""
    expected, of = reference(op, case), traced(op, case, backend, kernel)
    none, everything = of.run(lambda place: False), of.run(lambda place: True)
    error = mean_square(everything.outputs, none.outputs, expected.magnitude) ** 0.5
    ranking = Ranking((), error, 0.0, none, everything)
    return walk(op, case, backend, expected, ranking), ranking


SITES = {"tpu": {"gmm": ("partial", "acc"), "tgmm": ("partial", "acc")}, "gpu": {"gmm": ("acc",), "tgmm": ("acc",)}}
RIGHT = [
    pytest.param(backend, op, dtype, marks=[getattr(pytest.mark, backend), *tier])
    for backend in ("tpu", "gpu")
    for op in ("gmm", "tgmm", CHUNK, "chunk_gla_fwd")
    for dtype in ("float32", "bfloat16")
    for tier in ([] if (op, dtype) == ("gmm", "bfloat16") else [FULL],)
    if (op, dtype) != ("chunk_gla_fwd", "bfloat16")
]


@pytest.mark.parametrize(("backend", "name", "dtype"), RIGHT)
def test_no_stage_of_a_right_kernel_is_off(backend, name, dtype):
    pytest.importorskip("jax" if backend == "tpu" else "triton")
    op = OP[name]
    stages, _ = walked(op, smoke(op, dtype), backend)
    assert [stage.site for stage in stages] == [*SITES[backend].get(name, ("decay", "A", "state")), "out"]
    assert not any(stage.is_off for stage in stages), stages


EVALUATED = [
    pytest.param(backend, op, dtype, marks=[getattr(pytest.mark, backend), *tier])
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
def test_with_every_line_a_program_is_the_kernel_and_with_none_it_is_exact(backend, name, dtype):
    """Bit for bit: both, and so every number in between, would go wrong with a wrong operation of the evaluator."""
    pytest.importorskip("jax" if backend == "tpu" else "triton")
    op = OP[name]
    case = smoke(op, dtype)
    expected, of = reference(op, case), traced(op, case, backend)
    kernel = load_kernel(getattr(op, backend))
    got = outputs(runner(backend).run(kernel, expected.inputs, arguments(op, case)))
    everything, none = of.run(lambda place: True), of.run(lambda place: False)
    for output, golden in expected.golden.items():
        np.testing.assert_array_equal(everything.outputs[output], got[output].astype(np.float64))
        off = np.abs(none.outputs[output] - golden)
        assert (off <= 1e-13 * expected.magnitude[output]).all(), off.max()


@pytest.mark.tpu
@pytest.mark.parametrize("name", ["gmm", pytest.param("tgmm", marks=FULL), pytest.param(CHUNK, marks=FULL)])
def test_the_debug_argument_leaves_nothing_where_it_is_off(name, tmp_path):
    """What is lowered is what would be without it in the source."""
    jax = pytest.importorskip("jax")
    op = OP[name]
    case, module = smoke(op), "chunk_scan" if name == CHUNK else "gmm"
    source = (ROOT / "tpu_kernels" / f"{module}.py").read_text()
    stripped = ast.unparse(_Without().visit(ast.parse(source)))
    assert "debug" in source and 'watch("' not in stripped and 'debug("' not in stripped
    fault = Fault("", "tpu", (name,), source, stripped, module=module, public="simple_gla" if name == CHUNK else "")
    without = getattr(plant(fault, tmp_path), name)
    shapes = {
        key: jax.ShapeDtypeStruct(x.shape, x.dtype) for key, x in reference(op, case).inputs.items() if x is not None
    }
    lowered = {
        kernel: jax.jit(lambda given, k=kernel: k(**given, **arguments(op, case))).lower(shapes).as_text()
        for kernel in (load_kernel(op.tpu), without)
    }
    assert len(set(lowered.values())) == 1


VALUE = {"debug": 1, "watch": 1, "watched": 2}
"""Which argument of a debug call is the value."""


class _Without(ast.NodeTransformer):
    """A kernel's source without its debug calls: what they take the place of."""

    def visit_Call(self, node):
        self.generic_visit(node)
        at = VALUE.get(node.func.id) if isinstance(node.func, ast.Name) else None
        return node if at is None else node.args[at]


@pytest.mark.parametrize("module", ["gmm", "chunk_scan"])
def test_a_triton_kernel_debugs_only_where_it_is_asked_to(module):
    """`if DEBUG is not None` is decided when a kernel is compiled: nothing of its body is, without it."""
    tree = ast.parse((ROOT / "gpu_reference" / f"{module}.py").read_text())
    uses = [node for node in ast.walk(tree) if isinstance(node, ast.Name) and node.id == "DEBUG"]
    guarded = [
        name
        for node in ast.walk(tree)
        if isinstance(node, ast.If) and ast.unparse(node.test) == "DEBUG is not None" and not node.orelse
        for name in ast.walk(node)
        if isinstance(name, ast.Name) and name.id == "DEBUG"
    ]
    assert guarded and len(guarded) == len(uses)


@pytest.mark.gpu
def test_the_command(capsys):
    pytest.importorskip("triton")
    case = smoke(OP["gmm"], "bfloat16")
    assert main(["--root", str(ROOT), "stages", case.id, "--backend", "gpu"]) == 0
    out = capsys.readouterr().out
    line = "result = sums.to(out.dtype.element_ty)"
    assert f"most of the error is made by gpu_reference{Path('/')}gmm.py:" in out and line in out
    assert "acc        error" in out and "the lines one by one explain 100% of its mean square" in out


def test_what_has_no_stages_is_refused(pytestconfig):
    case = OP["fp8_quantize"].cases[0].id
    with pytest.raises(SystemExit):
        main(["--root", str(pytestconfig.rootpath), "stages", case])


def test_a_statement_is_quoted_in_one_line(tmp_path):
    file = tmp_path / "kernel.py"
    file.write_text("def f(x):\n    y = g(\n        x,\n    )\n    return y\n")
    assert statement(Line(str(file), 3)) == "y = g( x, )"
    assert statement(Line(str(file), 5)) == "return y"
    assert statement(Line("<string>", 1)) == ""
