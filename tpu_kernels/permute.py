"""Rows of tokens to their experts and back, on the TPU; the operations are defined in `cpu_golden/permute.py`."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from op_arguments.permute import Permuted, check_permute, check_unpermute
from tpu_kernels._lib.arguments import held
from tpu_kernels._lib.routing import Places, combine, plan_rows, take


def permute(x: jax.Array, indices: jax.Array, *, num_experts: int, capacity: int | None = None) -> Permuted:
    """Copies of the rows of x [T, D] sorted by the experts that they go to, for a grouped matmul; differentiable in x.

    Arguments, result and errors as `cpu_golden.permute.permute`; values are looked at outside tracing only.
    """
    rows = check_permute(x, indices, num_experts, capacity, range_of=_range_of(indices), exact=False)
    return _permute(x, indices, num_experts, capacity, rows)


def unpermute(rows: jax.Array, slots: jax.Array, weights: jax.Array | None = None) -> jax.Array:
    """The rows of each token, summed, times their weights where given: [T, D] in rows' dtype; differentiable in both.

    Arguments, result and errors as `cpu_golden.permute.unpermute`; products and sums are of float32.
    """
    check_unpermute(rows, slots, weights, range_of=_range_of(slots), exact=False)
    return _unpermute(rows, weights, held(slots))


@partial(jax.jit, static_argnums=(2, 3, 4))
def _permute(x: jax.Array, indices: jax.Array, num_experts: int, capacity: int | None, rows: int) -> Permuted:
    plan = plan_rows(indices, num_experts, capacity, rows)
    return Permuted(take(x, plan.places), plan.places.slots, plan.group_sizes)


@jax.jit
def _unpermute(rows: jax.Array, weights: jax.Array | None, slots: jax.Array) -> jax.Array:
    at = jnp.where(slots < 0, rows.shape[0], slots).ravel()
    source = jnp.full(rows.shape[0], -1).at[at].set(jnp.arange(slots.size), mode="drop")
    return combine(rows, weights, Places(source, slots))


def _range_of(values: Any) -> tuple[int, int] | None:
    """The least and the largest of a concrete integer array (None where there is none)."""
    concrete = isinstance(values, jax.Array) and not isinstance(values, jax.core.Tracer)
    return (int(values.min()), int(values.max())) if concrete and values.size and values.dtype.kind == "i" else None
