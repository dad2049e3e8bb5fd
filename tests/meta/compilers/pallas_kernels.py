"""Small Pallas kernels for the tests of the compiler's report; the subprocess imports them by name."""

import os
import sys
import time
from functools import partial

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

TILE = (256, 512, 512)


def matmul(a, b, *, body, tile=TILE, out_dtype=jnp.float32):
    (m, k), n = a.shape, b.shape[1]
    tm, tk, tn = tile
    return pl.pallas_call(
        body,
        grid=(m // tm, n // tn, k // tk),
        in_specs=[pl.BlockSpec((tm, tk), lambda i, j, s: (i, s)), pl.BlockSpec((tk, tn), lambda i, j, s: (s, j))],
        out_specs=pl.BlockSpec((tm, tn), lambda i, j, s: (i, j)),
        out_shape=jax.ShapeDtypeStruct((m, n), out_dtype),
        name="matmul",
    )(a, b)


def clear_first(out):
    @pl.when(pl.program_id(2) == 0)
    def _():
        out[...] = jnp.zeros_like(out)


def dot(a, b, *, precision=None, tile=TILE):
    def body(x, y, out):
        clear_first(out)
        out[...] += jnp.dot(x[...], y[...], precision=precision, preferred_element_type=jnp.float32)

    return matmul(a, b, body=body, tile=tile)


def beside_xla(a, b):
    """`dot` of what XLA computes first."""
    return dot(jnp.sin(a), b)


def looped(a, b):
    def body(x, y, out):
        clear_first(out)

        def rows(block, _):
            rows = pl.ds(pl.multiple_of(block * 64, 64), 64)
            out[rows, :] += jnp.dot(x[rows, :], y[...], preferred_element_type=jnp.float32)

        lax.fori_loop(0, TILE[0] // 64, rows, None)

    return matmul(a, b, body=body)


def mostly_one(a, b):
    """A product like that of `two_lines`, but its second dot in two of the eight steps."""

    def body(x, y, out):
        clear_first(out)
        out[...] += jnp.dot(x[:, :128], y[:128], preferred_element_type=jnp.float32)

        @pl.when((pl.program_id(0) >= 2) & (pl.program_id(2) > 0))
        def _():
            out[...] += jnp.dot(x[:, 128:], y[128:], preferred_element_type=jnp.float32)

    return matmul(a, b, body=body)


def in_turns(a, b):
    """The whole product in half of the steps, half of it in the others, and parts once more for data that are rare."""

    def body(x, y, out):
        clear_first(out)

        def is_positive():
            return jnp.sum(x[:16, :128].astype(jnp.float32)) > 0

        @pl.when(pl.program_id(2) == 0)
        def _():
            out[...] += jnp.dot(x[...], y[...], preferred_element_type=jnp.float32)

        @pl.when(pl.program_id(2) == 1)
        def _():
            out[:128] += jnp.dot(x[:128], y[...], preferred_element_type=jnp.float32)

            with jax.named_scope("rarely"):

                @pl.when(is_positive())
                def _():
                    out[:32] -= jnp.dot(x[:32], y[...], preferred_element_type=jnp.float32)

        with jax.named_scope("rarely"):

            @pl.when(is_positive())
            def _():
                out[:64] -= jnp.dot(x[:64], y[...], preferred_element_type=jnp.float32)

    return matmul(a, b, body=body)


def two_dots(a, b):
    """A product split in two that one pass could do."""

    def body(x, y, out):
        clear_first(out)
        half = (x[...].astype(jnp.float32) * 0.5).astype(x.dtype)
        out[...] += jnp.dot(half, y[...], preferred_element_type=jnp.float32)
        out[...] += jnp.dot(x[...] - half, y[...], preferred_element_type=jnp.float32)

    return matmul(a, b, body=body)


def two_lines(a, b):
    """Two products of other shapes."""

    def body(x, y, out):
        clear_first(out)
        out[...] += jnp.dot(x[:, :256], y[:256], preferred_element_type=jnp.float32)
        out[:128] += jnp.dot(x[:128, 256:], y[256:], preferred_element_type=jnp.float32)

    return matmul(a, b, body=body)


def pair(a, b):
    """Two kernels of one name."""
    return dot(a, b), dot(a[:512], b)


def nameless(a, b):
    return pl.pallas_call(
        lambda x, y, out: out.__setitem__(..., jnp.dot(x[...], y[...], preferred_element_type=jnp.float32)),
        out_shape=jax.ShapeDtypeStruct((a.shape[0], b.shape[1]), jnp.float32),
    )(a, b)


def scale(a, b):
    """No dot at all."""

    def body(x, out):
        out[...] = x[...] * 2

    block = pl.BlockSpec((256, 512), lambda i, j: (i, j))
    return pl.pallas_call(body, grid=(4, 2), in_specs=[block], out_specs=block, out_shape=a, name="scale")(a)


def own_pipeline(a, b):
    """The copies and the loop are the kernel's own, on a mesh of one core."""

    def body(a, b, out):
        def tile(x, y, out):
            out[...] = jnp.dot(x[...], y[...], preferred_element_type=jnp.float32)

        pltpu.emit_pipeline(
            tile,
            grid=(4,),
            in_specs=[pl.BlockSpec((256, 1024), lambda i: (i, 0)), pl.BlockSpec((1024, 512), lambda i: (0, 0))],
            out_specs=pl.BlockSpec((256, 512), lambda i: (i, 0)),
        )(a, b, out)

    mesh = pltpu.create_tensorcore_mesh("core", num_cores=1)
    out = jax.ShapeDtypeStruct((1024, 512), jnp.float32)
    return pl.kernel(body, out_type=out, mesh=mesh, name="own")(a, b)


def half_refused(a, b):
    """The first kernel compiles, and leaves its dump; the second one is refused."""
    return two_dots(a, b), exact(a, b)


def beyond_vmem(a, b):
    """Blocks larger than VMEM, of which little is used: what does much takes minutes to compile."""

    def body(x, out):
        out[:8, :] = x[:8, :] * 2

    block = pl.BlockSpec((8192, 1024), lambda i: (0, i))
    return pl.pallas_call(body, grid=(8,), in_specs=[block], out_specs=block, out_shape=a, name="large")(a)


def split(a, b):
    """Each core multiplies its own rows."""
    rows, whole = jax.sharding.PartitionSpec("core"), jax.sharding.PartitionSpec()
    return jax.shard_map(dot, in_specs=(rows, whole), out_specs=rows, check_vma=False)(a, b)


exact = partial(dot, precision=lax.Precision.HIGHEST)


def crashes(a, b):
    print("last words", file=sys.stderr, flush=True)
    os.abort()


def hangs(a, b):
    time.sleep(600)
