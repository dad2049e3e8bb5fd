"""What the gates of delta rules take and return (defined in `cpu_golden/gates.py`)."""

import math
from typing import Any, NamedTuple

from op_arguments import Array, check_array, check_shape
from op_arguments.gla import FLOATS


class GateGrads(NamedTuple):
    """The gradients of a gate's arguments of the same names, None where one was not given."""

    da: Any
    dA_log: Any
    ddt_bias: Any


def check_gate(a: Array, A_log: Array | None, dt_bias: Array | None, exact: bool = False) -> None:
    """Check what a gate takes: a [B, T, HV] or [B, T, HV, K], A_log [HV] and dt_bias [HV] or [HV, K].

    `exact` also lets float64 tensors through: the goldens take them.
    Raises TypeError for a wrong type or dtype, ValueError for a wrong rank or shape.
    """
    axes = "B, T, HV" if len(getattr(a, "shape", ())) == 3 else "B, T, HV, K"
    check_array("a", a, axes, FLOATS, exact=exact)
    if A_log is not None:
        check_array("A_log", A_log, "HV", ("float32",), exact=exact)
        check_shape("A_log", A_log, "HV", tuple(a.shape[2:3]))
    if dt_bias is not None:
        of_bias = axes.removeprefix("B, T, ")
        check_array("dt_bias", dt_bias, of_bias, ("float32",), exact=exact)
        check_shape("dt_bias", dt_bias, of_bias, tuple(a.shape[2:]))


def check_softplus_gate(a: Array, A_log: Array, dt_bias: Array | None, exact: bool = False) -> None:
    """Check what `softplus_gate` takes: as `check_gate`, and A_log must be given."""
    if A_log is None:
        check_array("A_log", A_log, "HV", ("float32",))
    check_gate(a, A_log, dt_bias, exact)


def check_bounded_gate(
    a: Array, A_log: Array | None, dt_bias: Array | None, lower_bound: Any, exact: bool = False
) -> float:
    """The lower bound of `bounded_gate`, after checking what it takes: as `check_gate`.

    lower_bound must be a finite float below 0: TypeError, ValueError.
    """
    check_gate(a, A_log, dt_bias, exact)
    if isinstance(lower_bound, bool) or not isinstance(lower_bound, int | float):
        raise TypeError(f"lower_bound must be a float, got {type(lower_bound).__name__}")
    if not (math.isfinite(lower_bound) and lower_bound < 0):
        raise ValueError(f"lower_bound must be finite and below 0, got {lower_bound}")
    return float(lower_bound)


def check_gate_gradient(dg: Array, a: Array, exact: bool = False) -> None:
    """Refuse a gradient of a gate that is not float32 (TypeError), or not of a's shape (ValueError)."""
    axes = "B, T, HV" if len(a.shape) == 3 else "B, T, HV, K"
    check_array("dg", dg, axes, ("float32",), exact=exact)
    check_shape("dg", dg, axes, tuple(a.shape))
