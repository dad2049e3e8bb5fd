"""A grouped matmul that is differentiable, and in fp8 on request: the definition, in float64."""

from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from cpu_golden import Array
from cpu_golden._lib.arguments import groups_of
from cpu_golden._lib.pairs import by_columns, by_rows, padded, product, weight_product, weights
from cpu_golden._lib.visits import active_groups
from cpu_golden.stages import Stages, exact
from op_arguments.gmm import Problem, check_gmm
from op_arguments.grouped_dense import DenseOptions, Grads, check_dout
from op_arguments.options import options_of
from op_arguments.quantize import Quantized


@dataclass(frozen=True, kw_only=True)
class _Options(DenseOptions):
    """As a golden has them; "auto" quantises nothing, as its host multiplies no fp8 natively."""

    group_offset: int = 0
    stages: Stages = exact


@options_of(_Options)
def grouped_dense(
    lhs: Array, rhs: Array, group_sizes: Array, existing_out: Array | None = None, **options: Any
) -> Array:
    """`gmm`, differentiable in lhs, rhs and existing_out, with its operands quantised to e4m3 on request.

    Arguments, result and errors as `gmm` (float64 [M, N] here); options: those of `DenseOptions`, group_offset
    and stages.
    Stages and sites as `gmm` or `gmm_quantized`.
    """
    o = _Options(**options)
    p = _check(o, lhs, rhs, group_sizes, existing_out)
    a, b = Quantized(lhs, None), Quantized(rhs, None)
    if o.quantize is True:
        a, b = by_rows(lhs, o.block_size), weights(rhs, o.block_size)
    shared = {"group_offset": o.group_offset, "existing_out": existing_out, "tiling": o.tiling, "stages": o.stages}
    own = {"transpose_rhs": o.transpose_rhs, "preferred_element_type": p.out_dtype}
    return product(a, b, group_sizes, **shared, **own)


@options_of(_Options)
def grouped_dense_bwd(
    lhs: Array, rhs: Array, group_sizes: Array, dout: Array, existing_out: Array | None = None, **options: Any
) -> Grads:
    """The gradients of `grouped_dense` in lhs, rhs and existing_out, for a gradient dout [M, N] of its result.

    Where anything is quantised the residuals are fp8 pairs, so the gradients are those of the quantised operands:
    lhs by columns, with one scale per `block_size` rows, and rhs as in the forward pass. Returns float64 gradients
    shaped as the primals: zero for rows of no active group (lhs), for empty groups (rhs) and for rows that were
    overwritten (existing_out).
    Stages: depth. Sites as `gmm` and `tgmm` or `gmm_quantized` and `tgmm_quantized`, but for the running sums, which
    are at dlhs and drhs.
    """
    o = _Options(**options)
    p = _check(o, lhs, rhs, group_sizes, existing_out)
    check_dout(dout, p, exact=True)
    kept, weight = Quantized(lhs, None), Quantized(rhs, None)
    by_row = by_column = Quantized(dout, None)
    if o.bwd_quantize is True:
        by_row, by_column = by_rows(dout, o.block_size), by_columns(dout, o.block_size)
    if o.quantize is True or o.bwd_quantize is True:
        kept, weight = by_columns(lhs, o.block_size), weights(rhs, o.block_size)
        if o.bwd_quantize is not True:
            by_column = Quantized(padded(dout, o.block_size), None)
    left, right, tiling = (by_column, kept, o.swapped_tiling) if o.transpose_rhs else (kept, by_column, o.tiling)
    groups = rhs.shape[0]
    stages = replace(o.stages, tile=None).renamed(acc="dlhs")
    by_gmm = {"transpose_rhs": not o.transpose_rhs, "tiling": o.swapped_tiling, "stages": stages}
    by_tgmm = {"num_actual_groups": groups, "tiling": tiling, "stages": o.stages.renamed(acc="drhs")}
    dlhs = product(by_row, weight, group_sizes, group_offset=o.group_offset, **by_gmm)
    drhs = weight_product(left, right, group_sizes, group_offset=o.group_offset, **by_tgmm)
    if existing_out is None:
        return Grads(dlhs, drhs, None)
    passed = dout.astype(np.float64)
    for _, rows in active_groups(group_sizes, o.group_offset, groups):
        passed[rows] = 0.0
    return Grads(dlhs, drhs, passed)


def _check(o: _Options, lhs: Array, rhs: Array, group_sizes: Array, existing_out: Array | None) -> Problem:
    groups = groups_of(group_sizes, o.group_offset)
    return check_gmm(lhs, rhs, groups, existing_out, o.transpose_rhs, o.preferred_element_type, exact=True)
