"""Stages of a kernel as `parity stages` walks them, and that their probes cost nothing where there is none."""

import ast
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from parity.backends import load_kernel
from parity.debugging.attribution import Ranking, lines_compared_bit_for_bit, mean_square, program
from parity.debugging.attribution.locate import Located, region
from parity.debugging.attribution.program import Program
from parity.debugging.attribution.walk import Evaluation, Stage, walk
from parity.op import Backend, Case, Op
from parity.trial import Trial
from tests.matrix import OPS
from tests.meta.faults.planting import source_of, with_sources

Kernel = Callable[..., Any]


def traced(op: Op, case: Case, backend: Backend, kernel: Kernel | None = None) -> Program:
    """The program of a case, or of another kernel for it."""
    return program(Trial(op, case, backend, kernel))


def walked(op: Op, case: Case, backend: Backend, kernel: Kernel | None = None) -> tuple[tuple[Stage, ...], Located]:
    """The stages, and what is known of them without a ranking of lines."""
    trial = Trial(op, case, backend, kernel)
    expected, of = trial.reference, program(trial)
    fixed = lines_compared_bit_for_bit(OPS, op, backend)
    none, everything = of.run(lambda place: place.line in fixed), of.run(lambda place: True)
    evaluation = Evaluation.of_runs(trial, none, everything)
    stages, output = walk(evaluation, fixed), next(iter(expected.golden))
    if stages[-1].wrong:
        return stages, Located(output, stages, none, region=region(of, evaluation, stages))
    error = mean_square(everything.outputs, none.outputs, expected.magnitude) ** 0.5
    return stages, Located(output, stages, none, Ranking((), error, 0.0, none, everything))


def check_a_probe_leaves_nothing(op: Op, case: Case, modules: list[str], folder: Path, probe: str = "probe") -> None:
    """What is lowered for a TPU is what would be if the sources of these modules of `tpu_kernels` had no probes."""
    jax = pytest.importorskip("jax")
    trial, kernels = Trial(op, case, "tpu"), [load_kernel(op.tpu)]
    for module in (f"tpu_kernels.{name}" for name in modules):
        source = ast.unparse(ast.parse(source_of(module)))
        stripped = ast.unparse(_Without(probe).visit(ast.parse(source)))
        assert stripped != source and f"{probe}('" not in stripped
        kernels.append(getattr(with_sources({module: stripped}, "tpu", [op.name], folder), op.name))
    shapes = {name: jax.ShapeDtypeStruct(x.shape, x.dtype) for name, x in trial.inputs.items() if x is not None}
    lowered = {
        jax.jit(lambda given, k=kernel: k(**given, **trial.arguments)).lower(shapes).as_text() for kernel in kernels
    }
    assert len(lowered) == 1


class _Without(ast.NodeTransformer):
    """A source without its calls of a probe: the values themselves."""

    def __init__(self, probe: str) -> None:
        self.probe = probe

    def visit_Call(self, node: ast.Call) -> ast.expr:
        self.generic_visit(node)
        return node.args[1] if isinstance(node.func, ast.Name) and node.func.id == self.probe else node

    def visit_If(self, node: ast.If) -> ast.stmt:
        self.generic_visit(node)
        return ast.Pass() if ast.unparse(node.test) == "active()" else node
