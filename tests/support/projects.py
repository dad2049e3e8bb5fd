"""Somebody else's project: its own op, its own kernels of jax arrays (or torch tensors)."""

import subprocess
from pathlib import Path

from tests.support.commands import run_module, run_pytest

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


def test_of(name: str, backend: str = "tpu", body: str = "run.agrees()", options: str = "") -> str:
    """The source of a test of the op's cases."""
    return f'@parity.cases(DOUBLE, backend="{backend}"{options})\ndef {name}(run):\n    {body}\n\n'


HEAD = "import parity, pytest\nfrom matrix import DOUBLE\n\n"
TESTS = HEAD + test_of("test_agrees") + test_of("test_is_exact", "tpu", "run.is_exact()", ', data="integers"')
BOTH = HEAD + test_of("test_tpu") + test_of("test_gpu", "gpu")
COMPARED = HEAD + test_of("test_is_no_worse", "tpu", "run.is_no_worse()", ", compared=True")


class Project:
    """The project in a folder; called with arguments it runs pytest there."""

    ledger = Path("records/tpu/emulated/double.jsonl")

    def __init__(self, folder: Path, kernel: str = "good") -> None:
        self.folder = folder
        settings = '[tool.parity]\nmatrix = "matrix"\n[tool.pytest.ini_options]\npythonpath = ["."]\n'
        texts = {"pyproject.toml": settings, "matrix.py": MATRIX.format(kernel=kernel)}
        for name, text in (texts | {"kernels.py": KERNELS, "test_double.py": TESTS}).items():
            self.write(name, text)

    def __call__(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        return run_pytest(self.folder, *arguments)

    def parity(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        """The `parity` command there."""
        return run_module("parity", self.folder, *arguments)

    def write(self, name: str, text: str) -> None:
        (self.folder / name).write_text(text)

    def replace(self, name: str, old: str, new: str) -> None:
        """`new` in the place of `old`, once."""
        text = (self.folder / name).read_text()
        assert old in text
        self.write(name, text.replace(old, new, 1))


HOST = """
from parity.backends import {backend}, prepare_environment
prepare_environment()

class Pretended({backend}.{Runner}):
    real = property(lambda self: True, lambda self, value: None)
    device_kind = "{kind}"

    def __init__(self):
        self._device = {cpu}

{backend}.make_runner = Pretended
"""


def tpu_host(kind: str = "TPU pretended") -> str:
    """The conftest.py of a project on a host with a TPU, which is pretended."""
    return HOST.format(backend="tpu", Runner="TpuRunner", kind=kind, cpu='__import__("jax").devices("cpu")[0]')


def gpu_host(kind: str = "NVIDIA Pretended") -> str:
    """The same with a GPU."""
    return HOST.format(backend="gpu", Runner="GpuRunner", kind=kind, cpu='"cpu"')
