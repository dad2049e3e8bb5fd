"""The gates of delta rules on the TPU, or its emulation, against the float64 golden."""

import pytest

from parity.judging.judge import judge
from parity.trial import Trial
from tests.matrix.delta_rule import GATES
from tests.matrix.ops import F32
from tests.support.agreement import agree, are_no_worse

test_agrees_with_golden = agree(*GATES, backend="tpu")
test_is_no_worse_than_the_gpu = are_no_worse(*GATES)


@pytest.mark.parametrize(("dtype", "rows"), [("float32", 8), ("bfloat16", 16)])
def test_a_tile_of_few_rows_is_a_whole_register(dtype, rows):
    jax = pytest.importorskip("jax")
    from tpu_kernels.gates import Tiles

    assert Tiles.of(jax.ShapeDtypeStruct((3, 5), dtype)) == ((3, 5), rows, 5)


@pytest.mark.tpu
def test_a_gradient_sums_the_rows_that_there_are_in_the_last_of_several_tiles():
    op = next(op for op in GATES if op.name == "softplus_gate_bwd")
    (case,) = op.grid([dict(B=1, T=300, HV=2)], dtype=[(F32, F32)])
    judged = judge(Trial(op, case, "tpu"))
    assert judged.verdict.passed, judged.verdict
