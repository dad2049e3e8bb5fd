"""Grouped matrix multiplication of block-scaled operands: the definition, in float64.

A quantised operand is a pair (qvalue, scale) as `cpu_golden/quantize.py` makes them; None for the scale means that
the operand is not quantised. Groups and shards are those of `cpu_golden/gmm.py`.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np

from cpu_golden import Array
from cpu_golden._lib.arguments import groups_of, one_tile
from cpu_golden._lib.scales import expand
from cpu_golden._lib.visits import active_groups, out_before
from cpu_golden.gmm import gmm_definition, tgmm_definition
from cpu_golden.stages import Stages, exact
from op_arguments import resolve_tiling
from op_arguments.gmm import GmmOptions, TgmmOptions
from op_arguments.options import options_of
from op_arguments.quantize import Quantized, check_scale
from op_arguments.quantized_gmm import check_gmm_quantized, check_tgmm_quantized, check_tile


@dataclass(frozen=True, kw_only=True)
class _GmmOptions(GmmOptions):
    stages: Stages = exact


@dataclass(frozen=True, kw_only=True)
class _TgmmOptions(TgmmOptions):
    stages: Stages = exact


@options_of(_GmmOptions)
def gmm_quantized(
    lhs: Array, lhs_scale: Array | None, rhs: Array, rhs_scale: Array | None, group_sizes: Array, **options: Any
) -> Array:
    """`gmm` of operands with block scales: `out[m] = Σ_b (lhs[m, b] @ rhs[g, b]) · lhs_scale[m, b] · rhs_scale[g, b]`.

    lhs [M, K] and rhs [G, K, N] (or [G, N, K] with transpose_rhs) are fp8 (e4m3fn, e5m2, mixed or not), int8, or one
    of them float32, bfloat16 or float16, with None for its scale. Scales are float32 of the operand's rank, each axis
    dividing the operand's; along K their blocks are 32, 64, 128, 256, 512 or the whole axis, each operand's own.
    b runs over the shorter blocks of K. preferred_element_type: float32, bfloat16 or float16 (default: the
    unquantised lhs's dtype, else bfloat16); it is checked, and the float64 result left unrounded. group_sizes,
    options and errors as `gmm`; a `tiling` whose tk cuts a block is refused.
    Stages: depth (along K, within a block). Sites: lhs, rhs, partial, inner (a block's running sum: see `Stages.dot`),
    lhs_scale, rhs_scale, scale (the product of the two), scaled (a block's sum times it), acc (the running sum of
    these) and out.
    """
    o = _GmmOptions(**options)
    a, b, groups = Quantized(lhs, lhs_scale), Quantized(rhs, rhs_scale), groups_of(group_sizes, o.group_offset)
    p = check_gmm_quantized(a, b, groups, o.existing_out, o.transpose_rhs, o.preferred_element_type)
    _, tk, _ = resolve_tiling(o.tiling, one_tile, p.m, p.k, p.n)
    check_tile("tk", tk, p.block, p.k)
    a_scale, b_scale = _scale(lhs_scale, lhs.shape), _scale(rhs_scale, rhs.shape)
    out = out_before(o.existing_out, p.m, p.n)
    for group, rows in active_groups(group_sizes, groups.offset, p.groups):
        weights, b_s = (x[group].T if o.transpose_rhs else x[group] for x in (rhs, b_scale))
        out[rows] = _staged_blocks(lhs[rows], a_scale[rows], weights, b_s, 0, p.block, o.stages)
    return o.stages("out", out)


@options_of(_TgmmOptions)
def tgmm_quantized(
    lhs: Array, lhs_scale: Array | None, rhs: Array, rhs_scale: Array | None, group_sizes: Array, **options: Any
) -> Array:
    """`tgmm` of operands with block scales: `out[g] = Σ_b (lhs[b].T @ rhs[b]) · lhs_scale[b] · rhs_scale[b]`.

    lhs [M, K] and rhs [M, N] and their scales as in `gmm_quantized`, blocks of the contraction now along M. Blocks
    are those of all M rows: a group that begins inside one uses that block's scale for its part of it. existing_out
    [G, K, N] is added. Everything else as `tgmm`; a `tiling` whose tm cuts a block is refused.
    Stages and sites as `gmm_quantized`, depth along M.
    """
    o = _TgmmOptions(**options)
    a, b, groups = Quantized(lhs, lhs_scale), Quantized(rhs, rhs_scale), groups_of(group_sizes, o.group_offset)
    p = check_tgmm_quantized(a, b, groups, o.num_actual_groups, o.existing_out, o.preferred_element_type)
    tm, _, _ = resolve_tiling(o.tiling, one_tile, p.m, p.k, p.n)
    check_tile("tm", tm, p.block, p.m)
    a_scale, b_scale = _scale(lhs_scale, lhs.shape), _scale(rhs_scale, rhs.shape)
    out = out_before(o.existing_out, p.groups, p.k, p.n)
    for group, rows in active_groups(group_sizes, groups.offset, p.groups):
        out[group] += _staged_blocks(
            lhs[rows].T, a_scale[rows].T, rhs[rows], b_scale[rows], rows.start, p.block, o.stages
        )
    return o.stages("out", out)


def gmm_quantized_definition(
    lhs: Array, lhs_scale: Array | None, rhs: Array, rhs_scale: Array | None, group_sizes: Array, **options: Any
) -> Array:
    """`gmm_definition` of the dequantised operands; options are its."""
    return gmm_definition(_dequantized(lhs, lhs_scale), _dequantized(rhs, rhs_scale), group_sizes, **options)


def tgmm_quantized_definition(
    lhs: Array, lhs_scale: Array | None, rhs: Array, rhs_scale: Array | None, group_sizes: Array, **options: Any
) -> Array:
    """`tgmm_definition` of the dequantised operands; options are its."""
    return tgmm_definition(_dequantized(lhs, lhs_scale), _dequantized(rhs, rhs_scale), group_sizes, **options)


def _staged_blocks(
    a: Array,
    a_scale: Array,
    b: Array,
    b_scale: Array,
    start: int,
    block: int,
    stages: Stages,
) -> Array:
    """a [I, J] @ b [J, L] with their scales, block by block as the kernels do; J begins at `start` of its blocks."""
    a, b = a.astype(np.float64), b.astype(np.float64)
    acc = np.zeros((a.shape[0], b.shape[1]))
    first, end, block = 0, a.shape[1], min(block, stages.tile or block)
    while first < end:
        last = min(first + block - (start + first) % block, end)
        inner = stages.dot(a[:, first:last], b[first:last], running="inner")
        # No scale changes within a block: that of its first element is that of all.
        scales = stages("lhs_scale", a_scale[:, first, None]), stages("rhs_scale", b_scale[None, first])
        scale = stages("scale", scales[0] * scales[1])
        acc = stages("acc", acc + stages("scaled", inner * scale))
        first = last
    return acc


def _scale(scale: Array | None, shape: tuple[int, ...]) -> Array:
    """The scale of every element of an operand, a view of 1 where there is none."""
    return np.broadcast_to(1.0, shape) if scale is None else expand(scale, check_scale("scale", scale, "qvalue", shape))


def _dequantized(qvalue: Array, scale: Array | None) -> Array:
    return qvalue.astype(np.float64) * _scale(scale, qvalue.shape)
