"""Gated linear attention with one decay per head and step ("simple GLA"): the definition, in float64.

    S_t = a_t S_{t-1} + k_t v_tᵀ        o_t = scale · q_tᵀ S_t        a_t = exp(g_t + g_gamma)

for every head, S [K, V]: the gate of step t decays the state before it, and o_t sees k_t v_tᵀ undecayed. g is a gate
per step (Mamba-2: Dao & Gu 2024, arXiv:2405.21060), g_gamma one per head for all steps (RetNet: Sun et al. 2023,
arXiv:2307.08621; Lightning Attention: Qin et al. 2024, arXiv:2401.04658). Both are natural logarithms per step, not
summed; where both are given they add, and without any nothing decays.
"""

from functools import partial
from typing import Any, NamedTuple

from cpu_golden import Array
from cpu_golden._lib.scans import Output, backward, forward
from cpu_golden.chunk_scan import chunk_backward, chunk_forward
from cpu_golden.fused_recurrent import backward_definition, forward_definition, recurrent_backward, recurrent_forward
from cpu_golden.stages import Stages, exact


class Grads(NamedTuple):
    """The gradients of the arguments of the same names, None where an argument was not given."""

    dq: Any
    dk: Any
    dv: Any
    dg: Any
    dg_gamma: Any
    dh0: Any


def simple_gla_fwd_definition(
    q: Array,
    k: Array,
    v: Array,
    *,
    g: Array | None = None,
    g_gamma: Array | None = None,
    scale: float | None = None,
    initial_state: Array | None = None,
    output_final_state: bool = False,
    cu_seqlens: Array | None = None,
    reverse: bool = False,
) -> Output:
    """The recurrence step by step. Arguments, result and errors as `fused_recurrent_simple_gla_fwd`."""
    return forward(
        forward_definition,
        q,
        k,
        v,
        {"g": g, "g_gamma": g_gamma},
        scale=scale,
        initial_state=initial_state,
        output_final_state=output_final_state,
        cu_seqlens=cu_seqlens,
        reverse=reverse,
    )


def simple_gla_bwd_definition(
    q: Array,
    k: Array,
    v: Array,
    do: Array,
    *,
    g: Array | None = None,
    g_gamma: Array | None = None,
    scale: float | None = None,
    initial_state: Array | None = None,
    dht: Array | None = None,
    cu_seqlens: Array | None = None,
    reverse: bool = False,
) -> Grads:
    """The derivative of the recurrence step by step. Arguments, result, errors as `fused_recurrent_simple_gla_bwd`."""
    return _grads(
        g,
        g_gamma,
        *backward(
            backward_definition,
            q,
            k,
            v,
            do,
            {"g": g, "g_gamma": g_gamma},
            scale=scale,
            initial_state=initial_state,
            dht=dht,
            cu_seqlens=cu_seqlens,
            reverse=reverse,
        ),
    )


def chunk_simple_gla_fwd(
    q: Array,
    k: Array,
    v: Array,
    *,
    g: Array | None = None,
    g_gamma: Array | None = None,
    scale: float | None = None,
    initial_state: Array | None = None,
    output_final_state: bool = False,
    cu_seqlens: Array | None = None,
    chunk_size: int = 64,
    stages: Stages = exact,
) -> Output:
    """The recurrence of this module, `chunk_size` steps at a time (see `chunk_scan`).

    q, k [B, T, H, K] and v [B, T, H, V]: float32, bfloat16 or float64, all three the same. g [B, T, H]: float32, q's
    dtype or float64; g_gamma [H]: float32 or float64. scale: a float, default K^-0.5. initial_state [N, H, K, V]:
    float32 or float64, the states before the first steps, default zero. cu_seqlens [N + 1] int32: where each of the N
    sequences that are packed into B = 1 begins, and the end T of the last; without it every row of the batch is one
    (N = B). chunk_size: a multiple of 16 up to 256, counted from the beginning of each sequence.
    Returns float64 o [B, T, H, V] and, with output_final_state, ht [N, H, K, V]; an empty sequence's is its initial
    state.
    Stages: depth, chunk_size, values_decayed.
    Sites: q, k, v, initial_state, c (sum of the gates since the chunk began), exponent, decay (exp of it),
    kept_exponent and kept (of what decays a state, the latter less 1 or 0), A (the decayed scores), state, of every dot
    lhs, rhs, partial and acc (see `Stages.dot`), and out (o).
    Raises ValueError or TypeError as `op_arguments.gla.check_forward`.
    """
    scan = partial(chunk_forward, chunk_size=chunk_size, stages=stages)
    return forward(
        scan,
        q,
        k,
        v,
        {"g": g, "g_gamma": g_gamma},
        scale=scale,
        initial_state=initial_state,
        output_final_state=output_final_state,
        cu_seqlens=cu_seqlens,
        chunk_size=chunk_size,
    )


def chunk_simple_gla_bwd(
    q: Array,
    k: Array,
    v: Array,
    do: Array,
    *,
    g: Array | None = None,
    g_gamma: Array | None = None,
    scale: float | None = None,
    initial_state: Array | None = None,
    dht: Array | None = None,
    cu_seqlens: Array | None = None,
    chunk_size: int = 64,
    stages: Stages = exact,
) -> Grads:
    """The gradients of `chunk_simple_gla_fwd`, for a gradient do [B, T, H, V] of o and dht [N, H, K, V] of ht.

    do has q's dtype, dht is float32 or float64, default zero; everything else as the forward pass. Returns float64
    gradients shaped as their arguments: dg [B, T, H] of every step, dg_gamma [H] their sum over B and T (each where
    that gate was given), dh0 [N, H, K, V] where initial_state was.
    Sites: those of the forward pass, do, dht, dstate, dA, dgate (each sum in the gradient of a gate); out is dq, dk,
    dv and the gradient of the gates.
    Raises ValueError or TypeError as `op_arguments.gla.check_backward`.
    """
    scan = partial(chunk_backward, chunk_size=chunk_size, stages=stages)
    return _grads(
        g,
        g_gamma,
        *backward(
            scan,
            q,
            k,
            v,
            do,
            {"g": g, "g_gamma": g_gamma},
            scale=scale,
            initial_state=initial_state,
            dht=dht,
            cu_seqlens=cu_seqlens,
            chunk_size=chunk_size,
        ),
    )


fused_chunk_simple_gla_fwd = chunk_simple_gla_fwd
fused_chunk_simple_gla_bwd = chunk_simple_gla_bwd


def chunk_simple_gla_bwd_magnitude(
    q: Array,
    k: Array,
    v: Array,
    do: Array,
    *,
    g: Array | None = None,
    g_gamma: Array | None = None,
    scale: float | None = None,
    initial_state: Array | None = None,
    dht: Array | None = None,
    cu_seqlens: Array | None = None,
    chunk_size: int = 64,
) -> Grads:
    """Σ|terms| behind every gradient that `chunk_simple_gla_bwd` returns; arguments and errors as that.

    The golden itself on absolute values, the gates true, and for dg and dg_gamma also what kernels may add to a gate's
    sum and take away again: pairs that are not across its step. (Of the other forms the golden on absolute values is
    all.)
    """
    scan = partial(chunk_backward, chunk_size=chunk_size, stages=exact, magnitude=True)
    return _grads(
        g,
        g_gamma,
        *backward(
            scan,
            q,
            k,
            v,
            do,
            {"g": g, "g_gamma": g_gamma},
            scale=scale,
            initial_state=initial_state,
            dht=dht,
            cu_seqlens=cu_seqlens,
            chunk_size=chunk_size,
        ),
    )


def fused_recurrent_simple_gla_fwd(
    q: Array,
    k: Array,
    v: Array,
    *,
    g: Array | None = None,
    g_gamma: Array | None = None,
    scale: float | None = None,
    initial_state: Array | None = None,
    output_final_state: bool = False,
    cu_seqlens: Array | None = None,
    reverse: bool = False,
    stages: Stages = exact,
) -> Output:
    """The recurrence of this module, step by step; arguments, result and errors as `chunk_simple_gla_fwd`.

    reverse: time runs backwards within each sequence: S_t = a_t S_{t+1} + k_t v_tᵀ, from the last step to the first,
    whose state is ht.
    Stages: depth.
    Sites: q, k, v, initial_state, kept_exponent (g_t + g_gamma), kept, state, lhs, rhs, partial, acc (of q_tᵀ S_t),
    out (o).
    """
    scan = partial(recurrent_forward, stages=stages)
    return forward(
        scan,
        q,
        k,
        v,
        {"g": g, "g_gamma": g_gamma},
        scale=scale,
        initial_state=initial_state,
        output_final_state=output_final_state,
        cu_seqlens=cu_seqlens,
        reverse=reverse,
    )


def fused_recurrent_simple_gla_bwd(
    q: Array,
    k: Array,
    v: Array,
    do: Array,
    *,
    g: Array | None = None,
    g_gamma: Array | None = None,
    scale: float | None = None,
    initial_state: Array | None = None,
    dht: Array | None = None,
    cu_seqlens: Array | None = None,
    reverse: bool = False,
    stages: Stages = exact,
) -> Grads:
    """The gradients of `fused_recurrent_simple_gla_fwd`; arguments, result and errors as `chunk_simple_gla_bwd`.

    Sites: those of the forward pass, do, dht, dstate, dgate (a gate's gradient before it is stored); out is dq, dk,
    dv and the gradient of the gates.
    """
    scan = partial(recurrent_backward, stages=stages)
    return _grads(
        g,
        g_gamma,
        *backward(
            scan,
            q,
            k,
            v,
            do,
            {"g": g, "g_gamma": g_gamma},
            scale=scale,
            initial_state=initial_state,
            dht=dht,
            cu_seqlens=cu_seqlens,
            reverse=reverse,
        ),
    )


def _grads(
    g: Array | None, g_gamma: Array | None, dq: Array, dk: Array, dv: Array, dgate: Array, dh0: Array | None
) -> Grads:
    return Grads(
        dq,
        dk,
        dv,
        None if g is None else dgate[..., 0],
        None if g_gamma is None else dgate[..., 0].sum(axis=(0, 1)),
        dh0,
    )
