"""Gated linear attention with one decay per head and step, on the TPU. Defined in `cpu_golden/simple_gla.py`.

    S_t = exp(g_t + g_gamma) S_{t-1} + k_t v_tᵀ        o_t = scale · q_tᵀ S_t

The chunked forms are scans of `chunk_scan`, the recurrent ones of `fused_recurrent`.
"""

from typing import Any, NamedTuple

import jax

from op_arguments.debug import Debug
from tpu_kernels._lib.arguments import Interpret
from tpu_kernels.chunk_scan import chunk_bwd, chunk_fwd
from tpu_kernels.fused_recurrent import recurrent_bwd, recurrent_fwd
from tpu_kernels.gla import Output, differentiable


class Grads(NamedTuple):
    """The gradients of the arguments of the same names, None where an argument was not given."""

    dq: Any
    dk: Any
    dv: Any
    dg: Any
    dg_gamma: Any
    dh0: Any


def chunk_simple_gla_fwd(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    *,
    g: jax.Array | None = None,
    g_gamma: jax.Array | None = None,
    scale: float | None = None,
    initial_state: jax.Array | None = None,
    output_final_state: bool = False,
    cu_seqlens: jax.Array | None = None,
    chunk_size: int = 64,
    precision: str = "ieee",
    fused: bool | None = None,
    interpret: Interpret = None,
    debug: Debug = None,
) -> Output:
    """o and, with output_final_state, ht of the recurrence of this module, `chunk_size` steps at a time.

    q, k [B, T, H, K] and v [B, T, H, V]: all float32 or all bfloat16. g [B, T, H], float32 or of q's dtype, and g_gamma
    [H] float32: natural logarithms of the decays of each step and of every step, which add (none: no decay).
    initial_state [N, H, K, V] float32: the states before the first steps, default zero. cu_seqlens [N + 1] int32: where
    each of the N sequences that are packed into B = 1 begins, and the end T of the last; without it every row of the
    batch is one (N = B). It is read on the device. scale: a float, default K^-0.5. chunk_size: a multiple
    of 16 up to 256, counted from the beginning of each sequence. precision, of dots of float32 operands: "ieee", six
    bfloat16 passes, or "bf16x3"; of bfloat16 operands only the result is rounded so far. fused: whether one kernel does
    all, or another one the states before; None: one where its blocks fit VMEM (`chunk_scan.chunk_route` says why).
    interpret and debug: as `tpu_kernels.gmm.gmm`; sites as `chunk_scan.chunk_fwd` and `chunk_bwd`.
    Raises ValueError or TypeError as `op_arguments.gla.check_forward`, `check_precision` and `check_fused`; values are
    checked outside tracing only.
    """
    return Output(
        *chunk_fwd(
            q,
            k,
            v,
            gates={"g": g, "g_gamma": g_gamma},
            scale=scale,
            initial_state=initial_state,
            output_final_state=output_final_state,
            cu_seqlens=cu_seqlens,
            chunk_size=chunk_size,
            precision=precision,
            fused=fused,
            interpret=interpret,
            debug=debug,
        )
    )


def chunk_simple_gla_bwd(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    do: jax.Array,
    *,
    g: jax.Array | None = None,
    g_gamma: jax.Array | None = None,
    scale: float | None = None,
    initial_state: jax.Array | None = None,
    dht: jax.Array | None = None,
    cu_seqlens: jax.Array | None = None,
    chunk_size: int = 64,
    precision: str = "ieee",
    fused: bool | None = None,
    interpret: Interpret = None,
    debug: Debug = None,
) -> Grads:
    """The gradients of `chunk_simple_gla_fwd`'s arguments, given do [B, T, H, V] in q's dtype and dht [N, H, K, V].

    dht is float32. Gradients have the dtypes of their arguments. Other arguments and errors as
    `chunk_simple_gla_fwd`'s, with `op_arguments.gla.check_backward`.
    """
    return _grads(
        chunk_bwd(
            q,
            k,
            v,
            do,
            gates={"g": g, "g_gamma": g_gamma},
            scale=scale,
            initial_state=initial_state,
            dht=dht,
            cu_seqlens=cu_seqlens,
            chunk_size=chunk_size,
            precision=precision,
            fused=fused,
            interpret=interpret,
            debug=debug,
        )
    )


def chunk_simple_gla(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    *,
    g: jax.Array | None = None,
    g_gamma: jax.Array | None = None,
    scale: float | None = None,
    initial_state: jax.Array | None = None,
    output_final_state: bool = False,
    cu_seqlens: jax.Array | None = None,
    chunk_size: int = 64,
    precision: str = "ieee",
    fused: bool | None = None,
    interpret: Interpret = None,
) -> Output:
    """`chunk_simple_gla_fwd`, differentiable in q, k, v, the gates and initial_state; only they are kept for it."""
    return differentiable(
        chunk_fwd,
        chunk_bwd,
        q,
        k,
        v,
        gates={"g": g, "g_gamma": g_gamma},
        scale=scale,
        initial_state=initial_state,
        output_final_state=output_final_state,
        cu_seqlens=cu_seqlens,
        chunk_size=chunk_size,
        precision=precision,
        fused=fused,
        interpret=interpret,
    )


def fused_chunk_simple_gla_fwd(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    *,
    g: jax.Array | None = None,
    g_gamma: jax.Array | None = None,
    scale: float | None = None,
    initial_state: jax.Array | None = None,
    output_final_state: bool = False,
    cu_seqlens: jax.Array | None = None,
    chunk_size: int = 64,
    precision: str = "ieee",
    interpret: Interpret = None,
    debug: Debug = None,
) -> Output:
    """`chunk_simple_gla_fwd` in one kernel: ValueError where that cannot be."""
    return Output(
        *chunk_fwd(
            q,
            k,
            v,
            gates={"g": g, "g_gamma": g_gamma},
            scale=scale,
            initial_state=initial_state,
            output_final_state=output_final_state,
            cu_seqlens=cu_seqlens,
            chunk_size=chunk_size,
            precision=precision,
            fused=True,
            interpret=interpret,
            debug=debug,
        )
    )


def fused_chunk_simple_gla_bwd(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    do: jax.Array,
    *,
    g: jax.Array | None = None,
    g_gamma: jax.Array | None = None,
    scale: float | None = None,
    initial_state: jax.Array | None = None,
    dht: jax.Array | None = None,
    cu_seqlens: jax.Array | None = None,
    chunk_size: int = 64,
    precision: str = "ieee",
    interpret: Interpret = None,
    debug: Debug = None,
) -> Grads:
    """`chunk_simple_gla_bwd` in one kernel: ValueError where that cannot be."""
    return _grads(
        chunk_bwd(
            q,
            k,
            v,
            do,
            gates={"g": g, "g_gamma": g_gamma},
            scale=scale,
            initial_state=initial_state,
            dht=dht,
            cu_seqlens=cu_seqlens,
            chunk_size=chunk_size,
            precision=precision,
            fused=True,
            interpret=interpret,
            debug=debug,
        )
    )


def fused_chunk_simple_gla(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    *,
    g: jax.Array | None = None,
    g_gamma: jax.Array | None = None,
    scale: float | None = None,
    initial_state: jax.Array | None = None,
    output_final_state: bool = False,
    cu_seqlens: jax.Array | None = None,
    chunk_size: int = 64,
    precision: str = "ieee",
    interpret: Interpret = None,
) -> Output:
    """`chunk_simple_gla` in one kernel each way: ValueError where that cannot be."""
    return differentiable(
        chunk_fwd,
        chunk_bwd,
        q,
        k,
        v,
        gates={"g": g, "g_gamma": g_gamma},
        scale=scale,
        initial_state=initial_state,
        output_final_state=output_final_state,
        cu_seqlens=cu_seqlens,
        chunk_size=chunk_size,
        precision=precision,
        fused=True,
        interpret=interpret,
    )


def fused_recurrent_simple_gla_fwd(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    *,
    g: jax.Array | None = None,
    g_gamma: jax.Array | None = None,
    scale: float | None = None,
    initial_state: jax.Array | None = None,
    output_final_state: bool = False,
    cu_seqlens: jax.Array | None = None,
    reverse: bool = False,
    interpret: Interpret = None,
    debug: Debug = None,
) -> Output:
    """o and, with output_final_state, ht of the recurrence of this module, one step at a time.

    reverse: time runs backwards, in each sequence. There are no dots, and so no precision to choose. Other arguments
    and errors as `chunk_simple_gla_fwd`'s.
    """
    return Output(
        *recurrent_fwd(
            q,
            k,
            v,
            gates={"g": g, "g_gamma": g_gamma},
            scale=scale,
            initial_state=initial_state,
            output_final_state=output_final_state,
            cu_seqlens=cu_seqlens,
            reverse=reverse,
            interpret=interpret,
            debug=debug,
        )
    )


def fused_recurrent_simple_gla_bwd(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    do: jax.Array,
    *,
    g: jax.Array | None = None,
    g_gamma: jax.Array | None = None,
    scale: float | None = None,
    initial_state: jax.Array | None = None,
    dht: jax.Array | None = None,
    cu_seqlens: jax.Array | None = None,
    reverse: bool = False,
    interpret: Interpret = None,
    debug: Debug = None,
) -> Grads:
    """The gradients of `fused_recurrent_simple_gla_fwd`'s arguments; as `chunk_simple_gla_bwd`."""
    return _grads(
        recurrent_bwd(
            q,
            k,
            v,
            do,
            gates={"g": g, "g_gamma": g_gamma},
            scale=scale,
            initial_state=initial_state,
            dht=dht,
            cu_seqlens=cu_seqlens,
            reverse=reverse,
            interpret=interpret,
            debug=debug,
        )
    )


def fused_recurrent_simple_gla(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    *,
    g: jax.Array | None = None,
    g_gamma: jax.Array | None = None,
    scale: float | None = None,
    initial_state: jax.Array | None = None,
    output_final_state: bool = False,
    cu_seqlens: jax.Array | None = None,
    reverse: bool = False,
    interpret: Interpret = None,
) -> Output:
    """`fused_recurrent_simple_gla_fwd`, differentiable as `chunk_simple_gla`."""
    return differentiable(
        recurrent_fwd,
        recurrent_bwd,
        q,
        k,
        v,
        gates={"g": g, "g_gamma": g_gamma},
        scale=scale,
        initial_state=initial_state,
        output_final_state=output_final_state,
        cu_seqlens=cu_seqlens,
        reverse=reverse,
        interpret=interpret,
    )


def _grads(gradients: Any) -> Grads:
    dq, dk, dv, dgates, dh0 = gradients
    return Grads(dq, dk, dv, dgates["g"], dgates["g_gamma"], dh0)
