"""What must hold of the layer beside its error: drops, gradients that are not finite, what a backward pass keeps."""

import ml_dtypes
import numpy as np
import pytest

from parity.interop import to_jax, to_numpy

jax = pytest.importorskip("jax")
from tpu_kernels import moe  # noqa: E402
from tpu_kernels.moe import (  # noqa: E402
    QUANTIZED_RESIDUALS,
    moe_layer,
    moe_layer_bwd,
    permute,
    unpermute,
)

pytestmark = pytest.mark.tpu
TOKENS, HIDDEN, INTERMEDIATE, EXPERTS = 24, 32, 32, 4


def draw(dtype=np.float32, experts=EXPERTS):
    rng = np.random.default_rng(0)
    shapes = {"x": (TOKENS, HIDDEN), "w_router": (HIDDEN, experts), "w_gate": (experts, HIDDEN, INTERMEDIATE),
              "w_up": (experts, HIDDEN, INTERMEDIATE), "w_down": (experts, INTERMEDIATE, HIDDEN)}  # fmt: skip
    given = {name: (rng.standard_normal(shape) / 4).astype(np.float32) for name, shape in shapes.items()}
    return {name: to_jax(x if name == "w_router" else x.astype(dtype)) for name, x in given.items()}


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


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
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


def test_sizes_stay_on_the_device():
    """Nothing of the routing is read on the host: the layer traces with abstract values, in both directions."""
    given = {name: jax.ShapeDtypeStruct(x.shape, x.dtype) for name, x in draw(ml_dtypes.bfloat16).items()}
    options = dict(top_k=2, capacity=9, quantize="mxfp8")
    out = jax.eval_shape(lambda **p: moe_layer(**p, **options), **given)
    grads = jax.eval_shape(lambda dout, **p: moe_layer_bwd(**p, dout=dout, **options), out, **given)
    assert [(g.shape, g.dtype) for g in grads] == [(x.shape, x.dtype) for x in given.values()]


@pytest.mark.parametrize(("generation", "is_native"), [(None, False), (4, False), (5, False), (6, False), (7, True)])
def test_a_matmul_is_quantised_by_itself_where_the_matrix_unit_multiplies_fp8(monkeypatch, generation, is_native):
    monkeypatch.setattr(moe, "tpu_generation", lambda: generation)
    assert [moe._resolve_quantize(choice) for choice in ("auto", True, False)] == [is_native, True, False]
