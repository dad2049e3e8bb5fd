"""Which row tiles of which groups a kernel with rows in groups visits, computed on the device."""
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators
# (kernel arguments are what Triton makes of them; every host function below is annotated)

from typing import Literal

import triton
import triton.language as tl
from torch import Tensor

from gpu_reference._lib.hardware import check_devices
from gpu_reference._lib.launch import Launch
from gpu_reference._lib.operands import Shard, on_device, scalar, values
from gpu_reference._lib.tiles import block_of, cdiv
from op_arguments.gmm import GroupMetadata, check_group_metadata

METADATA_ELEMENTS = 128 * 128  # pairs of a visit and an expert per program of the metadata kernel, in registers
MOST_VISITS = 128  # per program


def make_group_metadata(
    group_sizes: Tensor,
    *,
    m: int,
    tm: int,
    group_offset: int | Tensor = 0,
    num_groups: int,
    cover: Literal["tiles", "groups"],
) -> GroupMetadata:
    """The (group, row tile) pairs that a kernel with row tiles of `tm` visits; see `GroupMetadata`.

    Every pair of a non-empty active group and a tile that holds rows of it, in row order. `cover="tiles"` (gmm)
    adds the tiles without active rows, once each: leading ones as group 0, trailing ones as the last non-empty
    group (0 if none). `cover="groups"` adds each empty active group, once, at the tile its start falls in (the last
    tile where that is beyond the rows). Computed on the device of group_sizes [E] int32.
    Raises as `gmm`, with `op_arguments.gmm.check_group_metadata`.
    """
    check_group_metadata(group_sizes, m, tm, scalar(group_offset), num_groups, cover, values(group_sizes))
    group_offset = on_device(group_offset, group_sizes.device)
    device = check_devices({"group_sizes": group_sizes, "group_offset": group_offset})
    launch = metadata_launch(group_sizes, group_offset, m, tm, num_groups, cover)
    launch.run(device)
    metadata: GroupMetadata = launch.arguments["metadata"]
    return metadata


def metadata_launch(
    group_sizes: Tensor, group_offset: Tensor, m: int, tm: int, groups: int, cover: Literal["tiles", "groups"]
) -> Launch:
    """The kernel of `make_group_metadata`, which fills the "metadata" of its arguments."""
    (experts,) = group_sizes.shape
    visits = cdiv(m, tm) + groups
    experts_block = block_of(experts)
    visits_block = min(MOST_VISITS, max(METADATA_ELEMENTS // experts_block, 1))
    metadata = GroupMetadata(*(group_sizes.new_empty(size) for size in (experts + 1, visits, visits, 1)))
    arguments = {
        "group_sizes": group_sizes.contiguous(),
        "shard": Shard(group_offset, experts, groups),
        "metadata": metadata,
        "m": m,
        "tm": tm,
        "visits": visits,
        "COVER_TILES": cover == "tiles",
        "EXPERTS_BLOCK": experts_block,
        "VISITS_BLOCK": visits_block,
    }
    return Launch(_metadata_kernel, (cdiv(max(visits, 1), visits_block),), arguments, {"num_warps": 4})


@triton.jit
def _metadata_kernel(
    group_sizes,
    shard,
    metadata,
    m,
    tm,
    visits,
    COVER_TILES: tl.constexpr,
    EXPERTS_BLOCK: tl.constexpr,
    VISITS_BLOCK: tl.constexpr,
):
    """One program per block of visits; each sees all group sizes."""
    expert = tl.arange(0, EXPERTS_BLOCK)
    sizes = tl.maximum(tl.load(group_sizes + expert, mask=expert < shard.experts, other=0), 0).to(tl.int64)
    ends = tl.cumsum(sizes)
    starts = tl.minimum(ends - sizes, m).to(tl.int32)
    ends = tl.minimum(ends, m).to(tl.int32)

    tiles = tl.cdiv(m, tm)
    group = expert - tl.minimum(tl.maximum(tl.load(shard.group_offset).to(tl.int32), 0), shard.experts - shard.groups)
    in_shard = (group >= 0) & (group < shard.groups)
    occupied = in_shard & (starts < ends)
    first_tile = starts // tm
    end_tile = tl.where(occupied, (ends + tm - 1) // tm, 0)
    group_visits = tl.where(occupied, end_tile - first_tile, 0)
    if COVER_TILES:
        leading = tl.min(tl.where(occupied, first_tile, tiles))
        trailing_tile = tl.maximum(tl.max(end_tile), leading)
        trailing = tiles - trailing_tile
    else:
        empty = in_shard & (starts >= ends) & (tiles > 0)
        group_visits = tl.where(empty, 1, group_visits)
        first_tile = tl.minimum(first_tile, tiles - 1)
        leading = 0
        trailing_tile = 0
        trailing = 0
    end_visit = leading + tl.cumsum(group_visits)
    first_visit = end_visit - group_visits
    trailing_visit = leading + tl.sum(group_visits)
    count = trailing_visit + trailing

    slot = tl.program_id(0) * VISITS_BLOCK + tl.arange(0, VISITS_BLOCK)
    visit = tl.minimum(slot, tl.maximum(count - 1, 0))
    is_group = (first_visit[None, :] <= visit[:, None]) & (visit[:, None] < end_visit[None, :])
    group_id = tl.sum(tl.where(is_group, group[None, :], 0), axis=1)
    tile_id = tl.sum(tl.where(is_group, (first_tile - first_visit)[None, :], 0), axis=1) + visit
    is_trailing = visit >= trailing_visit
    group_id = tl.where(is_trailing, tl.max(tl.where(occupied, group, 0)), group_id)
    tile_id = tl.where(is_trailing, trailing_tile + visit - trailing_visit, tile_id)
    tl.store(metadata.group_ids + slot, group_id, mask=slot < visits)
    tl.store(metadata.tile_ids + slot, tl.where(count > 0, tile_id, 0), mask=slot < visits)
    if tl.program_id(0) == 0:
        tl.store(metadata.group_offsets, 0)
        tl.store(metadata.group_offsets + 1 + expert, ends, mask=expert < shard.experts)
        tl.store(metadata.num_visits, count)
