"""A state that nothing is written into decays as its gates say, over many chunks, on both backends.

The decay of a chunk of slow steps is near 1, and the same in every chunk. In one float32 it errs by up to 2^-25, which
64 chunks add up to 2^-19; in two parts it errs by next to nothing. Roundings of the state differ from element to
element: their mean over a head is small. No case of the default tier has so many chunks.
"""

import numpy as np
import pytest

from parity.op import outputs
from tests.support.functions import run

STEPS, HEADS, K, V = 1024, 2, 16, 16
LIMIT = 6
"""Of 2^-24. The mean of a head is up to 0.5; with decays in one float32 it is 31 or more."""

OPS = {
    "chunk_simple_gla": {"g": ()},
    "chunk_gla": {"gk": (K,)},
    "chunk_gated_delta_rule": {"g": (), "beta": ()},
    "chunk_kda": {"g": (K,), "beta": ()},
}
USUAL = {("chunk_gla_fwd", "tpu"), ("chunk_simple_gla_bwd", "tpu"), ("chunk_kda_bwd", "tpu"),
         ("chunk_simple_gla_fwd", "gpu"), ("chunk_gated_delta_rule_bwd", "gpu")}  # fmt: skip
"""Of each of the pieces of code that decay a state one op; the others are in the full tier."""


def farthest_from_float32():
    """The gates of which the decay of a chunk of 16 steps, and of 32, is nearest to the middle of two float32."""
    gates = -np.linspace(2e-4, 2e-3, 2000).astype(np.float32)
    decays = np.exp(np.array([[16.0], [32.0]]) * gates)
    lost = np.abs(decays - decays.astype(np.float32)).min(axis=0)
    return gates[np.argsort(lost)[-HEADS:]]


@pytest.mark.parametrize(
    ("name", "way", "backend"),
    [
        pytest.param(
            name, way, backend,
            marks=[getattr(pytest.mark, backend)] + [pytest.mark.full] * ((f"{name}_{way}", backend) not in USUAL),
        )
        for name in OPS
        for way in ("fwd", "bwd")
        for backend in ("tpu", "gpu")
    ],
)  # fmt: skip
def test_a_state_alone_decays_by_the_sum_of_its_gates(name, way, backend):
    gates, rows = farthest_from_float32(), (1, STEPS, HEADS)
    inputs = {x: np.zeros((*rows, size), np.float32) for x, size in (("q", K), ("k", K), ("v", V))}
    for gate, channels in OPS[name].items():
        of_head = np.full(HEADS, 0.5, np.float32) if gate == "beta" else gates
        inputs[gate] = np.ones((*rows, *channels), np.float32) * of_head.reshape(HEADS, *[1] * len(channels))
    inputs["initial_state"] = state = np.random.default_rng(0).uniform(1, 2, (1, HEADS, K, V)).astype(np.float32)
    options = {"chunk_size": 16}
    if way == "fwd":
        options["output_final_state"] = True
    else:
        inputs |= {"do": inputs["v"], "dht": state}
    got = outputs(run(backend, f"{name}_{way}", inputs, **options))["ht" if way == "fwd" else "dh0"]
    expected = state * np.exp(STEPS * gates.astype(np.float64))[:, None, None]
    lost = np.mean(got / expected - 1, axis=(0, 2, 3)) * 2.0**24
    assert np.abs(lost).max() <= LIMIT, f"by head: {lost} of 2^-24"
