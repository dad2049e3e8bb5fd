"""A golden is what every kernel is held to: an edit that moves one of its roundings is seen here, and nowhere else."""

import pytest

from tests.matrix import OPS
from tests.support.goldens import digests, recorded


@pytest.mark.parametrize("op", OPS, ids=lambda op: op.name)
def test_a_golden_rounds_as_recorded(op):
    assert digests(op) == recorded()[op.name], "if it is meant: python -m tests.support.goldens"
