"""A grouped matmul that is differentiable, and in fp8 on request: the definition, in float64."""

from typing import Any

import numpy as np

from cpu_golden import Array
from cpu_golden._lib.arguments import one_tile, scalar, values
from cpu_golden._lib.fp8 import by_columns, by_rows, padded, weights
from cpu_golden._lib.visits import active_groups
from cpu_golden.gmm import gmm, tgmm
from cpu_golden.quantized_gmm import gmm_quantized, tgmm_quantized
from cpu_golden.stages import Stages, exact
from op_arguments import Tiling, resolve_tiling
from op_arguments.gmm import Problem, check_gmm
from op_arguments.grouped_dense import Grads, check_dout, check_quantize_options

Quantize = bool | str


def grouped_dense(
    lhs: Array,
    rhs: Array,
    group_sizes: Array,
    existing_out: Array | None = None,
    *,
    group_offset: int = 0,
    transpose_rhs: bool = False,
    quantize: Quantize = "auto",
    bwd_quantize: Quantize = "auto",
    block_size: int | None = 128,
    preferred_element_type: Any = None,
    tiling: Tiling | None = None,
    stages: Stages = exact,
) -> Array:
    """`gmm`, differentiable in lhs, rhs and existing_out, with its operands quantised to e4m3 on request.

    Arguments, result and errors as `gmm` (float64 [M, N] here). quantize: multiply in fp8, lhs with one scale per row
    and `block_size` elements of K, rhs with one per block_size x block_size elements (None: whole axes), the recipe
    of DeepSeek-V3 (arXiv:2412.19437, section 3.3). bwd_quantize: the same for the two matmuls of the backward pass:
    dout by rows and blocks of N for lhs's gradient, by columns and global blocks of M for rhs's. "auto" quantises
    where the matrix unit multiplies fp8 natively, which a golden's host does not. block_size must divide K and N
    where anything is quantised; M need not be a multiple of it. tiling: (tm, tk, tn) of this pass, whose backward
    matmuls take (tm, tn, tk) and (tm, tk, tn), or a look-up (m, k, n) that is asked for each of them.
    Stages and sites as `gmm` or `gmm_quantized`.
    """
    check_quantize_options(quantize, bwd_quantize, block_size)
    p = _check(lhs, rhs, group_sizes, existing_out, group_offset, transpose_rhs, preferred_element_type)
    arguments: dict[str, Any] = {
        "group_offset": group_offset,
        "existing_out": existing_out,
        "transpose_rhs": transpose_rhs,
        "preferred_element_type": p.out_dtype,
        "tiling": tiling,
        "stages": stages,
    }
    if quantize is not True:
        return gmm(lhs, rhs, group_sizes, **arguments)
    return gmm_quantized(*by_rows(lhs, block_size), *weights(rhs, block_size), group_sizes, **arguments)


def grouped_dense_bwd(
    lhs: Array,
    rhs: Array,
    group_sizes: Array,
    dout: Array,
    existing_out: Array | None = None,
    *,
    group_offset: int = 0,
    transpose_rhs: bool = False,
    quantize: Quantize = "auto",
    bwd_quantize: Quantize = "auto",
    block_size: int | None = 128,
    preferred_element_type: Any = None,
    tiling: Tiling | None = None,
    stages: Stages = exact,
) -> Grads:
    """The gradients of `grouped_dense` in lhs, rhs and existing_out, for a gradient dout [M, N] of its result.

    Where anything is quantised the residuals are fp8 pairs, so the gradients are those of the quantised operands:
    lhs by columns, with one scale per `block_size` rows, and rhs as in the forward pass. Returns float64 gradients
    shaped as the primals: zero for rows of no active group (lhs), for empty groups (rhs) and for rows that were
    overwritten (existing_out).
    Stages: depth. Sites as `gmm` and `tgmm` or `gmm_quantized` and `tgmm_quantized`, but for the running sums, which
    are at dlhs and drhs.
    """
    check_quantize_options(quantize, bwd_quantize, block_size)
    p = _check(lhs, rhs, group_sizes, existing_out, group_offset, transpose_rhs, preferred_element_type)
    check_dout(dout, p, exact=True)
    groups = rhs.shape[0]
    left, right = (dout, lhs) if transpose_rhs else (lhs, dout)
    swapped = tiling
    if not (tiling is None or callable(tiling)):
        tm, tk, tn = resolve_tiling(tiling, one_tile, p.m, p.k, p.n)
        swapped = tm, tn, tk
    by_gmm: dict[str, Any] = {
        "group_offset": group_offset,
        "transpose_rhs": not transpose_rhs,
        "tiling": swapped,
        "stages": stages.renamed(acc="dlhs"),
    }
    by_tgmm: dict[str, Any] = {
        "group_offset": group_offset,
        "num_actual_groups": groups,
        "tiling": swapped if transpose_rhs else tiling,
        "stages": stages.renamed(acc="drhs"),
    }
    if quantize is not True and bwd_quantize is not True:
        # dout has the dtype of the result, which need not be that of lhs and rhs.
        dlhs = gmm(*_exactly(dout, rhs), group_sizes, **by_gmm)
        drhs = tgmm(*_exactly(left, right), group_sizes, **by_tgmm)
    else:
        dout_rows: tuple[Any, Any] = (dout, None)
        dout_columns: tuple[Any, Any] = (padded(dout, block_size), None)
        if bwd_quantize is True:
            dout_rows, dout_columns = by_rows(dout, block_size), by_columns(dout, block_size)
        dlhs = gmm_quantized(*dout_rows, *weights(rhs, block_size), group_sizes, **by_gmm)
        saved = by_columns(lhs, block_size)
        pairs = (dout_columns, saved) if transpose_rhs else (saved, dout_columns)
        drhs = tgmm_quantized(*pairs[0], *pairs[1], group_sizes, **by_tgmm)
    if existing_out is None:
        return Grads(dlhs, drhs, None)
    passed = dout.astype(np.float64)
    for _, rows in active_groups(group_sizes, group_offset, groups):
        passed[rows] = 0.0
    return Grads(dlhs, drhs, passed)


def _check(
    lhs: Array,
    rhs: Array,
    group_sizes: Array,
    existing_out: Array | None,
    group_offset: Any,
    transpose_rhs: bool,
    preferred_element_type: Any,
) -> Problem:
    offset, sizes = scalar(group_offset), values(group_sizes)
    return check_gmm(
        lhs, rhs, group_sizes, offset, existing_out, transpose_rhs, preferred_element_type, sizes, exact=True
    )


def _exactly(a: Array, b: Array) -> tuple[Array, Array]:
    return a.astype(np.float64), b.astype(np.float64)
