"""RMSNorm of x [M, N] and its gradients, eight rows a step, in Pallas for a TPU."""

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from result import Gradients

ROWS = 8
EPS = 1e-6


def rmsnorm(x, weight):
    """As `golden.rmsnorm`, in x's dtype; computed in float32."""
    block, vector = _specs(x.shape[1])
    return _call(_forward, x, [block, vector], block, jax.ShapeDtypeStruct(x.shape, x.dtype))(x, weight[None])


def rmsnorm_bwd(x, weight, dy):
    """As `golden.rmsnorm_bwd`, dx in x's dtype and dweight in float32; computed in float32."""
    block, vector = _specs(x.shape[1])
    shapes = [jax.ShapeDtypeStruct(x.shape, x.dtype), jax.ShapeDtypeStruct((1, x.shape[1]), jnp.float32)]
    dx, dweight = _call(_backward, x, [block, vector, block], [block, vector], shapes)(x, weight[None], dy)
    return Gradients(dx, dweight[0])


def _specs(width):
    """Blocks of rows, one a step, and of a vector that stays."""
    return pl.BlockSpec((ROWS, width), lambda i: (i, 0)), pl.BlockSpec((1, width), lambda i: (0, 0))


def _call(kernel, x, in_specs, out_specs, out_shape):
    return pl.pallas_call(
        lambda *refs: kernel(x.shape[0], *refs),
        grid=(pl.cdiv(x.shape[0], ROWS),),
        in_specs=in_specs,
        out_specs=out_specs,
        out_shape=out_shape,
        interpret=jax.default_backend() != "tpu",
    )


def _forward(rows, x_ref, weight_ref, y_ref):
    normed, _ = _normed(x_ref[...].astype(jnp.float32))
    y_ref[...] = (normed * weight_ref[...].astype(jnp.float32)).astype(y_ref.dtype)


def _backward(rows, x_ref, weight_ref, dy_ref, dx_ref, dweight_ref):
    row = pl.program_id(0) * ROWS + lax.broadcasted_iota(jnp.int32, x_ref.shape, 0)
    # Rows behind the last are whatever memory holds, and the sum over rows would see them.
    x, dy = (jnp.where(row < rows, ref[...].astype(jnp.float32), 0) for ref in (x_ref, dy_ref))
    normed, rstd = _normed(x)
    g = dy * weight_ref[...].astype(jnp.float32)
    dx = rstd * (g - normed * jnp.mean(g * normed, axis=1, keepdims=True))
    dx_ref[...] = dx.astype(dx_ref.dtype)

    @pl.when(pl.program_id(0) == 0)
    def _():
        dweight_ref[...] = jnp.zeros_like(dweight_ref)

    dweight_ref[...] += jnp.sum(dy * normed, axis=0, keepdims=True)


def _normed(x):
    rstd = lax.rsqrt(jnp.mean(x * x, axis=1, keepdims=True) + EPS)
    return x * rstd, rstd
