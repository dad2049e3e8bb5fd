"""Layers of a mixture of experts on the TPU. They are defined in `cpu_golden/moe.py`."""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name

from op_arguments import Tiling
from op_arguments.debug import Debug, backward_alone, sums_at
from op_arguments.gmm import Problem, check_gmm
from op_arguments.grouped_dense import check_dout, check_quantize_options
from op_arguments.moe import check_expert_parallel, check_layer_dout, check_moe_layer
from op_arguments.permute import check_permute, check_unpermute, permuted_rows
from tpu_kernels._lib.arguments import Interpret, as_vector, concrete_values, static_scalar
from tpu_kernels._lib.blocks import Quantized
from tpu_kernels._lib.chip import matmul_path, tpu_generation
from tpu_kernels.gmm import gmm, tgmm
from tpu_kernels.grouped_gemm import grouped_gemm
from tpu_kernels.mxfp8 import mxfp8_dual_quantize, mxfp8_quantize
from tpu_kernels.quantize import fp8_dual_quantize, fp8_quantize
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
    debug: Debug


class _LayerOptions(NamedTuple):
    """What is static in a `moe_layer`."""

    top_k: int
    quantize: str | None
    block_size: int | None
    capacity: int | None
    renormalize: bool
    sanitize_grads: bool
    tiling: Tiling | None
    axis_name: str | None
    dtype: Any  # of x and the experts' weights
    interpret: Interpret
    debug: Debug

    @property
    def between(self) -> Any:
        """The dtype of what one matmul hands to the next."""
        return self.dtype if self.quantize is None else jnp.dtype("float32")


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
    debug: Debug = None,
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
    (m, k, n) -> (tm, tk, tn) that is asked for each of them. debug: as the matmul of the forward pass has it, and the
    sums of the other two at dlhs and drhs.
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
        debug=debug,
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
    debug: Debug = None,
) -> Grads:
    """The gradients of `grouped_dense` in lhs, rhs and existing_out, as `jax.vjp` gives them.

    dout [M, N]: the gradient of its result, in the dtype of that. All else as `grouped_dense`, but that debug has no
    stage of the forward pass.
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
            debug=backward_alone(debug),
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
    by_gmm = {"transpose_rhs": not options.transpose_rhs, "tiling": swapped, "debug": sums_at("dlhs", options.debug)}
    dlhs = _gmm(by_rows, rhs, group_sizes, **by_gmm, **shared)
    left, right, tiling = (by_columns, lhs, swapped) if options.transpose_rhs else (lhs, by_columns, options.tiling)
    by_tgmm = {"num_actual_groups": groups, "tiling": tiling, "debug": sums_at("drhs", options.debug)}
    drhs = _tgmm(left, right, group_sizes, **by_tgmm, **shared)
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
        debug=options.debug,
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


def _quantize(options: _Options | _LayerOptions, x: jax.Array, axis: int | tuple[int, ...]) -> Quantized:
    # The values of x may be at hand or not; a training step saturates infinities in either case.
    return fp8_quantize(x, axis, options.block_size, check_finite=False, interpret=options.interpret)


def _dual_quantize(options: _Options | _LayerOptions, x: jax.Array) -> tuple[Quantized, Quantized]:
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


# ---------------------------------------------------------------------------------------------- the whole layer

QUANTIZED_RESIDUALS = ("moe_layer_rows", "moe_layer_hidden", "moe_layer_weights")
"""What `jax.checkpoint` policies call the operands that a quantised `moe_layer` keeps for its backward pass."""


class Permuted(NamedTuple):
    """Rows sorted by expert. rows [M, D]; slots [T, k] int32, the row of each choice or -1; group_sizes [E] int32."""

    rows: Any
    slots: Any
    group_sizes: Any


class LayerGrads(NamedTuple):
    """The gradients of `moe_layer`."""

    x: Any
    w_router: Any
    w_gate: Any
    w_up: Any
    w_down: Any


def permute(x: jax.Array, indices: jax.Array, *, num_experts: int, capacity: int | None = None) -> Permuted:
    """Copies of the rows of x sorted by the experts that they go to, for a grouped matmul.

    x [T, D] float32, bfloat16 or float16; indices [T, k] int32 in [0, num_experts): the experts of each token, all
    different. Within an expert rows are in the order of their tokens. capacity: rows that an expert takes at most; of
    those beyond it the later ones are dropped. Returns rows [M, D] in x's dtype, M = T·k or, if that is less,
    num_experts·capacity, and zero beyond sum(group_sizes); slots [T, k] int32, the row of each choice, -1 where it was
    dropped; group_sizes [num_experts] int32. Every bit of a row is x's. Differentiable in x.
    Raises TypeError for a wrong type or dtype, ValueError for a wrong shape or value (outside tracing).
    """
    rows = check_permute(x, indices, num_experts, capacity, range_of=_range_of(indices), exact=False)
    return _permute(x, indices, num_experts, capacity, rows)


def unpermute(rows: jax.Array, slots: jax.Array, weights: jax.Array | None = None) -> jax.Array:
    """The rows of each token, summed, times their weights where these are given: the inverse of `permute`.

    rows [M, D] float32, bfloat16 or float16; slots [T, k] int32 in [-1, M), as `permute` gives them; weights [T, k]
    float32. Returns `out[t] = Σ_j weights[t, j] · rows[slots[t, j]]` [T, D] in rows' dtype, products and sums in
    float32; a slot of -1 adds nothing. Differentiable in rows and weights.
    Raises TypeError for a wrong type or dtype, ValueError for a wrong shape or value (outside tracing).
    """
    check_unpermute(rows, slots, weights, range_of=_range_of(slots), exact=False)
    return _unpermute(rows, weights, slots)


def moe_layer(
    x: jax.Array,
    w_router: jax.Array,
    w_gate: jax.Array,
    w_up: jax.Array,
    w_down: jax.Array,
    *,
    top_k: int,
    quantize: str | None = None,
    block_size: int | None = 128,
    capacity: int | None = None,
    renormalize: bool = True,
    group_offset: int | jax.Array = 0,
    sanitize_grads: bool = False,
    tiling: Tiling | None = None,
    axis_name: str | None = None,
    interpret: Interpret = None,
    debug: Debug = None,
) -> jax.Array:
    """A layer of SwiGLU experts, of which each token goes to the top_k that its router likes best; differentiable.

    `out[t] = Σ_j weights[t, j] · (silu(x[t] @ w_gate[e]) · (x[t] @ w_up[e])) @ w_down[e]` with e = indices[t, j].

    x [T, D]; w_gate, w_up [G, D, F] and w_down [G, F, D] of x's dtype (float32, bfloat16 or float16); w_router [D, E]
    float32, bfloat16 or float16, all finite as x must be. Returns [T, D] in x's dtype.
    Routing: logits x @ w_router in float32; the top_k largest, of equal ones the lower expert first; weights are their
    softmax, over the top_k chosen with renormalize (Mixtral, Qwen3), else over all E.
    capacity: rows that an expert takes at most. Of the tokens of an expert the later ones are dropped beyond it: their
    choice contributes nothing, and the weights of their other choices stay what they were.
    The G experts are those from group_offset on of the router's E: a choice of any other contributes nothing, so that
    the layers of all shards sum up to the whole.
    quantize: the operands of the matmuls of both passes in e4m3; "fp8": rows with a float32 scale per `block_size`
    elements, weights per block_size x block_size of them (None: whole axes; it must divide D and F), as
    `grouped_dense`; "mxfp8": with a power of two per 32, of any D and F, as `mxfp8_quantize`. Gradients are those of
    the quantised operands, which are all that a backward pass keeps of them, under the names `QUANTIZED_RESIDUALS`.
    What a matmul hands to the next one is then float32, so that each is rounded once; else it has x's dtype.
    The weights enter before the last matmul, which is linear: their gradient then needs no more than a product of what
    the backward pass has anyway. sanitize_grads: zero in place of every gradient that is NaN or infinite; by default
    they propagate. tiling: (tm, tk, tn) of every matmul, or a look-up (m, k, n) -> (tm, tk, tn).
    axis_name: expert parallelism, inside `jax.shard_map` (with check_vma=False) over an axis of that name. Each device
    has T of the tokens, in order, w_router whole and G = E / devices of the experts, in order; rows travel by
    all-to-all in buffers for the worst case. Results are those of one device with all tokens and experts, but for the
    sums over rows in gradients of weights: their order, and which rows share a scale where they are quantised.
    debug: see `op_arguments.debug`, of what the matmuls hand on in either pass, of logits, weights and the parts of
    x's gradient, at the golden's sites; None leaves nothing of it.
    Raises TypeError for a wrong type or dtype, ValueError for a wrong shape or value.
    """
    group_offset = static_scalar(group_offset)
    layer = check_moe_layer(
        x,
        w_router,
        w_gate,
        w_up,
        w_down,
        top_k=top_k,
        quantize=quantize,
        block_size=block_size,
        capacity=capacity,
        group_offset=group_offset,
    )
    if axis_name is not None:
        check_expert_parallel(layer, lax.axis_size(axis_name), group_offset)
    options = _LayerOptions(
        top_k=top_k,
        quantize=quantize,
        block_size=block_size,
        capacity=capacity,
        renormalize=bool(renormalize),
        sanitize_grads=bool(sanitize_grads),
        tiling=tiling,
        axis_name=axis_name,
        dtype=x.dtype,
        interpret=interpret,
        debug=debug,
    )
    offset = as_vector(group_offset, layer.experts - layer.groups)
    return _layer(options, x, w_router, w_gate, w_up, w_down, offset)


def moe_layer_bwd(
    x: jax.Array,
    w_router: jax.Array,
    w_gate: jax.Array,
    w_up: jax.Array,
    w_down: jax.Array,
    dout: jax.Array,
    *,
    top_k: int,
    quantize: str | None = None,
    block_size: int | None = 128,
    capacity: int | None = None,
    renormalize: bool = True,
    group_offset: int | jax.Array = 0,
    sanitize_grads: bool = False,
    tiling: Tiling | None = None,
    axis_name: str | None = None,
    interpret: Interpret = None,
    debug: Debug = None,
) -> LayerGrads:
    """The gradients of `moe_layer` in all five of its arrays, as `jax.vjp` gives them, for a gradient dout [T, D].

    In the dtypes of the primals; zero for experts without rows. With axis_name w_router's is the part of this device's
    tokens. All else as `moe_layer`.
    """
    layer = partial(
        moe_layer,
        top_k=top_k,
        quantize=quantize,
        block_size=block_size,
        capacity=capacity,
        renormalize=renormalize,
        group_offset=group_offset,
        sanitize_grads=sanitize_grads,
        tiling=tiling,
        axis_name=axis_name,
        interpret=interpret,
        debug=debug,
    )
    _, backward = jax.vjp(layer, x, w_router, w_gate, w_up, w_down)
    check_layer_dout(dout, x)
    return LayerGrads(*backward(dout))


@partial(jax.jit, static_argnums=(2, 3, 4))
def _permute(x: jax.Array, indices: jax.Array, num_experts: int, capacity: int | None, rows: int) -> Permuted:
    plan = _plan(indices, num_experts, capacity, rows)
    return Permuted(_take(x, plan.source, plan.slots), plan.slots, plan.group_sizes)


@jax.jit
def _unpermute(rows: jax.Array, weights: jax.Array | None, slots: jax.Array) -> jax.Array:
    at = jnp.where(slots < 0, rows.shape[0], slots).ravel()
    source = jnp.full(rows.shape[0], -1).at[at].set(jnp.arange(slots.size), mode="drop")
    return _combine(rows, weights, slots, source)


@partial(jax.jit, static_argnums=0)
def _layer(
    o: _LayerOptions,
    x: jax.Array,
    w_router: jax.Array,
    w_gate: jax.Array,
    w_up: jax.Array,
    w_down: jax.Array,
    group_offset: jax.Array,
) -> jax.Array:
    if o.sanitize_grads:
        x, w_router, w_gate, w_up, w_down = (_sanitized(primal) for primal in (x, w_router, w_gate, w_up, w_down))
    weights, indices = _route(o, _watched(o, None, x, "drouter"), w_router)
    x = _watched(o, None, x, "dexperts")
    num_experts, experts = w_router.shape[1], partial(_experts, o)
    if o.axis_name is None:
        plan = _plan(indices, num_experts, o.capacity, permuted_rows(x.shape[0], o.top_k, num_experts, o.capacity))
        rows, of_rows = _take(x, *plan[:2]), _take(weights.reshape(-1, 1), plan.source, plan.slots.reshape(-1, 1))
        out = experts(rows, of_rows, w_gate, w_up, w_down, plan.group_sizes, group_offset)
        return _combine(out, None, plan.slots, plan.source)
    sent, received = _exchange_plans(o, indices, num_experts)
    rows, of_rows = _take(x, *sent[:2]), _take(weights.reshape(-1, 1), sent.source, sent.slots.reshape(-1, 1))
    rows, of_rows = (_take(_swap(o, t), received.source, received.slots) for t in (rows, of_rows))
    out = experts(rows, of_rows, w_gate, w_up, w_down, received.group_sizes, group_offset)
    out = _swap(o, _take(out, received.slots.ravel(), received.source[:, None]))
    return _combine(out, None, sent.slots, sent.source)


def _route(o: _LayerOptions, x: jax.Array, w_router: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The weights [T, k] float32 of each token's experts, and which these are."""
    logits = jnp.dot(x.astype(jnp.float32), w_router.astype(jnp.float32), precision=lax.Precision.HIGHEST)
    logits = _watched(o, "logits", logits, "dlogits")
    _, indices = lax.top_k(lax.stop_gradient(logits), o.top_k)
    if o.renormalize:
        weights = jax.nn.softmax(jnp.take_along_axis(logits, indices, axis=1))
    else:
        weights = jnp.take_along_axis(jax.nn.softmax(logits), indices, axis=1)
    return _watched(o, "weights", weights), indices


def _watched(o: _LayerOptions, site: str | None, x: jax.Array, gradient: str | None = None) -> jax.Array:
    """x, shown to `debug` as what is at a site, and its gradient as what is at another."""
    return x if o.debug is None else _shown(o.debug, site, gradient, x)


@partial(jax.custom_vjp, nondiff_argnums=(0, 1, 2))
def _shown(debug: Callable[..., Any], site: str | None, gradient: str | None, x: jax.Array) -> Any:
    return x if site is None else debug(site, x)


def _shown_fwd(debug: Callable[..., Any], site: str | None, gradient: str | None, x: jax.Array) -> tuple[Any, None]:
    return _shown(debug, site, gradient, x), None


def _shown_bwd(debug: Callable[..., Any], site: str | None, gradient: str | None, _: None, grad: jax.Array) -> Any:
    return (grad if gradient is None else debug(gradient, grad),)


_shown.defvjp(_shown_fwd, _shown_bwd)


@jax.custom_vjp
def _sanitized(x: jax.Array) -> jax.Array:
    """x, whose gradient is zero wherever it would not be finite."""
    return x


_sanitized.defvjp(lambda x: (x, None), lambda _, grad: (jnp.where(jnp.isfinite(grad), grad, jnp.zeros_like(grad)),))


# ------------------------------------------------------------------------------------------- rows to and from experts


class _Plan(NamedTuple):
    """Which row is whose: source [M], the choice t·k + j of each row or -1; slots and group_sizes as `Permuted`."""

    source: jax.Array
    slots: jax.Array
    group_sizes: jax.Array


def _plan(
    indices: jax.Array, num_experts: int, capacity: int | None, rows: int, preceding: jax.Array | int = 0
) -> _Plan:
    """The plan of `permute`. preceding [E]: rows that other devices' tokens take of each expert's capacity first."""
    choices = indices.ravel()
    order = jnp.argsort(choices, stable=True)
    starts = jnp.searchsorted(choices[order], jnp.arange(num_experts + 1, dtype=jnp.int32)).astype(jnp.int32)
    group_sizes = jnp.diff(starts)
    if capacity is not None:
        group_sizes = jnp.clip(capacity - preceding, 0, group_sizes)
    position = jnp.argsort(order).astype(jnp.int32) - starts[choices]
    slots = jnp.where(position < group_sizes[choices], _starts(group_sizes)[choices] + position, -1)
    return _Plan(_inverse(slots, rows), slots.reshape(indices.shape), group_sizes)


def _inverse(slots: jax.Array, rows: int) -> jax.Array:
    """Which of the slots is row 0, 1, …, up to `rows` of them: -1 beyond the last. The rows in slots have no gaps."""
    order = jnp.argsort(jnp.where(slots < 0, slots.size, slots))[:rows]
    return jnp.where(jnp.arange(rows) < (slots >= 0).sum(), order, -1)


def _starts(sizes: jax.Array, axis: int = 0) -> jax.Array:
    """Where each of consecutive parts of these sizes begins."""
    return jnp.cumsum(sizes, axis) - sizes


@jax.custom_vjp
def _take(x: jax.Array, source: jax.Array, slots: jax.Array) -> jax.Array:
    """x's row for each source (the choice t·k + j), zero for -1."""
    return _rows_of(x, source, slots)


def _rows_of(x: jax.Array, source: jax.Array, slots: jax.Array) -> jax.Array:
    if not x.shape[0]:
        return jnp.zeros((source.shape[0], x.shape[1]), x.dtype)
    return jnp.where(source[:, None] >= 0, x[source // slots.shape[1]], jnp.zeros((), x.dtype))


def _sum_of(rows: jax.Array, weights: jax.Array | None, slots: jax.Array) -> jax.Array:
    """Σ_j weights[:, j] · rows[slots[:, j]] in float32, in the order of j."""
    total = jnp.zeros((slots.shape[0], rows.shape[1]), jnp.float32)
    for j in range(slots.shape[1] if rows.shape[0] else 0):
        taken = rows[slots[:, j]].astype(jnp.float32)
        taken = taken if weights is None else taken * weights[:, j, None]
        total += jnp.where(slots[:, j, None] >= 0, taken, 0.0)
    return total


def _take_bwd(saved: Any, drows: jax.Array) -> tuple[Any, ...]:
    (slots,) = saved
    return _sum_of(drows, None, slots).astype(drows.dtype), None, None


_take.defvjp(lambda x, source, slots: (_rows_of(x, source, slots), (slots,)), _take_bwd)


@jax.custom_vjp
def _combine(rows: jax.Array, weights: jax.Array | None, slots: jax.Array, source: jax.Array) -> jax.Array:
    """`unpermute`, with the inverse of slots."""
    return _sum_of(rows, weights, slots).astype(rows.dtype)


def _combine_fwd(rows: jax.Array, weights: jax.Array | None, slots: jax.Array, source: jax.Array) -> tuple[Any, Any]:
    kept = None if weights is None else rows
    return _combine(rows, weights, slots, source), (kept, weights, slots, source)


def _combine_bwd(saved: Any, dout: jax.Array) -> tuple[Any, ...]:
    rows, weights, slots, source = saved
    drows = _rows_of(dout, source, slots)
    if weights is None:
        return drows, None, None, None
    by_row = _rows_of(weights.reshape(-1, 1), source, slots.reshape(-1, 1))
    taken = jnp.where(slots[..., None] >= 0, rows[slots].astype(jnp.float32), 0.0)
    dweights = (taken * dout[:, None].astype(jnp.float32)).sum(axis=2)
    return (drows.astype(jnp.float32) * by_row).astype(drows.dtype), dweights, None, None


_combine.defvjp(_combine_fwd, _combine_bwd)


# ------------------------------------------------------------------------------------------------ expert parallelism


def _exchange_plans(o: _LayerOptions, indices: jax.Array, num_experts: int) -> tuple[_Plan, _Plan]:
    """How rows lie in the buffer that is sent, a part for each device; and how what is received is sorted by expert.

    The second plan's source and slots are of rows of the received buffer, [M] and [parts · width, 1].
    """
    devices, here = lax.axis_size(o.axis_name), lax.axis_index(o.axis_name)
    groups = num_experts // devices
    tokens, top_k = indices.shape
    width = permuted_rows(tokens, min(top_k, groups), groups, o.capacity)
    preceding: jax.Array | int = 0
    if o.capacity is not None:
        counts = (indices.ravel()[:, None] == jnp.arange(num_experts)).sum(axis=0)
        earlier = jnp.arange(devices)[:, None] < here
        preceding = jnp.where(earlier, lax.all_gather(counts, o.axis_name), 0).sum(axis=0)
    plan = _plan(indices, num_experts, o.capacity, permuted_rows(tokens, top_k, num_experts, o.capacity), preceding)

    sizes = plan.group_sizes.reshape(devices, groups)
    starts = _starts(sizes.sum(axis=1))
    column = jnp.arange(width)
    source = plan.source[jnp.minimum(starts[:, None] + column, plan.source.shape[0] - 1)]
    source = jnp.where(column < sizes.sum(axis=1)[:, None], source, -1).ravel()
    device = indices // groups
    slots = jnp.where(plan.slots >= 0, device * width + plan.slots - starts[device], -1)
    sent = _Plan(source, slots, plan.group_sizes)

    sizes = lax.all_to_all(sizes, o.axis_name, 0, 0)  # [devices, G]: rows that each of them sends to each expert here
    ends = jnp.cumsum(sizes, axis=1)
    expert = (column[:, None] >= ends[:, None]).sum(axis=2)  # [devices, width]; G where there is no row
    begins = jnp.pad(_starts(sizes.sum(axis=0)) + _starts(sizes) - _starts(sizes, axis=1), [(0, 0), (0, 1)])
    places = jnp.take_along_axis(begins, expert, axis=1) + column
    slots = jnp.where(expert < groups, places, -1).ravel()
    rows = slots.size if o.capacity is None else min(slots.size, groups * o.capacity)
    return sent, _Plan(_inverse(slots, rows), slots[:, None], sizes.sum(axis=0))


def _swap(o: _LayerOptions, buffer: jax.Array) -> jax.Array:
    """Part i of the buffer to device i, and part i of the result from it."""
    parts = buffer.reshape(lax.axis_size(o.axis_name), -1, buffer.shape[1])
    return lax.all_to_all(parts, o.axis_name, 0, 0).reshape(buffer.shape)


# --------------------------------------------------------------------------------------------------- the experts


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _experts(
    o: _LayerOptions,
    rows: jax.Array,
    weights: jax.Array,
    w_gate: jax.Array,
    w_up: jax.Array,
    w_down: jax.Array,
    group_sizes: jax.Array,
    group_offset: jax.Array,
) -> jax.Array:
    """rows [M, D], sorted by expert, through their experts, times their weights [M, 1]."""
    shard = group_sizes, group_offset
    return _forward_of_experts(o, rows, weights, (w_gate, w_up, w_down), shard, is_trained=False)[0]


def _experts_fwd(
    o: _LayerOptions,
    rows: jax.Array,
    weights: jax.Array,
    w_gate: jax.Array,
    w_up: jax.Array,
    w_down: jax.Array,
    group_sizes: jax.Array,
    group_offset: jax.Array,
) -> tuple[jax.Array, Any]:
    shard = group_sizes, group_offset
    return _forward_of_experts(o, rows, weights, (w_gate, w_up, w_down), shard, is_trained=True)


def _forward_of_experts(
    o: _LayerOptions,
    rows: jax.Array,
    weights: jax.Array,
    of_experts: tuple[jax.Array, jax.Array, jax.Array],
    shard: tuple[jax.Array, jax.Array],
    is_trained: bool,
) -> tuple[jax.Array, Any]:
    """The forward pass, and (where it is trained) what the backward pass needs of it."""
    taken, saved_rows = _activations(o, rows, is_trained)
    (of_gate, saved_gate), (of_up, saved_up), (of_down, saved_down) = (
        _weights_of(o, w, is_trained) for w in of_experts
    )
    gate, up = (
        _watched(o, site, _product(o, taken, w, shard, o.between)) for site, w in (("gate", of_gate), ("up", of_up))
    )
    hidden = (weights * jax.nn.silu(gate.astype(jnp.float32)) * up.astype(jnp.float32)).astype(o.between)
    hidden = _watched(o, "hidden", hidden)
    activated, saved_hidden = _activations(o, hidden, is_trained)
    out = _watched(o, "rows", _product(o, activated, of_down, shard, o.dtype))
    named = zip((saved_rows, saved_hidden, (saved_gate, saved_up, saved_down)), QUANTIZED_RESIDUALS, strict=True)
    operands = [checkpoint_name(kept, name) if o.quantize else kept for kept, name in named]
    return out, (*operands, gate, up, weights, shard)


def _experts_bwd(o: _LayerOptions, saved: Any, dout: jax.Array) -> tuple[Any, ...]:
    rows, hidden, (of_gate, of_up, of_down), gate, up, weights, shard = saved
    by_rows, by_columns = _activations(o, dout, True)
    dhidden = _product(o, by_rows, of_down, shard, o.between, transpose_rhs=True)
    dhidden = _watched(o, "dhidden", dhidden).astype(jnp.float32)
    gate, up = gate.astype(jnp.float32), up.astype(jnp.float32)
    sigmoid, silu = jax.nn.sigmoid(gate), jax.nn.silu(gate)
    dweights = _watched(o, "dweights", (dhidden * silu * up).sum(axis=1, keepdims=True))
    dgate = dhidden * weights * up * sigmoid * (1 + gate * (1 - sigmoid))
    dup = dhidden * weights * silu
    (dgate_rows, dgate_columns), (dup_rows, dup_columns) = (
        _activations(o, _watched(o, site, d.astype(o.between)), True) for site, d in (("dgate", dgate), ("dup", dup))
    )
    of_both = ((dgate_rows, of_gate), (dup_rows, of_up))
    through_gate, through_up = (_product(o, d, w, shard, jnp.float32, transpose_rhs=True) for d, w in of_both)
    return (
        _watched(o, "drows", (through_gate + through_up).astype(o.dtype)),
        dweights,
        _weight_gradient(o, rows, dgate_columns, shard, of_gate),
        _weight_gradient(o, rows, dup_columns, shard, of_up),
        _weight_gradient(o, hidden, by_columns, shard, of_down),
        None,
        None,
    )


_experts.defvjp(_experts_fwd, _experts_bwd)


def _activations(o: _LayerOptions, x: jax.Array, is_trained: bool) -> tuple[Quantized, Quantized]:
    """x [M, …] as an operand of products of rows, and (where it is trained) of weights' gradients."""
    if o.quantize is None:
        return Quantized(x, None), Quantized(x, None)
    if o.quantize == "fp8":
        return _dual_quantize(o, x) if is_trained else (_quantize(o, x, 1), Quantized(None, None))
    if not is_trained:
        by_rows = mxfp8_quantize(x, 1, check_finite=False, interpret=o.interpret)
        return Quantized(*by_rows), Quantized(None, None)
    both = mxfp8_dual_quantize(x, check_finite=False, interpret=o.interpret)
    return Quantized(*both[:2]), Quantized(*both[2:])


def _weights_of(o: _LayerOptions, w: jax.Array, is_trained: bool) -> tuple[Quantized, Quantized]:
    """w [G, …] as an operand of products, and (where it is trained) of those with it transposed."""
    if o.quantize is None:
        return Quantized(w, None), Quantized(w, None)
    if o.quantize == "fp8":
        quantized = _quantize(o, w, (1, 2))
        return quantized, quantized
    if not is_trained:
        by_columns = mxfp8_quantize(w, 1, check_finite=False, interpret=o.interpret)
        return Quantized(*by_columns), Quantized(None, None)
    both = mxfp8_dual_quantize(w, check_finite=False, interpret=o.interpret)
    return Quantized(*both[2:]), Quantized(*both[:2])


def _product(
    o: _LayerOptions, lhs: Quantized, rhs: Quantized, shard: Any, dtype: Any, transpose_rhs: bool = False
) -> jax.Array:
    group_sizes, group_offset = shard
    arguments: dict[str, Any] = {
        "group_offset": group_offset,
        "transpose_rhs": transpose_rhs,
        "preferred_element_type": dtype,
        "tiling": o.tiling,
        "interpret": o.interpret,
    }
    if o.quantize == "mxfp8":
        return grouped_gemm(lhs.qvalue, rhs.qvalue, group_sizes, lhs_scale=lhs.scale, rhs_scale=rhs.scale, **arguments)
    return _gmm(lhs, rhs, group_sizes, **arguments)


def _weight_gradient(o: _LayerOptions, lhs: Quantized, rhs: Quantized, shard: Any, of: Quantized) -> jax.Array:
    group_sizes, group_offset = shard
    arguments: dict[str, Any] = {
        "group_offset": group_offset,
        "num_actual_groups": of.qvalue.shape[0],
        "preferred_element_type": o.dtype,
        "tiling": o.tiling,
        "interpret": o.interpret,
    }
    if o.quantize == "mxfp8":
        scales = {"lhs_scale": lhs.scale, "rhs_scale": rhs.scale}
        return grouped_gemm(lhs.qvalue, rhs.qvalue, group_sizes, ragged="contracting", **scales, **arguments)
    return _tgmm(lhs, rhs, group_sizes, **arguments)


def _range_of(values: Any) -> tuple[int, int] | None:
    """The least and the largest of a concrete integer array (None where there is none)."""
    concrete = isinstance(values, jax.Array) and not isinstance(values, jax.core.Tracer)
    return (int(values.min()), int(values.max())) if concrete and values.size and values.dtype.kind == "i" else None
