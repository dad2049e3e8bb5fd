"""The verdicts that flash-linear-attention deserves."""

from matrix import OPS

import parity


@parity.cases(*OPS, backend="gpu")
def test_agrees_with_golden(run):
    run.agrees()


@parity.cases(*OPS, backend="gpu", data="integers")
def test_is_exact_on_integers(run):
    run.is_exact()
