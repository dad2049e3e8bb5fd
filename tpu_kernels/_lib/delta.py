"""What both forms of the gated delta rule take, and return of no step, head or channel."""

from collections.abc import Callable
from functools import reduce
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from op_arguments import delta_rule
from op_arguments.delta_rule import (
    NORM_EPS,
    DeltaGrads,
    DeltaProblem,
    DeltaTensors,
    check_delta_forward,
    check_delta_gradients,
)
from op_arguments.gla import CHUNK_STEP, Output
from op_arguments.options import variant
from tpu_kernels._lib.arguments import Interpret, concrete_values, held, resolve_interpret
from tpu_kernels._lib.autograd import P, differentiated
from tpu_kernels._lib.scans import Interpreted, given_or_zero


class ChunkFwd(delta_rule.ChunkDeltaFwd, Interpreted, total=False):
    """The options of `chunk_…_fwd`."""


class ChunkBwd(delta_rule.ChunkDeltaBwd, Interpreted, total=False):
    """The options of `chunk_…_bwd`."""


class StepFwd(delta_rule.DeltaFwd, Interpreted, total=False):
    """The options of `fused_recurrent_…_fwd`."""


class StepBwd(delta_rule.DeltaBwd, Interpreted, total=False):
    """The options of `fused_recurrent_…_bwd`."""


class DeltaArrays(NamedTuple):
    """The arrays of a call; do and dht, the gradients of o and ht, of a backward pass."""

    q: jax.Array
    k: jax.Array
    v: jax.Array
    g: jax.Array
    beta: jax.Array
    initial_state: jax.Array | None
    cu_seqlens: jax.Array | None
    do: Any = None
    dht: jax.Array | None = None


def take(
    plan: Callable[..., Any],
    x: DeltaTensors,
    per_channel: bool,
    *gradients: Any,
    scale: float | None = None,
    initial_state: jax.Array | None = None,
    cu_seqlens: jax.Array | None = None,
    use_qk_l2norm_in_kernel: bool = False,
    interpret: Interpret = None,
    **options: Any,
) -> tuple[DeltaArrays, dict[str, Any]]:
    """The checked arrays of a call, and how it runs: its `plan(problem, per_channel, backward=, **options)`.

    per_channel: whether g is that of `kda`. gradients: do and dht, of a backward pass.
    Raises ValueError or TypeError as `op_arguments.delta_rule.check_delta_forward` and `check_delta_gradients`; values
    are checked outside tracing only.
    """
    p = check_delta_forward(
        x, per_channel, scale, initial_state, cu_seqlens, concrete_values(cu_seqlens), use_qk_l2norm_in_kernel,
        chunk_size=options.get("chunk_size", CHUNK_STEP),
    )  # fmt: skip
    if gradients:
        check_delta_gradients(p, *gradients)
    planned = plan(p, per_channel, backward=bool(gradients), **options)
    arrays = DeltaArrays(*x, initial_state, cu_seqlens, *gradients)
    return arrays, {"plan": planned, "interpret": resolve_interpret(interpret, x.q)}


def backward_of_nothing(x: DeltaArrays) -> DeltaGrads:
    """Zeros, and the gradients of the states as they are."""
    dq, dk, dv, dg, dbeta = map(jnp.zeros_like, x[:5])
    return DeltaGrads(dq, dk, dv, dg, dbeta, None if x.initial_state is None else given_or_zero(x.dht, x))


def normalised(x: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Rows of x [..., K] in float32 as long as 1, and the reciprocals of their lengths [..., 1]."""
    x = x.astype(jnp.float32)
    rstd = lax.rsqrt(_summed(x * x) + NORM_EPS)
    return x * rstd, rstd


def _summed(x: jax.Array) -> jax.Array:
    """Σ over the last axis, [..., 1], by halves: one after the other, it would err by more, and by its length."""
    while x.shape[-1] > 1 and x.shape[-1] % 2 == 0:
        half = x.shape[-1] // 2
        x = x[..., :half] + x[..., half:]
    return jnp.sum(x, axis=-1, keepdims=True)


def key_gradient(grad: jax.Array, x: jax.Array, p: DeltaProblem) -> jax.Array:
    """The gradient of q or k [B, T, H, K] in its dtype, from that of each value head [B, T, HV, K], of normalised rows
    where they are."""
    if p.group > 1:
        members = grad.reshape(p.b, p.t, p.h, p.group, p.k)
        grad = reduce(jnp.add, [members[:, :, :, n] for n in range(p.group)])
    if p.l2norm:
        normed, rstd = normalised(x)
        grad = rstd * (grad - normed * _summed(grad * normed))
    return grad.astype(x.dtype)


def differentiable(
    forward: Callable[P, Output], backward: Callable[..., Any], per_channel: bool
) -> Callable[P, Output]:
    """The function `…` of a `…_fwd`, differentiable in its arrays, which are all that is kept for it."""

    def both(q: jax.Array, k: jax.Array, v: jax.Array, *, g: jax.Array, beta: jax.Array, **options: Any) -> Output:
        initial_state, cu_seqlens = options.pop("initial_state", None), options.pop("cu_seqlens", None)
        # Here and not only in the passes: inside a custom_vjp all values are traced.
        x, offsets = DeltaTensors(q, k, v, g, beta), concrete_values(cu_seqlens)
        normed = options.get("use_qk_l2norm_in_kernel", False)
        check_delta_forward(x, per_channel, options.get("scale"), initial_state, cu_seqlens, offsets, normed)
        arrays = x._asdict() | {"initial_state": initial_state, "cu_seqlens": held(cu_seqlens)}
        return differentiated(forward, backward, arrays, options)

    name = forward.__name__
    return variant(both, forward, name.removesuffix("_fwd"), f"`{name}`, differentiable in its arrays.")
