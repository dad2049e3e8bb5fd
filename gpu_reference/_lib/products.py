"""The kernels of the grouped matmuls but for how a step is multiplied: what a program computes, its loads and stores.

Two forms. Of rows (`gmm`): lhs [M, K] times each group's rhs [K, N], summed over K. A program has a *visit*, which is a
row tile and a group with rows in it (`gpu_reference._lib.visits`), and a tile of columns. Of groups (`tgmm`): out
[G, K, N] of lhs [M, K] and rhs [M, N], summed over each group's rows. A program has a tile of one group's output.
"""
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators

from typing import Any, NamedTuple

import triton
import triton.language as tl

from gpu_reference._lib.probe import INTERPRETED, probe

BAND = tl.constexpr(8)  # visits whose output columns are computed together: weights are fetched once for all of them


class Task(NamedTuple):
    """What every kernel takes besides its operands: the result, which rows are a group's (its GroupMetadata; for a
    product of groups group_sizes), an Operand or NO_OPERAND, a Shard and Sizes."""

    out: Any
    groups: Any
    existing_out: Any
    shard: Any
    sizes: Any


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


@triton.jit
def multiply_rows(
    lhs, rhs, task, TILE: tl.constexpr, EVEN_K: tl.constexpr, ADDED, SCALING=None, FINISHED=None, ACC=tl.float32
):
    """One program per (visit, column tile), in bands. It stores its group's rows of the row tile; the first visit of a
    tile also stores the rows of no active group, so that every row is stored exactly once.

    ADDED, SCALING, FINISHED and ACC: see `summed`.
    """
    nth, tile_n = visit_of_program(task.sizes.n, TILE.n)
    if nth >= tl.load(task.groups.num_visits):
        return
    visit = load_visit(nth, task)
    region = region_of_visit(visit, tile_n, task.sizes, TILE)
    sums = summed(lhs, rhs, region, TILE.k, False, EVEN_K, ADDED, SCALING, FINISHED, ACC)
    store_rows(sums, task, visit, region)


@triton.jit
def multiply_groups(
    lhs, rhs, task, TILE: tl.constexpr, EXPERTS_BLOCK: tl.constexpr, ADDED, SCALING=None, FINISHED=None, ACC=tl.float32
):
    """One program per (group, output tile): the sum over the group's rows, in steps from its first row, or of scaled
    operands from row 0, as the scales' blocks are. All else as `multiply_rows`."""
    region = region_of_program(task, TILE, EXPERTS_BLOCK)
    sums = summed(lhs, rhs, region, TILE.m, SCALING is not None, False, ADDED, SCALING, FINISHED, ACC)
    store_group(sums, task, region)


@triton.jit
def summed(
    lhs,
    rhs,
    region,
    DEPTH: tl.constexpr,
    ALIGNED: tl.constexpr,
    TO_END: tl.constexpr,
    ADDED: tl.constexpr,
    SCALING: tl.constexpr,
    FINISHED: tl.constexpr,
    ACC: tl.constexpr,
):
    """The sums of a region, of dtype ACC, in steps of DEPTH: ADDED(sums, a, b, lhs, rhs, region, first, SCALING) adds
    the step from `first`, whose tiles are a and b; FINISHED(sums, lhs, rhs, region, SCALING), where it is given, comes
    last.

    ALIGNED: steps are counted from 0, else from where the sum starts. TO_END: none goes on after its end. SCALING is
    None where no operand has scales. Then a probe is shown the sums after every step, else what is finished.
    """
    first = region.start
    end = region.end
    if ALIGNED:
        first = region.start // DEPTH * DEPTH
        end = tl.where(region.start < region.end, region.end, first)
    # lhs may be transposed, by its strides: tl.trans next to a wgmma has been miscompiled (Triton before 3.7.1).
    a_tile, b_tile, a_step, b_step = first_tiles(lhs, rhs, region, first, DEPTH)
    sums = tl.full((region.row.shape[0], region.column.shape[1]), 0, ACC)
    for step in range(first, end, DEPTH):
        a, b = load_step(a_tile, b_tile, region, step, DEPTH, not ALIGNED, TO_END)
        sums = ADDED(sums, a, b, lhs, rhs, region, step, SCALING)
        a_tile += a_step
        b_tile += b_step
        if INTERPRETED:
            sums = probe("acc", sums, region.in_rows & region.in_columns, depth=DEPTH) if SCALING is None else sums
    if FINISHED is not None:
        sums = FINISHED(sums, lhs, rhs, region, SCALING)
    if INTERPRETED:
        in_region = region.in_rows & region.in_columns & (region.start < region.end)
        sums = sums if SCALING is None else probe("acc", sums, in_region)
    return sums


@triton.jit
def visit_of_program(n, TN: tl.constexpr):
    """This program's visit and column tile: all columns of a band of visits before the next band."""
    tiles_n = (n + TN - 1) // TN
    in_band = tl.program_id(0) % (BAND * tiles_n)
    visit = tl.program_id(0) // (BAND * tiles_n) * BAND + in_band % BAND
    return visit, in_band // BAND


@triton.jit
def load_visit(nth, task):
    """The nth Visit."""
    metadata, shard = task.groups, task.shard
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
def region_of_program(task, TILE: tl.constexpr, EXPERTS_BLOCK: tl.constexpr):
    """The Region of a program with a tile of a group's output, all tiles of a group before the next: summed over the
    group's rows."""
    sizes, shard = task.sizes, task.shard
    tiles_n = (sizes.n + TILE.n - 1) // TILE.n
    tiles = (sizes.k + TILE.k - 1) // TILE.k * tiles_n
    group = tl.program_id(0) // tiles
    tile_k = tl.program_id(0) % tiles // tiles_n
    tile_n = tl.program_id(0) % tiles_n

    expert = tl.arange(0, EXPERTS_BLOCK)
    counts = tl.maximum(tl.load(task.groups + expert, mask=expert < shard.experts, other=0), 0).to(tl.int64)
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
def store_rows(sums, task, visit, region):
    """Store a visit's rows, and in the first visit of a tile its rows of no active group: zero, or existing_out's.

    So every row is stored exactly once.
    """
    out, existing_out, sizes = task.out, task.existing_out, task.sizes
    result = sums.to(out.dtype.element_ty)
    row = region.row
    row_offset = row.to(tl.int64)
    column_offset = region.column.to(tl.int64)
    is_inactive = (row < tl.load(visit.shard_offsets)) | (row >= tl.load(visit.shard_offsets + task.shard.groups))
    is_unclaimed = is_inactive & (row < tl.where(visit.is_first, sizes.m, 0))
    # Selects, since 0 * inf of a weight leaves NaN in the sums of rows outside the group.
    if existing_out.data is None:
        result = tl.where(region.in_rows, result, 0.0)
    else:
        existing_tile = pointers(existing_out, region.group, row_offset, column_offset)
        existing = tl.load(existing_tile, mask=is_unclaimed & region.in_columns, other=0)
        result = tl.where(region.in_rows, result, existing)
    is_stored = (region.in_rows | is_unclaimed) & region.in_columns
    tl.store(out + row_offset * sizes.n + column_offset, result, mask=is_stored)


@triton.jit
def store_group(sums, task, region):
    """Store a tile of a group's output, existing_out added to its sums."""
    out, existing_out, sizes = task.out, task.existing_out, task.sizes
    in_out = region.in_rows & region.in_columns
    row_offset = region.row.to(tl.int64)
    column_offset = region.column.to(tl.int64)
    if existing_out.data is not None:
        existing_tile = pointers(existing_out, region.group, row_offset, column_offset)
        sums += tl.load(existing_tile, mask=in_out, other=0).to(tl.float32)
    out_tile = out + (region.group.to(tl.int64) * sizes.k + row_offset) * sizes.n + column_offset
    tl.store(out_tile, sums.to(out.dtype.element_ty), mask=in_out)
