"""The grouped matmuls but for their products: programs and grids, what a program computes, its loads and its stores.

Two forms. Of rows (`gmm`): lhs [M, K] times each group's rhs [K, N], summed over K. A program has a *visit*, which is a
row tile and a group with rows in it (`gpu_reference._lib.visits`), and a tile of columns. Of groups (`tgmm`): out
[G, K, N] of lhs [M, K] and rhs [M, N], summed over each group's rows. A program has a tile of one group's output.
"""
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators
# (kernel arguments are what Triton makes of them; every host function below is annotated)

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from gpu_reference._lib.launch import Launch
from gpu_reference._lib.operands import on_device, operand, shard_of, sizes_of
from gpu_reference._lib.tiles import Tile, block_of
from gpu_reference._lib.visits import make_group_metadata
from op_arguments.gmm import GroupMetadata, Problem
from op_arguments.quantized_gmm import QuantizedProblem

BAND = tl.constexpr(8)  # visits whose output columns are computed together: weights are fetched once for all of them


class Visit(NamedTuple):
    """A visit: its group, that group's first row and the first after it, its row tile, whether it is the first of the
    tile, and where the offsets of the shard's groups are."""

    group: Any
    start: Any
    end: Any
    tile: Any
    is_first: Any
    shard_offsets: Any


class Region(NamedTuple):
    """What a program computes: rows [rows, 1] and columns [1, columns] of a group's output, where they are in it, each
    a sum from start to end."""

    group: Any
    row: Any
    column: Any
    in_rows: Any
    in_columns: Any
    start: Any
    end: Any


def product_of_rows(
    p: Problem | QuantizedProblem,
    tm: int,
    group_sizes: Tensor,
    group_offset: int | Tensor,
    existing_out: Tensor | None,
    out_dtype: torch.dtype,
    launch: Callable[[Tensor, GroupMetadata, Tensor], Launch],
) -> Tensor:
    """out [M, N] of `launch(out, metadata, group_offset on the device)`; a shard of no groups has none."""
    device = group_sizes.device
    if p.groups == 0:
        if existing_out is None:
            return torch.zeros(p.m, p.n, dtype=out_dtype, device=device)
        return existing_out.clone(memory_format=torch.contiguous_format)
    out = torch.empty(p.m, p.n, dtype=out_dtype, device=device)
    if out.numel():
        offset = on_device(group_offset, device)
        metadata = make_group_metadata(
            group_sizes, m=p.m, tm=tm, group_offset=offset, num_groups=p.groups, cover="tiles"
        )
        launch(out, metadata, offset).run(device)
    return out


def product_of_groups(
    p: Problem | QuantizedProblem,
    group_sizes: Tensor,
    group_offset: int | Tensor,
    out_dtype: torch.dtype,
    launch: Callable[[Tensor, Tensor, Tensor], Launch],
) -> Tensor:
    """out [G, K, N] of `launch(out, group_sizes, group_offset on the device)`."""
    device = group_sizes.device
    out = torch.empty(p.groups, p.k, p.n, dtype=out_dtype, device=device)
    if out.numel():
        launch(out, group_sizes.contiguous(), on_device(group_offset, device)).run(device)
    return out


def arguments_of_rows(
    p: Problem | QuantizedProblem,
    tile: Tile,
    existing_out: Tensor | None,
    out: Tensor,
    metadata: GroupMetadata,
    group_offset: Tensor,
) -> dict[str, Any]:
    """What every kernel of this form takes besides lhs and rhs."""
    return {
        "existing_out": None if existing_out is None else operand(existing_out),
        "out": out,
        "metadata": metadata,
        "shard": shard_of(p, group_offset),
        "sizes": sizes_of(p),
        "TILE": tile,
        "EVEN_K": p.k % tile.k == 0,
    }


def arguments_of_groups(
    p: Problem | QuantizedProblem,
    tile: Tile,
    existing_out: Tensor | None,
    out: Tensor,
    group_sizes: Tensor,
    group_offset: Tensor,
) -> dict[str, Any]:
    """What every kernel of this form takes besides lhs and rhs."""
    return {
        "existing_out": None if existing_out is None else operand(existing_out),
        "out": out,
        "group_sizes": group_sizes,
        "shard": shard_of(p, group_offset),
        "sizes": sizes_of(p),
        "TILE": tile,
        "EXPERTS_BLOCK": block_of(p.experts),
    }


def grid_of_rows(p: Problem | QuantizedProblem, tile: Tile) -> tuple[int]:
    """A program for every visit that there may be and every tile of columns, in whole bands."""
    bands = triton.cdiv(triton.cdiv(p.m, tile.m) + p.groups, BAND.value)
    return (bands * BAND.value * triton.cdiv(p.n, tile.n),)


def grid_of_groups(p: Problem | QuantizedProblem, tile: Tile) -> tuple[int]:
    """A program for every tile of every group's output."""
    return (p.groups * triton.cdiv(p.k, tile.k) * triton.cdiv(p.n, tile.n),)


@triton.jit
def visit_of_program(n, TN: tl.constexpr):
    """This program's visit and column tile: all columns of a band of visits before the next band."""
    tiles_n = (n + TN - 1) // TN
    in_band = tl.program_id(0) % (BAND * tiles_n)
    visit = tl.program_id(0) // (BAND * tiles_n) * BAND + in_band % BAND
    return visit, in_band // BAND


@triton.jit
def load_visit(nth, metadata, shard):
    """The nth Visit."""
    tile = tl.load(metadata.tile_ids + nth)
    is_first = tl.load(metadata.tile_ids + nth - 1, mask=nth > 0, other=-1) != tile
    group = tl.load(metadata.group_ids + nth)
    first_group = tl.minimum(tl.maximum(tl.load(shard.group_offset).to(tl.int32), 0), shard.experts - shard.groups)
    shard_offsets = metadata.group_offsets + first_group
    start = tl.load(shard_offsets + group)
    end = tl.load(shard_offsets + group + 1)
    return Visit(group, start, end, tile, is_first, shard_offsets)


@triton.jit
def region_of_visit(visit, tile_n, sizes, TILE: tl.constexpr):
    """A visit's Region in a column tile: its group's rows of the row tile, summed over K, or over nothing if it has
    none."""
    first_row = visit.tile * TILE.m
    row = (first_row + tl.arange(0, TILE.m))[:, None]
    column = (tile_n * TILE.n + tl.arange(0, TILE.n))[None, :]
    in_group = (row >= visit.start) & (row < visit.end)
    has_rows = tl.maximum(visit.start, first_row) < tl.minimum(visit.end, first_row + TILE.m)
    return Region(visit.group, row, column, in_group, column < sizes.n, 0, tl.where(has_rows, sizes.k, 0))


@triton.jit
def region_of_program(group_sizes, sizes, shard, TILE: tl.constexpr, EXPERTS_BLOCK: tl.constexpr):
    """The Region of a program with a tile of a group's output, all tiles of a group before the next: summed over the
    group's rows."""
    tiles_n = (sizes.n + TILE.n - 1) // TILE.n
    tiles = (sizes.k + TILE.k - 1) // TILE.k * tiles_n
    group = tl.program_id(0) // tiles
    tile_k = tl.program_id(0) % tiles // tiles_n
    tile_n = tl.program_id(0) % tiles_n

    expert = tl.arange(0, EXPERTS_BLOCK)
    counts = tl.maximum(tl.load(group_sizes + expert, mask=expert < shard.experts, other=0), 0).to(tl.int64)
    first_group = tl.minimum(tl.maximum(tl.load(shard.group_offset).to(tl.int32), 0), shard.experts - shard.groups)
    this = first_group + group
    start = tl.minimum(tl.sum(tl.where(expert < this, counts, 0)), sizes.m).to(tl.int32)
    end = tl.minimum(tl.sum(tl.where(expert <= this, counts, 0)), sizes.m).to(tl.int32)

    at_k = (tile_k * TILE.k + tl.arange(0, TILE.k))[:, None]
    column = (tile_n * TILE.n + tl.arange(0, TILE.n))[None, :]
    return Region(group, at_k, column, at_k < sizes.k, column < sizes.n, start, end)


@triton.jit
def pointers(operand, group, row, column):
    """Where an operand's elements at rows and columns of a group's matrix are."""
    first = operand.data
    if operand.group is not None:
        first += group.to(tl.int64) * operand.group
    return first + row.to(tl.int64) * operand.row + column.to(tl.int64) * operand.column


@triton.jit
def first_tiles(lhs, rhs, region, first, DEPTH: tl.constexpr):
    """Where the tiles of lhs and rhs are that the step from `first` multiplies, and how far on those of the next."""
    along = first + tl.arange(0, DEPTH).to(tl.int64)
    a_tile = pointers(lhs, region.group, region.row, along[None, :])
    b_tile = pointers(rhs, region.group, along[:, None], region.column)
    whole_tile = tl.full((), DEPTH, tl.int64)
    return a_tile, b_tile, whole_tile * lhs.column, whole_tile * rhs.row


@triton.jit
def load_step(a_tile, b_tile, region, first, DEPTH: tl.constexpr, FROM_START: tl.constexpr, TO_END: tl.constexpr):
    """The tiles of a step from `first`, zero outside of the region.

    FROM_START, TO_END: whether no step begins before the sum does, or ends after it: there nothing is masked.
    """
    in_a = region.in_rows
    in_b = region.in_columns
    along = tl.arange(0, DEPTH)[None, :]
    down = tl.arange(0, DEPTH)[:, None]
    if not FROM_START:
        in_a &= along >= region.start - first
        in_b &= down >= region.start - first
    if not TO_END:
        in_a &= along < region.end - first
        in_b &= down < region.end - first
    return tl.load(a_tile, mask=in_a, other=0.0), tl.load(b_tile, mask=in_b, other=0.0)


@triton.jit
def store_rows(sums, out, existing_out, visit, region, sizes, shard):
    """Store a visit's rows, and in the first visit of a tile its rows of no active group: zero, or existing_out's.

    So every row is stored exactly once.
    """
    result = sums.to(out.dtype.element_ty)
    row = region.row
    row_offset = row.to(tl.int64)
    column_offset = region.column.to(tl.int64)
    is_inactive = (row < tl.load(visit.shard_offsets)) | (row >= tl.load(visit.shard_offsets + shard.groups))
    is_unclaimed = is_inactive & (row < tl.where(visit.is_first, sizes.m, 0))
    # Selects, since 0 * inf of a weight leaves NaN in the sums of rows outside the group.
    if existing_out is None:
        result = tl.where(region.in_rows, result, 0.0)
    else:
        existing_tile = pointers(existing_out, region.group, row_offset, column_offset)
        existing = tl.load(existing_tile, mask=is_unclaimed & region.in_columns, other=0)
        result = tl.where(region.in_rows, result, existing)
    is_stored = (region.in_rows | is_unclaimed) & region.in_columns
    tl.store(out + row_offset * sizes.n + column_offset, result, mask=is_stored)


@triton.jit
def store_group(sums, out, existing_out, region, sizes):
    """Store a tile of a group's output, existing_out added to its sums."""
    in_out = region.in_rows & region.in_columns
    row_offset = region.row.to(tl.int64)
    column_offset = region.column.to(tl.int64)
    if existing_out is not None:
        existing_tile = pointers(existing_out, region.group, row_offset, column_offset)
        sums += tl.load(existing_tile, mask=in_out, other=0).to(tl.float32)
    out_tile = out + (region.group.to(tl.int64) * sizes.k + row_offset) * sizes.n + column_offset
    tl.store(out_tile, sums.to(out.dtype.element_ty), mask=in_out)
