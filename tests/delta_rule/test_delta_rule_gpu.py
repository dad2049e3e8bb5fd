"""The delta rules on the GPU, or its emulation, against the float64 golden."""

import numpy as np
import pytest

from cpu_golden import gated_delta_rule as golden
from parity.interop import to_torch
from parity.op import outputs
from tests.delta_rule.test_delta_rule_cpu import problem
from tests.matrix.delta_rule import DELTA_RULES, is_usual
from tests.support.agreement import agree, are_exact
from tests.support.interpreter import interpreted

test_agrees_with_golden = agree(*DELTA_RULES, backend="gpu")
test_is_exact_on_integers = are_exact(*DELTA_RULES, backend="gpu", where=is_usual)


@interpreted
def test_a_recurrence_goes_back_through_several_blocks_of_steps(monkeypatch):
    monkeypatch.setattr(pytest.importorskip("gpu_reference.recurrent_delta_rule"), "BLOCK", 4)
    forward, backward = problem("gated_delta_rule", b=1, t=6, h=1, hv=2, k=4, v=4)
    given = {name: x.astype(np.float32) for name, x in (forward | backward).items()}
    expected = golden.fused_recurrent_gated_delta_rule_bwd(**given)
    kernel = pytest.importorskip("gpu_reference.gated_delta_rule").fused_recurrent_gated_delta_rule_bwd
    got = kernel(**{name: to_torch(x) for name, x in given.items()})
    for name, x in outputs(expected).items():
        np.testing.assert_allclose(outputs(got)[name], x, rtol=0, atol=1e-4 * np.abs(x).max(), err_msg=name)
