"""What the grouped matmuls plan by the chip and by the sizes, where no case of the matrix would tell one plan from
another: what a dot multiplies, and blocks of scales that are larger than a tile."""

import ml_dtypes
import numpy as np
import pytest

from cpu_golden import quantize as golden
from parity.interop import to_numpy, to_torch
from tests.support.chips import on

pytestmark = pytest.mark.smoke


@pytest.mark.parametrize(
    ("kind", "dtype", "multiplied"),
    [
        ("TPU v5e", "float8_e4m3fn", "bfloat16"),
        ("TPU v6e", "float8_e4m3fn", "bfloat16"),
        ("TPU7x", "float8_e4m3fn", "float8_e4m3fn"),
        ("TPU v4", "int8", "bfloat16"),
        ("TPU v5e", "int8", "int8"),
        ("TPU7x", "int8", "bfloat16"),
    ],
)
def test_a_dot_is_of_what_the_chip_multiplies(kind, dtype, multiplied):
    jax = pytest.importorskip("jax")
    from tpu_kernels._lib.narrow import product

    x = jax.ShapeDtypeStruct((32, 32), dtype)
    with on(kind):
        traced = jax.make_jaxpr(lambda a, b: product(a, b, (1, 0)))(x, x)
    (dot,) = [equation for equation in traced.eqns if equation.primitive.name == "dot_general"]
    assert [str(operand.aval.dtype) for operand in dot.invars] == [multiplied] * 2


@pytest.mark.parametrize("kind", ["TPU v5e", "TPU7x"])
@pytest.mark.parametrize("wide", ["float32", "bfloat16"])
def test_beside_a_wide_operand_a_narrow_one_is_multiplied_as_that(kind, wide):
    jax = pytest.importorskip("jax")
    from tpu_kernels._lib.narrow import product_path

    x, narrow = jax.ShapeDtypeStruct((32, 32), wide), jax.ShapeDtypeStruct((32, 32), "float8_e4m3fn")
    with on(kind):
        assert product_path(x, narrow) == product_path(narrow, x) == wide


@pytest.mark.parametrize(
    ("shape", "axis"), [((300, 130), 0), ((2, 150, 140), (-2, -1)), ((2, 16400), 1)], ids=["columns", "planes", "rows"]
)
@pytest.mark.parametrize("dtype", [np.float32, ml_dtypes.bfloat16], ids=["f32", "bf16"])
def test_blocks_larger_than_a_tile_have_each_its_own_scale(shape, axis, dtype):
    """On the GPU a kernel of its own finds their largest magnitudes; in the matrix there is one such block at most."""
    pytest.importorskip("triton")
    from gpu_reference.quantize import fp8_quantize

    x = (np.random.default_rng(0).standard_normal(shape) * np.arange(1, shape[-1] + 1)).astype(dtype)
    got, expected = fp8_quantize(to_torch(x), axis, None), golden.fp8_quantize(x, axis, None)
    for ours, theirs in zip(got, expected, strict=True):
        np.testing.assert_array_equal(to_numpy(ours).astype(np.float32), theirs.astype(np.float32))
