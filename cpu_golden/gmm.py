"""Grouped matrix multiplication (MoE layers): the definition, in float64.

`group_sizes[E]` cut the M rows into E consecutive groups; rows beyond their sum belong to none. A shard of an
expert-parallel layer holds the G consecutive groups from `group_offset` on; only their rows are *active*.
Names and meaning follow MegaBlocks (Gale et al. 2022, arXiv:2211.15841) and JAX's megablox.
"""

from collections.abc import Iterator
from typing import Any

import numpy as np

from cpu_golden import Array
from cpu_golden._lib.arguments import groups_of, one_tile
from cpu_golden._lib.visits import active_groups, out_before
from cpu_golden.stages import Stages, exact
from op_arguments import Tiling, resolve_tiling
from op_arguments.gmm import GmmOptions, TgmmOptions, check_gmm, check_tgmm


def gmm(
    lhs: Array,
    rhs: Array,
    group_sizes: Array,
    *,
    group_offset: int = 0,
    existing_out: Array | None = None,
    transpose_rhs: bool = False,
    preferred_element_type: Any = None,
    tiling: Tiling | None = None,
    stages: Stages = exact,
) -> Array:
    """Rows of each group times that group's matrix: `out[m] = lhs[m] @ rhs[group of m - group_offset]`.

    lhs [M, K]; rhs [G, K, N], or [G, N, K] with transpose_rhs; both float32, bfloat16, float16 or float64.
    group_sizes [E] int32, >= 0, sum <= M. Returns float64 [M, N]: rows of no active group are zero, or
    existing_out's rows where it is given (active rows overwrite it). preferred_element_type is checked, and the
    value left unrounded; tiling is checked as kernels do, and otherwise theirs alone.
    Stages: depth (along K). Sites: lhs, rhs, partial, acc (those of `Stages.dot`), out.
    Raises ValueError or TypeError as `op_arguments.gmm.check_gmm`.
    """
    groups = groups_of(group_sizes, group_offset)
    p = check_gmm(lhs, rhs, groups, existing_out, transpose_rhs, preferred_element_type, exact=True)
    resolve_tiling(tiling, one_tile, p.m, p.k, p.n)
    out = out_before(existing_out, p.m, p.n)
    for group, rows in active_groups(group_sizes, groups.offset, p.groups):
        b = rhs[group].astype(np.float64)
        out[rows] = stages.dot(lhs[rows].astype(np.float64), b.T if transpose_rhs else b)
    return stages("out", out)


def tgmm(
    lhs: Array,
    rhs: Array,
    group_sizes: Array,
    *,
    group_offset: int = 0,
    num_actual_groups: int | None = None,
    existing_out: Array | None = None,
    preferred_element_type: Any = None,
    tiling: Tiling | None = None,
    stages: Stages = exact,
) -> Array:
    """The weight gradient of `gmm`: `out[g] = lhs[rows of g].T @ rhs[rows of g]`.

    lhs [M, K] and rhs [M, N]: float32, bfloat16, float16 or float64. group_sizes [E] int32, >= 0, sum <= M.
    Returns float64 [G, K, N], G = num_actual_groups (default E): an empty group's block is zero; existing_out
    [G, K, N] is added. preferred_element_type and tiling as in `gmm`.
    Stages: depth (along M), aligned. Sites as `gmm`.
    Raises ValueError or TypeError as `op_arguments.gmm.check_tgmm`.
    """
    groups = groups_of(group_sizes, group_offset)
    p = check_tgmm(lhs, rhs, groups, num_actual_groups, existing_out, preferred_element_type, exact=True)
    resolve_tiling(tiling, one_tile, p.m, p.k, p.n)
    out = out_before(existing_out, p.groups, p.k, p.n)
    for group, rows in active_groups(group_sizes, groups.offset, p.groups):
        a, b = (x[rows].astype(np.float64) for x in (lhs, rhs))
        out[group] += stages.dot(a.T, b, first=rows.start if stages.aligned else 0)
    return stages("out", out)


def gmm_definition(lhs: Array, rhs: Array, group_sizes: Array, **options: Any) -> Array:
    """`gmm` row by row, straight from the definition, of arguments that it accepts; options are `GmmOptions`."""
    o = GmmOptions(**options)
    weights = (rhs.swapaxes(1, 2) if o.transpose_rhs else rhs).astype(np.float64)
    out = out_before(o.existing_out, lhs.shape[0], weights.shape[2])
    for row, group in _active_rows(group_sizes, o.group_offset, len(weights)):
        out[row] = lhs[row].astype(np.float64) @ weights[group]
    return out


def tgmm_definition(lhs: Array, rhs: Array, group_sizes: Array, **options: Any) -> Array:
    """`tgmm` row by row, straight from the definition, of arguments that it accepts; options are `TgmmOptions`."""
    o = TgmmOptions(**options)
    groups = len(group_sizes) if o.num_actual_groups is None else o.num_actual_groups
    out = out_before(o.existing_out, groups, lhs.shape[1], rhs.shape[1])
    for row, group in _active_rows(group_sizes, o.group_offset, groups):
        out[group] += np.outer(lhs[row].astype(np.float64), rhs[row].astype(np.float64))
    return out


def _active_rows(group_sizes: Array, group_offset: int, groups: int) -> Iterator[tuple[int, int]]:
    """(row, shard-local group) for every row of a group of the shard."""
    group_of_row = np.repeat(np.arange(len(group_sizes)), group_sizes) - group_offset
    for row, group in enumerate(group_of_row.tolist()):
        if 0 <= group < groups:
            yield row, group
