"""Quantisation to fp8, int8 and MXFP8 on the TPU, bit for bit as `cpu_golden/quantize.py` defines it.

No result depends on how exactly the hardware divides. An approximate quotient only finds the neighbouring values of
the target format; an exact comparison of x with the midpoint between them, times the scale, decides. The scale itself
is corrected by its exact remainder. Float32 products are made exact by splitting one factor into two of 12 bits.
With MXFP8's powers of two for scales every quotient is exact by itself.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, NamedTuple, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from op_arguments.debug import Debug, named
from op_arguments.quantize import (
    E8M0,
    FP8,
    MX_BLOCK,
    SWIZZLED_COLUMNS,
    SWIZZLED_ROWS,
    Blocks,
    check_blocks,
    check_dequantize,
    check_dual_quantize,
    check_finite_values,
    check_mxfp8_dequantize,
    check_mxfp8_dual_quantize,
    check_mxfp8_quantize,
    check_quantize,
    check_swizzle,
    check_unswizzle,
    swizzled_shape,
)
from tpu_kernels._lib.arguments import Interpret, kernel_operand, resolve_interpret
from tpu_kernels._lib.chip import LANES

SUBLANES = 32  # of a packed 8-bit register
SMALLEST = float(np.finfo(np.float32).tiny)
# Where a scale is below 2^-64, it and its block are multiplied by 2^64, lest a partial product be subnormal.
LIFT = 2.0**64


class Quantized(NamedTuple):
    """A quantised array: x ≈ qvalue · scale, the scale of each block repeated over it."""

    qvalue: Any
    scale: Any


class DualQuantized(NamedTuple):
    """An array quantised by rows (blocks along its last axis) and by columns (blocks along the one before)."""

    rowwise: Any
    rowwise_scale: Any
    columnwise: Any
    columnwise_scale: Any


class Format(NamedTuple):
    """A narrow number format. Below `linear`, a power of two, its values are equally spaced; int8's all are."""

    dtype: str
    largest: float
    mantissa: int  # stored bits
    linear: float
    largest_code: int
    nan_code: int


FORMATS = {
    "float8_e4m3fn": Format("float8_e4m3fn", 448.0, 3, 2.0**-6, 0x7E, 0x7F),
    "float8_e5m2": Format("float8_e5m2", 57344.0, 2, 2.0**-14, 0x7B, 0x7E),
    "int8": Format("int8", 127.0, 7, 2.0**7, 127, 0),
}


def fp8_quantize(
    x: jax.Array,
    axis: int | tuple[int, ...],
    block_size: int | None = 128,
    *,
    dtype: Any = "float8_e4m3fn",
    check_finite: bool = True,
    interpret: Interpret = None,
    debug: Debug = None,
) -> Quantized:
    """x in fp8, with one scale per block of `block_size` elements (None: all) along each axis in `axis`.

    x [...] float32, bfloat16 or float16. Returns qvalue [...] in dtype (float8_e4m3fn or float8_e5m2) and scale
    float32, whose `axis` are divided by the block. `scale = absmax / finfo(dtype).max`, absmax taken over the finite
    elements, correctly rounded and at least the smallest normal float32; 1 where absmax is 0. `qvalue = x / scale`,
    the exact quotient rounded once, to nearest even; float32 subnormals count as zero, zeros keep x's sign; NaN
    becomes the positive quiet one. ±inf becomes ±finfo(dtype).max under tracing or without check_finite, and is
    refused otherwise. interpret: as `pl.pallas_call`; None interprets where there is no TPU. debug: see
    `op_arguments.debug`, of absmax, scale and spread, the scale of each element.
    x is read once where blocks fit a tile (all but whole axes of thousands), else twice. Blocks of the last axis that
    are not 16, 32, 64 or multiples of 128, of the others not multiples of 32, are transposed by XLA first, unless they
    are whole axes.
    Raises TypeError for a wrong dtype, ValueError for a wrong axis, a block that does not divide, or ±inf.
    """
    blocks, name = check_quantize(x, axis, block_size, dtype)
    if check_finite:
        _check_finite(x, nan=False)
    return quantize_blocks(x, blocks, FloatScales(FORMATS[name]), resolve_interpret(interpret), debug)


def int8_quantize(
    x: jax.Array,
    axis: int | tuple[int, ...],
    block_size: int | None = 128,
    *,
    check_finite: bool = True,
    interpret: Interpret = None,
    debug: Debug = None,
) -> Quantized:
    """As `fp8_quantize`, to int8 in [-127, 127], `scale = absmax / 127`.

    NaN, which int8 has not, becomes 0 where ±inf saturates, and is refused with it.
    """
    blocks = check_blocks(x, axis, block_size)
    if check_finite:
        _check_finite(x, nan=True)
    return quantize_blocks(x, blocks, FloatScales(FORMATS["int8"]), resolve_interpret(interpret), debug)


def fp8_dual_quantize(
    x: jax.Array,
    block_size: int | None = 128,
    *,
    dtype: Any = "float8_e4m3fn",
    check_finite: bool = True,
    interpret: Interpret = None,
    debug: Debug = None,
) -> DualQuantized:
    """`fp8_quantize(x, -1, …)` and `fp8_quantize(x, -2, …)` of x [M, K] or [G, M, K], which is read once for both.

    Blocks of whole axes longer than a tile (512 rows, 1024 columns) and those that `fp8_quantize` transposes take one
    call each. debug: as `fp8_quantize`, of both: rowwise_absmax and so on.
    """
    by_rows, by_columns, name = check_dual_quantize(x, block_size, dtype)
    if check_finite:
        _check_finite(x, nan=False)
    scaling = FloatScales(FORMATS[name])
    return dual_quantize_blocks(x, (by_rows, by_columns), scaling, resolve_interpret(interpret), debug)


def fp8_dequantize(qvalue: jax.Array, scale: jax.Array, *, interpret: Interpret = None) -> jax.Array:
    """qvalue · scale in float32: [...] fp8 times its block's scale, rounded once; a subnormal result is zero.

    Raises TypeError for a wrong dtype, ValueError for a scale that does not divide qvalue.
    """
    blocks = check_dequantize(qvalue, scale, FP8)
    return dequantize_blocks(qvalue, scale, blocks, _decode, "float32", resolve_interpret(interpret))


def int8_dequantize(qvalue: jax.Array, scale: jax.Array, *, interpret: Interpret = None) -> jax.Array:
    """As `fp8_dequantize`, of int8."""
    blocks = check_dequantize(qvalue, scale, ("int8",))
    return dequantize_blocks(qvalue, scale, blocks, _decode, "float32", resolve_interpret(interpret))


def mxfp8_quantize(
    x: jax.Array,
    axis: int,
    *,
    dtype: Any = "float8_e4m3fn",
    scale_rounding: Literal["up", "floor"] = "up",
    check_finite: bool = True,
    interpret: Interpret = None,
    debug: Debug = None,
) -> Quantized:
    """x in MXFP8: fp8 with one power of two per 32 consecutive elements along `axis`; a short last block is a block.

    x [...] float32, bfloat16 or float16. Returns qvalue [...] in dtype (float8_e4m3fn or float8_e5m2) and scale
    float8_e8m0fnu, whose `axis` is ceil(n / 32). With absmax taken over the finite elements the exponent of the scale
    is, for scale_rounding="up", ceil(log2(absmax / finfo(dtype).max)), the least that saturates nothing; for "floor",
    OCP's, floor(log2(absmax)) - 8 (e5m2: 15), which saturates the elements beyond finfo(dtype).max. It is at least
    -127, which is also that of a block of zeros. `qvalue = x / scale`, rounded once, to nearest even, saturating;
    float32 subnormals count as zero, zeros keep x's sign; NaN becomes the positive quiet one, and the scale never is.
    ±inf becomes ±finfo(dtype).max under tracing or without check_finite, and is refused otherwise.
    x is padded by XLA first where 32 does not divide n. interpret and debug as `fp8_quantize`.
    Raises TypeError for a wrong dtype, ValueError for a wrong axis or rounding, or ±inf.
    """
    axis, name = check_mxfp8_quantize(x, axis, dtype, scale_rounding)
    if check_finite:
        _check_finite(x, nan=False)
    scaling = PowerScales(FORMATS[name], scale_rounding)
    q = quantize_blocks(_whole_blocks(x, axis), _mx_blocks(x, axis), scaling, resolve_interpret(interpret), debug)
    return Quantized(lax.slice_in_dim(q.qvalue, 0, x.shape[axis], axis=axis), _e8m0(q.scale))


def mxfp8_dual_quantize(
    x: jax.Array,
    *,
    dtype: Any = "float8_e4m3fn",
    scale_rounding: Literal["up", "floor"] = "up",
    check_finite: bool = True,
    interpret: Interpret = None,
    debug: Debug = None,
) -> DualQuantized:
    """`mxfp8_quantize(x, -1, …)` and `mxfp8_quantize(x, -2, …)` of x [M, K] or [G, M, K], which is read once for both.

    The columnwise payload is not the rowwise one: each has been rounded with its own scales.
    """
    name = check_mxfp8_dual_quantize(x, dtype, scale_rounding)
    if check_finite:
        _check_finite(x, nan=False)
    *_, m, k = x.shape
    rows, columns = x.ndim - 1, x.ndim - 2  # the axes that the blocks of each lie along
    padded = _whole_blocks(_whole_blocks(x, rows), columns)
    blocks = _mx_blocks(x, rows), _mx_blocks(x, columns)
    scaling = PowerScales(FORMATS[name], scale_rounding)
    dual = dual_quantize_blocks(padded, blocks, scaling, resolve_interpret(interpret), debug)
    return DualQuantized(
        dual.rowwise[..., :m, :k],
        _e8m0(dual.rowwise_scale[..., :m, :]),
        dual.columnwise[..., :m, :k],
        _e8m0(dual.columnwise_scale[..., :, :k]),
    )


def mxfp8_dequantize(
    qvalue: jax.Array, scale: jax.Array, *, dtype: Any = None, interpret: Interpret = None
) -> jax.Array:
    """qvalue · scale: [...] fp8 times the power of two of its 32, in float32 (default) or bfloat16.

    The axis that has the blocks is the one of scale (float8_e8m0fnu) that is ceil(n / 32). Exact in either dtype,
    but at the ends of the exponent range that both share: 2^128 and beyond becomes ±inf, and what is below 2^-126 ±0.
    A scale of NaN (0xFF) makes its block NaN. Raises TypeError for a wrong dtype, ValueError for a wrong scale.
    """
    axis, name = check_mxfp8_dequantize(qvalue, scale, dtype)
    whole, exponents = _whole_blocks(qvalue, axis), _biased_exponents(scale)
    blocks = _mx_blocks(qvalue, axis)
    wide = dequantize_blocks(whole, exponents, blocks, _decode_by_power, name, resolve_interpret(interpret))
    return lax.slice_in_dim(wide, 0, qvalue.shape[axis], axis=axis)


def swizzle_scales(scale: jax.Array) -> jax.Array:
    """Scales [..., R, C] as block-scaled matrix units read them: [..., ceil(R / 128), ceil(C / 4), 32, 16].

    scale: float8_e8m0fnu, R rows (or columns) of an operand with C scales each along the axis that is summed over.
    Tiles of 128 rows and 4 scales, one behind the other; that of row r and column c of a tile is its byte
    (r % 32) · 16 + (r // 32) · 4 + c. What is missing of a whole tile is 0, which stands for 2^-127.
    Source: cuBLAS, "1D Block Scaling Factors Layout". No TPU reads it; here it is for what is shared with GPUs.
    Raises TypeError and ValueError for any other array.
    """
    check_swizzle(scale)
    *lead, rows, columns = scale.shape
    missing = [(0, 0)] * len(lead) + [(0, -rows % SWIZZLED_ROWS), (0, -columns % SWIZZLED_COLUMNS)]
    whole = jnp.pad(lax.bitcast_convert_type(scale, jnp.uint8), missing)
    tiles_r, tiles_c = whole.shape[-2] // SWIZZLED_ROWS, whole.shape[-1] // SWIZZLED_COLUMNS
    split = whole.reshape(*lead, tiles_r, SWIZZLED_ROWS // 32, 32, tiles_c, SWIZZLED_COLUMNS)
    tiles = split.swapaxes(-4, -2).reshape(swizzled_shape(scale.shape))
    return lax.bitcast_convert_type(tiles, jnp.dtype(E8M0))


def unswizzle_scales(swizzled: jax.Array, rows: int, columns: int) -> jax.Array:
    """The scales [..., rows, columns] of which `swizzled` is the `swizzle_scales`. Raises as it does."""
    check_unswizzle(swizzled, rows, columns)
    *lead, tiles_r, tiles_c, _, _ = swizzled.shape
    in_bytes = lax.bitcast_convert_type(swizzled, jnp.uint8)
    tiles = in_bytes.reshape(*lead, tiles_r, tiles_c, 32, SWIZZLED_ROWS // 32, SWIZZLED_COLUMNS)
    whole = tiles.swapaxes(-4, -2).reshape(*lead, tiles_r * SWIZZLED_ROWS, tiles_c * SWIZZLED_COLUMNS)
    return lax.bitcast_convert_type(whole[..., :rows, :columns], jnp.dtype(E8M0))


def _biased_exponents(scale: jax.Array) -> jax.Array:
    """The bytes of float8_e8m0fnu scales as int32: their exponents plus 127, and 255 for NaN."""
    return lax.bitcast_convert_type(scale, jnp.uint8).astype(jnp.int32)


def _e8m0(inverse: jax.Array) -> jax.Array:
    """The scales of which these powers of two, in float32, are the inverses: 2^127 is that of the smallest."""
    return lax.bitcast_convert_type((254 - (_bits(inverse) >> 23)).astype(jnp.uint8), jnp.dtype(E8M0))


def _mx_blocks(x: jax.Array, axis: int) -> Blocks:
    return tuple(MX_BLOCK if a == axis else 1 for a in range(x.ndim))


def _whole_blocks(x: jax.Array, axis: int) -> jax.Array:
    """x, filled up with zeros to whole blocks along an axis."""
    missing = -x.shape[axis] % MX_BLOCK
    return jnp.pad(x, [(0, missing if a == axis else 0) for a in range(x.ndim)]) if missing else x


def _check_finite(x: jax.Array, nan: bool) -> None:
    if not isinstance(x, jax.core.Tracer):
        values = np.asarray(x)
        check_finite_values(int(np.isinf(values).sum()), int(np.isnan(values).sum()) if nan else 0)


# ------------------------------------------------------------------------------------------------------- layout


Block = tuple[int, int]
"""Rows and columns of an array [A, R, C] that share a scale."""


class Layout(NamedTuple):
    """How a kernel sees an array: its shape as [A, R, C], and the rows r and columns c of a block.

    split is None where that is a plain reshape. Else it is the shape with each axis split into (blocks, elements of a
    block): the elements are brought to the front, as R, and every column is a block.
    """

    shape: tuple[int, int, int]
    block: Block
    split: tuple[int, ...] | None

    def view(self, x: jax.Array) -> jax.Array:
        """x as [A, R, C]."""
        if self.split is not None:
            axes = range(len(self.split))
            x = x.reshape(self.split).transpose(*axes[1::2], *axes[::2])
        return x.reshape(self.shape)

    def restore(self, x: jax.Array, shape: tuple[int, ...]) -> jax.Array:
        """What `view` made of an array of `shape`, back."""
        if self.split is not None:
            rank = len(shape)
            order = [i for axis in range(rank) for i in (rank + axis, axis)]
            x = x.reshape(self.split[1::2] + self.split[::2]).transpose(order)
        return x.reshape(shape)


def _layout(shape: tuple[int, ...], blocks: Blocks) -> Layout:
    lead, (rows, columns) = shape[:-2], ((1, *shape)[-2:])
    lead_blocks, (r, c) = blocks[:-2], ((1, *blocks)[-2:])
    if r == rows and any(block > 1 for block in lead_blocks) and lead_blocks == lead:
        lead, rows, r = (), rows * int(np.prod(lead)), r * int(np.prod(lead))
        lead_blocks = ()
    by_rows = r in (1, rows) or (r % SUBLANES == 0 and r <= TILE_ROWS)
    by_columns = c in (1, columns) or (c % LANES == 0 and c <= TILE_COLUMNS) or c in (16, 32, 64)
    if by_rows and by_columns and all(block == 1 for block in lead_blocks):
        return Layout((int(np.prod(lead)), rows, columns), (r, c), None)
    split = tuple(part for size, block in zip(shape, blocks, strict=True) for part in (size // block, block))
    elements = int(np.prod(blocks))
    return Layout((1, elements, int(np.prod(split[::2]))), (elements, 1), split)


TILE_ROWS, TILE_COLUMNS = 512, 1024
_TILE = TILE_ROWS * TILE_COLUMNS


class Tiles(NamedTuple):
    """The tile [rows, columns] of an array [A, R, C], and how many of them along each axis share their blocks."""

    shape: tuple[int, int, int]
    rows: int
    columns: int
    steps_r: int
    steps_c: int

    @property
    def steps(self) -> int:
        """How many tiles share their blocks: a walk of them is one pass."""
        return self.steps_r * self.steps_c

    @property
    def walks(self) -> tuple[int, int, int]:
        """How many walks there are along each axis."""
        a, rows, columns = self.shape
        return a, pl.cdiv(rows, self.rows * self.steps_r), pl.cdiv(columns, self.columns * self.steps_c)

    def at(self, a: Any, i: Any, j: Any, step: Any) -> tuple[Any, Any, Any]:
        """The tile at a step of a walk."""
        return a, i * self.steps_r + step // self.steps_c, j * self.steps_c + step % self.steps_c

    def scales(self, block: Block) -> tuple[int, int]:
        """How many rows and columns of scales a tile has."""
        _, rows, columns = self.shape
        r, c = block
        return 1 if r == rows else self.rows // r, 1 if c == columns else self.columns // c

    def scale_spec(self, block: Block) -> pl.BlockSpec:
        """The scales of a walk, of an array as `_tiled_scales` makes it: the same at every step."""
        return pl.BlockSpec((None, None, None, *self.scales(block)), lambda a, i, j, step: (a, i, j, 0, 0))


def _tiles(shape: tuple[int, int, int], blocks: Sequence[Block]) -> Tiles:
    """Tiles of whole blocks; a block that is a whole axis, and longer than a tile can be, is walked in steps."""
    _, rows, columns = shape
    r, c = (max(sizes) for sizes in zip(*blocks, strict=True))
    most_r, most_c = TILE_ROWS, TILE_COLUMNS
    if len(blocks) == 1 and c == columns and r == 1:
        most_c = 8 * TILE_COLUMNS
        most_r = min(TILE_ROWS, _TILE // min(columns, most_c) // SUBLANES * SUBLANES)
    elif len(blocks) == 1 and r == rows and c == 1:
        most_r = 8 * TILE_ROWS
        most_c = min(TILE_COLUMNS, _TILE // min(rows, most_r) // LANES * LANES)
    tile_r, tile_c = min(pl.cdiv(rows, SUBLANES) * SUBLANES, most_r), min(columns, most_c)
    if r < rows:
        tile_r = max(tile_r // r * r // SUBLANES * SUBLANES, SUBLANES)
    if LANES <= c < columns:
        tile_c = tile_c // c * c
    steps_r = pl.cdiv(rows, tile_r) if r == rows else 1
    return Tiles(shape, tile_r, tile_c, steps_r, pl.cdiv(columns, tile_c) if c == columns else 1)


def _tiled_scales(scale: jax.Array, tiles: Tiles, block: Block) -> jax.Array:
    """Scales [A, R / r, C / c] as [A, walks of rows, walks of columns, rows, columns], which fit any tile."""
    rows, columns = tiles.scales(block)
    a, walks_r, walks_c = tiles.walks
    missing = [(0, 0), (0, walks_r * rows - scale.shape[1]), (0, walks_c * columns - scale.shape[2])]
    return jnp.pad(scale, missing).reshape(a, walks_r, rows, walks_c, columns).transpose(0, 1, 3, 2, 4)


def _untiled_scales(scale: jax.Array, tiles: Tiles, block: Block) -> jax.Array:
    """The reverse of `_tiled_scales`."""
    a, walks_r, walks_c, rows, columns = scale.shape
    flat = scale.transpose(0, 1, 3, 2, 4).reshape(a, walks_r * rows, walks_c * columns)
    return flat[:, : tiles.shape[1] // block[0], : tiles.shape[2] // block[1]]


# ------------------------------------------------------------------------------------------------------ quantise


Decode = Callable[[jax.Array, jax.Array], jax.Array]
"""(codes, their scales) to values."""


class Scaling(Protocol):
    """How a block gets its scale, and an element its code."""

    @property
    def format(self) -> Format:
        """That of the codes."""

    def kept(self, absmax: jax.Array) -> jax.Array:
        """What the kernel keeps of each block in float32, and returns: its scale, or what `encode` needs of it."""

    def encode(self, x: jax.Array, kept: jax.Array) -> jax.Array:
        """The int8 bits of x / scale in the format: the exact quotient rounded to nearest even, saturating."""

    def scale(self, kept: jax.Array) -> jax.Array:
        """The scale itself, in float32."""


@partial(jax.jit, static_argnums=(1, 2, 3, 4))
def quantize_blocks(
    x: jax.Array, blocks: Blocks, scaling: Scaling, interpret: bool | pltpu.InterpretParams, debug: Debug
) -> Quantized:
    """The codes of x [...] in the scaling's format, and what it keeps of each block, float32 [..., size / block]."""
    scale_shape = tuple(size // block for size, block in zip(x.shape, blocks, strict=True))
    if x.size == 0:
        return Quantized(jnp.zeros(x.shape, scaling.format.dtype), jnp.ones(scale_shape, jnp.float32))
    layout = _layout(x.shape, blocks)
    tiles = _tiles(layout.shape, [layout.block])
    ((codes, scale),) = _quantize_call(layout.view(x), [layout.block], tiles, scaling, interpret, [debug])
    return Quantized(_qvalue(layout.restore(codes, x.shape), scaling), scale.reshape(scale_shape))


@partial(jax.jit, static_argnums=(1, 2, 3, 4))
def dual_quantize_blocks(
    x: jax.Array,
    blocks: tuple[Blocks, Blocks],
    scaling: Scaling,
    interpret: bool | pltpu.InterpretParams,
    debug: Debug,
) -> DualQuantized:
    """`quantize_blocks` by rows and by columns, in one pass over x where both see it alike and in tiles alike."""
    debugs = [named(debug, output) for output in ("rowwise", "columnwise")]
    layouts = [_layout(x.shape, each) for each in blocks]
    tiles = _tiles(layouts[0].shape, [layout.block for layout in layouts])
    if x.size == 0 or any(layout.split for layout in layouts) or tiles.steps > 1:
        pairs = (quantize_blocks(x, each, scaling, interpret, own) for each, own in zip(blocks, debugs, strict=True))
        return DualQuantized(*(array for pair in pairs for array in pair))
    outputs: list[jax.Array] = []
    by = [layout.block for layout in layouts]
    for codes, scale in _quantize_call(layouts[0].view(x), by, tiles, scaling, interpret, debugs):
        outputs += [_qvalue(codes.reshape(x.shape), scaling), scale.reshape(x.shape[:-2] + scale.shape[1:])]
    return DualQuantized(*outputs)


def _qvalue(codes: jax.Array, scaling: Scaling) -> jax.Array:
    return lax.bitcast_convert_type(codes, jnp.dtype(scaling.format.dtype))


def _quantize_call(
    x: jax.Array,
    blocks: list[Block],
    tiles: Tiles,
    scaling: Scaling,
    interpret: bool | pltpu.InterpretParams,
    debugs: list[Debug],
) -> list[Quantized]:
    """x [A, R, C], quantised by each of `blocks`, in one pass (two where tiles share their blocks).

    Qvalues are int8 bits of the format where interpreted.
    """
    x = kernel_operand(x)
    passes = 1 if tiles.steps == 1 else 2

    def x_tile(a: Any, i: Any, j: Any, step: Any) -> Any:
        return tiles.at(a, i, j, step % tiles.steps)

    def q_tile(a: Any, i: Any, j: Any, step: Any) -> Any:
        return tiles.at(a, i, j, jnp.maximum(step - (passes - 1) * tiles.steps, 0))

    tile = (None, tiles.rows, tiles.columns)
    # Interpreted, fp8 is made of int8 at the end: XLA's CPU backend copies it by conversions that change NaNs.
    codes = jax.ShapeDtypeStruct(x.shape, jnp.dtype("int8" if interpret else scaling.format.dtype))
    out_shape = [
        Quantized(codes, jax.ShapeDtypeStruct((*tiles.walks, *tiles.scales(block)), jnp.float32)) for block in blocks
    ]
    written = sum(out.size * out.dtype.itemsize for out in jax.tree.leaves(out_shape))
    outputs = pl.pallas_call(
        partial(_quantize_kernel, blocks=blocks, tiles=tiles, scaling=scaling, debugs=debugs),
        out_shape=out_shape,
        grid=(*tiles.walks, passes * tiles.steps),
        in_specs=[pl.BlockSpec(tile, x_tile)],
        out_specs=[Quantized(pl.BlockSpec(tile, q_tile), tiles.scale_spec(block)) for block in blocks],
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel", "parallel", "parallel", "arbitrary")),
        cost_estimate=pl.CostEstimate(
            flops=40 * x.size * len(blocks),
            transcendentals=0,
            bytes_accessed=passes * x.size * x.dtype.itemsize + written,
        ),
        interpret=interpret,
        name="quantize",
    )(x)
    return [
        Quantized(q, _untiled_scales(scale, tiles, block)) for (q, scale), block in zip(outputs, blocks, strict=True)
    ]


def _quantize_kernel(
    x: Any, *outputs: Quantized, blocks: list[Block], tiles: Tiles, scaling: Scaling, debugs: list[Debug]
) -> None:
    """A step of a walk. The first pass measures the blocks, the last one encodes; the same where a walk is a step."""
    step, last_step = pl.program_id(3), pl.num_programs(3) - 1
    _, row, column = tiles.at(0, pl.program_id(1), pl.program_id(2), step % tiles.steps)
    for out, block, debug in zip(outputs, blocks, debugs, strict=True):
        tile = _Tile(x, out, block, tiles, scaling, debug, row, column)
        for_rows = partial(_for_rows, tiles.rows, block[0], out.scale.shape[0])
        pl.when(step == 0)(tile.begin)
        pl.when(step < tiles.steps)(partial(for_rows, tile.measure))
        pl.when(step == tiles.steps - 1)(tile.finish)
        pl.when(step > last_step - tiles.steps)(partial(for_rows, tile.encode))


class _Tile(NamedTuple):
    """A tile of x, and one pair of outputs that it is quantised to."""

    x: Any
    out: Quantized
    block: Block
    tiles: Tiles
    scaling: Scaling
    debug: Debug
    row: Any  # of tiles
    column: Any

    def begin(self) -> None:
        """Set the maxima of the blocks, which lie where their scales will, to 0."""
        self.out.scale[...] = jnp.zeros_like(self.out.scale)

    def measure(self, rows: Any, own: Any) -> None:
        """Raise the maxima `own` to those of 32 rows."""
        scale = self.out.scale
        values = _magnitude(self.x[rows, :].astype(jnp.float32))
        sizes, tile = self.tiles.shape[1:], (self.tiles.rows, self.tiles.columns)
        # A block that is a whole axis ends where the array does; beyond it the tile holds garbage.
        for axis, first in enumerate((self.row * self.tiles.rows + rows.start, self.column * self.tiles.columns)):
            size = sizes[axis]
            if self.block[axis] == size and size % tile[axis]:
                values = jnp.where(first + lax.broadcasted_iota(jnp.int32, values.shape, axis) < size, values, 0.0)
        if own.size == 1:
            values = jnp.max(values, axis=0, keepdims=True)
        scale[own, :] = jnp.maximum(scale[own, :], _maxima(values, self.block[1], scale.shape[1]))

    def finish(self) -> None:
        """Put what is kept of the blocks in the place of their maxima."""
        scale = self.out.scale
        absmax = scale[...]
        scale[...] = self.scaling.kept(absmax)
        if self.debug:
            first = pl.program_id(1) * scale.shape[0], pl.program_id(2) * scale.shape[1]
            sizes = self.tiles.shape[1] // self.block[0], self.tiles.shape[2] // self.block[1]
            there = _is_there(scale.shape, first, sizes)
            self.debug("absmax", jnp.where(absmax < SMALLEST, 0.0, absmax), there)
            self.debug("scale", self.scaling.scale(scale[...]), there)

    def encode(self, rows: Any, own: Any) -> None:
        """Write the codes of 32 rows."""
        q, scale = self.out
        for columns in _slices(self.tiles.columns, self.block[1], scale.shape[1]):
            kept = _spread(scale[own, :], columns, self.block[1])
            if self.debug:
                first = self.row * self.tiles.rows + rows.start, self.column * self.tiles.columns + columns.start
                each = jnp.broadcast_to(self.scaling.scale(kept), (SUBLANES, columns.stop - columns.start))
                self.debug("spread", each, _is_there(each.shape, first, self.tiles.shape[1:]))
            codes = self.scaling.encode(self.x[rows, columns].astype(jnp.float32), kept)
            q[rows, columns] = lax.bitcast_convert_type(codes, q.dtype)


def _is_there(tile: tuple[int, ...], first: tuple[Any, Any], size: tuple[int, ...]) -> jax.Array:
    """Which elements of a tile, whose first is at `first`, lie inside of an array of that size."""
    rows, columns = (lax.broadcasted_iota(jnp.int32, tile, axis) + first[axis] < size[axis] for axis in (0, 1))
    return rows & columns


def _for_rows(rows: int, block: int, scales: int, body: Callable[[Any, Any], None]) -> None:
    """Call body with slices of 32 rows of a tile and with the rows of its scales that belong to them."""

    def step(i: Any, _: Any) -> None:
        first = pl.multiple_of(i * SUBLANES, SUBLANES)
        if scales == 1:
            own = pl.ds(0, 1)
        elif block == 1:
            own = pl.ds(first, SUBLANES)
        else:
            own = pl.ds(first // block, 1)
        body(pl.ds(first, SUBLANES), own)

    lax.fori_loop(0, rows // SUBLANES, step, None)


def _slices(width: int, block: int, scales: int) -> Iterator[slice]:
    """Slices of the columns of a tile: of one block, or of 128 columns of several."""
    size = 2 * LANES
    if scales > 1 and block > 1:
        size = LANES if block % size else size
    for first in range(0, width, size):
        yield slice(first, min(first + size, width))


def _maxima(values: jax.Array, block: int, scales: int) -> jax.Array:
    """The maximum of each block of columns, [rows, columns] -> [rows, scales]."""
    if scales == 1:
        return jnp.max(values, axis=1, keepdims=True)
    if block == 1:
        return values
    maxima = jnp.zeros((values.shape[0], scales), values.dtype)
    for b in range(scales):
        # Lanes are sliced by whole registers.
        first = b * block // LANES * LANES
        part = values[:, first : first + max(block, LANES)]
        if block < LANES:
            lanes = lax.broadcasted_iota(jnp.int32, part.shape, 1)
            part = jnp.where(lanes // block == b % (LANES // block), part, 0.0)
        own = lax.broadcasted_iota(jnp.int32, maxima.shape, 1) == b
        maxima = jnp.where(own, jnp.max(part, axis=1, keepdims=True), maxima)
    return maxima


def _spread(scale: jax.Array, columns: slice, block: int) -> jax.Array:
    """The scales [rows, scales] of a slice of columns, one for each of them or one for all."""
    if scale.shape[1] == 1:
        return scale
    if block == 1:
        return scale[:, columns]
    b = columns.start // block
    wide = scale[:, b : b + 1]
    lanes = lax.broadcasted_iota(jnp.int32, (scale.shape[0], columns.stop - columns.start), 1)
    for i in range(1, pl.cdiv(lanes.shape[1], block)):
        wide = jnp.where(lanes < i * block, wide, scale[:, b + i : b + i + 1])
    return wide


# ---------------------------------------------------------------------------------------------------- arithmetic


def _bits(x: jax.Array) -> jax.Array:
    return lax.bitcast_convert_type(x, jnp.int32)


def _float(bits: jax.Array) -> jax.Array:
    return lax.bitcast_convert_type(bits, jnp.float32)


_MAGNITUDE = 0x7FFFFFFF
_INFINITY = 0x7F800000
_SMALLEST = 0x00800000  # normal


def _split(x: jax.Array) -> tuple[jax.Array, jax.Array]:
    """x = high + low, of 12 bits each: exact products with numbers of up to 12 bits."""
    high = _float(_bits(x) & ~0xFFF)
    return high, x - high


def _magnitude(x: jax.Array) -> jax.Array:
    """|x|, 0 where that is not finite."""
    bits = _bits(x) & _MAGNITUDE
    return _float(jnp.where(bits < _INFINITY, bits, 0))


@dataclass(frozen=True)
class FloatScales:
    """Scales that are any normal float32: absmax divided by the largest value of the format."""

    format: Format

    def kept(self, absmax: jax.Array) -> jax.Array:
        """absmax / largest, correctly rounded, at least the smallest normal number; 1 for one of 0 or subnormal."""
        largest = self.format.largest
        small = absmax < 1 / LIFT
        lift = jnp.where(small, LIFT, 1.0)
        dividend = absmax * lift
        quotient = dividend * (1 / largest)
        high, low = _split(quotient)
        # The remainder is exact, and no quotient lies halfway between two floats: `largest` has an odd factor above 1.
        quotient += ((dividend - largest * high) - largest * low) * (1 / largest)
        scale = jnp.maximum(quotient, SMALLEST * lift) * jnp.where(small, 1 / LIFT, 1.0)
        return jnp.where(absmax < SMALLEST, 1.0, scale)

    def encode(self, x: jax.Array, kept: jax.Array) -> jax.Array:
        """The int8 bits of x / scale: an approximate quotient, corrected by the exact remainder at the midpoint."""
        scale, target = kept, self.format
        bits = _bits(x)
        magnitude = bits & _MAGNITUDE
        lift = jnp.where(scale < 1 / LIFT, LIFT, 1.0)
        divisor = scale * lift
        high, low = _split(divisor)
        dividend = _float(jnp.where(magnitude < _SMALLEST, 0, magnitude)) * lift
        quotient = jnp.minimum(dividend * (1.0 / divisor), target.largest)

        # Adding `linear` to a quotient below it lines up its bits with those of equally spaced values.
        is_linear = quotient < target.linear
        offset = jnp.where(is_linear, target.linear, 0.0)
        shift = 23 - target.mantissa
        aligned = _bits(quotient + offset)
        below = aligned >> shift
        midpoint = _float((aligned & -(1 << shift)) | (1 << (shift - 1))) - offset
        beyond = (dividend - midpoint * high) - midpoint * low
        up = (beyond > 0) | ((beyond == 0) & (below & 1 == 1))
        first = int(np.float32(target.linear).view(np.int32)) >> shift
        code = below + up.astype(jnp.int32) - jnp.where(is_linear, first, first - (1 << target.mantissa))
        code = jnp.minimum(code, target.largest_code)

        negative = -code if target.dtype == "int8" else code - 128  # the sign bit, of two's complement
        code = jnp.where(magnitude > _INFINITY, target.nan_code, jnp.where(bits < 0, negative, code))
        return code.astype(jnp.int8)

    def scale(self, kept: jax.Array) -> jax.Array:
        """What is kept."""
        return kept


@dataclass(frozen=True)
class PowerScales:
    """MXFP8's scales, powers of two. Kernels keep their inverses: that of the smallest, 2^-127, is a normal float32."""

    format: Format
    rounding: Literal["up", "floor"]

    def kept(self, absmax: jax.Array) -> jax.Array:
        """The inverse of the power of two, of at least 2^-127, that absmax gives."""
        largest = int(np.float32(self.format.largest).view(np.int32))
        # Beyond the mantissa of `largest` a carry makes the exponent one more.
        carry = 0x7FFFFF - (largest & 0x7FFFFF) if self.rounding == "up" else 0
        exponent = ((_bits(absmax) + carry) >> 23) - ((largest >> 23) - 127)
        return _float((254 - jnp.maximum(exponent, 0)) << 23)

    def encode(self, x: jax.Array, kept: jax.Array) -> jax.Array:
        """The int8 bits of x times the inverse, which is exact but for what is subnormal in the format too."""
        inverse, target = kept, self.format
        bits = _bits(x)
        magnitude = bits & _MAGNITUDE
        quotient = jnp.minimum(_float(jnp.where(magnitude < _SMALLEST, 0, magnitude)) * inverse, target.largest)
        shift = 23 - target.mantissa
        aligned = _bits(quotient)
        normal = (aligned + ((1 << (shift - 1)) - 1) + ((aligned >> shift) & 1)) >> shift
        first = (int(np.float32(target.linear).view(np.int32)) >> shift) - (1 << target.mantissa)
        # Where the format's values are equally spaced, a float32 with that spacing rounds when it is added.
        spaced = np.float32(target.linear * 2.0**shift)
        linear = _bits(quotient + spaced) - int(spaced.view(np.int32))
        code = jnp.where(quotient < target.linear, linear, normal - first)
        code = jnp.where(magnitude > _INFINITY, target.nan_code, jnp.where(bits < 0, code - 128, code))
        return code.astype(jnp.int8)

    def scale(self, kept: jax.Array) -> jax.Array:
        """The power of two whose inverse is kept."""
        byte = 254 - (_bits(kept) >> 23)
        return _float(jnp.where(byte == 0, _SMALLEST >> 1, byte << 23))  # 2^-127 is subnormal


def _decode_by_power(q: jax.Array, byte: jax.Array) -> jax.Array:
    """q · 2^(byte - 127), zero where that is subnormal, NaN for a byte of 255; by two powers, as one is no float32."""
    low = byte >> 1
    values = q.astype(jnp.float32)
    bits = _bits(values * _float((low + 64) << 23) * _float((byte - low + 63) << 23))
    flushed = jnp.where(bits & _MAGNITUDE < _SMALLEST, _bits(values) & ~_MAGNITUDE, bits)
    return jnp.where(byte == 255, jnp.nan, _float(flushed))


def _decode(q: jax.Array, scale: jax.Array) -> jax.Array:
    """q · scale, rounded once; zero where that is subnormal."""
    small = scale < 1 / LIFT
    lift = jnp.where(small, LIFT, 1.0)
    factor = scale * lift
    values = q.astype(jnp.float32)
    product, magnitude = values * factor, jnp.abs(values)
    high, low = _split(factor)
    # Half a unit below the smallest normal number, an exact product is rounded up to it.
    least = jnp.where(small, SMALLEST * LIFT * (1 - 2.0**-24), 0.0)
    subnormal = (magnitude * high - least) + magnitude * low < 0
    kept = jnp.maximum(jnp.abs(product), jnp.where(small, SMALLEST * LIFT, 0.0)) * jnp.where(small, 1 / LIFT, 1.0)
    kept = jnp.where(subnormal | (magnitude == 0), 0.0, kept)
    signed = _float(_bits(kept) | (_bits(product) & ~_MAGNITUDE))
    return jnp.where(product == product, signed, product)


# ---------------------------------------------------------------------------------------------------- dequantise


@partial(jax.jit, static_argnums=(2, 3, 4, 5))
def dequantize_blocks(
    qvalue: jax.Array,
    scale: jax.Array,
    blocks: Blocks,
    decode: Decode,
    dtype: str,
    interpret: bool | pltpu.InterpretParams,
) -> jax.Array:
    """decode(qvalue, scale) [...] in dtype, the scale of each block [..., size / block] repeated over it."""
    if qvalue.size == 0:
        return jnp.zeros(qvalue.shape, dtype)
    layout = _layout(qvalue.shape, blocks)
    block = layout.block
    tiles = _tiles(layout.shape, [block])
    tile = pl.BlockSpec((None, tiles.rows, tiles.columns), tiles.at)
    a, rows, columns = layout.shape
    by_blocks = scale.reshape(a, rows // block[0], columns // block[1])
    out = pl.pallas_call(
        partial(_dequantize_kernel, block=block, decode=decode),
        out_shape=jax.ShapeDtypeStruct(layout.shape, dtype),
        grid=(*tiles.walks, tiles.steps),
        in_specs=[tile, tiles.scale_spec(block)],
        out_specs=tile,
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel",) * 4),
        cost_estimate=pl.CostEstimate(
            flops=12 * qvalue.size,
            transcendentals=0,
            bytes_accessed=(1 + jnp.dtype(dtype).itemsize) * qvalue.size + 4 * scale.size,
        ),
        interpret=interpret,
        name="dequantize",
    )(layout.view(qvalue), _tiled_scales(by_blocks, tiles, block))
    return layout.restore(out, qvalue.shape)


def _dequantize_kernel(q: Any, scale: Any, out: Any, *, block: Block, decode: Decode) -> None:
    def write(rows: Any, own: Any) -> None:
        for columns in _slices(q.shape[1], block[1], scale.shape[1]):
            wide = decode(q[rows, columns], _spread(scale[own, :], columns, block[1]))
            out[rows, columns] = wide.astype(out.dtype)

    _for_rows(q.shape[0], block[0], scale.shape[0], write)
