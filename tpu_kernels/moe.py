"""Layers of a mixture of experts on the TPU. They are defined in `cpu_golden/moe.py`."""

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from op_arguments import Tiling
from op_arguments.gmm import Problem, check_gmm
from op_arguments.moe import check_dout, check_quantize_options
from tpu_kernels.gmm import Interpret, as_vector, concrete_values, gmm, static_scalar, tgmm
from tpu_kernels.hardware import matmul_path, tpu_generation
from tpu_kernels.quantize import Quantized, fp8_dual_quantize, fp8_quantize
from tpu_kernels.quantized_gmm import gmm_quantized, tgmm_quantized

Quantize = bool | str

E4M3 = "float8_e4m3fn"


class Grads(NamedTuple):
    """The gradients of `grouped_dense`; existing_out's is None where none was given."""

    lhs: Any
    rhs: Any
    existing_out: Any


class _Options(NamedTuple):
    """What is static in a `grouped_dense`."""

    quantize: bool
    bwd_quantize: bool
    block_size: int | None
    transpose_rhs: bool
    fills: bool  # whether existing_out is given
    dtype: Any  # of lhs and rhs, and so of their gradients
    out_dtype: str
    tiling: Tiling | None
    interpret: Interpret


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
    """`gmm`, differentiable in lhs, rhs and existing_out, with its operands quantised to e4m3 on request.

    Arguments, result and errors as `gmm`. quantize: multiply in fp8, lhs with one scale per row and `block_size`
    elements of K, rhs with one per block_size x block_size elements (None: whole axes), the recipe of DeepSeek-V3
    (arXiv:2412.19437, section 3.3). bwd_quantize: the same for the two matmuls of the backward pass: dout by rows and
    blocks of N for lhs's gradient, by columns and global blocks of M for rhs's. "auto" quantises on chips whose
    matrix unit multiplies fp8 natively (tpu7x). block_size must divide K and N where anything is quantised; M need
    not be a multiple of it.
    Where anything is quantised, what a backward pass keeps of lhs (by columns) and rhs is fp8 pairs alone. Gradients
    have the dtypes of what they are gradients of: zero for rows of no active group (lhs), for empty groups (rhs) and
    for rows that were overwritten (existing_out).
    tiling: (tm, tk, tn) of the forward pass, whose backward matmuls take (tm, tn, tk) and (tm, tk, tn), or a look-up
    (m, k, n) -> (tm, tk, tn) that is asked for each of them.
    """
    check_quantize_options(quantize, bwd_quantize, block_size)
    group_offset = static_scalar(group_offset)
    p = _check(lhs, rhs, group_sizes, existing_out, group_offset, transpose_rhs, preferred_element_type)
    options = _Options(
        quantize=_resolve_quantize(quantize),
        bwd_quantize=_resolve_quantize(bwd_quantize),
        block_size=block_size,
        transpose_rhs=bool(transpose_rhs),
        fills=existing_out is not None,
        dtype=lhs.dtype,
        out_dtype=p.out_dtype,
        tiling=tiling,
        interpret=interpret,
    )
    shard = as_vector(group_offset, p.experts - p.groups)
    return _grouped_dense(options, lhs, rhs, group_sizes, shard, existing_out)


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

    dout [M, N]: the gradient of its result, in the dtype of that. All else as `grouped_dense`.
    """
    check_quantize_options(quantize, bwd_quantize, block_size)
    group_offset = static_scalar(group_offset)
    p = _check(lhs, rhs, group_sizes, existing_out, group_offset, transpose_rhs, preferred_element_type)
    check_dout(dout, p)

    def layer(lhs: jax.Array, rhs: jax.Array, existing_out: jax.Array | None) -> jax.Array:
        return grouped_dense(
            lhs,
            rhs,
            group_sizes,
            existing_out,
            group_offset=group_offset,
            transpose_rhs=transpose_rhs,
            quantize=quantize,
            bwd_quantize=bwd_quantize,
            block_size=block_size,
            preferred_element_type=preferred_element_type,
            tiling=tiling,
            interpret=interpret,
        )

    _, backward = jax.vjp(layer, lhs, rhs, existing_out)
    return Grads(*backward(dout))


def _check(
    lhs: jax.Array,
    rhs: jax.Array,
    group_sizes: jax.Array,
    existing_out: jax.Array | None,
    group_offset: Any,
    transpose_rhs: bool,
    preferred_element_type: Any,
) -> Problem:
    # Here and not only in the matmuls: inside a custom_vjp all values are traced.
    return check_gmm(
        lhs,
        rhs,
        group_sizes,
        group_offset=group_offset,
        existing_out=existing_out,
        transpose_rhs=transpose_rhs,
        preferred_element_type=preferred_element_type,
        sizes=concrete_values(group_sizes),
    )


def _resolve_quantize(quantize: Quantize) -> bool:
    if quantize != "auto":
        return bool(quantize)
    generation = tpu_generation()
    return generation is not None and matmul_path(E4M3, E4M3, generation)[0] == "fp8"


# ------------------------------------------------------------------------------------- the two passes
# An operand is a pair (qvalue, scale) throughout; where it is not quantised, its scale is None.


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _grouped_dense(
    options: _Options,
    lhs: jax.Array,
    rhs: jax.Array,
    group_sizes: jax.Array,
    group_offset: jax.Array,
    existing_out: jax.Array | None,
) -> jax.Array:
    a, b = Quantized(lhs, None), Quantized(rhs, None)
    if options.quantize:
        a, b = _quantize(options, lhs, 1), _quantize(options, rhs, (1, 2))
    return _forward(options, a, b, group_sizes, group_offset, existing_out)


def _fwd(
    options: _Options,
    lhs: jax.Array,
    rhs: jax.Array,
    group_sizes: jax.Array,
    group_offset: jax.Array,
    existing_out: jax.Array | None,
) -> tuple[jax.Array, Any]:
    a = saved_a = Quantized(lhs, None)
    b = saved_b = Quantized(rhs, None)
    if options.quantize or options.bwd_quantize:
        saved_b = _quantize(options, rhs, (1, 2))
    if options.quantize:
        (a, saved_a), b = _dual_quantize(options, lhs), saved_b
    elif options.bwd_quantize:
        saved_a = _quantize(options, _padded(lhs, options.block_size), 0)
    out = _forward(options, a, b, group_sizes, group_offset, existing_out)
    return out, (saved_a, saved_b, group_sizes, group_offset)


def _bwd(options: _Options, saved: Any, dout: jax.Array) -> tuple[Any, ...]:
    lhs, rhs, group_sizes, group_offset = saved
    groups = rhs.qvalue.shape[0]
    if options.bwd_quantize:
        by_rows, by_columns = _dual_quantize(options, dout)
    else:
        by_rows, by_columns = Quantized(dout, None), Quantized(_with_rows(dout, lhs.qvalue.shape[0]), None)
    shared: dict[str, Any] = {
        "group_offset": group_offset,
        "preferred_element_type": options.dtype,
        "interpret": options.interpret,
    }
    swapped = _swapped(options.tiling)
    dlhs = _gmm(by_rows, rhs, group_sizes, transpose_rhs=not options.transpose_rhs, tiling=swapped, **shared)
    left, right, tiling = (by_columns, lhs, swapped) if options.transpose_rhs else (lhs, by_columns, options.tiling)
    drhs = _tgmm(left, right, group_sizes, num_actual_groups=groups, tiling=tiling, **shared)
    passed = _outside(dout, group_sizes, group_offset, groups) if options.fills else None
    return dlhs, drhs, None, None, passed


_grouped_dense.defvjp(_fwd, _bwd)


def _forward(
    options: _Options,
    lhs: Quantized,
    rhs: Quantized,
    group_sizes: jax.Array,
    group_offset: jax.Array,
    existing_out: jax.Array | None,
) -> jax.Array:
    return _gmm(
        lhs,
        rhs,
        group_sizes,
        group_offset=group_offset,
        existing_out=existing_out,
        transpose_rhs=options.transpose_rhs,
        preferred_element_type=options.out_dtype,
        tiling=options.tiling,
        interpret=options.interpret,
    )


def _gmm(lhs: Quantized, rhs: Quantized, group_sizes: jax.Array, **arguments: Any) -> jax.Array:
    if lhs.scale is None and rhs.scale is None:
        return gmm(*_same_dtype(lhs.qvalue, rhs.qvalue), group_sizes, **arguments)
    return gmm_quantized(*lhs, *rhs, group_sizes, **arguments)


def _tgmm(lhs: Quantized, rhs: Quantized, group_sizes: jax.Array, **arguments: Any) -> jax.Array:
    if lhs.scale is None and rhs.scale is None:
        return tgmm(*_same_dtype(lhs.qvalue, rhs.qvalue), group_sizes, **arguments)
    return tgmm_quantized(*lhs, *rhs, group_sizes, **arguments)


def _same_dtype(a: jax.Array, b: jax.Array) -> tuple[jax.Array, jax.Array]:
    """a and b in the narrowest dtype that holds both exactly: dout has the result's dtype, not always lhs's."""
    dtype = jnp.promote_types(a.dtype, b.dtype)
    return a.astype(dtype), b.astype(dtype)


def _swapped(tiling: Tiling | None) -> Tiling | None:
    """The tile of a matmul in which K and N have changed places; a look-up is asked with its sizes anyway."""
    if tiling is None or callable(tiling):
        return tiling
    tm, tk, tn = tiling
    return tm, tn, tk


def _quantize(options: _Options, x: jax.Array, axis: int | tuple[int, ...]) -> Quantized:
    # The values of x may be at hand or not; a training step saturates infinities in either case.
    return fp8_quantize(x, axis, options.block_size, check_finite=False, interpret=options.interpret)


def _dual_quantize(options: _Options, x: jax.Array) -> tuple[Quantized, Quantized]:
    """x [M, …] by rows, and by columns with rows of zeros up to a multiple of the block."""
    rows = x.shape[0]
    both = fp8_dual_quantize(
        _padded(x, options.block_size), options.block_size, check_finite=False, interpret=options.interpret
    )
    return (
        Quantized(both.rowwise[:rows], both.rowwise_scale[:rows]),
        Quantized(both.columnwise, both.columnwise_scale),
    )


def _padded(x: jax.Array, block_size: int | None) -> jax.Array:
    """x with rows of zeros up to a multiple of block_size."""
    rows = x.shape[0]
    return x if block_size is None else _with_rows(x, rows + -rows % block_size)


def _with_rows(x: jax.Array, rows: int) -> jax.Array:
    """x with rows of zeros up to `rows` of them."""
    return x if x.shape[0] == rows else jnp.pad(x, [(0, rows - x.shape[0]), (0, 0)])


def _outside(x: jax.Array, group_sizes: jax.Array, group_offset: jax.Array, groups: int) -> jax.Array:
    """x [M, N], zero in the rows of active groups."""
    ends = jnp.cumulative_sum(group_sizes, include_initial=True)
    start, end = ends[group_offset], ends[group_offset + groups]
    row = jnp.arange(x.shape[0])[:, None]
    return jnp.where((start <= row) & (row < end), jnp.zeros_like(x), x)
