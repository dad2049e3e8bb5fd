"""The layer's SiLU and its slope at gates of any size: in sums over channels the large ones hide all others.

(1 + tanh) / 2 for a sigmoid loses half of a float32's bits at -8.
"""

import numpy as np
import pytest

from parity.op import outputs
from tests.support.functions import BACKENDS, of_any_size, run

ROUNDINGS = 12
"""Of 2^-24 of a result, or of its two terms. The emulated layers take up to 7."""

X = of_any_size(40.0)[:, None]
ONES = {"w_router": np.ones((1, 1), np.float32)} | dict.fromkeys(
    ("w_gate", "w_up", "w_down"), np.ones((1, 1, 1), np.float32)
)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", ["moe_layer", "moe_layer_bwd"])
def test_a_gate_of_any_size_costs_a_few_roundings(name, backend):
    """One expert and one channel, of weights that are 1: tokens x become x silu(x)."""
    is_backward = name == "moe_layer_bwd"
    inputs = {"x": X, **ONES} | ({"dout": np.ones_like(X)} if is_backward else {})
    of = "x" if is_backward else "out"
    got, golden = (outputs(run(where, name, inputs, top_k=1))[of] for where in (backend, "golden"))
    x, size = X.astype(np.float64), np.abs(golden)
    if is_backward:  # zero at -1.8, where two terms cancel
        size = np.abs(x) / (1 + np.exp(-x)) * (2 + np.abs(x) / (1 + np.exp(x)))
    lost = np.abs(got.astype(np.float64) - golden) * 2.0**24 / size
    assert lost.max() <= ROUNDINGS, f"of {X[lost.argmax()]}: {lost.max():.3g} roundings"
