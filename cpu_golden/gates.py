"""The gates of delta rules: natural logarithms of decays, from what a layer projects. In float64.

    softplus_gate = -exp(A_log) · softplus(a + dt_bias)
    bounded_gate  = lower_bound · sigmoid(exp(A_log) · (a + dt_bias))

The first is that of Qwen3-Next's gated delta rule and of Kimi Linear, the second that of Kimi K3. They are two models,
and not two ways to one: weights that were trained with one are wrong with the other.
"""

import numpy as np

from cpu_golden import Array
from cpu_golden._lib.activations import over_time, sigmoid
from cpu_golden.stages import Stages, exact
from op_arguments.gates import GateGrads, check_bounded_gate, check_gate_gradient, check_softplus_gate


def softplus_gate(a: Array, *, A_log: Array, dt_bias: Array | None = None, stages: Stages = exact) -> Array:
    """-exp(A_log) · softplus(a + dt_bias), float64, of a's shape.

    a [B, T, HV] or [B, T, HV, K]: float32, bfloat16 or float64; A_log [HV] and dt_bias, of the axes of a from HV on:
    float32 or float64. Sites: x (a + dt_bias), rate (exp(A_log)), exp (of -|x|), log (of 1 + exp), softplus, g.
    Raises ValueError or TypeError as `op_arguments.gates.check_softplus_gate`.
    """
    check_softplus_gate(a, A_log, dt_bias, exact=True)
    x = _biased(a, dt_bias, stages)
    return stages("g", -_rate(A_log, x, stages) * _softplus(x, stages))


def softplus_gate_bwd(
    a: Array, dg: Array, *, A_log: Array, dt_bias: Array | None = None, stages: Stages = exact
) -> GateGrads:
    """The gradients of `softplus_gate`, for a gradient dg of its result; float64, shaped as their arguments.

    dg: float32 or float64, of a's shape. Sites: those of `softplus_gate` without g, above (1 + exp), lesser (of the
    sigmoid and what it lacks of 1), sigmoid, graded (dg · rate), da, terms (what is summed to dA_log), sum (sums over B
    and T), dA_log, ddt_bias.
    Raises ValueError or TypeError as `softplus_gate`.
    """
    check_softplus_gate(a, A_log, dt_bias, exact=True)
    check_gate_gradient(dg, a, exact=True)
    x, grad = _biased(a, dt_bias, stages), dg.astype(np.float64)
    rate = _rate(A_log, x, stages)
    graded = stages("graded", -grad * rate)
    da = stages("da", graded * sigmoid(x, stages))
    of_rate = stages("terms", graded * _softplus(x, stages))
    return _grads(da, of_rate, dt_bias, stages)


def bounded_gate(
    a: Array,
    *,
    A_log: Array | None = None,
    dt_bias: Array | None = None,
    lower_bound: float = -5.0,
    stages: Stages = exact,
) -> Array:
    """lower_bound · sigmoid(exp(A_log) · (a + dt_bias)), float64, of a's shape; in (lower_bound, 0).

    Arguments as `softplus_gate`; without A_log its exp is 1. Sites: x, rate, scaled (their product), exp, above,
    lesser, sigmoid, g.
    Raises ValueError or TypeError as `op_arguments.gates.check_bounded_gate`.
    """
    bound = check_bounded_gate(a, A_log, dt_bias, lower_bound, exact=True)
    x = _biased(a, dt_bias, stages)
    return stages("g", bound * sigmoid(stages("scaled", _rate(A_log, x, stages) * x), stages))


def bounded_gate_bwd(
    a: Array,
    dg: Array,
    *,
    A_log: Array | None = None,
    dt_bias: Array | None = None,
    lower_bound: float = -5.0,
    stages: Stages = exact,
) -> GateGrads:
    """The gradients of `bounded_gate`, for a gradient dg of its result; as `softplus_gate_bwd`.

    Sites: those of `bounded_gate` without g, curve (the slope of the sigmoid), slope (that times lower_bound), graded
    (dg · slope), da, terms, sum, dA_log, ddt_bias.
    """
    bound = check_bounded_gate(a, A_log, dt_bias, lower_bound, exact=True)
    check_gate_gradient(dg, a, exact=True)
    x, grad = _biased(a, dt_bias, stages), dg.astype(np.float64)
    rate = _rate(A_log, x, stages)
    scaled = stages("scaled", rate * x)
    curve = stages("curve", sigmoid(scaled, stages) * sigmoid(-scaled, stages))
    graded = stages("graded", grad * stages("slope", bound * curve))
    da = stages("da", graded * rate)
    of_rate = None if A_log is None else stages("terms", graded * scaled)
    return _grads(da, of_rate, dt_bias, stages)


def _biased(a: Array, dt_bias: Array | None, stages: Stages) -> Array:
    x = a.astype(np.float64)
    return x if dt_bias is None else stages("x", x + dt_bias.astype(np.float64))


def _rate(A_log: Array | None, x: Array, stages: Stages) -> Array:
    """exp(A_log) of each element's head, 1 where it is None."""
    if A_log is None:
        return np.ones((1,) * x.ndim)
    return stages("rate", np.exp(A_log.astype(np.float64))).reshape(-1, *(1,) * (x.ndim - 3))


def _softplus(x: Array, stages: Stages) -> Array:
    """log(1 + exp(x)), without an overflow."""
    log = stages("log", np.log1p(stages("exp", np.exp(-np.abs(x)))))
    return stages("softplus", np.maximum(x, 0) + log)


def _grads(da: Array, of_rate: Array | None, dt_bias: Array | None, stages: Stages) -> GateGrads:
    """The gradients, from that of a, which is that of x, and what is summed to that of A_log."""
    return GateGrads(
        da,
        None if of_rate is None else stages("dA_log", over_time(of_rate, 1, stages)),
        None if dt_bias is None else stages("ddt_bias", over_time(da, da.ndim - 2, stages)),
    )
