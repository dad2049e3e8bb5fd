"""The depthwise causal convolution on the GPU, in Triton, defined in `cpu_golden/causal_conv1d.py`.

A program has a tile of channels and ROWS steps of one sequence; what comes before the sequence's first step is read
from its state. A backward pass computes the gradient before the activation anew for each of the W steps that a row of
dx needs; the sums over a tile's steps are in pairs, and torch sums those of all tiles, in pairs too.

Nothing is read back from the device. The offsets in a CUDA tensor are not checked; those out of order are clamped.
"""
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable

from gpu_reference._lib.activations import sigmoid, sum_rows, sum_rows_in_pairs
from gpu_reference._lib.hardware import bfloat16_as_float32_where_interpreted, check_devices
from gpu_reference._lib.launch import Launch
from gpu_reference._lib.layout import rows_of_segment, rows_of_sequence
from gpu_reference._lib.operands import values
from gpu_reference._lib.tiles import cdiv, next_power_of_2
from op_arguments.causal_conv1d import (
    Activation,
    ConvGrads,
    ConvOptions,
    ConvOutput,
    ConvProblem,
    ConvTensors,
    check_conv,
    check_conv_gradients,
)
from op_arguments.options import options_of

ROWS, COLUMNS = 32, 64  # of a program's tile: 8 elements to a thread; of 16, a backward pass spills
OPTIONS = {"num_warps": 8, "enable_fp_fusion": True}


class Conv(NamedTuple):
    """A convolution as kernels take it: its tensors, and the `layout.Layout` fields by which `cu_seqlens`, or where it
    is None every `steps` of all rows, are sequences."""

    given: Any
    cu_seqlens: Any
    count: Any
    steps: Any
    channels: Any
    width: Any


@options_of(ConvOptions)
def causal_conv1d(x: Tensor, weight: Tensor, *, output_final_state: bool = False, **options: Any) -> ConvOutput:
    """y [B, T, D] and, with output_final_state, ht [N, D, W - 1], in x's dtype; differentiable in its tensors.

    Arguments and errors as `cpu_golden.causal_conv1d.causal_conv1d`, without float64; tensors of any strides. Also
    raises as `check_devices`.
    """
    o = ConvOptions(**options)
    p = check_conv(x, weight, o, values(o.cu_seqlens))
    given = x, weight, o.bias, o.initial_state, o.cu_seqlens
    return ConvOutput(*_Conv.apply(p, o.activation, output_final_state, *given))  # type: ignore[no-untyped-call]


@options_of(ConvOptions)
def causal_conv1d_bwd(x: Tensor, weight: Tensor, dy: Tensor, *, dht: Tensor | None = None, **options: Any) -> ConvGrads:
    """The gradients of `causal_conv1d`, for a gradient dy of y and dht of ht, in their arguments' dtypes.

    Arguments and errors as `cpu_golden.causal_conv1d.causal_conv1d_bwd`, without float64, and as `check_devices`.
    """
    o = ConvOptions(**options)
    p = check_conv(x, weight, o, values(o.cu_seqlens))
    check_conv_gradients(p, dy, dht)
    return _backward(ConvTensors(x, weight, o.bias, o.initial_state, o.cu_seqlens, dy, dht), p, o.activation)


class _Conv(torch.autograd.Function):
    """The two passes."""

    @staticmethod
    def forward(ctx, p, activation, output_final_state, *tensors):
        ctx.save_for_backward(*tensors)
        ctx.set_materialize_grads(False)
        ctx.p, ctx.activation = p, activation
        return tuple(_forward(ConvTensors(*tensors), p, activation, output_final_state))

    @staticmethod
    @once_differentiable
    def backward(ctx, dy, dht):
        given = ConvTensors(*ctx.saved_tensors)
        dy = torch.zeros_like(given.x) if dy is None else dy
        grads = _backward(given._replace(dy=dy, dht=dht), ctx.p, ctx.activation)
        return None, None, None, *grads, None


def _conv(given: ConvTensors, p: ConvProblem) -> Conv:
    """The tensors contiguous; a state of no steps is none."""
    tensors = ConvTensors(*(None if x is None else x.contiguous() for x in given))
    if p.w == 1:
        tensors = tensors._replace(initial_state=None, dht=None)
    return Conv(tensors, tensors.cu_seqlens, p.n, p.t, p.d, p.w)


@bfloat16_as_float32_where_interpreted(lambda given, *_: ConvOutput(given.x.dtype, given.x.dtype))
def _forward(given: ConvTensors, p: ConvProblem, activation: Activation, output_final_state: bool) -> ConvOutput:
    device = check_devices(given._asdict())
    conv = _conv(given, p)
    y = torch.empty_like(conv.given.x)
    ht = torch.empty(p.n, p.d, p.w - 1, dtype=y.dtype, device=device) if output_final_state else None
    if y.numel():
        silu = activation == "silu"
        _launch(_forward_kernel, conv, p, _segments(p), y=y, WIDTH=p.w, SILU=silu).run(device)
    if ht is not None and ht.numel():
        _launch(_final_states_kernel, conv, p, p.n, ht=ht, WIDTH=p.w, STATE=_block(p)).run(device)
    return ConvOutput(y, ht)


def _dtypes(given: ConvTensors, *_: Any) -> ConvGrads:
    dtype = given.x.dtype
    return ConvGrads(dtype, given.weight.dtype, None if given.bias is None else given.bias.dtype, dtype)


@bfloat16_as_float32_where_interpreted(_dtypes)
def _backward(given: ConvTensors, p: ConvProblem, activation: Activation) -> ConvGrads:
    device = check_devices(given._asdict())
    conv, segments, silu = _conv(given, p), _segments(p), activation == "silu"
    dx = torch.empty_like(conv.given.x)
    make = torch.empty if dx.numel() else torch.zeros
    of_taps, of_bias = (make(segments, *n, p.d, dtype=torch.float32, device=device) for n in ([p.w], []))
    outs = ConvGrads(dx, of_taps, None if given.bias is None else of_bias, None)
    if dx.numel():
        levels = ROWS.bit_length() - 1
        _launch(_backward_kernel, conv, p, segments, outs=outs, WIDTH=p.w, SILU=silu, LEVELS=levels).run(device)
    dh0 = None if given.initial_state is None else torch.empty_like(given.initial_state).contiguous()
    if dh0 is not None and dh0.numel():
        _launch(_initial_states_kernel, conv, p, p.n, dh0=dh0, WIDTH=p.w, SILU=silu, STATE=_block(p)).run(device)
    dweight = sum_rows_in_pairs(outs.dweight).T.to(given.weight.dtype)
    dbias = None if given.bias is None else sum_rows_in_pairs(outs.dbias).to(given.bias.dtype)
    return ConvGrads(dx, dweight, dbias, dh0)


def _segments(p: ConvProblem) -> int:
    """Slots of ROWS steps of one sequence, as `layout.rows_of_segment` counts them."""
    return p.b * p.t // ROWS + p.n


def _block(p: ConvProblem) -> int:
    """Steps of a tile that holds a state."""
    return next_power_of_2(p.w - 1)


def _launch(kernel: Any, conv: Conv, p: ConvProblem, parts: int, **own: Any) -> Launch:
    """A program for each tile of channels and each of the parts that time is cut into."""
    grid = (parts * cdiv(p.d, COLUMNS),)
    return Launch(kernel, grid, {"conv": conv, **own, "SEGMENT": ROWS, "TILE_COLUMNS": COLUMNS}, OPTIONS)


@triton.jit
def _forward_kernel(
    conv, y, WIDTH: tl.constexpr, SILU: tl.constexpr, SEGMENT: tl.constexpr, TILE_COLUMNS: tl.constexpr
):
    """One program per segment and tile of channels."""
    segment, column, in_columns = _part_of_program(conv, TILE_COLUMNS)
    sequence, first, end = rows_of_segment(segment, conv, SEGMENT)
    start, _ = rows_of_sequence(sequence, conv)
    row = first + tl.arange(0, SEGMENT)[:, None]
    in_tile = (row < end) & in_columns
    z = _convolved(conv, sequence, start, row, column, in_tile, WIDTH)
    result = z * sigmoid(z) if SILU else z
    tl.store(y + row * conv.channels + column, result.to(y.dtype.element_ty), mask=in_tile)


@triton.jit
def _final_states_kernel(
    conv, ht, WIDTH: tl.constexpr, STATE: tl.constexpr, SEGMENT: tl.constexpr, TILE_COLUMNS: tl.constexpr
):
    """One program per sequence and tile of channels: its last W - 1 steps, those of its state included."""
    sequence, column, in_columns = _part_of_program(conv, TILE_COLUMNS)
    start, end = rows_of_sequence(sequence, conv)
    step = tl.arange(0, STATE)[:, None]
    in_state = (step < WIDTH - 1) & in_columns
    seen = _seen(conv, sequence, start, end - (WIDTH - 1) + step, column, in_state, WIDTH)
    tl.store(ht + _at_state(conv, sequence, column, step, WIDTH), seen.to(ht.dtype.element_ty), mask=in_state)


@triton.jit
def _backward_kernel(
    conv,
    outs,
    WIDTH: tl.constexpr,
    SILU: tl.constexpr,
    LEVELS: tl.constexpr,
    SEGMENT: tl.constexpr,
    TILE_COLUMNS: tl.constexpr,
):
    """One program per segment and tile of channels; it leaves the sums over its steps."""
    segment, column, in_columns = _part_of_program(conv, TILE_COLUMNS)
    sequence, first, end = rows_of_segment(segment, conv, SEGMENT)
    start, last = rows_of_sequence(sequence, conv)
    row = first + tl.arange(0, SEGMENT)[:, None]
    in_tile = (row < end) & in_columns
    dx = _gradient_of_seen(conv, sequence, start, last, row, column, in_tile, WIDTH, SILU)
    tl.store(outs.dx + row * conv.channels + column, dx.to(outs.dx.dtype.element_ty), mask=in_tile)
    dz = _gradient_of_sums(conv, sequence, start, row, column, in_tile, WIDTH, SILU)
    for tap in range(conv.width):
        seen = _seen(conv, sequence, start, row - (WIDTH - 1 - tap), column, in_tile, WIDTH)
        at_sums = (segment * WIDTH + tap) * conv.channels + column
        of_tap = tl.expand_dims(sum_rows(tl.where(in_tile, seen * dz, 0.0), LEVELS), 0)
        tl.store(outs.dweight + at_sums, of_tap, mask=in_columns)
    if outs.dbias is not None:
        of_bias = tl.expand_dims(sum_rows(dz, LEVELS), 0)
        tl.store(outs.dbias + segment * conv.channels + column, of_bias, mask=in_columns)


@triton.jit
def _initial_states_kernel(
    conv,
    dh0,
    WIDTH: tl.constexpr,
    SILU: tl.constexpr,
    STATE: tl.constexpr,
    SEGMENT: tl.constexpr,
    TILE_COLUMNS: tl.constexpr,
):
    """One program per sequence and tile of channels: the gradient of the W - 1 steps before its first."""
    sequence, column, in_columns = _part_of_program(conv, TILE_COLUMNS)
    start, end = rows_of_sequence(sequence, conv)
    step = tl.arange(0, STATE)[:, None]
    in_state = (step < WIDTH - 1) & in_columns
    row = start - (WIDTH - 1) + step
    dseen = _gradient_of_seen(conv, sequence, start, end, row, column, in_state, WIDTH, SILU)
    tl.store(dh0 + _at_state(conv, sequence, column, step, WIDTH), dseen.to(dh0.dtype.element_ty), mask=in_state)


@triton.jit
def _part_of_program(conv, TILE_COLUMNS: tl.constexpr):
    """This program's segment or sequence (int64), its channels [1, C], and which of them exist."""
    tiles = tl.cdiv(conv.channels, TILE_COLUMNS)
    part = (tl.program_id(0) // tiles).to(tl.int64)
    column = (tl.program_id(0) % tiles * TILE_COLUMNS + tl.arange(0, TILE_COLUMNS))[None, :]
    return part, column, column < conv.channels


@triton.jit
def _at_state(conv, sequence, column, step, WIDTH: tl.constexpr):
    """Where steps of a sequence's state are in [N, D, W - 1]."""
    return (sequence * conv.channels + column) * (WIDTH - 1) + step


@triton.jit
def _seen(conv, sequence, start, row, column, in_tile, WIDTH: tl.constexpr):
    """Rows of x, float32, and before a sequence's first row those of its state, or zero; zero where not in_tile."""
    seen = tl.load(conv.given.x + row * conv.channels + column, mask=in_tile & (row >= start), other=0).to(tl.float32)
    if conv.given.initial_state is not None:
        at_state = _at_state(conv, sequence, column, row - start + (WIDTH - 1), WIDTH)
        seen += tl.load(conv.given.initial_state + at_state, mask=in_tile & (row < start), other=0).to(tl.float32)
    return seen


@triton.jit
def _convolved(conv, sequence, start, row, column, in_tile, WIDTH: tl.constexpr):
    """The sums of W steps up to each row, before the activation; float32."""
    in_columns = column < conv.channels
    z = tl.full(in_tile.shape, 0.0, tl.float32)
    if conv.given.bias is not None:
        z += tl.load(conv.given.bias + column, mask=in_columns, other=0).to(tl.float32)
    for tap in tl.static_range(WIDTH):
        weight = tl.load(conv.given.weight + column * WIDTH + tap, mask=in_columns, other=0).to(tl.float32)
        seen = _seen(conv, sequence, start, row - (WIDTH - 1 - tap), column, in_tile, WIDTH)
        z = tl.fma(tl.broadcast_to(weight, z.shape), seen, z)
    return z


@triton.jit
def _gradient_of_sums(conv, sequence, start, row, column, in_tile, WIDTH: tl.constexpr, SILU: tl.constexpr):
    """The gradient of what `_convolved` returns; zero where not in_tile."""
    dz = tl.load(conv.given.dy + row * conv.channels + column, mask=in_tile, other=0).to(tl.float32)
    if SILU:
        z = _convolved(conv, sequence, start, row, column, in_tile, WIDTH)
        dz = tl.where(in_tile, dz * sigmoid(z) * (1.0 + z * sigmoid(-z)), 0.0)
    return dz


@triton.jit
def _gradient_of_seen(conv, sequence, start, end, row, column, in_tile, WIDTH: tl.constexpr, SILU: tl.constexpr):
    """The gradient of what `_seen` returns, in a sequence of rows [start, end): of x, and of its state before."""
    in_columns = column < conv.channels
    dseen = tl.full(in_tile.shape, 0.0, tl.float32)
    for tap in range(conv.width):  # of an unknown number: unrolled, the loop spills
        later = row + (WIDTH - 1 - tap)
        meets = in_tile & (later >= start) & (later < end)
        weight = tl.load(conv.given.weight + column * WIDTH + tap, mask=in_columns, other=0).to(tl.float32)
        dz = _gradient_of_sums(conv, sequence, start, later, column, meets, WIDTH, SILU)
        dseen = tl.where(meets, tl.fma(tl.broadcast_to(weight, dz.shape), dz, dseen), dseen)
    if conv.given.dht is not None:
        step = row - end + (WIDTH - 1)
        at_state = _at_state(conv, sequence, column, step, WIDTH)
        dseen += tl.load(conv.given.dht + at_state, mask=in_tile & (step >= 0), other=0).to(tl.float32)
    return dseen
