"""A depthwise causal convolution over time, in float64.

    y_t = activation(bias + Σ_w weight[:, w] · x_{t - W + 1 + w})

for every channel. What comes before a sequence's first step is its state, the W - 1 steps before, or zero; one
sequence's steps are none of the next one's.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np

from cpu_golden import Array
from cpu_golden._lib.activations import over_time, sigmoid
from cpu_golden._lib.arguments import values
from cpu_golden._lib.sequences import sequences_of
from cpu_golden.stages import Stages, exact
from op_arguments.causal_conv1d import ConvGrads, ConvOptions, ConvOutput, check_conv, check_conv_gradients
from op_arguments.options import options_of


@dataclass(frozen=True, kw_only=True)
class _Options(ConvOptions):
    stages: Stages = exact


@options_of(_Options)
def causal_conv1d(x: Array, weight: Array, *, output_final_state: bool = False, **options: Any) -> ConvOutput:
    """y [B, T, D] and, with output_final_state, the last W - 1 steps of every sequence, [N, D, W - 1].

    x [B, T, D]: float32, bfloat16 or float64; weight [D, W]: float32 or x's dtype; options: those of `ConvOptions`, and
    stages. Any of the tensors may be float64. Returns float64.
    Sites: product, acc (running sums, from the bias on), z (the last of them), exp, above (1 + exp), lesser (of the
    sigmoid and what it lacks of 1), sigmoid, y.
    Raises ValueError or TypeError as `op_arguments.causal_conv1d.check_conv`.
    """
    o = _Options(**options)
    offsets = values(o.cu_seqlens)
    p = check_conv(x, weight, o, offsets, exact=True)
    before = _steps_first(o.initial_state, (p.n, p.d, p.w - 1))
    y, last = np.zeros(x.shape), np.zeros(before.shape)
    for rows, n in sequences_of(p.t, offsets):
        seen = np.concatenate([before[n], x[:, rows].astype(np.float64)], axis=1)
        z = _convolved(seen, weight, o)
        y[:, rows] = z if o.activation is None else z * sigmoid(z, o.stages)
        last[n] = seen[:, seen.shape[1] - (p.w - 1) :]
    return ConvOutput(o.stages("y", y), last.swapaxes(1, 2) if output_final_state else None)


@options_of(_Options)
def causal_conv1d_bwd(x: Array, weight: Array, dy: Array, *, dht: Array | None = None, **options: Any) -> ConvGrads:
    """The gradients of `causal_conv1d`, for a gradient dy of y and dht of the final states; float64.

    dy and dht have x's dtype, or are float64. Sites: those of `causal_conv1d` without y, curve (z times what the
    sigmoid lacks of 1), slope (1 + curve), graded (dy times the sigmoid), dz (the gradient of z), terms and sum (what
    is summed over time to the gradients of weight and bias), dx, dweight, dbias, dh0.
    Raises ValueError or TypeError as `op_arguments.causal_conv1d.check_conv`.
    """
    o = _Options(**options)
    offsets, stages = values(o.cu_seqlens), o.stages
    p = check_conv(x, weight, o, offsets, exact=True)
    check_conv_gradients(p, dy, dht, exact=True)
    before, dlast = (_steps_first(state, (p.n, p.d, p.w - 1)) for state in (o.initial_state, dht))
    taps = weight.astype(np.float64)
    dx, dz, dbefore, terms = (np.zeros(shape) for shape in (x.shape, x.shape, before.shape, (*x.shape, p.w)))
    for rows, n in sequences_of(p.t, offsets):
        seen = np.concatenate([before[n], x[:, rows].astype(np.float64)], axis=1)
        grad = dy[:, rows].astype(np.float64)
        if o.activation is not None:
            grad = _before_silu(grad, _convolved(seen, weight, o), stages)
        dseen, size = np.zeros(seen.shape), grad.shape[1]
        for tap in range(p.w):
            part = slice(tap, tap + size)
            dseen[:, part] = stages("acc", dseen[:, part] + stages("product", taps[:, tap] * grad))
            terms[..., tap][:, rows] = seen[:, part] * grad
        dseen[:, size:] += dlast[n]
        dz[:, rows], dbefore[n], dx[:, rows] = grad, dseen[:, : p.w - 1], dseen[:, p.w - 1 :]
    return ConvGrads(
        stages("dx", dx),
        stages("dweight", over_time(stages("terms", terms), 2, stages)),
        None if o.bias is None else stages("dbias", over_time(dz, 1, stages)),
        None if o.initial_state is None else stages("dh0", dbefore.swapaxes(1, 2)),
    )


def _before_silu(dy: Array, z: Array, stages: Stages) -> Array:
    """The gradient of z, of one of silu(z) = z sigmoid(z)."""
    slope = stages("slope", 1 + stages("curve", z * sigmoid(-z, stages)))
    return stages("dz", stages("graded", dy * sigmoid(z, stages)) * slope)


def _convolved(seen: Array, weight: Array, o: _Options) -> Array:
    """Before the activation: the sums of W steps of `seen`, which begins W - 1 steps before the first."""
    taps = weight.astype(np.float64)
    size = seen.shape[1] - taps.shape[1] + 1
    z = np.zeros((len(seen), size, len(taps))) + (0.0 if o.bias is None else o.bias.astype(np.float64))
    for tap in range(taps.shape[1]):
        z = o.stages("acc", z + o.stages("product", taps[:, tap] * seen[:, tap : tap + size]))
    return o.stages("z", z)


def _steps_first(state: Array | None, shape: tuple[int, ...]) -> Array:
    """A state [N, D, W - 1], that of None zero, as float64 [N, W - 1, D]."""
    return (np.zeros(shape) if state is None else state.astype(np.float64)).swapaxes(1, 2)
