"""Expert parallelism: rows between devices, each of which has a part of the tokens and of the experts."""

import jax
import jax.numpy as jnp
from jax import lax

from op_arguments.permute import permuted_rows
from tpu_kernels._lib.routing import Places, Plan, inverse, plan_rows, starts_of


def exchange_plans(axis_name: str, indices: jax.Array, num_experts: int, capacity: int | None) -> tuple[Plan, Plan]:
    """How rows lie in the buffer that is sent, a part for each device; and how what is received is sorted by expert.

    The second plan's source and slots are of rows of the received buffer, [M] and [parts · width, 1].
    """
    devices, here = lax.axis_size(axis_name), lax.axis_index(axis_name)
    groups = num_experts // devices
    tokens, top_k = indices.shape
    width = permuted_rows(tokens, min(top_k, groups), groups, capacity)
    preceding: jax.Array | int = 0
    if capacity is not None:
        counts = (indices.ravel()[:, None] == jnp.arange(num_experts)).sum(axis=0)
        earlier = jnp.arange(devices)[:, None] < here
        preceding = jnp.where(earlier, lax.all_gather(counts, axis_name), 0).sum(axis=0)
    plan = plan_rows(indices, num_experts, capacity, permuted_rows(tokens, top_k, num_experts, capacity), preceding)

    sizes = plan.group_sizes.reshape(devices, groups)
    starts = starts_of(sizes.sum(axis=1))
    column = jnp.arange(width)
    source, slots = plan.places.source, plan.places.slots
    source = source[jnp.minimum(starts[:, None] + column, source.shape[0] - 1)]
    source = jnp.where(column < sizes.sum(axis=1)[:, None], source, -1).ravel()
    device = indices // groups
    slots = jnp.where(slots >= 0, device * width + slots - starts[device], -1)
    sent = Plan(Places(source, slots), plan.group_sizes)

    sizes = lax.all_to_all(sizes, axis_name, 0, 0)  # [devices, G]: rows that each of them sends to each expert here
    ends = jnp.cumsum(sizes, axis=1)
    expert = (column[:, None] >= ends[:, None]).sum(axis=2)  # [devices, width]; G where there is no row
    begins = jnp.pad(starts_of(sizes.sum(axis=0)) + starts_of(sizes) - starts_of(sizes, axis=1), [(0, 0), (0, 1)])
    places = jnp.take_along_axis(begins, expert, axis=1) + column
    slots = jnp.where(expert < groups, places, -1).ravel()
    rows = slots.size if capacity is None else min(slots.size, groups * capacity)
    return sent, Plan(Places(inverse(slots, rows), slots[:, None]), sizes.sum(axis=0))


def swap(buffer: jax.Array, axis_name: str) -> jax.Array:
    """Part i of the buffer to device i, and part i of the result from it."""
    parts = buffer.reshape(lax.axis_size(axis_name), -1, buffer.shape[1])
    return lax.all_to_all(parts, axis_name, 0, 0).reshape(buffer.shape)
