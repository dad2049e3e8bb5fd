"""Both kernels against the golden, and a gradient of the weight that is summed in bfloat16."""

import importlib.util
from pathlib import Path

import pytest
from matrix import RMSNORM, RMSNORM_BWD

import parity
from parity.judging.judge import judge
from parity.trial import Trial

IN_BFLOAT16 = {
    "tpu": (
        "dweight_ref[...] += jnp.sum(dy * normed, axis=0, keepdims=True)",
        "dweight_ref[...] = (dweight_ref[...] + jnp.sum(dy * normed, axis=0, keepdims=True)"
        ").astype(jnp.bfloat16).astype(jnp.float32)",
    ),
    "gpu": ("dweight += dy * normed", "dweight = (dweight + dy * normed).to(tl.bfloat16).to(tl.float32)"),
}


@parity.cases(RMSNORM, RMSNORM_BWD, backend="tpu")
def test_the_tpu_agrees(run):
    run.agrees()


@parity.cases(RMSNORM, RMSNORM_BWD, backend="gpu")
def test_the_gpu_agrees(run):
    run.agrees()


@pytest.mark.parametrize("case", RMSNORM_BWD.cases[:2], ids=lambda case: case.dtype)
@pytest.mark.parametrize("backend", IN_BFLOAT16)
def test_a_gradient_of_the_weight_summed_in_bfloat16_fails(backend, case, tmp_path):
    kernel = with_plant(backend, *IN_BFLOAT16[backend], tmp_path).rmsnorm_bwd
    judged = judge(Trial(RMSNORM_BWD, case, backend, other=kernel))
    assert not judged.verdict.passed
    assert judged.output == "dweight"


def with_plant(module, old, new, folder):
    """A copy of a module, `new` in the place of `old`."""
    source = Path(__file__).with_name(f"{module}.py").read_text()
    assert source.count(old) == 1
    path = folder / f"{module}_planted.py"
    path.write_text(source.replace(old, new))
    spec = importlib.util.spec_from_file_location(path.stem, path)
    planted = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(planted)
    return planted
