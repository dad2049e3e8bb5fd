"""The layer of a mixture of SwiGLU experts on the TPU; it is defined in `cpu_golden/moe.py`."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name

from op_arguments.moe import Layer, LayerGrads, LayerOptions, check_expert_parallel, check_layer_dout, check_moe_layer
from op_arguments.mxfp8 import MX_BLOCK
from op_arguments.options import options_of
from op_arguments.permute import permuted_rows
from op_arguments.probe import active, probe, probing
from op_arguments.quantize import Quantized
from tpu_kernels._lib.arguments import Interpret, Shard, as_vector, resolve_interpret, static_scalar
from tpu_kernels._lib.blocks import Scaling
from tpu_kernels._lib.call import jit
from tpu_kernels._lib.exchange import exchange_plans, swap
from tpu_kernels._lib.formats import FORMATS
from tpu_kernels._lib.fused_quantize import Compute, Computed, quantize_computed, tiles_computed
from tpu_kernels._lib.layout import ScaleBlock
from tpu_kernels._lib.pairs import dual_quantized, padded, product, quantized, weight_product
from tpu_kernels._lib.routing import Plan, combine, plan_rows, rows_of, sum_of, take
from tpu_kernels._lib.tiles import Table
from tpu_kernels.grouped_gemm import grouped_gemm_onto
from tpu_kernels.mxfp8 import PowerScales, mxfp8_dual_quantize, mxfp8_quantize
from tpu_kernels.quantize import FloatScales

QUANTIZED_RESIDUALS = ("moe_layer_rows", "moe_layer_hidden", "moe_layer_weights")
"""What `jax.checkpoint` policies call the operands that a quantised `moe_layer` keeps for its backward pass."""


@dataclass(frozen=True, kw_only=True)
class _Options(LayerOptions):
    """As a TPU has them."""

    axis_name: str | None = None
    interpret: Interpret = None


@options_of(_Options)
def moe_layer(
    x: jax.Array,
    w_router: jax.Array,
    w_gate: jax.Array,
    w_up: jax.Array,
    w_down: jax.Array,
    *,
    top_k: int,
    group_offset: int | jax.Array = 0,
    **options: Any,
) -> jax.Array:
    """[T, D]: each token through the top_k SwiGLU experts that its router likes best, weighted; differentiable.

    Arguments, result and errors as `cpu_golden.moe.moe_layer`; the result has x's dtype. options: those of
    `LayerOptions`, axis_name and interpret. Here: with quantize the quantised operands are all that a backward pass
    keeps of them, under the names `QUANTIZED_RESIDUALS`.
    axis_name: expert parallelism, inside `jax.shard_map` (with check_vma=False) over an axis of that name. Each device
    has T of the tokens, in order, w_router whole and G = E / devices of the experts, in order; rows travel by
    all-to-all in buffers for the worst case. Results are those of one device with all tokens and experts within the
    contract, not to the bit: XLA may sum the router's dot otherwise for other sizes, sums over rows in gradients of
    weights have another order, and other rows share a scale where they are quantised.
    Sites shown to a probe: what the matmuls hand on in either pass, logits, weights and the parts of x's gradient.
    """
    primals = Primals(x, w_router, w_gate, w_up, w_down)
    o, offset = _checked(primals, group_offset, _Options(top_k=top_k, **options))
    return _layer(primals, offset, o=o)


@options_of(_Options)
def moe_layer_bwd(
    x: jax.Array,
    w_router: jax.Array,
    w_gate: jax.Array,
    w_up: jax.Array,
    w_down: jax.Array,
    dout: jax.Array,
    *,
    top_k: int,
    group_offset: int | jax.Array = 0,
    **options: Any,
) -> LayerGrads:
    """The gradients of `moe_layer` in all five of its arrays, as `jax.vjp` gives them, for a gradient dout [T, D].

    In the dtypes of the primals; zero for experts without rows. With axis_name w_router's is the part of this device's
    tokens. All else as `moe_layer`.
    """
    primals = Primals(x, w_router, w_gate, w_up, w_down)
    o, offset = _checked(primals, group_offset, _Options(top_k=top_k, **options))
    check_layer_dout(dout, x)
    _, backward = jax.vjp(lambda primals: _layer(primals, offset, o=o), primals)
    (grads,) = backward(dout)
    return LayerGrads(*grads)


class Primals(NamedTuple):
    """What a `moe_layer` is differentiable in."""

    x: jax.Array
    w_router: jax.Array
    w_gate: jax.Array
    w_up: jax.Array
    w_down: jax.Array


@dataclass(frozen=True, kw_only=True)
class _Static(_Options):
    """All that is static in a checked `moe_layer`."""

    dtype: Any  # of x and the experts' weights

    @property
    def between(self) -> Any:
        """The dtype of what one matmul hands to the next."""
        return self.dtype if self.quantize is None else jnp.dtype("float32")


def _checked(primals: Primals, group_offset: int | jax.Array, o: _Options) -> tuple[_Static, jax.Array]:
    group_offset = static_scalar(group_offset)
    layer = check_moe_layer(*primals, o, group_offset)
    tiling: Any = o.tiling
    if o.axis_name is not None:
        check_expert_parallel(layer, lax.axis_size(o.axis_name), group_offset)
    elif callable(tiling):
        tiling = Table.of(tiling, _shapes(layer, o))
    resolved = {"tiling": tiling, "interpret": resolve_interpret(o.interpret, primals.x), "dtype": primals.x.dtype}
    return _Static(**vars(o) | resolved), as_vector(group_offset, layer.experts - layer.groups)


def _shapes(layer: Layer, o: _Options) -> list[tuple[int, int, int]]:
    """(m, k, n) of every matmul of the experts, in both passes. By columns fp8 has rows up to a multiple of a block."""
    rows = permuted_rows(layer.tokens, o.top_k, layer.experts, o.capacity)
    block = o.block_size if o.quantize == "fp8" and o.block_size else 1
    sizes = (layer.hidden, layer.intermediate)
    return [(m, *of_weights) for m in {rows, rows + -rows % block} for of_weights in (sizes, sizes[::-1])]


@jit("o")
def _layer(primals: Primals, group_offset: jax.Array, *, o: _Static) -> jax.Array:
    if o.sanitize_grads:
        primals = Primals(*(_sanitized(primal) for primal in primals))
    x, w_router, *of_experts = primals
    experts = Experts(*of_experts)
    weights, indices = _route(o, _watched(None, x, "drouter"), w_router)
    x = _watched(None, x, "dexperts")
    num_experts = w_router.shape[1]
    if o.axis_name is None:
        plan = plan_rows(indices, num_experts, o.capacity, permuted_rows(x.shape[0], o.top_k, num_experts, o.capacity))
        of_rows = take(weights.reshape(-1, 1), plan.places.of_choices)
        return _through(o, x, of_rows, experts, plan, group_offset)
    sent, received = exchange_plans(o.axis_name, indices, num_experts, o.capacity)
    rows, of_rows = take(x, sent.places), take(weights.reshape(-1, 1), sent.places.of_choices)
    rows, of_rows = (swap(t, o.axis_name) for t in (rows, of_rows))
    out = _through(o, rows, take(of_rows, received.places), experts, received, group_offset)
    return combine(swap(out, o.axis_name), None, sent.places)


def _route(o: _Static, x: jax.Array, w_router: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The weights [T, k] float32 of each token's experts, and which these are."""
    logits = jnp.dot(x.astype(jnp.float32), w_router.astype(jnp.float32), precision=lax.Precision.HIGHEST)
    logits = _watched("logits", logits, "dlogits")
    _, indices = lax.top_k(lax.stop_gradient(logits), o.top_k)
    if o.renormalize:
        weights = _softmax(jnp.take_along_axis(logits, indices, axis=1))
    else:
        weights = jnp.take_along_axis(_softmax(logits), indices, axis=1)
    return _watched("weights", weights), indices


@jax.custom_vjp
def _softmax(logits: jax.Array) -> jax.Array:
    """Of each row. What JAX computes of its gradient differs between versions and settings, and errs by more."""
    return jax.nn.softmax(logits)


def _softmax_fwd(logits: jax.Array) -> tuple[jax.Array, jax.Array]:
    weights = _softmax(logits)
    return weights, weights


def _softmax_bwd(weights: jax.Array, grad: jax.Array) -> tuple[jax.Array]:
    of_chosen = weights * grad
    return (of_chosen - weights * of_chosen.sum(axis=1, keepdims=True),)


_softmax.defvjp(_softmax_fwd, _softmax_bwd)


def _watched(site: str | None, x: jax.Array, gradient: str | None = None) -> jax.Array:
    """x, shown to the probe as what is at a site, and its gradient as what is at another."""
    return x if active() is None else _shown(site, gradient, x)


@partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _shown(site: str | None, gradient: str | None, x: jax.Array) -> Any:
    return x if site is None else probe(site, x)


def _shown_fwd(site: str | None, gradient: str | None, x: jax.Array) -> tuple[Any, None]:
    return _shown(site, gradient, x), None


def _shown_bwd(site: str | None, gradient: str | None, _: None, grad: jax.Array) -> Any:
    return (grad if gradient is None else probe(gradient, grad),)


_shown.defvjp(_shown_fwd, _shown_bwd)


@jax.custom_vjp
def _sanitized(x: jax.Array) -> jax.Array:
    """x, whose gradient is zero wherever it would not be finite."""
    return x


_sanitized.defvjp(lambda x: (x, None), lambda _, grad: (jnp.where(jnp.isfinite(grad), grad, jnp.zeros_like(grad)),))


# --------------------------------------------------------------------------------------------------- the experts


class Experts(NamedTuple):
    """The weights of the experts: w_gate, w_up [G, D, F] and w_down [G, F, D], or what they are as operands."""

    gate: Any
    up: Any
    down: Any


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _through(
    o: _Static, x: jax.Array, weights: jax.Array, experts: Experts, plan: Plan, group_offset: jax.Array
) -> jax.Array:
    """x [N, D] through the experts that it goes to by the plan, times the rows' weights [M, 1], and summed: [N, D]."""
    return _forward(o, x, weights, experts, plan, group_offset, is_trained=False)[0]


def _fwd(
    o: _Static, x: jax.Array, weights: jax.Array, experts: Experts, plan: Plan, group_offset: jax.Array
) -> tuple[jax.Array, Any]:
    return _forward(o, x, weights, experts, plan, group_offset, is_trained=True)


def _forward(
    o: _Static,
    x: jax.Array,
    weights: jax.Array,
    experts: Experts,
    plan: Plan,
    group_offset: jax.Array,
    is_trained: bool,
) -> tuple[jax.Array, Any]:
    """The forward pass, and (where it is trained) what the backward pass needs of it."""
    shard = Shard(plan.group_sizes, group_offset)
    taken, saved_rows = _taken(o, x, plan, is_trained)
    (of_gate, saved_gate), (of_up, saved_up), (of_down, saved_down) = (_weights_of(o, w, is_trained) for w in experts)
    gate, up = (
        _watched(site, _product(o, taken, w, shard, o.between)) for site, w in (("gate", of_gate), ("up", of_up))
    )
    ((activated, saved_hidden),), _ = _computed(o, _hidden, ("hidden",), weights, gate, up, is_trained=is_trained)
    out = _watched("rows", _product(o, activated, of_down, shard, o.dtype))
    named = zip((saved_rows, saved_hidden, Experts(saved_gate, saved_up, saved_down)), QUANTIZED_RESIDUALS, strict=True)
    operands = [checkpoint_name(kept, name) if o.quantize else kept for kept, name in named]
    return sum_of(out, None, plan.places), (*operands, gate, up, weights, plan, shard)


def _bwd(o: _Static, saved: Any, dout: jax.Array) -> tuple[Any, ...]:
    rows, hidden, experts, gate, up, weights, plan, shard = saved
    by_rows, by_columns = _taken(o, dout, plan, True)
    dhidden = _product(o, by_rows, experts.down, shard, o.between, transpose_rhs=True)
    dhidden = _watched("dhidden", dhidden)
    ((dgate_rows, dgate_columns), (dup_rows, dup_columns)), dweights = _computed(
        o, _gradients, ("dgate", "dup"), weights, gate, up, dhidden, is_trained=True
    )
    dweights = _watched("dweights", dweights)
    through_gate = _product(o, dgate_rows, experts.gate, shard, jnp.float32, transpose_rhs=True)
    drows = _product(o, dup_rows, experts.up, shard, o.dtype, transpose_rhs=True, addend=through_gate)
    drows = _watched("drows", drows)
    return (
        sum_of(drows, None, plan.places),
        dweights,
        Experts(
            _weight_gradient(o, rows, dgate_columns, shard, experts.gate),
            _weight_gradient(o, rows, dup_columns, shard, experts.up),
            _weight_gradient(o, hidden, by_columns, shard, experts.down),
        ),
        None,
        None,
    )


_through.defvjp(_fwd, _bwd)


@probing(None)  # the layer has no sites within its quantisers and matmuls
def _taken(o: _Static, x: jax.Array, plan: Plan, is_trained: bool) -> tuple[Quantized, Quantized]:
    """The rows of x by the plan, as `_activations` of them: quantised before there are several of each where that is
    the same, so for scales of one row or, by columns, of all."""
    copied = partial(rows_of, places=plan.places)
    if o.quantize is None:
        rows = Quantized(copied(x), None)
        return rows, rows
    by_rows = Quantized(*map(copied, _by_rows(o, x)))
    if not is_trained:
        return by_rows, Quantized(None, None)
    if o.quantize == "fp8" and o.block_size is None:
        is_taken = (plan.places.slots >= 0).any(axis=1, keepdims=True)  # all are where there is no capacity
        qvalue, scale = _by_columns(o, x if o.capacity is None else jnp.where(is_taken, x, jnp.zeros_like(x)))
        return by_rows, Quantized(copied(qvalue), scale)
    return by_rows, _by_columns(o, copied(x))


def _hidden(weights: jax.Array, gate: jax.Array, up: jax.Array) -> Computed:
    """What the experts' last matmul multiplies."""
    return Computed((weights * jax.nn.silu(gate) * up,))


def _gradients(weights: jax.Array, gate: jax.Array, up: jax.Array, dhidden: jax.Array) -> Computed:
    """The gradients of gate and up, and what is summed up to those of weights."""
    sigmoid, silu = jax.nn.sigmoid(gate), jax.nn.silu(gate)
    dgate = dhidden * weights * up * sigmoid * (1 + gate * (1 - sigmoid))
    dup = dhidden * weights * silu
    return Computed((dgate, dup), dhidden * silu * up)


def _computed(
    o: _Static, compute: Compute, sites: Sequence[str], weights: jax.Array, *arrays: jax.Array, is_trained: bool
) -> tuple[list[tuple[Quantized, Quantized]], Any]:
    """`_activations` of the results of `compute`, and sums [M, 1] of its terms, if any. weights [M, 1], arrays [M, F].

    They are quantised where they are computed, if tiles allow and no probe asks for what is at the `sites`.
    """
    blocks, scaling = _ways(o, arrays[0].shape, is_trained)
    tiles = tiles_computed(compute, arrays, blocks, scaling) if o.quantize and active() is None else None
    if tiles is not None:
        how: Any = {"blocks": blocks, "scaling": scaling, "tiles": tiles, "interpret": o.interpret}
        quantized, of_rows = quantize_computed(weights[:, 0], *arrays, compute=compute, **how)
        return [(ways[0], ways[1] if is_trained else Quantized(None, None)) for ways in quantized], of_rows[:, None]
    computed = compute(weights, *(x.astype(jnp.float32) for x in arrays))
    shown = [_watched(site, x.astype(o.between)) for site, x in zip(sites, computed.arrays, strict=True)]
    sums = None if computed.terms is None else computed.terms.sum(axis=1, keepdims=True)
    return [_activations(o, x, is_trained) for x in shown], sums


def _ways(o: _Static, shape: tuple[int, ...], is_trained: bool) -> tuple[tuple[ScaleBlock, ...], Scaling]:
    """The blocks of activations [M, F] by rows, and (where it is trained) by columns, and their scales."""
    target, block = FORMATS["float8_e4m3fn"], MX_BLOCK if o.quantize == "mxfp8" else o.block_size
    scaling: Scaling = PowerScales(target, "up") if o.quantize == "mxfp8" else FloatScales(target)
    by_rows, by_columns = (1, block or shape[1]), (block or shape[0], 1)
    return (by_rows, by_columns)[: 1 + is_trained], scaling


@probing(None)
def _activations(o: _Static, x: jax.Array, is_trained: bool) -> tuple[Quantized, Quantized]:
    """x [M, …] as an operand of products of rows, and (where it is trained) of weights' gradients."""
    if o.quantize is None:
        return Quantized(x, None), Quantized(x, None)
    if not is_trained:
        return _by_rows(o, x), Quantized(None, None)
    if o.quantize == "fp8":
        return dual_quantized(x, o.block_size, o.interpret)
    both = mxfp8_dual_quantize(x, check_finite=False, interpret=o.interpret)
    return Quantized(*both[:2]), Quantized(*both[2:])


def _by_rows(o: _Static, x: jax.Array) -> Quantized:
    if o.quantize == "fp8":
        return quantized(x, 1, o.block_size, o.interpret)
    return mxfp8_quantize(x, 1, check_finite=False, interpret=o.interpret)


def _by_columns(o: _Static, x: jax.Array) -> Quantized:
    if o.quantize == "fp8":
        return quantized(padded(x, o.block_size), 0, o.block_size, o.interpret)
    return mxfp8_quantize(x, 0, check_finite=False, interpret=o.interpret)


@probing(None)
def _weights_of(o: _Static, w: jax.Array, is_trained: bool) -> tuple[Quantized, Quantized]:
    """w [G, …] as an operand of products, and (where it is trained) of those with it transposed."""
    if o.quantize is None:
        return Quantized(w, None), Quantized(w, None)
    if o.quantize == "fp8":
        both_ways = quantized(w, (1, 2), o.block_size, o.interpret)
        return both_ways, both_ways
    if not is_trained:
        return mxfp8_quantize(w, 1, check_finite=False, interpret=o.interpret), Quantized(None, None)
    both = mxfp8_dual_quantize(w, check_finite=False, interpret=o.interpret)
    return Quantized(*both[2:]), Quantized(*both[:2])


@probing(None)
def _product(o: _Static, lhs: Quantized, rhs: Quantized, shard: Shard, dtype: Any, **arguments: Any) -> jax.Array:
    arguments |= {
        "preferred_element_type": dtype,
        "tiling": o.tiling,
        "interpret": o.interpret,
    }
    multiply = _mxfp8_product if o.quantize == "mxfp8" else product
    return multiply(lhs, rhs, shard, **arguments)


@probing(None)
def _weight_gradient(o: _Static, lhs: Quantized, rhs: Quantized, shard: Shard, of: Quantized) -> jax.Array:
    arguments: dict[str, Any] = {
        "num_actual_groups": of.qvalue.shape[0],
        "preferred_element_type": o.dtype,
        "tiling": o.tiling,
        "interpret": o.interpret,
    }
    if o.quantize == "mxfp8":
        return _mxfp8_product(lhs, rhs, shard, ragged="contracting", **arguments)
    return weight_product(lhs, rhs, shard, **arguments)


def _mxfp8_product(
    lhs: Quantized, rhs: Quantized, shard: Shard, addend: jax.Array | None = None, **arguments: Any
) -> jax.Array:
    arguments |= {"lhs_scale": lhs.scale, "rhs_scale": rhs.scale, "group_offset": shard.group_offset}
    return grouped_gemm_onto(addend, lhs.qvalue, rhs.qvalue, shard.group_sizes, **arguments)
