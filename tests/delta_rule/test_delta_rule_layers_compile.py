"""What a layer has around its delta rule, convolution and gates, through the real compilers: for every TPU, and every
GPU without spills.
"""

import pytest

from tests.matrix.delta_rule import CAUSAL_CONV1D, GATES
from tests.matrix.ops import BF16, F32
from tests.support import gpu_code, tpu_code
from tests.support.calls import point

CONV = [dict(B=2, T=4096, D=8192, W=4), dict(B=1, T=4096, D=1536, W=4, N=11), dict(B=1, T=77, D=100, W=2)]
EVERYTHING = [(op, point(op, dtype, **sizes)) for op in CAUSAL_CONV1D for dtype in (F32, BF16) for sizes in CONV]
EVERYTHING += [(op, point(op, F32, B=1, T=77, D=100, W=width)) for op in CAUSAL_CONV1D for width in (1, 7)]
OF_GATES = [dict(B=2, T=4096, HV=32), dict(B=2, T=4096, HV=16, K=128), dict(B=1, T=77, HV=3, K=100)]
EVERYTHING += [(op, point(op, (dtype, F32), **sizes)) for op in GATES for dtype in (F32, BF16) for sizes in OF_GATES]
FORWARD = [call for call in EVERYTHING if call[0].name == "causal_conv1d" and call[1].dtype == BF16][1:2]


@gpu_code.some_then_all("sm_90", FORWARD, EVERYTHING)
def test_compiles_for_gpus(target, calls):
    pytest.importorskip("triton")
    found = {name: gpu_code.problem(kernel.result) for name, kernel in gpu_code.kernels(calls, target).items()}
    assert len(found) >= len(calls)
    assert not {name: problem for name, problem in found.items() if problem}


@pytest.mark.full
@tpu_code.needs_compiler
@tpu_code.EACH_CHIP
def test_compiles_for_tpus(chip):
    assert len(tpu_code.compiled(EVERYTHING, chip)) == len(EVERYTHING)
