"""Laws of the delta rules that hold bit for bit, whatever computes them."""

import numpy as np
import pytest

from cpu_golden.simple_gla import chunk_simple_gla_fwd
from tests.delta_rule.test_delta_rule_cpu import OPS, call, problem

FORMS = ["chunk", "fused_recurrent"]


def steps(form, **options):
    return dict(chunk_size=16) | options if form == "chunk" else options


@pytest.mark.parametrize("cut", [0, 16, 48])
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("op", OPS)
def test_a_sequence_goes_on_from_its_state(op, form, cut):
    """Split at the border of a chunk, in either direction of time, nothing changes."""
    forward, backward = problem(op, b=1, t=70)
    options = steps(form, use_qk_l2norm_in_kernel=True)
    whole = call(op, form, "fwd", forward, output_final_state=True, **options)
    grads = call(op, form, "bwd", forward | backward, **options)
    of = forward | backward
    early = {name: x if name in ("initial_state", "dht") else x[:, :cut] for name, x in of.items()}
    late = {name: x if name in ("initial_state", "dht") else x[:, cut:] for name, x in of.items()}
    first = call(op, form, "fwd", {x: early[x] for x in forward}, output_final_state=True, **options)
    late["initial_state"] = first.ht
    second = call(op, form, "fwd", {x: late[x] for x in forward}, output_final_state=True, **options)
    np.testing.assert_array_equal(np.concatenate([first.o, second.o], axis=1), whole.o)
    np.testing.assert_array_equal(second.ht, whole.ht)
    after = call(op, form, "bwd", late, **options)
    before = call(op, form, "bwd", early | {"dht": after.dh0}, **options)
    for name in ("dq", "dk", "dv", "dg", "dbeta"):
        joined = np.concatenate([getattr(before, name), getattr(after, name)], axis=1)
        np.testing.assert_array_equal(joined, getattr(grads, name), err_msg=name)
    np.testing.assert_array_equal(before.dh0, grads.dh0)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("op", OPS)
def test_heads_know_nothing_of_each_other(op, form):
    """Permuted heads of keys, each with the heads of values that read it, give permuted results."""
    forward, backward = problem(op, t=40, h=3, hv=6)
    keys, values = [2, 0, 1], [4, 5, 0, 1, 2, 3]

    def permuted(arguments):
        taken = {name: x.take(keys if name in ("q", "k", "dq", "dk") else values, 2) for name, x in arguments.items()
                 if name not in ("initial_state", "dht", "ht", "dh0")}  # fmt: skip
        return taken | {name: x[:, values] for name, x in arguments.items() if name not in taken}

    options = steps(form)
    for direction, given, more in (("fwd", forward, dict(output_final_state=True)), ("bwd", forward | backward, {})):
        straight = call(op, form, direction, given, **options, **more)
        of_permuted = call(op, form, direction, permuted(given), **options, **more)
        for name, expected in permuted(straight._asdict()).items():
            np.testing.assert_array_equal(getattr(of_permuted, name), expected, err_msg=name)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("op", OPS)
def test_values_and_states_scale_results(op, form):
    """v and the state times a power of two: o and ht likewise; of the gradients those of k, g and beta."""
    forward, backward = problem(op, t=40)
    twice = forward | {name: 4 * forward[name] for name in ("v", "initial_state")}
    options = steps(form)
    o, ht = call(op, form, "fwd", forward, output_final_state=True, **options)
    scaled = call(op, form, "fwd", twice, output_final_state=True, **options)
    np.testing.assert_array_equal(scaled.o, 4 * o)
    np.testing.assert_array_equal(scaled.ht, 4 * ht)
    grads = call(op, form, "bwd", forward | backward, **options)._asdict()
    of_scaled = call(op, form, "bwd", twice | backward, **options)
    for name, grad in grads.items():
        np.testing.assert_array_equal(
            getattr(of_scaled, name), (1 if name in ("dv", "dh0") else 4) * grad, err_msg=name
        )


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("op", OPS)
def test_beta_zero_is_plain_decay(op, form):
    forward, backward = problem(op, t=40)
    forward["beta"] = np.zeros_like(forward["beta"])
    ht = call(op, form, "fwd", forward, output_final_state=True, **steps(form)).ht
    summed = forward["g"].sum(axis=1)
    decayed = np.exp(summed if op == "kda" else summed[..., None])[..., None] * forward["initial_state"]
    np.testing.assert_allclose(ht, decayed, rtol=1e-13)
    grads = call(op, form, "bwd", forward | backward, **steps(form))
    assert not grads.dv.any() and not grads.dk.any() and grads.dbeta.any()


@pytest.mark.parametrize("form", FORMS)
def test_orthogonal_keys_write_as_linear_attention_does(form):
    """With nothing to correct, what is written is beta v."""
    forward, _ = problem("gated_delta_rule", b=1, t=12, h=4, hv=4, k=12)
    forward["k"] = np.broadcast_to(np.eye(12)[None, :, None], (1, 12, 4, 12)).copy()
    del forward["initial_state"]
    got = call("gated_delta_rule", form, "fwd", forward, **steps(form))
    values = forward["beta"][..., None] * forward["v"]
    plain = chunk_simple_gla_fwd(forward["q"], forward["k"], values, g=forward["g"])
    np.testing.assert_allclose(got.o, plain.o, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("op", OPS)
def test_one_hot_keys_are_an_associative_memory_of_integers(op, form):
    """beta 1 and no decay: a value is stored under its key, in place of the one before, and read back exactly."""
    rng = np.random.default_rng(0)
    forward, _ = problem(op, b=1, t=150, h=2, hv=4, k=8, v=5, gates="none")
    slots, asked = rng.integers(8, size=(2, 150, 2))
    forward["k"], forward["q"] = np.eye(8)[slots][None], np.eye(8)[asked][None]
    forward["v"] = rng.integers(-999, 1000, (1, 150, 4, 5)).astype(float)
    forward["beta"] = np.ones((1, 150, 4))
    memory = np.round(1000 * forward["initial_state"])
    forward["initial_state"] = memory.copy()
    o, ht = call(op, form, "fwd", forward, scale=1.0, output_final_state=True, **steps(form))
    for t in range(150):
        for head in range(4):
            memory[0, head, slots[t, head // 2]] = forward["v"][0, t, head]
            np.testing.assert_array_equal(o[0, t, head], memory[0, head, asked[t, head // 2]])
    np.testing.assert_array_equal(ht, memory)


@pytest.mark.parametrize("op", OPS)
def test_beta_two_reflects_what_is_stored(op):
    """Beta is not clipped at 1: 2 leaves the value less the one before, as often as it is written."""
    forward, _ = problem(op, b=1, t=40, h=1, hv=1, k=1, v=3, gates="none")
    forward |= {"k": np.ones((1, 40, 1, 1)), "q": np.ones((1, 40, 1, 1)), "beta": np.full((1, 40, 1), 2.0)}
    forward["v"] = np.ones((1, 40, 1, 3))
    forward["initial_state"] = np.full((1, 1, 1, 3), 3.0)
    o = call(op, "chunk", "fwd", forward, chunk_size=16).o
    np.testing.assert_array_equal(o[0, :, 0, 0], np.resize([-1.0, 3.0], 40))


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("op", OPS)
def test_nothing_flows_back_in_time(op, form):
    forward, _ = problem(op, t=70)
    changed = {name: x.copy() for name, x in forward.items()}
    for name in set(forward) - {"initial_state"}:
        changed[name][:, 37:] = -1e-3 if name == "g" else 1.5
    for l2norm in (False, True):
        options = steps(form, use_qk_l2norm_in_kernel=l2norm)
        then, now = (call(op, form, "fwd", x, **options).o for x in (forward, changed))
        np.testing.assert_array_equal(now[:, :37], then[:, :37])
