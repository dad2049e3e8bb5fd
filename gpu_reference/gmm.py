"""Grouped matrix multiplication (MoE layers) on the GPU, in Triton; the operations are defined in `cpu_golden/gmm.py`.

Nothing is read back from the device: `group_sizes` and `group_offset` stay where they are, the grid is sized by the
host for the worst case, and the calls can be captured in a CUDA graph. The values of CUDA tensors are therefore not
checked; sizes that are negative or too large are clamped inside the kernels and reach no memory outside the tensors.
Sums are float32 (operands in full precision: no TF32) and are rounded once, when they are stored.
"""
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators
# (kernel arguments are what Triton makes of them; every host function below is annotated)

import torch
import triton
import triton.language as tl
from torch import Tensor

from gpu_reference._lib.hardware import architecture
from gpu_reference._lib.launch import launch_options
from gpu_reference._lib.operands import groups_of, operand
from gpu_reference._lib.plans import Given, OfGroups, OfRows, product
from gpu_reference._lib.products import multiply_groups, multiply_rows
from gpu_reference._lib.tiles import LARGEST_TILE, Candidate, chosen, first_filled, fitted, step_of
from op_arguments import Tiling
from op_arguments.gmm import Problem, check_gmm, check_tgmm

GMM_TILES: dict[int, tuple[Candidate, ...]] = {
    2: ((128, 64, 256), (64, 64, 128), (32, 64, 128), (16, 128, 128)),
    4: ((128, 16, 128), (64, 32, 128), (32, 32, 128), (16, 64, 128)),
}
"""(tm, tk, tn) by bytes per operand element, largest first: the candidates of an autotuner. 16-bit operands run on
tensor cores, float32 as a chain of FMAs, whose unrolled steps must stay short to fit the registers of sm_80: no
tile spills more than a few words on sm_80 to sm_120. The default is the first whose tm an average group fills. 256
columns are 128 on all but sm_90 (`most_columns`)."""

TGMM_TILES: dict[int, tuple[Candidate, ...]] = {
    2: ((64, 128, 256), (32, 64, 128), (32, 64, 64)),
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
    over GMM_TILES. Each of the three becomes a power of two from 16 to 128 (tn `most_columns`), tk (of tgmm tm) no
    larger than a step's operands take 48 KiB of shared memory. Shown to a probe: the sums, at acc.
    Also raises ValueError for tensors on several devices, and RuntimeError for CPU tensors where Triton's interpreter
    is off.
    """
    groups = groups_of(group_sizes, group_offset)
    p = check_gmm(lhs, rhs, groups, existing_out, transpose_rhs, preferred_element_type)
    operands = {"lhs": lhs, "rhs": rhs.transpose(1, 2) if transpose_rhs else rhs}
    return product(gmm_plan, p, operands, Given(group_sizes, group_offset, existing_out, tiling))


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
    groups = groups_of(group_sizes, group_offset)
    p = check_tgmm(lhs, rhs, groups, num_actual_groups, existing_out, preferred_element_type)
    operands = {"lhs": lhs, "rhs": rhs}
    return product(tgmm_plan, p, operands, Given(group_sizes, group_offset, existing_out, tiling))


def gmm_plan(p: Problem, lhs: Tensor, rhs: Tensor, tiling: Tiling | None = None) -> OfRows:
    """`gmm` of rhs as [G, K, N] whatever its layout, by default with the first of GMM_TILES whose tm an average group
    fills."""
    size, target = lhs.element_size(), architecture(lhs.device)
    tile = fitted(chosen(tiling, first_filled(GMM_TILES[size], p), p), p, most_columns(size, target))
    tile = tile._replace(k=step_of(tile.m, tile.k, tile.n, size))
    options = launch_options(tile.m, tile.k, tile.n, size, target)
    return OfRows(_gmm_kernel, tile, {"lhs": operand(lhs), "rhs": operand(rhs)}, options)


def tgmm_plan(p: Problem, lhs: Tensor, rhs: Tensor, tiling: Tiling | None = None) -> OfGroups:
    """`tgmm`, by default with the first of TGMM_TILES, its output tile no larger than the output."""
    size, target = lhs.element_size(), architecture(lhs.device)
    tile = fitted(chosen(tiling, TGMM_TILES[size][0], p), p, most_columns(size, target))
    tile = tile._replace(m=step_of(tile.k, tile.m, tile.n, size))
    options = launch_options(tile.k, tile.m, tile.n, size, target)
    return OfGroups(_tgmm_kernel, tile, {"lhs": operand(lhs, transposed=True), "rhs": operand(rhs)}, options)


def most_columns(element_size: int, target: str | None) -> int:
    """How many columns a tile of 16-bit operands has at most on `target`: wgmma takes 256, and reads lhs half as often.

    On an H200 gmm is 1.1 times as fast with them as with 128, tgmm 1.25 times.
    """
    return 256 if target == "sm_90" and element_size == 2 else LARGEST_TILE


@triton.jit
def _gmm_kernel(lhs, rhs, task, TILE: tl.constexpr, EVEN_K: tl.constexpr):
    multiply_rows(lhs, rhs, task, TILE, EVEN_K, _added)


@triton.jit
def _tgmm_kernel(lhs, rhs, task, TILE: tl.constexpr, EXPERTS_BLOCK: tl.constexpr):
    multiply_groups(lhs, rhs, task, TILE, EXPERTS_BLOCK, _added)


@triton.jit
def _added(sums, a, b, lhs, rhs, region, first, SCALING: tl.constexpr):
    return tl.dot(a, b, sums, input_precision="ieee")
