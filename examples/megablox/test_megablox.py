"""The verdicts that jax's megablox deserves."""

from matrix import GMM, GMM_BWD, TGMM

import parity


@parity.cases(GMM, TGMM, GMM_BWD, backend="tpu")
def test_agrees_with_golden(run):
    run.agrees()


@parity.cases(GMM, TGMM, backend="tpu", data="integers")
def test_is_exact_on_integers(run):
    run.is_exact()
