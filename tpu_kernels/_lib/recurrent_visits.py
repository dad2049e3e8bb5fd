"""How the kernels of a recurrence go through time: visits of a tile, groups of its rows, slabs of the state.

A group is GROUP rows that are loaded at once; a slab is as many values of the state as go through a group in registers.
"""

from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from op_arguments.probe import active, probe
from tpu_kernels._lib.chip import sublanes
from tpu_kernels._lib.decays import decay_parts
from tpu_kernels._lib.recurrent_layout import GROUP, Plan, SequenceVisits, nth_visit

Refs = dict[str, Any]
Carried = TypeVar("Carried")


class Visit(NamedTuple):
    """Rows [start, end) of a tile; whether it is the first visit of its sequence, and the last."""

    start: Any
    end: Any
    first: Any
    last: Any


def visit_of(i: Any, visits: SequenceVisits, plan: Plan) -> Visit:
    """The i-th visit in the order of time."""
    last = visits.num_visits[0] - 1

    def sequence_of(i: Any) -> Any:
        return visits.group_ids[nth_visit(jnp.clip(i, 0, last), visits, plan)]

    sequence = sequence_of(i)
    tile_row = visits.tile_ids[nth_visit(i, visits, plan)] * plan.tile
    start, end = visits.group_offsets[sequence] - tile_row, visits.group_offsets[sequence + 1] - tile_row
    if plan.reverse:
        start = end - visits.lengths[sequence]
    else:
        end = start + visits.lengths[sequence]
    return Visit(
        jnp.maximum(start, 0),
        jnp.minimum(end, plan.tile),
        first=(i == 0) | (sequence_of(i - 1) != sequence),
        last=(i == last) | (sequence_of(i + 1) != sequence),
    )


def own(visit: Visit, rows: Any, x: jax.Array, other: jax.Array | None = None, axis: int = 0) -> jax.Array:
    """Elements of a group's x (its steps along `axis`) that are the visit's; elsewhere `other`, in its dtype, or 0."""
    where = is_own(visit, rows.start, x.shape, axis)
    return jnp.where(where, x, 0.0) if other is None else jnp.where(where, x.astype(other.dtype), other)


def is_own(visit: Visit, first: Any, shape: tuple[int, ...], axis: int) -> jax.Array:
    """Where the tile's rows along an axis, from `first` on, are the visit's."""
    row = first + lax.broadcasted_iota(jnp.int32, shape, axis)
    return (visit.start <= row) & (row < visit.end)


def is_key(plan: Plan, shape: tuple[int, ...]) -> jax.Array:
    """Where lanes are no padding."""
    return lax.broadcasted_iota(jnp.int32, shape, 1) < plan.p.k


def in_state(visit: Visit, rows: Any, n: Any, slab: Any, plan: Plan) -> jax.Array:
    """Where a slab of the state is no padding; nowhere unless a group's n-th step is the visit's."""
    shape, of_values = ((plan.slab, plan.keys), 0) if plan.lanes == "key" else ((plan.keys, plan.slab), 1)
    in_values = slab.start + lax.broadcasted_iota(jnp.int32, shape, of_values) < plan.p.v
    in_keys = lax.broadcasted_iota(jnp.int32, shape, 1 - of_values) < plan.p.k
    return in_values & in_keys & is_own(visit, rows.start + n, (1, 1), 0)


def for_groups(visit: Visit, plan: Plan, body: Callable[[Any], None], backwards: bool = False) -> None:
    """body(rows) for each group that has rows of the visit, in the order of time or backwards."""
    groups = plan.tile // GROUP

    def group(n: Any, _: Any) -> None:
        nth = groups - 1 - n if backwards != plan.reverse else n
        first = pl.multiple_of(nth * GROUP, GROUP)
        pl.when((visit.start < first + GROUP) & (first < visit.end))(lambda: body(pl.ds(first, GROUP)))

    lax.fori_loop(0, groups, group, None)


def for_slabs(plan: Plan, body: Callable[[Any], None]) -> None:
    """body(slab) for each slab of values."""
    slabs = plan.values // plan.slab
    if slabs == 1:
        body(pl.ds(0, plan.slab))
    else:
        lax.fori_loop(0, slabs, lambda n, _: body(pl.ds(pl.multiple_of(n * plan.slab, plan.slab), plan.slab)), None)


def for_steps(plan: Plan, body: Callable[[Any, Carried], Carried], carry: Carried, backwards: bool = False) -> Carried:
    """body(row of its group, carry) for each step of a group, in the order of time or backwards."""
    if plan.unroll == GROUP:
        for n in range(GROUP):
            carry = body(GROUP - 1 - n if backwards != plan.reverse else n, carry)
        return carry

    def step(n: Any, carry: Carried) -> Carried:
        return body(GROUP - 1 - n if backwards != plan.reverse else n, carry)

    return lax.fori_loop(0, GROUP, step, carry, unroll=plan.unroll)


def load(refs: Refs, plan: Plan, *names: str) -> None:
    """Load rows of a tile as float32 into `…_rows` and `…_columns`, where there are."""
    for name in names:
        x = refs[name][...].astype(jnp.float32)
        if f"{name}_rows" in refs:
            refs[f"{name}_rows"][...] = x
        if f"{name}_columns" in refs:
            make_columns(refs[f"{name}_columns"], x, plan)


def make_columns(columns: Any, x: jax.Array, plan: Plan) -> None:
    """Store rows x [tile, ·] as columns [groups, ·, GROUP]."""
    for group, rows in enumerate(groups_of(plan)):
        columns[group] = x[rows.start : rows.start + GROUP].T


def store(refs: Refs, visit: Visit, rows: Any, name: str, x: jax.Array) -> None:
    """Those rows of a group that are the visit's."""
    refs[name][rows, :] = own(visit, rows, x, refs[name][rows, :])


def store_numbers(refs: Refs, visit: Visit, rows: Any, name: str, x: jax.Array) -> None:
    """x [1, GROUP], where its steps are the visit's."""
    line = pl.ds(rows.start // GROUP, 1)
    refs[name][line, :] = own(visit, rows, x, refs[name][line, :], axis=1)


def load_decays(refs: Refs, visit: Visit, plan: Plan, rows: Any = None) -> None:
    """Load the decays of a tile's steps, or of those rows, as `decay_parts` has them.

    Rows that are not the visit's have none.
    """
    rows = pl.ds(0, plan.tile) if rows is None else rows
    if "gk" in refs:
        gates = own(visit, rows, refs["gk"][rows, :].astype(jnp.float32))
        refs["kept_rows"][rows, :], refs["rest_rows"][rows, :] = decay_parts(gates)
    elif "decays" in refs:
        for first in range(0, rows.size, GROUP):
            group = pl.ds(rows.start + first, GROUP)
            kept, rest = (refs["decays"][n, pl.ds(group.start // GROUP, 1), :] for n in range(2))
            kept, rest = own(visit, group, kept, jnp.ones_like(kept), axis=1), own(visit, group, rest, axis=1)
            for name, x in (("kept_rows", kept), ("rest_rows", rest)):
                refs[name][group, :] = spread(x, refs[name].shape[1])
    if active() and "rest_rows" in refs:
        rest = refs["rest_rows"][rows, :]
        probe("kept", rest, is_own(visit, rows.start, rest.shape, 0) & is_key(plan, rest.shape))


def by_key(refs: Refs, name: str, n: Any, plan: Plan) -> jax.Array:
    """Row n of `name`_rows as states lie: [1, K] where keys are lanes, else [K, 1]."""
    row = refs[f"{name}_rows"][pl.ds(n, 1), :]
    return row if plan.lanes == "key" else as_column(row)


def as_column(row: jax.Array) -> jax.Array:
    """[1, C] -> [C, 1]."""
    return jnp.broadcast_to(row, (sublanes(jnp.float32), row.shape[1])).T[:, :1]


def groups_of(plan: Plan) -> list[Any]:
    """The rows of each group of a tile."""
    return [pl.ds(first, GROUP) for first in range(0, plan.tile, GROUP)]


def spread(line: jax.Array, width: int) -> jax.Array:
    """[1, GROUP] -> [GROUP, width]: each number in all lanes of its row."""
    return jnp.broadcast_to(as_column(line), (GROUP, width))


def decay_of(refs: Refs, n: Any) -> list[jax.Array]:
    """kept and rest of a tile's n-th row, [1, K]; or nothing."""
    return [refs[name][pl.ds(n, 1), :] for name in ("kept_rows", "rest_rows") if name in refs]
