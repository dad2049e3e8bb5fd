"""Dense layers of groups on the TPU, differentiable; they are defined in `cpu_golden/grouped_dense.py`."""

from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from op_arguments.gmm import Problem, check_gmm
from op_arguments.grouped_dense import DenseOptions, Grads, Quantize, check_dout
from op_arguments.options import options_of
from op_arguments.probe import probing, renamed
from op_arguments.quantize import Quantized
from tpu_kernels._lib.arguments import Interpret, Shard, groups_of, held, resolve_interpret, shard_of
from tpu_kernels._lib.chip import matmul_path, tpu_generation
from tpu_kernels._lib.pairs import dual_quantized, padded, product, quantized, weight_product, with_rows

E4M3 = "float8_e4m3fn"


@dataclass(frozen=True, kw_only=True)
class _Options(DenseOptions):
    """As a TPU has them; "auto" quantises on chips whose matrix unit multiplies fp8 natively (tpu7x)."""

    interpret: Interpret = None


@dataclass(frozen=True, kw_only=True)
class _Static(_Options):
    """All that is static in a checked `grouped_dense`: no "auto" is left."""

    dtype: Any  # of lhs and rhs, and so of their gradients
    fills: bool  # whether existing_out is given


@options_of(_Options)
def grouped_dense(
    lhs: jax.Array,
    rhs: jax.Array,
    group_sizes: jax.Array,
    existing_out: jax.Array | None = None,
    *,
    group_offset: int | jax.Array = 0,
    **options: Any,
) -> jax.Array:
    """`gmm` [M, N], differentiable in lhs, rhs and existing_out, its operands quantised to e4m3 on request.

    Arguments, result and errors as `cpu_golden.grouped_dense.grouped_dense`, options those of `DenseOptions`,
    existing_out, interpret and precision as `tpu_kernels.gmm.gmm`.
    Where anything is quantised, what a backward pass keeps of lhs (by columns) and rhs is fp8 pairs alone. Gradients
    have the dtypes of what they are gradients of.
    Sites shown to a probe: those of the forward matmul, and the sums of the other two at dlhs and drhs.
    """
    static, shard, _ = _checked(lhs, rhs, group_sizes, existing_out, group_offset, _Options(**options))
    return _grouped_dense(static, lhs, rhs, existing_out, shard)


@options_of(_Options)
def grouped_dense_bwd(
    lhs: jax.Array,
    rhs: jax.Array,
    group_sizes: jax.Array,
    dout: jax.Array,
    existing_out: jax.Array | None = None,
    *,
    group_offset: int | jax.Array = 0,
    **options: Any,
) -> Grads:
    """The gradients of `grouped_dense` in lhs, rhs and existing_out, as `jax.vjp` gives them.

    dout [M, N]: the gradient of its result, in the dtype of that. All else as `grouped_dense`, but that a probe
    sees nothing of the forward pass.
    """
    static, shard, p = _checked(lhs, rhs, group_sizes, existing_out, group_offset, _Options(**options))
    check_dout(dout, p)
    with probing(None):
        _, backward = jax.vjp(lambda *primals: _grouped_dense(static, *primals, shard), lhs, rhs, existing_out)
    return Grads(*backward(dout))


def _checked(
    lhs: jax.Array,
    rhs: jax.Array,
    group_sizes: jax.Array,
    existing_out: jax.Array | None,
    group_offset: int | jax.Array,
    o: _Options,
) -> tuple[_Static, Shard, Problem]:
    groups = groups_of(group_sizes, group_offset)
    # Here and not only in the matmuls: inside a custom_vjp all values are traced.
    p = check_gmm(lhs, rhs, groups, existing_out, o.transpose_rhs, o.preferred_element_type)
    resolved = {
        "quantize": _is_quantized(o.quantize),
        "bwd_quantize": _is_quantized(o.bwd_quantize),
        "preferred_element_type": p.out_dtype,
        "interpret": resolve_interpret(o.interpret, lhs),
    }
    static = _Static(**vars(o) | resolved, dtype=lhs.dtype, fills=existing_out is not None)
    return static, shard_of(groups._replace(sizes=held(group_sizes)), p), p


def _is_quantized(quantize: Quantize) -> bool:
    if quantize != "auto":
        return bool(quantize)
    generation = tpu_generation()
    return generation is not None and matmul_path(E4M3, E4M3, generation)[0] == "fp8"


# ------------------------------------------------------------------------------------- the two passes


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _grouped_dense(
    options: _Static, lhs: jax.Array, rhs: jax.Array, existing_out: jax.Array | None, shard: Shard
) -> jax.Array:
    a, b = Quantized(lhs, None), Quantized(rhs, None)
    if options.quantize:
        a, b = (quantized(x, axis, options.block_size, options.interpret) for x, axis in ((lhs, 1), (rhs, (1, 2))))
    return _forward(options, a, b, existing_out, shard)


def _fwd(
    options: _Static, lhs: jax.Array, rhs: jax.Array, existing_out: jax.Array | None, shard: Shard
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


def _bwd(options: _Static, saved: tuple[Quantized, Quantized, Shard], dout: jax.Array) -> tuple[Any, ...]:
    lhs, rhs, shard = saved
    groups = rhs.qvalue.shape[0]
    if options.bwd_quantize:
        by_rows, by_columns = dual_quantized(dout, options.block_size, options.interpret)
    else:
        by_rows, by_columns = Quantized(dout, None), Quantized(with_rows(dout, lhs.qvalue.shape[0]), None)
    shared: dict[str, Any] = {"preferred_element_type": options.dtype, "interpret": options.interpret}
    by_gmm: dict[str, Any] = {"transpose_rhs": not options.transpose_rhs, "tiling": options.swapped_tiling}
    with renamed(_at_dlhs):
        dlhs = product(by_rows, rhs, shard, **by_gmm, **shared)
    left, right, tiling = lhs, by_columns, options.tiling
    if options.transpose_rhs:
        left, right, tiling = by_columns, lhs, options.swapped_tiling
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
    options: _Static, lhs: Quantized, rhs: Quantized, existing_out: jax.Array | None, shard: Shard
) -> jax.Array:
    return product(
        lhs,
        rhs,
        shard,
        existing_out=existing_out,
        transpose_rhs=options.transpose_rhs,
        preferred_element_type=options.preferred_element_type,
        tiling=options.tiling,
        interpret=options.interpret,
    )


def _outside(x: jax.Array, group_sizes: jax.Array, group_offset: jax.Array, groups: int) -> jax.Array:
    """x [M, N], zero in the rows of active groups."""
    ends = jnp.cumulative_sum(group_sizes, include_initial=True)
    start, end = ends[group_offset], ends[group_offset + groups]
    row = jnp.arange(x.shape[0])[:, None]
    return jnp.where((start <= row) & (row < end), jnp.zeros_like(x), x)
