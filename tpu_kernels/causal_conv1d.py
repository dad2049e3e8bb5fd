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
from tpu_kernels._lib.activations import fold_nearby, fold_rows, sigmoid, sigmoid_and_rest, sum_rows_in_pairs
from tpu_kernels._lib.arguments import Interpret, Interpreted, Shard, concrete_values, held, resolve_interpret
from tpu_kernels._lib.call import Block, bytes_of, call, jit, rarely
from tpu_kernels._lib.chip import LANES, sublanes
from tpu_kernels._lib.decays import two_sum
from tpu_kernels._lib.visits import group_metadata

TILE_ROWS, TILE_COLUMNS = 256, 512
LONG_TILES = 1024, 512  # rows of a tile where every sequence is a multiple of them
AT_ONCE = 256  # rows in straight-line code: more spill backward, and with masks are much code
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
        """That of a call: tiles of at most TILE_ROWS by TILE_COLUMNS, or of the rows of LONG_TILES."""
        b, t, d = arrays.x.shape
        width, packed = arrays.weight.shape[1], arrays.cu_seqlens is not None
        halo = max(1 << max(2 * width - 3, 0).bit_length(), sublanes(arrays.x.dtype))
        longest = next((rows for rows in LONG_TILES if t % rows == 0 and not packed), TILE_ROWS)
        tile_rows = max(min(1 << (b * t - 1).bit_length(), longest), halo)
        tile_columns = d if d < LANES else min(d // LANES * LANES, TILE_COLUMNS)
        sequences = arrays.cu_seqlens.shape[0] - 1 if packed else b
        return cls(b * t, d, sequences, width, tile_rows, tile_columns, halo)

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

    @property
    def lanes(self) -> int:
        """How many columns are computed together: a register's. In memory row follows row, and a load begins at any."""
        return min(self.tile_columns, LANES)

    def _scratch(self, backward: bool) -> list[Any]:
        """Rows of a tile with as many halos as a kernel needs, and a backward pass's terms of each tap and the bias."""
        rows, lanes = self.tile_rows, self.lanes
        halos = [pltpu.VMEM((rows + n * self.halo, lanes), jnp.float32) for n in ((2, 2, 1) if backward else (1,))]
        terms = pltpu.VMEM((self.width + 1, pl.cdiv(rows, AT_ONCE) * FOLDED, lanes), jnp.float32)
        return [*halos, terms] if backward else halos

    def for_parts(self, body: Callable[["Group"], None]) -> None:
        """Call body with all rows of each `lanes` columns of a tile."""

        def part(n: Any, _: None) -> None:
            body(Group(pl.ds(pl.multiple_of(n * self.lanes, self.lanes), self.lanes), 0, self.tile_rows))

        lax.fori_loop(0, self.tile_columns // self.lanes, part, None)

    def for_groups(self, of: "Group", body: Callable[["Group"], None]) -> None:
        """Call body with each AT_ONCE of the rows."""
        size = min(AT_ONCE, of.size)

        def group(n: Any, _: None) -> None:
            body(of._replace(first=pl.multiple_of(n * size, size), size=size))

        lax.fori_loop(0, of.size // size, group, None)


class Group(NamedTuple):
    """`size` rows from `first` on, of `lanes` columns of a tile."""

    columns: Any
    first: Any
    size: int

    @property
    def rows(self) -> Any:
        """The slice of these rows."""
        return pl.ds(self.first, self.size)

    def after(self, rows: Any) -> Any:
        """The slice of as many rows that begins `rows` later."""
        return pl.ds(self.first + rows, self.size)


class Visit(NamedTuple):
    """Where a visit's sequence begins and ends, in rows of its tile; how its sums are rounded."""

    start: Any
    end: Any
    exactly: bool

    def own(self, at: Group, later: Any = 0) -> jax.Array:
        """Mask [size, 1] of the rows of a group that are the sequence's; later: of the rows so many later."""
        row = at.first + later + lax.broadcasted_iota(jnp.int32, (at.size, 1), 0)
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
    is_whole = (visit.start <= 0) & (visit.end >= grid.tile_rows)

    def activated(at: Group) -> jax.Array:
        z = _convolved(read, seen, at, visit, grid)
        return z * sigmoid(z) if silu else z

    def of_part(at: Group, masked: bool) -> None:
        _lay_out(read, seen, at, visit, grid)
        if masked:
            grid.for_groups(at, lambda at: _store_own(out.y, activated(at), at, visit))
        else:
            out.y[at.rows, at.columns] = activated(at).astype(out.y.dtype)
        if out.ht is not None:
            pl.when(visit.end <= grid.tile_rows)(lambda: _copy_steps(out.ht, seen, visit.end, at, grid))

    pl.when(is_whole)(lambda: grid.for_parts(partial(of_part, masked=False)))
    rarely(~is_whole)(lambda: grid.for_parts(partial(of_part, masked=True)))


def _backward_kernel(
    visits: GroupMetadata, read: Read, out: ConvGrads, scratch: Any, *, grid: Grid, silu: bool
) -> None:
    """What is seen and dz have rows of both halos, dseen of that before the tile."""
    seen, dz, dseen, terms = scratch
    visit, halo, rows = _visit(visits, read, grid), grid.halo, grid.tile_rows
    begins = visit.start <= 0 if out.dh0 is None else visit.start < 0
    ends = rows if read.dht is None else rows + grid.width
    is_whole = begins & (visit.end >= ends)

    def before_silu(at: Group, dy: jax.Array) -> jax.Array:
        grad = dy.astype(jnp.float32)
        if not silu:
            return grad
        z = _convolved(read, seen, at, visit, grid)
        of_z, rest = sigmoid_and_rest(z)
        return grad * of_z * (1.0 + z * rest)

    def of_part(at: Group, masked: bool) -> None:
        def fill_dz(at: Group) -> None:
            dz[at.after(halo), :] = before_silu(at, read.dy[at.rows, at.columns])

        def fill_dseen(at: Group) -> None:
            dseen[at.after(halo), :] = _gradient_of_seen(read, dz, at, visit, grid, True)

        def store(at: Group) -> None:
            if masked:
                _store_own(out.dx, dseen[at.after(halo), :], at, visit)
            else:
                store_dx(at, False)
            folded = pl.ds(pl.multiple_of(at.first // at.size * FOLDED, FOLDED), FOLDED)
            for tap, term in enumerate(_terms(seen, dz, at, grid)):
                terms[tap, folded, :] = fold_nearby(jnp.where(visit.own(at), term, 0.0) if masked else term, FOLDED)

        def store_dx(at: Group, masked: bool) -> None:
            out.dx[at.rows, at.columns] = _gradient_of_seen(read, dz, at, visit, grid, masked).astype(out.dx.dtype)

        _lay_out(read, seen, at, visit, grid)
        grid.for_groups(at, fill_dz)
        dz[halo + rows :, :] = before_silu(at._replace(first=rows, size=halo), read.dy_after[:, at.columns])
        if masked:
            fill_dseen(at._replace(first=-halo, size=halo))
            grid.for_groups(at, fill_dseen)
            if read.dht is not None:
                _add_gradient_of_state(read.dht, dseen, visit, at, grid)
            if out.dh0 is not None:
                pl.when(visit.start >= 0)(lambda: _copy_steps(out.dh0, dseen, visit.start, at, grid))
        grid.for_groups(at, store)
        if not masked:  # of its last rows some of what comes later is not the sequence's
            store_dx(at._replace(first=rows - halo, size=halo), True)
        for tap in range(grid.width):
            out.dweight[tap, :, at.columns] = fold_rows(terms[tap], FOLDED)
        if out.dbias is not None:
            out.dbias[0, :, at.columns] = fold_rows(terms[grid.width], FOLDED)

    pl.when(is_whole)(lambda: grid.for_parts(partial(of_part, masked=False)))
    rarely(~is_whole)(lambda: grid.for_parts(partial(of_part, masked=True)))


def _lay_out(read: Read, seen: Any, at: Group, visit: Visit, grid: Grid) -> None:
    """Fill `seen`: row `halo` is the tile's first one. A sequence's first rows find its state before them, or zero."""
    halo, rows, steps = grid.halo, grid.tile_rows, grid.width - 1
    seen[:halo, :] = read.before[:, at.columns].astype(jnp.float32)
    seen[halo : halo + rows, :] = read.x[:, at.columns].astype(jnp.float32)
    if read.after is not None:
        seen[halo + rows :, :] = read.after[:, at.columns].astype(jnp.float32)

    @pl.when(visit.start > -steps)
    def _() -> None:
        for step in range(steps):
            before = jnp.zeros((1, grid.lanes)) if read.state is None else read.state[step : step + 1, at.columns]
            seen[pl.ds(halo + visit.start - steps + step, 1), :] = before


def _convolved(read: Read, seen: Any, at: Group, visit: Visit, grid: Grid) -> jax.Array:
    """The sums of W steps up to each row of a group, before the activation."""
    bias = jnp.float32(0) if read.bias is None else read.bias[:, at.columns]
    products = (
        read.weight[tap : tap + 1, at.columns] * seen[at.after(grid.halo - (grid.width - 1) + tap), :]
        for tap in range(grid.width)
    )
    return _sum(jnp.broadcast_to(bias, (at.size, grid.lanes)), products, visit)


def _gradient_of_seen(read: Read, dz: Any, at: Group, visit: Visit, grid: Grid, masked: bool) -> jax.Array:
    """That of rows of `seen`: of x, and before a sequence's first row of its state; masked: some may be others'."""
    steps = grid.width - 1

    def product(tap: int) -> jax.Array:
        later = steps - tap
        weighted = read.weight[tap : tap + 1, at.columns] * dz[at.after(grid.halo + later), :]
        return jnp.where(visit.own(at, later), weighted, 0.0) if masked else weighted  # 0 * NaN is NaN

    return _sum(jnp.zeros((at.size, grid.lanes), jnp.float32), map(product, range(grid.width)), visit)


def _sum(total: jax.Array, terms: Iterable[jax.Array], visit: Visit) -> jax.Array:
    """total and terms, added one after the other; exactly: rounded once, as if there were a fused multiply-add."""
    left = jnp.zeros_like(total)
    for term in terms:
        total, lost = two_sum(total, term) if visit.exactly else (total + term, 0.0)
        left = left + lost
    return total + left


def _terms(seen: Any, dz: Any, at: Group, grid: Grid) -> Iterable[jax.Array]:
    """What the rows of a group add to the gradients of each tap and of the bias."""
    grad = dz[at.after(grid.halo), :]
    return *(seen[at.after(grid.halo - (grid.width - 1) + tap), :] * grad for tap in range(grid.width)), grad


def _add_gradient_of_state(dht: Any, dseen: Any, visit: Visit, at: Group, grid: Grid) -> None:
    """Add that of the final state to the W - 1 rows before the sequence's end, as far as dseen has them."""
    steps = grid.width - 1
    for step in range(steps):
        row = grid.halo + visit.end - steps + step

        @pl.when((row >= 0) & (row < dseen.shape[0]))
        def _(row: Any = row, step: int = step) -> None:
            dseen[pl.ds(row, 1), :] = dseen[pl.ds(row, 1), :] + dht[step : step + 1, at.columns]


def _copy_steps(state: Any, seen: Any, end: Any, at: Group, grid: Grid) -> None:
    """The W - 1 rows before a tile's row `end`."""
    steps = grid.width - 1
    for step in range(steps):
        state[step : step + 1, at.columns] = seen[pl.ds(grid.halo + end - steps + step, 1), :]


def _store_own(out: Any, x: jax.Array, at: Group, visit: Visit) -> None:
    """Those rows of a group that are the visit's; the others are those of other visits."""
    others = out[at.rows, at.columns].astype(jnp.float32)
    out[at.rows, at.columns] = jnp.where(visit.own(at), x, others).astype(out.dtype)
