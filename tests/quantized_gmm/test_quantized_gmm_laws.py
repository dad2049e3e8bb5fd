"""Every product of two codes, through the dots of both backends."""

import numpy as np
import pytest

from parity.judging.judge import judge
from parity.trial import Trial
from tests.matrix.quantized_gmm import GMM_QUANTIZED, TGMM_QUANTIZED
from tests.support.formats import BITS_OF, decode
from tests.support.functions import BACKENDS, FRAMEWORKS, run
from tests.support.tiny import tiny


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


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("op", [GMM_QUANTIZED, TGMM_QUANTIZED], ids=lambda op: op.name)
def test_sums_of_int8_climb_beyond_float32_and_come_back(op, backend):
    """Where no scale changes they are int32, whatever they pass on the way."""
    pytest.importorskip(FRAMEWORKS[backend])
    of_columns = op is TGMM_QUANTIZED
    sizes = dict(M=2304, K=32, N=16, G=1) if of_columns else dict(M=8, K=2304, N=16, G=1)
    whole = dict(lhs_blocks="Mx1", rhs_blocks="Mx1") if of_columns else dict(lhs_blocks="1xK", rhs_blocks="1xKx1")
    alone = dict(shard=None, existing_out=False, groups="balanced")
    case = tiny(op, ("int8", "float32"), **sizes, **whole, **alone)
    judged = judge(Trial(op, case.with_data("integers"), backend))
    assert judged.verdict.outcome == "EXACT", judged.verdict


@pytest.mark.parametrize(("value", "exponent"), [(256.0, -70), (2.0**-9, 64)], ids=["subnormal", "infinite"])
@pytest.mark.parametrize("backend", BACKENDS)
def test_both_scales_multiply_sums_where_their_product_is_out_of_range(backend, value, exponent):
    """2^-140 alone has 9 bits, and 2^128 is infinite; the results are 2^-117 and 2^117."""
    m, k, n = 16, 256, 128
    scales = (1.1 * 2.0**exponent, 1.3 * 2.0**exponent)
    narrow = BITS_OF["float8_e4m3fn"]
    inputs = {
        "lhs": np.full((m, k), value, narrow),
        "lhs_scale": np.full((m, 2), scales[0], np.float32),
        "rhs": np.full((1, k, n), value, narrow),
        "rhs_scale": np.full((1, 2, 1), scales[1], np.float32),
        "group_sizes": np.array([m], np.int32),
    }
    got, golden = (
        run(where, "gmm_quantized", inputs, preferred_element_type="float32") for where in (backend, "golden")
    )
    np.testing.assert_allclose(got, golden, rtol=2.0**-22)
