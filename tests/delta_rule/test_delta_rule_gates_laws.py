"""The gates, the SiLU and their gradients at arguments of any size: the matrix draws few beyond 3.

Log(1 + e) for a softplus loses 3 bits at -2 and all at -17, and a sigmoid's slope as s (1 - s) as many at 17.
"""

import numpy as np
import pytest

from parity.op import outputs
from tests.support.functions import BACKENDS, of_any_size, run

ROUNDINGS = 8
"""Of 2^-24 of a value. The emulated kernels take up to 4."""

X = of_any_size(80.0)
ONES = np.ones((1, 1, X.size), np.float32)

# An argument to a head or channel: nothing is summed.
GATE = {"a": X.reshape(ONES.shape), "A_log": np.zeros_like(X)}
RATE = {"a": ONES, "A_log": X / 4}
STEP = {"x": X.reshape(ONES.shape), "weight": ONES.reshape(-1, 1)}
LAWS = {
    "softplus": ("softplus_gate", GATE, {}),
    "rate": ("softplus_gate", RATE, {}),
    "gradients of softplus": ("softplus_gate_bwd", GATE | {"dg": ONES}, {}),
    "sigmoid": ("bounded_gate", GATE, {}),
    "gradients of sigmoid": ("bounded_gate_bwd", GATE | {"dg": ONES}, {}),
    "silu": ("causal_conv1d", STEP, {"activation": "silu"}),
    "gradients of silu": ("causal_conv1d_bwd", STEP | {"dy": ONES}, {"activation": "silu"}),
}


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", LAWS)
def test_an_argument_of_any_size_costs_a_few_roundings(name, backend):
    function, inputs, options = LAWS[name]
    got, golden = (outputs(run(where, function, inputs, **options)) for where in (backend, "golden"))
    assert got.keys() == golden.keys()
    for output, expected in golden.items():
        size = np.abs(expected).ravel()
        if name == "gradients of silu":  # zero at -1.28, where two terms cancel
            x = X.astype(np.float64)
            size = (1 + np.abs(x) / (1 + np.exp(x))) / (1 + np.exp(-x)) * (np.abs(x) if output == "dweight" else 1)
        lost = np.abs(got[output].astype(np.float64) - expected).ravel() * 2.0**24 / size
        assert lost.max() <= ROUNDINGS, f"{output} of {X[lost.argmax()]}: {lost.max():.3g} roundings"
