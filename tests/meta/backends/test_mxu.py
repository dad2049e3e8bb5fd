"""The emulated matrix unit has the MXU's errors, bit for bit those of its model, and leaves no trace outside."""

import threading

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from parity.backends.emulation import mxu

PRECISIONS = ("default", "high", "highest")


def run(where, lhs, rhs, precision="default", preferred_element_type=jnp.float32):
    """lhs @ rhs by a function that JAX has not seen before."""

    def dot(a, b):
        return lax.dot(a, b, precision=precision, preferred_element_type=preferred_element_type)

    def kernel(a, b, out):
        out[...] = dot(a[...], b[...])

    def call(a, b):
        shape = jax.ShapeDtypeStruct((a.shape[0], b.shape[1]), preferred_element_type)
        interpret = pltpu.InterpretParams() if where == "InterpretParams" else True
        return pl.pallas_call(kernel, out_shape=shape, interpret=interpret)(a, b)

    return np.asarray(jax.jit(dot if where == "jit" else call)(lhs, rhs))


def emulated(*args, **kwargs):
    with mxu.emulated():
        return run(*args, **kwargs)


def normal(*shape, seed=0, dtype=np.float32):
    return np.random.default_rng([seed, *shape]).standard_normal(shape).astype(np.float32).astype(dtype)


def cut(x):
    return (x.view(np.uint32) & np.uint32(0xFFFF0000)).view(np.float32)


def bf16(x):
    return x.astype(ml_dtypes.bfloat16).astype(np.float64)


def model(lhs, rhs, precision):
    """The MXU in NumPy, from the description in `mxu`."""
    accumulator = np.zeros((lhs.shape[0], rhs.shape[1]), np.float32)
    for k in range(0, lhs.shape[1], 128):
        a, b = lhs[:, k : k + 128], rhs[k : k + 128]
        pieces = []
        for x in (a, b):
            rest = x - cut(x)
            pieces.append({"x": x, "hi": cut(x), "rest": rest, "mid": cut(rest), "low": rest - cut(rest)})
        passes = {
            "default": "x x",
            "high": "rest hi, hi rest, hi hi",
            "highest": "low hi, hi low, rest rest, mid hi, hi mid, hi hi",
        }[precision]
        for left, right in (names.split() for names in passes.split(", ")):
            exact = bf16(pieces[0][left]) @ bf16(pieces[1][right])
            accumulator += exact.astype(np.float32)
    return accumulator


def relative_rms(got, golden):
    return np.sqrt(np.mean((got - golden) ** 2) / np.mean(golden**2))


@pytest.mark.parametrize("where", ["jit", "interpret", "InterpretParams"])
@pytest.mark.parametrize("precision", PRECISIONS)
def test_float32_dots_have_the_error_of_their_passes(where, precision):
    lhs, rhs = normal(128, 256), normal(256, 128)
    golden = lhs.astype(np.float64) @ rhs
    got = emulated(where, lhs, rhs, precision)
    # One pass: two operands rounded to 8 bits. Three: the rests' product dropped. Six: float32's own error.
    low, high = {"default": (2e-3, 3e-3), "high": (5e-6, 3e-5), "highest": (2e-8, 1.2e-7)}[precision]
    assert low < relative_rms(got, golden) < high
    np.testing.assert_array_equal(got, model(lhs, rhs, precision))


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize(("m", "k", "n"), [(96, 1000, 80), (1, 1, 1), (8, 0, 8), (0, 8, 8)])
def test_any_shape_equals_the_model(m, k, n, precision):
    lhs, rhs = normal(m, k), normal(k, n)
    np.testing.assert_array_equal(emulated("jit", lhs, rhs, precision), model(lhs, rhs, precision))


@pytest.mark.parametrize(
    ("dtype", "precision", "passes", "out"),
    [
        *((dtype, precision, "default", "float32")
          for dtype in ("bfloat16", "float8_e4m3fn", "float8_e5m2") for precision in ("default", "highest")),
        ("float16", "highest", "highest", "float32"),
        ("bfloat16", "default", "default", "bfloat16"),
    ],
)  # fmt: skip
def test_products_of_narrow_operands_are_exact_but_of_float16(dtype, precision, passes, out):
    """float16 is treated as float32; a narrow result is rounded once, from float32."""
    lhs, rhs = normal(32, 300, dtype=dtype), normal(300, 32, dtype=dtype)
    got = emulated("interpret", lhs, rhs, precision, preferred_element_type=jnp.dtype(out))
    assert got.dtype == out
    expected = model(lhs.astype(np.float32), rhs.astype(np.float32), passes).astype(got.dtype)
    np.testing.assert_array_equal(got, expected)


@pytest.mark.parametrize(("rows", "expected"), [((0, 1, 2), 2**24 + 2), ((0, 128, 256), 2**24)])
def test_what_the_array_holds_is_summed_before_it_is_rounded(rows, expected):
    rhs = np.zeros((384, 1), np.float32)
    rhs[rows, 0] = 2.0**24, 1, 1
    assert emulated("interpret", np.ones((1, 384), np.float32), rhs)[0, 0] == expected


@pytest.mark.parametrize(
    ("spec", "lhs_shape", "rhs_shape"),
    [
        ("mk,nk->mn", (5, 140), (6, 140)),
        ("km,kn->mn", (140, 5), (140, 6)),
        ("bmk,bkn->bmn", (2, 5, 7), (2, 7, 3)),
        ("kbm,nbk->bmn", (9, 2, 4), (3, 2, 9)),
        ("mjk,jkn->mn", (4, 20, 9), (20, 9, 3)),
        ("amk,kbn->ambn", (2, 3, 8), (8, 4, 5)),
        ("k,k->", (130,), (130,)),
    ],
)
def test_dimension_numbers(spec, lhs_shape, rhs_shape):
    lhs, rhs = normal(*lhs_shape), normal(*rhs_shape, seed=1)
    with mxu.emulated():
        got = jnp.einsum(spec, lhs, rhs)
    np.testing.assert_allclose(got, np.einsum(spec, bf16(lhs), bf16(rhs)), rtol=1e-6, atol=1e-5)


def test_dots_the_mxu_does_not_have_are_untouched():
    integers = np.random.default_rng(0).integers(-128, 128, (2, 300, 300)).astype(np.int8)
    got = emulated("interpret", *integers, preferred_element_type=jnp.int32)
    np.testing.assert_array_equal(got, integers[0].astype(np.int32) @ integers[1])
    with jax.enable_x64(True):
        for dtype in (np.float64, np.complex64):
            lhs, rhs = normal(40, 50).astype(dtype), normal(50, 40).astype(dtype)
            got = emulated("jit", lhs, rhs, preferred_element_type=dtype)
            np.testing.assert_array_equal(got, run("jit", lhs, rhs, preferred_element_type=dtype))


def test_infinities_and_nan_follow_the_split():
    lhs = np.array([[np.inf, 1], [np.nan, 1], [1, 1]], np.float32)
    rhs = np.ones((2, 1), np.float32)
    assert np.array_equal(emulated("jit", lhs, rhs)[:, 0], [np.inf, np.nan, 2], equal_nan=True)
    assert np.array_equal(emulated("jit", lhs, rhs, "highest")[:, 0], [np.nan, np.nan, 2], equal_nan=True)


@pytest.mark.parametrize("inside_first", [False, True])
def test_a_jitted_function_serves_both_sides_with_one_trace_each(inside_first):
    lhs, rhs = normal(64, 96), normal(96, 64)
    traces = []

    @jax.jit
    def dot(a, b):
        return lax.dot(a, b)

    def kernel(a, b, out):
        out[...] = dot(a[...], b[...])

    @jax.jit
    def outer(a, b):
        traces.append(None)
        return pl.pallas_call(kernel, out_shape=jax.ShapeDtypeStruct((64, 64), jnp.float32), interpret=True)(a, b)

    golden = lhs.astype(np.float64) @ rhs
    for inside in [inside_first, not inside_first] * 2:
        if inside:
            with mxu.emulated():
                np.testing.assert_array_equal(outer(lhs, rhs), model(lhs, rhs, "default"))
        else:
            assert relative_rms(outer(lhs, rhs), golden) < 1e-6
    assert len(traces) == 2


def test_nothing_is_left_behind():
    lhs, rhs = normal(16, 256), normal(256, 16)

    def text():
        return jax.jit(lambda a, b: lax.dot(a, b, precision="highest")).lower(lhs, rhs).as_text()

    before = text()
    with pytest.raises(RuntimeError, match="inside"), mxu.emulated(), mxu.emulated():
        assert "f64" in text()
        assert not jax.config.jax_enable_x64
        raise RuntimeError("inside")
    assert text() == before
    assert "f64" not in before
    assert not jax.config.jax_enable_x64
    assert relative_rms(run("jit", lhs, rhs), lhs.astype(np.float64) @ rhs) < 1e-6


def test_other_threads_are_not_emulated():
    lhs, rhs = normal(16, 256), normal(256, 16)
    results = []
    with mxu.emulated():
        thread = threading.Thread(target=lambda: results.append(run("jit", lhs, rhs)))
        thread.start()
        thread.join()
    np.testing.assert_array_equal(results[0], run("jit", lhs, rhs))


def test_gradients_are_emulated():
    lhs, rhs, cotangent = normal(8, 200), normal(200, 8), normal(8, 8)
    with mxu.emulated():
        _, vjp = jax.vjp(lax.dot, lhs, rhs)
        dlhs, drhs = vjp(cotangent)
    np.testing.assert_array_equal(dlhs, model(cotangent, rhs.T, "default"))
    np.testing.assert_array_equal(drhs, model(lhs.T, cotangent, "default"))


def test_on_a_mesh():
    mesh = jax.make_mesh((1,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))
    spec = jax.sharding.PartitionSpec("x")
    lhs, rhs = normal(16, 200), normal(200, 16)
    dot = jax.shard_map(lax.dot, mesh=mesh, in_specs=(spec, jax.sharding.PartitionSpec()), out_specs=spec)
    with mxu.emulated():
        np.testing.assert_array_equal(jax.jit(dot)(lhs, rhs), model(lhs, rhs, "default"))


def test_an_explicit_algorithm_is_emulated_or_left_to_jax():
    lhs, rhs = normal(16, 200), normal(200, 16)
    got = emulated("jit", lhs, rhs, lax.DotAlgorithmPreset.BF16_BF16_F32_X3)
    np.testing.assert_array_equal(got, model(lhs, rhs, "high"))
    with pytest.raises(ValueError, match="not supported by dot_general on CPU"):
        emulated("jit", lhs, rhs, lax.DotAlgorithmPreset.TF32_TF32_F32)


def test_a_product_and_a_sum_are_rounded_each():
    """No TPU fuses them. Here the product rounds to 1, and what an FMA would have kept of it is lost."""

    def kernel(a, b, out):
        out[...] = a[...] * b[...] - 1

    a, b = (np.full((8, 128), 1 + sign * 2.0**-13, np.float32) for sign in (1, -1))
    call = pl.pallas_call(kernel, out_shape=jax.ShapeDtypeStruct(a.shape, a.dtype), interpret=True)
    assert not np.asarray(jax.jit(call)(a, b)).any()
