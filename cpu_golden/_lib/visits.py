"""Which rows are whose, and the tiles that a kernel visits for them."""

from typing import Any, Literal

import numpy as np

from cpu_golden import Array
from cpu_golden._lib.arguments import scalar, values
from op_arguments.gmm import GroupMetadata, check_group_metadata


def active_groups(group_sizes: Array, group_offset: Any, groups: int) -> list[tuple[int, slice]]:
    """(shard-local group, its rows) for every non-empty group of the shard."""
    first, offsets = scalar(group_offset), [0, *np.cumsum(group_sizes).tolist()]
    ends = [(g, offsets[first + g], offsets[first + g + 1]) for g in range(groups)]
    return [(group, slice(start, end)) for group, start, end in ends if start < end]


def out_before(existing_out: Array | None, *shape: int) -> Array:
    """What groups are written into, or added to, in float64: existing_out, or zeros where it is None."""
    return np.zeros(shape) if existing_out is None else existing_out.astype(np.float64)


def make_group_metadata(
    group_sizes: Array,
    *,
    m: int,
    tm: int,
    group_offset: int = 0,
    num_groups: int,
    cover: Literal["tiles", "groups"],
) -> GroupMetadata:
    """The (group, row tile) pairs that a kernel with row tiles of `tm` visits; see `GroupMetadata`.

    Every pair of a non-empty active group and a tile that holds rows of it, in row order. `cover="tiles"` (gmm)
    adds the tiles without active rows, once each: leading ones as group 0, trailing ones as the last non-empty
    group (0 if none), so that no further weights are fetched for them. `cover="groups"` (tgmm) adds each empty
    active group, once, at the tile its start falls in (the last tile where that is beyond the rows).
    Raises ValueError or TypeError as `op_arguments.gmm.check_group_metadata`.
    """
    group_offset, sizes = scalar(group_offset), values(group_sizes)
    check_group_metadata(
        group_sizes, m=m, tm=tm, group_offset=group_offset, num_groups=num_groups, cover=cover, sizes=sizes
    )
    offsets = np.concatenate([[0], np.cumsum(group_sizes)]).astype(np.int32)
    tiles = -(-m // tm)
    visits: list[tuple[int, int]] = []
    for group in range(num_groups):
        start, end = int(offsets[group_offset + group]), int(offsets[group_offset + group + 1])
        if start < end:
            visits += [(group, tile) for tile in range(start // tm, -(-end // tm))]
        elif cover == "groups" and tiles:
            visits.append((group, min(start // tm, tiles - 1)))
    if cover == "tiles":
        first, last = (visits[0], visits[-1]) if visits else ((0, tiles), (0, tiles - 1))
        leading = [(0, tile) for tile in range(first[1])]
        trailing = [(last[0], tile) for tile in range(last[1] + 1, tiles)]
        visits = leading + visits + trailing
    padding = [visits[-1] if visits else (0, 0)] * (tiles + num_groups - len(visits))
    pairs = np.array(visits + padding, np.int32).reshape(-1, 2)
    return GroupMetadata(offsets, pairs[:, 0].copy(), pairs[:, 1].copy(), np.array([len(visits)], np.int32))
