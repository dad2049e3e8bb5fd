"""Dense layers of groups on the TPU, differentiable; they are defined in `cpu_golden/grouped_dense.py`."""

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from op_arguments import Tiling
from op_arguments.gmm import Problem, check_gmm
from op_arguments.grouped_dense import Grads, check_dout, check_quantize_options
from op_arguments.probe import probing, renamed
from op_arguments.quantize import Quantized
from tpu_kernels._lib.arguments import Interpret, as_vector, concrete_values, static_scalar
from tpu_kernels._lib.chip import matmul_path, tpu_generation
from tpu_kernels._lib.pairs import Shard, dual_quantized, padded, product, quantized, weight_product, with_rows

Quantize = bool | str

E4M3 = "float8_e4m3fn"


def grouped_dense(
    lhs: jax.Array,
    rhs: jax.Array,
    group_sizes: jax.Array,
    existing_out: jax.Array | None = None,
    *,
    group_offset: int | jax.Array = 0,
    transpose_rhs: bool = False,
    quantize: Quantize = "auto",
    bwd_quantize: Quantize = "auto",
    block_size: int | None = 128,
    preferred_element_type: Any = None,
    tiling: Tiling | None = None,
    interpret: Interpret = None,
) -> jax.Array:
    """`gmm` [M, N], differentiable in lhs, rhs and existing_out, its operands quantised to e4m3 on request.

    Arguments, result and errors as `cpu_golden.grouped_dense.grouped_dense`, existing_out, interpret and precision as
    `tpu_kernels.gmm.gmm`. "auto" quantises on chips whose matrix unit multiplies fp8 natively (tpu7x).
    Where anything is quantised, what a backward pass keeps of lhs (by columns) and rhs is fp8 pairs alone. Gradients
    have the dtypes of what they are gradients of.
    tiling: (tm, tk, tn) of the forward pass, whose backward matmuls take (tm, tn, tk) and (tm, tk, tn), or a look-up
    (m, k, n) -> (tm, tk, tn) that is asked for each of them.
    Sites shown to a probe: those of the forward matmul, and the sums of the other two at dlhs and drhs.
    """
    asked = _Options(quantize, bwd_quantize, block_size, transpose_rhs, preferred_element_type, tiling, interpret)
    options, shard, _ = _checked(asked, lhs, rhs, group_sizes, existing_out, group_offset)
    return _grouped_dense(options, lhs, rhs, existing_out, shard)


def grouped_dense_bwd(
    lhs: jax.Array,
    rhs: jax.Array,
    group_sizes: jax.Array,
    dout: jax.Array,
    existing_out: jax.Array | None = None,
    *,
    group_offset: int | jax.Array = 0,
    transpose_rhs: bool = False,
    quantize: Quantize = "auto",
    bwd_quantize: Quantize = "auto",
    block_size: int | None = 128,
    preferred_element_type: Any = None,
    tiling: Tiling | None = None,
    interpret: Interpret = None,
) -> Grads:
    """The gradients of `grouped_dense` in lhs, rhs and existing_out, as `jax.vjp` gives them.

    dout [M, N]: the gradient of its result, in the dtype of that. All else as `grouped_dense`, but that a probe
    sees nothing of the forward pass.
    """
    asked = _Options(quantize, bwd_quantize, block_size, transpose_rhs, preferred_element_type, tiling, interpret)
    options, shard, p = _checked(asked, lhs, rhs, group_sizes, existing_out, group_offset)
    check_dout(dout, p)
    with probing(None):
        _, backward = jax.vjp(lambda *primals: _grouped_dense(options, *primals, shard), lhs, rhs, existing_out)
    return Grads(*backward(dout))


class _Options(NamedTuple):
    """What is static in a `grouped_dense`: as it was asked for, and once it is checked with all of it resolved."""

    quantize: Quantize
    bwd_quantize: Quantize
    block_size: int | None
    transpose_rhs: bool
    out_dtype: Any
    tiling: Tiling | None
    interpret: Interpret
    dtype: Any = None  # of lhs and rhs, and so of their gradients
    fills: bool = False  # whether existing_out is given


def _checked(
    asked: _Options,
    lhs: jax.Array,
    rhs: jax.Array,
    group_sizes: jax.Array,
    existing_out: jax.Array | None,
    group_offset: int | jax.Array,
) -> tuple[_Options, Shard, Problem]:
    check_quantize_options(asked.quantize, asked.bwd_quantize, asked.block_size)
    group_offset, sizes = static_scalar(group_offset), concrete_values(group_sizes)
    # Here and not only in the matmuls: inside a custom_vjp all values are traced.
    p = check_gmm(lhs, rhs, group_sizes, group_offset, existing_out, asked.transpose_rhs, asked.out_dtype, sizes)
    options = asked._replace(
        quantize=_is_quantized(asked.quantize),
        bwd_quantize=_is_quantized(asked.bwd_quantize),
        transpose_rhs=bool(asked.transpose_rhs),
        out_dtype=p.out_dtype,
        dtype=lhs.dtype,
        fills=existing_out is not None,
    )
    return options, Shard(group_sizes, as_vector(group_offset, p.experts - p.groups)), p


def _is_quantized(quantize: Quantize) -> bool:
    if quantize != "auto":
        return bool(quantize)
    generation = tpu_generation()
    return generation is not None and matmul_path(E4M3, E4M3, generation)[0] == "fp8"


# ------------------------------------------------------------------------------------- the two passes


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _grouped_dense(
    options: _Options, lhs: jax.Array, rhs: jax.Array, existing_out: jax.Array | None, shard: Shard
) -> jax.Array:
    a, b = Quantized(lhs, None), Quantized(rhs, None)
    if options.quantize:
        a, b = (quantized(x, axis, options.block_size, options.interpret) for x, axis in ((lhs, 1), (rhs, (1, 2))))
    return _forward(options, a, b, existing_out, shard)


def _fwd(
    options: _Options, lhs: jax.Array, rhs: jax.Array, existing_out: jax.Array | None, shard: Shard
) -> tuple[jax.Array, Any]:
    how = options.block_size, options.interpret
    a = saved_a = Quantized(lhs, None)
    b = saved_b = Quantized(rhs, None)
    if options.quantize or options.bwd_quantize:
        saved_b = quantized(rhs, (1, 2), *how)
    if options.quantize:
        (a, saved_a), b = dual_quantized(lhs, *how), saved_b
    elif options.bwd_quantize:
        saved_a = quantized(padded(lhs, options.block_size), 0, *how)
    return _forward(options, a, b, existing_out, shard), (saved_a, saved_b, shard)


def _bwd(options: _Options, saved: tuple[Quantized, Quantized, Shard], dout: jax.Array) -> tuple[Any, ...]:
    lhs, rhs, shard = saved
    groups = rhs.qvalue.shape[0]
    if options.bwd_quantize:
        by_rows, by_columns = dual_quantized(dout, options.block_size, options.interpret)
    else:
        by_rows, by_columns = Quantized(dout, None), Quantized(with_rows(dout, lhs.qvalue.shape[0]), None)
    shared: dict[str, Any] = {"preferred_element_type": options.dtype, "interpret": options.interpret}
    swapped = _swapped(options.tiling)
    by_gmm = {"transpose_rhs": not options.transpose_rhs, "tiling": swapped}
    with renamed(_at_dlhs):
        dlhs = product(by_rows, rhs, shard, **by_gmm, **shared)
    left, right, tiling = (by_columns, lhs, swapped) if options.transpose_rhs else (lhs, by_columns, options.tiling)
    by_tgmm = {"num_actual_groups": groups, "tiling": tiling}
    with renamed(_at_drhs):
        drhs = weight_product(left, right, shard, **by_tgmm, **shared)
    passed = _outside(dout, *shard, groups) if options.fills else None
    return dlhs, drhs, passed, None


def _at_dlhs(site: str) -> str | None:
    return "dlhs" if site == "acc" else None


def _at_drhs(site: str) -> str | None:
    return "drhs" if site == "acc" else None


_grouped_dense.defvjp(_fwd, _bwd)


def _forward(
    options: _Options, lhs: Quantized, rhs: Quantized, existing_out: jax.Array | None, shard: Shard
) -> jax.Array:
    return product(
        lhs,
        rhs,
        shard,
        existing_out=existing_out,
        transpose_rhs=options.transpose_rhs,
        preferred_element_type=options.out_dtype,
        tiling=options.tiling,
        interpret=options.interpret,
    )


def _swapped(tiling: Tiling | None) -> Tiling | None:
    """The tile of a matmul in which K and N have changed places; a look-up is asked with its sizes anyway."""
    if tiling is None or callable(tiling):
        return tiling
    tm, tk, tn = tiling
    return tm, tn, tk


def _outside(x: jax.Array, group_sizes: jax.Array, group_offset: jax.Array, groups: int) -> jax.Array:
    """x [M, N], zero in the rows of active groups."""
    ends = jnp.cumulative_sum(group_sizes, include_initial=True)
    start, end = ends[group_offset], ends[group_offset + groups]
    row = jnp.arange(x.shape[0])[:, None]
    return jnp.where((start <= row) & (row < end), jnp.zeros_like(x), x)
