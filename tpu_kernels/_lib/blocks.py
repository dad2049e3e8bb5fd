"""The kernels that quantise and dequantise arrays in blocks that share a scale.

A block is read once, for its largest magnitude and its codes; one that is longer than a tile by two kernels. What a
scale is, how an element becomes a code, and a code a value, is the caller's: a `Scaling`, and a `Decode`.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial, reduce
from itertools import product
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from op_arguments.probe import Rename, active, probe, renamed
from op_arguments.quantize import Blocks, DualQuantized, Quantized, check_finite_values
from tpu_kernels._lib import chip
from tpu_kernels._lib.arguments import kernel_operand
from tpu_kernels._lib.call import bytes_of, call, is_interpreted, jit, rarely
from tpu_kernels._lib.chip import LANES, sublanes
from tpu_kernels._lib.formats import SMALLEST, Format, exponents, float_of
from tpu_kernels._lib.lanes import maxima, maxima_of_rows, spread
from tpu_kernels._lib.layout import SUBLANES, Layout, ScaleBlock, Tiles

USUAL = 2.0**-60
"""Blocks whose largest magnitude is below take no part in short cuts: their scales' remainders may be subnormal.

Nor do scales below it, or beyond its inverse, when codes are multiplied: products may be.
"""

MOST_AT_ONCE = 4 * SUBLANES
"""Rows of a block that are measured together."""

SLICE = 4 * SUBLANES, 2 * LANES
"""Rows and columns that are encoded together, without a loop where an exact comparison of each is much code."""

Decode = Callable[[jax.Array, jax.Array], jax.Array]
"""(codes, their scales) to values."""


class Scaling(Protocol):
    """How a block gets its scale, and an element its code."""

    @property
    def format(self) -> Format:
        """That of the codes."""

    @property
    def scale_dtype(self) -> str:
        """That of the scales."""

    def factor_dtype(self, dtype: Any) -> str:
        """That in which `encode_short` is given a factor for elements in dtype."""

    def kept(self, absmax: jax.Array) -> jax.Array:
        """What the kernel keeps of each block in float32: its scale, or what `encode` needs of it."""

    def encode(self, x: jax.Array, kept: jax.Array) -> jax.Array:
        """The int8 bits of x / scale in the format: the exact quotient rounded to nearest even, saturating."""

    def short(self, absmax: jax.Array, dtype: Any) -> tuple[jax.Array, jax.Array]:
        """`kept`, and what `encode_short` needs for elements in dtype, of blocks of 0 or of at least `USUAL`."""

    def encode_short(self, x: jax.Array, factor: jax.Array) -> jax.Array:
        """As `encode`, for finite x; the 8 bits of bfloat16 leave no quotient near a midpoint that is not on it."""

    def scale(self, kept: jax.Array) -> jax.Array:
        """The scale itself, in float32."""

    def stored(self, kept: jax.Array) -> jax.Array:
        """The scale as it is returned: of one byte its bits, in int8."""


@jit("blocks", "scaling", "interpret")
def quantize_blocks(
    x: jax.Array, *, blocks: Blocks, scaling: Scaling, interpret: bool | pltpu.InterpretParams
) -> Quantized:
    """The codes of x [...] in the scaling's format, and the scale of each block [..., size / block] in its dtype."""
    scale_shape = tuple(size // block for size, block in zip(x.shape, blocks, strict=True))
    if x.size == 0:
        return Quantized(jnp.zeros(x.shape, scaling.format.dtype), jnp.ones(scale_shape, scaling.scale_dtype))
    layout = Layout.of(x.shape, blocks)
    tiles = Tiles.of(layout.shape, [layout.block])
    ((codes, scale),) = _quantized(layout.view(x), Pass({str: layout.block}, tiles, scaling, interpret))
    return Quantized(layout.restore(codes, x.shape), scale.reshape(scale_shape))


def rowwise(site: str) -> str:
    return f"rowwise_{site}"


def columnwise(site: str) -> str:
    return f"columnwise_{site}"


@jit("blocks", "scaling", "interpret")
def dual_quantize_blocks(
    x: jax.Array, *, blocks: tuple[Blocks, Blocks], scaling: Scaling, interpret: bool | pltpu.InterpretParams
) -> DualQuantized:
    """`quantize_blocks` by rows and by columns, in one pass over x where both see it alike and in tiles alike."""
    layouts = [Layout.of(x.shape, each) for each in blocks]
    tiles = Tiles.of(layouts[0].shape, [layout.block for layout in layouts]) if x.size else None
    if not tiles or not tiles.is_one_pass or any(each.split for each in layouts) or not stores_scales(tiles, scaling):
        pairs: list[jax.Array] = []
        for each, name in zip(blocks, (rowwise, columnwise), strict=True):
            with renamed(name):
                pairs += quantize_blocks(x, blocks=each, scaling=scaling, interpret=interpret)
        return DualQuantized(*pairs)
    outputs: list[jax.Array] = []
    by: dict[Rename, ScaleBlock] = {rowwise: layouts[0].block, columnwise: layouts[1].block}
    for codes, scale in _quantized(layouts[0].view(x), Pass(by, tiles, scaling, interpret)):
        outputs += [codes.reshape(x.shape), scale.reshape(x.shape[:-2] + scale.shape[1:])]
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
    """decode(qvalue, scale) [...] in dtype, the scale of each block [..., size / block] repeated over it.

    Scales are float32, or bytes of float8_e8m0fnu, which decode is given as the exponent bits of a float32.
    """
    if qvalue.size == 0:
        return jnp.zeros(qvalue.shape, dtype)
    layout = Layout.of(qvalue.shape, blocks)
    block = layout.block
    tiles = Tiles.of(layout.shape, [block])
    a, rows, columns = layout.shape
    by_blocks = scale.reshape(a, rows // block[0], columns // block[1])
    out = jax.ShapeDtypeStruct(layout.shape, dtype)
    values: jax.Array = call(
        partial(_dequantize_kernel, block=block, tiles=tiles, decode=decode),
        name="dequantize",
        grid=(*tiles.walks, tiles.steps),
        parallel=3 if tiles.is_ragged else 4,
        operands=Quantized(tiles.elements_of(layout.view(qvalue), tiles.at), tiles.scales_of(by_blocks, block)),
        out=tiles.elements_of(out, tiles.at),
        scratch=None if scale.dtype == jnp.float32 else pltpu.VMEM(tiles.scales_of_walk(block), jnp.float32),
        cost=pl.CostEstimate(flops=12 * qvalue.size, transcendentals=0, bytes_accessed=bytes_of(qvalue, scale, out)),
        interpret=interpret,
    )
    return layout.restore(values, qvalue.shape)


def check_finite_here(x: jax.Array, nan: bool) -> None:
    """Refuse infinities in x, and with `nan` NaN (ValueError), where its values are at hand."""
    if not isinstance(x, jax.core.Tracer):
        values = np.asarray(x)
        check_finite_values(int(np.isinf(values).sum()), int(np.isnan(values).sum()) if nan else 0)


def _quantized(x: jax.Array, how: "Pass") -> list[Quantized]:
    """x [A, R, C], quantised by each of the pass's blocks."""
    x = kernel_operand(x)
    results = how.results(x)
    stored: list[Any] = call(
        partial(_quantize_kernel, how=how),
        name="quantize",
        grid=(*how.tiles.walks, how.tiles.steps),
        parallel=3,
        operands=how.tiles.elements_of(x, how.tiles.at),
        out=results,
        scratch=how.memory(),
        cost=pl.CostEstimate(
            flops=how.operations * x.size,
            transcendentals=0,
            bytes_accessed=bytes_of(x, results),
        ),
        interpret=how.interpret,
    )
    return how.returned(x, stored)


def _encoded(x: jax.Array, measured: "Maxima", how: "Pass") -> Quantized:
    """x [A, R, C] in blocks that were measured, as kernels store it."""
    tiles, (block,) = how.tiles, how.blocks.values()
    out, (given,) = how.codes(block), how.memory()
    stored: Quantized = call(
        partial(_encode_kernel, how=how),
        name="encode",
        grid=(*tiles.walks, tiles.steps),
        parallel=3,
        operands=_Measured(tiles.elements_of(x, tiles.at), jax.tree.map(partial(tiles.maxima_of, block), measured)),
        out=out,
        scratch=_Scratch(given, None if measured.shown is None else pltpu.SMEM((1,), jnp.int32)),
        cost=pl.CostEstimate(flops=40 * x.size, transcendentals=0, bytes_accessed=bytes_of(x, measured, out)),
        interpret=how.interpret,
    )
    return stored


def stores_scales(tiles: Tiles, scaling: Scaling) -> bool:
    """Whether each tile of a walk can store its rows of scales: of bytes no single row can be stored."""
    return tiles.steps_r == 1 or jnp.dtype(scaling.scale_dtype).itemsize > 1


class Maxima(NamedTuple):
    """The largest magnitudes of blocks that tiles share, of rows that share one each in its place of a register.

    finite: of what is finite. shown: not finite from where an element is not; None where no code may be short.
    """

    finite: Any
    shown: Any


class _Measured(NamedTuple):
    x: Any
    maxima: Maxima


class _Scratch(NamedTuple):
    """Memory of a walk that encodes: what each block is given, and whether by `encode_short` [1], where that may be."""

    given: Any
    is_short: Any


def _may_be_short(x: Any) -> bool:
    """Whether `encode_short` may encode x: probes are shown what `encode` does."""
    return bool(x.dtype in (jnp.bfloat16, jnp.float32) and not active())


class Pass(NamedTuple):
    """A pass over an array [A, R, C] in tiles, by each of `blocks`.

    Tiles are quantised. Blocks that several share are measured, and encoded in a pass of their own.
    blocks: by the names that a probe is shown their sites under.
    """

    blocks: Mapping[Rename, ScaleBlock]
    tiles: Tiles
    scaling: Scaling
    interpret: bool | pltpu.InterpretParams

    @property
    def operations(self) -> int:
        """Of each element: to measure and encode it, or to measure it alone."""
        return sum(2 if self.tiles.shares(block) else 40 for block in self.blocks.values())

    def results(self, x: Any) -> list[Any]:
        """What a kernel returns of x by each of the blocks: codes and scales, or `Maxima`."""
        return [
            self._maxima(block, _may_be_short(x)) if self.tiles.shares(block) else self.codes(block)
            for block in self.blocks.values()
        ]

    def _maxima(self, block: ScaleBlock, may_be_short: bool) -> "Maxima":
        each = self.tiles.maxima_of(block)
        return Maxima(each, each if may_be_short else None)

    def codes(self, block: ScaleBlock) -> Quantized:
        """What a kernel returns that encodes.

        Interpreted, bytes are int8 until the end: XLA's CPU backend copies fp8 by conversions that change NaNs.
        """
        a, rows, columns = self.tiles.shape
        dtypes = [jnp.dtype(name) for name in (self.scaling.format.dtype, self.scaling.scale_dtype)]
        stored = [jnp.dtype(jnp.int8) if self.interpret and dtype.itemsize == 1 else dtype for dtype in dtypes]
        shapes = (a, rows, columns), (a, rows // block[0], columns // block[1])
        codes, scale = map(jax.ShapeDtypeStruct, shapes, stored)
        return Quantized(self.tiles.elements_of(codes, self.tiles.at), self.tiles.scales_of(scale, block))

    def memory(self) -> list[Any]:
        """For what the blocks of a tile are given."""
        return [pltpu.VMEM(self.tiles.maxima(block), jnp.float32) for block in self.blocks.values()]

    def tile(self, x: Any, results: list[Any], memory: list[Any]) -> "Tile":
        """Within a kernel, the tile of x at this step; results and memory: as the methods of these names."""
        _, *place = self.tiles.at(*map(pl.program_id, range(4)))
        tile = Tile(x, [], [])
        for (name, block), result, given in zip(self.blocks.items(), results, memory, strict=True):
            blocks = TileBlocks(x, TileScales(given, block, self.tiles), place)
            if isinstance(result, Maxima):
                tile.shared.append(Maxima(*(ref if ref is None else blocks.kept_in(ref) for ref in result)))
            else:
                tile.ways.append(Way(name, blocks, result, self.scaling))
        return tile

    def returned(self, x: jax.Array, stored: Sequence["Quantized | Maxima"]) -> list[Quantized]:
        """What a kernel stored of x, in the dtypes of codes and scales; where that is maxima, x is encoded."""
        quantized, dtypes = [], (self.scaling.format.dtype, self.scaling.scale_dtype)
        for got, (name, block) in zip(stored, self.blocks.items(), strict=True):
            if isinstance(got, Maxima):
                tiles = Tiles.of(self.tiles.shape, [block])
                got = _encoded(x, got, self._replace(blocks={name: block}, tiles=tiles))
            if self.tiles.has_transposed(block, got.scale.dtype):
                got = got._replace(scale=got.scale.swapaxes(1, 2))
            parts = zip(got, map(jnp.dtype, dtypes), strict=True)
            quantized.append(Quantized(*(lax.bitcast_convert_type(part, dtype) for part, dtype in parts)))
        return quantized


def _quantize_kernel(x: Any, results: list[Any], memory: list[Any], *, how: Pass) -> None:
    quantize_tile([how.tile(x, results, memory)])


def quantize_tile(arrays: "Sequence[Tile]") -> None:
    """Measure a tile of each array, all of one dtype, and encode it in its ways."""
    may_be_short = _may_be_short(arrays[0].x)
    encoded = [tile.ways for tile in arrays if tile.ways]
    shared = [each for tile in arrays for each in tile.shared]
    memory: list[TileBlocks] = jax.tree.leaves(shared, is_leaf=lambda each: isinstance(each, TileBlocks))

    def measure(is_finite: bool) -> None:
        for tile in arrays:
            own = [way.blocks for way in tile.ways]
            _clear(own)
            _measure([*own, *(each.shown if is_finite else each.finite for each in tile.shared)], is_finite)
            _reduce(own)

    def encode(is_short: bool) -> None:
        for ways in encoded:
            _finish(ways, is_short)
            _encode(ways, is_short)

    def usual() -> None:
        for each in shared:
            each.finite.given.ref[...] = each.shown.given.ref[...]
        encode(is_short=True)

    step, steps = pl.program_id(3), pl.num_programs(3)
    if shared:
        pl.when(step == 0)(partial(_clear, memory))
    measure(is_finite=may_be_short)
    if may_be_short:
        are_usual = [way.blocks.is_usual() for ways in encoded for way in ways]
        is_usual = reduce(jnp.logical_and, are_usual + [each.shown.is_finite() for each in shared])
        rarely(jnp.logical_not(is_usual))(partial(measure, is_finite=False))
        pl.when(is_usual)(usual)
        rarely(jnp.logical_not(is_usual))(partial(encode, is_short=False))
    else:
        encode(is_short=False)
    if shared:
        pl.when(step == steps - 1)(partial(_reduce, memory))


def _encode_kernel(operands: _Measured, out: Quantized, scratch: _Scratch, *, how: Pass) -> None:
    """A step of a walk over tiles whose blocks were measured."""
    step, (finite, shown) = pl.program_id(3), operands.maxima
    ways = how.tile(operands.x, [out], [scratch.given]).ways

    @pl.when(step == 0)
    def begin() -> None:
        scratch.given[...] = finite[...]
        if shown is not None:
            scratch.is_short[0] = ways[0].blocks.kept_in(shown).is_usual().astype(jnp.int32)

    def encode(is_short: bool) -> None:
        pl.when(step == 0)(partial(_finish, ways, is_short))
        _encode(ways, is_short)

    if shown is None:
        encode(is_short=False)
    else:
        is_short = scratch.is_short[0] == 1
        pl.when(is_short)(partial(encode, is_short=True))
        rarely(jnp.logical_not(is_short))(partial(encode, is_short=False))


class TileScales(NamedTuple):
    """What each block of a tile has, in rows of a reference from row `first` on."""

    ref: Any
    block: ScaleBlock
    tiles: Tiles
    first: Any = 0

    @property
    def is_shared(self) -> bool:
        """Whether other tiles have parts of the same blocks."""
        return self.tiles.shares(self.block)

    @property
    def is_whole(self) -> tuple[bool, bool]:
        """Whether a block is a whole axis, of rows and of columns."""
        return self.block[0] == self.tiles.shape[1], self.block[1] == self.tiles.shape[2]

    def row_of(self, rows: Any) -> Any:
        """Which row of blocks 32 rows of the tile are in, where they share one."""
        return 0 if self.is_whole[0] else _over(rows.start, self.block[0])

    def spread(self, rows: Any, columns: Any, dtype: Any) -> jax.Array:
        """What the elements of some rows and columns have, in dtype: [rows, columns], or 1 where one is for all."""
        c = self.block[1]
        own = rows if self.tiles.is_by_row(self.block) else pl.ds(self.first + self.row_of(rows), 1)
        if self.is_whole[1]:
            return self.ref[own, :1].astype(dtype)
        if c == 1:
            return self.ref[own, columns].astype(dtype)
        registers = []
        for start in range(0, columns.size, LANES):
            b = _over(columns.start, c) + start // c if columns.size % c == 0 else _over(columns.start + start, c)
            scales = self.ref[own, pl.ds(pl.multiple_of(b & -LANES, LANES), LANES)].astype(dtype)
            registers.append(spread(jnp.broadcast_to(scales, (rows.size, LANES)), b & (LANES - 1), c))
        return jnp.concatenate(registers, axis=1)


class TileBlocks(NamedTuple):
    """The blocks of a tile of x.

    given: memory for what the elements of each block are encoded with, for its maxima before: of rows that share a
    block one for each row of a register.
    """

    x: Any
    given: TileScales
    place: Sequence[Any]  # of the tile, counted in tiles: its row and column

    def kept_in(self, ref: Any) -> "TileBlocks":
        """The same blocks with other memory."""
        return self._replace(given=self.given._replace(ref=ref))

    @property
    def rows_at_once(self) -> int:
        """Rows that may be measured at once."""
        r = self.given.block[0]
        return SUBLANES if self.given.is_shared or self.given.is_whole[0] or r > MOST_AT_ONCE else max(r, SUBLANES)

    def is_gathered(self, at_once: int) -> bool:
        """Whether a block has more rows than are measured at once."""
        return self.given.is_shared or self.given.is_whole[0] or self.given.block[0] > at_once

    def measure(self, rows: Any, values: jax.Array) -> None:
        """Put the maxima of rows, whose magnitudes are values, in their place."""
        ref, block, tiles, _ = self.given
        # A block that is a whole axis ends where the array does; beyond it the tile holds garbage.
        for axis, (size, tile) in enumerate(zip(tiles.shape[1:], (tiles.rows, tiles.columns), strict=True)):
            if self.given.is_whole[axis] and size % tile:
                first = self.place[axis] * tile + (rows.start if axis == 0 else 0)
                values = values.astype(jnp.float32)
                there = first + lax.broadcasted_iota(jnp.int32, values.shape, axis) < size
                values = jnp.where(there, values, 0.0)
        own = rows
        if block[0] > 1 or self.given.is_whole[0]:
            values, own = _fold(values), pl.ds(pl.multiple_of(8 * self.given.row_of(rows), 8), 8)
        if self.given.is_whole[1]:
            most = jnp.max(values, axis=1, keepdims=True).astype(jnp.float32)
        elif block[1] == 1:
            most = values.astype(jnp.float32)
        else:
            most = maxima(values, block[1], tiles.scales(block)[1])
        is_gathered = self.is_gathered(rows.size)
        ref[own, :] = jnp.maximum(ref[own, :], most) if is_gathered else jnp.broadcast_to(most, ref[own, :].shape)

    def reduce(self) -> None:
        """Bring the maxima of each block together, where they are those of the rows of a register."""
        ref, block, tiles, _ = self.given
        if block[0] > 1 or self.given.is_whole[0]:
            count, width = tiles.scales(block)[0], ref.shape[1]
            for first, column in product(range(0, count, 8), range(0, width, 2 * LANES)):
                here, columns = range(first, min(first + 8, count)), slice(column, min(column + 2 * LANES, width))
                most = maxima_of_rows([ref[8 * i : 8 * i + 8, columns] for i in here])
                ref[here.start : here.stop, columns] = most[: len(here)]

    def is_finite(self) -> Any:
        """Whether all that was measured is."""
        return jnp.max(self.given.ref[...]) < jnp.inf

    def is_usual(self) -> Any:
        """Whether all elements are finite, and the maximum of every block 0 or at least USUAL."""
        tiles = self.given.tiles
        most = self.given.ref[: tiles.scales(self.given.block)[0], :]
        if tiles.shape[1] % tiles.rows or tiles.shape[2] % tiles.columns:  # beyond the array the tile holds garbage
            most = jnp.where(self.are_there(most.shape), most, 0.0)
        return (jnp.min(jnp.where(most == 0, USUAL, most)) >= USUAL) & (jnp.max(most) < jnp.inf)

    def are_there(self, shape: tuple[int, ...]) -> jax.Array:
        """Which of the tile's blocks, of so many rows and columns, the array has."""
        tiles, block = self.given.tiles, self.given.block
        first, end = [], []
        for axis, each in enumerate(tiles.scales(block)):
            first.append(0 if self.given.is_whole[axis] else self.place[axis] * each)
            end.append(jnp.minimum(first[-1] + each, tiles.shape[1 + axis] // block[axis]))
        return _is_there(shape, first, end)


class Way(NamedTuple):
    """One of the ways in which a tile is quantised."""

    name: Rename
    blocks: TileBlocks
    out: Quantized
    scaling: Scaling

    def finish(self, is_short: bool) -> None:
        """Return what is kept of the blocks, and put what `encode` (or `encode_short`) needs in place of the maxima."""
        given, place = self.blocks.given, self.blocks.place
        ref, block, tiles, _ = given
        count = tiles.scales(block)[0]
        absmax = ref[:count, :]
        kept, factors = self.scaling.short(absmax, self.blocks.x.dtype) if is_short else [self.scaling.kept(absmax)] * 2
        transposed = tiles.has_transposed(block, self.out.scale.dtype)
        stored = self.scaling.stored(kept)
        stored = lax.bitcast_convert_type(stored.T if transposed else stored, self.out.scale.dtype)
        if transposed:
            self.out.scale[...] = stored
        elif tiles.steps_r == 1 or block[0] == 1 or given.is_whole[0]:
            self.out.scale[:count, :] = stored
        else:
            for i in range(count):
                self.out.scale[pl.ds(place[0] % tiles.steps_r * count + i, 1), :] = stored[i : i + 1]
        ref[:count, :] = factors
        if active():
            there = self.blocks.are_there(kept.shape)
            probe("absmax", jnp.where(absmax < SMALLEST, 0.0, absmax), there)
            probe("scale", self.scaling.scale(kept), there)


class Tile(NamedTuple):
    """A tile of an array, the ways in which it is quantised, and `Maxima` of the blocks that it shares."""

    x: Any
    ways: list[Way]
    shared: list[Maxima]


def _at_once(blocks: Sequence[TileBlocks]) -> int:
    """Rows of a tile that are measured at once."""
    return min(each.rows_at_once for each in blocks)


def _clear(blocks: Sequence[TileBlocks]) -> None:
    for each in blocks:
        if each.is_gathered(_at_once(blocks)):
            each.given.ref[...] = jnp.zeros_like(each.given.ref)


def _measure(blocks: Sequence[TileBlocks], is_finite: bool) -> None:
    """Measure the blocks of a tile in each way; what is not finite is infinite or NaN if is_finite, else 0."""
    x, tiles, at_once = blocks[0].x, blocks[0].given.tiles, _at_once(blocks)

    def of_rows(rows: Any) -> None:
        values = x[rows, :] if is_finite or chip.computes_bfloat16() else x[rows, :].astype(jnp.float32)
        values = jnp.abs(values)
        if not is_finite or is_interpreted():  # XLA's maximum drops NaN on CPUs; a TPU's is NaN
            values = jnp.where(values < jnp.inf, values, jnp.inf if is_finite else 0)
        for each in blocks:
            each.measure(rows, values)

    most = unrolled(1) // (at_once * tiles.columns) if is_finite else 1
    _for_rows(tiles.rows, at_once, of_rows, divisor(tiles.rows // at_once, most))


def unrolled(count: int) -> int:
    """Elements that are measured or encoded, in `count` ways, without a loop: more hide latency better.

    Before v6e, which computes with bfloat16, that is more code an element, and more that does not fit registers.
    Interpreted, a loop compiles faster.
    """
    if is_interpreted():
        return math.prod(SLICE)
    return 2**19 // count if chip.computes_bfloat16() else 2**17


def _reduce(blocks: Sequence[TileBlocks]) -> None:
    for each in blocks:
        each.reduce()


def _finish(ways: Sequence[Way], is_short: bool) -> None:
    for way in ways:
        with renamed(way.name):
            way.finish(is_short)


def _encode(ways: Sequence[Way], is_short: bool) -> None:
    """Write the codes of a tile; is_short: by `encode_short`."""
    x, given, (row, column) = ways[0].blocks
    tiles, scaling = given.tiles, ways[0].scaling
    rarely = not is_short and _may_be_short(x)
    straight = unrolled(len(ways)) if is_short else 1 if rarely else math.prod(SLICE)

    def write(rows: Any, columns: Any) -> None:
        values = x[rows, columns]
        for way in ways:
            given = way.blocks.given.spread(rows, columns, scaling.factor_dtype(x.dtype) if is_short else "float32")
            if active():
                first = row * tiles.rows + rows.start, column * tiles.columns + columns.start
                each = jnp.broadcast_to(scaling.scale(given), values.shape)
                with renamed(way.name):
                    probe("spread", each, _is_there(each.shape, first, tiles.shape[1:]))
            codes = (
                scaling.encode_short(values, given) if is_short else scaling.encode(values.astype(jnp.float32), given)
            )
            way.out.qvalue[rows, columns] = lax.bitcast_convert_type(codes, way.out.qvalue.dtype)

    _for_parts(tiles, [way.blocks.given.block for way in ways], write, straight)


def _over(index: Any, size: int) -> Any:
    """index // size, which for numbers that may be negative is a dozen operations of the scalar unit."""
    return index >> size.bit_length() - 1 if size & (size - 1) == 0 else lax.div(index, size)


def _fold(values: jax.Array) -> jax.Array:
    """The maxima of rows that lie in the same places of registers: [rows, columns] -> float32 [8, columns]."""
    rows = sublanes(values.dtype)
    most = jnp.max(values.reshape(-1, rows, values.shape[1]), axis=0).astype(jnp.float32)
    return jnp.max(most.reshape(-1, 8, values.shape[1]), axis=0)


def _is_there(tile: tuple[int, ...], first: Sequence[Any], end: Sequence[Any]) -> jax.Array:
    """Which elements of a tile, whose first is at `first`, lie before `end`."""
    rows, columns = (lax.broadcasted_iota(jnp.int32, tile, axis) + first[axis] < end[axis] for axis in (0, 1))
    return rows & columns


def _for_rows(rows: int, at_once: int, body: Callable[[Any], None], unroll: int) -> None:
    """Call body with slices of so many rows of a tile, `unroll` of them in a step."""

    def step(i: Any, _: Any) -> None:
        for n in range(unroll):
            body(pl.ds(pl.multiple_of((i * unroll + n) * at_once, at_once), at_once))

    lax.fori_loop(0, rows // at_once // unroll, step, None)


def _for_parts(tiles: Tiles, blocks: Sequence[ScaleBlock], body: Callable[[Any, Any], None], straight: int) -> None:
    """Call body with slices of a tile, of 256 columns (or 128) and 128 rows (or 32) in the same blocks of `blocks`.

    Lanes are permuted alike for all rows of a slice: one pattern serves as many as there are. Where each row is a
    block slices are of 32 rows and up to 1024 columns: they spread one scale. straight: elements that are passed over
    without a loop; slices are short where it is less than one has.
    """
    many, columns = SLICE[0], LANES if tiles.columns % SLICE[1] else SLICE[1]
    alike = all(r in (1, tiles.shape[1]) or r % many == 0 for r, _ in blocks) and tiles.rows % many == 0
    if all(block == (1, tiles.shape[2]) for block in blocks):
        columns *= divisor(tiles.columns // columns, many // SUBLANES)
        alike = False
    rows, all_columns = many if alike and many * columns <= straight else SUBLANES, tiles.columns // columns
    each = divisor(all_columns, straight // (rows * columns))
    each_rows = divisor(tiles.rows // rows, straight // (rows * columns * all_columns))

    def of_columns(i: Any, _: Any) -> None:
        def of_rows(j: Any, _: Any) -> None:
            for m, n in product(range(each_rows), range(each)):
                first = pl.multiple_of((j * each_rows + m) * rows, rows)
                body(pl.ds(first, rows), pl.ds(pl.multiple_of((i * each + n) * columns, columns), columns))

        lax.fori_loop(0, tiles.rows // rows // each_rows, of_rows, None)

    lax.fori_loop(0, all_columns // each, of_columns, None)


def divisor(size: int, most: int) -> int:
    """The largest divisor of size that is at most `most`, at least 1."""
    return max(n for n in range(1, max(most, 1) + 1) if size % n == 0)


def _dequantize_kernel(
    given: Quantized, out: Any, powers: Any, *, block: ScaleBlock, tiles: Tiles, decode: Decode
) -> None:
    """powers: memory for scales that are bytes, in float32."""
    q, ref = given
    steps = [pl.program_id(axis) for axis in range(4)]
    if powers is not None:
        powers[...] = float_of(exponents(ref[...], tiles.has_transposed(block, ref.dtype)) << 23)
        ref = powers
    first = 0 if tiles.spanned else tiles.at(*steps)[1] % tiles.steps_r * tiles.scales(block)[0]
    scales = TileScales(ref, block, tiles, first)
    start = [index * size for index, size in zip(tiles.scales_at(block, *steps)[1:], ref.shape, strict=True)]
    end = [size // each for size, each in zip(tiles.shape[1:], block, strict=True)]
    found = jnp.where(_is_there(ref.shape, start, end), ref[...], 1.0)
    is_usual = (jnp.min(found) >= USUAL) & (jnp.max(found) <= 1 / USUAL)
    # Products of codes with powers of two are exact in bfloat16 too.
    short = out.dtype if powers is not None and chip.computes_bfloat16() else jnp.dtype(jnp.float32)

    def write(rows: Any, columns: Any, is_short: bool) -> None:
        if is_short:
            wide = q[rows, columns].astype(short) * scales.spread(rows, columns, short)
        else:
            wide = decode(q[rows, columns], scales.spread(rows, columns, jnp.float32))
        out[rows, columns] = wide.astype(out.dtype)

    is_spread = 1 < block[1] < tiles.shape[2]  # by permutations, whose latency is long
    straight = unrolled(1) if is_spread else math.prod(SLICE)
    pl.when(is_usual)(lambda: _for_parts(tiles, [block], partial(write, is_short=True), straight))
    rarely(jnp.logical_not(is_usual))(lambda: _for_parts(tiles, [block], partial(write, is_short=False), 1))
