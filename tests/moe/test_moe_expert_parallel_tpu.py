"""The layer on several devices, each with its part of the tokens and experts, and the layer on one device."""

from importlib.util import find_spec

import pytest

from parity.compilers.mosaic import Abstract, Compilation, compile_for_tpu
from tests.matrix.models import QWEN3_30B
from tests.support import parallel

pytest.importorskip("jax")
pytestmark = pytest.mark.tpu
DEVICES = 8
SIZES = (64, 64, 32, 16)  # T, D, F, E


@parallel.EACH_CASE
@pytest.mark.parametrize("devices", [2, pytest.param(DEVICES, marks=pytest.mark.full)])
def test_several_devices_give_what_one_does(name, devices):
    several = dict(XLA_FLAGS=f"--xla_force_host_platform_device_count={devices}", JAX_PLATFORMS="cpu")
    parallel.check(name, parallel.ask("shards", SIZES, *parallel.CASES[name], **several))


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

    from tests.support.shards import AXIS, tensors
    from tpu_kernels.moe import moe_layer

    *given, _ = tensors((8, 16, 16, 4), "float32", 0)
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
