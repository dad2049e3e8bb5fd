"""Causal flash attention of q, k, v [H, T, D], 64 rows of a head a step, in Pallas for a TPU."""

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from result import Attention

BLOCK = 64


def attention(q, k, v, out):
    """As `golden.attention`: out of the dtype of that name, lse in float32; P in v's dtype, all else in float32."""
    heads, length, width = q.shape
    q, k, v = (jnp.pad(x, ((0, 0), (0, -length % BLOCK), (0, 0))) for x in (q, k, v))
    padded = q.shape[1]
    block, column = (pl.BlockSpec((None, BLOCK, size), lambda h, i: (h, i, 0)) for size in (width, 1))
    head = pl.BlockSpec((None, padded, width), lambda h, i: (h, 0, 0))
    call = pl.pallas_call(
        _kernel,
        grid=(heads, padded // BLOCK),
        in_specs=[block, head, head],
        out_specs=[block, column],
        out_shape=[
            jax.ShapeDtypeStruct(q.shape, out),
            jax.ShapeDtypeStruct((heads, padded, 1), jnp.float32),
        ],
        interpret=jax.default_backend() != "tpu",
    )
    out, lse = call(q, k, v)
    return Attention(out[:, :length], lse[:, :length, 0])


def _kernel(q_ref, k_ref, v_ref, out_ref, lse_ref):
    i = pl.program_id(1)
    rows, keys = (lax.broadcasted_iota(jnp.int32, (BLOCK, BLOCK), axis) for axis in (0, 1))

    def add(j, carry):
        before, mass, acc = carry
        block = pl.ds(j * BLOCK, BLOCK)
        scores = _dot(q_ref[...], k_ref[block, :], contract=1) * q_ref.shape[1] ** -0.5
        scores = jnp.where(j * BLOCK + keys <= i * BLOCK + rows, scores, -jnp.inf)
        top = jnp.maximum(before, jnp.max(scores, axis=1, keepdims=True))
        shrink = jnp.exp(before - top)
        e = jnp.exp(scores - top)
        mass = shrink * mass + jnp.sum(e, axis=1, keepdims=True)
        acc = shrink * acc + _dot(e.astype(v_ref.dtype), v_ref[block, :], contract=0)
        return top, mass, acc

    column = jnp.zeros((BLOCK, 1), jnp.float32)
    top, mass, acc = lax.fori_loop(0, i + 1, add, (column - jnp.inf, column, jnp.zeros(q_ref.shape, jnp.float32)))
    out_ref[...] = (acc / mass).astype(out_ref.dtype)
    lse_ref[...] = top + jnp.log(mass)


def _dot(a, b, contract):
    """The sum over a's columns and b's axis `contract`, in float32."""
    return lax.dot_general(a, b, (((1,), (contract,)), ((), ())), preferred_element_type=jnp.float32)
