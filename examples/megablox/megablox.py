"""jax's own grouped matmul kernels under the argument names of our operations; nothing is added and nothing mended."""

import jax
import jax.numpy as jnp
from jax.experimental.pallas.ops.tpu.megablox.gmm import tgmm as _tgmm
from jax.experimental.pallas.ops.tpu.megablox.ops import gmm as _gmm

INTERPRET = jax.default_backend() != "tpu"
TILING = (128, 128, 128)  # their default


def gmm(lhs, rhs, group_sizes, existing_out=None, *, group_offset, transpose_rhs, preferred_element_type, tiling):
    offset = jnp.int32(group_offset)
    out_type = jnp.dtype(preferred_element_type)
    return _gmm(lhs, rhs, group_sizes, out_type, tiling or TILING, offset, existing_out, transpose_rhs, INTERPRET)


def tgmm(lhs, rhs, group_sizes, existing_out=None, *, group_offset, num_actual_groups, preferred_element_type, tiling):
    return _tgmm(
        lhs.T, rhs, group_sizes, jnp.dtype(preferred_element_type), tiling or TILING, jnp.int32(group_offset),
        num_actual_groups, existing_out, interpret=INTERPRET,
    )  # fmt: skip


def gmm_bwd(lhs, rhs, group_sizes, dout, existing_out=None, *, group_offset, transpose_rhs, preferred_element_type,
            tiling, **unquantised):  # fmt: skip
    from tpu_kernels.grouped_dense import Grads

    def layer(lhs, rhs, existing_out):
        return gmm(lhs, rhs, group_sizes, existing_out, group_offset=group_offset, transpose_rhs=transpose_rhs,
                   preferred_element_type=preferred_element_type, tiling=tiling)  # fmt: skip

    return Grads(*jax.vjp(layer, lhs, rhs, existing_out)[1](dout))
