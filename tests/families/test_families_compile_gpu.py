"""Every kernel compiles for AMD's GPUs both as it is launched with little memory and with 2 GiB and more, and for
NVIDIA's with the oldest Triton that pyproject.toml allows."""

import os
import re
import subprocess
import sys
from dataclasses import replace
from importlib.metadata import requires
from pathlib import Path

import pytest

pytest.importorskip("torch")
pytest.importorskip("triton")

from parity.compilers.ptx import NEAR, case_of, compile_kernels
from tests.matrix import OPS
from tests.support import gpu_code
from tests.support.calls import launched
from tests.support.tiny import tiny

USUAL = ("gmm",)
OF_OTHERS = ("permute", "unpermute", "swizzle_scales", "grouped_dense_bwd", "moe_layer", "moe_layer_bwd")
"""What they launch, if anything, are the kernels of other operations, which are compiled as those. (And a PyTorch
without CUDA refuses to index tensors of a GPU, or ends the process where autograd takes one, be it without data.)"""


def far(argument):
    """An argument, its tensors of any size."""
    if isinstance(argument, dict):
        return {name: far(field) for name, field in argument.items()}
    return argument.removesuffix(NEAR) if isinstance(argument, str) else argument


@pytest.mark.full
@pytest.mark.parametrize("target", ["gfx942", pytest.param("gfx950", marks=pytest.mark.full)])
@pytest.mark.parametrize(
    "op",
    [
        pytest.param(op, id=op.name, marks=[pytest.mark.full] * (op.name not in USUAL))
        for op in OPS
        if op.name not in OF_OTHERS
    ],
)
def test_compiles_with_memory_of_any_size(op, target):
    cases = [case_of(launch, target) for launch in launched(op, tiny(op), target)]
    assert cases
    near = compile_kernels(cases)
    anywhere = compile_kernels([replace(case, arguments=far(case.arguments)) for case in cases])
    assert [result.error for result in (*near, *anywhere)] == [None] * 2 * len(cases)
    # An offset that is known to be small is one of 32 bits in either case.
    assert buffer_accesses(near) >= buffer_accesses(anywhere) + (op.name == "gmm")


def buffer_accesses(results):
    """Loads and stores that have an offset of 32 bits."""
    return sum(n for result in results for name, n in result.instructions.items() if name.startswith("buffer_"))


@pytest.mark.full
def test_compiles_in_the_smoke_tier():
    calls = [(op, case) for op in OPS if op.name not in OF_OTHERS for case in op.cases if case.tier == "smoke"]
    found = gpu_code.kernels(calls, "sm_90")
    errors = {name: kernel.result for name, kernel in found.items() if kernel.result.error is not None}
    assert errors == {} and len(found) > len(calls)


@pytest.mark.full
def test_compiles_with_the_oldest_triton(tmp_path):
    """The same test, of a Triton that is installed for it alone."""
    (oldest,) = (m[1] for m in map(re.compile(r"triton\b.*>=([\d.]+)").match, requires("kernel-parity")) if m)
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", tmp_path, f"triton=={oldest}.*"]
    fetched = subprocess.run(pip, capture_output=True, text=True)
    if fetched.returncode:
        pytest.skip(f"pip cannot fetch Triton {oldest}: {fetched.stderr.strip().splitlines()[-1]}")
    test = f"{__file__}::{test_compiles_in_the_smoke_tier.__name__}"
    pytest_alone = [sys.executable, "-m", "pytest", "-n0", "-q", "--parity-tier=full", test]
    run = subprocess.run(
        pytest_alone, capture_output=True, text=True, cwd=Path(__file__).parents[2],
        env=os.environ | {"PYTHONPATH": str(tmp_path)},
    )  # fmt: skip
    assert run.returncode == 0 and "1 passed" in run.stdout, run.stdout + run.stderr
