"""Grouped matrix multiplication of block-scaled operands: the definition, in float64.

A quantised operand is a pair (qvalue, scale) as `cpu_golden/quantize.py` makes them; None for the scale means that
the operand is not quantised. Groups and shards are those of `cpu_golden/gmm.py`.
"""

from dataclasses import dataclass, replace
from typing import Any, NamedTuple

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
    Stages: depth (along K, within a block), narrow. Sites: lhs, rhs, partial, inner (a block's running sum: see
    `Stages.dot`), lhs_scale, rhs_scale, scale (the product of the two), scaled (a block's sum times it), acc (the
    running sum of these) and out.
    """
    o = _GmmOptions(**options)
    a, b, groups = Quantized(lhs, lhs_scale), Quantized(rhs, rhs_scale), groups_of(group_sizes, o.group_offset)
    p = check_gmm_quantized(a, b, groups, o.existing_out, o.transpose_rhs, o.preferred_element_type)
    check_tile("tk", resolve_tiling(o.tiling, one_tile, p.m, p.k, p.n)[1], p.block, p.k)
    wide_a, wide_b = _Operand.of(a), _Operand.of(b)
    out = out_before(o.existing_out, p.m, p.n)
    for group, rows in active_groups(group_sizes, groups.offset, p.groups):
        weights = wide_b.at(group)
        weights = weights.transposed if o.transpose_rhs else weights
        out[rows] = _staged_blocks(wide_a.at(rows), weights, 0, p.block, o.stages)
    return o.stages("out", out)


@options_of(_TgmmOptions)
def tgmm_quantized(
    lhs: Array, lhs_scale: Array | None, rhs: Array, rhs_scale: Array | None, group_sizes: Array, **options: Any
) -> Array:
    """`tgmm` of operands with block scales: `out[g] = Σ_b (lhs[b].T @ rhs[b]) · lhs_scale[b] · rhs_scale[b]`.

    lhs [M, K] and rhs [M, N] and their scales as in `gmm_quantized`, blocks of the contraction now along M. Blocks
    are those of all M rows: a group that begins inside one uses that block's scale for its part of it. existing_out
    [G, K, N] is added. Everything else as `tgmm`; a `tiling` whose tm cuts a block is refused.
    Stages and sites as `gmm_quantized`, depth along M, aligned, and never narrow.
    """
    o = _TgmmOptions(**options)
    a, b, groups = Quantized(lhs, lhs_scale), Quantized(rhs, rhs_scale), groups_of(group_sizes, o.group_offset)
    p = check_tgmm_quantized(a, b, groups, o.num_actual_groups, o.existing_out, o.preferred_element_type)
    check_tile("tm", resolve_tiling(o.tiling, one_tile, p.m, p.k, p.n)[0], p.block, p.m)
    wide_a, wide_b = _Operand.of(a), _Operand.of(b)
    stages = replace(o.stages, narrow=None)
    out = out_before(o.existing_out, p.groups, p.k, p.n)
    for group, rows in active_groups(group_sizes, groups.offset, p.groups):
        out[group] += _staged_blocks(wide_a.at(rows).transposed, wide_b.at(rows), rows.start, p.block, stages)
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


class _Operand(NamedTuple):
    """The values of an operand as they are, and the scale of each, in float64."""

    values: Array
    scale: Array

    @classmethod
    def of(cls, x: Quantized) -> "_Operand":
        """The whole of it; without a scale every one is 1."""
        shape = x.qvalue.shape
        if x.scale is None:
            return cls(x.qvalue, np.broadcast_to(1.0, shape))
        return cls(x.qvalue, expand(x.scale, check_scale("scale", x.scale, "qvalue", shape)))

    def at(self, rows: int | slice) -> "_Operand":
        """These rows of it, or the matrix of this group."""
        return _Operand(self.values[rows], self.scale[rows])

    @property
    def transposed(self) -> "_Operand":
        """Its transpose."""
        return _Operand(self.values.T, self.scale.T)


def _staged_blocks(lhs: _Operand, rhs: _Operand, start: int, block: int, stages: Stages) -> Array:
    """lhs [I, J] @ rhs [J, L] with their scales, block by block as kernels do; J begins at `start` of its blocks."""
    a, b = lhs.values.astype(np.float64), rhs.values.astype(np.float64)
    acc = np.zeros((a.shape[0], b.shape[1]))
    first, end, block = 0, a.shape[1], min(block, stages.tile or block)
    while first < end:
        into = (start + first) % block
        last = min(first + block - into, end)
        if stages.narrow is None:
            inner = stages.dot(a[:, first:last], b[first:last], running="inner", first=into if stages.aligned else 0)
        else:
            inner = stages("inner", stages.narrow(lhs.values[:, first:last], rhs.values[first:last]))
        # No scale changes within a block: that of its first element is that of all.
        scales = stages("lhs_scale", lhs.scale[:, first, None]), stages("rhs_scale", rhs.scale[None, first])
        scale = stages("scale", scales[0] * scales[1])
        acc = stages("acc", acc + stages("scaled", inner * scale))
        first = last
    return acc


def _dequantized(qvalue: Array, scale: Array | None) -> Array:
    x = _Operand.of(Quantized(qvalue, scale))
    return x.values.astype(np.float64) * x.scale
