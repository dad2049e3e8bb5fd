"""The kernels that quantise and dequantise arrays in blocks that share a scale.

A block is read once, for its largest magnitude and its codes; one that is longer than a tile is walked twice. What a
scale is, how an element becomes a code, and a code a value, is the caller's: a `Scaling`, and a `Decode`.
"""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from op_arguments.probe import Rename, active, probe, renamed
from op_arguments.quantize import Blocks, DualQuantized, Quantized, check_finite_values
from tpu_kernels._lib.arguments import kernel_operand
from tpu_kernels._lib.call import bytes_of, call, jit
from tpu_kernels._lib.chip import LANES
from tpu_kernels._lib.formats import SMALLEST, Format, finite_magnitude
from tpu_kernels._lib.layout import SUBLANES, Layout, ScaleBlock, Tiles

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


@jit("blocks", "scaling", "interpret")
def quantize_blocks(
    x: jax.Array, *, blocks: Blocks, scaling: Scaling, interpret: bool | pltpu.InterpretParams
) -> Quantized:
    """The codes of x [...] in the scaling's format, and what it keeps of each block, float32 [..., size / block]."""
    scale_shape = tuple(size // block for size, block in zip(x.shape, blocks, strict=True))
    if x.size == 0:
        return Quantized(jnp.zeros(x.shape, scaling.format.dtype), jnp.ones(scale_shape, jnp.float32))
    layout = Layout.of(x.shape, blocks)
    tiles = Tiles.of(layout.shape, [layout.block])
    ((codes, scale),) = _quantize_call(layout.view(x), {str: layout.block}, tiles, scaling, interpret)
    return Quantized(_qvalue(layout.restore(codes, x.shape), scaling), scale.reshape(scale_shape))


def _rowwise(site: str) -> str:
    return f"rowwise_{site}"


def _columnwise(site: str) -> str:
    return f"columnwise_{site}"


@jit("blocks", "scaling", "interpret")
def dual_quantize_blocks(
    x: jax.Array, *, blocks: tuple[Blocks, Blocks], scaling: Scaling, interpret: bool | pltpu.InterpretParams
) -> DualQuantized:
    """`quantize_blocks` by rows and by columns, in one pass over x where both see it alike and in tiles alike."""
    layouts = [Layout.of(x.shape, each) for each in blocks]
    tiles = Tiles.of(layouts[0].shape, [layout.block for layout in layouts])
    if x.size == 0 or any(layout.split for layout in layouts) or tiles.steps > 1:
        pairs: list[jax.Array] = []
        for each, name in zip(blocks, (_rowwise, _columnwise), strict=True):
            with renamed(name):
                pairs += quantize_blocks(x, blocks=each, scaling=scaling, interpret=interpret)
        return DualQuantized(*pairs)
    outputs: list[jax.Array] = []
    by: dict[Rename, ScaleBlock] = {_rowwise: layouts[0].block, _columnwise: layouts[1].block}
    for codes, scale in _quantize_call(layouts[0].view(x), by, tiles, scaling, interpret):
        outputs += [_qvalue(codes.reshape(x.shape), scaling), scale.reshape(x.shape[:-2] + scale.shape[1:])]
    return DualQuantized(*outputs)


@jit("blocks", "decode", "dtype", "interpret")
def dequantize_blocks(
    qvalue: jax.Array,
    scale: jax.Array,
    *,
    blocks: Blocks,
    decode: Decode,
    dtype: str,
    interpret: bool | pltpu.InterpretParams,
) -> jax.Array:
    """decode(qvalue, scale) [...] in dtype, the scale of each block [..., size / block] repeated over it."""
    if qvalue.size == 0:
        return jnp.zeros(qvalue.shape, dtype)
    layout = Layout.of(qvalue.shape, blocks)
    block = layout.block
    tiles = Tiles.of(layout.shape, [block])
    a, rows, columns = layout.shape
    by_blocks = tiles.by_walk(scale.reshape(a, rows // block[0], columns // block[1]), block)
    out = jax.ShapeDtypeStruct(layout.shape, dtype)
    values: jax.Array = call(
        partial(_dequantize_kernel, block=block, decode=decode),
        name="dequantize",
        grid=(*tiles.walks, tiles.steps),
        parallel=4,
        operands=Quantized(tiles.elements_of(layout.view(qvalue), tiles.at), tiles.scales_of(by_blocks, block)),
        out=tiles.elements_of(out, tiles.at),
        cost=pl.CostEstimate(flops=12 * qvalue.size, transcendentals=0, bytes_accessed=bytes_of(qvalue, scale, out)),
        interpret=interpret,
    )
    return layout.restore(values, qvalue.shape)


def check_finite_here(x: jax.Array, nan: bool) -> None:
    """Refuse infinities in x, and with `nan` NaN (ValueError), where its values are at hand."""
    if not isinstance(x, jax.core.Tracer):
        values = np.asarray(x)
        check_finite_values(int(np.isinf(values).sum()), int(np.isnan(values).sum()) if nan else 0)


def _qvalue(codes: jax.Array, scaling: Scaling) -> jax.Array:
    return lax.bitcast_convert_type(codes, jnp.dtype(scaling.format.dtype))


def _quantize_call(
    x: jax.Array,
    blocks: dict[Rename, ScaleBlock],
    tiles: Tiles,
    scaling: Scaling,
    interpret: bool | pltpu.InterpretParams,
) -> list[Quantized]:
    """x [A, R, C], quantised by each of `blocks`, in one pass (two where tiles share their blocks).

    blocks: by the names that a probe is shown their sites under.
    Qvalues are int8 bits of the format where interpreted.
    """
    x = kernel_operand(x)
    passes = 1 if tiles.steps == 1 else 2

    def x_tile(a: Any, i: Any, j: Any, step: Any) -> Any:
        return tiles.at(a, i, j, step % tiles.steps)

    def q_tile(a: Any, i: Any, j: Any, step: Any) -> Any:
        return tiles.at(a, i, j, jnp.maximum(step - (passes - 1) * tiles.steps, 0))

    # Interpreted, fp8 is made of int8 at the end: XLA's CPU backend copies it by conversions that change NaNs.
    codes = jax.ShapeDtypeStruct(x.shape, jnp.dtype("int8" if interpret else scaling.format.dtype))
    scales = [jax.ShapeDtypeStruct((*tiles.walks, *tiles.scales(block)), jnp.float32) for block in blocks.values()]
    outputs = call(
        partial(_quantize_kernel, blocks=blocks, tiles=tiles, scaling=scaling),
        name="quantize",
        grid=(*tiles.walks, passes * tiles.steps),
        parallel=3,
        operands=tiles.elements_of(x, x_tile),
        out=[
            Quantized(tiles.elements_of(codes, q_tile), tiles.scales_of(scale, block))
            for scale, block in zip(scales, blocks.values(), strict=True)
        ],
        cost=pl.CostEstimate(
            flops=40 * x.size * len(blocks),
            transcendentals=0,
            bytes_accessed=passes * bytes_of(x) + bytes_of([codes] * len(blocks), scales),
        ),
        interpret=interpret,
    )
    return [
        Quantized(q, tiles.from_walks(scale, block)) for (q, scale), block in zip(outputs, blocks.values(), strict=True)
    ]


def _quantize_kernel(
    x: Any, outputs: list[Quantized], _: None, *, blocks: dict[Rename, ScaleBlock], tiles: Tiles, scaling: Scaling
) -> None:
    """A step of a walk. The first pass measures the blocks, the last one encodes; the same where a walk is a step."""
    step, last_step = pl.program_id(3), pl.num_programs(3) - 1
    _, row, column = tiles.at(0, pl.program_id(1), pl.program_id(2), step % tiles.steps)
    for out, (name, block) in zip(outputs, blocks.items(), strict=True):
        tile = _Tile(x, out, block, tiles, scaling, row, column)
        for_rows = partial(_for_rows, tiles.rows, block[0], out.scale.shape[0])
        with renamed(name):
            pl.when(step == 0)(tile.begin)
            pl.when(step < tiles.steps)(partial(for_rows, tile.measure))
            pl.when(step == tiles.steps - 1)(tile.finish)
            pl.when(step > last_step - tiles.steps)(partial(for_rows, tile.encode))


class _Tile(NamedTuple):
    """A tile of x, and one pair of outputs that it is quantised to."""

    x: Any
    out: Quantized
    block: ScaleBlock
    tiles: Tiles
    scaling: Scaling
    row: Any  # of tiles
    column: Any

    def begin(self) -> None:
        """Set the maxima of the blocks, which lie where their scales will, to 0."""
        self.out.scale[...] = jnp.zeros_like(self.out.scale)

    def measure(self, rows: Any, own: Any) -> None:
        """Raise the maxima `own` to those of 32 rows."""
        scale = self.out.scale
        values = finite_magnitude(self.x[rows, :].astype(jnp.float32))
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
        if active():
            first = pl.program_id(1) * scale.shape[0], pl.program_id(2) * scale.shape[1]
            sizes = self.tiles.shape[1] // self.block[0], self.tiles.shape[2] // self.block[1]
            there = _is_there(scale.shape, first, sizes)
            probe("absmax", jnp.where(absmax < SMALLEST, 0.0, absmax), there)
            probe("scale", self.scaling.scale(scale[...]), there)

    def encode(self, rows: Any, own: Any) -> None:
        """Write the codes of 32 rows."""
        q, scale = self.out
        for columns in _slices(self.tiles.columns, self.block[1], scale.shape[1]):
            kept = _spread(scale[own, :], columns, self.block[1])
            if active():
                first = self.row * self.tiles.rows + rows.start, self.column * self.tiles.columns + columns.start
                each = jnp.broadcast_to(self.scaling.scale(kept), (SUBLANES, columns.stop - columns.start))
                probe("spread", each, _is_there(each.shape, first, self.tiles.shape[1:]))
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
    """Broadcast scales [rows, blocks] to a slice of the columns: [rows, columns], or [rows, 1] where one is for all."""
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


def _dequantize_kernel(given: Quantized, out: Any, _: None, *, block: ScaleBlock, decode: Decode) -> None:
    q, scale = given

    def write(rows: Any, own: Any) -> None:
        for columns in _slices(q.shape[1], block[1], scale.shape[1]):
            wide = decode(q[rows, columns], _spread(scale[own, :], columns, block[1]))
            out[rows, columns] = wide.astype(out.dtype)

    _for_rows(q.shape[0], block[0], scale.shape[0], write)
