"""What must hold of the layer beside its error: drops, gradients that are not finite, what a backward pass keeps."""

from functools import partial

import ml_dtypes
import numpy as np
import pytest

from op_arguments.probe import probing
from parity.interop import to_jax, to_numpy

jax = pytest.importorskip("jax")
from tpu_kernels.grouped_dense import grouped_dense  # noqa: E402
from tpu_kernels.moe import QUANTIZED_RESIDUALS, moe_layer, moe_layer_bwd  # noqa: E402
from tpu_kernels.permute import permute, unpermute  # noqa: E402

pytestmark = pytest.mark.tpu
TOKENS, HIDDEN, INTERMEDIATE, EXPERTS = 24, 32, 32, 4


def draw(dtype=np.float32, experts=EXPERTS):
    rng = np.random.default_rng(0)
    shapes = {"x": (TOKENS, HIDDEN), "w_router": (HIDDEN, experts), "w_gate": (experts, HIDDEN, INTERMEDIATE),
              "w_up": (experts, HIDDEN, INTERMEDIATE), "w_down": (experts, INTERMEDIATE, HIDDEN)}  # fmt: skip
    given = {name: (rng.standard_normal(shape) / 4).astype(np.float32) for name, shape in shapes.items()}
    return {name: to_jax(x if name == "w_router" else x.astype(dtype)) for name, x in given.items()}


@pytest.mark.full
@pytest.mark.parametrize(
    ("tokens", "options"),
    [(128, dict(quantize="fp8")), (128, dict(quantize="mxfp8")), (576, dict(quantize="fp8", block_size=None))],
    ids=["blocks", "mxfp8", "per channel in two tiles"],
)
def test_what_is_quantised_where_it_is_computed_has_the_bits_of_what_is_seen(tokens, options):
    """A probe sees arrays in memory; sums over a row, of weights' gradients, have another order there."""
    rng = np.random.default_rng(0)
    hidden, intermediate = 128, 256
    shapes = {"x": (tokens, hidden), "w_router": (hidden, 2), "w_gate": (2, hidden, intermediate),
              "w_up": (2, hidden, intermediate), "w_down": (2, intermediate, hidden),
              "dout": (tokens, hidden)}  # fmt: skip
    given = {name: to_jax(rng.standard_normal(shape).astype(np.float32) / 8) for name, shape in shapes.items()}
    alone = moe_layer_bwd(**given, top_k=2, **options)
    with probing(lambda site, value, where=None, **steps: value):
        seen = moe_layer_bwd(**given, top_k=2, **options)
    for name in ("w_gate", "w_up", "w_down"):
        assert to_numpy(getattr(alone, name)).tobytes() == to_numpy(getattr(seen, name)).tobytes(), name
    for name in ("x", "w_router"):  # 512 terms in another order: a few roundings of the largest
        ours, theirs = to_numpy(getattr(alone, name)), to_numpy(getattr(seen, name))
        assert np.abs(ours - theirs).max() <= 8 * 2.0**-24 * np.abs(theirs).max(), name


def test_a_dropped_choice_adds_nothing_and_the_other_weights_stay():
    """Every token likes expert 0 best and 1 next, in weights that are the same for all; 0 takes five tokens."""
    given = draw()
    given["x"] = to_jax(np.ones((TOKENS, HIDDEN), np.float32))
    given["w_router"] = to_jax(np.tile(np.array([0.02, 0.01, 0, 0], np.float32), (HIDDEN, 1)))
    alone = dict(given, w_down=given["w_down"].at[0].set(0))
    whole, few, second = (
        to_numpy(moe_layer(**weights, top_k=2, capacity=capacity))
        for weights, capacity in ((given, None), (given, 5), (alone, 5))
    )
    assert np.array_equal(few[:5], whole[:5])  # first come, first served
    assert not np.isclose(few[5:], whole[5:]).all(axis=1).any()
    # What is left for expert 1 of five tokens; from the sixth on it is full as well.
    np.testing.assert_allclose(whole[0] - second[0], few[0] - second[0])
    assert not few[5:].any()


@pytest.mark.parametrize("bad", [np.nan, *(pytest.param(x, marks=pytest.mark.full) for x in (np.inf, -np.inf))])
def test_gradients_that_are_not_finite_propagate_unless_they_are_not_wanted(bad):
    given = draw()
    dout = np.random.default_rng(1).standard_normal((TOKENS, HIDDEN)).astype(np.float32)
    dout[3, 7] = bad
    passed = moe_layer_bwd(**given, dout=to_jax(dout), top_k=2)
    cleaned = moe_layer_bwd(**given, dout=to_jax(dout), top_k=2, sanitize_grads=True)
    for name, grad in passed._asdict().items():
        grad, clean = to_numpy(grad), to_numpy(getattr(cleaned, name))
        wrong = ~np.isfinite(grad)
        assert wrong.any() and not wrong.all(), name
        assert np.array_equal(clean[~wrong], grad[~wrong])
        assert not clean[wrong].any()
    assert np.array_equal(np.isfinite(to_numpy(passed.x)).all(axis=1), np.arange(TOKENS) != 3)


def test_jit_and_grad_give_the_same_gradients():
    given = draw()
    dout = np.random.default_rng(1).standard_normal((TOKENS, HIDDEN)).astype(np.float32)
    names = list(given)

    @jax.jit
    def grads(*primals):
        return jax.grad(lambda *p: (moe_layer(*p, top_k=2) * dout).sum(), tuple(range(5)))(*primals)

    expected = moe_layer_bwd(**given, dout=to_jax(dout), top_k=2)
    for name, grad in zip(names, grads(*given.values()), strict=True):
        assert np.array_equal(to_numpy(grad), to_numpy(getattr(expected, name))), name


@pytest.mark.parametrize("quantize", ["fp8", "mxfp8"])
def test_a_remat_policy_saves_the_quantised_residuals_and_nothing_else(quantize):
    given = draw(ml_dtypes.bfloat16)

    def kept(policy):
        layer = jax.checkpoint(lambda *p: moe_layer(*p, top_k=2, quantize=quantize, block_size=32), policy=policy)
        _, backward = jax.eval_shape(lambda *p: jax.vjp(layer, *p), *given.values())
        return [x for x in jax.tree.leaves(backward) if hasattr(x, "dtype")]

    nothing = kept(jax.checkpoint_policies.nothing_saveable)
    assert {str(x.dtype) for x in nothing} <= {"bfloat16", "float32", "int32"}
    named = kept(jax.checkpoint_policies.save_only_these_names(*QUANTIZED_RESIDUALS))
    primals = [(str(x.dtype), x.shape) for x in nothing]  # what everything can be computed from again
    more = [(str(x.dtype), x.size) for x in named if (str(x.dtype), x.shape) not in primals]
    payloads = [size for dtype, size in more if dtype == "float8_e4m3fn"]
    rows, padding = TOKENS * 2, -TOKENS * 2 % 32 if quantize == "fp8" else 0
    weights = [EXPERTS * HIDDEN * INTERMEDIATE] * 3
    assert sorted(payloads) == sorted([(rows + padding) * HIDDEN, (rows + padding) * INTERMEDIATE, *weights])
    assert {dtype for dtype, _ in more} == {"float8_e4m3fn", "float32" if quantize == "fp8" else "float8_e8m0fnu"}
    assert len(more) == 10, more


def test_permute_and_unpermute_are_each_others_gradients():
    rng = np.random.default_rng(2)
    x = rng.integers(-8, 8, (TOKENS, 16)).astype(np.float32)
    indices = to_jax(np.argsort(rng.random((TOKENS, EXPERTS)), axis=1)[:, :2].astype(np.int32))
    weights = to_jax(rng.integers(1, 5, (TOKENS, 2)).astype(np.float32))
    permuted, backward = jax.vjp(lambda x: permute(x, indices, num_experts=EXPERTS, capacity=8).rows, to_jax(x))
    slots = permute(to_jax(x), indices, num_experts=EXPERTS, capacity=8).slots
    drows = to_jax(rng.integers(-8, 8, permuted.shape).astype(np.float32))
    assert np.array_equal(to_numpy(backward(drows)[0]), to_numpy(unpermute(drows, slots)))

    dout = rng.integers(-8, 8, x.shape).astype(np.float32)
    _, backward = jax.vjp(lambda rows, weights: unpermute(rows, slots, weights), drows, weights)
    back, dweights = (to_numpy(grad) for grad in backward(to_jax(dout)))
    where, rows = to_numpy(slots), to_numpy(drows)
    for token in range(TOKENS):
        for j in range(2):
            slot = where[token, j]
            assert dweights[token, j] == (0 if slot < 0 else rows[slot] @ dout[token])
            assert slot < 0 or np.array_equal(back[slot], to_numpy(weights)[token, j] * dout[token])
    assert (where < 0).any()


def test_rows_of_a_token_give_it_one_rounding_of_their_gradients():
    """Summed in bfloat16 those of 4 experts were rounded three times."""
    rng = np.random.default_rng(3)
    x, indices = rng.standard_normal((TOKENS, 16)), to_jax(np.tile(np.arange(4, dtype=np.int32), (TOKENS, 1)))
    given = to_jax(x.astype(ml_dtypes.bfloat16))
    permuted, backward = jax.vjp(lambda x: permute(x, indices, num_experts=EXPERTS).rows, given)
    drows = rng.standard_normal(permuted.shape).astype(ml_dtypes.bfloat16)
    slots = to_numpy(permute(given, indices, num_experts=EXPERTS).slots)
    expected = drows.astype(np.float64)[slots].sum(1).astype(ml_dtypes.bfloat16)
    np.testing.assert_array_equal(to_numpy(backward(to_jax(drows))[0]), expected)


@pytest.mark.parametrize("quantize", [None, "fp8", pytest.param("mxfp8", marks=pytest.mark.full)])
def test_a_tokens_gradient_depends_on_no_other_token(quantize):
    """Neither where they fill tiles, which are multiplied whole, nor where they do not."""
    rng = np.random.default_rng(4)
    size, tile = 128, 256 if quantize else 512  # gmm masks the rows of smaller ones, whole or not
    tokens, some = 2 * tile, tile + 44

    def drawn(*shape):
        return to_jax((rng.standard_normal(shape) / 8).astype(ml_dtypes.bfloat16))

    weights = {name: drawn(1, size, size) for name in ("w_gate", "w_up", "w_down")}
    weights["w_router"] = drawn(size, 1)
    x, dout = drawn(tokens, size), drawn(tokens, size)
    all_of_them, few = (
        moe_layer_bwd(x[:n], dout=dout[:n], **weights, top_k=1, quantize=quantize, tiling=(tile, size, size)).x
        for n in (tokens, some)
    )
    assert np.array_equal(to_numpy(all_of_them)[:some], to_numpy(few))


def test_sizes_stay_on_the_device():
    """Nothing of the routing is read on the host: the layer traces with abstract values, in both directions."""
    given = {name: jax.ShapeDtypeStruct(x.shape, x.dtype) for name, x in draw(ml_dtypes.bfloat16).items()}
    options = dict(top_k=2, capacity=9, quantize="mxfp8")
    out = jax.eval_shape(lambda **p: moe_layer(**p, **options), **given)
    grads = jax.eval_shape(lambda dout, **p: moe_layer_bwd(**p, dout=dout, **options), out, **given)
    assert [(g.shape, g.dtype) for g in grads] == [(x.shape, x.dtype) for x in given.values()]


@pytest.mark.parametrize(
    ("kind", "is_native"), [(None, False), ("TPU v4", False), ("TPU v6 lite", False), ("TPU7x", True)]
)
def test_a_matmul_is_quantised_by_itself_where_the_matrix_unit_multiplies_fp8(kind, is_native):
    lhs, rhs = (jax.ShapeDtypeStruct(shape, "bfloat16") for shape in ((24, 128), (3, 128, 128)))
    sizes = jax.ShapeDtypeStruct((3,), "int32")

    def keeps_fp8(quantize):
        def backward(lhs, rhs, sizes):
            layer = partial(grouped_dense, group_sizes=sizes, quantize=quantize, bwd_quantize=False, interpret=True)
            return jax.vjp(lambda lhs, rhs: layer(lhs, rhs), lhs, rhs)[1]

        return any(x.dtype == "float8_e4m3fn" for x in jax.tree.leaves(jax.eval_shape(backward, lhs, rhs, sizes)))

    device = kind and jax.sharding.AbstractDevice(device_kind=kind, num_cores=1, platform="tpu")
    mesh = jax.sharding.AbstractMesh((1,), ("x",), abstract_device=device)
    with jax.sharding.use_abstract_mesh(mesh):
        assert [keeps_fp8(choice) for choice in ("auto", True, False)] == [is_native, True, False]
