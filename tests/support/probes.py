"""That a probe costs nothing where there is none."""

import ast
from pathlib import Path

import pytest

from parity.backends import load_kernel
from parity.op import Case, Op
from parity.trial import Trial
from tests.meta.faults.planting import source_of, with_sources


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
