"""Where the scales of the weights are one for whole tiles of columns, the TPU's kernel multiplies sums by products of
two scales. What a row gets must not depend on where it lies, nor on whether such a product is a float32."""

import numpy as np
import pytest

from cpu_golden.quantized_gmm import gmm_quantized as golden
from parity.interop import to_jax, to_numpy

pytestmark = pytest.mark.tpu

E4M3 = "float8_e4m3fn"
TILE = (128, 256, 128)


def operands(m, k, n, groups, dtype=E4M3):
    """1 x 128 blocks of lhs and 128 x 128 blocks of rhs, with scales of their own."""
    draw = np.random.default_rng(0)
    integers = draw.integers(-7, 8, (m, k)), draw.integers(-7, 8, (groups, k, n))
    lhs, rhs = (to_jax(np.asarray(each, np.float32)).astype(dtype) for each in integers)
    scales = draw.uniform(0.5, 2.0, (m, k // 128)), draw.uniform(0.5, 2.0, (groups, k // 128, n // 128))
    return lhs, scales[0].astype(np.float32), rhs, scales[1].astype(np.float32)


def gmm(lhs, lhs_scale, rhs, rhs_scale, sizes, **options):
    from tpu_kernels.quantized_gmm import gmm_quantized

    options = {"tiling": TILE, "preferred_element_type": "float32"} | options
    sizes = to_jax(np.array(sizes, np.int32))
    return to_numpy(gmm_quantized(lhs, to_jax(lhs_scale), rhs, to_jax(rhs_scale), sizes, **options))


@pytest.mark.parametrize("transposed", [False, True], ids=["", "transpose_rhs"])
def test_a_row_has_the_same_bits_in_a_tile_of_its_group_and_in_a_shared_one(transposed):
    """Scales are powers of two: whether XLA contracts a scaling and a sum is not the kernel's."""
    lhs, lhs_scale, rhs, rhs_scale = operands(384, 384, 256, 1)
    lhs_scale, rhs_scale = np.exp2(np.sign(lhs_scale - 1)), np.exp2(np.sign(rhs_scale - 1))
    one = np.zeros(2, np.int32)  # both groups have the same weights
    rhs, rhs_scale = rhs[one], rhs_scale[one]
    if transposed:
        rhs, rhs_scale = rhs.swapaxes(1, 2), rhs_scale.swapaxes(1, 2)
    whole = gmm(lhs, lhs_scale, rhs, rhs_scale, [384, 0], transpose_rhs=transposed)
    shared = gmm(lhs, lhs_scale, rhs, rhs_scale, [200, 184], transpose_rhs=transposed)
    np.testing.assert_array_equal(whole, shared)


@pytest.mark.parametrize(
    ("of_rows", "of_columns", "of_sums"),
    [(-100, -34, 16), (-34, -100, 16), (75, 55, -18), (-100, 110, 0)],
    ids=["below normal", "below normal, other side", "beyond float32", "far apart"],
)
def test_sums_times_scales_are_right_where_a_product_of_two_scales_is_no_normal_number(of_rows, of_columns, of_sums):
    """Powers of two, so that nothing is rounded. Rows whose group does not fill a tile are among them."""
    lhs, lhs_scale, rhs, rhs_scale = operands(256, 256, 128, 2)
    least = 2.0 ** (of_sums // 2)
    lhs, rhs = ((np.asarray(each, np.float32) > 0) * least for each in (lhs, rhs))
    lhs_scale, rhs_scale = np.exp2(np.sign(lhs_scale - 1) + of_rows), np.exp2(np.sign(rhs_scale - 1) + of_columns)
    narrow = [to_jax(np.asarray(each, np.float32)).astype(E4M3) for each in (lhs, rhs)]
    given = narrow[0], lhs_scale.astype(np.float32), narrow[1], rhs_scale.astype(np.float32)
    expected = golden(*map(to_numpy, given), np.array([150, 100], np.int32), preferred_element_type="float32")
    assert np.isfinite(expected).all() and np.abs(expected[expected != 0]).min() > 2.0**-126
    np.testing.assert_array_equal(gmm(*given, [150, 100]), expected)
