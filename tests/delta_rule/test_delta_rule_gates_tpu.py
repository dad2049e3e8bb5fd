"""The gates of delta rules on the TPU, or its emulation, against the float64 golden."""

import numpy as np
import pytest

import cpu_golden.gates
from tests.matrix.delta_rule import GATES
from tests.support.agreement import agree, are_exact, are_no_worse

test_agrees_with_golden = agree(*GATES, backend="tpu")
test_is_exact_on_integers = are_exact(*GATES, backend="tpu", where=lambda case: False)
test_is_no_worse_than_the_gpu = are_no_worse(*GATES)


@pytest.mark.parametrize(("dtype", "rows"), [("float32", 8), ("bfloat16", 16)])
def test_a_tile_of_few_rows_is_a_whole_register(dtype, rows):
    jax = pytest.importorskip("jax")
    from tpu_kernels.gates import Tiles

    assert Tiles.of(jax.ShapeDtypeStruct((3, 5), dtype)) == ((3, 5), rows, 5)


def test_a_gradient_sums_the_rows_that_there_are_in_the_last_of_several_tiles():
    jax = pytest.importorskip("jax")
    import tpu_kernels.gates

    rng = np.random.default_rng(0)
    a, dg = rng.standard_normal((2, 1, 300, 2)).astype(np.float32)
    given = {"A_log": np.zeros(2, np.float32)}
    expected = cpu_golden.gates.softplus_gate_bwd(a, dg, **given)
    got = tpu_kernels.gates.softplus_gate_bwd(*map(jax.numpy.asarray, (a, dg)), **given)
    np.testing.assert_allclose(got.dA_log, expected.dA_log, rtol=1e-4)
