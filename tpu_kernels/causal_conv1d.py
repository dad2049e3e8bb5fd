"""The depthwise causal convolution on the TPU, defined in `cpu_golden/causal_conv1d.py`.

Kernels see rows [B T, D] in tiles, and visit a tile once for each sequence that has rows in it, an empty one too
(`_lib/visits.py`). A visit lays out the tile in float32, with HALO rows of its neighbours and the sequence's state in
the rows before its first one: a tap is then a shifted load. A backward pass folds the rows of a tile in pairs, and XLA
those of all visits.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from op_arguments.causal_conv1d import ConvGrads, ConvOptions, ConvOutput, ConvTensors, check_conv, check_conv_gradients
from op_arguments.gmm import GroupMetadata
from op_arguments.options import options_of
from tpu_kernels._lib.activations import fold_rows, sigmoid, sum_rows_in_pairs
from tpu_kernels._lib.arguments import Interpret, Interpreted, Shard, concrete_values, held, resolve_interpret
from tpu_kernels._lib.call import Block, bytes_of, call, jit
from tpu_kernels._lib.chip import sublanes
from tpu_kernels._lib.decays import two_sum
from tpu_kernels._lib.visits import group_metadata

TILE_ROWS, TILE_COLUMNS = 256, 512
FOLDED = 8  # rows that a visit's sums are left in: those of a register
FLOPS = 40  # of an element's activation


@dataclass(frozen=True, kw_only=True)
class _Options(ConvOptions):
    interpret: Interpret = None


class How(NamedTuple):
    """How a call runs."""

    silu: bool
    output_final_state: bool
    interpret: Interpreted


@options_of(_Options)
def causal_conv1d(x: jax.Array, weight: jax.Array, *, output_final_state: bool = False, **options: Any) -> ConvOutput:
    """y [B, T, D] and, with output_final_state, ht [N, D, W - 1], in x's dtype; differentiable in its arrays.

    Arguments and errors as `cpu_golden.causal_conv1d.causal_conv1d`, without float64; values, those of cu_seqlens, are
    checked outside tracing only. interpret: as `tpu_kernels.gmm.gmm`.
    """
    o = _Options(**options)
    check_conv(x, weight, o, concrete_values(o.cu_seqlens))
    how = How(o.activation == "silu", output_final_state, resolve_interpret(o.interpret, x))
    result: ConvOutput = _conv(how, ConvTensors(x, weight, o.bias, o.initial_state, held(o.cu_seqlens)))
    return result


@options_of(_Options)
def causal_conv1d_bwd(
    x: jax.Array, weight: jax.Array, dy: jax.Array, *, dht: jax.Array | None = None, **options: Any
) -> ConvGrads:
    """The gradients of `causal_conv1d`, for a gradient dy of y and dht of ht, in their arguments' dtypes.

    Arguments and errors as `cpu_golden.causal_conv1d.causal_conv1d_bwd`, without float64.
    """
    o = _Options(**options)
    p = check_conv(x, weight, o, concrete_values(o.cu_seqlens))
    check_conv_gradients(p, dy, dht)
    how = How(o.activation == "silu", False, resolve_interpret(o.interpret, x))
    return _backward(ConvTensors(x, weight, o.bias, o.initial_state, o.cu_seqlens, dy, dht), how=how)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _conv(how: How, arrays: ConvTensors) -> ConvOutput:
    return _forward(arrays, how=how)


def _conv_fwd(how: How, arrays: ConvTensors) -> tuple[ConvOutput, ConvTensors]:
    return _conv(how, arrays), arrays


def _conv_bwd(how: How, arrays: ConvTensors, cotangents: ConvOutput) -> tuple[ConvTensors]:
    dy, dht = cotangents
    return (ConvTensors(*_backward(arrays._replace(dy=dy, dht=dht), how=how), None),)


_conv.defvjp(_conv_fwd, _conv_bwd)


@jit("how")
def _forward(arrays: ConvTensors, *, how: How) -> ConvOutput:
    x, grid = arrays.x, Grid.of(arrays)
    if not x.size:
        return ConvOutput(x, grid.given_or_zero(arrays.initial_state, x) if how.output_final_state else None)
    ht = grid.states() if how.output_final_state and grid.width > 1 else None
    out = ConvOutput(grid.tile(jax.ShapeDtypeStruct((grid.rows, grid.columns), x.dtype)), ht)
    y, ht = grid.call(_forward_kernel, "causal_conv1d_fwd", grid.visits(arrays, how), arrays, out, how)
    return ConvOutput(y.reshape(x.shape), grid.as_given(ht, x) if how.output_final_state else None)


@jit("how")
def _backward(arrays: ConvTensors, *, how: How) -> ConvGrads:
    x, weight, bias, initial_state, *_ = arrays
    grid = Grid.of(arrays)
    if not x.size:
        dx, dweight, dbias = jax.tree.map(jnp.zeros_like, (x, weight, bias))
        dh0 = None if initial_state is None else grid.given_or_zero(arrays.dht, x)
        return ConvGrads(dx, dweight, dbias, dh0)
    out = ConvGrads(
        grid.tile(jax.ShapeDtypeStruct((grid.rows, grid.columns), x.dtype)),
        grid.sums(grid.width),
        None if bias is None else grid.sums(1),
        None if initial_state is None or grid.width == 1 else grid.states(),
    )
    visits = grid.visits(arrays, how)
    dx, dweight, dbias, dh0 = grid.call(_backward_kernel, "causal_conv1d_bwd", visits, arrays, out, how)
    visited = (jnp.arange(grid.most_visits * FOLDED) < visits.num_visits[0] * FOLDED)[:, None]
    of_taps = [sum_rows_in_pairs(jnp.where(visited, of_tap, 0.0)) for of_tap in dweight]
    return ConvGrads(
        dx.reshape(x.shape),
        jnp.stack(of_taps, axis=1).astype(weight.dtype),
        None if bias is None else sum_rows_in_pairs(jnp.where(visited, dbias[0], 0.0)).astype(bias.dtype),
        None if initial_state is None else grid.as_given(dh0, x),
    )


class Read(NamedTuple):
    """What a visit has: tiles of x and dy with their neighbours' rows, weight [W, D], bias [1, D], and the sequence's
    states [W - 1, D]; all but x and dy in float32."""

    before: Any
    x: Any
    after: Any
    dy: Any
    dy_after: Any
    weight: Any
    bias: Any
    state: Any
    dht: Any


class Grid(NamedTuple):
    """An array [rows, columns] = [B T, D] of `sequences`, in tiles; halo: how many rows of its neighbours a tile has, a
    part of a tile in which a state fits twice."""

    rows: int
    columns: int
    sequences: int
    width: int
    tile_rows: int
    tile_columns: int
    halo: int

    @classmethod
    def of(cls, arrays: ConvTensors) -> "Grid":
        """That of a call: tiles as large as the array, and at most TILE_ROWS by TILE_COLUMNS."""
        b, t, d = arrays.x.shape
        width = arrays.weight.shape[1]
        halo = max(1 << max(2 * width - 3, 0).bit_length(), sublanes(arrays.x.dtype))
        tile_rows = max(min(1 << (b * t - 1).bit_length(), TILE_ROWS), halo)
        sequences = b if arrays.cu_seqlens is None else arrays.cu_seqlens.shape[0] - 1
        return cls(b * t, d, sequences, width, tile_rows, min(d, TILE_COLUMNS), halo)

    @property
    def most_visits(self) -> int:
        """How many there may be."""
        return pl.cdiv(self.rows, self.tile_rows) + self.sequences

    def visits(self, arrays: ConvTensors, how: How) -> GroupMetadata:
        """A tile and a sequence each."""
        offsets, steps = arrays.cu_seqlens, arrays.x.shape[1]
        sizes = jnp.full(self.sequences, steps, jnp.int32) if offsets is None else jnp.diff(offsets)
        shard = Shard(sizes, jnp.zeros(1, jnp.int32))
        options = {"num_groups": self.sequences, "cover": "groups", "interpret": how.interpret}
        found: GroupMetadata = group_metadata(shard, m=self.rows, tm=self.tile_rows, **options)
        return found

    def tile(self, array: Any) -> Block:
        """A visit's tile of an array [rows, columns]."""
        return Block(array, (self.tile_rows, self.tile_columns), lambda column, i, visits: (visits.tile_ids[i], column))

    def neighbours(self, array: Any, ahead: int) -> Block:
        """The halo before a visit's tile (ahead -1) or after it (1); any rows where there are none."""
        halos, last = self.tile_rows // self.halo, pl.cdiv(self.rows, self.halo) - 1

        def index(column: Any, i: Any, visits: GroupMetadata) -> tuple[Any, Any]:
            first = visits.tile_ids[i] * halos
            return jnp.maximum(first - 1, 0) if ahead < 0 else jnp.minimum(first + halos, last), column

        return Block(array, (self.halo, self.tile_columns), index)

    def channels(self, array: Any) -> Block:
        """A visit's columns of an array [n, columns]."""
        return Block(array, (array.shape[0], self.tile_columns), lambda column, i, visits: (0, column))

    def states(self, array: Any = None) -> Block:
        """The states of a visit's sequence, of an array [N, W - 1, D], or of a result of this shape."""
        steps = self.width - 1
        array = jax.ShapeDtypeStruct((self.sequences, steps, self.columns), jnp.float32) if array is None else array
        shape = None, steps, self.tile_columns
        return Block(array, shape, lambda column, i, visits: (visits.group_ids[i], 0, column))

    def sums(self, count: int) -> Block:
        """A result [count, visits · FOLDED, D], of which each visit has a part of its own."""
        result = jax.ShapeDtypeStruct((count, self.most_visits * FOLDED, self.columns), jnp.float32)
        return Block(result, (count, FOLDED, self.tile_columns), lambda column, i, visits: (0, i, column))

    def read(self, arrays: ConvTensors) -> Read:
        """The blocks of a call's arrays."""
        x, weight, bias, initial_state, _, dy, dht = arrays
        x, dy = (None if rows is None else rows.reshape(self.rows, self.columns) for rows in (x, dy))
        backward = dy is not None
        return Read(
            self.neighbours(x, -1),
            self.tile(x),
            self.neighbours(x, 1) if backward else None,
            self.tile(dy) if backward else None,
            self.neighbours(dy, 1) if backward else None,
            self.channels(weight.T.astype(jnp.float32)),
            None if bias is None else self.channels(bias.reshape(1, -1).astype(jnp.float32)),
            *(
                None if state is None or self.width == 1 else self.states(state.swapaxes(1, 2).astype(jnp.float32))
                for state in (initial_state, dht)
            ),
        )

    def as_given(self, states: Any, x: jax.Array) -> jax.Array:
        """A result of `states`, or None where W is 1, as callers have it."""
        return self.given_or_zero(None if states is None else states.swapaxes(1, 2).astype(x.dtype), x)

    def given_or_zero(self, states: Any, x: jax.Array) -> jax.Array:
        """States [N, D, W - 1] in x's dtype."""
        return jnp.zeros((self.sequences, self.columns, self.width - 1), x.dtype) if states is None else states

    def call(self, kernel: Any, name: str, visits: GroupMetadata, arrays: ConvTensors, out: Any, how: How) -> Any:
        """What `kernel(visits, read, out, scratch)` fills."""
        read, backward = self.read(arrays), arrays.dy is not None
        steps = (1 + 2 * backward) * self.rows * self.columns
        blocks = [block.array for block in jax.tree.leaves((read.x, read.dy, read.state, read.dht, out))]
        return call(
            partial(kernel, grid=self, silu=how.silu),
            name=name,
            grid=(pl.cdiv(self.columns, self.tile_columns), visits.num_visits[0]),
            parallel=1,
            scalars=(visits,),
            operands=read,
            out=out,
            scratch=self._scratch(backward),
            cost=pl.CostEstimate(
                flops=(2 * self.width + FLOPS * how.silu) * steps,
                transcendentals=how.silu * self.rows * self.columns,
                bytes_accessed=bytes_of(blocks),
            ),
            interpret=how.interpret,
        )

    def _scratch(self, backward: bool) -> list[Any]:
        """Rows of a tile with as many halos as a kernel needs, and a backward pass's terms of each tap and the bias."""
        rows, columns = self.tile_rows, self.tile_columns
        halos = [pltpu.VMEM((rows + n * self.halo, columns), jnp.float32) for n in ((2, 2, 1) if backward else (1,))]
        terms = pltpu.VMEM((self.width + 1, rows // self.halo * FOLDED, columns), jnp.float32)
        return [*halos, terms] if backward else halos

    def for_groups(self, rows: int, body: Callable[[Any, Any], None]) -> None:
        """body(rows, first) for each group of `halo` of the rows: a slice of them, and the first one."""

        def group(n: Any, _: None) -> None:
            first = pl.multiple_of(n * self.halo, self.halo)
            body(pl.ds(first, self.halo), first)

        lax.fori_loop(0, rows // self.halo, group, None)


class Visit(NamedTuple):
    """Where a visit's sequence begins and ends, in rows of its tile; how its sums are rounded."""

    start: Any
    end: Any
    exactly: bool

    def own(self, shape: tuple[int, ...], first: Any) -> jax.Array:
        """Which rows, from `first` on, are the sequence's."""
        row = first + lax.broadcasted_iota(jnp.int32, shape, 0)
        return (self.start <= row) & (row < self.end)


def _visit(visits: GroupMetadata, read: Read, grid: Grid) -> Visit:
    i = pl.program_id(1)
    sequence, first = visits.group_ids[i], visits.tile_ids[i] * grid.tile_rows
    start, end = visits.group_offsets[sequence], visits.group_offsets[sequence + 1]
    return Visit(start - first, end - first, read.x.dtype == jnp.float32)


def _forward_kernel(
    visits: GroupMetadata, read: Read, out: ConvOutput, scratch: Any, *, grid: Grid, silu: bool
) -> None:
    (seen,) = scratch
    visit = _visit(visits, read, grid)
    _lay_out(read, seen, visit, grid)

    def group(rows: Any, first: Any) -> None:
        z = _convolved(read, seen, first, visit, grid)
        _store_own(out.y, z * sigmoid(z) if silu else z, rows, visit)

    grid.for_groups(grid.tile_rows, group)
    if out.ht is not None:
        pl.when(visit.end <= grid.tile_rows)(lambda: _copy_steps(out.ht, seen, visit.end, grid))


def _backward_kernel(
    visits: GroupMetadata, read: Read, out: ConvGrads, scratch: Any, *, grid: Grid, silu: bool
) -> None:
    """What is seen and dz have rows of both halos, dseen of that before the tile."""
    seen, dz, dseen, terms = scratch
    visit, halo = _visit(visits, read, grid), grid.halo
    _lay_out(read, seen, visit, grid)
    dz[:halo, :] = jnp.zeros((halo, grid.tile_columns), jnp.float32)
    dz[halo : halo + grid.tile_rows, :] = read.dy[...].astype(jnp.float32)
    dz[halo + grid.tile_rows :, :] = read.dy_after[...].astype(jnp.float32)

    def before_silu(rows: Any, first: Any) -> None:
        later = pl.ds(first + halo, halo)
        grad = dz[later, :]
        if silu:
            z = _convolved(read, seen, first, visit, grid)
            grad = grad * sigmoid(z) * (1.0 + z * sigmoid(-z))
        dz[later, :] = jnp.where(visit.own(grad.shape, first), grad, 0.0)

    def of_seen(rows: Any, first: Any) -> None:
        dseen[rows, :] = _gradient_of_seen(read, dz, first, visit, grid)

    def of_tile(rows: Any, first: Any) -> None:
        _store_own(out.dx, dseen[pl.ds(first + halo, halo), :], rows, visit)
        _fill_terms(terms, seen, dz, first, visit, grid)

    grid.for_groups(grid.tile_rows + halo, before_silu)
    grid.for_groups(grid.tile_rows + halo, of_seen)
    if read.dht is not None:
        _add_gradient_of_state(read.dht, dseen, visit, grid)
    if out.dh0 is not None:
        pl.when(visit.start >= 0)(lambda: _copy_steps(out.dh0, dseen, visit.start, grid))
    grid.for_groups(grid.tile_rows, of_tile)
    for tap in range(grid.width):
        out.dweight[tap] = fold_rows(terms[tap], FOLDED)
    if out.dbias is not None:
        out.dbias[0] = fold_rows(terms[grid.width], FOLDED)


def _lay_out(read: Read, seen: Any, visit: Visit, grid: Grid) -> None:
    """Fill `seen`: row `halo` is the tile's first one. A sequence's first rows find its state before them, or zero."""
    halo, rows, steps = grid.halo, grid.tile_rows, grid.width - 1
    seen[:halo, :] = read.before[...].astype(jnp.float32)
    seen[halo : halo + rows, :] = read.x[...].astype(jnp.float32)
    if read.after is not None:
        seen[halo + rows :, :] = read.after[...].astype(jnp.float32)

    @pl.when(visit.start > -steps)
    def _() -> None:
        for step in range(steps):
            row = pl.ds(halo + visit.start - steps + step, 1)
            seen[row, :] = jnp.zeros((1, grid.tile_columns)) if read.state is None else read.state[step : step + 1, :]


def _convolved(read: Read, seen: Any, first: Any, visit: Visit, grid: Grid) -> jax.Array:
    """The sums of W steps up to each row of a group, the first of which is `first`, before the activation."""
    halo, steps = grid.halo, grid.width - 1
    window = seen[pl.ds(first, 2 * halo), :]
    z = jnp.broadcast_to(jnp.float32(0) if read.bias is None else read.bias[...], (halo, grid.tile_columns))
    products = (
        read.weight[tap : tap + 1, :] * window[halo - steps + tap : 2 * halo - steps + tap] for tap in range(grid.width)
    )
    return _sum(z, products, visit)


def _gradient_of_seen(read: Read, dz: Any, first: Any, visit: Visit, grid: Grid) -> jax.Array:
    """That of rows of `seen`, from its row `first` on: of x, and before a sequence's first row of its state."""
    halo, steps = grid.halo, grid.width - 1
    window = dz[pl.ds(first, 2 * halo), :]

    def product(tap: int) -> jax.Array:
        later = steps - tap
        weighted = read.weight[tap : tap + 1, :] * window[later : later + halo]
        return jnp.where(visit.own(weighted.shape, first - halo + later), weighted, 0.0)  # 0 * NaN is NaN

    return _sum(jnp.zeros((halo, grid.tile_columns), jnp.float32), map(product, range(grid.width)), visit)


def _sum(total: jax.Array, terms: Iterable[jax.Array], visit: Visit) -> jax.Array:
    """total and terms, added one after the other; exactly: rounded once, as if there were a fused multiply-add."""
    left = jnp.zeros_like(total)
    for term in terms:
        total, lost = two_sum(total, term) if visit.exactly else (total + term, 0.0)
        left = left + lost
    return total + left


def _fill_terms(terms: Any, seen: Any, dz: Any, first: Any, visit: Visit, grid: Grid) -> None:
    """What a group adds to the gradients of each tap and of the bias, in FOLDED rows."""
    halo, steps = grid.halo, grid.width - 1
    rows = pl.ds(pl.multiple_of(first // (halo // FOLDED), FOLDED), FOLDED)
    window, grad = seen[pl.ds(first, 2 * halo), :], dz[pl.ds(first + halo, halo), :]
    own = visit.own(grad.shape, first)
    for tap in range(grid.width):
        term = window[halo - steps + tap : 2 * halo - steps + tap] * grad
        terms[tap, rows, :] = fold_rows(jnp.where(own, term, 0.0), FOLDED)
    terms[grid.width, rows, :] = fold_rows(grad, FOLDED)


def _add_gradient_of_state(dht: Any, dseen: Any, visit: Visit, grid: Grid) -> None:
    """Add that of the final state to the W - 1 rows before the sequence's end, as far as dseen has them."""
    steps = grid.width - 1
    for step in range(steps):
        row = grid.halo + visit.end - steps + step

        @pl.when((row >= 0) & (row < dseen.shape[0]))
        def _(row: Any = row, step: int = step) -> None:
            dseen[pl.ds(row, 1), :] = dseen[pl.ds(row, 1), :] + dht[step : step + 1, :]


def _copy_steps(state: Any, seen: Any, end: Any, grid: Grid) -> None:
    """The W - 1 rows before a tile's row `end`."""
    steps = grid.width - 1
    for step in range(steps):
        state[step : step + 1, :] = seen[pl.ds(grid.halo + end - steps + step, 1), :]


def _store_own(out: Any, x: jax.Array, rows: Any, visit: Visit) -> None:
    """Those rows of a group that are the visit's; the others are those of other visits."""
    others = out[rows, :].astype(jnp.float32)
    out[rows, :] = jnp.where(visit.own(x.shape, rows.start), x, others).astype(out.dtype)
