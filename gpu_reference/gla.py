"""Gated linear attention with one decay per key channel and step, in Triton; defined in `cpu_golden/gla.py`.

    S_t = diag(a_t) S_{t-1} + k_t v_tᵀ        o_t = scale · q_tᵀ S_t        a_t = exp(gk_t)

The arithmetic is in `chunk_scan` and `fused_recurrent`; the options are those of `op_arguments.gla`.
"""

from typing import Any, NamedTuple, Unpack

from torch import Tensor

from gpu_reference._lib.autograd import Gradients, Output, differentiable
from gpu_reference.chunk_scan import chunk_bwd, chunk_fwd
from gpu_reference.fused_recurrent import recurrent_bwd, recurrent_fwd
from op_arguments.gla import ChunkOptions, RecurrentOptions, options_of


class Grads(NamedTuple):
    """The gradients of the arguments of the same names, None where an argument was not given."""

    dq: Any
    dk: Any
    dv: Any
    dgk: Any
    dh0: Any


@options_of(chunk_fwd)
def chunk_gla(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    gk: Tensor,
    output_final_state: bool = False,
    fused: bool | None = None,
    **options: Unpack[ChunkOptions],
) -> Output:
    """`chunk_gla_fwd`, differentiable in its tensors."""
    gates = {"gk": gk}
    return differentiable(
        chunk_fwd, chunk_bwd, q, k, v, gates=gates, output_final_state=output_final_state, fused=fused, **options
    )


@options_of(chunk_fwd)
def chunk_gla_fwd(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    gk: Tensor,
    output_final_state: bool = False,
    fused: bool | None = None,
    **options: Unpack[ChunkOptions],
) -> Output:
    """The recurrence by blocks of steps: o [B, T, H, V] and, with output_final_state, ht [N, H, K, V].

    Arguments, result and errors as `cpu_golden.gla.chunk_gla_fwd`; here: tensors of any strides, o in q's
    dtype, ht in float32; `fused` and further errors as `chunk_scan.chunk_fwd`.
    """
    gates = {"gk": gk}
    return chunk_fwd(q, k, v, gates=gates, output_final_state=output_final_state, fused=fused, **options)


@options_of(chunk_bwd)
def chunk_gla_bwd(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    do: Tensor,
    *,
    gk: Tensor,
    dht: Tensor | None = None,
    fused: bool | None = None,
    **options: Unpack[ChunkOptions],
) -> Grads:
    """The gradients of `chunk_gla_fwd`, for a gradient do [B, T, H, V] of o and dht [N, H, K, V] of ht.

    Arguments, result and errors as `cpu_golden.gla.chunk_gla_bwd`; here: gradients in their arguments'
    dtypes; memory as `chunk_scan.chunk_bwd`.
    """
    gates = {"gk": gk}
    return _grads(chunk_bwd(q, k, v, do, gates=gates, dht=dht, fused=fused, **options))


@options_of(recurrent_fwd)
def fused_recurrent_gla(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    gk: Tensor,
    output_final_state: bool = False,
    **options: Unpack[RecurrentOptions],
) -> Output:
    """`fused_recurrent_gla_fwd`, differentiable in its tensors."""
    gates = {"gk": gk}
    return differentiable(
        recurrent_fwd, recurrent_bwd, q, k, v, gates=gates, output_final_state=output_final_state, **options
    )


@options_of(recurrent_fwd)
def fused_recurrent_gla_fwd(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    gk: Tensor,
    output_final_state: bool = False,
    **options: Unpack[RecurrentOptions],
) -> Output:
    """The recurrence step by step: o [B, T, H, V] and, with output_final_state, ht [N, H, K, V].

    Arguments, result and errors as `cpu_golden.gla.fused_recurrent_gla_fwd`; here: dtypes as
    `chunk_gla_fwd`, further errors as `fused_recurrent.recurrent_fwd`.
    """
    gates = {"gk": gk}
    return recurrent_fwd(q, k, v, gates=gates, output_final_state=output_final_state, **options)


@options_of(recurrent_bwd)
def fused_recurrent_gla_bwd(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    do: Tensor,
    *,
    gk: Tensor,
    dht: Tensor | None = None,
    **options: Unpack[RecurrentOptions],
) -> Grads:
    """The gradients of `fused_recurrent_gla_fwd`, for a gradient do of o and dht of ht.

    Arguments, result and errors as `cpu_golden.gla.fused_recurrent_gla_bwd`; here: gradients in their
    arguments' dtypes; memory as `fused_recurrent.recurrent_bwd`.
    """
    gates = {"gk": gk}
    return _grads(recurrent_bwd(q, k, v, do, gates=gates, dht=dht, **options))


def _grads(x: Gradients) -> Grads:
    return Grads(x.dq, x.dk, x.dv, x.dgates["gk"], x.dh0)
