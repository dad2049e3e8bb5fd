# ruff: noqa: E402 (frameworks may be missing, and are asked for before they are imported)
"""What differs between a GPU's tensors and the CPU's, interpreted both ways: a shard's offset, what dots multiply."""

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("triton")

from gpu_reference import quantized_gmm
from gpu_reference._lib.launch import Launch
from parity.backends import load_kernel, runner
from parity.inputs import draw
from parity.op import outputs
from parity.trial import Trial
from tests.matrix import OPS
from tests.support.interpreter import DEVICE
from tests.support.tiny import tiny

pytestmark = pytest.mark.gpu
SHARDED = [op for op in OPS if "group_offset" in op.arguments(tiny(op))]
STRIDED = ("fp8_quantize", "unpermute", "chunk_gated_delta_rule_fwd", "softplus_gate_bwd", "moe_layer")
BETWEEN = torch.tensor([9, 1, 9])


@pytest.mark.parametrize("op", [pytest.param(op, id=op.name) for op in SHARDED])
def test_an_offset_in_a_tensor_is_the_int_and_reaches_the_kernels(op, monkeypatch):
    case, loaded = tiny(op), []

    def run(launch, device, run=Launch.run):
        found = launch.arguments.get("task", launch.arguments.get("shard"))
        loaded.append(getattr(found, "shard", found))
        run(launch, device)

    monkeypatch.setattr(Launch, "run", run)

    def called(offset):
        loaded.clear()
        arguments = {**op.arguments(case), "group_offset": offset}
        return outputs(runner("gpu").run(load_kernel(op.gpu), draw(op, case), arguments))

    expected = called(1)
    scalars = [BETWEEN[1:2], BETWEEN[1].int(), BETWEEN[1:2].int(), BETWEEN[1]]
    for offset in (x.to(DEVICE) for x in scalars):
        got = called(offset)
        for name, value in expected.items():
            np.testing.assert_array_equal(got[name], value)
        firsts = [shard.group_offset for shard in loaded if shard is not None]
        given = [x for x in firsts if x.any()]  # a layer's router has a shard of its own, from 0
        assert given and all(x.data_ptr() == offset.data_ptr() and x.dtype == offset.dtype for x in given)


def spread(x):
    """The tensor, every second element of memory that begins with another."""
    if not isinstance(x, torch.Tensor) or x.ndim == 0:
        return x
    memory = torch.zeros((*x.shape[:-1], 2 * x.shape[-1] + 1), dtype=x.dtype, device=x.device)
    view = memory[..., 1::2]
    view.copy_(x.detach())
    return view


@pytest.mark.parametrize(
    "op", [pytest.param(op, id=op.name, marks=[pytest.mark.full] * (op.name not in STRIDED)) for op in OPS]
)
def test_tensors_of_any_strides_and_offsets_are_read_where_they_are(op):
    case, kernel = tiny(op), load_kernel(op.gpu)
    arguments = {**op.arguments(case), **op.route(case)}
    expected, got = (
        outputs(runner("gpu").run(function, draw(op, case), arguments))
        for function in (kernel, lambda **given: kernel(**{name: spread(x) for name, x in given.items()}))
    )
    for name, value in expected.items():  # by their bits: scales of MXFP8 may be NaN
        assert got[name].tobytes() == value.tobytes(), name


@pytest.mark.parametrize("target", ["sm_80", "sm_90"])
@pytest.mark.parametrize("name", ["gmm_quantized", "tgmm_quantized"])
def test_fp8_is_widened_for_gpus_without_it_or_without_float32_sums(name, target, monkeypatch):
    (op,) = (op for op in OPS if op.name == name)
    monkeypatch.setattr(quantized_gmm, "architecture", lambda device: target)
    trial = Trial(op, tiny(op), "gpu")
    path = quantized_gmm.dot_path(torch.float8_e4m3fn, torch.float8_e4m3fn, torch.float32, target)
    assert path.dtype == "float16"
    error = np.abs(trial.run()["out"] - trial.reference.golden["out"])
    assert np.all(error <= 1e-6 * trial.reference.magnitude["out"])
