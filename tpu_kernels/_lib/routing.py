"""Where rows go: each token's row to its experts, sorted by expert, and back."""

from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from op_arguments.mxfp8 import E8M0


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Places:
    """Which row is whose: source [M], the choice t·k + j of each row or -1; slots [T, k] as `Permuted`, its inverse.

    is_full: whether every choice has a row and every row is one, so that neither has a -1.
    """

    source: jax.Array
    slots: jax.Array
    is_full: bool = field(default=False, metadata={"static": True})

    @property
    def of_choices(self) -> "Places":
        """The places of choices: for what each has of its own, [T · k, C], in place of each token."""
        return replace(self, slots=self.slots.reshape(-1, 1))


class Plan(NamedTuple):
    """Where rows are, sorted by expert, and how many each expert has: group_sizes [E] as `Permuted`."""

    places: Places
    group_sizes: jax.Array


def plan_rows(
    indices: jax.Array, num_experts: int, capacity: int | None, rows: int, preceding: jax.Array | int = 0
) -> Plan:
    """The plan of `permute`. preceding [E]: rows that other devices' tokens take of each expert's capacity first."""
    choices = indices.ravel()
    order = jnp.argsort(choices, stable=True)
    starts = jnp.searchsorted(choices[order], jnp.arange(num_experts + 1, dtype=jnp.int32)).astype(jnp.int32)
    after = jnp.argsort(order).astype(jnp.int32)
    if capacity is None:
        return Plan(Places(order, after.reshape(indices.shape), is_full=True), jnp.diff(starts))
    group_sizes = jnp.clip(capacity - preceding, 0, jnp.diff(starts))
    position = after - starts[choices]
    slots = jnp.where(position < group_sizes[choices], starts_of(group_sizes)[choices] + position, -1)
    return Plan(Places(inverse(slots, rows), slots.reshape(indices.shape)), group_sizes)


@jax.custom_vjp
def take(x: jax.Array, places: Places) -> jax.Array:
    """x's row for each source [M, C]: `rows_of`, differentiable in x."""
    return rows_of(x, places)


@jax.custom_vjp
def combine(rows: jax.Array, weights: jax.Array | None, places: Places) -> jax.Array:
    """Each token's rows, weighted and summed [T, C]: `sum_of`, differentiable in rows and weights."""
    return sum_of(rows, weights, places)


def inverse(slots: jax.Array, rows: int) -> jax.Array:
    """Which of the slots is row 0, 1, …, up to `rows` of them: -1 beyond the last. The rows in slots have no gaps."""
    order = jnp.argsort(jnp.where(slots < 0, slots.size, slots))[:rows]
    return jnp.where(jnp.arange(rows) < (slots >= 0).sum(), order, -1)


def starts_of(sizes: jax.Array, axis: int = 0) -> jax.Array:
    """Where each of consecutive parts of these sizes begins."""
    return jnp.cumsum(sizes, axis) - sizes


def rows_of(x: jax.Array, places: Places) -> jax.Array:
    """x's row for each source (the choice t·k + j), [M, C] in x's dtype.

    Source -1 gives zeros. E8M0 has no zero and gives its smallest number, 2^-127.
    """
    tokens, top_k = x.shape[0], places.slots.shape[1]
    if not tokens:
        return jnp.zeros((places.source.shape[0], x.shape[1]), x.dtype)
    if x.dtype == jnp.dtype(E8M0):
        return lax.bitcast_convert_type(rows_of(lax.bitcast_convert_type(x, jnp.uint8), places), x.dtype)
    if places.is_full:
        return x[places.source // top_k]
    # A row of zeros to take from: XLA would make a choice of two after the gather another pass over all rows.
    with_none = jnp.concatenate([x, jnp.zeros((1, x.shape[1]), x.dtype)])
    return with_none[jnp.where(places.source >= 0, places.source // top_k, tokens)]


def sum_of(rows: jax.Array, weights: jax.Array | None, places: Places) -> jax.Array:
    """Σ_j weights[:, j] · rows[slots[:, j]], of -1 nothing, summed in float32 in the order of j, in rows' dtype."""
    slots = places.slots
    total = jnp.zeros((slots.shape[0], rows.shape[1]), jnp.float32)
    for j in range(slots.shape[1] if rows.shape[0] else 0):
        taken = rows[slots[:, j]].astype(jnp.float32)
        taken = taken if weights is None else taken * weights[:, j, None]
        total += taken if places.is_full else jnp.where(slots[:, j, None] >= 0, taken, 0.0)
    return total.astype(rows.dtype)


def _take_bwd(places: Places, drows: jax.Array) -> tuple[Any, ...]:
    return sum_of(drows, None, places), None


take.defvjp(lambda x, places: (rows_of(x, places), places), _take_bwd)


def _combine_fwd(rows: jax.Array, weights: jax.Array | None, places: Places) -> tuple[Any, Any]:
    kept = None if weights is None else rows
    return combine(rows, weights, places), (kept, weights, places)


def _combine_bwd(saved: Any, dout: jax.Array) -> tuple[Any, ...]:
    rows, weights, places = saved
    drows, slots = rows_of(dout, places), places.slots
    if weights is None:
        return drows, None, None
    by_row = rows_of(weights.reshape(-1, 1), places.of_choices)
    dout = dout.astype(jnp.float32)
    # One choice of all tokens at a time: [T, k, D] of them is gigabytes.
    of_choices = [(rows[slot].astype(jnp.float32) * dout).sum(axis=1) for slot in slots.T]
    dweights = jnp.where(slots >= 0, jnp.stack(of_choices, axis=1), 0.0) if of_choices else jnp.zeros_like(weights)
    return (drows.astype(jnp.float32) * by_row).astype(drows.dtype), dweights, None


combine.defvjp(_combine_fwd, _combine_bwd)
