"""The gates of delta rules on the TPU, defined in `cpu_golden/gates.py`: element by element, and sums over time.

Kernels see [B T, HV K] in tiles. A backward pass folds the rows of a tile in pairs, and XLA those of all tiles.
"""

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from op_arguments.gates import GateGrads, check_bounded_gate, check_gate_gradient, check_softplus_gate
from tpu_kernels._lib.activations import fold_rows, sigmoid, sigmoid_and_rest, softplus, sum_rows_in_pairs
from tpu_kernels._lib.arguments import Interpret, Interpreted, resolve_interpret
from tpu_kernels._lib.call import Block, bytes_of, call, jit
from tpu_kernels._lib.chip import sublanes

TILE_ROWS, TILE_COLUMNS = 256, 512
FOLDED = 8  # rows that a tile's sums are left in: those of a register
FLOPS = 60  # of an element, its division and series included


class Arrays(NamedTuple):
    """What a gate reads: a [B, T, HV] or [B, T, HV, K], A_log [HV] and dt_bias [HV] or [HV, K], or None."""

    a: Any
    A_log: Any
    dt_bias: Any


class How(NamedTuple):
    """Which gate: the bound of `bounded_gate`, None for `softplus_gate`."""

    bound: float | None
    interpret: Interpreted


def softplus_gate(
    a: jax.Array, *, A_log: jax.Array, dt_bias: jax.Array | None = None, interpret: Interpret = None
) -> jax.Array:
    """-exp(A_log) · softplus(a + dt_bias), float32, of a's shape; differentiable in its arrays.

    Arguments and errors as `cpu_golden.gates.softplus_gate`, without float64. interpret: as `tpu_kernels.gmm.gmm`.
    """
    check_softplus_gate(a, A_log, dt_bias)
    return _gate(How(None, resolve_interpret(interpret, a)), Arrays(a, A_log, dt_bias))


def softplus_gate_bwd(
    a: jax.Array, dg: jax.Array, *, A_log: jax.Array, dt_bias: jax.Array | None = None, interpret: Interpret = None
) -> GateGrads:
    """The gradients of `softplus_gate`, for a gradient dg of its result: da in a's dtype, the others float32.

    Arguments and errors as `cpu_golden.gates.softplus_gate_bwd`, without float64.
    """
    check_softplus_gate(a, A_log, dt_bias)
    check_gate_gradient(dg, a)
    return _backward(Arrays(a, A_log, dt_bias), dg, how=How(None, resolve_interpret(interpret, a)))


def bounded_gate(
    a: jax.Array,
    *,
    A_log: jax.Array | None = None,
    dt_bias: jax.Array | None = None,
    lower_bound: float = -5.0,
    interpret: Interpret = None,
) -> jax.Array:
    """lower_bound · sigmoid(exp(A_log) · (a + dt_bias)), float32, of a's shape; differentiable in its arrays.

    Arguments and errors as `cpu_golden.gates.bounded_gate`, without float64. interpret: as `tpu_kernels.gmm.gmm`.
    """
    bound = check_bounded_gate(a, A_log, dt_bias, lower_bound)
    return _gate(How(bound, resolve_interpret(interpret, a)), Arrays(a, A_log, dt_bias))


def bounded_gate_bwd(
    a: jax.Array,
    dg: jax.Array,
    *,
    A_log: jax.Array | None = None,
    dt_bias: jax.Array | None = None,
    lower_bound: float = -5.0,
    interpret: Interpret = None,
) -> GateGrads:
    """The gradients of `bounded_gate`, for a gradient dg of its result; as `softplus_gate_bwd`."""
    bound = check_bounded_gate(a, A_log, dt_bias, lower_bound)
    check_gate_gradient(dg, a)
    return _backward(Arrays(a, A_log, dt_bias), dg, how=How(bound, resolve_interpret(interpret, a)))


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _gate(how: How, x: Arrays) -> jax.Array:
    return _forward(x, how=how)


def _gate_fwd(how: How, x: Arrays) -> tuple[jax.Array, Arrays]:
    return _gate(how, x), x


def _gate_bwd(how: How, x: Arrays, dg: jax.Array) -> tuple[Arrays]:
    return (Arrays(*_backward(x, dg, how=how)),)


_gate.defvjp(_gate_fwd, _gate_bwd)


@jit("how")
def _forward(x: Arrays, *, how: How) -> jax.Array:
    if not x.a.size:
        return jnp.zeros(x.a.shape, jnp.float32)
    rows = _rows_of(x)
    grid = Tiles.of(rows.a)
    out = grid.tile(jax.ShapeDtypeStruct(rows.a.shape, jnp.float32))
    g: jax.Array = grid.call(partial(_forward_kernel, bound=how.bound), "gate_fwd", grid.blocks(rows), out, how)
    return g.reshape(x.a.shape)


@jit("how")
def _backward(x: Arrays, dg: jax.Array, *, how: How) -> GateGrads:
    shape, heads = x.a.shape, x.a.shape[2]
    if not x.a.size:
        return GateGrads(*(None if array is None else jnp.zeros_like(array) for array in x))
    rows = _rows_of(x)
    grid = Tiles.of(rows.a)
    operands = (grid.blocks(rows), grid.tile(dg.reshape(rows.a.shape)))
    sums = grid.sums()
    out = GateGrads(
        grid.tile(jax.ShapeDtypeStruct(rows.a.shape, rows.a.dtype)),
        None if x.A_log is None else sums,
        None if x.dt_bias is None else sums,
    )
    da, of_rate, of_bias = grid.call(
        partial(_backward_kernel, grid=grid, bound=how.bound), "gate_bwd", operands, out, how
    )
    if of_rate is not None:
        of_rate = sum_rows_in_pairs(sum_rows_in_pairs(of_rate).reshape(heads, -1).T)
    if of_bias is not None:
        of_bias = sum_rows_in_pairs(of_bias).reshape(shape[2:])
    return GateGrads(da.reshape(shape), of_rate, of_bias)


def _rows_of(x: Arrays) -> Arrays:
    """The arrays as kernels see them: a [B T, HV K], the others a row [1, HV K]."""
    channels = x.a[0, 0].size
    rate = None if x.A_log is None else jnp.repeat(x.A_log, channels // x.a.shape[2]).reshape(1, channels)
    return Arrays(x.a.reshape(-1, channels), rate, None if x.dt_bias is None else x.dt_bias.reshape(1, channels))


class Tiles(NamedTuple):
    """An array [R, C] in tiles of `rows`, a power of two, by `columns`."""

    shape: tuple[int, int]
    rows: int
    columns: int

    @classmethod
    def of(cls, array: jax.Array) -> "Tiles":
        """Those of an array: as large as it is, and at most TILE_ROWS by TILE_COLUMNS."""
        rows, columns = array.shape
        least = max(sublanes(array.dtype), FOLDED)
        whole = max(1 << (rows - 1).bit_length(), least)
        return cls((rows, columns), min(whole, TILE_ROWS), min(columns, TILE_COLUMNS))

    def tile(self, array: Any) -> Block:
        """A step's tile of an array of the same shape."""
        return Block(array, (self.rows, self.columns), lambda column, row: (row, column))

    def channels(self, array: Any) -> Block:
        """A step's columns of an array [1, C]."""
        return Block(array, (1, self.columns), lambda column, row: (0, column))

    def sums(self) -> Block:
        """A result [tiles · FOLDED, C], of which each step has a part of its own."""
        shape = pl.cdiv(self.shape[0], self.rows) * FOLDED, self.shape[1]
        return Block(
            jax.ShapeDtypeStruct(shape, jnp.float32), (FOLDED, self.columns), lambda column, row: (row, column)
        )

    def blocks(self, rows: Arrays) -> Arrays:
        """The blocks of what `_rows_of` returns."""
        return Arrays(self.tile(rows.a), *(None if row is None else self.channels(row) for row in rows[1:]))

    def call(self, kernel: Any, name: str, operands: Any, out: Any, how: How) -> Any:
        """What `kernel(operands, out, scratch)` fills, in one step for each tile."""
        rows, columns = self.shape
        arrays = [block.array for block in jax.tree.leaves((operands, out))]
        return call(
            kernel,
            name=name,
            grid=(pl.cdiv(columns, self.columns), pl.cdiv(rows, self.rows)),
            parallel=2,
            operands=operands,
            out=out,
            cost=pl.CostEstimate(
                flops=FLOPS * rows * columns, transcendentals=2 * rows * columns, bytes_accessed=bytes_of(arrays)
            ),
            interpret=how.interpret,
        )

    def own(self, x: jax.Array) -> jax.Array:
        """Elements of a tile, zero in rows that the array does not have."""
        row = pl.program_id(1) * self.rows + lax.broadcasted_iota(jnp.int32, x.shape, 0)
        return jnp.where(row < self.shape[0], x, 0.0)


def _forward_kernel(x: Arrays, out: Any, scratch: Any, *, bound: float | None) -> None:
    biased, rate = _biased(x), _rate(x)
    out[...] = -rate * softplus(biased) if bound is None else bound * sigmoid(rate * biased)


def _backward_kernel(operands: Any, out: GateGrads, scratch: Any, *, grid: Tiles, bound: float | None) -> None:
    x, dg = operands
    biased, rate, grad = _biased(x), _rate(x), dg[...]
    if bound is None:
        da, of_rate = -grad * rate * sigmoid(biased), -grad * rate * softplus(biased)
    else:
        scaled = rate * biased
        opened, rest = sigmoid_and_rest(scaled)
        of_scaled = grad * (bound * (opened * rest))
        da, of_rate = of_scaled * rate, of_scaled * scaled
    out.da[...] = da.astype(out.da.dtype)
    for sums, terms in ((out.dA_log, of_rate), (out.ddt_bias, da)):
        if sums is not None:
            sums[...] = fold_rows(grid.own(terms), FOLDED)


def _biased(x: Arrays) -> jax.Array:
    a: jax.Array = x.a[...].astype(jnp.float32)
    return a if x.dt_bias is None else a + x.dt_bias[...]


def _rate(x: Arrays) -> jax.Array | float:
    return 1.0 if x.A_log is None else jnp.exp(x.A_log[...])
