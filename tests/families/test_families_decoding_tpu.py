"""Decoding: one step of each of many sequences, in bits of its own or a recurrence's; nothing is mixed, states are
written in place."""

from functools import partial
from itertools import product

import numpy as np
import pytest

jax = pytest.importorskip("jax")

from tpu_kernels.gated_delta_rule import fused_recurrent_gated_delta_rule_fwd  # noqa: E402
from tpu_kernels.gla import fused_recurrent_gla_fwd  # noqa: E402
from tpu_kernels.kda import fused_recurrent_kda_fwd  # noqa: E402
from tpu_kernels.simple_gla import fused_recurrent_simple_gla_fwd  # noqa: E402

pytestmark = pytest.mark.tpu
SIMPLE = fused_recurrent_simple_gla_fwd
DELTA = {"gated_delta_rule": fused_recurrent_gated_delta_rule_fwd, "kda": fused_recurrent_kda_fwd}
OF_FAMILIES = {
    "gla": (fused_recurrent_gla_fwd, ("gk",)),
    "simple_gla g": (SIMPLE, ("g",)),
    "simple_gla gamma": (SIMPLE, ("g_gamma",)),
    "simple_gla both": (SIMPLE, ("g", "g_gamma")),
    "simple_gla none": (SIMPLE, ()),
    **{name: (function, ("beta",)) for name, function in DELTA.items()},
}

# Columns are products of the matrix unit where a state has the registers of one of 128 by 128.
SIZES = {"two groups": (9, 2, 16, 48), "several registers": (1, 3, 256, 20), "products": (9, 2, 128, 20)}
BY_PRODUCTS = ("gla", *DELTA)


def numbers(*shape):
    return np.random.default_rng(sum(shape)).standard_normal(shape).astype(np.float32)


def one_step(family, sequences, heads, keys, values):
    """The function of a family, and its rows, gates and states of one step of each sequence."""
    function, names = OF_FAMILIES[family]
    is_delta = family in DELTA
    key_heads = 1 if is_delta else heads
    per_step = (sequences, 1, heads)
    of_keys = -np.abs(numbers(*per_step, keys))  # some gates above -ln 2, some below it
    given = {"gk": of_keys, "g": -np.abs(numbers(*per_step)), "g_gamma": -np.abs(numbers(heads))}
    given["beta"] = np.abs(numbers(*per_step))
    rows = {name: numbers(sequences, 1, key_heads, keys) for name in ("q", "k")} | {"v": numbers(*per_step, values)}
    rows |= {name: given[name] for name in names}
    if is_delta:
        rows |= {"g": of_keys if family == "kda" else given["g"]}
        function = partial(function, use_qk_l2norm_in_kernel=True)
    return function, rows, numbers(sequences, heads, keys, values)


def cases():
    """Of gated linear attention: delta rules go on in chunks where they do not decode."""
    steps = [family for family in OF_FAMILIES if family not in DELTA]
    return [(sizes, family) for sizes in SIZES for family in (["gla"] if sizes == "products" else steps)]


@pytest.mark.parametrize(("sizes", "family"), cases())
def test_decoding_has_the_bits_of_packed_sequences(sizes, family):
    function, given, state = one_step(family, *SIZES[sizes])
    states = dict(initial_state=state, output_final_state=True)
    packed = {name: x if x.ndim < 2 else x.reshape(1, -1, *x.shape[2:]) for name, x in given.items()}
    o, ht = function(**given, **states)
    expected, expected_ht = function(**packed, **states, cu_seqlens=np.arange(SIZES[sizes][0] + 1, dtype=np.int32))
    assert np.array_equal(np.asarray(o).reshape(expected.shape), expected)
    assert np.array_equal(ht, expected_ht)
    assert np.array_equal(function(**given, initial_state=state).o, o)


@pytest.mark.parametrize("family", BY_PRODUCTS)
def test_decoding_keeps_sequences_apart(family):
    function, given, state = one_step(family, 9, 2, 24, 48)
    o, ht = function(**given, initial_state=state, output_final_state=True)
    given = {name: x.copy() for name, x in given.items()}
    for x in (state, *given.values()):
        x[4] = np.nan
    others = np.arange(9) != 4
    for clean, got in zip((o, ht), function(**given, initial_state=state, output_final_state=True), strict=True):
        assert np.array_equal(np.asarray(got)[others], np.asarray(clean)[others])
        assert np.isnan(np.asarray(got)[4]).all()


@pytest.mark.parametrize("family", BY_PRODUCTS)
def test_what_is_not_finite_stays_in_its_sequence(family):
    """Columns are products with 0 and 1, of which 0 * inf is NaN."""
    function, given, state = one_step(family, *SIZES["products"])
    if family in DELTA:
        function = partial(function, use_qk_l2norm_in_kernel=False)
    call = partial(function, initial_state=state, output_final_state=True)
    expected, others = call(**given), np.arange(9) != 4
    for name, value in product(given.keys() & {"q", "k", "gk", "g"}, [np.nan, np.inf, -np.inf]):
        poisoned = given | {name: given[name].copy()}
        poisoned[name][4].flat[0] = value
        for clean, got in zip(expected, call(**poisoned), strict=True):
            assert np.array_equal(np.asarray(got)[others], np.asarray(clean)[others]), (name, value)


@pytest.mark.parametrize("family", BY_PRODUCTS)
def test_decoding_writes_states_in_place_where_they_are_donated(family):
    function, given, state = one_step(family, 9, 2, 128, 128)
    call = partial(function, output_final_state=True, interpret=False)
    lowered = jax.jit(call).trace(**given, initial_state=state).lower(lowering_platforms=("tpu",))
    before_states = 2 if family in DELTA else 1  # gates, and beta: operands are in the order of their names
    alias = f"output_operand_alias<output_tuple_indices = [0], operand_index = {before_states},"
    assert alias in lowered.as_text()
