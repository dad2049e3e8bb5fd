"""The layer on several processes, each with a part of the tokens and experts, and the layer in one process."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")
pytest.importorskip("torch")
pytestmark = pytest.mark.gpu
ROOT = Path(__file__).parents[2]
SUM_OF_PARTS = 16 * 2.0**-24  # w_router's gradient: what its parts round off, and their sum, of its largest element
SIZES = (32, 64, 32, 8)  # T, D, F, E
CASES = {
    # Everyone likes the first experts best: most rows go to one process, and beyond its capacity.
    "skewed": (2, SIZES, "bfloat16", 30, dict(top_k=2, capacity=5)),
    "balanced": (4, SIZES, "float32", 0, dict(top_k=4)),
    "more_choices_than_experts_of_a_process": (4, SIZES, "float32", 30, dict(top_k=5, renormalize=False)),
    "fp8": (2, SIZES, "bfloat16", 0, dict(top_k=2, quantize="fp8", block_size=32)),
    "mxfp8": (4, SIZES, "bfloat16", 30, dict(top_k=2, quantize="mxfp8", capacity=7)),
}


def compare(*comparisons):
    """What `tests.support.processes` finds, in processes of its own, on the CPU."""
    environment = os.environ | {
        "TRITON_INTERPRET": "1",
        "CUDA_VISIBLE_DEVICES": "",
        "PYTHONPATH": os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]),
    }
    command = [sys.executable, "-m", "tests.support.processes", *map(json.dumps, comparisons)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=540, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    return [json.loads(line) for line in done.stdout.splitlines()]


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[] if name == "skewed" else [pytest.mark.full]) for name in CASES]
)
def test_processes_give_what_one_does(name):
    """Rows of an expert are in the same order: the same bits, but where blocks of rows share scales or parts are added.

    The router's gradient is a sum of the processes' parts. Quantised by columns, rows share a scale with others in a
    process than they do where all are in one, so that weights' gradients differ as two roundings to e4m3 do.
    """
    (found,) = compare(CASES[name])
    assert list(found) == ["out", "x", "w_router", "w_gate", "w_up", "w_down"]
    for output, (same_bits, difference) in found.items():
        if output == "w_router":
            assert difference <= SUM_OF_PARTS
        elif output.startswith("w_") and CASES[name][4].get("quantize"):
            assert difference < 2 * 2.0**-4
        else:
            assert same_bits, output


def test_bad_shards_are_refused():
    import torch
    import torch.distributed as dist

    from gpu_reference.moe import moe_layer

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        x, w_router = torch.zeros(8, 16), torch.zeros(16, 4)
        weights = torch.zeros(4, 16, 16)
        options = dict(top_k=2, process_group=dist.group.WORLD)
        with pytest.raises(ValueError, match=r"w_gate must have E / devices = 4 / 1 experts on each device, got 2"):
            moe_layer(x, w_router, weights[:2], weights[:2], weights[:2], **options)
    finally:
        dist.destroy_process_group()
