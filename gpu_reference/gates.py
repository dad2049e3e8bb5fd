"""The gates of delta rules on the GPU, in Triton, defined in `cpu_golden/gates.py`: element by element, and sums over
time.

Kernels see [B T, HV K] in tiles. A backward pass sums the rows of a tile in pairs, and torch those of all tiles.
"""
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable

from gpu_reference._lib.activations import exp, sigmoid, softplus, sum_rows, sum_rows_in_pairs
from gpu_reference._lib.hardware import bfloat16_as_float32_where_interpreted, check_devices
from gpu_reference._lib.launch import Launch
from gpu_reference._lib.tiles import cdiv, next_power_of_2
from op_arguments.gates import GateGrads, check_bounded_gate, check_gate_gradient, check_softplus_gate

TILE = 2048  # elements of a program: 16 to a thread; of 32, a backward pass spills
COLUMNS = 64  # of a tile
OPTIONS = {"num_warps": 4, "enable_fp_fusion": True}


class Arrays(NamedTuple):
    """What a gate reads: a [rows, channels] of `per_head` channels for each of A_log, and dt_bias; None: not there.

    bound: of `bounded_gate`, None for `softplus_gate`.
    """

    a: Any
    A_log: Any
    dt_bias: Any
    bound: Any
    rows: Any
    channels: Any
    per_head: Any


def softplus_gate(a: Tensor, *, A_log: Tensor, dt_bias: Tensor | None = None) -> Tensor:
    """-exp(A_log) · softplus(a + dt_bias), float32, of a's shape; differentiable in its tensors.

    Arguments and errors as `cpu_golden.gates.softplus_gate`, without float64; tensors of any strides. Also raises as
    `check_devices`.
    """
    check_softplus_gate(a, A_log, dt_bias)
    return _Gate.apply(a, A_log, dt_bias, None)  # type: ignore[no-untyped-call]


def softplus_gate_bwd(a: Tensor, dg: Tensor, *, A_log: Tensor, dt_bias: Tensor | None = None) -> GateGrads:
    """The gradients of `softplus_gate`, for a gradient dg of its result: da in a's dtype, the others float32.

    Arguments and errors as `cpu_golden.gates.softplus_gate_bwd`, without float64, and as `check_devices`.
    """
    check_softplus_gate(a, A_log, dt_bias)
    check_gate_gradient(dg, a)
    return _backward(a, A_log, dt_bias, None, dg)


def bounded_gate(
    a: Tensor, *, A_log: Tensor | None = None, dt_bias: Tensor | None = None, lower_bound: float = -5.0
) -> Tensor:
    """lower_bound · sigmoid(exp(A_log) · (a + dt_bias)), float32, of a's shape; differentiable in its tensors.

    Arguments and errors as `cpu_golden.gates.bounded_gate`, without float64, and as `check_devices`.
    """
    bound = check_bounded_gate(a, A_log, dt_bias, lower_bound)
    return _Gate.apply(a, A_log, dt_bias, bound)  # type: ignore[no-untyped-call]


def bounded_gate_bwd(
    a: Tensor,
    dg: Tensor,
    *,
    A_log: Tensor | None = None,
    dt_bias: Tensor | None = None,
    lower_bound: float = -5.0,
) -> GateGrads:
    """The gradients of `bounded_gate`, for a gradient dg of its result; as `softplus_gate_bwd`."""
    bound = check_bounded_gate(a, A_log, dt_bias, lower_bound)
    check_gate_gradient(dg, a)
    return _backward(a, A_log, dt_bias, bound, dg)


class _Gate(torch.autograd.Function):
    """The two passes."""

    @staticmethod
    def forward(ctx, a, A_log, dt_bias, bound):
        ctx.save_for_backward(a, A_log, dt_bias)
        ctx.bound = bound
        return _forward(a, A_log, dt_bias, bound)

    @staticmethod
    @once_differentiable
    def backward(ctx, dg):
        return *_backward(*ctx.saved_tensors, ctx.bound, dg), None


def _arrays(a: Tensor, A_log: Tensor | None, dt_bias: Tensor | None, bound: float | None) -> Arrays:
    per_head = a.shape[3] if a.ndim == 4 else 1
    channels = a.shape[2] * per_head
    rate, bias = (None if x is None else x.contiguous() for x in (A_log, dt_bias))
    return Arrays(a.contiguous(), rate, bias, bound, a.shape[0] * a.shape[1], channels, per_head)


@bfloat16_as_float32_where_interpreted(lambda *_: torch.float32)
def _forward(a: Tensor, A_log: Tensor | None, dt_bias: Tensor | None, bound: float | None) -> Tensor:
    device = check_devices({"a": a, "A_log": A_log, "dt_bias": dt_bias})
    g = torch.empty(a.shape, dtype=torch.float32, device=device)
    if a.numel():
        x = _arrays(a, A_log, dt_bias, bound)
        _launch(_forward_kernel, x, out=g).run(device)
    return g


@bfloat16_as_float32_where_interpreted(lambda a, *_: GateGrads(a.dtype, None, None))
def _backward(a: Tensor, A_log: Tensor | None, dt_bias: Tensor | None, bound: float | None, dg: Tensor) -> GateGrads:
    device = check_devices({"a": a, "dg": dg, "A_log": A_log, "dt_bias": dt_bias})
    x = _arrays(a, A_log, dt_bias, bound)
    tile_rows, _ = _tile(x)

    def sums(argument: Tensor | None) -> Tensor | None:
        shape = cdiv(x.rows, tile_rows), x.channels
        return None if argument is None else torch.empty(shape, dtype=torch.float32, device=device)

    outs = GateGrads(torch.empty(a.shape, dtype=a.dtype, device=device), sums(A_log), sums(dt_bias))
    if a.numel():
        _launch(_backward_kernel, x, dg=dg.contiguous(), outs=outs, LEVELS=tile_rows.bit_length() - 1).run(device)
    da, of_rate, of_bias = outs
    if of_rate is not None:
        of_rate = sum_rows_in_pairs(sum_rows_in_pairs(of_rate).view(a.shape[2], x.per_head).T)
    if of_bias is not None:
        of_bias = sum_rows_in_pairs(of_bias).view(a.shape[2:])
    return GateGrads(da, of_rate, of_bias)


def _tile(x: Arrays) -> tuple[int, int]:
    """Rows and columns of a program."""
    columns = min(next_power_of_2(max(x.channels, 1)), COLUMNS)
    return min(next_power_of_2(max(x.rows, 1)), TILE // columns), columns


def _launch(kernel: Any, x: Arrays, **own: Any) -> Launch:
    """A program for each tile of a."""
    rows, columns = _tile(x)
    grid = (cdiv(x.rows, rows) * cdiv(x.channels, columns),)
    return Launch(kernel, grid, {"x": x, **own, "ROWS": rows, "COLUMNS_OF_TILE": columns}, OPTIONS)


@triton.jit
def _forward_kernel(x, out, ROWS: tl.constexpr, COLUMNS_OF_TILE: tl.constexpr):
    """One program per tile of a."""
    _, column, at_tile, in_tile = _tile_of_program(x, ROWS, COLUMNS_OF_TILE)
    biased, rate = _biased_and_rate(x, column, at_tile, in_tile)
    g = -rate * softplus(biased) if x.bound is None else x.bound * sigmoid(rate * biased)
    tl.store(out + at_tile, g, mask=in_tile)


@triton.jit
def _backward_kernel(x, dg, outs, LEVELS: tl.constexpr, ROWS: tl.constexpr, COLUMNS_OF_TILE: tl.constexpr):
    """One program per tile of a; it leaves the sums over its rows."""
    tile_row, column, at_tile, in_tile = _tile_of_program(x, ROWS, COLUMNS_OF_TILE)
    biased, rate = _biased_and_rate(x, column, at_tile, in_tile)
    grad = tl.load(dg + at_tile, mask=in_tile, other=0)
    if x.bound is None:
        da = -grad * rate * sigmoid(biased)
        of_rate = -grad * rate * softplus(biased)
    else:
        scaled = rate * biased
        of_scaled = grad * (x.bound * (sigmoid(scaled) * sigmoid(-scaled)))
        da = of_scaled * rate
        of_rate = of_scaled * scaled
    tl.store(outs.da + at_tile, da.to(outs.da.dtype.element_ty), mask=in_tile)
    at_sums = tile_row * x.channels + column
    if outs.dA_log is not None:
        tl.store(outs.dA_log + at_sums, sum_rows(tl.where(in_tile, of_rate, 0.0), LEVELS), mask=column < x.channels)
    if outs.ddt_bias is not None:
        tl.store(outs.ddt_bias + at_sums, sum_rows(tl.where(in_tile, da, 0.0), LEVELS), mask=column < x.channels)


@triton.jit
def _tile_of_program(x, ROWS: tl.constexpr, COLUMNS_OF_TILE: tl.constexpr):
    """This program's row of tiles (int64), its columns, and where its elements are, and which of them exist."""
    tiles = tl.cdiv(x.channels, COLUMNS_OF_TILE)
    tile_row = (tl.program_id(0) // tiles).to(tl.int64)
    column = tl.program_id(0) % tiles * COLUMNS_OF_TILE + tl.arange(0, COLUMNS_OF_TILE)
    row = tile_row * ROWS + tl.arange(0, ROWS)
    in_tile = (row[:, None] < x.rows) & (column[None, :] < x.channels)
    return tile_row, column, row[:, None] * x.channels + column[None, :], in_tile


@triton.jit
def _biased_and_rate(x, column, at_tile, in_tile):
    """a + dt_bias of a tile, float32, and exp(A_log) of its columns."""
    biased = tl.load(x.a + at_tile, mask=in_tile, other=0).to(tl.float32)
    in_columns = column < x.channels
    if x.dt_bias is not None:
        biased += tl.load(x.dt_bias + column, mask=in_columns, other=0)[None, :]
    rate = tl.full((1, column.shape[0]), 1.0, tl.float32)
    if x.A_log is not None:
        rate = exp(tl.load(x.A_log + column // x.per_head, mask=in_columns, other=0))[None, :]
    return biased, rate
