"""Every product of two codes, through the dots of both backends."""

import numpy as np
import pytest

from tests.support.formats import BITS_OF, decode
from tests.support.functions import BACKENDS, run


@pytest.mark.parametrize(("left", "right"), [("float8_e4m3fn", "float8_e4m3fn"), ("float8_e4m3fn", "float8_e5m2")])
@pytest.mark.parametrize("backend", BACKENDS)
def test_every_product_of_two_codes_is_exact(backend, left, right):
    """256 x 256 products through the dot, one to a sum. Products below float32's smallest normal do not occur."""
    codes = np.arange(256, dtype=np.uint8)
    one = np.ones((1, 1), np.float32)
    inputs = {
        "lhs": codes.view(BITS_OF[left])[:, None],
        "lhs_scale": one,
        "rhs": codes.view(BITS_OF[right])[None, None, :],
        "rhs_scale": one[None],
        "group_sizes": np.array([256], np.int32),
    }
    got = run(backend, "gmm_quantized", inputs, preferred_element_type="float32")
    with np.errstate(invalid="ignore"):
        expected = np.outer(decode(left), decode(right)).astype(np.float32)
    np.testing.assert_array_equal(got, expected)


@pytest.mark.parametrize("backend", BACKENDS)
def test_every_product_of_two_int8_is_exact(backend):
    values = np.arange(-127, 128, dtype=np.int8)
    one = np.ones((1, 1), np.float32)
    inputs = {
        "lhs": values[:, None],
        "lhs_scale": one,
        "rhs": values[None, None, :],
        "rhs_scale": one[None],
        "group_sizes": np.array([255], np.int32),
    }
    got = run(backend, "gmm_quantized", inputs, preferred_element_type="float32")
    np.testing.assert_array_equal(got, np.outer(values.astype(int), values.astype(int)))
