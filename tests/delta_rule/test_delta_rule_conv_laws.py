"""What the causal convolution's kernels hold whatever they round: steps are computed alike wherever they lie."""

from itertools import pairwise

import numpy as np
import pytest

from parity.backends import load_kernel, runner
from parity.op import outputs
from tests.matrix.delta_rule import CAUSAL_CONV1D
from tests.support.functions import FRAMEWORKS

FORWARD = CAUSAL_CONV1D[0]
ON_EACH = pytest.mark.parametrize(
    "backend",
    [pytest.param("tpu", marks=[pytest.mark.tpu, pytest.mark.full]), pytest.param("gpu", marks=pytest.mark.gpu)],
)


def drawn(*shape):
    return np.random.default_rng(len(shape)).standard_normal(shape).astype(np.float32)


def convolved(backend, x, **given):
    """y and the final state."""
    tensors = {"x": x, "weight": drawn(8, 4), "bias": drawn(8), "cu_seqlens": None} | given
    options = dict(activation="silu", output_final_state=True)
    found = outputs(runner(backend).run(load_kernel(getattr(FORWARD, backend)), tensors, options))
    return found["y"], found["ht"]


@ON_EACH
@pytest.mark.parametrize(("steps", "cuts"), [(45, (1, 2, 32, 44)), (512, (300,))])
def test_a_convolution_goes_on_from_its_state_bit_by_bit(backend, steps, cuts):
    pytest.importorskip(FRAMEWORKS[backend])
    x, state = drawn(1, steps, 8), drawn(8, 3)[None]
    y, ht = convolved(backend, x, initial_state=state)
    for cut in cuts:
        first, kept = convolved(backend, x[:, :cut], initial_state=state)
        second, last = convolved(backend, x[:, cut:], initial_state=kept)
        np.testing.assert_array_equal(np.concatenate([first, second], axis=1), y)
        np.testing.assert_array_equal(last, ht)


@ON_EACH
def test_a_packed_sequence_is_convolved_as_if_alone(backend):
    pytest.importorskip(FRAMEWORKS[backend])
    x, offsets = drawn(1, 45, 8), np.array([0, 0, 1, 1, 34, 36, 45, 45], np.int32)
    states = drawn(7, 8, 3)
    y, ht = convolved(backend, x, initial_state=states, cu_seqlens=offsets)
    for n, (start, end) in enumerate(pairwise(offsets)):
        alone, kept = convolved(backend, x[:, start:end], initial_state=states[n : n + 1])
        np.testing.assert_array_equal(y[:, start:end], alone)
        np.testing.assert_array_equal(ht[n : n + 1], kept)
