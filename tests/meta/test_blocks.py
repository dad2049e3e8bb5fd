"""Large arrays a block at a time: joined whatever their length and layout."""

import numpy as np
import pytest

from parity.blocks import ELEMENTS, in_blocks
from parity.dtypes import round_to


@pytest.mark.parametrize("shape", [(), (0, 3), (1,), (ELEMENTS + 1,), (3, ELEMENTS), (7, 3, ELEMENTS // 2)])
def test_blocks_are_joined_in_the_layout_of_what_is_given(shape):
    x = np.arange(np.prod(shape)).reshape(shape)
    for given in (x, x.T, np.moveaxis(x, -1, 0) if shape else x):
        joined = in_blocks(lambda x, y: x + 2 * y, given, given, dtype="float32")
        assert joined.dtype == np.float32
        assert np.array_equal(joined, 3 * given)
        assert joined.strides == given.astype("float32").strides


def test_no_block_is_longer_than_the_cache_is_meant_to_hold():
    sizes = []
    in_blocks(lambda x: sizes.append(x.size) or x, np.zeros(3 * ELEMENTS + 5), dtype="float64")
    assert sizes == [ELEMENTS] * 3 + [5]


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float8_e4m3fn", "float8_e5m2"])
def test_rounding_keeps_signs_and_what_is_not_finite(dtype):
    special = np.array([np.inf, -np.inf, np.nan, -np.nan, -0.0, 1e300, 5e-324])
    with np.errstate(over="ignore"):
        directly = special.astype(np.float32).astype(round_to(special, dtype).dtype)
    assert round_to(special, dtype).tobytes() == directly.tobytes()
