"""The goldens of the delta rules: against the recurrence, finite differences and exact arithmetic, of any keys."""

from itertools import pairwise, product

import ml_dtypes
import numpy as np
import pytest

from cpu_golden import gated_delta_rule, kda
from cpu_golden.stages import Stages
from tests.support.differences import check_differences
from tests.support.sites import watched

OPS = {"gated_delta_rule": gated_delta_rule, "kda": kda}
CHUNKS = [16, 48, 64, 128]
KEYS = {"apart": 0.0, "rho 0.5": 0.5, "rho 1": 1.0, "rho 2": 2.0, "equal": np.inf}
GATES = ["none", "slow", "mixed", "steep", "bound"]
BETAS = {"sigmoid": (0.0, 1.0), "near 1": (0.98, 1.0), "up to 2": (0.0, 2.0)}
HARDEST = {("equal", "none", "near 1"), ("rho 2", "mixed", "up to 2"), ("rho 1", "bound", "sigmoid")}
LADDER = [
    pytest.param(*point, id="-".join(point), marks=[pytest.mark.full] * (point not in HARDEST))
    for point in product(KEYS, GATES, BETAS)
]
PER_STEP = ("q", "k", "v", "g", "beta", "do")


def keys(shape, common, rng):
    """Unit keys with a component in common, `common` times as long as what they have of their own: inf is all."""
    own, shared = rng.standard_normal(shape), rng.standard_normal(shape[-1])
    x = np.broadcast_to(shared, shape) if np.isinf(common) else own + common * shared
    return x / np.linalg.norm(x, axis=-1, keepdims=True)


def decays(shape, pattern, rng):
    drawn = rng.random(shape)
    slow, steep = -drawn / 32, -8 * drawn
    return {
        "none": np.zeros(shape),
        "slow": slow,
        "mixed": np.where(rng.random(shape) < 0.5, slow, steep),
        "steep": steep,
        "bound": np.full(shape, -5.0),
    }[pattern]


def problem(op, *, b=2, t=65, h=2, hv=4, k=12, v=20, n=None, common=1.0, gates="slow", beta="up to 2", seed=0):
    """Arguments of a forward pass, and what the backward pass takes besides."""
    rng = np.random.default_rng(seed)
    n = b if n is None else n
    low, high = BETAS[beta]
    forward = dict(
        q=rng.standard_normal((b, t, h, k)),
        k=keys((b, t, h, k), common, rng),
        v=rng.standard_normal((b, t, hv, v)),
        g=decays((b, t, hv, k) if op == "kda" else (b, t, hv), gates, rng),
        beta=low + (high - low) * rng.random((b, t, hv)),
        initial_state=rng.standard_normal((n, hv, k, v)),
    )
    return forward, dict(do=rng.standard_normal((b, t, hv, v)), dht=rng.standard_normal((n, hv, k, v)))


def call(op, form, direction, arguments, **options):
    if form == "definition":  # one for both
        return getattr(gated_delta_rule, f"gated_delta_rule_{direction}_definition")(**arguments, **options)
    return getattr(OPS[op], f"{form}_{op}_{direction}")(**arguments, **options)


def check_close(got, expected, sums=None, tolerance=1e-13):
    """Every output that is not None within `tolerance` of its largest element, or of the largest of the `sums` that its
    name has, and the same ones None."""
    for name in expected._fields:
        y, x = getattr(got, name), getattr(expected, name)
        assert (y is None) == (x is None), name
        if x is not None:
            assert y.dtype == np.float64 and y.shape == x.shape, name
            assert np.isfinite(x).all(), name
            size = np.abs((sums or {}).get(name, x)).max(initial=0.0)
            assert np.abs(y - x).max(initial=0.0) <= tolerance * size, name


def check_is_the_recurrence(op, forward, backward, chunks=CHUNKS, **options):
    """Every form and chunk size, both directions, against the definition."""
    last = dict(output_final_state=True, **options)
    o, grads = (
        call(op, "definition", "fwd", forward, **last),
        call(op, "definition", "bwd", forward | backward, **options),
    )
    sums = {} if op == "kda" else {"dg": channel_sums(op, forward | backward, **options)}
    steps = [("fused_recurrent", {})]
    steps += [("chunk", dict(chunk_size=size)) for size in chunks]
    steps += [("chunk", dict(chunk_size=chunks[-1], stages=Stages(**how))) for how in WAYS]
    for form, how in steps:
        check_close(call(op, form, "fwd", forward, **last, **how), o)
        check_close(call(op, form, "bwd", forward | backward, **options, **how), grads, sums)


def channel_sums(op, arguments, **options):
    """Σ|dg| over the channels that share a gate, had each its own: of equal keys they cancel, and leave 1 in 300."""
    gates = np.broadcast_to(arguments["g"][..., None], (*arguments["g"].shape, arguments["k"].shape[-1]))
    return np.abs(call(op, "definition", "bwd", arguments | {"g": gates}, **options).dg).sum(axis=-1)


WAYS = [dict(wy=True), dict(sub_block=1), dict(values_decayed=True)]


@pytest.mark.parametrize(
    ("t", "l2norm"),
    [
        pytest.param(t, l2norm, marks=[pytest.mark.full] * ((t, l2norm) not in {(1, False), (65, True), (129, False)}))
        for t in (1, 3, 63, 65, 129)
        for l2norm in (False, True)
    ],
)
@pytest.mark.parametrize("op", OPS)
def test_every_form_is_the_recurrence(op, t, l2norm):
    check_is_the_recurrence(op, *problem(op, t=t), use_qk_l2norm_in_kernel=l2norm)


@pytest.mark.parametrize(("common", "gates", "beta"), LADDER)
@pytest.mark.parametrize("op", OPS)
def test_every_form_is_the_recurrence_whatever_the_keys(op, common, gates, beta):
    """What powers of A lose: of equal keys, beta 1 and no decay they are as large as 1e17 in a chunk of 64."""
    forward, backward = problem(op, b=1, t=70, h=1, hv=1, common=KEYS[common], gates=gates, beta=beta)
    with np.errstate(over="raise", invalid="raise", divide="raise"):
        check_is_the_recurrence(op, forward, backward, [64], scale=0.3)


@pytest.mark.parametrize("op", OPS)
def test_a_row_sum_of_a_above_fifty_is_solved(op):
    """As Qwen3.8's first layer has it: 37 in a chunk of 64."""
    forward, backward = problem(op, b=1, t=64, h=1, hv=1, common=3.0, gates="none", beta="near 1")
    largest = []
    stages = Stages(lambda site, x: largest.append(np.abs(x).sum(axis=-1).max()) or x if site == "A" else x)
    call(op, "chunk", "fwd", forward, stages=stages)
    assert max(largest) > 50
    check_is_the_recurrence(op, forward, backward, [64])


@pytest.mark.parametrize("dtype", [np.float32, ml_dtypes.bfloat16])
@pytest.mark.parametrize("op", OPS)
def test_every_form_is_the_recurrence_of_narrow_inputs(op, dtype):
    forward, backward = problem(op)
    narrow = {name: x.astype(dtype) for name, x in forward.items()}
    narrow["initial_state"] = forward["initial_state"].astype(np.float32)
    backward = dict(do=backward["do"].astype(dtype), dht=backward["dht"].astype(np.float32))
    check_is_the_recurrence(op, narrow, backward, [64])
    wide = {name: x.astype(np.float64) for name, x in narrow.items()}
    assert np.array_equal(call(op, "chunk", "fwd", wide).o, call(op, "chunk", "fwd", narrow).o)


@pytest.mark.parametrize("op", OPS)
def test_packed_sequences_are_separate_ones(op):
    cu_seqlens = np.array([0, 0, 1, 1, 18, 83, 130, 130], np.int32)
    forward, backward = problem(op, b=1, t=130, n=7)
    check_is_the_recurrence(op, forward, backward, [16, 64], cu_seqlens=cu_seqlens)
    for form in ("definition", "chunk", "fused_recurrent"):
        packed = call(op, form, "fwd", forward, cu_seqlens=cu_seqlens, output_final_state=True)
        grads = call(op, form, "bwd", forward | backward, cu_seqlens=cu_seqlens)
        for n, (start, end) in enumerate(pairwise(cu_seqlens.tolist())):
            alone = {name: x[:, start:end] if name in PER_STEP else x for name, x in (forward | backward).items()}
            alone |= {name: alone[name][n : n + 1] for name in ("initial_state", "dht")}
            expected = call(op, form, "bwd", alone)
            for name in ("dq", "dk", "dv", "dg", "dbeta"):
                assert np.array_equal(getattr(grads, name)[:, start:end], getattr(expected, name))
            assert np.array_equal(grads.dh0[n : n + 1], expected.dh0)
            o, ht = call(
                op, form, "fwd", {x: y for x, y in alone.items() if x not in backward}, output_final_state=True
            )
            assert np.array_equal(packed.o[:, start:end], o) and np.array_equal(packed.ht[n : n + 1], ht)
            if start == end:
                assert np.array_equal(ht[0], forward["initial_state"][n])
                assert np.array_equal(expected.dh0[0], backward["dht"][n])


@pytest.mark.parametrize("l2norm", [False, True])
@pytest.mark.parametrize("heads", [(2, 2), (1, 2)])
@pytest.mark.parametrize("op", OPS)
def test_gradients_are_differences_of_the_recurrence(op, heads, l2norm):
    h, hv = heads
    forward, backward = problem(op, b=1, t=6, h=h, hv=hv, k=3, v=2, n=3, gates="mixed")
    options = dict(cu_seqlens=np.array([0, 0, 1, 6], np.int32), use_qk_l2norm_in_kernel=l2norm, scale=0.7)

    def loss(arguments):
        o, ht = call(op, "definition", "fwd", arguments, output_final_state=True, **options)
        return np.sum(o * backward["do"]) + np.sum(ht * backward["dht"])

    grads = call(op, "chunk", "bwd", forward | backward, **options)
    check_differences(loss, forward, grads)


@pytest.mark.parametrize("common", ["rho 2", "equal"])
@pytest.mark.parametrize("op", OPS)
def test_a_sample_against_fifty_digits(op, common):
    """The chunked form, where A's rows sum to 40 and more, against the recurrence in 50 digits."""
    mpmath = pytest.importorskip("mpmath")
    forward, _ = problem(op, b=1, t=64, h=1, hv=1, k=3, v=2, common=KEYS[common], beta="near 1")
    with mpmath.workdps(50):
        exactly = np.vectorize(mpmath.mpf, otypes=[object])
        q, k, v, g, beta = (exactly(forward[name][0, :, 0]) for name in ("q", "k", "v", "g", "beta"))
        state, scale = exactly(forward["initial_state"][0, 0]), mpmath.mpf(float(np.float32(3**-0.5)))
        exp = np.vectorize(mpmath.exp, otypes=[object])
        for t in range(64):
            state = exp(g[t]).reshape(-1, 1) * state
            state = state + np.outer(k[t], beta[t] * (v[t] - k[t] @ state))
        o = (scale * (q[63] @ state)).astype(np.float64)
        state = state.astype(np.float64)
    for form in ("definition", "fused_recurrent", "chunk"):
        got = call(op, form, "fwd", forward, output_final_state=True)
        np.testing.assert_allclose(got.ht[0, 0], state, rtol=0, atol=1e-13 * np.abs(state).max())
        np.testing.assert_allclose(got.o[0, 63, 0], o, rtol=0, atol=1e-13 * np.abs(o).max())


@pytest.mark.parametrize("size", ["b", "t", "h", "hv", "k", "v"])
@pytest.mark.parametrize("op", OPS)
def test_sizes_of_zero(op, size):
    forward, backward = problem(op, **({"h": 0, "hv": 0} if size == "h" else {size: 0}))
    for form in ("definition", "chunk", "fused_recurrent"):
        o, ht = call(op, form, "fwd", forward, output_final_state=True)
        assert o.shape == forward["v"].shape and not o.any()
        grads = call(op, form, "bwd", forward | backward)
        assert [x.shape for x in grads] == [x.shape for x in forward.values()]
        if size == "t":
            assert np.array_equal(ht, forward["initial_state"]) and np.array_equal(grads.dh0, backward["dht"])


@pytest.mark.parametrize("op", OPS)
def test_what_was_not_given_has_no_result(op):
    forward, backward = problem(op)
    del forward["initial_state"], backward["dht"]
    assert call(op, "chunk", "fwd", forward).ht is None
    assert call(op, "chunk", "bwd", forward | backward).dh0 is None


DOTS = {"lhs", "rhs", "partial", "acc"}
READ = {"q", "k", "v", "beta", "initial_state"}
SOLVED = {"solve_product", "solve_sum", "T", *(f"solve_{site}" for site in DOTS)}
CHUNK = DOTS | READ | SOLVED | {"c", "exponent", "decay", "kept_exponent", "kept", "lost", "change", "decayed", "sum",
                                "raw", "A", "v_new", "h", "P"}  # fmt: skip
ERRORS, WY = {"error", "update"}, {"u", "w"}
CHUNK_BACKWARD = {"do", "dht", "dv_new", "dupdate", "dh", "dP", "dA", "draw", "terms", "dgate", "of_beta", "dq", "dk",
                  "dv", "dg", "dbeta", "read"}  # fmt: skip
NORM = {"square", "norm", "rstd", "normed"}
STEP = READ | {"kept_exponent", "kept", "decayed", "partial", "acc", "error", "v_new", "written", "lost", "change", "h"}
STEP_BACKWARD = {"do", "dht", "dwritten", "dh", "dchange", "of_beta", "dgate", "dq", "dk", "dv", "dg", "dbeta"}


@pytest.mark.parametrize("wy", [False, True])
@pytest.mark.parametrize("op", OPS)
def test_stages_see_every_site(op, wy):
    forward, backward = problem(op, t=70)
    stages, seen = watched(wy=wy)
    channels = {"product", "pairs"} if op == "kda" else {"read", "pair_gate"} | (set() if wy else {"recalled"})
    of_channels = {"product", "pairs", "up_to"} if op == "kda" else channels | {"pair_terms"}
    way = WY if wy else ERRORS
    options = dict(use_qk_l2norm_in_kernel=True, stages=stages)
    call(op, "chunk", "fwd", forward, **options)
    assert set(seen) == CHUNK | way | channels | NORM | {"o", "ht"}
    seen.clear()
    call(op, "chunk", "bwd", forward | backward, **options)
    wys = {"du", "dw", "dT"} if wy else set()
    assert set(seen) == CHUNK | way | of_channels | NORM | CHUNK_BACKWARD | wys | {"projected", "heads"}
    seen.clear()
    call(op, "fused_recurrent", "fwd", forward, **options)
    assert set(seen) == STEP | NORM | {"o", "ht"}
    seen.clear()
    call(op, "fused_recurrent", "bwd", forward | backward, **options)
    assert set(seen) == STEP | NORM | STEP_BACKWARD | {"derror", "projected", "heads"}
