"""What both forms of gated linear attention return, also of no step, head or channel."""

from typing import Any, TypedDict

import jax
import jax.numpy as jnp

from op_arguments import gla
from op_arguments.gla import Gradients
from tpu_kernels._lib.arguments import Interpret


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


def forward_of_nothing(
    q: jax.Array, v: jax.Array, initial_state: jax.Array | None, cu_seqlens: jax.Array | None
) -> tuple[jax.Array, jax.Array]:
    """o and ht: zeros, and the states as they are."""
    return jnp.zeros_like(v), _given_or_zero(initial_state, q, v, cu_seqlens)


def backward_of_nothing(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    gates: dict[str, Any],
    initial_state: jax.Array | None,
    dht: jax.Array | None,
    cu_seqlens: jax.Array | None,
) -> Gradients:
    """Zeros, and the gradients of the states as they are."""
    dgates = {name: None if gate is None else jnp.zeros_like(gate) for name, gate in gates.items()}
    dh0 = None if initial_state is None else _given_or_zero(dht, q, v, cu_seqlens)
    return Gradients(jnp.zeros_like(q), jnp.zeros_like(k), jnp.zeros_like(v), dgates, dh0)


def _given_or_zero(states: jax.Array | None, q: jax.Array, v: jax.Array, cu_seqlens: jax.Array | None) -> jax.Array:
    """States [N, H, K, V]."""
    if states is not None:
        return states
    sequences = q.shape[0] if cu_seqlens is None else cu_seqlens.shape[0] - 1
    return jnp.zeros((sequences, *q.shape[2:], v.shape[3]), jnp.float32)
