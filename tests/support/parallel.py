"""A layer shared out over devices or processes, beside one that is not: what both tests of expert parallelism need."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

ROOT = Path(__file__).parents[2]
SUM_OF_PARTS = 16 * 2.0**-24  # w_router's gradient: what its parts round off, and their sum, of its largest element
CASES: dict[str, tuple[str, float, dict[str, Any]]] = {
    # Everyone likes the first experts best: most rows go to one device, and beyond its capacity.
    "skewed": ("bfloat16", 30, dict(top_k=2, capacity=5)),
    "balanced": ("float32", 0, dict(top_k=4)),
    "more_choices_than_experts_on_a_device": ("float32", 30, dict(top_k=5, renormalize=False)),
    "fp8": ("bfloat16", 0, dict(top_k=2, quantize="fp8", block_size=32)),
    "mxfp8": ("bfloat16", 30, dict(top_k=2, quantize="mxfp8", capacity=7)),
}
"""dtype, skew (how much better every token likes the first experts), options of the layer."""
EACH_CASE = pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[] if name == "skewed" else [pytest.mark.full]) for name in CASES]
)
OUTPUTS = ["out", "x", "w_router", "w_gate", "w_up", "w_down"]


def draw(tokens: int, hidden: int, intermediate: int, experts: int, skew: float) -> list[np.ndarray]:
    """float32 inputs of a layer and its dout."""
    rng = np.random.default_rng(0)

    def normal(*shape: int, size: float = 1.0) -> np.ndarray:
        return (rng.standard_normal(shape) * size).astype(np.float32)

    x = np.abs(normal(tokens, hidden)) if skew else normal(tokens, hidden)
    w_router = normal(hidden, experts, size=hidden**-0.5) - skew * np.arange(experts) / experts / hidden
    shapes = ((hidden, intermediate), (hidden, intermediate), (intermediate, hidden))
    weights = [normal(experts, *shape, size=shape[0] ** -0.5) for shape in shapes]
    return [x, w_router.astype(np.float32), *weights, normal(tokens, hidden)]


def difference(got: np.ndarray, expected: np.ndarray) -> tuple[bool, float, str]:
    """Whether the bits are the same, the largest difference over the largest element, and the dtype."""
    a, b = (x.astype(np.float64) for x in (got, expected))
    same = got.dtype == expected.dtype and a.tobytes() == b.tobytes()
    return same, float(np.abs(a - b).max() / np.abs(b).max()), got.dtype.name


def answer(compare: Callable[..., dict[str, tuple[bool, float, str]]]) -> None:
    """Print what `compare` finds for the arguments in sys.argv, as JSON."""
    print(json.dumps(compare(*json.loads(sys.argv[1]))))


def ask(module: str, *comparison: Any, **environment: str) -> dict[str, tuple[bool, float, str]]:
    """What a module finds, in a process of its own: frameworks count devices when they load."""
    paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = os.environ | environment | {"PYTHONPATH": os.pathsep.join(paths)}
    command = [sys.executable, "-m", f"tests.support.{module}", json.dumps(comparison)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=540, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    found: dict[str, tuple[bool, float, str]] = json.loads(done.stdout)
    return found


def check(name: str, found: dict[str, tuple[bool, float, str]]) -> None:
    """Rows of an expert are in the same order: the same bits, but where blocks of rows share scales or parts are added.

    The router's gradient is a sum of the devices' parts. Quantised by columns, rows share a scale with others on a
    device than they do where all are on one, so that weights' gradients differ as two roundings to e4m3 do.
    """
    dtype, _, options = CASES[name]
    assert found.keys() == {*OUTPUTS}
    for output, (same_bits, error, found_dtype) in found.items():
        assert found_dtype == ("float32" if output == "w_router" else dtype), output
        if output == "w_router":
            assert error <= SUM_OF_PARTS
        elif output.startswith("w_") and options.get("quantize"):
            assert error < 2 * 2.0**-4
        else:
            assert same_bits, output
