"""Visits: which row tile a step of the grid multiplies, and for which group.

A tile that straddles groups is visited once for each. The list of visits is made on the device by a small kernel of
its own and steers the main kernel by scalar prefetch, as in MegaBlocks (Gale et al. 2022, arXiv:2211.15841) and JAX's
megablox. The main kernel reads here which rows of a tile are its group's, and multiplies, masks and copies those.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from op_arguments.gmm import GroupMetadata, check_group_metadata
from tpu_kernels._lib.arguments import Interpret, Shard, as_vector, concrete_values, resolve_interpret, static_scalar
from tpu_kernels._lib.call import Block, call
from tpu_kernels._lib.chip import MXU, sublanes
from tpu_kernels._lib.products import for_blocks

COPY_ROWS = sublanes(jnp.int8)  # of a masked copy at a time: one packed 8-bit register, two 16-bit ones


def make_group_metadata(
    group_sizes: jax.Array,
    *,
    m: int,
    tm: int,
    group_offset: int | jax.Array = 0,
    num_groups: int,
    cover: Literal["tiles", "groups"],
    interpret: Interpret = None,
) -> GroupMetadata:
    """The (group, row tile) pairs that a kernel with row tiles of `tm` visits; see `GroupMetadata`.

    Every pair of a non-empty active group and a tile that holds rows of it, in row order. `cover="tiles"` (gmm)
    adds the tiles without active rows, once each: leading ones as group 0, trailing ones as the last non-empty
    group (0 if none), so that no further weights are fetched for them. `cover="groups"` (tgmm) adds each empty
    active group, once, at the tile its start falls in (the last tile where that is beyond the rows).
    Raises ValueError or TypeError as `op_arguments.gmm.check_group_metadata`; values outside tracing only.
    """
    group_offset = static_scalar(group_offset)
    check_group_metadata(
        group_sizes,
        m=m,
        tm=tm,
        group_offset=group_offset,
        num_groups=num_groups,
        cover=cover,
        sizes=concrete_values(group_sizes),
    )
    shard = Shard(group_sizes, as_vector(group_offset, group_sizes.shape[0] - num_groups))
    return group_metadata(
        shard, m=m, tm=tm, num_groups=num_groups, cover=cover, interpret=resolve_interpret(interpret, group_sizes)
    )


@partial(jax.jit, static_argnames=("m", "tm", "num_groups", "cover", "interpret"))
def group_metadata(
    shard: Shard, *, m: int, tm: int, num_groups: int, cover: str, interpret: bool | pltpu.InterpretParams
) -> GroupMetadata:
    """`make_group_metadata` of checked arguments."""
    (experts,) = shard.group_sizes.shape
    tiles = pl.cdiv(m, tm)
    lengths = GroupMetadata(experts + 1, tiles + num_groups, tiles + num_groups, 1)
    if tiles == 0:
        return GroupMetadata(*(jnp.zeros(length, jnp.int32) for length in lengths))
    if experts == 0:
        shard = shard._replace(group_sizes=jnp.zeros(1, jnp.int32))  # an operand in SMEM cannot be empty
    out = GroupMetadata(*(jax.ShapeDtypeStruct((length,), jnp.int32) for length in lengths))
    metadata: GroupMetadata = call(
        partial(_group_metadata_kernel, m=m, tm=tm, num_groups=num_groups, cover=cover),
        name="group_metadata",
        operands=(_in_smem(shard.group_offset), _in_smem(shard.group_sizes)),
        out=GroupMetadata(*map(_in_smem, out)),
        cost=pl.CostEstimate(flops=0, transcendentals=0, bytes_accessed=4 * (1 + experts + sum(lengths))),
        interpret=interpret,
    )
    return metadata


_in_smem = partial(Block, space=pltpu.SMEM)


def _group_metadata_kernel(
    shard: tuple[Any, Any], out: GroupMetadata, _: None, *, m: int, tm: int, num_groups: int, cover: str
) -> None:
    group_offset, group_sizes = shard
    group_offsets, group_ids, tile_ids, num_visits = out
    experts, tiles = group_offsets.shape[0] - 1, pl.cdiv(m, tm)

    def add_size(expert: Any, end: Any) -> Any:
        # Bad sizes go unseen under tracing; clipped, they give wrong numbers, but no write beyond the lists.
        end += jnp.clip(group_sizes[expert], 0, m - end)
        group_offsets[expert + 1] = end
        return end

    group_offsets[0] = 0
    lax.fori_loop(0, experts, add_size, 0, unroll=8)
    offset = group_offset[0]

    def add_visits(group: Any, first_tile: Any, end_tile: Any, visit: Any) -> Any:
        def add(tile: Any, visit: Any) -> Any:
            group_ids[visit] = group
            tile_ids[visit] = tile
            return visit + 1

        return lax.fori_loop(first_tile, end_tile, add, visit)

    def add_group(group: Any, carry: Any) -> Any:
        visit, last_group = carry
        start, end = group_offsets[offset + group], group_offsets[offset + group + 1]
        first_tile = jnp.minimum(start // tm, tiles - 1)
        empty_tiles = 1 if cover == "groups" else 0
        end_tile = jnp.where(start < end, pl.cdiv(end, tm), first_tile + empty_tiles)
        return add_visits(group, first_tile, end_tile, visit), jnp.where(start < end, group, last_group)

    active_start, active_end = group_offsets[offset], group_offsets[offset + num_groups]
    any_active = active_start < active_end
    leading = jnp.where(any_active, active_start // tm, tiles) if cover == "tiles" else 0
    visit = add_visits(0, 0, leading, 0)
    visit, last_group = lax.fori_loop(0, num_groups, add_group, (visit, 0))
    if cover == "tiles":
        trailing = jnp.where(any_active, pl.cdiv(active_end, tm), tiles)
        visit = add_visits(last_group, trailing, tiles, visit)
    num_visits[0] = visit

    def repeat_last(index: Any, _: Any) -> Any:
        last = jnp.maximum(visit - 1, 0)
        group_ids[index] = jnp.where(visit > 0, group_ids[last], 0)
        tile_ids[index] = jnp.where(visit > 0, tile_ids[last], 0)

    lax.fori_loop(visit, tiles + num_groups, repeat_last, None)


# ------------------------------------------------------------------------------------------ what a step of a grid reads


class Visits(NamedTuple):
    """The visits as every step of a grid reads them: scalars, prefetched."""

    group_ids: Any
    tile_ids: Any
    group_offsets: Any
    group_offset: Any

    def own_rows(self, visit: Any, tm: int) -> "OwnRows":
        """The rows of the visit's tile that belong to its group."""
        group = self.group_offset[0] + self.group_ids[visit]
        first_row = self.tile_ids[visit] * tm
        start, end = self.group_offsets[group] - first_row, self.group_offsets[group + 1] - first_row
        return OwnRows(jnp.maximum(start, 0), jnp.minimum(end, tm), tm)

    def is_first_of_tile(self, visit: Any) -> Any:
        """Whether no visit before it had its tile."""
        return (visit == 0) | (self.tile_ids[jnp.maximum(visit - 1, 0)] != self.tile_ids[visit])

    def ends_of_group(self, visit: Any, last_visit: Any) -> tuple[Any, Any]:
        """Whether no visit before it has its group, and whether none after it has."""
        group = self.group_ids[visit]
        is_first = (visit == 0) | (self.group_ids[jnp.maximum(visit - 1, 0)] != group)
        return is_first, (visit == last_visit) | (self.group_ids[jnp.minimum(visit + 1, last_visit)] != group)


class OwnRows(NamedTuple):
    """Rows [start, end) of a tile of tm, those of a visit's group; start >= end where there are none."""

    start: Any
    end: Any
    tm: int

    def are_all(self) -> Any:
        """Whether the tile has no other rows."""
        return (self.start == 0) & (self.end == self.tm)

    def mask(self, first_row: Any, shape: tuple[int, ...]) -> jax.Array:
        """Which elements of a block of `shape`, the first row of which is first_row, are in these rows."""
        row = first_row + lax.broadcasted_iota(jnp.int32, shape, 0)
        return (self.start <= row) & (row < self.end)

    def for_blocks(self, body: Callable[[Any], None]) -> None:
        """body(rows) for each block of `row_block(tm)` rows of the tile that has part in these, in order."""
        height = row_block(self.tm)

        @pl.when(self.start < self.end)
        def _() -> None:
            if height == self.tm:
                body(pl.ds(0, self.tm))
            else:
                first, last = lax.div(self.start, height), lax.div(self.end - 1, height)
                lax.fori_loop(
                    first, last + 1, lambda i, _: body(pl.ds(pl.multiple_of(i * height, height), height)), None
                )

    def copy(self, copies: Sequence[tuple[Any, Any]], rows: Any) -> None:
        """Copy `rows` of each (tile, block) of `copies`, with zeros for those that are not among these.

        The others may hold NaN or infinities, and 0 * NaN is NaN: both operands of a sum over rows need it. A loop and
        memory of its own, as masks made between the products need more registers than there are.
        """
        height = COPY_ROWS if rows.size % COPY_ROWS == 0 else rows.size

        def copy_part(part: Any) -> None:
            for tile, block in copies:
                x = tile[pl.ds(rows.start + part.start, height), :]
                own = self.mask(rows.start + part.start, x.shape)
                block[part, :] = jnp.where(own, x, jnp.zeros_like(x))

        for_blocks(rows.size, height, copy_part)

    def store(self, out: Any, rows: Any, columns: Any, result: jax.Array) -> None:
        """Store the result [rows, columns] in these rows of out, and leave the others."""
        own = self.mask(rows.start, result.shape)
        out[rows, columns] = jnp.where(own, result, out[rows, columns])


def row_block(tm: int) -> int:
    """How many of a tile's tm rows are multiplied at a time where the tile is not one group's alone."""
    return tm if tm % MXU else MXU
