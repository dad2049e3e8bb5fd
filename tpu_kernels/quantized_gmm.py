"""Grouped matrix multiplication of block-scaled operands on the TPU. Defined in `cpu_golden/quantized_gmm.py`.

The visits are those of `tpu_kernels/gmm.py`. Along the axis that is summed over a tile holds whole blocks of scales, or
lies in one: each block is a dot of its own, in the narrow type, and its float32 sums are multiplied by its scales as
they are added up. A scale that is the same for the whole axis multiplies the finished sums, once. Where the weights'
scale is the same for 128 columns, sums are made as their transpose: there one row of scales serves them all. MXFP8's
scales are powers of two, and multiply the operands, in bfloat16, before the dot.
"""

import math
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple, TypeGuard

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from op_arguments import Tiling, resolve_tiling
from op_arguments.debug import Debug
from op_arguments.quantize import E8M0, MX_BLOCK
from op_arguments.quantized_gmm import (
    QuantizedProblem,
    Support,
    check_gmm_quantized,
    check_grouped_gemm,
    check_mxfp8_tile,
    check_strict,
    check_tgmm_quantized,
    check_tile,
    mxfp8_dot_dtype,
)
from tpu_kernels._lib import chip
from tpu_kernels._lib.arguments import (
    Interpret,
    as_vector,
    concrete_values,
    kernel_dtype,
    kernel_operand,
    resolve_interpret,
    static_scalar,
)
from tpu_kernels._lib.chip import LANES, MXU, default_vmem, matmul_path, sublanes
from tpu_kernels._lib.products import blocks, dot, dot_depth
from tpu_kernels._lib.tiles import Tile, even_step, fit_tile, is_small
from tpu_kernels._lib.visits import (
    COPY_ROWS,
    Visits,
    copy_own_rows,
    for_row_blocks,
    is_own_row,
    list_visits,
    row_block,
)
from tpu_kernels.gmm import gmm, tgmm
from tpu_kernels.mxfp8 import mxfp8_dequantize, unswizzle_scales

SUBLANES = sublanes(jnp.int8)
PARTS = 16
WIDENED_ROWS = 64  # at a time, so that they stay in registers
WIDENING, WIDENING_POWERS = 3, 5  # blocks of columns whose products hide, on v6e, that lhs is widened; with powers
STRIPS = 4  # of 128 rows, that are stored in straight-line code
TALL = 896  # rows of a dot that the matrix unit adds up by itself: of multiples of 128 the fastest in tgmm on tpu7x
E8M0_NAN, BFLOAT16_NAN = 0xFF, 0x7FC0
POWER_ROWS, POWER_COLUMNS = 256, 1024  # of a tile of MXFP8's scales when they are made bfloat16
EXACT_SUMS = 1024  # 127² · 1024 < 2^24: sums of so many int8 products are exact in float32


def gmm_quantized(
    lhs: jax.Array,
    lhs_scale: jax.Array | None,
    rhs: jax.Array,
    rhs_scale: jax.Array | None,
    group_sizes: jax.Array,
    *,
    group_offset: int | jax.Array = 0,
    existing_out: jax.Array | None = None,
    transpose_rhs: bool = False,
    preferred_element_type: Any = None,
    tiling: Tiling | None = None,
    interpret: Interpret = None,
    debug: Debug = None,
) -> jax.Array:
    """`gmm` of operands with block scales: `out[m] = Σ_b (lhs[m, b] @ rhs[g, b]) · lhs_scale[m, b] · rhs_scale[g, b]`.

    lhs [M, K] and rhs [G, K, N] (or [G, N, K] with transpose_rhs) are fp8 (e4m3fn, e5m2, mixed or not), int8, or one
    of them float32, bfloat16 or float16, with None for its scale; a narrow operand is then widened to its dtype.
    Scales are float32 of the operand's rank, each axis dividing the operand's; along K their blocks are 32, 64, 128,
    256, 512 or the whole axis, each operand's own. preferred_element_type: float32, bfloat16 or float16 (default: the
    unquantised lhs's dtype, else bfloat16). Sums are float32 of exact products, those of int8 products int32 within a
    tile of a block (over all of K where no scale changes along it). What the matrix unit multiplies:
    `tpu_kernels._lib.chip.matmul_path`. On v5e, v5p and v6e scales of e4m3fn are infinite from 2^124 on: 16 times them
    is what is used. A `tiling` whose tk cuts a block is refused. debug: see `op_arguments.debug`, of the finished
    sums at acc. Everything else as `gmm`.
    Raises ValueError or TypeError as `op_arguments.quantized_gmm.check_gmm_quantized`; values outside tracing only.
    """
    group_offset = static_scalar(group_offset)
    p = check_gmm_quantized(
        lhs,
        lhs_scale,
        rhs,
        rhs_scale,
        group_sizes,
        group_offset=group_offset,
        existing_out=existing_out,
        transpose_rhs=transpose_rhs,
        preferred_element_type=preferred_element_type,
        sizes=concrete_values(group_sizes),
    )
    small = _are_narrow(lhs, rhs) and is_small(existing_out, p.out_dtype)
    tile = resolve_tiling(tiling, partial(_gmm_tiles, p.block, small, False), p.m, p.k, p.n)
    check_tile("tk", tile[1], p.block, p.k)
    return _gmm_quantized(
        lhs,
        lhs_scale,
        rhs,
        rhs_scale,
        group_sizes,
        as_vector(group_offset, p.experts - p.groups),
        existing_out,
        problem=p,
        tile=fit_tile(tile, p, jnp.int8),
        transpose_rhs=bool(transpose_rhs),
        interpret=resolve_interpret(interpret),
        debug=debug,
    )


def tgmm_quantized(
    lhs: jax.Array,
    lhs_scale: jax.Array | None,
    rhs: jax.Array,
    rhs_scale: jax.Array | None,
    group_sizes: jax.Array,
    *,
    group_offset: int | jax.Array = 0,
    num_actual_groups: int | None = None,
    existing_out: jax.Array | None = None,
    preferred_element_type: Any = None,
    tiling: Tiling | None = None,
    interpret: Interpret = None,
    debug: Debug = None,
) -> jax.Array:
    """`tgmm` of operands with block scales: `out[g] = Σ_b (lhs[b].T @ rhs[b]) · lhs_scale[b] · rhs_scale[b]`.

    lhs [M, K] and rhs [M, N] and their scales as in `gmm_quantized`, blocks of the contraction now along M. Blocks are
    those of all M rows: a group that begins inside one uses that block's scale for its part of it. existing_out
    [G, K, N] is added. A `tiling` whose tm cuts a block is refused. Scales from 2^124 on and debug as in
    `gmm_quantized`, else all as `tgmm`.
    Raises ValueError or TypeError as `op_arguments.quantized_gmm.check_tgmm_quantized`; values outside tracing only.
    """
    group_offset = static_scalar(group_offset)
    p = check_tgmm_quantized(
        lhs,
        lhs_scale,
        rhs,
        rhs_scale,
        group_sizes,
        group_offset=group_offset,
        num_actual_groups=num_actual_groups,
        existing_out=existing_out,
        preferred_element_type=preferred_element_type,
        sizes=concrete_values(group_sizes),
    )
    narrow = _are_narrow(lhs, rhs)
    # What is widened and scaled part by part leaves no room for more columns.
    small = narrow and is_small(existing_out, p.out_dtype) and (p.block >= p.m or _widened(lhs, rhs) is None)
    tile = resolve_tiling(tiling, partial(_tgmm_tiles, narrow, small), p.m, p.k, p.n)
    check_tile("tm", tile[0], p.block, p.m)
    return _tgmm_quantized(
        lhs,
        lhs_scale,
        rhs,
        rhs_scale,
        group_sizes,
        as_vector(group_offset, p.experts - p.groups),
        existing_out,
        problem=p,
        tile=fit_tile(tile, p, jnp.int8),
        interpret=resolve_interpret(interpret),
        debug=debug,
    )


def grouped_gemm(
    lhs: jax.Array,
    rhs: jax.Array,
    group_sizes: jax.Array,
    *,
    lhs_scale: jax.Array | None = None,
    rhs_scale: jax.Array | None = None,
    ragged: str = "lhs",
    group_offset: int | jax.Array = 0,
    num_actual_groups: int | None = None,
    existing_out: jax.Array | None = None,
    transpose_rhs: bool = False,
    scale_layout: str = "plain",
    preferred_element_type: Any = None,
    tiling: Tiling | None = None,
    strict: bool = False,
    interpret: Interpret = None,
    debug: Debug = None,
) -> jax.Array:
    """Grouped matmul of MXFP8 operands: forward and the data's gradient (ragged="lhs"), the weights' ("contracting").

    ragged="lhs" is `gmm`: lhs [M, K], rhs [G, K, N] (or [G, N, K] with transpose_rhs), out [M, N], summed over K.
    ragged="contracting" is `tgmm`: lhs [M, K], rhs [M, N], out [G, K, N] of num_actual_groups groups, summed over each
    group's rows. An operand is float32 or bfloat16 (both alike where neither is quantised), with None for its scale,
    or fp8 (e4m3fn, e5m2, mixed or not) with a float8_e8m0fnu for every 32 elements of the axis that is summed over, as
    `mxfp8_quantize` along that axis gives them: K, or for "contracting" all M rows, where a group that begins inside
    32 rows uses their scale for its part of them, whatever its size. scale_layout="swizzled": both scales are
    `swizzle_scales` of these, with the axis of the blocks moved to the end.
    preferred_element_type: float32, bfloat16 or float16 (default: the unquantised lhs's dtype, else bfloat16).
    Sums are float32 of exact products of bfloat16: qvalue times scale is one, but at the ends of its exponent range.
    There 2^128 and beyond is ±inf, what is below 2^-126 is ±0, and so is all of a block whose scale is 2^-127, itself
    subnormal: no value of it reaches 2^-118 (e5m2: 2^-111). Which path is taken, and why: `grouped_gemm_support`;
    strict=True refuses a fallback. A `tiling` whose step along the sum cuts a block is refused. debug as in
    `gmm_quantized`. Everything else as `gmm` and `tgmm`.
    Raises ValueError or TypeError as `op_arguments.quantized_gmm.check_grouped_gemm`; values outside tracing only.
    """
    group_offset = static_scalar(group_offset)
    p = check_grouped_gemm(
        lhs,
        rhs,
        group_sizes,
        lhs_scale=lhs_scale,
        rhs_scale=rhs_scale,
        ragged=ragged,
        group_offset=group_offset,
        num_actual_groups=num_actual_groups,
        existing_out=existing_out,
        transpose_rhs=transpose_rhs,
        scale_layout=scale_layout,
        preferred_element_type=preferred_element_type,
        sizes=concrete_values(group_sizes),
    )
    support = grouped_gemm_support(lhs.dtype, rhs.dtype, scale_layout=scale_layout)
    check_strict(support, strict)
    contracting = ragged == "contracting"
    lhs_axis, rhs_axis = (0, 0) if contracting else (1, 2 if transpose_rhs else 1)
    if scale_layout == "swizzled":
        lhs_scale = _unswizzled(lhs_scale, lhs.shape, lhs_axis)
        rhs_scale = _unswizzled(rhs_scale, rhs.shape, rhs_axis)
    if support.path != "bfloat16":
        lhs, rhs = (
            operand if scale is None else mxfp8_dequantize(operand, scale, interpret=interpret)
            for operand, scale in ((lhs, lhs_scale), (rhs, rhs_scale))
        )
        shared: dict[str, Any] = {
            "group_offset": group_offset,
            "existing_out": existing_out,
            "preferred_element_type": p.out_dtype,
            "tiling": tiling,
            "interpret": interpret,
            "debug": debug,
        }
        if contracting:
            return tgmm(lhs, rhs, group_sizes, num_actual_groups=num_actual_groups, **shared)
        return gmm(lhs, rhs, group_sizes, transpose_rhs=transpose_rhs, **shared)
    summed = max(p.m if contracting else p.k, 1)
    problem = QuantizedProblem(*p, block=summed, lhs_blocks=tuple(lhs.shape), rhs_blocks=tuple(rhs.shape))
    small = _are_narrow(lhs, rhs) and is_small(existing_out, p.out_dtype)
    if contracting:  # its scales, made bfloat16, leave no room for more columns
        table = partial(_tgmm_tiles, _are_narrow(lhs, rhs), False)
    else:
        table = partial(_gmm_tiles, summed, small, True)
    tile = resolve_tiling(tiling, table, p.m, p.k, p.n)
    check_mxfp8_tile("tm" if contracting else "tk", tile[0 if contracting else 1], summed)
    # A tile of the powers has whole registers too: 8 rows of them are 256 of an operand.
    rows = 8 * MX_BLOCK if contracting else SUBLANES
    tm = min(pl.cdiv(tile[0], rows) * rows, pl.cdiv(p.m, MX_BLOCK) * MX_BLOCK)
    operands = (
        lhs,
        lhs_scale,
        rhs,
        rhs_scale,
        group_sizes,
        as_vector(group_offset, p.experts - p.groups),
        existing_out,
    )
    static: dict[str, Any] = {
        "problem": problem,
        "tile": (tm, *fit_tile(tile, problem, jnp.int8)[1:]),
        "interpret": resolve_interpret(interpret),
        "debug": debug,
    }
    if contracting:
        return _tgmm_quantized(*operands, **static)
    return _gmm_quantized(*operands, **static, transpose_rhs=bool(transpose_rhs))


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


# -------------------------------------------------------------------------------------------------------- tiles


def _are_narrow(lhs: jax.Array, rhs: jax.Array) -> bool:
    return lhs.dtype.itemsize == rhs.dtype.itemsize == 1


def _gmm_tiles(block: int, small: bool, mxfp8: bool, m: int, k: int, n: int) -> Tile:
    """As large as VMEM allows, as in `gmm`, but no more than PARTS blocks of scales: each is code of its own.

    small: there is room for more columns, in place of longer steps where scales are many (an operand is then scaled and
    fetched less often), and for more rows, which pay on v6e if scales are few, and for MXFP8: a step begins and ends
    with work under which nothing is multiplied.
    """
    if default_vmem() < 2**25:
        return 256, min(1024, PARTS * block), 512
    few = block >= MXU and not mxfp8
    tm = 1024 if small and (mxfp8 or few or chip.generation() > 6) else 512
    longest = min(1024 if small and not few and n > 512 else 2048, PARTS * block)
    tk = even_step(k, longest, max(block, MXU) if block < k else MXU)
    weights = 2**21 if small and not mxfp8 else 2**20
    return tm, tk, even_step(n, min(max(weights // tk // 512 * 512, 512), 2048))


def _tgmm_tiles(narrow: bool, small: bool, m: int, k: int, n: int) -> Tile:
    """As large an output block as VMEM allows, and twice as many rows where both operands are narrow.

    A step has costs that do not grow with its rows: the scales of whole columns, and results to store.
    small: there is room for twice the columns.
    """
    if default_vmem() < 2**25:
        return 512, 512, 512
    tm = 1024 if narrow else 512
    if k <= 512:
        return tm, 512, 2048
    return (tm, 2048, 512) if n <= 512 else (tm, 1024, even_step(n, 2048 if small else 1024))


# ------------------------------------------------------------------------------------------------------- scales


class _Scales(NamedTuple):
    """Scales as a kernel reads them, and which of them change along the axis that is summed over.

    Each is [..., parts, columns] with the tile's index along that axis, and others, in front: a tile has a row of
    scales for each of its parts, or a single one that multiplies the finished sums.
    """

    lhs: jax.Array | None
    rhs: jax.Array | None
    lhs_changes: bool
    rhs_changes: bool

    @property
    def change(self) -> bool:
        """Whether any changes along the axis that is summed over."""
        return self.lhs_changes or self.rhs_changes

    def read(self, lhs: Any | None, rhs: Any | None) -> tuple[tuple[Any | None, Any | None], ...]:
        """Of each operand, where a kernel finds the scales of a part, and those of the whole axis."""
        return tuple(
            (scale, None) if c else (None, scale) for scale, c in ((lhs, self.lhs_changes), (rhs, self.rhs_changes))
        )


def _repeat(scale: jax.Array, axis: int, size: int) -> jax.Array:
    """scale with `size` elements along an axis, each repeated."""
    return scale if scale.shape[axis] == size else jnp.repeat(scale, size // scale.shape[axis], axis)


def _pad(x: jax.Array, axis: int, size: int) -> jax.Array:
    widths = [(0, 0)] * x.ndim
    widths[axis] = (0, size - x.shape[axis])
    return jnp.pad(x, widths)


def _by_parts(scale: jax.Array, axis: int, size: int, tile: int, part: int) -> tuple[jax.Array, bool]:
    """scale with an axis of `size` split into (tiles, parts of a tile); (1, 1), and False, where it has one for all."""
    changes = scale.shape[axis] > 1
    tiles, parts = (pl.cdiv(size, tile), tile // part) if changes else (1, 1)
    if changes:
        scale = _pad(_repeat(scale, axis, size // part), axis, tiles * parts)
    return scale.reshape(*scale.shape[:axis], tiles, parts, *scale.shape[axis + 1 :]), changes


def _for_blocks(size: int, width: int, body: Callable[[Any], None]) -> None:
    """body of each slice of `width` that makes up an axis of `size`; in a loop, unless the last one is less."""
    if size <= width or size % width:
        for block in blocks(size, width):
            body(block)
    else:
        lax.fori_loop(0, size // width, lambda i, _: body(pl.ds(pl.multiple_of(i * width, width), width)), None)


def _gmm_scales(
    lhs_scale: jax.Array | None, rhs_scale: jax.Array | None, p: QuantizedProblem, tile: Tile, transpose_rhs: bool
) -> _Scales:
    """The scales of lhs [tiles of K, tiles of M, parts, tm] and those of rhs [G, tiles of K, parts, N]."""
    tm, tk, _ = tile
    part, tiles_m = min(p.block, tk), pl.cdiv(p.m, tm)
    lhs_changes = rhs_changes = False
    if lhs_scale is not None:
        lhs_scale, lhs_changes = _by_parts(_repeat(lhs_scale, 0, p.m), 1, p.k, tk, part)
        rows = _pad(lhs_scale.transpose(1, 2, 0), 2, tiles_m * tm)
        lhs_scale = rows.reshape(*rows.shape[:2], tiles_m, tm).swapaxes(1, 2)
    if rhs_scale is not None:
        by_columns = rhs_scale.swapaxes(1, 2) if transpose_rhs else rhs_scale
        by_columns = _repeat(_repeat(by_columns, 0, p.groups), 2, p.n)
        rhs_scale, rhs_changes = _by_parts(by_columns, 1, p.k, tk, part)
    return _Scales(lhs_scale, rhs_scale, lhs_changes, rhs_changes)


def _tgmm_scales(lhs_scale: jax.Array | None, rhs_scale: jax.Array | None, p: QuantizedProblem, tile: Tile) -> _Scales:
    """The scales of lhs [tiles of M, parts, K] and those of rhs [tiles of M, parts, N]."""
    tm = tile[0]
    part = min(p.block, tm)
    lhs_changes = rhs_changes = False
    if lhs_scale is not None:
        lhs_scale, lhs_changes = _by_parts(_repeat(lhs_scale, 1, p.k), 0, p.m, tm, part)
    if rhs_scale is not None:
        rhs_scale, rhs_changes = _by_parts(_repeat(rhs_scale, 1, p.n), 0, p.m, tm, part)
    return _Scales(lhs_scale, rhs_scale, lhs_changes, rhs_changes)


def _row(scale: Any | None, part: Any, columns: Any) -> jax.Array | None:
    """The scales [1, columns] of a part of a tile; None where there are none."""
    return None if scale is None else scale[pl.ds(part, 1), columns]


def _are_in_range(a: jax.Array, b: jax.Array) -> jax.Array:
    """Whether each product of two scales, of a and of b, is 0 or a normal number; without those that are not finite."""

    def ends(scale: jax.Array) -> tuple[jax.Array, jax.Array]:
        size = jnp.where(jnp.isfinite(scale) & (scale != 0), jnp.abs(scale), 1)
        return jnp.min(size), jnp.max(size)

    (least_a, most_a), (least_b, most_b) = ends(a), ends(b)
    return (least_a * least_b >= jnp.finfo(jnp.float32).tiny) & jnp.isfinite(most_a * most_b)


def _columns(row: jax.Array | None) -> jax.Array | None:
    """A row of scales [1, I], if any, as a column, in every lane [I, 128]: taken from there, none is broadcast."""
    return None if row is None else jnp.broadcast_to(row, (LANES, row.shape[1])).T


def _scaled(sums: jax.Array, columns: jax.Array | None, row: jax.Array | None) -> jax.Array:
    """sums [I, J] in float32, times a column of scales, given in every lane [I, 128], and a row [1, J] of them."""
    sums = sums.astype(jnp.float32)
    if columns is not None:
        width = sums.shape[1]
        sums *= jnp.concatenate([columns] * pl.cdiv(width, LANES), axis=1)[:, :width]
    if row is not None:
        sums *= row
    return sums


# ------------------------------------------------------------------------------------------------ powers of two


def _is_power(scale: jax.Array | None) -> TypeGuard[jax.Array]:
    """Whether a scale is MXFP8's, by which an operand is multiplied before the dot."""
    return scale is not None and scale.dtype == jnp.dtype(E8M0)


def _powers_in_lanes(scale: jax.Array, size: int, tile: int, interpret: bool | pltpu.InterpretParams) -> jax.Array:
    """float8_e8m0fnu [A, R, size / 32] in words [A, tiles of size, R / 4, lanes], each tile in whole registers.

    A word has those of four rows, so that one move along the lanes serves a whole 8-bit register: of 32 rows word i has
    2i, 16 + 2i, 2i + 1 and 17 + 2i, from the lowest byte on, which are a word each of two 16-bit registers.
    A row's sum is NaN whichever of its scales is: a tile's first one says so for all.
    """
    a, rows, count = scale.shape
    tiles, width = pl.cdiv(size, tile), pl.cdiv(tile, MX_BLOCK)
    lanes, height = pl.cdiv(width, LANES) * LANES, min(POWER_ROWS, pl.cdiv(rows, SUBLANES) * SUBLANES)

    def pack(powers: Any, out: Any) -> None:
        def pack_rows(own: Any) -> None:
            exponents = _exponents(powers[own, :])
            words = pl.ds(own.start // 4, SUBLANES // 4)
            for t in range(tiles):
                part = exponents[:, t * width : (t + 1) * width]
                is_nan = jnp.max(part, axis=1, keepdims=True) == E8M0_NAN
                is_first = lax.broadcasted_iota(jnp.int32, part.shape, 1) == 0
                part = jnp.where(is_nan & is_first, E8M0_NAN, part)
                pairs = part[: SUBLANES // 2] | part[SUBLANES // 2 :] << 8
                out[t, words, pl.ds(0, part.shape[1])] = pltpu.bitcast(pairs.astype(jnp.int16), jnp.int32)

        _for_blocks(height, SUBLANES, pack_rows)

    words = _words(rows)
    return pl.pallas_call(
        pack,
        out_shape=jax.ShapeDtypeStruct((a, tiles, words, lanes), jnp.int32),
        grid=(a, pl.cdiv(rows, height)),
        in_specs=[pl.BlockSpec((None, height, count), lambda a, i: (a, i, 0))],
        out_specs=pl.BlockSpec((None, tiles, _words(height), lanes), lambda a, i: (a, 0, i, 0)),
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel", "parallel")),
        cost_estimate=pl.CostEstimate(
            flops=4 * scale.size, transcendentals=0, bytes_accessed=scale.size + 4 * a * tiles * words * lanes
        ),
        interpret=interpret,
        name="powers_in_lanes",
    )(scale)


def _words(rows: int) -> int:
    """Rows of the words of `_powers_in_lanes` for rows of an operand."""
    return pl.cdiv(rows, SUBLANES) * SUBLANES // 4


def _powers_in_rows(scale: jax.Array, interpret: bool | pltpu.InterpretParams) -> jax.Array:
    """float8_e8m0fnu [A, blocks, C] in words [A, blocks, C], each twice: a row, repeated, is 32 rows of bfloat16."""
    a, count, columns = scale.shape
    height, width = min(POWER_ROWS, pl.cdiv(count, SUBLANES) * SUBLANES), min(POWER_COLUMNS, columns)

    def unpack(powers: Any, out: Any) -> None:
        def unpack_rows(own: Any) -> None:
            exponents = _exponents(powers[own, :])
            bits = jnp.where(exponents == E8M0_NAN, BFLOAT16_NAN, exponents << 7)
            out[own, :] = bits | bits << 16

        _for_blocks(height, SUBLANES, unpack_rows)

    tile = pl.BlockSpec((None, height, width), lambda a, i, j: (a, i, j))
    return pl.pallas_call(
        unpack,
        out_shape=jax.ShapeDtypeStruct(scale.shape, jnp.int32),
        grid=(a, pl.cdiv(count, height), pl.cdiv(columns, width)),
        in_specs=[tile],
        out_specs=tile,
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel",) * 3),
        cost_estimate=pl.CostEstimate(flops=4 * scale.size, transcendentals=0, bytes_accessed=5 * scale.size),
        interpret=interpret,
        name="powers_in_rows",
    )(scale)


def _exponents(powers: jax.Array) -> jax.Array:
    """The bits, as int32, of powers of two in float8_e8m0fnu: bfloat16's exponents of the same numbers."""
    return lax.bitcast_convert_type(powers, jnp.int8).astype(jnp.int32) & 0xFF


def _times_lanes(x: jax.Array, powers: Any, rows: Any, first: int) -> jax.Array:
    """x [R, C] in bfloat16 times the powers of these rows, as `_powers_in_lanes` has them, one for 32 columns.

    x begins at column first of the tile, a multiple of 128.
    """
    own = pl.ds(rows.start // 4, _words(rows.size))
    registers = pl.cdiv(rows.size, SUBLANES)
    products = []
    for columns in blocks(x.shape[1], LANES):
        lane = (first + columns.start) // MX_BLOCK
        words = powers[own, pl.ds(lane // LANES * LANES, LANES)]
        index = lane % LANES + lax.broadcasted_iota(jnp.int32, words.shape, 1) // MX_BLOCK
        words = jnp.take_along_axis(words, index, axis=1, mode="promise_in_bounds")
        halves = [pltpu.bitcast(bits & 0x7F807F80, jnp.bfloat16) for bits in (words << 7, words >> 1)]
        halves = [half.reshape(registers, SUBLANES // 2, LANES) for half in halves]
        wide = jnp.concatenate(halves, axis=1).reshape(registers * SUBLANES, LANES)[: x.shape[0], : columns.size]
        product = x[:, columns.start : columns.start + columns.size] * wide
        if lane == 0:
            product += wide - wide  # NaN's exponent is infinity's here
        products.append(product)
    return jnp.concatenate(products, axis=1)


def _times_rows(
    x: jax.Array, powers: Any, first: Any, columns: Any, is_own: Callable[[Any], jax.Array] | None = None
) -> jax.Array:
    """x [R, C] in bfloat16 times the powers of these columns, as `_powers_in_rows` has them, one for 32 rows.

    x begins at block first of the powers' axis. A block that is not is_own counts for nothing: it may have NaN.
    """
    spread = []
    for block, rows in enumerate(blocks(x.shape[0], MX_BLOCK)):
        words = powers[pl.ds(first + block, 1), columns]
        if is_own is not None:
            words = jnp.where(is_own(first + block), words, 0)
        wide = pltpu.bitcast(jnp.broadcast_to(words, (MX_BLOCK // 2, x.shape[1])), jnp.bfloat16)
        spread.append(wide[: rows.size])
    return x * jnp.concatenate(spread, axis=0)


# ----------------------------------------------------------------------------------------------------- products


def _unit(narrow: Any, wide: str) -> int:
    """What `_widen` divides numbers by.

    v5e, v5p and v6e have an instruction for e4m3b11fnuz, and not for e4m3fn. The same bits are 1/16 of the value there,
    and the operand's scales make up for it (`_of_units`).
    """
    return 16 if narrow == jnp.float8_e4m3fn and wide == "bfloat16" and chip.generation() in (5, 6) else 1


def _widen(x: jax.Array, dtype: Any) -> jax.Array:
    """x / `_unit` in a dtype that holds all its values. NaN stays NaN; the sign of a zero may be lost.

    The bits of e4m3fn mean the same multiple of a number in e4m3b11fnuz, but for those of NaN and -0: -0's bits are its
    NaN. So -0 becomes 0, and NaN, all ones but for the sign, becomes -0; of four elements at a time.
    """
    unit = _unit(x.dtype, jnp.dtype(dtype).name)
    if unit == 1:
        return x.astype(dtype)
    if x.shape[0] % SUBLANES:
        return x.astype(dtype) * jnp.asarray(1 / unit, dtype)
    bits = pltpu.bitcast(x, jnp.int32)
    magnitude = bits & 0x7F7F7F7F
    is_nan = lax.shift_right_logical(magnitude + 0x01010101, 7) & 0x01010101
    sign = bits & (magnitude + 0x7F7F7F7F) & ~0x7F7F7F7F  # of what is not 0
    return pltpu.bitcast((magnitude + is_nan) | sign, jnp.float8_e4m3b11fnuz).astype(dtype)


def _widen_whole(x: jax.Array) -> jax.Array:
    """x in bfloat16, where powers of two of its blocks are to follow: with a unit these might get too large."""
    unit = _unit(x.dtype, "bfloat16")
    return _widen(x, jnp.bfloat16) * jnp.bfloat16(unit) if unit > 1 else x.astype(jnp.bfloat16)


def _of_units(scale: jax.Array | None, narrow: jax.Array, path: str) -> jax.Array | None:
    """The scale of what is multiplied on a path, of an operand with this one."""
    unit = _unit(narrow.dtype, path)
    return scale if scale is None or unit == 1 else scale * unit


def _product(a: jax.Array, b: jax.Array, contract: tuple[int, int]) -> jax.Array:
    """Sums over axis `contract[0]` of a and `contract[1]` of b: int32 of two int8 operands, else float32."""
    path, _ = matmul_path(a.dtype, b.dtype, chip.generation())
    if path in ("fp8", "int8") and not (contract == (1, 1) and b.shape[0] == 1):
        axes = (((contract[0],), (contract[1],)), ((), ()))
        return lax.dot_general(a, b, axes, preferred_element_type=jnp.int32 if path == "int8" else jnp.float32)
    wide = jnp.dtype("bfloat16" if path in ("fp8", "int8") else path)
    if a.dtype != jnp.int8 or b.dtype != jnp.int8:
        return dot(_widen(a, wide), _widen(b, wide), contract)
    total = jnp.zeros((), jnp.int32)
    for part in blocks(a.shape[contract[0]], EXACT_SUMS):
        last = part.start + part.size
        x, y = (lax.slice_in_dim(o, part.start, last, axis=axis) for o, axis in zip((a, b), contract, strict=True))
        total += dot(x.astype(wide), y.astype(wide), contract).astype(jnp.int32)
    return total


def _product_path(lhs: jax.Array, rhs: jax.Array) -> str:
    return matmul_path(lhs.dtype, rhs.dtype, chip.generation())[0]


def _widened(lhs: jax.Array, rhs: jax.Array) -> Any | None:
    """What a kernel widens both operands to, once, before it multiplies; None where `_product` takes them as they are.

    That also widens, for each block of the result anew, which costs little for int8 alone.
    """
    path, _ = matmul_path(lhs.dtype, rhs.dtype, chip.generation())
    return None if path in ("fp8", "int8") or lhs.dtype == rhs.dtype == jnp.int8 else jnp.dtype(path)


def _sum_dtype(lhs: jax.Array, rhs: jax.Array, scales: _Scales) -> Any:
    """What sums are kept in from tile to tile."""
    exact = lhs.dtype == rhs.dtype == jnp.int8 and not scales.change
    return jnp.int32 if exact else jnp.float32


# ---------------------------------------------------------------------------------------------------------- gmm


@partial(jax.jit, static_argnames=("problem", "tile", "transpose_rhs", "interpret", "debug"))
def _gmm_quantized(
    lhs: jax.Array,
    lhs_scale: jax.Array | None,
    rhs: jax.Array,
    rhs_scale: jax.Array | None,
    group_sizes: jax.Array,
    group_offset: jax.Array,
    existing_out: jax.Array | None,
    *,
    problem: QuantizedProblem,
    tile: Tile,
    transpose_rhs: bool,
    interpret: bool | pltpu.InterpretParams,
    debug: Debug,
) -> jax.Array:
    p = problem
    if p.m == 0 or p.n == 0 or p.groups == 0:
        return jnp.zeros((p.m, p.n), p.out_dtype) if existing_out is None else existing_out
    tm, tk, tn = tile
    if p.k == 0:  # a sum over nothing is a sum over one zero
        p, tk = p._replace(k=1, block=1), 1
        lhs, lhs_scale, rhs_scale = jnp.zeros((p.m, 1), jnp.int8), None, None
        rhs = jnp.zeros((p.groups, p.n, 1) if transpose_rhs else (p.groups, 1, p.n), jnp.int8)

    part = min(p.block, tk)
    tiles_m, tiles_k, tiles_n = pl.cdiv(p.m, tm), pl.cdiv(p.k, tk), pl.cdiv(p.n, tn)
    visits, num_visits = list_visits(
        group_sizes, group_offset, m=p.m, tm=tm, num_groups=p.groups, cover="tiles", interpret=interpret
    )
    lhs_powers = rhs_powers = None
    if _is_power(lhs_scale):
        lhs_powers, lhs_scale = _powers_in_lanes(lhs_scale[None], p.k, tk, interpret)[0], None
    if _is_power(rhs_scale) and transpose_rhs:
        rhs_powers, rhs_scale = _powers_in_lanes(rhs_scale, p.k, tk, interpret), None
    elif _is_power(rhs_scale):
        rhs_powers, rhs_scale = _powers_in_rows(rhs_scale, interpret), None
    path = _product_path(lhs, rhs)
    lhs_scale, rhs_scale = _of_units(lhs_scale, lhs, path), _of_units(rhs_scale, rhs, path)
    scales = _gmm_scales(lhs_scale, rhs_scale, p, (tm, tk, tn), transpose_rhs)
    columns = p.rhs_blocks[1 if transpose_rhs else 2]
    turned = scales.lhs_changes and scales.rhs_changes and path in ("fp8", "int8")
    turned = turned and not (columns % LANES or tm % LANES or tn % LANES)
    scalars: dict[str, jax.Array] = {
        **visits._asdict(),
    }
    if turned and lhs_scale is not None and rhs_scale is not None:
        scalars["in_range"] = _are_in_range(lhs_scale, rhs_scale).astype(jnp.int32)[None]

    def lhs_block(n_i: Any, visit: Any, k_i: Any, group_ids: Any, tile_ids: Any, *_: Any) -> Any:
        return tile_ids[visit], k_i

    def lhs_scale_block(n_i: Any, visit: Any, k_i: Any, group_ids: Any, tile_ids: Any, *_: Any) -> Any:
        return k_i if scales.lhs_changes else 0, tile_ids[visit], 0, 0

    def rhs_block(n_i: Any, visit: Any, k_i: Any, group_ids: Any, tile_ids: Any, *_: Any) -> Any:
        return (group_ids[visit], n_i, k_i) if transpose_rhs else (group_ids[visit], k_i, n_i)

    def rhs_scale_block(n_i: Any, visit: Any, k_i: Any, group_ids: Any, tile_ids: Any, *_: Any) -> Any:
        return group_ids[visit], k_i if scales.rhs_changes else 0, 0, n_i

    def lhs_powers_block(n_i: Any, visit: Any, k_i: Any, group_ids: Any, tile_ids: Any, *_: Any) -> Any:
        return k_i, tile_ids[visit], 0

    def rhs_powers_block(n_i: Any, visit: Any, k_i: Any, group_ids: Any, tile_ids: Any, *_: Any) -> Any:
        return (group_ids[visit], k_i, n_i, 0) if transpose_rhs else (group_ids[visit], 0, n_i)

    def out_block(n_i: Any, visit: Any, k_i: Any, group_ids: Any, tile_ids: Any, *_: Any) -> Any:
        return tile_ids[visit], n_i

    operands: dict[str, tuple[jax.Array, Any, Any]] = {
        "lhs": (kernel_operand(lhs), (tm, tk), lhs_block),
        "rhs": (kernel_operand(rhs), (None, tn, tk) if transpose_rhs else (None, tk, tn), rhs_block),
    }
    if scales.lhs is not None:
        operands["lhs_scale"] = (scales.lhs, (None, None, scales.lhs.shape[2], tm), lhs_scale_block)
    if scales.rhs is not None:
        operands["rhs_scale"] = (scales.rhs, (None, None, scales.rhs.shape[2], tn), rhs_scale_block)
    if lhs_powers is not None:
        operands["lhs_powers"] = (lhs_powers, (None, _words(tm), lhs_powers.shape[2]), lhs_powers_block)
    if rhs_powers is not None:
        rows = (None, _words(tn)) if transpose_rhs else (rhs_powers.shape[1],)
        lanes = rhs_powers.shape[3] if transpose_rhs else tn
        operands["rhs_powers"] = (rhs_powers, (None, *rows, lanes), rhs_powers_block)
    if existing_out is not None:
        operands["existing_out"] = (kernel_operand(existing_out), (tm, tn), out_block)
    arrays = [array for array, _, _ in operands.values()]
    scratch = {"acc": pltpu.VMEM((tn, tm) if turned else (tm, tn), _sum_dtype(lhs, rhs, scales))}
    if scales.lhs is not None and not turned:
        scratch["lhs_columns"] = pltpu.VMEM((tk // part if scales.lhs_changes else 1, tm, LANES), jnp.float32)
    if lhs_powers is not None or (_are_narrow(lhs, rhs) and _product_path(lhs, rhs) == "bfloat16"):
        scratch["wide_lhs"] = pltpu.VMEM((tm, tk), jnp.bfloat16)
    out_shape = jax.ShapeDtypeStruct((p.m, p.n), kernel_dtype(p.out_dtype))
    # A block is fetched anew when its index changes: with a single step over K, only at a new tile or a new group.
    fetches = tiles_m + p.groups - 1
    lhs_rows, rhs_blocks = (p.m, p.groups) if tiles_k == 1 else (fetches * tm, fetches)
    cost = pl.CostEstimate(
        flops=2 * p.m * p.k * p.n,
        transcendentals=0,
        bytes_accessed=tiles_n * lhs_rows * p.k * arrays[0].dtype.itemsize
        + rhs_blocks * p.k * p.n * arrays[1].dtype.itemsize
        + sum(array.size * array.dtype.itemsize for array in arrays[2:])
        + p.m * p.n * out_shape.dtype.itemsize,
    )

    out = pl.pallas_call(
        partial(
            _gmm_kernel,
            names=(*scalars, *operands, "out", *scratch),
            k=p.k,
            part=part,
            scales=scales._replace(lhs=None, rhs=None),
            turned=turned,
            transpose_rhs=transpose_rhs,
            debug=debug,
        ),
        out_shape=out_shape,
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=len(scalars),
            grid=(tiles_n, num_visits, tiles_k),
            in_specs=[pl.BlockSpec(block, index) for _, block, index in operands.values()],
            out_specs=pl.BlockSpec((tm, tn), out_block),
            scratch_shapes=list(scratch.values()),
        ),
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel", "arbitrary", "arbitrary")),
        cost_estimate=cost,
        interpret=interpret,
        name="gmm_quantized",
    )(*scalars.values(), *arrays)
    return out.astype(p.out_dtype)


def _gmm_kernel(
    *refs: Any,
    names: tuple[str, ...],
    k: int,
    part: int,
    scales: _Scales,
    turned: bool,
    transpose_rhs: bool,
    debug: Debug,
) -> None:
    """turned: sums are made as [columns, rows]. Scales that are one for 128 columns are multiplied by those of the rows
    in a single row then, and that multiplies the sums of all these columns: two operations for each sum, and not three.
    """
    named = dict(zip(names, refs, strict=True))
    tile_ids = named["tile_ids"]
    narrow_lhs, rhs, out, acc = named["lhs"], named["rhs"], named["out"], named["acc"]
    lhs, existing_out = named.get("wide_lhs", narrow_lhs), named.get("existing_out")
    lhs_scale, lhs_columns = named.get("lhs_scale"), named.get("lhs_columns")
    lhs_powers, rhs_powers = named.get("lhs_powers"), named.get("rhs_powers")
    in_powers = lhs_powers is not None or rhs_powers is not None
    product = dot if in_powers else _product
    rhs_parts, rhs_whole = scales.read(lhs_scale, named.get("rhs_scale"))[1]
    visit, step, last_step = pl.program_id(1), pl.program_id(2), pl.num_programs(2) - 1
    (tm, tk), tn = lhs.shape, out.shape[1]
    visits = Visits(*(named[name] for name in Visits._fields))
    start, end = visits.rows(visit, tm)
    whole = (start == 0) & (end == tm)
    in_range: Any = named["in_range"][0] != 0 if turned else None
    one_step = tk == k
    rest = k % tk or tk  # of K, in the last step; the block holds garbage beyond it, and 0 * NaN is NaN
    whole_depth = dot_depth(changed=lhs is not narrow_lhs)
    whole_depth = min(whole_depth, EXACT_SUMS) if acc.dtype == jnp.int32 else whole_depth
    depth_of_dot = part if scales.change else whole_depth

    def widened_lhs(rows: Any, inner: Any) -> jax.Array:
        narrow = narrow_lhs[rows, inner]
        if lhs_powers is None:
            return _widen(narrow, lhs.dtype)
        return _times_lanes(_widen_whole(narrow), lhs_powers, rows, inner.start)

    def weights_of(inner: Any, columns: Any) -> jax.Array:
        """rhs as `product` takes it."""
        weights = rhs[columns, inner] if transpose_rhs else rhs[inner, columns]
        if rhs_powers is None:
            return weights
        wide = _widen_whole(weights)
        if transpose_rhs:
            return _times_lanes(wide, rhs_powers, columns, inner.start)
        first = (0 if one_step else step * (tk // MX_BLOCK)) + inner.start // MX_BLOCK
        return _times_rows(wide, rhs_powers, first, columns)

    def prepare(rows: Any, parts: int, masked: bool) -> None:
        """Make once what every block of columns needs: lhs as it is multiplied, and its scales as columns.

        Without masks lhs is widened part by part, each under the products of the part before.
        """
        if lhs is not narrow_lhs and masked:
            height = WIDENED_ROWS if rows.size % WIDENED_ROWS == 0 else rows.size

            def widen(i: Any, carry: None) -> None:
                some = pl.ds(pl.multiple_of(rows.start + i * height, height), height)
                lhs[some, :] = widened_lhs(some, pl.ds(0, tk))

            lax.fori_loop(0, rows.size // height, widen, None)
        if lhs_columns is not None:
            for block in blocks(rows.size, LANES):
                some = pl.ds(rows.start + block.start, block.size)
                for i in range(parts if scales.lhs_changes else 1):
                    lhs_columns[i, some, :] = _columns(_row(lhs_scale, i, some))

    def store(rows: Any, columns: Any, sums: jax.Array, masked: bool) -> None:
        if turned:
            total = (sums if debug else sums.astype(out.dtype)).T
        else:
            column = None if lhs_columns is None or scales.lhs_changes else lhs_columns[0, rows, :]
            total = _scaled(sums, column, _row(rhs_whole, 0, columns))
        if debug:
            total = debug("acc", total, is_own_row(rows.start, total.shape, start, end))
        result = total.astype(out.dtype)
        if masked:
            own = is_own_row(rows.start, result.shape, start, end)
            result = jnp.where(own, result, out[rows, columns])
        out[rows, columns] = result

    def for_columns(body: Callable[[Any], None], masked: bool) -> None:
        """body(columns) for each block of columns; with masks, as a loop: they leave too few registers for two."""
        if masked:
            _for_blocks(tn, MXU, body)
        else:
            for columns in blocks(tn, 2 * MXU if turned and tn == 2 * MXU else MXU):
                body(columns)

    def scaled_turned(sums: jax.Array, i: int, rows: Any, columns: Any, masked: bool) -> jax.Array:
        """Turned sums times the scales of part i; with masks one by one, where a product of two is no normal number."""
        of_rows, scaled = named["lhs_scale"][pl.ds(i, 1), rows], []
        for tile in blocks(columns.size, LANES):
            same = named["rhs_scale"][pl.ds(i, 1), pl.ds(columns.start + tile.start, LANES)]
            of_columns = jnp.concatenate([same] * (rows.size // LANES), axis=1)
            both = of_rows * of_columns
            times = (jnp.where(in_range, both, of_rows), jnp.where(in_range, 1.0, of_columns)) if masked else (both,)
            scaled.append(math.prod(times, start=sums[tile.start : tile.start + LANES].astype(jnp.float32)))
        return jnp.concatenate(scaled, axis=0)

    def at(rows: Any, columns: Any) -> tuple[Any, Any]:
        """Where sums are."""
        return (columns, rows) if turned else (rows, columns)

    def multiply(rows: Any, depth: int, masked: bool) -> None:
        prepare(rows, pl.cdiv(depth, part), masked)
        parts = blocks(depth, depth_of_dot)

        def before(rows: Any, columns: Any) -> Any:
            return None if one_step else jnp.where(step == 0, jnp.zeros((), acc.dtype), acc[at(rows, columns)])

        def add(i: int, rows: Any, columns: Any, total: Any) -> jax.Array:
            """total, and the products of a part."""
            inner = parts[i]
            x, weights, contract = lhs[rows, inner], weights_of(inner, columns), (1, 1 if transpose_rhs else 0)
            sums = product(weights, x, contract[::-1]) if turned else product(x, weights, contract)
            if turned:
                sums = scaled_turned(sums, i, rows, columns, masked)
            elif scales.change:
                column = lhs_columns[i, rows, :] if lhs_columns is not None and scales.lhs_changes else None
                sums = _scaled(sums, column, _row(rhs_parts, i, columns))
            sums = sums.astype(acc.dtype)
            return sums if total is None else total + sums

        def keep(rows: Any, columns: Any, total: jax.Array, last: bool) -> None:
            if one_step and last:
                store(rows, columns, total, masked)
            else:
                acc[at(rows, columns)] = total

        def multiply_columns(columns: Any) -> None:
            turns = [pl.ds(rows.start + block.start, block.size) for block in blocks(rows.size, MXU)]
            for some in turns if turned and len(turns) > 1 else [rows]:
                total = before(some, columns)
                for i in range(len(parts)):
                    total = add(i, some, columns, total)
                keep(some, columns, total, last=True)

        if lhs is narrow_lhs or masked:
            for_columns(multiply_columns, masked)
            return
        all_columns, hiding = blocks(tn, MXU), WIDENING_POWERS if in_powers else WIDENING
        for i, inner in enumerate(parts):
            lhs[rows, inner] = widened_lhs(rows, inner)
            for columns in all_columns[:hiding]:
                total = add(i, rows, columns, acc[rows, columns] if i else before(rows, columns))
                keep(rows, columns, total, last=i == len(parts) - 1)
        for columns in all_columns[hiding:]:
            multiply_columns(columns)

    def multiply_step(for_rows: Callable[[Callable[[Any], None]], None], masked: bool) -> None:
        def multiply_to(depth: int) -> None:
            for_rows(lambda rows: multiply(rows, depth, masked))

        def store_all(rows: Any) -> None:
            for_columns(lambda columns: store(rows, columns, acc[at(rows, columns)], masked), masked)

        if rest == tk:
            multiply_to(tk)
        else:
            pl.when(step < last_step)(lambda: multiply_to(tk))
            pl.when(step == last_step)(lambda: multiply_to(rest))
        if not one_step:
            pl.when(step == last_step)(lambda: for_rows(store_all))

    def for_passes(body: Callable[[Any], None]) -> None:
        """body(rows) for the rows of a tile that are multiplied at a time.

        Where blocks of scales are long this is no loop: the sums of a pass are scaled under the products of the next.
        Shorter ones are too much code for that.
        """
        if not _are_narrow(lhs, rhs):  # what is widened in registers is widened once
            body(pl.ds(0, tm))
        elif part >= 2 * MXU:
            for rows in blocks(tm, MXU):
                body(rows)
        else:
            _for_blocks(tm, 2 * MXU if turned or part >= MXU else MXU, body)

    unmasked = whole & in_range if turned else whole

    @pl.when(unmasked)
    def _() -> None:
        multiply_step(for_passes, masked=False)

    @pl.when(~unmasked)
    def _() -> None:
        # Consecutive visits of a tile share its output block: the first one fills the rows that are not its own.
        first_of_tile = (visit == 0) | (tile_ids[jnp.maximum(visit - 1, 0)] != tile_ids[visit])

        @pl.when(first_of_tile & (step == last_step))
        def _() -> None:
            out[...] = jnp.zeros_like(out) if existing_out is None else existing_out[...]

        for_row_blocks(start, end, tm, lambda rows: multiply_step(lambda body: body(rows), masked=True))


# --------------------------------------------------------------------------------------------------------- tgmm


@partial(jax.jit, static_argnames=("problem", "tile", "interpret", "debug"))
def _tgmm_quantized(
    lhs: jax.Array,
    lhs_scale: jax.Array | None,
    rhs: jax.Array,
    rhs_scale: jax.Array | None,
    group_sizes: jax.Array,
    group_offset: jax.Array,
    existing_out: jax.Array | None,
    *,
    problem: QuantizedProblem,
    tile: Tile,
    interpret: bool | pltpu.InterpretParams,
    debug: Debug,
) -> jax.Array:
    p = problem
    if 0 in (p.m, p.k, p.n, p.groups):
        return jnp.zeros((p.groups, p.k, p.n), p.out_dtype) if existing_out is None else existing_out

    tm, tk, tn = tile
    tiles_k, tiles_n = pl.cdiv(p.k, tk), pl.cdiv(p.n, tn)
    visits, num_visits = list_visits(
        group_sizes, group_offset, m=p.m, tm=tm, num_groups=p.groups, cover="groups", interpret=interpret
    )
    powers = [_powers_in_rows(s[None], interpret)[0] if _is_power(s) else None for s in (lhs_scale, rhs_scale)]
    in_powers = any(x is not None for x in powers)
    if in_powers:
        lhs_scale = rhs_scale = None
    path = _product_path(lhs, rhs)
    scales = _tgmm_scales(_of_units(lhs_scale, lhs, path), _of_units(rhs_scale, rhs, path), p, tile)
    wide = jnp.dtype(jnp.bfloat16) if in_powers else _widened(lhs, rhs)

    def lhs_block(n_i: Any, k_i: Any, visit: Any, group_ids: Any, tile_ids: Any, *_: Any) -> Any:
        return tile_ids[visit], k_i

    def lhs_scale_block(n_i: Any, k_i: Any, visit: Any, group_ids: Any, tile_ids: Any, *_: Any) -> Any:
        return tile_ids[visit] if scales.lhs_changes else 0, 0, k_i

    def rhs_block(n_i: Any, k_i: Any, visit: Any, group_ids: Any, tile_ids: Any, *_: Any) -> Any:
        return tile_ids[visit], n_i

    def rhs_scale_block(n_i: Any, k_i: Any, visit: Any, group_ids: Any, tile_ids: Any, *_: Any) -> Any:
        return tile_ids[visit] if scales.rhs_changes else 0, 0, n_i

    def out_block(n_i: Any, k_i: Any, visit: Any, group_ids: Any, tile_ids: Any, *_: Any) -> Any:
        return group_ids[visit], k_i, n_i

    operands: dict[str, tuple[jax.Array, Any, Any]] = {
        "lhs": (kernel_operand(lhs), (tm, tk), lhs_block),
        "rhs": (kernel_operand(rhs), (tm, tn), rhs_block),
    }
    if scales.lhs is not None:
        operands["lhs_scale"] = (scales.lhs, (None, scales.lhs.shape[1], tk), lhs_scale_block)
    if scales.rhs is not None:
        operands["rhs_scale"] = (scales.rhs, (None, scales.rhs.shape[1], tn), rhs_scale_block)
    for name, of_blocks, columns, index in zip(("lhs", "rhs"), powers, (tk, tn), (lhs_block, rhs_block), strict=True):
        if of_blocks is not None:
            operands[f"{name}_powers"] = (of_blocks, (tm // MX_BLOCK, columns), index)
    if existing_out is not None:
        operands["existing_out"] = (kernel_operand(existing_out), (None, tk, tn), out_block)
    arrays = [array for array, _, _ in operands.values()]
    out_shape = jax.ShapeDtypeStruct((p.groups, p.k, p.n), kernel_dtype(p.out_dtype))
    cost = pl.CostEstimate(
        flops=2 * p.m * p.k * p.n,
        transcendentals=0,
        bytes_accessed=tiles_n * p.m * p.k * arrays[0].dtype.itemsize
        + tiles_k * p.m * p.n * arrays[1].dtype.itemsize
        + sum(array.size * array.dtype.itemsize for array in arrays[2:])
        + p.groups * p.k * p.n * out_shape.dtype.itemsize,
    )

    out = pl.pallas_call(
        partial(
            _tgmm_kernel,
            names=(*operands, "out"),
            part=min(p.block, tm),
            scales=scales._replace(lhs=None, rhs=None),
            debug=debug,
        ),
        out_shape=out_shape,
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=4,
            grid=(tiles_n, tiles_k, num_visits),
            in_specs=[pl.BlockSpec(block, index) for _, block, index in operands.values()],
            out_specs=pl.BlockSpec((None, tk, tn), out_block),
            scratch_shapes=[
                pltpu.VMEM((tk, tn), _sum_dtype(lhs, rhs, scales)),
                pltpu.VMEM((row_block(tm), tk), arrays[0].dtype),
                pltpu.VMEM((row_block(tm), tn), arrays[1].dtype),
                *(
                    pltpu.VMEM((rows, columns), wide)
                    for rows, columns in ((row_block(tm), tk), (tm, tn))
                    if wide is not None
                ),
            ],
        ),
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel", "parallel", "arbitrary")),
        cost_estimate=cost,
        interpret=interpret,
        name="tgmm_quantized",
    )(*visits, *arrays)
    return out.astype(p.out_dtype)


def _tgmm_kernel(
    group_ids: Any,
    tile_ids: Any,
    group_offsets: Any,
    group_offset: Any,
    *refs: Any,
    names: tuple[str, ...],
    part: int,
    scales: _Scales,
    debug: Debug,
) -> None:
    named = dict(zip(names, refs, strict=False))
    acc, own_lhs, own_rhs, *wide = refs[len(names) :]
    lhs, rhs, out, existing_out = named["lhs"], named["rhs"], named["out"], named.get("existing_out")
    powers = named.get("lhs_powers"), named.get("rhs_powers")
    in_powers = any(of_blocks is not None for of_blocks in powers)
    (lhs_parts, lhs_whole), (rhs_parts, rhs_whole) = scales.read(named.get("lhs_scale"), named.get("rhs_scale"))
    visit, last_visit = pl.program_id(2), pl.num_programs(2) - 1
    (tm, tk), tn = lhs.shape, rhs.shape[1]
    start, end = Visits(group_ids, tile_ids, group_offsets, group_offset).rows(visit, tm)
    whole = (start == 0) & (end == tm)
    group = group_ids[visit]
    first_of_group = (visit == 0) | (group_ids[jnp.maximum(visit - 1, 0)] != group)
    depth_of_dot = part if scales.change else dot_depth(changed=True)
    height = TALL if depth_of_dot > tm and not wide else MXU

    def row_of(scale: Any | None, first_row: Any, columns: Any, masked: bool) -> jax.Array | None:
        """The scales of the part of the tile that first_row is in."""
        i = first_row // part if isinstance(first_row, int) else lax.div(first_row, part)
        row = _row(scale, i, columns)
        if row is None or not masked:
            return row
        # A block without rows of the group may have NaN for a scale.
        return jnp.where((start < (i + 1) * part) & (i * part < end), row, 0.0)

    def multiply(lhs: Any, rhs: Any, first_row: Any, first: Any, masked: bool) -> None:
        def multiply_part(inner: Any) -> None:
            for rows in blocks(tk, height):
                column = _columns(row_of(lhs_parts, first_row + inner.start, rows, masked))
                for columns in blocks(tn, 4 * MXU):
                    row = row_of(rhs_parts, first_row + inner.start, columns, masked)
                    before = jnp.where(first & (inner.start == 0), jnp.zeros((), acc.dtype), acc[rows, columns])
                    sums = (dot if wide else _product)(lhs[inner, rows], rhs[inner, columns], contract=(0, 0))
                    if scales.change:
                        sums = _scaled(sums, column, row)
                    acc[rows, columns] = before + sums

        if scales.change:
            _for_blocks(lhs.shape[0], min(part, lhs.shape[0]), multiply_part)
        else:  # few, and no loop: the end of one overlaps with the start of the next
            for inner in blocks(lhs.shape[0], depth_of_dot):
                multiply_part(inner)

    def is_own_block(block: Any) -> jax.Array:
        return (start < (block + 1) * MX_BLOCK) & (block * MX_BLOCK < end)

    def widen(lhs: Any, rhs: Any, first_row: Any, first_block: Any) -> tuple[Any, Any]:
        """Rows of both operands from first_row on, widened once and not for each block of the result.

        first_block: of the powers, if there are any, that of these rows.
        """
        for narrow, block, of_blocks in zip((lhs, rhs), wide, powers, strict=True):

            def copy(rows: Any, narrow: Any = narrow, block: Any = block, of_blocks: Any = of_blocks) -> None:
                own = narrow[pl.ds(first_row + rows.start, rows.size), :]
                if of_blocks is None:
                    block[rows, :] = _widen(own, block.dtype)
                else:
                    of_rows = first_block + rows.start // MX_BLOCK
                    block[rows, :] = _times_rows(_widen_whole(own), of_blocks, of_rows, slice(None), is_own_block)

            _for_blocks(row_block(tm), COPY_ROWS, copy)
        return wide[0].at[pl.ds(0, row_block(tm))], wide[1].at[pl.ds(0, row_block(tm))]

    def multiply_own(rows: Any) -> None:
        copy_own_rows(((lhs, own_lhs), (rhs, own_rhs)), rows, start, end)
        operands = widen(own_lhs, own_rhs, 0, rows.start // MX_BLOCK) if wide else (own_lhs, own_rhs)
        multiply(*operands, rows.start, first_of_group & (rows.start <= start), masked=True)

    def multiply_widened() -> None:
        """Products with both operands widened under them: lhs as it is used, rhs under the products before."""

        def widened(operand: int, inner: Any, columns: Any) -> jax.Array:
            narrow, of_blocks = (lhs, rhs)[operand][inner, columns], powers[operand]
            if of_blocks is None:
                return _widen(narrow, wide[operand].dtype)
            return _times_rows(_widen_whole(narrow), of_blocks, inner.start // MX_BLOCK, columns)

        for inner in blocks(tm, depth_of_dot):
            for columns in blocks(tn, 2 * MXU):
                wide[1][inner, columns] = widened(1, inner, columns)
            for rows in blocks(tk, MXU if scales.change or in_powers else 2 * MXU):
                lhs_rows, column = widened(0, inner, rows), _columns(row_of(lhs_parts, inner.start, rows, masked=False))
                for columns in blocks(tn, 2 * MXU):
                    before = acc[rows, columns]
                    if inner.start == 0:
                        before = jnp.where(first_of_group, 0.0, before)
                    sums = dot(lhs_rows, wide[1][inner, columns], contract=(0, 0))
                    if scales.change:
                        sums = _scaled(sums, column, row_of(rhs_parts, inner.start, columns, masked=False))
                    acc[rows, columns] = before + sums

    @pl.when(whole)
    def _() -> None:
        if wide:
            multiply_widened()
        else:
            multiply(lhs, rhs, 0, first_of_group, masked=False)

    @pl.when(~whole)
    def _() -> None:
        for_row_blocks(start, end, tm, multiply_own)

        @pl.when(start >= end)  # an empty group has one visit, without rows
        def _() -> None:
            def clear(rows: Any) -> None:
                acc[rows, :] = jnp.zeros((rows.size, tn), acc.dtype)

            _for_blocks(tk, COPY_ROWS, clear)

    def whole_axis(scale: Any | None, columns: Any) -> jax.Array | None:
        row = _row(scale, 0, columns)
        return None if row is None else jnp.where(start < end, row, 0.0)  # an empty group's is 0, not 0 * NaN

    @pl.when((visit == last_visit) | (group_ids[jnp.minimum(visit + 1, last_visit)] != group))
    def _() -> None:
        def store(rows: Any) -> None:
            column = _columns(whole_axis(lhs_whole, rows))
            for columns in blocks(tn, 2 * MXU):
                total = _scaled(acc[rows, columns], column, whole_axis(rhs_whole, columns))
                if debug:
                    total = debug("acc", total, jnp.full(total.shape, start < end))
                if existing_out is not None:
                    total += existing_out[rows, columns].astype(jnp.float32)
                out[rows, columns] = total.astype(out.dtype)

        def store_strips(rows: Any) -> None:
            """Strip by strip: a strip's column of scales is made while the strip before is stored."""
            for strip in blocks(rows.size, LANES):
                store(pl.ds(rows.start + strip.start, strip.size))

        if lhs_whole is None:
            _for_blocks(tk, MXU, store)
        else:
            _for_blocks(tk, STRIPS * LANES, store_strips)
