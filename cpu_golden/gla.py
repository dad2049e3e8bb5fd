"""Gated linear attention with one decay per key channel: the definition, in float64.

    S_t = diag(a_t) S_{t-1} + k_t v_tᵀ        o_t = scale · q_tᵀ S_t        a_t = exp(gk_t)

for every head, S [K, V] (Yang et al. 2023, arXiv:2312.06635): the gates of step t decay the state before it, and o_t
sees k_t v_tᵀ undecayed. gk [B, T, H, K] are natural logarithms per step, not summed.
"""

from functools import partial
from typing import Any, NamedTuple, Unpack

from cpu_golden import Array
from cpu_golden._lib.scans import Output, backward, forward
from cpu_golden.chunk_scan import chunk_backward, chunk_forward
from cpu_golden.fused_recurrent import backward_definition, forward_definition, recurrent_backward, recurrent_forward
from cpu_golden.stages import Stages, exact
from op_arguments.gla import RecurrentOptions, ScanOptions, options_of


class Grads(NamedTuple):
    """The gradients of the arguments of the same names, None where an argument was not given."""

    dq: Any
    dk: Any
    dv: Any
    dgk: Any
    dh0: Any


@options_of(forward)
def chunk_gla_fwd(
    q: Array,
    k: Array,
    v: Array,
    *,
    gk: Array,
    output_final_state: bool = False,
    chunk_size: int = 64,
    stages: Stages = exact,
    **options: Unpack[ScanOptions],
) -> Output:
    """o and, with output_final_state, ht of the recurrence, `chunk_size` steps at a time.

    q, k [B, T, H, K] and v [B, T, H, V]: float32, bfloat16 or float64, all three the same. gk [B, T, H, K]:
    float32, q's dtype or float64. chunk_size: a multiple of 16 up to 256, counted from the beginning of each sequence.
    Other options as `op_arguments.gla.ScanOptions`, float64 where float32 is. Returns float64 o [B, T, H, V] and
    ht [N, H, K, V]; an empty sequence's is its initial state.
    Stages: depth, chunk_size. Sites: those of `chunk_scan.chunk_forward`.
    Raises ValueError or TypeError as `op_arguments.gla.check_forward`.
    """
    scan = partial(chunk_forward, chunk_size=chunk_size, stages=stages)
    gates = {"gk": gk}
    return forward(scan, q, k, v, gates, output_final_state=output_final_state, chunk_size=chunk_size, **options)


@options_of(backward)
def chunk_gla_bwd(
    q: Array,
    k: Array,
    v: Array,
    do: Array,
    *,
    gk: Array,
    dht: Array | None = None,
    chunk_size: int = 64,
    stages: Stages = exact,
    **options: Unpack[ScanOptions],
) -> Grads:
    """The gradients of `chunk_gla_fwd`, for a gradient do [B, T, H, V] of o and dht [N, H, K, V] of ht.

    do has q's dtype, dht is float32 or float64, default zero; everything else as the forward pass. Returns float64
    gradients shaped as their arguments, dh0 only where initial_state was given.
    Stages: depth, chunk_size. Sites: those of `chunk_scan.chunk_backward`; out is dq, dk, dv and dgk.
    Raises ValueError or TypeError as `op_arguments.gla.check_backward`.
    """
    scan = partial(chunk_backward, chunk_size=chunk_size, stages=stages)
    return Grads(*backward(scan, q, k, v, do, {"gk": gk}, dht=dht, chunk_size=chunk_size, **options))


@options_of(backward)
def chunk_gla_bwd_magnitude(
    q: Array,
    k: Array,
    v: Array,
    do: Array,
    *,
    gk: Array,
    dht: Array | None = None,
    chunk_size: int = 64,
    **options: Unpack[ScanOptions],
) -> Grads:
    """Σ|terms| behind every gradient that `chunk_gla_bwd` returns; arguments and errors as that.

    The golden itself on absolute values, the gates true, and for dgk also what kernels may add to a gate's sum and
    take away again: pairs that are not across its step. (Of the other forms the golden on absolute values is all.)
    """
    scan = partial(chunk_backward, chunk_size=chunk_size, stages=exact, magnitude=True)
    return Grads(*backward(scan, q, k, v, do, {"gk": gk}, dht=dht, chunk_size=chunk_size, **options))


@options_of(forward)
def fused_recurrent_gla_fwd(
    q: Array,
    k: Array,
    v: Array,
    *,
    gk: Array,
    output_final_state: bool = False,
    stages: Stages = exact,
    **options: Unpack[RecurrentOptions],
) -> Output:
    """o and, with output_final_state, ht of the recurrence, step by step.

    Arguments, result and errors as `chunk_gla_fwd`; options as `op_arguments.gla.RecurrentOptions`. With reverse ht is
    the state of the first step.
    Stages: depth. Sites: those of `fused_recurrent.recurrent_forward`.
    """
    scan = partial(recurrent_forward, stages=stages)
    return forward(scan, q, k, v, {"gk": gk}, output_final_state=output_final_state, **options)


@options_of(backward)
def fused_recurrent_gla_bwd(
    q: Array,
    k: Array,
    v: Array,
    do: Array,
    *,
    gk: Array,
    dht: Array | None = None,
    stages: Stages = exact,
    **options: Unpack[RecurrentOptions],
) -> Grads:
    """The gradients of `fused_recurrent_gla_fwd`; arguments, result and errors as `chunk_gla_bwd`.

    Stages: depth. Sites: those of `fused_recurrent.recurrent_backward`; out is dq, dk, dv and dgk.
    """
    scan = partial(recurrent_backward, stages=stages)
    return Grads(*backward(scan, q, k, v, do, {"gk": gk}, dht=dht, **options))


@options_of(forward)
def gla_fwd_definition(
    q: Array,
    k: Array,
    v: Array,
    *,
    gk: Array,
    output_final_state: bool = False,
    **options: Unpack[RecurrentOptions],
) -> Output:
    """The recurrence step by step. Arguments, result and errors as `fused_recurrent_gla_fwd`."""
    return forward(forward_definition, q, k, v, {"gk": gk}, output_final_state=output_final_state, **options)


@options_of(backward)
def gla_bwd_definition(
    q: Array,
    k: Array,
    v: Array,
    do: Array,
    *,
    gk: Array,
    dht: Array | None = None,
    **options: Unpack[RecurrentOptions],
) -> Grads:
    """The derivative of the recurrence step by step. Arguments, result, errors as `fused_recurrent_gla_bwd`."""
    return Grads(*backward(backward_definition, q, k, v, do, {"gk": gk}, dht=dht, **options))
