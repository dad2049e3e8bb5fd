"""What the grouped matmuls' dots multiply by the chip, where no case of the matrix would tell one from another."""

import pytest

from tests.support.chips import on


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
