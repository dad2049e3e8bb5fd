"""Grouped matrix multiplication (MoE layers) on the GPU, in Triton; the operations are defined in `cpu_golden/gmm.py`.

Nothing is read back from the device: `group_sizes` and `group_offset` stay where they are, the grid is sized by the
host for the worst case, and the calls can be captured in a CUDA graph. The values of CUDA tensors are therefore not
checked; sizes that are negative or too large are clamped inside the kernels and reach no memory outside the tensors.
Sums are float32 (operands in full precision: no TF32) and are rounded once, when they are stored.
"""
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators
# (kernel arguments are what Triton makes of them; every host function below is annotated)

from functools import partial

import torch
import triton
import triton.language as tl
from torch import Tensor

from gpu_reference._lib.hardware import bfloat16_as_float32_where_interpreted, check_devices
from gpu_reference._lib.launch import Launch, launch_options
from gpu_reference._lib.operands import operand, scalar, values
from gpu_reference._lib.probe import INTERPRETED, probe
from gpu_reference._lib.products import (
    arguments_of_groups,
    arguments_of_rows,
    first_tiles,
    grid_of_groups,
    grid_of_rows,
    load_step,
    load_visit,
    product_of_groups,
    product_of_rows,
    region_of_program,
    region_of_visit,
    store_group,
    store_rows,
    visit_of_program,
)
from gpu_reference._lib.tiles import Candidate, Tile, first_filled, fitted
from op_arguments import Tiling, resolve_tiling
from op_arguments.gmm import GroupMetadata, Problem, check_gmm, check_tgmm

GMM_TILES: dict[int, tuple[Candidate, ...]] = {
    2: ((128, 64, 128), (64, 64, 128), (32, 64, 128), (16, 128, 128)),
    4: ((128, 16, 128), (64, 32, 128), (32, 32, 128), (16, 64, 128)),
}
"""(tm, tk, tn) by bytes per operand element, largest first: the candidates of an autotuner. 16-bit operands run on
tensor cores, float32 as a chain of FMAs, whose unrolled steps must stay short to fit the registers of sm_80: no
tile spills more than a few words on sm_80 to sm_120. The default is the first whose tm an average group fills."""

TGMM_TILES: dict[int, tuple[Candidate, ...]] = {
    2: ((64, 128, 128), (32, 64, 128), (32, 64, 64)),
    4: ((16, 128, 128), (32, 64, 64), (16, 64, 64)),
}
"""As GMM_TILES; here tm is the step of the sum over a group's rows, tk x tn the tile of the output."""


def gmm(
    lhs: Tensor,
    rhs: Tensor,
    group_sizes: Tensor,
    *,
    group_offset: int | Tensor = 0,
    existing_out: Tensor | None = None,
    transpose_rhs: bool = False,
    preferred_element_type: torch.dtype | None = None,
    tiling: Tiling | None = None,
) -> Tensor:
    """Rows of each group times that group's matrix: [M, N] in preferred_element_type (default lhs's dtype), contiguous.

    Arguments, result and errors as `cpu_golden.gmm.gmm`; here: lhs and rhs float32, bfloat16 or float16, all tensors
    of any strides. tiling is (tm, tk, tn), or a function (m, k, n) -> (tm, tk, tn): a look-up table or an autotuner
    over GMM_TILES. Each of the three becomes a power of two from 16 to 128. Shown to a probe: the sums, at acc.
    Also raises ValueError for tensors on several devices, and RuntimeError for CPU tensors where Triton's interpreter
    is off.
    """
    group_offset, sizes = scalar(group_offset), values(group_sizes)
    p = check_gmm(lhs, rhs, group_sizes, group_offset, existing_out, transpose_rhs, preferred_element_type, sizes)
    tensors = {"lhs": lhs, "rhs": rhs, "group_sizes": group_sizes, "existing_out": existing_out}
    check_devices(tensors | {"group_offset": group_offset})
    weights = rhs.transpose(1, 2) if transpose_rhs else rhs
    out_dtype = getattr(torch, p.out_dtype)
    return _gmm(p, lhs, weights, group_sizes, group_offset, existing_out, tiling, out_dtype)


def tgmm(
    lhs: Tensor,
    rhs: Tensor,
    group_sizes: Tensor,
    *,
    group_offset: int | Tensor = 0,
    num_actual_groups: int | None = None,
    existing_out: Tensor | None = None,
    preferred_element_type: torch.dtype | None = None,
    tiling: Tiling | None = None,
) -> Tensor:
    """The weight gradient of `gmm`: [G, K, N] in preferred_element_type (default lhs's dtype), contiguous.

    Arguments, result and errors as `cpu_golden.gmm.tgmm`; dtypes, strides, tiling (over TGMM_TILES), probes and further
    errors as `gmm`. existing_out is added to the float32 sums.
    """
    group_offset, sizes = scalar(group_offset), values(group_sizes)
    p = check_tgmm(lhs, rhs, group_sizes, group_offset, num_actual_groups, existing_out, preferred_element_type, sizes)
    tensors = {"lhs": lhs, "rhs": rhs, "group_sizes": group_sizes, "existing_out": existing_out}
    check_devices(tensors | {"group_offset": group_offset})
    return _tgmm(p, lhs, rhs, group_sizes, group_offset, existing_out, tiling, getattr(torch, p.out_dtype))


@bfloat16_as_float32_where_interpreted()
def _gmm(
    p: Problem,
    lhs: Tensor,
    rhs: Tensor,
    group_sizes: Tensor,
    group_offset: int | Tensor,
    existing_out: Tensor | None,
    tiling: Tiling | None,
    out_dtype: torch.dtype,
) -> Tensor:
    """`gmm` of checked arguments: rhs as [G, K, N] whatever its layout."""
    tile = gmm_tile(p, lhs.element_size(), tiling)
    launch = partial(gmm_launch, p, tile, lhs, rhs, existing_out)
    return product_of_rows(p, tile.m, group_sizes, group_offset, existing_out, out_dtype, launch)


@bfloat16_as_float32_where_interpreted()
def _tgmm(
    p: Problem,
    lhs: Tensor,
    rhs: Tensor,
    group_sizes: Tensor,
    group_offset: int | Tensor,
    existing_out: Tensor | None,
    tiling: Tiling | None,
    out_dtype: torch.dtype,
) -> Tensor:
    """`tgmm` of checked arguments."""
    tile = tgmm_tile(p, lhs.element_size(), tiling)
    launch = partial(tgmm_launch, p, tile, lhs, rhs, existing_out)
    return product_of_groups(p, group_sizes, group_offset, out_dtype, launch)


def gmm_tile(p: Problem, element_size: int, tiling: Tiling | None = None) -> Tile:
    """(tm, tk, tn) of `gmm`: the caller's, else the first of GMM_TILES whose tm an average group fills."""
    table = first_filled(GMM_TILES[element_size], p)
    return fitted(resolve_tiling(tiling, table, p.m, p.k, p.n), p)


def tgmm_tile(p: Problem, element_size: int, tiling: Tiling | None = None) -> Tile:
    """(tm, tk, tn) of `tgmm`: the caller's, else the first of TGMM_TILES, its output tile no larger than the output."""
    tile = TGMM_TILES[element_size][0]
    return fitted(resolve_tiling(tiling, lambda m, k, n: tile, p.m, p.k, p.n), p)


def gmm_launch(
    p: Problem,
    tile: Tile,
    lhs: Tensor,
    rhs: Tensor,
    existing_out: Tensor | None,
    out: Tensor,
    metadata: GroupMetadata,
    group_offset: Tensor,
) -> Launch:
    """The main kernel of `gmm`: rhs as [G, K, N] whatever its layout, group_offset on the device."""
    arguments = {
        "lhs": operand(lhs),
        "rhs": operand(rhs),
        **arguments_of_rows(p, tile, existing_out, out, metadata, group_offset),
    }
    options = launch_options(tile.m, tile.k, tile.n, lhs.element_size())
    return Launch(_gmm_kernel, grid_of_rows(p, tile), arguments, options)


def tgmm_launch(
    p: Problem,
    tile: Tile,
    lhs: Tensor,
    rhs: Tensor,
    existing_out: Tensor | None,
    out: Tensor,
    group_sizes: Tensor,
    group_offset: Tensor,
) -> Launch:
    """The kernel of `tgmm`, group_sizes contiguous and group_offset on the device."""
    arguments = {
        "lhs": operand(lhs, transposed=True),
        "rhs": operand(rhs),
        **arguments_of_groups(p, tile, existing_out, out, group_sizes, group_offset),
    }
    options = launch_options(tile.k, tile.m, tile.n, lhs.element_size())
    return Launch(_tgmm_kernel, grid_of_groups(p, tile), arguments, options)


@triton.jit
def _gmm_kernel(
    lhs,
    rhs,
    existing_out,
    out,
    metadata,
    shard,
    sizes,
    TILE: tl.constexpr,
    EVEN_K: tl.constexpr,
):
    """One program per (visit, column tile), in bands. It stores its group's rows of the row tile; the first visit of a
    tile also stores the rows of no active group, so that every row is stored exactly once."""
    nth, tile_n = visit_of_program(sizes.n, TILE.n)
    if nth >= tl.load(metadata.num_visits):
        return
    visit = load_visit(nth, metadata, shard)
    region = region_of_visit(visit, tile_n, sizes, TILE)
    a_tile, b_tile, a_step, b_step = first_tiles(lhs, rhs, region, 0, TILE.k)
    sums = tl.full((TILE.m, TILE.n), 0.0, tl.float32)
    for first_k in range(0, region.end, TILE.k):
        a, b = load_step(a_tile, b_tile, region, first_k, TILE.k, True, EVEN_K)
        sums = tl.dot(a, b, sums, input_precision="ieee")
        if INTERPRETED:
            sums = probe("acc", sums, region.in_rows & region.in_columns, depth=TILE.k)
        a_tile += a_step
        b_tile += b_step
    store_rows(sums, out, existing_out, visit, region, sizes, shard)


@triton.jit
def _tgmm_kernel(
    lhs,
    rhs,
    existing_out,
    out,
    group_sizes,
    shard,
    sizes,
    TILE: tl.constexpr,
    EXPERTS_BLOCK: tl.constexpr,
):
    """One program per (group, output tile): the sum over the group's rows, in steps from its first row."""
    region = region_of_program(group_sizes, sizes, shard, TILE, EXPERTS_BLOCK)
    # lhs is read transposed by its addresses: tl.trans next to a wgmma has been miscompiled (Triton before 3.7.1).
    a_tile, b_tile, a_step, b_step = first_tiles(lhs, rhs, region, region.start.to(tl.int64), TILE.m)
    sums = tl.full((TILE.k, TILE.n), 0.0, tl.float32)
    for first_row in range(region.start, region.end, TILE.m):
        a, b = load_step(a_tile, b_tile, region, first_row, TILE.m, True, False)
        sums = tl.dot(a, b, sums, input_precision="ieee")
        if INTERPRETED:
            sums = probe("acc", sums, region.in_rows & region.in_columns, depth=TILE.m)
        a_tile += a_step
        b_tile += b_step
    store_group(sums, out, existing_out, region, sizes)
