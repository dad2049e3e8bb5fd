"""What both forms of gated linear attention take, and return of no step, head or channel."""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, TypedDict

import jax
import jax.numpy as jnp

from op_arguments import gla
from op_arguments.gla import Gradients, Output, check_forward, check_gradients
from tpu_kernels._lib.arguments import Interpret, concrete_values, resolve_interpret


class Interpreted(TypedDict, total=False):
    """interpret: as `tpu_kernels.gmm.gmm`."""

    interpret: Interpret


class ChunkFwd(gla.ChunkFwd, Interpreted, total=False):
    """The options of `chunk_…_fwd`."""


class ChunkBwd(gla.ChunkBwd, Interpreted, total=False):
    """The options of `chunk_…_bwd`."""


class StepFwd(gla.StepFwd, Interpreted, total=False):
    """The options of `fused_recurrent_…_fwd`, one step at a time."""


class StepBwd(gla.StepBwd, Interpreted, total=False):
    """The options of `fused_recurrent_…_bwd`, one step at a time."""


class Arrays(NamedTuple):
    """The arrays of a call; do and dht, the gradients of o and ht, of a backward pass."""

    q: jax.Array
    k: jax.Array
    v: jax.Array
    gates: dict[str, jax.Array | None]
    initial_state: jax.Array | None
    cu_seqlens: jax.Array | None
    do: Any = None
    dht: jax.Array | None = None


def take(
    plan: Callable[..., Any],
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    gates: Mapping[str, Any],
    *gradients: Any,
    scale: float | None = None,
    initial_state: jax.Array | None = None,
    cu_seqlens: jax.Array | None = None,
    interpret: Interpret = None,
    **options: Any,
) -> tuple[Arrays, dict[str, Any]]:
    """The checked arrays of a call, and how it runs: its `plan(problem, gates, backward=, interpret=, **options)`.

    gates: natural logs of the decays, `g` [B, T, H] and `g_gamma` [H], which add (None: no decay), or `gk`
    [B, T, H, K]. gradients: do and dht, of a backward pass.
    Raises ValueError or TypeError as `op_arguments.gla.check_forward` and `check_gradients`; values are checked outside
    tracing only.
    """
    p = check_forward(q, k, v, gates, scale, initial_state, cu_seqlens, concrete_values(cu_seqlens))
    if gradients:
        check_gradients(p, *gradients)
    interpret = resolve_interpret(interpret, q)
    planned = plan(p, gates, backward=bool(gradients), interpret=interpret, **options)
    arrays = Arrays(q, k, v, dict(gates), initial_state, cu_seqlens, *gradients)
    return arrays, {"plan": planned, "interpret": interpret}


def forward_of_nothing(x: Any, output_final_state: bool) -> Output:
    """Zeros, and the states as they are; x: `Arrays`, or `delta.DeltaArrays`."""
    return Output(jnp.zeros_like(x.v), given_or_zero(x.initial_state, x) if output_final_state else None)


def backward_of_nothing(x: Arrays) -> Gradients:
    """Zeros, and the gradients of the states as they are."""
    dq, dk, dv, dgates = jax.tree.map(jnp.zeros_like, (x.q, x.k, x.v, x.gates))
    return Gradients(dq, dk, dv, dgates, None if x.initial_state is None else given_or_zero(x.dht, x))


def given_or_zero(states: jax.Array | None, x: Any) -> jax.Array:
    """States [N, H, K, V] with v's heads; x as of `forward_of_nothing`."""
    if states is not None:
        return states
    sequences = x.q.shape[0] if x.cu_seqlens is None else x.cu_seqlens.shape[0] - 1
    return jnp.zeros((sequences, x.v.shape[2], x.q.shape[3], x.v.shape[3]), jnp.float32)
