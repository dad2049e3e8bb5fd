# ruff: noqa: E402 (frameworks may be missing, and are asked for before they are imported)
"""Which values the delta rules' kernels on the GPU show `parity stages`: those of rows that there are, each once."""

import pytest

pytest.importorskip("triton")
torch = pytest.importorskip("torch")

from gpu_reference.gated_delta_rule import chunk_gated_delta_rule_bwd
from tests.support.interpreter import interpreted, shown


@pytest.mark.gpu
@interpreted
def test_a_backward_pass_shows_the_rows_and_the_pairs_that_there_are():
    """Two heads of blocks of 16 rows and of 4."""
    keys, values, steps = (1, 20, 2, 16), (1, 20, 2, 8), (1, 20, 2)
    shapes = dict(q=keys, k=keys, v=values, g=steps, beta=steps, do=values)
    with shown() as counts:
        chunk_gated_delta_rule_bwd(**{name: torch.full(shape, -0.125) for name, shape in shapes.items()}, chunk_size=16)
    pairs = 2 * (16**2 + 4**2)
    assert (counts["dv_new"], counts["dP"], counts["dA"]) == (2 * 20 * 8, pairs, pairs)
