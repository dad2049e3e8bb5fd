"""States of a gated recurrence relative to what they decay by in a group of steps: sums without decays.

Let D_n be the product of a group's decays up to step n, for each key, and S_n = D_n R_n. Then

    R_n = R_{n-1} + (k_n / D_n) v_nᵀ        E_n = D_n dS_n = E_{n+1} + D_n q_n do_nᵀ

have no decay, and nothing but one addition waits for the step before. The gradient of a decay's logarithm is
E_n R_{n-1}, summed over values. D_n is known to 2^-26, in two float32. k_n / D_n and D_n q_n are four bfloat16 each,
and v and do are bfloat16: the matrix unit adds up two of the products exactly in one float32, the others in another.
Of a whole group it adds up exactly what both factors have in their first bits, `aligned` over the group.
"""

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from tpu_kernels._lib.chip import LANES
from tpu_kernels._lib.chunk_dots import WHOLE
from tpu_kernels._lib.decays import Pair, exp_pairs, leading, ordered_two_sum, two_sum
from tpu_kernels._lib.recurrent_layout import GROUP, Plan
from tpu_kernels._lib.recurrent_sums import bf16_pieces
from tpu_kernels._lib.recurrent_visits import Refs, by_key, groups_of, spread

LARGEST_SUM = 20.0  # of the logarithms of a group's decays: numbers relative to them are 2^29 times as large at most
PIECES = 4  # bfloat16 values that a number is the sum of
LARGEST = 2.0**60  # of what is multiplied here
SMALLEST = 2.0**-60  # of what is aligned
ALIGNED = 5  # bfloat16 values that a number is the sum of where the first is aligned


def load_relative(refs: Refs, plan: Plan, *names: str) -> None:
    """Load a tile's k, q, v and do relative to the decays of their groups, and which groups stand apart.

    names: the operands that this walk has. A group stands apart if it has a sum of gates beyond LARGEST_SUM or a number
    beyond LARGEST: 0 times what is not finite would be NaN in every step of the group.
    """
    k, sums = refs["k_rows"][...], sums_in_groups(_gates(refs, plan), plan)
    down, up = exp_pairs(sums)
    written, factors = product(k, up), [k * up[0]]
    refs["down_rows"][...], refs["lower_down_rows"][...] = down
    _load_aligned(refs, written, plan)
    if "q" in names:
        q = refs["q_rows"][...]
        factors.append(q * down[0])
        if "do" in names:
            _load_pieces(refs, "k", written, plan)
            refs["k_relative_rows"][...], refs["up_rows"][...] = factors[0], up[0]
            down = ordered_two_sum(*times_pair(down, (jnp.full_like(k, plan.p.scale), jnp.zeros_like(k))))
            _load_pieces(refs, "q", product(q, down), plan)
        else:
            high, low = product(q, down)
            for group, rows in enumerate(groups_of(plan)):
                of_group = (high + low)[rows.start : rows.start + GROUP]
                refs["q_pieces"][group] = jnp.concatenate(bf16_pieces(of_group))
    given = [refs[name][...].astype(jnp.float32) for name in ("v", "do") if name in names]
    of_keys = sum((jnp.abs(x) for x in factors), start=jnp.abs(sums[0]) * (LARGEST / LARGEST_SUM))
    apart = jnp.zeros((plan.tile, LANES), jnp.float32)
    of_values = functools.reduce(jnp.add, map(jnp.abs, given))
    for x in (of_keys, of_values):
        found = jnp.where(x <= LARGEST, 0.0, 1.0)
        for lane in range(0, x.shape[1], LANES):
            some = found[:, lane : lane + LANES]
            apart = jnp.maximum(apart, jnp.pad(some, ((0, 0), (0, LANES - some.shape[1]))))
    groups = jnp.max(apart.reshape(-1, GROUP, LANES), axis=1)
    bit = jnp.left_shift(1, lax.broadcasted_iota(jnp.int32, groups.shape, 0))
    bits = jnp.max(groups * bit.astype(jnp.float32), axis=1, keepdims=True)
    refs["apart"][0, 0] = jnp.sum(bits).astype(jnp.int32)


def stands_apart(refs: Refs, rows: Any) -> Any:
    """Whether these rows are a group that stands apart, a scalar."""
    return (lax.shift_right_logical(refs["apart"][0, 0], rows.start // GROUP) & 1) != 0


def last_decay(refs: Refs, rows: Any, plan: Plan) -> Pair:
    """The product of a group's decays in two pieces, as states lie."""
    return decay_to(refs, rows.start + (0 if plan.reverse else GROUP - 1), plan)


def decay_to(refs: Refs, n: Any, plan: Plan) -> Pair:
    """The product of a group's decays up to a tile's n-th row in two pieces, as states lie."""
    return by_key(refs, "down", n, plan), by_key(refs, "lower_down", n, plan)


def relative_scratch(plan: Plan, backward: bool) -> dict[str, Any]:
    """Scratch for `load_relative`."""
    groups = plan.tile // GROUP
    of_keys = (LANES, plan.keys) if plan.lanes == "key" else (plan.keys, LANES)
    pieces = {"k_aligned": pltpu.VMEM((groups, *of_keys), jnp.bfloat16)}
    if backward:
        # What is masked is float32: not every chip chooses between bfloat16.
        shape = 2, groups, PIECES // 2 * GROUP, plan.keys
        pieces |= {f"{name}_pieces": pltpu.VMEM(shape, jnp.float32) for name in "kq"}
    else:
        pieces["q_pieces"] = pltpu.VMEM((groups, WHOLE * GROUP, plan.keys), jnp.bfloat16)
    names = ("down", "lower_down", "k_relative", "up") if backward else ("down", "lower_down")
    return {
        **pieces,
        **{f"{name}_rows": pltpu.VMEM((plan.tile, plan.keys), jnp.float32) for name in names},
        "apart": pltpu.SMEM((1, 1), jnp.int32),
    }


def _gates(refs: Refs, plan: Plan) -> Pair:
    """The logarithms of a tile's decays in two pieces, [tile, K]."""
    shape = plan.tile, plan.keys
    if "gk" in refs:
        return refs["gk"][...].astype(jnp.float32), jnp.zeros(shape, jnp.float32)
    if "gates" in refs:
        lines = [
            [spread(refs["gates"][n, pl.ds(g, 1), :], plan.keys) for g in range(shape[0] // GROUP)] for n in (0, 1)
        ]
        return jnp.concatenate(lines[0]), jnp.concatenate(lines[1])
    return jnp.zeros(shape, jnp.float32), jnp.zeros(shape, jnp.float32)


def _load_pieces(refs: Refs, name: str, x: Pair, plan: Plan) -> None:
    """Store a pair whose larger part has 16 bits as four bfloat16 values, each [GROUP, K] of a group.

    Those that are multiplied at once lie side by side: two and two.
    """
    pieces = _two_pieces(x[0]), _two_pieces(x[1])
    for i in range(2):
        for group, rows in enumerate(groups_of(plan)):
            some = [piece[rows.start : rows.start + GROUP] for piece in pieces[i]]
            refs[f"{name}_pieces"][i, group] = jnp.concatenate(some)


def _load_aligned(refs: Refs, x: Pair, plan: Plan) -> None:
    """Store a pair whose larger part has 16 bits as bfloat16 values, each [GROUP, K] of a group, as states lie.

    There are ALIGNED. The first is `aligned` over the steps of a group.
    """
    for group, rows in enumerate(groups_of(plan)):
        high, low = (part[rows.start : rows.start + GROUP] for part in x)
        first = aligned(high, 0)
        found = _filled([first, *_two_pieces(high - first), *_two_pieces(low)], 0)
        refs["k_aligned"][group] = (found if plan.lanes == "key" else found.T).astype(jnp.bfloat16)


def _two_pieces(x: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Of x of 16 bits the first 8 and the others."""
    first = leading(x, 8)
    return first, x - first


def _filled(pieces: Sequence[jax.Array], axis: int) -> jax.Array:
    """Pieces, each of GROUP along the axis, one after the other, and zeros: LANES along the axis."""
    shape = list(pieces[0].shape)
    shape[axis] = LANES - len(pieces) * GROUP
    return jnp.concatenate([*pieces, jnp.zeros(shape, pieces[0].dtype)], axis)


def aligned(x: jax.Array, axis: int) -> jax.Array:
    """The first bits of x, of its shape: those down to the 8th of the largest along the axis, or of `SMALLEST`.

    x has GROUP numbers along the axis. What is returned there are multiples of one power of two, at most 255 of it. So
    sums of GROUP products of two such values are exact in float32, in whatever order they are added.
    """
    largest = jnp.maximum(jnp.max(jnp.abs(x), axis=axis, keepdims=True), SMALLEST)
    power = lax.bitcast_convert_type(largest, jnp.int32) & (255 << 23)
    unit, per_unit = (lax.bitcast_convert_type(bits, jnp.float32) for bits in (power, (254 << 23) - power))
    return (x * (per_unit * 128.0)).astype(jnp.int32).astype(jnp.float32) * (unit * (1 / 128))


def written_in_group(state: jax.Array, refs: Refs, rows: Any, slab: Any, plan: Plan) -> Pair:
    """The relative state after a group as a pair, from a slab of that before it: all steps at once.

    Products of the aligned pieces add up without loss; all others are smaller by 7 bits and more.
    """
    group = rows.start // GROUP
    keys = refs["k_aligned"][group]
    by_row = plan.lanes == "value"
    v = refs["v_rows"][rows, slab] if by_row else refs["v_columns"][group, slab, :]
    steps = 0 if by_row else 1
    first = aligned(v, steps)
    values = _filled([first], steps), _filled([v - first, *[v] * (ALIGNED - 1)], steps)
    exact, rest = (_dot(keys, x) if by_row else _dot(x, keys) for x in values)
    return added_product((state, jnp.zeros_like(state)), exact, rest)


def read_in_group(state: jax.Array, refs: Refs, rows: Any, slab: Any, plan: Plan) -> jax.Array:
    """What q reads at each step of a group, [GROUP, V]: of the state before it, and of what its steps have written."""
    group = rows.start // GROUP
    q, v = refs["q_pieces"][group], refs["v_rows"][rows, slab]
    scores = _dot(q, refs["k_aligned"][group])
    step, before = (lax.broadcasted_iota(jnp.int32, scores.shape, axis) % GROUP for axis in (0, 1))
    scores = jnp.where(step <= before if plan.reverse else step >= before, scores, 0.0)
    found = [_dot(jnp.concatenate(bf16_pieces(scores)), _filled([v] * ALIGNED, 0))]
    found += [_dot(q, piece) for piece in bf16_pieces(state)]
    parts = [x[first : first + GROUP] for x in found for first in range(0, x.shape[0], GROUP)]
    return functools.reduce(jnp.add, reversed(parts))


def _dot(a: jax.Array, b: jax.Array) -> jax.Array:
    """The product of bfloat16 values in float32."""
    return jnp.dot(a.astype(jnp.bfloat16), b.astype(jnp.bfloat16), preferred_element_type=jnp.float32)


def sums_in_groups(gates: Pair, plan: Plan) -> Pair:
    """The sums of gates in two pieces [tile, K] over the steps of their group up to each."""
    high, low = gates
    nth = lax.broadcasted_iota(jnp.int32, high.shape, 0) % GROUP
    step = GROUP - 1 - nth if plan.reverse else nth
    before = 1
    while before < GROUP:
        shift = high.shape[0] - before if plan.reverse else before
        earlier_high, earlier_low = (jnp.where(step >= before, pltpu.roll(x, shift, 0), 0.0) for x in (high, low))
        high, error = two_sum(high, earlier_high)
        low += earlier_low + error
        before *= 2
    return high, low


def product(x: jax.Array, factor: Pair) -> Pair:
    """x times a pair, as a pair whose larger piece has 16 bits; x holds bfloat16 values.

    The relative error is at most 2^-32.
    """
    first = leading(factor[0], 16)
    exact = x * first
    high = leading(exact, 16)
    return high, (exact - high) + x * ((factor[0] - first) + factor[1])


def times_pair(x: Pair, factor: Pair) -> Pair:
    """x times factor as a pair, whose smaller piece may be 2^-11 of the larger one.

    The relative error is at most 2^-33.
    """
    of_x, first = leading(x[0], 12), leading(factor[0], 12)
    rest = (factor[0] - first) + factor[1]
    return of_x * first, (x[0] - of_x) * first + (x[0] * rest + x[1] * factor[0])


def added_product(pair: Pair, exact: jax.Array, rest: jax.Array) -> Pair:
    """pair + exact + rest: two products of the matrix unit, of which the first is added without loss."""
    total, left = two_sum(pair[0], exact)
    return total, (pair[1] + left) + rest


def outer(columns: jax.Array, rows: jax.Array, n: Any) -> jax.Array:
    """The outer product of column n of [R, GROUP] and row n of each piece [GROUP, C] of rows, added up: [R, C] float32.

    Both hold bfloat16 values; the pieces lie one below the other.
    """
    nth = jnp.where(lax.broadcasted_iota(jnp.int32, rows.shape, 0) % GROUP == n, rows, 0.0)
    return _dot(jnp.concatenate([columns] * (rows.shape[0] // GROUP), axis=1), nth)
