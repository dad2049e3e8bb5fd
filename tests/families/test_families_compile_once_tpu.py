"""A call like the one before compiles nothing: static arguments are compared by their values, functions too."""

import logging

import pytest

from parity.backends import load_kernel, runner
from parity.inputs import draw
from tests.matrix import OPS
from tests.support.tiny import tiny

pytestmark = pytest.mark.tpu
USUAL = ("gmm", "grouped_dense_bwd", "chunk_gla_fwd")
SETTINGS = {"grouped_dense_bwd": dict(quantize=False, bwd_quantize=False)}


@pytest.mark.parametrize(
    "op", [pytest.param(op, id=op.name, marks=[pytest.mark.full] * (op.name not in USUAL)) for op in OPS]
)
def test_a_second_call_compiles_nothing(op, caplog):
    jax = pytest.importorskip("jax")
    case = tiny(op, **SETTINGS.get(op.name, {}))

    def call():
        arguments = {**op.arguments(case), **op.route(case)}
        if "tiling" in arguments:
            arguments["tiling"] = lambda m, k, n: (32, 64, 32)
        runner("tpu").run(load_kernel(op.tpu), draw(op, case), arguments)

    call()
    with jax.log_compiles(), caplog.at_level(logging.WARNING, logger="jax"):
        call()
    assert not [record.getMessage() for record in caplog.records if "Compiling" in record.getMessage()]
