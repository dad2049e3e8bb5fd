"""The goldens of the whole layer: against loops over tokens and finite differences."""

import numpy as np
import pytest

from cpu_golden.moe import moe_layer, moe_layer_bwd
from cpu_golden.permute import permute, unpermute
from cpu_golden.stages import Stages
from parity.inputs import draw
from parity.op import outputs
from tests.matrix.moe import MOE_LAYER, MOE_LAYER_BWD, routing
from tests.support.differences import check_differences
from tests.support.sites import watched

LAYERS = [
    pytest.param(op, case, id=case.id, marks=[pytest.mark.full] if case.tier == "full" else [])
    for op in (MOE_LAYER, MOE_LAYER_BWD)
    for case in op.cases
]


def weights_of(tokens=10, hidden=6, intermediate=5, experts=4):
    rng = np.random.default_rng(0)
    shapes = {"x": (tokens, hidden), "w_router": (hidden, experts), "w_gate": (experts, hidden, intermediate),
              "w_up": (experts, hidden, intermediate), "w_down": (experts, intermediate, hidden)}  # fmt: skip
    return {name: rng.standard_normal(shape) for name, shape in shapes.items()}


def softmax(x):
    return np.exp(x) / np.exp(x).sum()


def token_by_token(x, w_router, w_gate, w_up, w_down, top_k, capacity, renormalize):
    taken = np.zeros(w_router.shape[1], int)
    out = np.zeros_like(x)
    for token, row in enumerate(x):
        logits = row @ w_router
        chosen = sorted(range(len(logits)), key=lambda e: (-logits[e], e))[:top_k]
        weights = softmax(logits[chosen]) if renormalize else softmax(logits)[chosen]
        for expert, weight in zip(chosen, weights, strict=True):
            taken[expert] += 1
            if capacity is None or taken[expert] <= capacity:
                gate = row @ w_gate[expert]
                out[token] += weight * ((gate / (1 + np.exp(-gate)) * (row @ w_up[expert])) @ w_down[expert])
    return out


OPTIONS = [dict(top_k=2, capacity=None, renormalize=True), dict(top_k=3, capacity=None, renormalize=False),
           dict(top_k=2, capacity=3, renormalize=True), dict(top_k=3, capacity=4, renormalize=False)]  # fmt: skip


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_golden_is_the_layer_token_by_token(options):
    given = weights_of()
    expected = token_by_token(**given, **options)
    np.testing.assert_allclose(moe_layer(**given, **options), expected, rtol=1e-12, atol=1e-12)
    if options["capacity"]:
        assert np.abs(moe_layer(**given, **options | {"capacity": None}) - expected).max() > 0.01


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_gradients_are_those_of_finite_differences(options):
    given = weights_of()
    dout = np.random.default_rng(1).standard_normal(given["x"].shape)
    grads = moe_layer_bwd(**given, dout=dout, **options)
    check_differences(lambda moved: (moe_layer(**moved, **options) * dout).sum(), given, grads, step=1e-6, within=1e-6,
                      every=7)  # fmt: skip


@pytest.mark.parametrize("quantised", [dict(quantize="fp8", block_size=32), dict(quantize="mxfp8")], ids=str)
def test_gradients_of_a_quantised_layer_are_near_those_of_the_plain_one(quantised):
    given = {name: x.astype(np.float32) for name, x in weights_of(tokens=40, hidden=64, intermediate=96).items()}
    dout = np.random.default_rng(1).standard_normal(given["x"].shape).astype(np.float32)
    exact, got = (moe_layer_bwd(**given, dout=dout, top_k=2, **o) for o in ({}, quantised))
    for name, expected in outputs(exact).items():
        error = np.linalg.norm(outputs(got)[name] - expected) / np.linalg.norm(expected)
        assert 0.001 < error < 0.1, name


def test_layers_of_all_shards_sum_up_to_the_whole():
    given = weights_of()
    shards = [{name: w[at : at + 2] if w.ndim == 3 else w for name, w in given.items()} for at in (0, 2)]
    parts = [moe_layer(**shard, top_k=2, group_offset=2 * n) for n, shard in enumerate(shards)]
    np.testing.assert_allclose(sum(parts), moe_layer(**given, top_k=2), rtol=1e-12, atol=1e-12)


def test_unpermute_undoes_permute():
    rng = np.random.default_rng(2)
    x = rng.standard_normal((20, 3))
    indices = rng.permuted(np.tile(np.arange(5, dtype=np.int32), (20, 1)), axis=1)[:, :3]
    permuted = permute(x, indices, num_experts=5)
    np.testing.assert_array_equal(unpermute(permuted.rows, permuted.slots), x + x + x)
    owner = np.repeat(np.arange(5), permuted.group_sizes)
    assert all((owner[permuted.slots[t]] == indices[t]).all() for t in range(20))
    for expert in range(5):  # in the order of their tokens
        mine = permuted.slots[indices == expert]
        assert (np.diff(mine) == 1).all()
    few = permute(x, indices, num_experts=5, capacity=7)
    assert len(few.rows) == 35
    for expert in range(5):  # the later tokens are dropped
        mine = few.slots[indices == expert]
        assert (mine[:7] >= 0).all() and (mine[7:] == -1).all()
    assert few.rows[few.group_sizes.sum() :].size == 0 or not few.rows[few.group_sizes.sum() :].any()


@pytest.mark.parametrize(("op", "case"), LAYERS)
def test_no_token_is_between_two_experts(op, case):
    """Float32 must choose the experts that the golden chooses: every margin is beyond the logits' errors."""
    for seed in range(8):
        drawn = case.with_seed(seed)
        assert (routing(drawn, draw(op, drawn)).margin > 0).all()


@pytest.mark.parametrize(("op", "case"), LAYERS)
def test_integer_twin_is_not_empty(op, case):
    twin = case.with_data("integers")
    golden = outputs(op.golden(**draw(op, twin), **op.arguments(twin)))
    assert all(np.count_nonzero(value) for name, value in golden.items() if name != "w_router") or case.T < 2


def test_every_matmul_of_the_experts_asks_for_the_tiling_of_its_own_size():
    given, asked = weights_of(tokens=10, hidden=6, intermediate=5, experts=4), []  # 20 rows
    inner, outer = (20, 6, 5), (20, 5, 6)

    def look_up(*size):
        asked.append(size)
        return size

    moe_layer(**given, top_k=2, tiling=look_up)
    assert asked == [inner, inner, outer]
    moe_layer_bwd(**given, dout=given["x"], top_k=2, tiling=look_up)
    down = [inner, outer, outer]  # through w_down, w_gate and w_up
    assert asked[3:] == [inner, inner, outer, *down, inner, inner, outer]


@pytest.mark.parametrize(
    ("options", "steps"),
    [({}, 1), (dict(depth=4), 2), (dict(router_depth=1), 6), (dict(depth=4, router_depth=6), 1)],
)
def test_the_router_is_summed_in_steps_of_its_own_or_else_in_those_of_the_matmuls(options, steps):
    stages, seen = watched(**options)
    moe_layer(**weights_of(hidden=6), top_k=2, stages=stages)
    assert seen[: seen.index("logits")].count("partial") == steps


def test_an_index_is_checked_where_there_is_only_one_and_nothing_is_where_there_is_none():
    x, none = np.ones((1, 3), np.float32), np.zeros((0, 2), np.int32)
    with pytest.raises(ValueError, match=r"indices must be in \[0, num_experts\) = \[0, 2\), got 2"):
        permute(x, np.array([[2]], np.int32), num_experts=2)
    with pytest.raises(ValueError, match=r"slots must be in \[-1, M\) = \[-1, 1\), got 1"):
        unpermute(x, np.array([[1]], np.int32))
    permuted = permute(x[:0], none, num_experts=2)
    assert permuted.rows.shape == (0, 3) and permuted.group_sizes.tolist() == [0, 0]
    assert unpermute(x[:0], none).shape == (0, 3)


def test_gradients_that_are_not_finite_are_zero_where_that_is_asked_for_and_all_others_stay():
    given = weights_of()
    dout = np.random.default_rng(1).standard_normal(given["x"].shape)
    given["w_down"][1, 2, 3] = np.nan
    kept, sane = (moe_layer_bwd(**given, dout=dout, top_k=2, sanitize_grads=sane) for sane in (False, True))
    assert any(np.isnan(grad).any() for grad in kept)
    for before, after in zip(kept, sane, strict=True):
        np.testing.assert_array_equal(after, np.where(np.isfinite(before), before, 0.0))


def test_rows_of_no_expert_are_zero():
    permuted = permute(np.ones((3, 4)), np.zeros((3, 1), np.int32), num_experts=2, capacity=2)
    assert permuted.group_sizes.tolist() == [2, 0]
    assert permuted.slots.ravel().tolist() == [0, 1, -1]
    assert permuted.rows.tolist() == [[1] * 4, [1] * 4, [0] * 4]


def test_a_logit_that_is_nan_is_larger_than_all_others():
    """As JAX's and torch's top_k have it; so its token is not a number, and no other."""

    def spoilt(site, x):
        return np.where(np.arange(x.size).reshape(x.shape) == x.shape[1] + 2, np.nan, x) if site == "logits" else x

    out = moe_layer(**weights_of(), top_k=1, stages=Stages(spoilt))
    assert np.isnan(out).all(axis=1).tolist() == np.isnan(out).any(axis=1).tolist() == [n == 1 for n in range(10)]
