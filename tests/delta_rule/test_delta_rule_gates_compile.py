"""The gates of delta rules through the real compilers: for every TPU, and every GPU without spills."""

import pytest

from tests.matrix.delta_rule import GATES
from tests.matrix.ops import BF16, F32
from tests.support import gpu_code, tpu_code
from tests.support.calls import point

SIZES = [dict(B=2, T=4096, HV=32), dict(B=2, T=4096, HV=16, K=128), dict(B=1, T=77, HV=3, K=100)]
EVERYTHING = [(op, point(op, (dtype, F32), **sizes)) for op in GATES for dtype in (F32, BF16) for sizes in SIZES]
BACKWARD = [call for call in EVERYTHING if call[0].name == "softplus_gate_bwd" and call[1].dtype == BF16][:1]


@pytest.mark.full
@gpu_code.some_then_all("sm_90", BACKWARD, EVERYTHING)
def test_compiles_for_gpus(target, calls):
    pytest.importorskip("triton")
    found = {name: gpu_code.problem(kernel.result) for name, kernel in gpu_code.kernels(calls, target).items()}
    assert len(found) == len(calls)
    assert not {name: problem for name, problem in found.items() if problem}


@pytest.mark.full
@tpu_code.needs_compiler
@tpu_code.EACH_CHIP
def test_compiles_for_tpus(chip):
    assert len(tpu_code.compiled(EVERYTHING, chip)) == len(EVERYTHING)
