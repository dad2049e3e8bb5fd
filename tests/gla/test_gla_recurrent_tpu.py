"""The parts of the TPU's recurrences, each alone: what a matrix of results, within its bounds, would not tell apart."""

import math

import numpy as np
import pytest

jax = pytest.importorskip("jax")

import jax.numpy as jnp  # noqa: E402
from jax.experimental import pallas as pl  # noqa: E402
from jax.experimental.pallas import tpu as pltpu  # noqa: E402

from op_arguments.gla import Problem  # noqa: E402
from parity.backends.emulation import mxu  # noqa: E402
from tpu_kernels._lib import decays, recurrent_sums  # noqa: E402
from tpu_kernels._lib import recurrent_layout as layout  # noqa: E402
from tpu_kernels.simple_gla import fused_recurrent_simple_gla_bwd, fused_recurrent_simple_gla_fwd  # noqa: E402

pytestmark = pytest.mark.tpu
UNIT = 2.0**-24  # of what float32 rounds a number to


# -------------------------------------------------------------------------------------------- decays and additions


def test_the_parts_of_a_decay_are_exact_to_the_roundings_that_they_are_made_of():
    """kept is 1 or 0; of the rest the sum, the series' last product and sum, and its argument are rounded."""
    small = np.logspace(-30, 0, 2001)
    gate = np.float32([-math.log(2), *np.linspace(-80, 88.7, 20_001), *small, *-small])
    kept, rest = (np.asarray(x) for x in decays.decay_parts(jnp.asarray(gate)))
    assert np.array_equal(kept, np.where(gate > -math.log(2), 1, 0))
    exact = np.where(kept == 1, np.expm1(gate.astype(np.float64)), np.exp(gate.astype(np.float64)))
    power = np.where(np.abs(gate) < math.log(2) / 2, 0, np.exp2(np.round(gate.astype(np.float64) / math.log(2))))
    assert np.all(np.abs(rest - exact) <= 4 * UNIT * np.maximum(np.abs(exact), power))


def test_the_series_of_a_decay_ends_where_float32_does():
    """In float64 what is left out shows: less than twice x^10 / 10! (|x| <= ln(2) / 2), nothing in float32."""
    assert (math.log(2) / 2) ** 9 / math.factorial(10) < UNIT / 1000
    gate = np.linspace(-5, 5, 1001)
    with jax.enable_x64(True):
        kept, rest = (np.asarray(x) for x in decays.decay_parts(jnp.asarray(gate)))
    power = 2.0 ** np.floor(gate / math.log(2) + 0.5)
    x = gate - math.log(2) * np.floor(gate / math.log(2) + 0.5)
    assert rest.dtype == np.float64
    # The remainder, and the roundings of float64: of the argument, of the series and of the sum.
    bound = power * 2 * np.abs(x) ** 10 / math.factorial(10) + 8 * 2.0**-53 * np.maximum(np.abs(rest), power)
    assert np.all(np.abs(kept + rest - np.exp(gate)) <= bound)


def test_the_logarithm_of_2_in_two_parts_is_exact_times_an_exponent():
    assert (decays.LN2_HIGH * 2**16).is_integer()  # of 16 bits, which leaves 8 for the exponent
    assert abs(decays.LN2_LOW) <= 2.0**-17
    assert math.log(2) == decays.LN2_HIGH + decays.LN2_LOW


def test_a_decay_beyond_float32_is_zero_or_finite():
    low, high = jnp.asarray([-1e30, -1000.0, -88.3, -jnp.inf]), jnp.asarray([88.72, 89.0, 1000.0, jnp.inf])
    for shift in (0.0, 1e-6):  # what a sum of two gates leaves over
        assert not sum(np.asarray(x) for x in decays.decay_parts(low, shift)).any()
        largest = sum(np.asarray(x) for x in decays.decay_parts(high, shift))
        assert np.isfinite(largest).all()
        assert np.all(largest > 0.99 * np.finfo(np.float32).max)


def test_what_two_gates_leave_over_is_part_of_the_decay():
    gate = np.float32([-50, -20.3, -3, 30, 80.1, -0.3])
    low = np.float32(0.4) * np.spacing(gate) * np.float32([1, -1, 1, 1, -1, 1])
    kept, rest = (np.asarray(x, np.float64) for x in decays.decay_parts(jnp.asarray(gate), jnp.asarray(low)))
    exact = np.exp(gate.astype(np.float64) + low)
    bound = 4 * UNIT * np.maximum(np.abs(exact - kept), np.where(np.abs(gate) < math.log(2) / 2, 0, exact))
    assert np.all(np.abs(kept + rest - exact) <= bound)


def numbers(*shape):
    return np.random.default_rng(sum(shape)).standard_normal(shape).astype(np.float32)


def test_two_sum_loses_nothing():
    a, b = numbers(1000), np.ldexp(numbers(1000)[::-1], np.arange(-500, 500).clip(-40, 40))
    total, left = (np.asarray(x) for x in decays.two_sum(jnp.asarray(a), jnp.asarray(b)))
    assert np.array_equal(total, a + b)
    assert np.array_equal([math.fsum(x) for x in zip(a, b, -total, strict=True)], left)


@pytest.mark.parametrize("carried", [0.0, 1.0])
@pytest.mark.parametrize(("has_decay", "adds"), [(False, True), (True, True), (True, False)])
def test_a_step_keeps_what_its_roundings_lose(carried, has_decay, adds):
    """State and residue are right to roundings of the residue: of what the addition lost, and of the product."""
    state, term = numbers(999), 0.1 * numbers(999)[::-1]
    residue = UNIT * numbers(999)[::2].repeat(2)[:999]
    kept, rest = np.ones(999, np.float32), -np.abs(numbers(999)) * 2.0**-12
    rest = rest.astype(np.float32)
    given = [jnp.asarray(kept), jnp.asarray(rest)] if has_decay else []
    pair = jnp.asarray(state), jnp.asarray(carried * residue if not adds else residue)
    if adds:
        whole = jnp.asarray(kept + rest if has_decay else kept)
        pair = decays.decayed_sum(pair, given, jnp.float32(carried) * whole, jnp.asarray(term))
    else:
        pair = decays.decayed(pair, given)
    total, left = (np.asarray(x, np.float64) for x in pair)
    decay = 1 + rest.astype(np.float64) if has_decay else 1.0
    exact = decay * (state.astype(np.float64) + carried * residue) + (term if adds else 0.0)
    lost = np.abs(rest * state) + np.abs(residue) + UNIT * (np.abs(state) + np.abs(term))
    assert np.all(np.abs(total + left - exact) <= 8 * UNIT * lost)
    assert np.array_equal(total, (total + left).astype(np.float32))


# ------------------------------------------------------------------------------------------------------------ sums


def integers(*shape):
    return np.random.default_rng(sum(shape)).integers(-99, 99, shape).astype(np.float32)


def test_an_interpreted_step_has_no_fma():
    """Product by product and sum by sum in NumPy, it has the same bits: with XLA's FMAs it would be more exact."""
    rng = np.random.default_rng(0)
    q, k, v, state = (
        rng.normal(size=(1, 1, *shape)).astype(np.float32) for shape in ((1, 16), (1, 16), (1, 48), (16, 48))
    )
    g = np.full((1, 1, 1), -0.19, np.float32)
    with mxu.emulated():
        _, got = fused_recurrent_simple_gla_fwd(
            q, k, v, g=g, initial_state=state, output_final_state=True, interpret=True
        )
    kept, rest = (np.asarray(x)[0, 0, 0] for x in decays.decay_parts(jnp.asarray(g)))
    total, left = decays.two_sum(kept * state[0, 0], k[0, 0, 0][:, None] * v[0, 0, 0])
    np.testing.assert_array_equal(got[0, 0], decays.two_sum(total, left + rest * state[0, 0])[0])


@pytest.mark.parametrize("rows", [1, 2, 8, 256, 384, 640])
def test_rows_are_summed(rows):
    x = integers(rows, 128)
    assert np.array_equal(recurrent_sums.sum_rows(jnp.asarray(x)), x.sum(0, keepdims=True))


def test_bits_of_a_group_are_spread_and_taken_one_by_one():
    kept = (integers(layout.GROUP, 24) > 0).astype(np.float32)
    bits = recurrent_sums.spread_bits(jnp.asarray(kept), 40)
    for n, row in enumerate(kept):
        assert np.array_equal(recurrent_sums.bit_of(bits, n), np.broadcast_to(row[:, None], (24, 40)))


def sums_by_key(x, slab):
    """x [GROUP, V, K] -> [GROUP, V], summed as a kernel does, a slab after the other."""

    def kernel(x, out, parts):
        for first in range(0, x.shape[1], slab):
            for n in range(layout.GROUP):
                rows = pl.ds(first, slab)
                recurrent_sums.sum_keys_of(parts, rows, n, x[n, rows, :])
        out[...] = recurrent_sums.sums_of_keys(parts)

    parts = pltpu.VMEM((x.shape[1] // slab, layout.GROUP, 8, slab), jnp.float32)
    shape = jax.ShapeDtypeStruct(x.shape[:2], jnp.float32)
    return np.asarray(pl.pallas_call(kernel, shape, scratch_shapes=[parts], interpret=True)(jnp.asarray(x)))


@pytest.mark.parametrize("rows", [8, 16, 256, 24, 40])
def test_rows_are_folded_into_a_register(rows):
    x = integers(rows, 128)
    assert np.array_equal(recurrent_sums.fold_registers(jnp.asarray(x)), x.reshape(-1, 8, 128).sum(0))


@pytest.mark.parametrize(("values", "slab"), [(16, 16), (48, 16), (32, 8)])
def test_keys_are_summed_for_each_step_and_value(values, slab):
    x = integers(layout.GROUP, values, 384)
    assert np.array_equal(sums_by_key(x, slab), x.sum(2))


def test_the_sum_of_a_row_does_not_depend_on_its_step():
    """The same 128 numbers in every step of a group: the same bits."""
    x = np.broadcast_to(numbers(8, 128), (layout.GROUP, 8, 128))
    got = sums_by_key(x, 8)
    assert np.array_equal(got, got[:1].repeat(layout.GROUP, 0))


def test_a_sum_of_two_in_order_loses_nothing():
    a, b = numbers(1000), np.ldexp(numbers(1000)[::-1], -np.arange(1000) // 20)
    b = np.where(np.abs(b) <= np.abs(a), b, 0.5 * a)
    total, left = (np.asarray(x) for x in decays.ordered_two_sum(jnp.asarray(a), jnp.asarray(b)))
    assert np.array_equal(total, a + b)
    assert np.array_equal([math.fsum(x) for x in zip(a, b, -total, strict=True)], left)


# ----------------------------------------------------------------------------------------------------------- plans


def problem(**changes):
    usual = Problem(b=1, t=4096, h=1, k=128, v=128, n=1, scale=1.0, dtype="bfloat16")
    return usual._replace(**changes)


# what is not as usual, the direction; rows of a tile, keys, values and rows of a slab
PLANS = [
    ({}, "forward", (128, 128, 128, 128)),
    (dict(k=100, v=40), "forward", (128, 112, 128, 128)),  # values are lanes
    (dict(k=1024, v=512), "forward", (128, 1024, 512, 128)),
    (dict(k=100, v=40, dtype="float32"), "forward", (128, 128, 48, 16)),  # a slab divides the values
    (dict(k=300, v=24, dtype="float32"), "forward", (128, 384, 32, 32)),  # and its rows are a power of two
    (dict(k=1024, v=512, dtype="float32"), "forward", (128, 1024, 512, 16)),  # of a register at least
    (dict(b=2, t=20), "forward", (48, 128, 128, 128)),  # no more rows than there are
    (dict(b=2, t=20), "backward", (48, 128, 128, 128)),
    ({}, "backward", (128, 128, 128, 128)),  # the states of all steps of a tile in 8 MiB
    (dict(k=256, v=256), "backward", (32, 256, 256, 64)),
    (dict(v=384), "backward", (32, 128, 384, 128)),
    (dict(k=1024, v=1024), "backward", (16, 1024, 1024, 16)),  # or of a group
]


@pytest.mark.parametrize(("changes", "direction", "expected"), PLANS)
def test_tiles_and_slabs(changes, direction, expected):
    gates, backward = {"g": 1, "g_gamma": None}, direction == "backward"
    plan = layout.make_plan(problem(**changes), gates, reverse=False, backward=backward, interpret=False)
    assert (plan.tile, plan.keys, plan.values, plan.slab) == expected
    assert plan.tiles * plan.tile >= plan.rows > (plan.tiles - 1) * plan.tile


@pytest.mark.parametrize(("lanes", "dtype"), [("key", "float32"), ("value", "bfloat16")])
@pytest.mark.parametrize("sizes", [(1, 1), (100, 300), (128, 128), (300, 24)])
def test_a_state_fills_registers_and_slabs_divide_it(sizes, lanes, dtype):
    k, v = sizes
    plan = layout.make_plan(problem(k=k, v=v, dtype=dtype), {"g": 1}, backward=False, interpret=False)
    assert plan.lanes == lanes
    assert plan.state == ((plan.values, plan.keys) if lanes == "key" else (plan.keys, plan.values))
    assert plan.state[0] % layout.GROUP == plan.state[1] % 128 == 0
    assert 0 <= plan.keys - k < 128 and 0 <= plan.values - v < 128
    assert plan.values % plan.slab == 0


def test_steps_are_unrolled_where_they_are_compiled():
    plans = [
        layout.make_plan(problem(), {"gk": 1}, reverse=False, backward=True, interpret=interpret)
        for interpret in (False, True)
    ]
    assert [plan.unroll for plan in plans] == [layout.GROUP, 1]


def called(monkeypatch, cu_seqlens, reverse=False, **changes):
    """What Pallas is given by the backward pass: its options and its arrays."""
    real, calls = pl.pallas_call, []

    def instead(kernel, **options):
        if "fused_recurrent" not in options["name"]:
            return real(kernel, **options)

        def call(visits, operands):
            calls.append((options, visits))
            return jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), options["out_shape"])

        return call

    monkeypatch.setattr(pl, "pallas_call", instead)
    p = problem(n=len(cu_seqlens) - 1, t=cu_seqlens[-1], **changes)
    keys, values = (jnp.zeros((p.b, p.t, p.h, size), p.dtype) for size in (p.k, p.v))
    state, g, ends = jnp.zeros((p.n, p.h, p.k, p.v)), jnp.zeros((p.b, p.t, p.h)), jnp.asarray(cu_seqlens)
    options = dict(initial_state=state, dht=state, cu_seqlens=ends, reverse=reverse, interpret=True)
    with jax.disable_jit():  # the visits are numbers then
        fused_recurrent_simple_gla_bwd(keys, keys, values, values, g=g, **options)
    return calls[0]


@pytest.mark.parametrize("reverse", [False, True])
def test_what_one_phase_needs_stays_in_the_other(monkeypatch, reverse):
    """Time goes on in phase 0 and back in phase 1: where it turns, what only one of them needs ends or begins."""
    options, visits = called(monkeypatch, [0, 130, 130, 300], reverse)
    visits = layout.SequenceVisits(*map(np.asarray, visits))
    n, spec = int(visits.num_visits[0]), options["grid_spec"]
    assert (n, spec.grid[:2], int(spec.grid[2])) == (5, (1, 2), 5)
    order = list(range(n))[:: -1 if reverse else 1]
    on, back, stay = order, order[::-1], order[-1:] * n
    phases = dict.fromkeys(("k", "v", "decays", "gates"), on + back) | {"h0": on + stay}
    for name, of in (spec.in_specs[0] | spec.out_specs[0]).items():
        if name != "kept_states":
            found = [of.index_map(0, phase, i, visits) for phase in range(2) for i in range(n)]
            ids = visits.group_ids if name in ("h0", "dht", "dh0") else visits.tile_ids
            at = [int(ids[visit]) for visit in phases.get(name, stay + back)]
            places = [(x, 0) if ids is visits.group_ids else (0, x) for x in at]
            assert [tuple(map(int, index[:2])) for index in found] == places, name
            assert not any(int(x) for index in found for x in index[2:]), name
    assert options["compiler_params"].dimension_semantics == ("arbitrary",) * 3  # the states kept are one head's


@pytest.mark.parametrize(("k", "v", "fits"), [(16, 16, True), (512, 512, False)])
def test_vmem_holds_two_of_each_block_and_the_scratch(monkeypatch, k, v, fits):
    options, _ = called(monkeypatch, [0, 32], k=k, v=v)
    spec, limit = options["grid_spec"], options["compiler_params"].vmem_limit_bytes
    specs = (*spec.in_specs[0].values(), *spec.out_specs[0].values())
    blocks = [of.block_shape for of in specs if of.block_shape is not None]
    blocks = [[size for size in block if size is not None] for block in blocks] * 2
    needed = 4 * sum(
        math.prod(outer) * -(-rows // 8) * 8 * -(-lanes // 128) * 128
        for *outer, rows, lanes in (*blocks, *(of.shape for of in spec.scratch_shapes[0].values()))
    )
    # Beside it 4 MiB for what the compiler keeps there; 16 MiB is what a kernel has on v5e if it asks for none.
    assert limit == (16 if fits else 4) * 2**20 + (0 if fits else needed)
    assert needed + 4 * 2**20 <= limit
