"""The goldens of what delta rules are fed with: gates and the causal convolution."""

import numpy as np
import pytest

from cpu_golden.causal_conv1d import causal_conv1d, causal_conv1d_bwd
from cpu_golden.gates import bounded_gate, bounded_gate_bwd, softplus_gate, softplus_gate_bwd
from tests.support.differences import check_differences

GATES = {"softplus": (softplus_gate, softplus_gate_bwd), "bounded": (bounded_gate, bounded_gate_bwd)}


@pytest.mark.parametrize("channels", [(), (4,)])
@pytest.mark.parametrize("gate", GATES)
def test_gradients_of_gates_are_their_differences(gate, channels):
    normal = np.random.default_rng(0).standard_normal
    given = dict(a=3 * normal((2, 3, 2, *channels)), A_log=normal(2), dt_bias=normal((2, *channels)))
    dg = normal(given["a"].shape)
    of, bwd = GATES[gate]
    check_differences(lambda x: np.sum(dg * of(**x)), given, bwd(dg=dg, **given), step=1e-6, within=1e-8)
    check_differences(lambda x: np.sum(dg * of(**x, A_log=given["A_log"])), {"a": given["a"]},
                      bwd(given["a"], dg, A_log=given["A_log"]), step=1e-6, within=1e-8)  # fmt: skip
    assert bwd(given["a"], dg, A_log=given["A_log"]).ddt_bias is None


def test_gates_are_their_formulas():
    normal = np.random.default_rng(1).standard_normal
    a, A_log, dt_bias = normal((2, 3, 4)), normal(4), normal(4)
    x, rate = a + dt_bias, np.exp(A_log)
    np.testing.assert_allclose(softplus_gate(a, A_log=A_log, dt_bias=dt_bias), -rate * np.log1p(np.exp(x)), rtol=1e-14)
    np.testing.assert_allclose(bounded_gate(a, A_log=A_log, dt_bias=dt_bias), -5 / (1 + np.exp(-rate * x)), rtol=1e-14)
    np.testing.assert_allclose(bounded_gate(a, lower_bound=-2.0), -2 / (1 + np.exp(-a)), rtol=1e-14)
    wide = normal((1, 2, 4, 8))
    one_rate = [softplus_gate(wide[..., c], A_log=A_log) for c in range(8)]
    np.testing.assert_array_equal(softplus_gate(wide, A_log=A_log), np.stack(one_rate, axis=-1))


def test_gates_of_large_values_neither_overflow_nor_vanish():
    a = np.array([-800.0, -40.0, 40.0, 800.0]).reshape(1, 4, 1)
    zero = np.zeros(1)
    with np.errstate(all="raise", under="ignore"):
        assert softplus_gate(a, A_log=zero).ravel() == pytest.approx([0, -np.exp(-40), -40, -800], abs=0, rel=1e-12)
        assert bounded_gate(a).ravel() == pytest.approx([0, -5 * np.exp(-40), -5, -5], abs=0, rel=1e-12)
        softplus_gate_bwd(a, a, A_log=zero)
        bounded_gate_bwd(a, a, A_log=zero)


def test_a_bounded_gate_is_no_softplus_clamped():
    """Two models: with the same weights they differ by far more than any rounding."""
    a, zero = np.linspace(-3, 3, 7).reshape(1, 7, 1), np.zeros(1)
    clamped = np.maximum(softplus_gate(a, A_log=zero), -5.0)
    assert np.abs(clamped - bounded_gate(a, A_log=zero)).max() > 1


@pytest.mark.parametrize("activation", [None, "silu"])
@pytest.mark.parametrize("width", [1, 2, 4])
def test_gradients_of_the_convolution_are_its_differences(width, activation):
    normal = np.random.default_rng(0).standard_normal
    given = dict(
        x=normal((1, 7, 3)), weight=normal((3, width)), bias=normal(3), initial_state=normal((3, 3, width - 1))
    )
    options = dict(activation=activation, cu_seqlens=np.array([0, 5, 5, 7], np.int32))
    dy, dht = normal((1, 7, 3)), normal((3, 3, width - 1))

    def loss(x):
        y, ht = causal_conv1d(**x, output_final_state=True, **options)
        return np.sum(dy * y) + np.sum(dht * ht)

    check_differences(loss, given, causal_conv1d_bwd(dy=dy, dht=dht, **given, **options), step=1e-6, within=1e-8)


def test_the_convolution_is_its_formula():
    normal = np.random.default_rng(1).standard_normal
    x, weight, bias = normal((2, 9, 3)), normal((3, 4)), normal(3)
    padded = np.pad(x, [(0, 0), (3, 0), (0, 0)])
    sums = sum(weight[:, w] * padded[:, w : w + 9] for w in range(4))
    np.testing.assert_allclose(causal_conv1d(x, weight).y, sums, rtol=1e-12)
    z = bias + sums
    np.testing.assert_allclose(causal_conv1d(x, weight, bias=bias).y, z, rtol=1e-13)
    np.testing.assert_allclose(
        causal_conv1d(x, weight, bias=bias, activation="silu").y, z / (1 + np.exp(-z)), rtol=1e-13
    )


@pytest.mark.parametrize("cut", [0, 1, 2, 3, 8])
def test_a_convolution_goes_on_from_its_state(cut):
    normal = np.random.default_rng(2).standard_normal
    x, weight, state = normal((2, 9, 3)), normal((3, 4)), normal((2, 3, 3))
    options = dict(activation="silu", output_final_state=True)
    whole = causal_conv1d(x, weight, initial_state=state, **options)
    first = causal_conv1d(x[:, :cut], weight, initial_state=state, **options)
    second = causal_conv1d(x[:, cut:], weight, initial_state=first.ht, **options)
    np.testing.assert_array_equal(np.concatenate([first.y, second.y], axis=1), whole.y)
    np.testing.assert_array_equal(second.ht, whole.ht)


def test_one_sequences_steps_are_none_of_the_next():
    normal = np.random.default_rng(3).standard_normal
    x, weight, state = normal((1, 9, 3)), normal((3, 4)), normal((4, 3, 3))
    packed = causal_conv1d(x, weight, initial_state=state, output_final_state=True,
                           cu_seqlens=np.array([0, 0, 5, 6, 9], np.int32))  # fmt: skip
    for n, (start, end) in enumerate([(0, 0), (0, 5), (5, 6), (6, 9)]):
        alone = causal_conv1d(x[:, start:end], weight, initial_state=state[n : n + 1], output_final_state=True)
        np.testing.assert_array_equal(packed.y[:, start:end], alone.y)
        np.testing.assert_array_equal(packed.ht[n : n + 1], alone.ht)
