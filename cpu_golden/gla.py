"""Gated linear attention with one decay per key channel: the definition, in float64.

    S_t = diag(a_t) S_{t-1} + k_t v_tᵀ        o_t = scale · q_tᵀ S_t        a_t = exp(gk_t)

for every head, S [K, V] (Yang et al. 2023, arXiv:2312.06635): the gates of step t decay the state before it, and o_t
sees k_t v_tᵀ undecayed. gk [B, T, H, K] are natural logarithms per step, not summed.
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
    dgk: Any
    dh0: Any


def gla_fwd_definition(
    q: Array,
    k: Array,
    v: Array,
    *,
    gk: Array,
    scale: float | None = None,
    initial_state: Array | None = None,
    output_final_state: bool = False,
    cu_seqlens: Array | None = None,
    reverse: bool = False,
) -> Output:
    """The recurrence step by step. Arguments, result and errors as `fused_recurrent_gla_fwd`."""
    return forward(
        forward_definition,
        q,
        k,
        v,
        {"gk": gk},
        scale=scale,
        initial_state=initial_state,
        output_final_state=output_final_state,
        cu_seqlens=cu_seqlens,
        reverse=reverse,
    )


def gla_bwd_definition(
    q: Array,
    k: Array,
    v: Array,
    do: Array,
    *,
    gk: Array,
    scale: float | None = None,
    initial_state: Array | None = None,
    dht: Array | None = None,
    cu_seqlens: Array | None = None,
    reverse: bool = False,
) -> Grads:
    """The derivative of the recurrence step by step. Arguments, result, errors as `fused_recurrent_gla_bwd`."""
    return Grads(
        *backward(
            backward_definition,
            q,
            k,
            v,
            do,
            {"gk": gk},
            scale=scale,
            initial_state=initial_state,
            dht=dht,
            cu_seqlens=cu_seqlens,
            reverse=reverse,
        )
    )


def chunk_gla_fwd(
    q: Array,
    k: Array,
    v: Array,
    *,
    gk: Array,
    scale: float | None = None,
    initial_state: Array | None = None,
    output_final_state: bool = False,
    cu_seqlens: Array | None = None,
    chunk_size: int = 64,
    stages: Stages = exact,
) -> Output:
    """The recurrence of this module, `chunk_size` steps at a time (see `chunk_scan`).

    q, k [B, T, H, K] and v [B, T, H, V]: float32, bfloat16 or float64, all three the same. gk [B, T, H, K]:
    float32, q's dtype or float64. scale: a float, default K^-0.5. initial_state [N, H, K, V]:
    float32 or float64, the states before the first steps, default zero. cu_seqlens [N + 1] int32: where each of the N
    sequences that are packed into B = 1 begins, and the end T of the last; without it every row of the batch is one
    (N = B). chunk_size: a multiple of 16 up to 256, counted from the beginning of each sequence.
    Returns float64 o [B, T, H, V] and, with output_final_state, ht [N, H, K, V]; an empty sequence's is its initial
    state.
    Stages: depth, chunk_size.
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
        {"gk": gk},
        scale=scale,
        initial_state=initial_state,
        output_final_state=output_final_state,
        cu_seqlens=cu_seqlens,
        chunk_size=chunk_size,
    )


def chunk_gla_bwd(
    q: Array,
    k: Array,
    v: Array,
    do: Array,
    *,
    gk: Array,
    scale: float | None = None,
    initial_state: Array | None = None,
    dht: Array | None = None,
    cu_seqlens: Array | None = None,
    chunk_size: int = 64,
    stages: Stages = exact,
) -> Grads:
    """The gradients of `chunk_gla_fwd`, for a gradient do [B, T, H, V] of o and dht [N, H, K, V] of ht.

    do has q's dtype, dht is float32 or float64, default zero; everything else as the forward pass. Returns float64
    gradients shaped as their arguments, dh0 only where initial_state was given.
    Sites: those of the forward pass, do, dht, dstate, dA, dgate (each sum in the gradient of a gate); out is dq, dk,
    dv and the gradient of the gates.
    Raises ValueError or TypeError as `op_arguments.gla.check_backward`.
    """
    scan = partial(chunk_backward, chunk_size=chunk_size, stages=stages)
    return Grads(
        *backward(
            scan,
            q,
            k,
            v,
            do,
            {"gk": gk},
            scale=scale,
            initial_state=initial_state,
            dht=dht,
            cu_seqlens=cu_seqlens,
            chunk_size=chunk_size,
        )
    )


def chunk_gla_bwd_magnitude(
    q: Array,
    k: Array,
    v: Array,
    do: Array,
    *,
    gk: Array,
    scale: float | None = None,
    initial_state: Array | None = None,
    dht: Array | None = None,
    cu_seqlens: Array | None = None,
    chunk_size: int = 64,
) -> Grads:
    """Σ|terms| behind every gradient that `chunk_gla_bwd` returns; arguments and errors as that.

    The golden itself on absolute values, the gates true, and for dgk also what kernels may add to a gate's sum and
    take away again: pairs that are not across its step. (Of the other forms the golden on absolute values is all.)
    """
    scan = partial(chunk_backward, chunk_size=chunk_size, stages=exact, magnitude=True)
    return Grads(
        *backward(
            scan,
            q,
            k,
            v,
            do,
            {"gk": gk},
            scale=scale,
            initial_state=initial_state,
            dht=dht,
            cu_seqlens=cu_seqlens,
            chunk_size=chunk_size,
        )
    )


def fused_recurrent_gla_fwd(
    q: Array,
    k: Array,
    v: Array,
    *,
    gk: Array,
    scale: float | None = None,
    initial_state: Array | None = None,
    output_final_state: bool = False,
    cu_seqlens: Array | None = None,
    reverse: bool = False,
    stages: Stages = exact,
) -> Output:
    """The recurrence of this module, step by step; arguments, result and errors as `chunk_gla_fwd`.

    reverse: time runs backwards within each sequence: S_t = a_t S_{t+1} + k_t v_tᵀ, from the last step to the first,
    whose state is ht.
    Stages: depth.
    Sites: q, k, v, initial_state, kept_exponent (gk_t), kept, state, lhs, rhs, partial, acc (of q_tᵀ S_t), out (o).
    """
    scan = partial(recurrent_forward, stages=stages)
    return forward(
        scan,
        q,
        k,
        v,
        {"gk": gk},
        scale=scale,
        initial_state=initial_state,
        output_final_state=output_final_state,
        cu_seqlens=cu_seqlens,
        reverse=reverse,
    )


def fused_recurrent_gla_bwd(
    q: Array,
    k: Array,
    v: Array,
    do: Array,
    *,
    gk: Array,
    scale: float | None = None,
    initial_state: Array | None = None,
    dht: Array | None = None,
    cu_seqlens: Array | None = None,
    reverse: bool = False,
    stages: Stages = exact,
) -> Grads:
    """The gradients of `fused_recurrent_gla_fwd`; arguments, result and errors as `chunk_gla_bwd`.

    Sites: those of the forward pass, do, dht, dstate, dgate (a gate's gradient before it is stored); out is dq, dk,
    dv and the gradient of the gates.
    """
    scan = partial(recurrent_backward, stages=stages)
    return Grads(
        *backward(
            scan,
            q,
            k,
            v,
            do,
            {"gk": gk},
            scale=scale,
            initial_state=initial_state,
            dht=dht,
            cu_seqlens=cu_seqlens,
            reverse=reverse,
        )
    )
