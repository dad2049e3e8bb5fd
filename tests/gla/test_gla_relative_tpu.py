"""States relative to the decays of a group of steps, on the TPU: their parts, and which groups are taken so."""

from typing import NamedTuple

import numpy as np
import pytest

jax = pytest.importorskip("jax")

import jax.numpy as jnp  # noqa: E402
from jax.experimental import pallas as pl  # noqa: E402

from cpu_golden import gla as golden  # noqa: E402
from tpu_kernels import gla  # noqa: E402
from tpu_kernels._lib import decays, relative_states  # noqa: E402

pytestmark = pytest.mark.tpu
RNG = np.random.default_rng(28)
WIDE = np.longdouble


class Reversed(NamedTuple):
    reverse: bool


def pair_of(size, largest):
    high = RNG.uniform(-largest, largest, size).astype(np.float32)
    return high, (high * RNG.uniform(-(2.0**-25), 2.0**-25, size)).astype(np.float32)


def whole(pair):
    return np.asarray(pair[0]).astype(WIDE) + np.asarray(pair[1])


def off(found, expected):
    return float(np.max(np.abs(whole(found) / expected - 1)))


# ------------------------------------------------------------------------------------------------------------ parts


def test_exp_in_two_pieces_and_its_reciprocal_are_right_to_26_bits():
    x = pair_of(100_000, relative_states.LARGEST_SUM)
    exp, reciprocal = jax.jit(decays.exp_pairs)(tuple(map(jnp.asarray, x)))
    assert off(exp, np.exp(whole(x))) < 2.0**-25.9
    assert off(reciprocal, np.exp(-whole(x))) < 2.0**-25.9


def test_products_of_pairs_lose_what_is_said():
    factor = tuple(map(jnp.asarray, pair_of(100_000, 8)))
    x = jnp.asarray(RNG.normal(size=100_000), jnp.bfloat16).astype(jnp.float32)
    found = jax.jit(relative_states.product)(x, factor)
    assert off(found, np.asarray(x).astype(WIDE) * whole(factor)) < 2.0**-32
    assert not np.any(np.asarray(found[0]).view(np.int32) & 0xFF)  # 16 bits
    pair = tuple(map(jnp.asarray, pair_of(100_000, 8)))
    assert off(jax.jit(relative_states.times_pair)(pair, factor), whole(pair) * whole(factor)) < 2.0**-33


@pytest.mark.parametrize("reverse", [False, True])
def test_gates_are_added_up_in_their_group(reverse):
    gates = pair_of((48, 128), 1)

    def kernel(*refs):
        found = relative_states.sums_in_groups((refs[0][...], refs[1][...]), Reversed(reverse))
        refs[2][...], refs[3][...] = found

    out = [jax.ShapeDtypeStruct((48, 128), jnp.float32)] * 2
    found = pl.pallas_call(kernel, out_shape=out, interpret=True)(*gates)
    groups = whole(gates).reshape(3, 16, 128)
    expected = np.cumsum(groups[:, ::-1], axis=1)[:, ::-1] if reverse else np.cumsum(groups, axis=1)
    assert np.max(np.abs(whole(found).reshape(3, 16, 128) - expected)) < 2.0**-44


@pytest.mark.parametrize("axis", [0, 1])
def test_sums_of_aligned_products_are_exact(axis):
    """With outliers, a column of zeros and one of numbers too small."""
    keys, values = (np.ldexp(RNG.normal(size=(16, 128)), RNG.integers(-30, 30, (16, 128))) for _ in range(2))
    keys[:, 0], values[:, 1] = 0.0, 2.0**-100
    given = [x.astype(np.float32).T if axis else x.astype(np.float32) for x in (keys, values)]
    found = [np.asarray(relative_states.aligned(jnp.asarray(x), axis)) for x in given]
    for x, first in zip(given, found, strict=True):
        largest = np.maximum(np.abs(x).max(axis, keepdims=True), relative_states.SMALLEST)
        assert (np.abs(x - first) <= largest * 2.0**-7).all()
        assert np.array_equal(first.astype(jnp.bfloat16).astype(np.float32), first)
    keys, values = (x.T if axis else x for x in found)
    sums = [
        np.add.reduce(keys[order, :, None] * values[order, None], 0) for order in (slice(None), slice(None, None, -1))
    ]
    assert np.array_equal(sums[0], sums[1]) and sums[0].dtype == np.float32
    assert np.array_equal(sums[0], keys.T.astype(np.float64) @ values.astype(np.float64))


# ----------------------------------------------------------------------------------------------------------- groups


def arguments(steps, gate, dtype=jnp.bfloat16):
    shape = (1, steps, 1, 32)
    q, k, v, do = (jnp.asarray(RNG.normal(size=shape), dtype) for _ in range(4))
    gk = jnp.asarray(gate * RNG.exponential(size=shape), jnp.float32)
    state = jnp.asarray(RNG.normal(size=(1, 1, 32, 32)), jnp.float32)
    return q, k, v, do, gk, state


def run(direction, q, k, v, do, gk, state, reverse=False, cu_seqlens=None):
    options = dict(gk=gk, initial_state=state, reverse=reverse, cu_seqlens=cu_seqlens, interpret=True)
    if direction == "forward":
        return list(gla.fused_recurrent_gla_fwd(q, k, v, output_final_state=True, **options))
    return jax.tree.leaves(gla.fused_recurrent_gla_bwd(q, k, v, do, dht=2 * state, **options))


def one_by_one(monkeypatch, *given):
    """What `run` returns where every group stands apart."""
    jax.clear_caches()
    with monkeypatch.context() as patched:
        patched.setattr(relative_states, "LARGEST", -1.0)
        found = run(*given)
    jax.clear_caches()
    return found


def same(found, expected):
    return [np.array_equal(a, b, equal_nan=True) for a, b in zip(found, expected, strict=True)]


def in_full(*values):
    return pytest.param(*values, marks=pytest.mark.full)


@pytest.mark.parametrize(
    ("direction", "gate"),
    [("forward", -0.2), *(in_full("forward", gate) for gate in (-0.003, 0.05))]
    + [in_full("backward", gate) for gate in (-0.003, -0.2, 0.05)],
)
def test_relative_states_err_no_more(direction, gate, monkeypatch):
    """ht and dh0, in float32, beside those of a decay at each step: 16 roundings fewer, one more where a group ends."""
    given = arguments(64, gate)
    q, k, v, do, gk, state = map(np.asarray, given)
    found, apart = run(direction, *given), one_by_one(monkeypatch, direction, *given)
    assert not all(same(found, apart))
    if direction == "forward":
        expected = golden.fused_recurrent_gla_fwd(q, k, v, gk=gk, initial_state=state, output_final_state=True)[1]
    else:
        expected = golden.fused_recurrent_gla_bwd(q, k, v, do, gk=gk, initial_state=state, dht=2 * state).dh0
    error, error_apart = (np.sqrt(np.mean((np.asarray(x[-1]) - expected) ** 2)) for x in (found, apart))
    assert 0 < error <= 1.05 * error_apart


def steep(given):
    return [*given[:4], 10 * given[4], given[5]]


def large(given):
    return [given[0], given[1] * 2.0**70, *given[2:]]


@pytest.mark.parametrize(
    ("direction", "change"),
    [("forward", steep), in_full("forward", large)] + [in_full("backward", change) for change in (steep, large)],
)
def test_groups_stand_apart(direction, change, monkeypatch):
    """Decays of e^-20 or less in a group, and numbers of 2^60 or more."""
    given = change(arguments(16, -0.5))
    assert all(same(run(direction, *given), one_by_one(monkeypatch, direction, *given)))


@pytest.mark.parametrize("gate", [-5.0, in_full(-0.1)])
def test_values_have_the_same_bits_in_calls_of_half_of_them(gate):
    """Values do not depend on one another. 256 are more than a register has lanes; at -5.0 groups stand apart."""
    q, k, _, do, gk, _ = arguments(40, gate)
    v = jnp.asarray(RNG.normal(size=(1, 40, 1, 256)), jnp.bfloat16)
    state = jnp.asarray(RNG.normal(size=(1, 1, 32, 256)), jnp.float32)
    o, ht = run("forward", q, k, v, do, gk, state)
    for half in (slice(0, 128), slice(128, 256)):
        alone = run("forward", q, k, v[..., half], do, gk, state[..., half])
        assert all(same((o[..., half], ht[..., half]), alone))


@pytest.mark.parametrize(
    ("direction", "dtype", "reverse"),
    [("forward", "bfloat16", False), in_full("forward", "bfloat16", True), in_full("forward", "float32", False)]
    + [in_full("backward", dtype, reverse) for dtype in ("bfloat16", "float32") for reverse in (False, True)],
)
def test_a_sequence_has_the_same_bits_wherever_it_lies(direction, dtype, reverse):
    lengths = [5, 0, 40]
    q, k, v, do, gk, state = arguments(sum(lengths), -0.1, dtype)
    states = jnp.concatenate([state * n for n in range(1, 4)])
    ends = np.cumsum([0, *lengths])
    packed = run(direction, q, k, v, do, gk, states, reverse, jnp.asarray(ends, jnp.int32))
    for n in (0, 2):
        rows = slice(ends[n], ends[n + 1])
        alone = run(direction, *(x[:, rows] for x in (q, k, v, do, gk)), states[n : n + 1], reverse)
        parts = [x[n : n + 1] if x.shape == states.shape else x[:, rows] for x in packed]
        assert all(same(parts, alone)), n
