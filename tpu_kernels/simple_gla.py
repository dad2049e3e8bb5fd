"""Gated linear attention with one decay per head and step, on the TPU. Defined in `cpu_golden/simple_gla.py`.

    S_t = exp(g_t + g_gamma) S_{t-1} + k_t v_tᵀ        o_t = scale · q_tᵀ S_t

The chunked forms are scans of `chunk_scan`, the recurrent ones of `fused_recurrent`: precision, blocks and limits are
said there.
"""

from typing import Any, NamedTuple, Unpack

import jax

from op_arguments.gla import options_of
from tpu_kernels.chunk_scan import ChunkOptions, chunk_bwd, chunk_fwd
from tpu_kernels.fused_recurrent import RecurrentOptions, recurrent_bwd, recurrent_fwd
from tpu_kernels.gla import Output, differentiable


class Grads(NamedTuple):
    """The gradients of the arguments of the same names, None where an argument was not given."""

    dq: Any
    dk: Any
    dv: Any
    dg: Any
    dg_gamma: Any
    dh0: Any


@options_of(chunk_fwd)
def chunk_simple_gla_fwd(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    *,
    g: jax.Array | None = None,
    g_gamma: jax.Array | None = None,
    output_final_state: bool = False,
    fused: bool | None = None,
    **options: Unpack[ChunkOptions],
) -> Output:
    """o and, with output_final_state, ht of the recurrence, `chunk_size` steps at a time.

    Arguments, result and errors as `cpu_golden.simple_gla.chunk_simple_gla_fwd`. Here q, k and v are all float32 or all
    bfloat16, and so is o; g is float32 or of their dtype; states and g_gamma are float32. Options:
    `chunk_scan.ChunkOptions`.
    fused: whether one kernel does all, or another one the states before (None: one where its blocks fit VMEM;
    `_lib.chunk_plan.chunk_route` says why). Values, those of cu_seqlens, are checked outside tracing only.
    Also raises ValueError or TypeError as `op_arguments.gla.check_precision` and `check_fused`.
    """
    gates = {"g": g, "g_gamma": g_gamma}
    return Output(*chunk_fwd(q, k, v, gates=gates, output_final_state=output_final_state, fused=fused, **options))


@options_of(chunk_bwd)
def chunk_simple_gla_bwd(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    do: jax.Array,
    *,
    g: jax.Array | None = None,
    g_gamma: jax.Array | None = None,
    dht: jax.Array | None = None,
    fused: bool | None = None,
    **options: Unpack[ChunkOptions],
) -> Grads:
    """The gradients of `chunk_simple_gla_fwd`'s arguments, in their dtypes, given do [B, T, H, V] in q's dtype.

    dht [N, H, K, V] float32: the gradient of ht (None: zero). Other arguments and errors as `chunk_simple_gla_fwd`'s,
    with `op_arguments.gla.check_backward`.
    """
    gates = {"g": g, "g_gamma": g_gamma}
    return _grads(chunk_bwd(q, k, v, do, gates=gates, dht=dht, fused=fused, **options))


@options_of(chunk_fwd)
def chunk_simple_gla(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    *,
    g: jax.Array | None = None,
    g_gamma: jax.Array | None = None,
    output_final_state: bool = False,
    fused: bool | None = None,
    **options: Unpack[ChunkOptions],
) -> Output:
    """`chunk_simple_gla_fwd`, differentiable in q, k, v, the gates and initial_state; only they are kept for it."""
    gates = {"g": g, "g_gamma": g_gamma}
    return differentiable(
        chunk_fwd, chunk_bwd, q, k, v, gates=gates, output_final_state=output_final_state, fused=fused, **options
    )


@options_of(chunk_fwd)
def fused_chunk_simple_gla_fwd(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    *,
    g: jax.Array | None = None,
    g_gamma: jax.Array | None = None,
    output_final_state: bool = False,
    **options: Unpack[ChunkOptions],
) -> Output:
    """`chunk_simple_gla_fwd` in one kernel: ValueError where that cannot be."""
    gates = {"g": g, "g_gamma": g_gamma}
    return Output(*chunk_fwd(q, k, v, gates=gates, output_final_state=output_final_state, fused=True, **options))


@options_of(chunk_bwd)
def fused_chunk_simple_gla_bwd(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    do: jax.Array,
    *,
    g: jax.Array | None = None,
    g_gamma: jax.Array | None = None,
    dht: jax.Array | None = None,
    **options: Unpack[ChunkOptions],
) -> Grads:
    """`chunk_simple_gla_bwd` in one kernel: ValueError where that cannot be."""
    gates = {"g": g, "g_gamma": g_gamma}
    return _grads(chunk_bwd(q, k, v, do, gates=gates, dht=dht, fused=True, **options))


@options_of(chunk_fwd)
def fused_chunk_simple_gla(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    *,
    g: jax.Array | None = None,
    g_gamma: jax.Array | None = None,
    output_final_state: bool = False,
    **options: Unpack[ChunkOptions],
) -> Output:
    """`chunk_simple_gla` in one kernel each way: ValueError where that cannot be."""
    gates = {"g": g, "g_gamma": g_gamma}
    return differentiable(
        chunk_fwd, chunk_bwd, q, k, v, gates=gates, output_final_state=output_final_state, fused=True, **options
    )


@options_of(recurrent_fwd)
def fused_recurrent_simple_gla_fwd(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    *,
    g: jax.Array | None = None,
    g_gamma: jax.Array | None = None,
    output_final_state: bool = False,
    **options: Unpack[RecurrentOptions],
) -> Output:
    """o and, with output_final_state, ht of the recurrence, one step at a time.

    reverse: time runs backwards, in each sequence. There are no dots, and so no precision to choose. Other arguments
    and errors as `chunk_simple_gla_fwd`'s; options: `fused_recurrent.RecurrentOptions`.
    """
    gates = {"g": g, "g_gamma": g_gamma}
    return Output(*recurrent_fwd(q, k, v, gates=gates, output_final_state=output_final_state, **options))


@options_of(recurrent_bwd)
def fused_recurrent_simple_gla_bwd(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    do: jax.Array,
    *,
    g: jax.Array | None = None,
    g_gamma: jax.Array | None = None,
    dht: jax.Array | None = None,
    **options: Unpack[RecurrentOptions],
) -> Grads:
    """The gradients of `fused_recurrent_simple_gla_fwd`'s arguments; as `chunk_simple_gla_bwd`."""
    gates = {"g": g, "g_gamma": g_gamma}
    return _grads(recurrent_bwd(q, k, v, do, gates=gates, dht=dht, **options))


@options_of(recurrent_fwd)
def fused_recurrent_simple_gla(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    *,
    g: jax.Array | None = None,
    g_gamma: jax.Array | None = None,
    output_final_state: bool = False,
    **options: Unpack[RecurrentOptions],
) -> Output:
    """`fused_recurrent_simple_gla_fwd`, differentiable as `chunk_simple_gla`."""
    gates = {"g": g, "g_gamma": g_gamma}
    return differentiable(
        recurrent_fwd, recurrent_bwd, q, k, v, gates=gates, output_final_state=output_final_state, **options
    )


def _grads(gradients: Any) -> Grads:
    dq, dk, dv, dgates, dh0 = gradients
    return Grads(dq, dk, dv, dgates["g"], dgates["g_gamma"], dh0)
