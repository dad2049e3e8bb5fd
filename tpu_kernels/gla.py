"""Gated linear attention with one decay per step and channel of k, on the TPU. Defined in `cpu_golden/gla.py`.

    S_t = diag(exp(gk_t)) S_{t-1} + k_t v_tᵀ        o_t = scale · q_tᵀ S_t

The chunked forms are scans of `chunk_scan`, the recurrent ones of `fused_recurrent`: precision, blocks and limits are
said there.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple, Unpack

import jax

from op_arguments.gla import CHUNK_STEP, Gates, check_forward, options_of
from tpu_kernels._lib.arguments import concrete_values
from tpu_kernels.chunk_scan import ChunkOptions, chunk_bwd, chunk_fwd
from tpu_kernels.fused_recurrent import RecurrentOptions, recurrent_bwd, recurrent_fwd


class Output(NamedTuple):
    """o [B, T, H, V] in q's dtype and the final states ht [N, H, K, V] float32, or None."""

    o: Any
    ht: Any


class Grads(NamedTuple):
    """The gradients of the arguments of the same names, None where an argument was not given."""

    dq: Any
    dk: Any
    dv: Any
    dgk: Any
    dh0: Any


@options_of(chunk_fwd)
def chunk_gla_fwd(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    *,
    gk: jax.Array,
    output_final_state: bool = False,
    fused: bool | None = None,
    **options: Unpack[ChunkOptions],
) -> Output:
    """o and, with output_final_state, ht of the recurrence, `chunk_size` steps at a time.

    Arguments, result and errors as `cpu_golden.gla.chunk_gla_fwd`. Here q, k and v are all float32 or all bfloat16, and
    so is o; gk is float32 or of their dtype; states are float32. Options: `chunk_scan.ChunkOptions`.
    fused: whether one kernel does all, or another one the states before (None: one where its blocks fit VMEM;
    `_lib.chunk_plan.chunk_route` says why). Values, those of cu_seqlens, are checked outside tracing only.
    Also raises ValueError or TypeError as `op_arguments.gla.check_precision` and `check_fused`.
    """
    gates = {"gk": gk}
    return Output(*chunk_fwd(q, k, v, gates=gates, output_final_state=output_final_state, fused=fused, **options))


@options_of(chunk_bwd)
def chunk_gla_bwd(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    do: jax.Array,
    *,
    gk: jax.Array,
    dht: jax.Array | None = None,
    fused: bool | None = None,
    **options: Unpack[ChunkOptions],
) -> Grads:
    """The gradients of `chunk_gla_fwd`'s arguments, in their dtypes, given do [B, T, H, V] in q's dtype.

    dht [N, H, K, V] float32: the gradient of ht (None: zero). Other arguments and errors as `chunk_gla_fwd`'s, with
    `op_arguments.gla.check_backward`.
    """
    gates = {"gk": gk}
    return _grads(chunk_bwd(q, k, v, do, gates=gates, dht=dht, fused=fused, **options))


@options_of(chunk_fwd)
def chunk_gla(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    *,
    gk: jax.Array,
    output_final_state: bool = False,
    fused: bool | None = None,
    **options: Unpack[ChunkOptions],
) -> Output:
    """`chunk_gla_fwd`, differentiable in q, k, v, the gates and initial_state; only they are kept for it."""
    gates = {"gk": gk}
    return differentiable(
        chunk_fwd, chunk_bwd, q, k, v, gates=gates, output_final_state=output_final_state, fused=fused, **options
    )


@options_of(recurrent_fwd)
def fused_recurrent_gla_fwd(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    *,
    gk: jax.Array,
    output_final_state: bool = False,
    **options: Unpack[RecurrentOptions],
) -> Output:
    """o and, with output_final_state, ht of the recurrence, one step at a time.

    reverse: time runs backwards, in each sequence. There are no dots, and so no precision to choose. Other arguments
    and errors as `chunk_gla_fwd`'s; options: `fused_recurrent.RecurrentOptions`.
    """
    gates = {"gk": gk}
    return Output(*recurrent_fwd(q, k, v, gates=gates, output_final_state=output_final_state, **options))


@options_of(recurrent_bwd)
def fused_recurrent_gla_bwd(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    do: jax.Array,
    *,
    gk: jax.Array,
    dht: jax.Array | None = None,
    **options: Unpack[RecurrentOptions],
) -> Grads:
    """The gradients of `fused_recurrent_gla_fwd`'s arguments; as `chunk_gla_bwd`."""
    gates = {"gk": gk}
    return _grads(recurrent_bwd(q, k, v, do, gates=gates, dht=dht, **options))


@options_of(recurrent_fwd)
def fused_recurrent_gla(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    *,
    gk: jax.Array,
    output_final_state: bool = False,
    **options: Unpack[RecurrentOptions],
) -> Output:
    """`fused_recurrent_gla_fwd`, differentiable as `chunk_gla`."""
    gates = {"gk": gk}
    return differentiable(
        recurrent_fwd, recurrent_bwd, q, k, v, gates=gates, output_final_state=output_final_state, **options
    )


def _grads(gradients: Any) -> Grads:
    dq, dk, dv, dgates, dh0 = gradients
    return Grads(dq, dk, dv, dgates["gk"], dh0)


# --------------------------------------------------------------------------------------------------- derivatives


def differentiable(
    forward: Callable[..., Any],
    backward: Callable[..., Any],
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    *,
    gates: Gates,
    initial_state: jax.Array | None = None,
    output_final_state: bool = False,
    cu_seqlens: jax.Array | None = None,
    **options: Any,
) -> Output:
    """`forward(q, k, v, …)` with the derivative `backward(q, k, v, do, …)`."""
    # Here and not only in the passes: inside a custom_vjp all values are traced.
    scale, chunk_size = options.get("scale"), options.get("chunk_size", CHUNK_STEP)
    check_forward(q, k, v, gates, scale, initial_state, cu_seqlens, concrete_values(cu_seqlens), chunk_size)
    passes = _Passes(forward, backward, bool(output_final_state), tuple(options.items()))
    return Output(*_scan(passes, q, k, v, dict(gates), initial_state, cu_seqlens))


class _Passes(NamedTuple):
    forward: Callable[..., Any]
    backward: Callable[..., Any]
    output_final_state: bool
    options: tuple[tuple[str, Any], ...]


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _scan(passes: _Passes, q: Any, k: Any, v: Any, gates: Any, initial_state: Any, cu_seqlens: Any) -> Any:
    return passes.forward(
        q,
        k,
        v,
        gates=gates,
        initial_state=initial_state,
        output_final_state=passes.output_final_state,
        cu_seqlens=cu_seqlens,
        **dict(passes.options),
    )


def _scan_fwd(passes: _Passes, *arguments: Any) -> tuple[Any, Any]:
    return _scan(passes, *arguments), arguments


def _scan_bwd(passes: _Passes, arguments: Any, cotangents: Any) -> tuple[Any, ...]:
    (q, k, v, gates, initial_state, cu_seqlens), (do, dht) = arguments, cotangents
    gradients = passes.backward(
        q,
        k,
        v,
        do,
        gates=gates,
        initial_state=initial_state,
        dht=dht,
        cu_seqlens=cu_seqlens,
        **dict(passes.options),
    )
    return *gradients, None


_scan.defvjp(_scan_fwd, _scan_bwd)
