"""Somebody else's project, to run pytest in."""

import pytest

from tests.support.commands import run_pytest

MATRIX = """
import numpy as np
from parity import Array, Case, Contract, Op, abs_of

def double(x, stages=lambda site, x: x):
    return 2.0 * x.astype(np.float64)

_DOUBLE = Op(
    "double", golden=double, tpu="kernels:{kernel}", gpu="kernels:{kernel}",
    inputs=lambda c: {{"x": Array((c.M, c.N), c.dtype)}},
    arguments=lambda c: {{}},
    contract=lambda c, backend: Contract(dot="ieee", out=c.out),
    chain=lambda c, inputs: 1, magnitude=abs_of("x"), unread=lambda c, inputs: {{}},
    defaults={{}},
)
DOUBLE = _DOUBLE.with_cases(
    _DOUBLE.grid([dict(M=8, N=40)], dtype=["float32"], tier="smoke"),
    _DOUBLE.grid([dict(M=8, N=40), dict(M=3, N=5)], dtype=["float32", "bfloat16"]),
    _DOUBLE.grid([dict(M=99, N=40)], dtype=["float32"], tier="full"),
)
OPS = (DOUBLE,)
"""

KERNELS = """
def good(x):
    return x + x

def bad(x):
    return (x + x).at[5:, 7].set(0)
"""

TESTS = """
import parity
from matrix import DOUBLE

@parity.cases(DOUBLE, backend="tpu")
def test_agrees(run):
    run.agrees()

@parity.cases(DOUBLE, backend="tpu", data="integers")
def test_is_exact(run):
    run.is_exact()
"""


@pytest.fixture
def project(tmp_path):
    """Somebody else's project: its own op, its own kernels of jax arrays (or torch tensors)."""

    def make(kernel="good"):
        (tmp_path / "pyproject.toml").write_text(
            '[tool.parity]\nmatrix = "matrix"\n[tool.pytest.ini_options]\npythonpath = ["."]\n'
        )
        (tmp_path / "matrix.py").write_text(MATRIX.format(kernel=kernel))
        (tmp_path / "kernels.py").write_text(KERNELS)
        (tmp_path / "test_double.py").write_text(TESTS)
        return lambda *arguments: run_pytest(tmp_path, *arguments)

    return make
