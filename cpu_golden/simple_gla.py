"""Gated linear attention with one decay per head and step ("simple GLA"): the definition, in float64.

    S_t = a_t S_{t-1} + k_t v_tᵀ        o_t = scale · q_tᵀ S_t        a_t = exp(g_t + g_gamma)

for every head, S [K, V]: the gate of step t decays the state before it, and o_t sees k_t v_tᵀ undecayed. g is a gate
per step (Mamba-2: Dao & Gu 2024, arXiv:2405.21060), g_gamma one per head for all steps (RetNet: Sun et al. 2023,
arXiv:2307.08621; Lightning Attention: Qin et al. 2024, arXiv:2401.04658). Both are natural logarithms per step, not
summed; where both are given they add, and without any nothing decays.
"""

from functools import partial
from typing import Any, NamedTuple, Unpack

from cpu_golden import Array
from cpu_golden._lib.scans import Backward, Output, backward, forward
from cpu_golden.chunk_scan import chunk_backward, chunk_forward
from cpu_golden.fused_recurrent import backward_definition, forward_definition, recurrent_backward, recurrent_forward
from cpu_golden.stages import Stages, exact
from op_arguments.gla import RecurrentOptions, ScanOptions, options_of


class Grads(NamedTuple):
    """The gradients of the arguments of the same names, None where an argument was not given."""

    dq: Any
    dk: Any
    dv: Any
    dg: Any
    dg_gamma: Any
    dh0: Any


@options_of(forward)
def chunk_simple_gla_fwd(
    q: Array,
    k: Array,
    v: Array,
    *,
    g: Array | None = None,
    g_gamma: Array | None = None,
    output_final_state: bool = False,
    chunk_size: int = 64,
    stages: Stages = exact,
    **options: Unpack[ScanOptions],
) -> Output:
    """o and, with output_final_state, ht of the recurrence, `chunk_size` steps at a time.

    q, k [B, T, H, K] and v [B, T, H, V]: float32, bfloat16 or float64, all three the same. g [B, T, H]: float32, q's
    dtype or float64; g_gamma [H]: float32 or float64. chunk_size: a multiple of 16 up to 256, counted from the
    beginning of each sequence. Other options as `op_arguments.gla.ScanOptions`, float64 where float32 is.
    Returns float64 o [B, T, H, V] and ht [N, H, K, V]; an empty sequence's is its initial state.
    Stages: depth, chunk_size, values_decayed. Sites: those of `chunk_scan.chunk_forward`.
    Raises ValueError or TypeError as `op_arguments.gla.check_forward`.
    """
    scan = partial(chunk_forward, chunk_size=chunk_size, stages=stages)
    gates = {"g": g, "g_gamma": g_gamma}
    return forward(scan, q, k, v, gates, output_final_state=output_final_state, chunk_size=chunk_size, **options)


@options_of(backward)
def chunk_simple_gla_bwd(
    q: Array,
    k: Array,
    v: Array,
    do: Array,
    *,
    g: Array | None = None,
    g_gamma: Array | None = None,
    dht: Array | None = None,
    chunk_size: int = 64,
    stages: Stages = exact,
    **options: Unpack[ScanOptions],
) -> Grads:
    """The gradients of `chunk_simple_gla_fwd`, for a gradient do [B, T, H, V] of o and dht [N, H, K, V] of ht.

    do has q's dtype, dht is float32 or float64, default zero; everything else as the forward pass. Returns float64
    gradients shaped as their arguments: dg [B, T, H] of every step, dg_gamma [H] their sum over B and T (each where
    that gate was given), dh0 [N, H, K, V] where initial_state was.
    Stages: depth, chunk_size, values_decayed. Sites: those of `chunk_scan.chunk_backward`; out is dq, dk, dv and the
    gradient of the gates.
    Raises ValueError or TypeError as `op_arguments.gla.check_backward`.
    """
    scan = partial(chunk_backward, chunk_size=chunk_size, stages=stages)
    return _backward(scan, q, k, v, do, g, g_gamma, dht=dht, chunk_size=chunk_size, **options)


fused_chunk_simple_gla_fwd = chunk_simple_gla_fwd
fused_chunk_simple_gla_bwd = chunk_simple_gla_bwd


@options_of(backward)
def chunk_simple_gla_bwd_magnitude(
    q: Array,
    k: Array,
    v: Array,
    do: Array,
    *,
    g: Array | None = None,
    g_gamma: Array | None = None,
    dht: Array | None = None,
    chunk_size: int = 64,
    **options: Unpack[ScanOptions],
) -> Grads:
    """Σ|terms| behind every gradient that `chunk_simple_gla_bwd` returns; arguments and errors as that.

    The golden itself on absolute values, the gates true, and for dg and dg_gamma also what kernels may add to a gate's
    sum and take away again: pairs that are not across its step. (Of the other forms the golden on absolute values is
    all.)
    """
    scan = partial(chunk_backward, chunk_size=chunk_size, stages=exact, magnitude=True)
    return _backward(scan, q, k, v, do, g, g_gamma, dht=dht, chunk_size=chunk_size, **options)


@options_of(forward)
def fused_recurrent_simple_gla_fwd(
    q: Array,
    k: Array,
    v: Array,
    *,
    g: Array | None = None,
    g_gamma: Array | None = None,
    output_final_state: bool = False,
    stages: Stages = exact,
    **options: Unpack[RecurrentOptions],
) -> Output:
    """o and, with output_final_state, ht of the recurrence, step by step.

    Arguments, result and errors as `chunk_simple_gla_fwd`; options as `op_arguments.gla.RecurrentOptions`. With reverse
    ht is the state of the first step.
    Stages: depth. Sites: those of `fused_recurrent.recurrent_forward`.
    """
    scan = partial(recurrent_forward, stages=stages)
    gates = {"g": g, "g_gamma": g_gamma}
    return forward(scan, q, k, v, gates, output_final_state=output_final_state, **options)


@options_of(backward)
def fused_recurrent_simple_gla_bwd(
    q: Array,
    k: Array,
    v: Array,
    do: Array,
    *,
    g: Array | None = None,
    g_gamma: Array | None = None,
    dht: Array | None = None,
    stages: Stages = exact,
    **options: Unpack[RecurrentOptions],
) -> Grads:
    """The gradients of `fused_recurrent_simple_gla_fwd`; arguments, result and errors as `chunk_simple_gla_bwd`.

    Stages: depth. Sites: those of `fused_recurrent.recurrent_backward`; out is dq, dk, dv, the gradient of the gates.
    """
    scan = partial(recurrent_backward, stages=stages)
    return _backward(scan, q, k, v, do, g, g_gamma, dht=dht, **options)


@options_of(forward)
def simple_gla_fwd_definition(
    q: Array,
    k: Array,
    v: Array,
    *,
    g: Array | None = None,
    g_gamma: Array | None = None,
    output_final_state: bool = False,
    **options: Unpack[RecurrentOptions],
) -> Output:
    """The recurrence step by step. Arguments, result and errors as `fused_recurrent_simple_gla_fwd`."""
    gates = {"g": g, "g_gamma": g_gamma}
    return forward(forward_definition, q, k, v, gates, output_final_state=output_final_state, **options)


@options_of(backward)
def simple_gla_bwd_definition(
    q: Array,
    k: Array,
    v: Array,
    do: Array,
    *,
    g: Array | None = None,
    g_gamma: Array | None = None,
    dht: Array | None = None,
    **options: Unpack[RecurrentOptions],
) -> Grads:
    """The derivative of the recurrence step by step. Arguments, result, errors as `fused_recurrent_simple_gla_bwd`."""
    return _backward(backward_definition, q, k, v, do, g, g_gamma, dht=dht, **options)


def _backward(
    scan: Backward, q: Array, k: Array, v: Array, do: Array, g: Array | None, g_gamma: Array | None, **options: Any
) -> Grads:
    dq, dk, dv, dgate, dh0 = backward(scan, q, k, v, do, {"g": g, "g_gamma": g_gamma}, **options)
    dg = None if g is None else dgate[..., 0]
    return Grads(dq, dk, dv, dg, None if g_gamma is None else dgate[..., 0].sum(axis=(0, 1)), dh0)
