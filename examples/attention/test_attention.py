"""Both kernels against the golden, and what no kernel may do."""

import importlib.util
from pathlib import Path

import pytest
from matrix import ATTENTION

import parity
from parity.judging.judge import judge
from parity.trial import Trial

ACCUMULATOR = "a bfloat16 accumulator", "out"
SHRINK = "a bfloat16 exp of the row maxima", "lse"
LSE = "a float16 lse", "lse"
PLANTS = {
    "tpu": {
        ACCUMULATOR: ("return top, mass, acc", "return top, mass, acc.astype(jnp.bfloat16).astype(jnp.float32)"),
        SHRINK: ("jnp.exp(before - top)", "jnp.exp((before - top).astype(jnp.bfloat16)).astype(jnp.float32)"),
        LSE: ("top + jnp.log(mass)", "(top + jnp.log(mass)).astype(jnp.float16).astype(jnp.float32)"),
    },
    "gpu": {
        ACCUMULATOR: ("shrink[:, None] * acc)", "shrink[:, None] * acc).to(tl.bfloat16).to(tl.float32)"),
        SHRINK: ("tl.exp(before - top)", "tl.exp(before - top).to(tl.bfloat16).to(tl.float32)"),
        LSE: ("top + tl.log(mass)", "(top + tl.log(mass)).to(tl.float16).to(tl.float32)"),
    },
}


@parity.cases(ATTENTION, backend="tpu")
def test_the_tpu_agrees(run):
    run.agrees()


@parity.cases(ATTENTION, backend="gpu")
def test_the_gpu_agrees(run):
    run.agrees()


@pytest.mark.parametrize("backend", PLANTS)
@pytest.mark.parametrize("plant", [ACCUMULATOR, SHRINK, LSE], ids=lambda plant: plant[0])
def test_a_planted_loss_of_precision_fails(backend, plant, tmp_path):
    kernel = with_plant(backend, *PLANTS[backend][plant], tmp_path).attention
    case = next(case for case in ATTENTION.cases if case.out == "float32")
    judged = judge(Trial(ATTENTION, case, backend, other=kernel))
    assert judged.verdict.gate == "G3"
    assert not judged.verdict.passed
    assert judged.output == plant[1]


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
