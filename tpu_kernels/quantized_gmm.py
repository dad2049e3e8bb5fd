"""Grouped matrix multiplication of block-scaled operands on the TPU. Defined in `cpu_golden/quantized_gmm.py`.

Here is what is called and refused, and the tiles; the kernels are `_lib/scaled_gmm.py` and `_lib/scaled_tgmm.py`.
"""

from functools import partial
from typing import Any

import jax.numpy as jnp
from jax import Array

from op_arguments import resolve_tiling
from op_arguments.options import options_of
from op_arguments.quantize import Quantized
from op_arguments.quantized_gmm import check_gmm_quantized, check_tgmm_quantized, check_tile
from tpu_kernels._lib.arguments import GmmOptions, TgmmOptions, groups_of, resolve_interpret, shard_of
from tpu_kernels._lib.grids import Grid, Operands
from tpu_kernels._lib.narrow import are_narrow, widened_to
from tpu_kernels._lib.scaled_gmm import scaled_gmm
from tpu_kernels._lib.scaled_tgmm import scaled_tgmm
from tpu_kernels._lib.tiles import fit_tile, is_small, scaled_gmm_tiles, scaled_tgmm_tiles


@options_of(GmmOptions)
def gmm_quantized(
    lhs: Array, lhs_scale: Array | None, rhs: Array, rhs_scale: Array | None, group_sizes: Array, **options: Any
) -> Array:
    """`gmm` of operands with block scales: [M, N] in preferred_element_type.

    Arguments, result and errors as `cpu_golden.quantized_gmm.gmm_quantized`, options as those of `gmm`;
    here: a narrow operand beside a wide one is widened to its dtype. Sums are float32 of exact products, those of int8
    products int32 within a tile of a block (over all of K where no scale changes along it). What the matrix unit
    multiplies: `tpu_kernels._lib.chip.matmul_path`. On v5e, v5p and v6e scales of e4m3fn are infinite from 2^124 on: 16
    times them is what is used. Site for a probe: acc, the finished sums.
    """
    return gmm_quantized_onto(None, lhs, lhs_scale, rhs, rhs_scale, group_sizes, **options)


@options_of(GmmOptions)
def gmm_quantized_onto(
    addend: Array | None,
    lhs: Array,
    lhs_scale: Array | None,
    rhs: Array,
    rhs_scale: Array | None,
    group_sizes: Array,
    **options: Any,
) -> Array:
    """`gmm_quantized` that adds addend to its sums, as `gmm_onto`."""
    o = GmmOptions(**options)
    a, b, groups = Quantized(lhs, lhs_scale), Quantized(rhs, rhs_scale), groups_of(group_sizes, o.group_offset)
    p = check_gmm_quantized(a, b, groups, o.existing_out, o.transpose_rhs, o.preferred_element_type)
    narrow = are_narrow(lhs, rhs)
    small, alone = narrow and is_small(p.out_dtype, o.existing_out, addend), narrow and o.existing_out is None
    tile = resolve_tiling(o.tiling, partial(scaled_gmm_tiles, p.block, small, alone, False), p.m, p.k, p.n)
    check_tile("tk", tile[1], p.block, p.k)
    grid = Grid(
        p, fit_tile(tile, p, jnp.int8), resolve_interpret(o.interpret, lhs), transpose_rhs=bool(o.transpose_rhs)
    )
    operands = Operands(lhs, rhs, lhs_scale, rhs_scale, existing_out=o.existing_out, addend=addend)
    return scaled_gmm(operands, shard_of(groups, p), grid=grid)


@options_of(TgmmOptions)
def tgmm_quantized(
    lhs: Array, lhs_scale: Array | None, rhs: Array, rhs_scale: Array | None, group_sizes: Array, **options: Any
) -> Array:
    """`tgmm` of operands with block scales: [G, K, N] in preferred_element_type.

    Arguments, result and errors as `cpu_golden.quantized_gmm.tgmm_quantized`; all else as `gmm_quantized`.
    """
    o = TgmmOptions(**options)
    a, b, groups = Quantized(lhs, lhs_scale), Quantized(rhs, rhs_scale), groups_of(group_sizes, o.group_offset)
    p = check_tgmm_quantized(a, b, groups, o.num_actual_groups, o.existing_out, o.preferred_element_type)
    narrow = are_narrow(lhs, rhs)
    # What is widened and scaled part by part leaves no room for more columns.
    small = narrow and is_small(p.out_dtype, o.existing_out) and (p.block >= p.m or widened_to(lhs, rhs) is None)
    tile = resolve_tiling(o.tiling, partial(scaled_tgmm_tiles, narrow, small), p.m, p.k, p.n)
    check_tile("tm", tile[0], p.block, p.m)
    grid = Grid(p, fit_tile(tile, p, jnp.int8), resolve_interpret(o.interpret, lhs), contracting=True)
    return scaled_tgmm(
        Operands(lhs, rhs, lhs_scale, rhs_scale, existing_out=o.existing_out), shard_of(groups, p), grid=grid
    )
