"""Gated linear attention with one decay per key channel and step, in Triton; defined in `cpu_golden/gla.py`.

    S_t = diag(a_t) S_{t-1} + k_t v_tᵀ        o_t = scale · q_tᵀ S_t        a_t = exp(gk_t)

The arithmetic is in `chunk_scan` and `fused_recurrent`.
"""

from typing import Any, Literal, NamedTuple

from torch import Tensor

from gpu_reference.chunk_scan import chunk_bwd, chunk_fwd, differentiable
from gpu_reference.fused_recurrent import Gradients, recurrent_bwd, recurrent_fwd
from op_arguments.debug import Debug

Precision = Literal["ieee", "bf16x3"]


class Output(NamedTuple):
    """o, and the final state where it was asked for."""

    o: Any
    ht: Any


class Grads(NamedTuple):
    """The gradients of the arguments of the same names, None where an argument was not given."""

    dq: Any
    dk: Any
    dv: Any
    dgk: Any
    dh0: Any


def chunk_gla(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    gk: Tensor,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    cu_seqlens: Tensor | None = None,
    chunk_size: int = 64,
    precision: Precision = "ieee",
    fused: bool | None = None,
) -> Output:
    """`chunk_gla_fwd`, differentiable in its tensors."""
    return Output(
        *differentiable(
            chunk_fwd,
            chunk_bwd,
            q,
            k,
            v,
            {"gk": gk},
            initial_state,
            scale=scale,
            output_final_state=output_final_state,
            cu_seqlens=cu_seqlens,
            chunk_size=chunk_size,
            precision=precision,
            fused=fused,
        )
    )


def chunk_gla_fwd(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    gk: Tensor,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    cu_seqlens: Tensor | None = None,
    chunk_size: int = 64,
    precision: Precision = "ieee",
    fused: bool | None = None,
    debug: Debug = None,
) -> Output:
    """The recurrence by blocks of steps; see `chunk_scan` for how.

    q, k [B, T, H, K] and v [B, T, H, V]: all float32 or all bfloat16, of any strides. gk [B, T, H, K]: float32 or q's
    dtype. scale: default K^-0.5. initial_state [N, H, K, V] float32: the states before the first steps, default zero.
    cu_seqlens [N + 1] int32: where each of the N sequences that are packed into B = 1 begins, and the end T of the
    last; without it every row of the batch is one (N = B). chunk_size: a multiple of 16 up to 256, counted from the
    beginning of each sequence. precision: of the dots of float32, "ieee" or "bf16x3" (operands in two bfloat16 parts,
    three products). fused: in one pass over each sequence, or with all chunks at once from states that are kept in
    memory; None: as `chunk_scan.chunk_route` says. debug: as
    `chunk_scan.chunk_fwd`.
    Returns o [B, T, H, V] in q's dtype, zero in rows of no sequence, and with output_final_state ht [N, H, K, V]
    float32, an empty sequence's being its initial state; else None.
    The values of a CUDA cu_seqlens are not checked; those out of order are clamped.
    Raises ValueError or TypeError as `op_arguments.gla.check_forward`, ValueError for tensors on several devices, and
    RuntimeError for CPU tensors where Triton's interpreter is off.
    """
    return Output(
        *chunk_fwd(
            q,
            k,
            v,
            gates={"gk": gk},
            scale=scale,
            initial_state=initial_state,
            output_final_state=output_final_state,
            cu_seqlens=cu_seqlens,
            chunk_size=chunk_size,
            precision=precision,
            fused=fused,
            debug=debug,
        )
    )


def chunk_gla_bwd(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    do: Tensor,
    *,
    gk: Tensor,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    dht: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    chunk_size: int = 64,
    precision: Precision = "ieee",
    fused: bool | None = None,
    debug: Debug = None,
) -> Grads:
    """The gradients of `chunk_gla_fwd`, for a gradient do [B, T, H, V] of o and dht [N, H, K, V] of ht.

    do has q's dtype, dht is float32, default zero; everything else as the forward pass, but that states are kept for
    each block of rows (`chunk_scan.LARGEST_ROWS`), and where not fused their gradients too.
    Returns gradients shaped as their arguments, in their dtypes: dgk [B, T, H, K] of every step, dh0 [N, H, K, V] where
    initial_state was; zero in rows of no sequence.
    Raises as `chunk_gla_fwd`, with `op_arguments.gla.check_backward`.
    """
    return _grads(
        chunk_bwd(
            q,
            k,
            v,
            do,
            gates={"gk": gk},
            scale=scale,
            initial_state=initial_state,
            dht=dht,
            cu_seqlens=cu_seqlens,
            chunk_size=chunk_size,
            precision=precision,
            fused=fused,
            debug=debug,
        )
    )


def fused_recurrent_gla(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    gk: Tensor,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    cu_seqlens: Tensor | None = None,
    reverse: bool = False,
) -> Output:
    """`fused_recurrent_gla_fwd`, differentiable in its tensors."""
    return Output(
        *differentiable(
            recurrent_fwd,
            recurrent_bwd,
            q,
            k,
            v,
            {"gk": gk},
            initial_state,
            scale=scale,
            output_final_state=output_final_state,
            cu_seqlens=cu_seqlens,
            reverse=reverse,
        )
    )


def fused_recurrent_gla_fwd(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    gk: Tensor,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    cu_seqlens: Tensor | None = None,
    reverse: bool = False,
    debug: Debug = None,
) -> Output:
    """The recurrence step by step (see `fused_recurrent`); arguments, result and errors as `chunk_gla_fwd`.

    reverse: time runs backwards within each sequence: S_t = a_t S_{t+1} + k_t v_tᵀ, from the last step to the first,
    whose state is ht.
    """
    return Output(
        *recurrent_fwd(
            q,
            k,
            v,
            gates={"gk": gk},
            scale=scale,
            initial_state=initial_state,
            output_final_state=output_final_state,
            cu_seqlens=cu_seqlens,
            reverse=reverse,
            debug=debug,
        )
    )


def fused_recurrent_gla_bwd(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    do: Tensor,
    *,
    gk: Tensor,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    dht: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    reverse: bool = False,
    debug: Debug = None,
) -> Grads:
    """The gradients of `fused_recurrent_gla_fwd`; arguments, result and errors as `chunk_gla_bwd`."""
    return _grads(
        recurrent_bwd(
            q,
            k,
            v,
            do,
            gates={"gk": gk},
            scale=scale,
            initial_state=initial_state,
            dht=dht,
            cu_seqlens=cu_seqlens,
            reverse=reverse,
            debug=debug,
        )
    )


def _grads(x: Gradients) -> Grads:
    return Grads(x.dq, x.dk, x.dv, x.dgates["gk"], x.dh0)
