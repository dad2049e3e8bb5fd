"""Every TPU kernel on two cores, its parallel steps in another order, in memory that is NaN until it is written."""

from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from typing import Any

import numpy as np
import pytest

from parity.backends import load_kernel, runner
from parity.inputs import draw
from parity.op import Op, outputs
from tests.matrix import OPS
from tests.support.tiny import tiny
from tests.support.tpu_code import WITHOUT_KERNELS

pytestmark = pytest.mark.tpu
USUAL = ("gmm", "fp8_quantize", "chunk_gla_fwd")
FEW_STEPS = dict(T=10, H=1)
SETTINGS: dict[str, dict[str, dict[str, Any]]] = {
    "fused_recurrent_simple": {"": {}, "-gamma": dict(gates="gamma"), "-reverse": dict(reverse=True)},
    "fused_recurrent_gla": {"": {}, "-reverse": dict(reverse=True)},
    "moe_layer": {"": {}, "-fp8": dict(quantize="fp8"), "-mxfp8": dict(quantize="mxfp8")},
}
CALLS = [
    pytest.param(op, settings, id=op.name + name, marks=[pytest.mark.full] * (op.name + name not in USUAL))
    for op in OPS
    if op.name not in WITHOUT_KERNELS
    for name, settings in next((of for start, of in SETTINGS.items() if op.name.startswith(start)), {"": {}}).items()
]


@contextmanager
def watched() -> Iterator[list[bool]]:
    """Appends whether a race was found while the context was open."""
    from jax.experimental.pallas import tpu as pltpu

    interpreter = import_module("jax._src.pallas.mosaic.interpret.interpret_pallas_call")
    pltpu.reset_tpu_interpret_mode_state()
    found: list[bool] = []
    yield found
    found.append(bool(interpreter.races and interpreter.races.races_found))
    pltpu.reset_tpu_interpret_mode_state()


def called(op: Op, settings: dict[str, Any], interpret: Any) -> dict[str, np.ndarray]:
    case = tiny(op, **(FEW_STEPS if "gla" in op.name else {}) | settings)
    arguments = {**op.arguments(case), **op.route(case), "interpret": interpret}
    return outputs(runner("tpu").run(load_kernel(op.tpu), draw(op, case), arguments))


def strict(**options: Any) -> Any:
    from jax.experimental.pallas import tpu as pltpu

    return pltpu.InterpretParams(uninitialized_memory="nan", detect_races=True, **options)


@pytest.mark.parametrize(("op", "settings"), CALLS)
def test_two_cores_in_any_order_compute_the_same_without_a_race(op, settings):
    """But for the last bits of dots, which in the cores' own threads are the CPU's; and codes on a border thereby."""
    pytest.importorskip("jax")
    expected = called(op, settings, True)
    with watched() as found:
        got = called(op, settings, strict(num_cores_or_threads=2, random_seed=1))
    assert found == [False]
    allowed = 0.1 if "quantize" in settings else 1e-4
    for name, x in expected.items():
        wide, own = x.astype(np.float64), got[name].astype(np.float64)
        np.testing.assert_allclose(own, wide, rtol=0, atol=allowed * np.abs(wide).max(initial=0), err_msg=name)


@pytest.mark.parametrize("parallel", [0, 1])
def test_a_wrongly_parallel_axis_is_reported(parallel):
    """A sum over the steps of a grid: of two cores one adds to what the other has."""
    jax = pytest.importorskip("jax")
    from jax.experimental import pallas as pl

    from tpu_kernels._lib.call import Block, call

    def add(x: Any, out: Any, scratch: None) -> None:
        out[...] = x[...] + jax.numpy.where(pl.program_id(0) == 0, 0.0, out[...])

    x = jax.numpy.ones((32, 128))
    blocks = (
        Block(x, (8, 128), lambda i: (i, 0)),
        Block(jax.ShapeDtypeStruct((8, 128), x.dtype), (8, 128), lambda i: (0, 0)),
    )
    cost = pl.CostEstimate(flops=0, transcendentals=0, bytes_accessed=0)
    interpret = strict(num_cores_or_threads=2, random_seed=1)
    with watched() as found:
        out = call(
            add,
            name="sum",
            grid=(4,),
            parallel=parallel,
            operands=blocks[0],
            out=blocks[1],
            cost=cost,
            interpret=interpret,
        )
        jax.block_until_ready(out)
    assert found == [bool(parallel)]
