"""Both kernels against the golden, on integers, and against each other."""

from matrix import SOFTMAX

import parity


@parity.cases(SOFTMAX, backend="tpu")
def test_the_tpu_agrees(run):
    run.agrees()


@parity.cases(SOFTMAX, backend="gpu")
def test_the_gpu_agrees(run):
    run.agrees()


@parity.cases(SOFTMAX, backend="tpu", data="integers")
def test_the_tpu_is_exact_on_integers(run):
    run.is_exact()


@parity.cases(SOFTMAX, backend="gpu", data="integers")
def test_the_gpu_is_exact_on_integers(run):
    run.is_exact()


@parity.cases(SOFTMAX, backend="tpu", compared=True)
def test_the_tpu_is_no_worse_than_the_gpu(run):
    run.is_no_worse()
