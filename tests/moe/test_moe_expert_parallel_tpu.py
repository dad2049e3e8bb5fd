"""The layer on eight devices, each with an eighth of the tokens and experts, and the layer on one device."""

import json
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from parity.compilers.mosaic import Abstract, Compilation, compile_for_tpu
from tests.matrix.models import QWEN3_30B

pytest.importorskip("jax")
pytestmark = pytest.mark.tpu
ROOT = Path(__file__).parents[2]
DEVICES = 8
SUM_OF_PARTS = 16 * 2.0**-24  # w_router's gradient: what its parts round off, and their sum, of its largest element


def compare(*comparisons):
    """What `tests.support.shards` finds; in a process of its own, because JAX counts devices when it loads."""
    environment = os.environ | {
        "XLA_FLAGS": f"--xla_force_host_platform_device_count={DEVICES}",
        "JAX_PLATFORMS": "cpu",
        "PYTHONPATH": os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]),
    }
    command = [sys.executable, "-m", "tests.support.shards", *map(json.dumps, comparisons)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=540, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    return [json.loads(line) for line in done.stdout.splitlines()]


SIZES = (64, 64, 32, 16)  # T, D, F, E
CASES = {
    # Everyone likes the first experts best: most rows go to one device, and beyond its capacity.
    "skewed": (SIZES, "bfloat16", 30, dict(top_k=2, capacity=5)),
    "balanced": (SIZES, "float32", 0, dict(top_k=4)),
    "more_choices_than_experts_on_a_device": (SIZES, "float32", 30, dict(top_k=5, renormalize=False)),
    "fp8": (SIZES, "bfloat16", 0, dict(top_k=2, quantize="fp8", block_size=32)),
    "mxfp8": (SIZES, "bfloat16", 30, dict(top_k=2, quantize="mxfp8", capacity=7)),
}


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[] if name == "skewed" else [pytest.mark.full]) for name in CASES]
)
def test_eight_devices_give_what_one_does(name):
    """Rows of an expert are in the same order: the same bits, but where blocks of rows share scales or parts are added.

    The router's gradient is a sum of the devices' parts. Quantised by columns, rows share a scale with others on a
    device than they do where all are on one, so that weights' gradients differ as two roundings to e4m3 do.
    """
    (found,) = compare(CASES[name])
    for output, (same_bits, difference, dtype) in found.items():
        if output == "w_router":
            assert dtype == "float32"
            assert difference <= SUM_OF_PARTS
        elif output.startswith("w_") and CASES[name][3].get("quantize"):
            assert difference < 2 * 2.0**-4
        else:
            assert same_bits, output


@pytest.mark.full
@pytest.mark.skipif(find_spec("libtpu") is None, reason="the TPU compiler is not installed: pip install libtpu")
@pytest.mark.parametrize("quantize", [None, "fp8", "mxfp8"])
def test_compiles_for_eight_cores(quantize):
    """The layer of Qwen3-30B-A3B, 1024 tokens to a core of a tpu7x 2x2x1."""
    model, tokens = QWEN3_30B, 8192

    def parts(*shape, dtype="bfloat16"):
        return Abstract(shape, dtype, split=0)

    shapes = (model.experts, model.hidden, model.intermediate)
    arguments = {
        "x": parts(tokens, model.hidden),
        "w_router": Abstract((model.hidden, model.experts), "float32"),
        "w_gate": parts(*shapes),
        "w_up": parts(*shapes),
        "w_down": parts(model.experts, model.intermediate, model.hidden),
    }
    options = {"top_k": model.top_k, "quantize": quantize, "interpret": False}
    passes = {"sharded_layer": {}, "sharded_layer_bwd": {"dout": parts(tokens, model.hidden)}}
    compiled = compile_for_tpu(
        [
            Compilation(f"tests.support.shards:{name}", "tpu7x", (), arguments | more | options, cores=DEVICES)
            for name, more in passes.items()
        ]
    )
    assert [result.error for result in compiled if not result.ok] == []


def test_bad_shards_are_refused():
    import jax
    from jax.sharding import PartitionSpec

    from tests.support.shards import AXIS, draw
    from tpu_kernels.moe import moe_layer

    *given, _ = draw(8, 16, 16, 4, "float32", 0)
    mesh = jax.sharding.AbstractMesh((2,), (AXIS,))
    whole = PartitionSpec()

    def layer(experts, **options):
        tensors = [x[:experts] if x.ndim == 3 else x for x in given]
        run = jax.shard_map(
            lambda *tensors: moe_layer(*tensors, top_k=2, axis_name=AXIS, **options),
            mesh=mesh, in_specs=whole, out_specs=whole, check_vma=False,
        )  # fmt: skip
        jax.eval_shape(run, *tensors)

    with pytest.raises(ValueError, match="w_gate must have E / devices = 4 / 2 experts on each device, got 4"):
        layer(4)
    with pytest.raises(ValueError, match="group_offset must be 0 where experts are shared out over devices, got 1"):
        layer(2, group_offset=1)
