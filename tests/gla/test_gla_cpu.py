"""The goldens of gated linear attention: against the recurrence, finite differences, autograd and exact arithmetic."""

from itertools import pairwise

import ml_dtypes
import numpy as np
import pytest

from cpu_golden import gla, simple_gla
from cpu_golden._lib.decays import kept_of
from cpu_golden._lib.sequences import Sequence
from cpu_golden.fused_recurrent import recurrent_backward, recurrent_forward
from cpu_golden.stages import Stages
from parity.judging.passes import whole_float32
from tests.support.differences import check_differences
from tests.support.sites import watched

GATES = ["none", "g", "g_gamma", "both", "gk"]
CHUNKS = [16, 48, 64, 128, 256]
PER_STEP = ("q", "k", "v", "g", "gk", "do")


def problem(gates, *, b=2, t=65, h=2, k=12, v=20, n=None, steepness=0.2, dtype=np.float64, seed=0):
    """Arguments of a forward pass, and what the backward pass takes besides; decays of `steepness` per step."""
    normal = np.random.default_rng(seed).standard_normal
    n = b if n is None else n

    def decays(*shape):
        return -steepness * np.abs(normal(shape))

    tensors = dict(q=normal((b, t, h, k)), k=normal((b, t, h, k)), v=normal((b, t, h, v)))
    forward = {name: x.astype(dtype) for name, x in tensors.items()} | dict(initial_state=normal((n, h, k, v)))
    if gates in ("g", "both"):
        forward["g"] = decays(b, t, h)
    if gates in ("g_gamma", "both"):
        forward["g_gamma"] = decays(h)
    if gates == "gk":
        forward["gk"] = decays(b, t, h, k)
    return forward, dict(do=normal((b, t, h, v)).astype(dtype), dht=normal((n, h, k, v)))


def call(form, direction, forward, **arguments):
    """That form of gla or of simple_gla, whichever takes these gates."""
    module, name = (gla, f"gla_{direction}") if "gk" in forward else (simple_gla, f"simple_gla_{direction}")
    name = f"{name}_definition" if form == "definition" else f"{form}_{name}"
    return getattr(module, name)(**forward, **arguments)


def absolute(arguments):
    return {name: x if name in ("g", "g_gamma", "gk") else np.abs(x) for name, x in arguments.items()}


def sums(form, forward, backward, **arguments):
    """Σ|terms| behind every gradient; of the gates' also what chunks add to their sums and take away again."""
    found = call("definition", "bwd", absolute(forward), **absolute(backward), **arguments)
    if form != "chunk":
        return found
    twice = 2 * (np.abs(forward["k"]) * found.dk).astype(np.float64).sum(axis=1, keepdims=True)
    more = {"dgk": twice, "dg": twice.sum(axis=-1), "dg_gamma": twice.sum(axis=(0, 1, 3)) * forward["k"].shape[1]}
    gates = {name: x for name, x in found._asdict().items() if name in more and x is not None}
    return found._replace(**{name: x + more[name] for name, x in gates.items()})


def check_within(got, expected, magnitude, tolerance=1e-12):
    """Every output that is not None within `tolerance` of its magnitude, and the same ones None."""
    for name in expected._fields:
        y, x, m = (getattr(result, name) for result in (got, expected, magnitude))
        assert (y is None) == (x is None), name
        if x is not None:
            assert y.dtype == np.float64, name
            assert y.shape == x.shape, name
            assert np.isfinite(x).all(), name
            assert np.all(np.abs(y - x) <= tolerance * m + 1e-300), name


def check_is_the_recurrence(forward, backward, chunks, **arguments):
    """Every form and chunk size, both directions, against the definition."""
    last = dict(output_final_state=True, **arguments)
    o, grads = call("definition", "fwd", forward, **last), call("definition", "bwd", forward, **backward, **arguments)
    m_o = call("definition", "fwd", absolute(forward), **last)
    check_within(call("fused_recurrent", "fwd", forward, **last), o, m_o)
    check_within(
        call("fused_recurrent", "bwd", forward, **backward, **arguments),
        grads,
        sums("step", forward, backward, **arguments),
    )
    for chunk_size in chunks:
        check_within(call("chunk", "fwd", forward, **last, chunk_size=chunk_size), o, m_o)
        chunked = dict(**backward, **arguments, chunk_size=chunk_size)
        check_within(call("chunk", "bwd", forward, **chunked), grads, sums("chunk", forward, backward, **arguments))


@pytest.mark.parametrize("t", [1, 3, 63, 64, 65, 129])
@pytest.mark.parametrize("gates", GATES)
def test_every_form_is_the_recurrence(gates, t):
    check_is_the_recurrence(*problem(gates, t=t), CHUNKS)


@pytest.mark.parametrize("dtype", [np.float32, ml_dtypes.bfloat16])
@pytest.mark.parametrize("gates", ["both", "gk"])
def test_every_form_is_the_recurrence_of_narrow_inputs(gates, dtype):
    forward, backward = problem(gates, dtype=dtype, k=20, v=12)
    narrow = {name: x.astype(dtype) if name in ("g", "gk") else x.astype(np.float32) for name, x in forward.items()}
    narrow |= {name: forward[name] for name in "qkv"}
    backward["dht"] = backward["dht"].astype(np.float32)
    check_is_the_recurrence(narrow, backward, [16, 64], scale=0.3)
    wide = {name: x.astype(np.float64) for name, x in narrow.items()}
    assert np.array_equal(call("chunk", "fwd", wide).o, call("chunk", "fwd", narrow).o)


@pytest.mark.parametrize("gates", GATES)
def test_packed_sequences_are_separate_ones(gates):
    cu_seqlens = np.array([0, 0, 1, 1, 18, 83, 130, 130], np.int32)
    forward, backward = problem(gates, b=1, t=130, n=7)
    check_is_the_recurrence(forward, backward, CHUNKS, cu_seqlens=cu_seqlens)
    # Another sequence's NaN stays there, and an empty sequence hands its state on.
    poisoned = {name: x.copy() for name, x in forward.items()}
    poisoned["initial_state"][3] = np.nan
    for name in set(poisoned) & set(PER_STEP):
        poisoned[name][:, 1:18] = np.nan
    for form in ("definition", "chunk", "fused_recurrent"):
        packed = call(form, "fwd", poisoned, cu_seqlens=cu_seqlens, output_final_state=True)
        grads = call(form, "bwd", poisoned, **backward, cu_seqlens=cu_seqlens)
        for n, (start, end) in enumerate(pairwise(cu_seqlens.tolist())):
            if n == 3:
                continue
            alone = {name: x[:, start:end] if name in PER_STEP else x for name, x in forward.items()}
            alone["initial_state"] = forward["initial_state"][n : n + 1]
            o, ht = call(form, "fwd", alone, output_final_state=True)
            assert np.array_equal(packed.o[:, start:end], o)
            assert np.array_equal(packed.ht[n : n + 1], ht)
            expected = call(form, "bwd", alone, do=backward["do"][:, start:end], dht=backward["dht"][n : n + 1])
            for name in ("dq", "dk", "dv"):
                assert np.array_equal(getattr(grads, name)[:, start:end], getattr(expected, name))
            assert np.array_equal(grads.dh0[n : n + 1], expected.dh0)
            if start == end:
                assert np.array_equal(ht[0], forward["initial_state"][n])
                assert np.array_equal(expected.dh0[0], backward["dht"][n])


@pytest.mark.parametrize("cu_seqlens", [None, np.array([0, 5, 5, 6, 70], np.int32)])
@pytest.mark.parametrize("gates", GATES)
def test_reverse_is_time_read_backwards(gates, cu_seqlens):
    b, n = (2, 2) if cu_seqlens is None else (1, 4)
    forward, backward = problem(gates, b=b, t=70, n=n)
    edges = [0, 70] if cu_seqlens is None else cu_seqlens.tolist()
    order = np.concatenate([np.arange(start, end)[::-1] for start, end in pairwise(edges)])

    def flip(tensors):
        return {name: x[:, order] if name in PER_STEP else x for name, x in tensors.items()}

    for form in ("definition", "fused_recurrent"):
        last = dict(cu_seqlens=cu_seqlens, output_final_state=True)
        got, expected = call(form, "fwd", forward, **last, reverse=True), call(form, "fwd", flip(forward), **last)
        assert np.array_equal(got.o, expected.o[:, order])
        assert np.array_equal(got.ht, expected.ht)
        got = call(form, "bwd", forward, **backward, cu_seqlens=cu_seqlens, reverse=True)
        expected = call(form, "bwd", flip(forward), **flip(backward), cu_seqlens=cu_seqlens)
        for name, grad in gradients(forward).items():
            wanted = getattr(expected, grad)
            wanted = wanted[:, order] if name in PER_STEP else wanted
            np.testing.assert_allclose(getattr(got, grad), wanted, rtol=1e-14)  # sums over time in another order


def gradients(forward):
    """The gradient of each argument, by the name that `Grads` has for it."""
    return {name: {"initial_state": "dh0"}.get(name, f"d{name}") for name in forward}


@pytest.mark.parametrize("gates", GATES)
@pytest.mark.parametrize("reverse", [False, True])
def test_gradients_are_differences_of_the_recurrence(gates, reverse):
    forward, backward = problem(gates, t=7, k=3, v=2)

    def loss(arguments):
        o, ht = call("definition", "fwd", arguments, output_final_state=True, reverse=reverse)
        return np.sum(o * backward["do"]) + np.sum(ht * backward["dht"])

    grads = call("definition", "bwd", forward, **backward, reverse=reverse)
    check_differences(loss, forward, grads)
    absent = [name for name in grads._fields if name not in gradients(forward).values()]
    assert all(getattr(grads, name) is None for name in absent)


@pytest.mark.parametrize("form", ["definition", "chunk", "fused_recurrent"])
@pytest.mark.parametrize("gates", GATES)
def test_gradients_are_those_of_autograd(gates, form):
    torch = pytest.importorskip("torch")
    forward, backward = problem(gates, t=70, k=9, v=5)
    leaves = {name: torch.from_numpy(x).requires_grad_() for name, x in forward.items()}
    decay = torch.zeros(2, 70, 2, 9, dtype=torch.float64)
    decay = decay + leaves.get("gk", 0) + leaves.get("g_gamma", torch.zeros(2))[:, None]
    if "g" in leaves:
        decay = decay + leaves["g"][..., None]
    state, rows = leaves["initial_state"], []
    for t in range(70):
        state = torch.einsum("bhk,bhkv->bhkv", decay[:, t].exp(), state)
        state = state + torch.einsum("bhk,bhv->bhkv", leaves["k"][:, t], leaves["v"][:, t])
        rows.append(torch.einsum("bhk,bhkv->bhv", leaves["q"][:, t], state) * float(np.float32(1 / 3)))
    o = torch.stack(rows, dim=1)
    torch.autograd.backward([o, state], [torch.from_numpy(backward[name]) for name in ("do", "dht")])
    got = call(form, "fwd", forward, output_final_state=True)
    np.testing.assert_allclose(got.o, o.detach().numpy(), rtol=1e-10, atol=1e-11)
    np.testing.assert_allclose(got.ht, state.detach().numpy(), rtol=1e-10, atol=1e-11)
    grads = call(form, "bwd", forward, **backward)
    for name, grad in gradients(forward).items():
        np.testing.assert_allclose(getattr(grads, grad), leaves[name].grad.numpy(), rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("steepness", [pytest.param(0.2, marks=pytest.mark.full), 30.0])
@pytest.mark.parametrize("gates", GATES)
def test_a_sample_against_fifty_digits(gates, steepness):
    """The sums over all pairs of steps that the recurrence amounts to, with decays in 50 digits."""
    mpmath = pytest.importorskip("mpmath")
    forward, backward = problem(gates, b=1, t=21, h=1, k=3, v=2, steepness=steepness)
    with mpmath.workdps(50):
        exactly = np.vectorize(mpmath.mpf, otypes=[object])
        q, k, v = (exactly(forward[name][0, :, 0]) for name in "qkv")
        do, h0, dht = map(exactly, (backward["do"][0, :, 0], forward["initial_state"][0, 0], backward["dht"][0, 0]))
        gate = np.full((21, 3), mpmath.mpf(0), object)
        for name, axes in (("gk", (0, slice(None), 0)), ("g", (0, slice(None), 0, None)), ("g_gamma", (None, 0))):
            if name in forward:
                gate = gate + exactly(forward[name][axes])
        summed = np.concatenate([np.full((1, 3), mpmath.mpf(0), object), np.cumsum(gate, axis=0)])
        scale = mpmath.mpf(float(np.float32(3**-0.5)))

        def decay(i, j, c):
            return mpmath.exp(summed[min(i, 20) + 1, c] - summed[j + 1, c])

        def write(j, c):  # what enters channel c of the state at step j, and before the first one
            return h0[c] if j < 0 else k[j, c] * v[j]

        def read(i, c):  # what its gradient gets at step i, and after the last one
            return dht[c] if i > 20 else scale * q[i, c] * do[i]

        def straddling(t, c):
            return [decay(i, j, c) * (read(i, c) @ write(j, c)) for i in range(t, 22) for j in range(-1, t)]

        o = scale * sum(q[13, c] * decay(13, j, c) * write(j, c) for j in range(-1, 14) for c in range(3))
        dq = [scale * sum(decay(17, j, c) * (do[17] @ write(j, c)) for j in range(-1, 18)) for c in range(3)]
        dk = [sum(decay(i, 4, c) * (read(i, c) @ v[4]) for i in range(4, 22)) for c in range(3)]
        dv = sum(decay(i, 4, c) * read(i, c) * k[4, c] for i in range(4, 22) for c in range(3))
        dgate = [[sum(straddling(t, c)) for c in range(3)] for t in range(21)]

    for form in ("definition", "fused_recurrent", "chunk"):
        extra = dict(chunk_size=16) if form == "chunk" else {}
        got, grads = call(form, "fwd", forward, **extra), call(form, "bwd", forward, **backward, **extra)
        m_o = call(form, "fwd", absolute(forward), **extra).o
        m = sums(form, forward, backward)

        def close(got, magnitude, exact):
            assert np.all(np.abs(got - np.asarray(exact, np.float64)) <= 1e-13 * magnitude + 1e-300)

        close(got.o[0, 13, 0], m_o[0, 13, 0], o)
        close(grads.dk[0, 4, 0], m.dk[0, 4, 0], dk)
        close(grads.dq[0, 17, 0], m.dq[0, 17, 0], dq)
        close(grads.dv[0, 4, 0], m.dv[0, 4, 0], dv)
        if "gk" in forward:
            close(grads.dgk[0, :, 0], m.dgk[0, :, 0], dgate)
        if "g" in forward:
            close(grads.dg[0, :, 0], m.dg[0, :, 0], np.sum(dgate, axis=1))
        if "g_gamma" in forward:
            close(grads.dg_gamma[0], m.dg_gamma[0], np.sum(dgate))


def steep(shape):
    """-500 over 64 steps, evenly."""
    return np.full(shape, -500 / 64)


def positive(shape):
    """Growth by 10 % per step."""
    return np.full(shape, 0.1)


def mixed(shape):
    """Growth and decay by factors of up to e^8 in turn."""
    return 8 * np.sin(np.arange(np.prod(shape)).reshape(shape))


def resets(shape):
    """Nearly no decay, but one by e^-80 at every 11th step."""
    gates = np.full(shape, -1e-3)
    gates[:, ::11] = -80
    return gates


@pytest.mark.parametrize("pattern", [steep, positive, mixed, resets])
@pytest.mark.parametrize("gates", ["g", "gk", "both"])
def test_extreme_gates_stay_finite_and_right(gates, pattern):
    forward, backward = problem(gates, t=140)
    name = "gk" if gates == "gk" else "g"
    forward[name] = pattern(forward[name].shape)
    with np.errstate(over="raise", invalid="raise", divide="raise"):
        check_is_the_recurrence(forward, backward, [16, 64, 128])


def test_a_gate_of_minus_ten_thousand_forgets_everything_exactly():
    forward, backward = problem("g", t=40)
    forward["g"][...] = 0
    forward["g"][:, 20] = -1e4
    cut = {name: x[:, 20:] for name, x in forward.items() if name != "initial_state"}
    for form in ("definition", "chunk", "fused_recurrent"):
        o = call(form, "fwd", forward).o
        np.testing.assert_allclose(o[:, 20:], call(form, "fwd", cut).o, rtol=1e-12, atol=1e-12)
        grads = call(form, "bwd", forward, **backward)
        expected = call(form, "bwd", cut, do=backward["do"][:, 20:], dht=backward["dht"])
        np.testing.assert_allclose(grads.dk[:, 20:], expected.dk, rtol=1e-12, atol=1e-12)
        later = dict(do=backward["do"] * (np.arange(40) >= 20)[:, None, None], dht=backward["dht"])
        assert not call(form, "bwd", forward, **later).dh0.any()


@pytest.mark.parametrize("gates", GATES)
def test_nothing_flows_back_in_time(gates):
    forward, _ = problem(gates, t=70)
    changed = {name: x.copy() for name, x in forward.items()}
    for name in set(forward) & set(PER_STEP):
        changed[name][:, 37:] = -1e-3 if name in ("g", "gk") else 1e30
    for form in ("definition", "chunk", "fused_recurrent"):
        assert np.array_equal(call(form, "fwd", changed).o[:, :37], call(form, "fwd", forward).o[:, :37])


def test_a_worked_example():
    two_steps = dict(
        q=np.array([1.0, 2.0]).reshape(1, 2, 1, 1),
        k=np.array([3.0, 5.0]).reshape(1, 2, 1, 1),
        v=np.array([7.0, 11.0]).reshape(1, 2, 1, 1),
        initial_state=np.full((1, 1, 1, 1), 16.0),
    )
    halves = np.log(np.array([0.5, 0.25])).reshape(1, 2, 1)
    for gates in (dict(g=halves), dict(gk=halves[..., None]), dict(g=halves + 1, g_gamma=np.array([-1.0]))):
        o, ht = call("chunk", "fwd", two_steps | gates, output_final_state=True)
        # S_1 = 16 / 2 + 3 · 7 = 29, S_2 = 29 / 4 + 5 · 11
        assert o.ravel() == pytest.approx([29, 2 * 62.25])
        assert ht.ravel() == pytest.approx([62.25])
    do = np.array([1.0, 10.0]).reshape(1, 2, 1, 1)
    grads = simple_gla.chunk_simple_gla_bwd(**two_steps, do=do, g=halves, g_gamma=np.zeros(1))
    # dS_2 = 2 · 10 = 20, dS_1 = 20 / 4 + 1 = 6
    assert grads.dq.ravel() == pytest.approx([29, 622.5])
    assert grads.dk.ravel() == pytest.approx([6 * 7, 20 * 11])
    assert grads.dv.ravel() == pytest.approx([6 * 3, 20 * 5])
    assert grads.dg.ravel() == pytest.approx([6 * 8, 20 * 29 / 4])
    assert grads.dg_gamma == pytest.approx([6 * 8 + 20 * 29 / 4])
    assert grads.dh0.ravel() == pytest.approx([3])


@pytest.mark.parametrize("size", ["b", "t", "h", "k", "v"])
@pytest.mark.parametrize("gates", ["both", "gk"])
def test_sizes_of_zero(gates, size):
    forward, backward = problem(gates, **{size: 0})
    for form in ("definition", "chunk", "fused_recurrent"):
        o, ht = call(form, "fwd", forward, output_final_state=True)
        assert o.shape == forward["v"].shape
        assert not o.any()
        assert ht.shape == forward["initial_state"].shape
        grads = call(form, "bwd", forward, **backward)
        for name, grad in gradients(forward).items():
            assert getattr(grads, grad).shape == forward[name].shape
        if size == "t":
            assert np.array_equal(ht, forward["initial_state"])
            assert np.array_equal(grads.dh0, backward["dht"])


def test_no_sequences_at_all():
    forward, backward = problem("g", b=1, t=0, n=0)
    o, ht = call("chunk", "fwd", forward, cu_seqlens=np.zeros(1, np.int32), output_final_state=True)
    assert o.shape == (1, 0, 2, 20)
    assert ht.shape == (0, 2, 12, 20)
    assert call("chunk", "bwd", forward, **backward, cu_seqlens=np.zeros(1, np.int32)).dh0.shape == ht.shape


def test_what_was_not_given_has_no_result():
    forward, backward = problem("g_gamma")
    del forward["initial_state"]
    assert call("chunk", "fwd", forward).ht is None
    grads = call("chunk", "bwd", forward, do=backward["do"])
    assert [name for name in grads._fields if getattr(grads, name) is None] == ["dg", "dh0"]


DOT_SITES = {"lhs", "rhs", "partial", "acc"}
STATE_SITES = {"q", "k", "v", "initial_state", "kept_exponent", "kept", "lost", "change", "state", "out"}
SITES = {
    "chunk": DOT_SITES | STATE_SITES | {"c", "exponent", "decay", "decayed", "read", "sum", "A"},
    "fused_recurrent": {"partial", "acc"} | STATE_SITES | {"written"},
}
BACKWARD_SITES = {"chunk": {"dA", "terms"}, "fused_recurrent": {"dwritten", "dchange", "decayed"}}


@pytest.mark.parametrize("gates", ["both", "gk"])
def test_stages_see_every_site_and_change_nothing_by_themselves(gates):
    forward, backward = problem(gates, t=70)
    per_channel = {"product", "pairs"} if gates == "gk" else set()  # and then no sum that a decay is applied to
    of_pairs = per_channel or {"pair_gate"}
    for form, sites in SITES.items():
        for depth in (None, 5):
            stages, seen = watched(depth=depth)
            staged = call(form, "fwd", forward, stages=stages)
            chunked = of_pairs if form == "chunk" else set()
            assert set(seen) == (sites - {"read"} if per_channel else sites) | chunked
            if form == "chunk":
                assert seen.count("lhs") == seen.count("rhs")
                assert (seen.count("acc") == seen.count("lhs")) == (depth is None)
            np.testing.assert_allclose(staged.o, call("definition", "fwd", forward).o, rtol=1e-11, atol=1e-12)
            staged = call(form, "bwd", forward, **backward, stages=stages)
            chunked = of_pairs | {"up_to" if per_channel else "pair_terms"} if form == "chunk" else set()
            assert set(seen) == sites | {"do", "dht", "dstate", "dgate"} | BACKWARD_SITES[form] | chunked
            np.testing.assert_allclose(
                staged.dv, call("definition", "bwd", forward, **backward).dv, rtol=1e-11, atol=1e-12
            )


def test_rounding_one_site_emulates_a_kernel_that_rounds_there():
    forward, _ = problem("g", t=256, k=32, v=32, steepness=0.002)

    def error(*sites, depth=None):
        def rounding(site, value):
            return value.astype(ml_dtypes.bfloat16).astype(np.float64) if site in sites else value

        return np.sqrt(np.mean((call("chunk", "fwd", forward, stages=Stages(rounding, depth)).o - exact) ** 2))

    exact = call("chunk", "fwd", forward).o
    # A state that is rounded at every chunk border, and a sum rounded at every product, are worse than a result once.
    assert error("out") < error("state") < error("acc", depth=1)
    # Exponents of slow decays are small, so that rounding them is nearly nothing, and rounding the decay is not.
    assert error("exponent") < error("decay")
    narrow = {name: forward[name].astype(ml_dtypes.bfloat16) for name in "qkv"}
    assert error("lhs", "rhs") > 0
    assert np.array_equal(
        call("chunk", "fwd", forward | narrow).o,
        call("chunk", "fwd", forward | {name: x.astype(np.float64) for name, x in narrow.items()}).o,
    )


def test_a_state_is_rounded_for_the_steps_to_come_every_sixteen_steps():
    """0.27 at every step makes 4.32, which goes on as 4; between, what is read is rounded, and what goes on is not."""
    ones = np.ones((1, 1, 40, 1))
    start, gate = np.zeros((1, 1, 1, 1)), np.zeros((1, 1, 40, 1))
    stages = Stages(lambda site, x: np.rint(x) if site in ("state", "dstate") else x)
    given = Sequence(ones, 0.27 * ones, ones, gate, start, 1.0)
    o, _ = recurrent_forward(given, stages=stages)
    backward = given._replace(q=0.27 * ones, do=ones, dstate=start)
    dq, dk, *_ = recurrent_backward(backward, stages=stages)
    read = np.rint([0.27 * n + kept for kept, steps in ((0, 16), (4, 16), (8, 8)) for n in range(1, steps + 1)])
    written = np.rint([0.27 * n + kept for kept, steps in ((0, 8), (2, 16), (6, 16)) for n in range(1, steps + 1)])
    assert o.ravel().tolist() == dq.ravel().tolist() == read.tolist()
    assert dk.ravel().tolist() == written[::-1].tolist()


def test_of_a_decay_only_what_is_left_of_the_nearer_of_zero_and_one_is_rounded():
    decays, left = np.array([0.1, 0.4, 0.6, 0.9, 1.0, 1.2]), []
    rounded = kept_of(np.log(decays), Stages(lambda site, x: left.append((site, x)) or x))
    # exp(log x) in float64: each of the two is off by a roundoff or two of 2^-53.
    np.testing.assert_allclose(rounded, decays, rtol=1e-15)
    assert [site for site, _ in left] == ["kept_exponent", "kept"]
    np.testing.assert_allclose(left[1][1], [0.1, 0.4, -0.4, -0.1, 0.0, 0.2], atol=1e-15)


@pytest.mark.parametrize(
    ("t", "chunk", "blocks", "halves"),
    [(64, 64, 4, [(2, 16), (1, 32)]), (40, 48, 4, [(2, 16), (1, 32)]), (17, 32, 2, [(1, 16)]), (16, 16, 1, [])],
)
def test_pairs_of_steps_are_decayed_one_by_one_in_blocks_of_sixteen_and_by_halves_beyond(t, chunk, blocks, halves):
    """With gates per channel: the rows of A that are decayed together, later and earlier ones, of a filled chunk that
    is filled up to a power of two."""
    forward, _ = problem("gk", t=t, k=3)
    exponents = []

    def rounding(site, value):
        if site == "exponent":
            exponents.append(value.shape[2:])
        return value

    call("chunk", "fwd", forward, chunk_size=chunk, stages=Stages(rounding))
    across = [(*half, 3) for half in halves for _ in ("to the border", "from it")]
    assert exponents == [(blocks, 16, 16, 3), *across, (chunk, 3), (chunk, 3)]


@pytest.mark.parametrize("direction", ["fwd", "bwd"])
@pytest.mark.parametrize("gates", ["g", "gk"])
def test_a_short_last_chunk_is_summed_in_the_steps_of_a_whole_one(gates, direction):
    """70 steps in chunks of 64 are rounded as those and 58 more of zeros: a unit that makes six passes over a chunk's
    rows, and sums 128 products at a time, ends its sums where all 64 say."""
    forward, backward = problem(gates, t=70)
    given = forward | (backward if direction == "bwd" else {"output_final_state": True})
    filled = {
        name: np.pad(x, [(0, 58) if axis == 1 else (0, 0) for axis in range(x.ndim)]) if name in PER_STEP else x
        for name, x in given.items()
    }
    stages = Stages(lambda site, x: x.astype(np.float32).astype(np.float64), depth=128, passes=whole_float32)
    short, whole = (call("chunk", direction, x, stages=stages)._asdict() for x in (given, filled))
    for name, y in short.items():
        x = whole[name]
        assert (y is None) == (x is None), name
        if y is not None:
            np.testing.assert_array_equal(y, x[:, :70] if x.shape[1] == 128 else x, err_msg=name)


def test_a_sum_up_to_a_row_has_that_rows_own_term():
    """What kernels that take the sum before a row from the one up to it round: of what is written into a state."""
    forward, backward = problem("gk", t=8)
    seen = {}
    stages = Stages(lambda site, x: seen.update({site: x}) or x)
    call("chunk", "bwd", forward, **backward, stages=stages)
    np.testing.assert_array_equal(seen["up_to"], np.cumsum(seen["terms"], axis=-2))


@pytest.mark.parametrize("direction", ["fwd", "bwd"])
def test_a_head_is_rounded_alike_beside_others(direction):
    forward, backward = problem("gk", t=40)
    given = forward | (backward if direction == "bwd" else {"output_final_state": True})
    first = {name: x if isinstance(x, bool) else x[:, :, :1] for name, x in given.items()}
    for name in {"initial_state", "dht"} & first.keys():
        first[name] = given[name][:, :1]
    stages = Stages(lambda site, x: x.astype(np.float32).astype(np.float64), sub_block=1)
    alone, of_two = (call("chunk", direction, x, stages=stages) for x in (first, given))
    for name, y in alone._asdict().items():
        expected = getattr(of_two, name)
        of_first = expected[:, :1] if name in ("ht", "dh0") else expected[:, :, :1]
        np.testing.assert_array_equal(y, of_first, err_msg=name)
