"""The TPU's inverse of a chunk's triangular matrices, for heads that lie beside each other in every way."""

from types import SimpleNamespace

import numpy as np
import pytest

from tests.support.agreement import crossed

ROUNDOFF = 2.0**-24


def inverted(a):
    jax, pl = pytest.importorskip("jax"), pytest.importorskip("jax.experimental.pallas")
    from tpu_kernels._lib.triangular import inverse

    def kernel(x, out):
        out[...] = inverse(x[...], SimpleNamespace(split=True))

    return np.asarray(pl.pallas_call(kernel, jax.ShapeDtypeStruct(a.shape, np.float32), interpret=True)(a))


@pytest.mark.tpu
@pytest.mark.parametrize(("chunk", "lost"), crossed([16, 64, 128], [np.nan, np.inf]))
def test_what_is_not_finite_stays_in_its_head(chunk, lost):
    a = np.tril(np.full((4, chunk, chunk), 0.1, np.float32), -1)
    expected = inverted(a)
    a[1, 9, 3] = lost
    got = inverted(a)
    assert np.isnan(got[1, 9, 3])
    np.testing.assert_array_equal(np.delete(got, 1, 0), np.delete(expected, 1, 0))


@pytest.mark.tpu
@pytest.mark.parametrize(("chunk", "heads"), crossed([128, 16, 32, 64], [1, 2, 3, 4, 8]))
def test_the_inverse_is_stable_by_components(heads, chunk):
    """Substitution's own bound (Higham, Accuracy and Stability, 14.2): |T' - T| ≤ γ |T| (I + |A|) |T|."""
    keys = np.random.default_rng(chunk + heads).normal(size=(heads, chunk, 32)) + 1.0  # rho 1
    keys /= np.linalg.norm(keys, axis=2, keepdims=True)
    a = np.tril(0.95 * keys @ keys.swapaxes(1, 2), -1).astype(np.float32)

    got = inverted(a)
    unit = np.eye(chunk)
    exact = np.linalg.inv(unit + a.astype(np.float64))
    bound = chunk * ROUNDOFF * np.abs(exact) @ (unit + np.abs(a)) @ np.abs(exact)
    assert (np.abs(got - exact) <= bound).all()
