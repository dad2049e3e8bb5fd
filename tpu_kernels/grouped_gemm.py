"""Grouped matrix multiplication of MXFP8 operands on the TPU. Defined in `cpu_golden/grouped_gemm.py`.

No TPU multiplies MXFP8: its scales are powers of two, which multiply the operands, in bfloat16, before the dot. The
kernels are those of `quantized_gmm`.
"""

from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from op_arguments import resolve_tiling
from op_arguments.grouped_gemm import GroupedGemmOptions, Support, check_grouped_gemm, check_strict
from op_arguments.mxfp8 import MX_BLOCK, check_mxfp8_tile, mxfp8_dot_dtype
from op_arguments.options import options_of
from op_arguments.quantized_gmm import QuantizedProblem
from tpu_kernels._lib.arguments import Interpret, groups_of, resolve_interpret, shard_of
from tpu_kernels._lib.chip import sublanes
from tpu_kernels._lib.grids import Grid, Operands
from tpu_kernels._lib.narrow import are_narrow
from tpu_kernels._lib.scaled_gmm import scaled_gmm
from tpu_kernels._lib.scaled_tgmm import scaled_tgmm
from tpu_kernels._lib.tiles import Tile, fit_tile, is_small, scaled_gmm_tiles, scaled_tgmm_tiles
from tpu_kernels.gmm import gmm_onto, tgmm
from tpu_kernels.mxfp8 import mxfp8_dequantize
from tpu_kernels.swizzle import unswizzle_scales


@dataclass(frozen=True, kw_only=True)
class _Options(GroupedGemmOptions):
    strict: bool = False
    interpret: Interpret = None


@options_of(_Options)
def grouped_gemm(lhs: jax.Array, rhs: jax.Array, group_sizes: jax.Array, **options: Any) -> jax.Array:
    """Grouped matmul of MXFP8 operands: forward and the data's gradient (ragged="lhs"), the weights' ("contracting").

    Arguments, result and errors as `cpu_golden.grouped_gemm.grouped_gemm`, group_offset, tiling and interpret as
    `gmm`; here: sums are float32 of exact products of bfloat16. qvalue times scale is one, but at the ends of its
    exponent range: there 2^128 and beyond is ±inf, what is below 2^-126 is ±0, and so is all of a block whose scale is
    2^-127, itself subnormal: no value of it reaches 2^-118 (e5m2: 2^-111). Which path is taken, and why:
    `grouped_gemm_support`; strict=True refuses a fallback. Sites for a probe as `gmm_quantized`.
    """
    return grouped_gemm_onto(None, lhs, rhs, group_sizes, **options)


@options_of(_Options)
def grouped_gemm_onto(
    addend: jax.Array | None, lhs: jax.Array, rhs: jax.Array, group_sizes: jax.Array, **options: Any
) -> jax.Array:
    """`grouped_gemm` with ragged="lhs" that adds addend to its sums, as `gmm_onto`."""
    o = _Options(**options)
    groups = groups_of(group_sizes, o.group_offset)
    p = check_grouped_gemm(lhs, rhs, groups, o)
    support = grouped_gemm_support(lhs.dtype, rhs.dtype, scale_layout=o.scale_layout)
    check_strict(support, o.strict)
    lhs_scale, rhs_scale = o.lhs_scale, o.rhs_scale
    if o.swizzled:
        lhs_axis, rhs_axis = o.summed_axes
        lhs_scale = _unswizzled(lhs_scale, lhs.shape, lhs_axis)
        rhs_scale = _unswizzled(rhs_scale, rhs.shape, rhs_axis)
    if support.path != "bfloat16":
        lhs, rhs = (
            operand if scale is None else mxfp8_dequantize(operand, scale, interpret=o.interpret)
            for operand, scale in ((lhs, lhs_scale), (rhs, rhs_scale))
        )
        shared: dict[str, Any] = {
            "group_offset": groups.offset,
            "existing_out": o.existing_out,
            "preferred_element_type": p.out_dtype,
            "tiling": o.tiling,
            "interpret": o.interpret,
        }
        if o.contracting:
            return tgmm(lhs, rhs, group_sizes, num_actual_groups=o.num_actual_groups, **shared)
        return gmm_onto(addend, lhs, rhs, group_sizes, transpose_rhs=o.transpose_rhs, **shared)
    summed = max(p.m if o.contracting else p.k, 1)
    problem = QuantizedProblem(**vars(p), block=summed, lhs_blocks=tuple(lhs.shape), rhs_blocks=tuple(rhs.shape))
    tile = _tile(o, problem, are_narrow(lhs, rhs), addend)
    grid = Grid(problem, tile, resolve_interpret(o.interpret, lhs), o.contracting, bool(o.transpose_rhs))
    operands = Operands(lhs, rhs, lhs_scale, rhs_scale, existing_out=o.existing_out, addend=addend)
    multiply = scaled_tgmm if o.contracting else scaled_gmm
    return multiply(operands, shard_of(groups, p), grid=grid)


def _tile(o: _Options, p: QuantizedProblem, narrow: bool, addend: jax.Array | None) -> Tile:
    """The tile of a call; narrow: see the tables."""
    if o.contracting:  # its scales, made bfloat16, leave no room for more columns
        table = partial(scaled_tgmm_tiles, narrow, False)
    else:
        small, alone = narrow and is_small(p.out_dtype, o.existing_out, addend), narrow and o.existing_out is None
        table = partial(scaled_gmm_tiles, p.block, small, alone, True)
    tile = resolve_tiling(o.tiling, table, p.m, p.k, p.n)
    check_mxfp8_tile("tm" if o.contracting else "tk", tile[0 if o.contracting else 1], p.block)
    # A tile of the powers has whole registers too: 8 rows of them are 256 of an operand.
    rows = 8 * MX_BLOCK if o.contracting else sublanes(jnp.int8)
    tm = min(pl.cdiv(tile[0], rows) * rows, pl.cdiv(p.m, MX_BLOCK) * MX_BLOCK)
    return tm, *fit_tile(tile, p, jnp.int8)[1:]


def grouped_gemm_support(lhs: Any, rhs: Any, *, scale_layout: str = "plain") -> Support:
    """How `grouped_gemm` multiplies operands of these dtypes, whatever their shapes and the TPU; a pure function.

    Raises TypeError for two unlike dtypes neither of which is quantised.
    """
    dot = mxfp8_dot_dtype(lhs, rhs)
    quantised = dot == "mxfp8" or jnp.dtype(lhs) != jnp.dtype(rhs)
    if not quantised:
        return Support("unquantised", f"gmm and tgmm multiply {dot}", False)
    if dot == "float32":
        return Support("float32", "beside float32 an operand is dequantised to float32 in memory first", True)
    if scale_layout == "swizzled":
        return Support("bfloat16", "the scales are for a GPU's matrix unit, and are put in plain order first", True)
    return Support("bfloat16", "no TPU multiplies MXFP8, which bfloat16 holds: dequantised in VMEM", False)


def _unswizzled(scale: jax.Array | None, shape: tuple[int, ...], axis: int) -> jax.Array | None:
    """The plain scales of an operand of `shape`, whose blocks lie along `axis`."""
    if scale is None:
        return None
    *_, rows = (size for a, size in enumerate(shape) if a != axis)
    return jnp.moveaxis(unswizzle_scales(scale, rows, pl.cdiv(shape[axis], MX_BLOCK)), -1, axis)
