"""A layer of a mixture of experts: the definition, in float64."""

from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np

from cpu_golden import Array
from cpu_golden._lib.arguments import scalar
from cpu_golden._lib.pairs import by_columns, by_rows, product, weight_product, weights
from cpu_golden._lib.permutation import permutation, take_rows
from cpu_golden.grouped_gemm import grouped_gemm
from cpu_golden.mxfp8 import mxfp8_quantize
from cpu_golden.permute import unpermute
from cpu_golden.stages import Stages, exact, tree_sum
from op_arguments.moe import Layer, LayerGrads, LayerOptions, check_layer_dout, check_moe_layer
from op_arguments.options import options_of
from op_arguments.permute import permuted_rows
from op_arguments.quantize import Quantized


@dataclass(frozen=True, kw_only=True)
class _Options(LayerOptions):
    """As a golden has them."""

    group_offset: int = 0
    stages: Stages = exact


class _Experts(NamedTuple):
    """The weights of the experts: w_gate, w_up [G, D, F] and w_down [G, F, D]."""

    gate: Array
    up: Array
    down: Array


@options_of(_Options)
def moe_layer(
    x: Array, w_router: Array, w_gate: Array, w_up: Array, w_down: Array, *, top_k: int, **options: Any
) -> Array:
    """A layer of SwiGLU experts, of which each token goes to the top_k that its router likes best.

    `out[t] = Σ_j weights[t, j] · (silu(x[t] @ w_gate[e]) · (x[t] @ w_up[e])) @ w_down[e]` with e = indices[t, j].

    x [T, D]; w_gate, w_up [G, D, F] and w_down [G, F, D] of x's dtype (float32, bfloat16 or float16); w_router [D, E]
    float32, bfloat16 or float16, all finite as x must be. Returns [T, D]: x's dtype, float64 here.
    options: those of `LayerOptions`, group_offset and stages.
    Routing: logits x @ w_router in float32; the top_k largest, of equal ones the lower expert first, and NaN before all
    others, so that it is not lost; weights are their softmax. The weights enter before the last matmul, which is
    linear: their gradient then needs no more than a product of what the backward pass has anyway.
    The G experts are those from group_offset on of the router's E: a choice of any other contributes nothing, so that
    the layers of all shards sum up to the whole.
    Gradients are those of the operands as they are quantised. What a matmul hands to the next one is then float32, so
    that each is rounded once; else it has x's dtype.
    Stages: depth, and router_depth and router_passes of the router's matmuls, which are of float32 whatever the others
    are.
    Sites: logits; below, grown, total, inverse and weights (of the softmax: logits less the largest, their exp, its
    sum, one over that); gate, up and hidden (what the matmuls hand on), sigmoid, silu, factor (a part of a product),
    rows (of the last matmul), those of the matmuls and of `unpermute`.
    Raises TypeError for a wrong type or dtype, ValueError for a wrong shape or value.
    """
    o = _Options(top_k=top_k, **options)
    layer = check_moe_layer(x, w_router, w_gate, w_up, w_down, o, scalar(o.group_offset), exact=True)
    routed = _route(o, layer, x, w_router)
    return unpermute(_forward(o, x, routed, _Experts(w_gate, w_up, w_down)).rows, routed.slots, stages=o.stages)


@options_of(_Options)
def moe_layer_bwd(
    x: Array, w_router: Array, w_gate: Array, w_up: Array, w_down: Array, dout: Array, *, top_k: int, **options: Any
) -> LayerGrads:
    """The gradients of `moe_layer` in all five of its arrays, for a gradient dout [T, D] of its result.

    Float64, shaped as the primals; zero for experts without rows. All else as `moe_layer`.
    Sites: dhidden, dgate and dup (what the matmuls hand on), dterms and dweights (what is summed for each row, and the
    sums in pairs), slope, dchosen, dmean, dshared and dlogits (of the softmax); drows (of each row), dexperts (their
    sum for a token) and drouter, the two parts of x's gradient; those of the matmuls and of `unpermute`.
    """
    o = _Options(top_k=top_k, **options)
    layer = check_moe_layer(x, w_router, w_gate, w_up, w_down, o, scalar(o.group_offset), exact=True)
    check_layer_dout(dout, x, exact=True)
    routed = _route(o, layer, x, w_router)
    with np.errstate(over="ignore", invalid="ignore"):
        grads = _backward(o, x, w_router, _Experts(w_gate, w_up, w_down), routed, dout)
    if o.sanitize_grads:
        return LayerGrads(*(np.where(np.isfinite(grad), grad, 0.0) for grad in grads))
    return grads


class _Routed(NamedTuple):
    """Where tokens go: indices and weights [T, k], their `permutation`, and the softmax over all experts."""

    indices: Array
    weights: Array
    likelihoods: Array  # [T, E]
    source: Array
    slots: Array
    group_sizes: Array


def _route(o: _Options, layer: Layer, x: Array, w_router: Array) -> _Routed:
    logits = o.stages("logits", _dot(o, x, w_router))
    order = np.lexsort((-logits, ~np.isnan(logits)), axis=1)
    indices = order[:, : o.top_k].astype(np.int32)
    chosen = np.take_along_axis(logits, indices, axis=1)
    likelihoods = _softmax(logits, o.stages)
    weights = _softmax(chosen, o.stages) if o.renormalize else np.take_along_axis(likelihoods, indices, axis=1)
    rows = permuted_rows(layer.tokens, o.top_k, layer.experts, o.capacity)
    plan = permutation(indices, layer.experts, o.capacity, rows)
    return _Routed(indices, weights, likelihoods, *plan)


class _Passed(NamedTuple):
    """What the forward pass computes for each row of an expert."""

    taken: Array  # x's rows, permuted
    weights: Array  # [M, 1]
    gate: Array
    up: Array
    hidden: Array
    rows: Array


def _forward(o: _Options, x: Array, routed: _Routed, experts: _Experts) -> _Passed:
    taken = take_rows(x, routed.source, o.top_k)
    weights = np.append(routed.weights.ravel(), 0.0)[routed.source][:, None]
    gate, up = (_product(o, routed, taken, w, site) for w, site in ((experts.gate, "gate"), (experts.up, "up")))
    hidden = o.stages("hidden", _times(o.stages, weights, _silu(gate, _sigmoid(gate, o.stages), o.stages), up))
    return _Passed(taken, weights, gate, up, hidden, _product(o, routed, hidden, experts.down, "rows"))


def _backward(o: _Options, x: Array, w_router: Array, experts: _Experts, routed: _Routed, dout: Array) -> LayerGrads:
    passed = _forward(o, x, routed, experts)
    drows = take_rows(dout, routed.source, o.top_k)
    dhidden = _product(o, routed, drows, experts.down, "dhidden", transpose_rhs=True)
    sigmoid = _sigmoid(passed.gate, o.stages)
    silu = _silu(passed.gate, sigmoid, o.stages)
    terms = o.stages("dterms", _times(o.stages, dhidden, silu, passed.up))
    dweights = tree_sum(terms, o.stages.renamed(sum="dweights"))[:, 0]
    slope = o.stages("slope", 1 + o.stages("factor", passed.gate * o.stages("factor", 1 - sigmoid)))
    dgate = o.stages("dgate", _times(o.stages, dhidden, passed.weights, passed.up, sigmoid, slope))
    dup = o.stages("dup", _times(o.stages, dhidden, passed.weights, silu))
    of_both = ((dgate, experts.gate), (dup, experts.up))
    through_gate, through_up = (_product(o, routed, d, w, "dtaken", transpose_rhs=True) for d, w in of_both)
    dtaken = o.stages("drows", through_gate + through_up)
    dexperts = o.stages("dexperts", unpermute(dtaken, routed.slots, stages=o.stages.renamed(out="sum")))
    dlogits = o.stages("dlogits", _route_bwd(o, routed, np.append(dweights, 0.0)[routed.slots]))
    drouter = o.stages("drouter", _dot(o, dlogits, w_router.T))
    return LayerGrads(
        o.stages("out", dexperts + drouter),
        o.stages("out", _dot(o, x.T, dlogits)),
        _weight_gradient(o, routed, passed.taken, dgate, len(experts.gate)),
        _weight_gradient(o, routed, passed.taken, dup, len(experts.up)),
        _weight_gradient(o, routed, passed.hidden, drows, len(experts.down)),
    )


def _route_bwd(o: _Options, routed: _Routed, dweights: Array) -> Array:
    """The gradient of the logits [T, E] for that of the weights [T, k]: of a softmax over the chosen, or over all."""
    of_chosen = o.stages("dchosen", routed.weights * dweights)
    mean = o.stages("dmean", of_chosen.sum(axis=1, keepdims=True))
    dlogits = np.zeros(routed.likelihoods.shape)
    if o.renormalize:
        np.put_along_axis(dlogits, routed.indices, of_chosen - o.stages("dshared", routed.weights * mean), axis=1)
        return dlogits
    np.put_along_axis(dlogits, routed.indices, of_chosen, axis=1)
    return dlogits - o.stages("dshared", routed.likelihoods * mean)


def _dot(o: _Options, a: Array, b: Array) -> Array:
    """a @ b of the router, summed in its own steps or else in those of the other matmuls."""
    depth, passes = o.stages.router_depth or o.stages.depth, o.stages.router_passes or o.stages.passes
    stages = replace(o.stages, depth=depth, passes=passes)
    return stages.dot(a.astype(np.float64), b.astype(np.float64))


def _product(o: _Options, routed: _Routed, lhs: Array, rhs: Array, site: str, transpose_rhs: bool = False) -> Array:
    """Rows of each group times that group's weights, both quantised where that is asked for."""
    stages = o.stages if site == "rows" else replace(o.stages, narrow=None)  # the others' results are float32
    arguments = _shared(o, stages.renamed(out=site)) | {"transpose_rhs": transpose_rhs}
    if o.quantize == "mxfp8":
        a = mxfp8_quantize(_single(lhs), 1, check_finite=False)
        b = mxfp8_quantize(rhs, 2 if transpose_rhs else 1, check_finite=False)
        return _mxfp8_product(routed, a, b, **arguments)
    a, b = Quantized(lhs, None), Quantized(rhs, None)
    if o.quantize == "fp8":
        a, b = by_rows(_single(lhs), o.block_size), weights(rhs, o.block_size)
    return product(a, b, routed.group_sizes, **arguments)


def _weight_gradient(o: _Options, routed: _Routed, lhs: Array, rhs: Array, groups: int) -> Array:
    """lhs.T @ rhs over the rows of each group, both quantised by columns where that is asked for."""
    arguments = _shared(o, o.stages) | {"num_actual_groups": groups}
    if o.quantize == "mxfp8":
        a, b = (mxfp8_quantize(_single(x), 0, check_finite=False) for x in (lhs, rhs))
        return _mxfp8_product(routed, a, b, ragged="contracting", **arguments)
    a, b = Quantized(lhs, None), Quantized(rhs, None)
    if o.quantize == "fp8":
        a, b = (by_columns(_single(x), o.block_size) for x in (lhs, rhs))
    return weight_product(a, b, routed.group_sizes, **arguments)


def _mxfp8_product(routed: _Routed, lhs: Quantized, rhs: Quantized, **arguments: Any) -> Array:
    scales = {"lhs_scale": lhs.scale, "rhs_scale": rhs.scale}
    return grouped_gemm(lhs.qvalue, rhs.qvalue, routed.group_sizes, **scales, **arguments)


def _shared(o: _Options, stages: Stages) -> dict[str, Any]:
    """What every matmul of the experts is given."""
    out = None if o.quantize is None else "float32"
    return {"group_offset": o.group_offset, "preferred_element_type": out, "tiling": o.tiling, "stages": stages}


def _single(x: Array) -> Array:
    """What is quantised: a float64 intermediate in float32, as it is handed on; anything else as it is."""
    return x.astype(np.float32) if x.dtype == np.float64 else x


def _softmax(x: Array, stages: Stages) -> Array:
    grown = stages("grown", np.exp(stages("below", x - x.max(axis=1, keepdims=True, initial=-np.inf))))
    inverse = stages("inverse", 1 / stages("total", grown.sum(axis=1, keepdims=True)))
    return stages("weights", grown * inverse)


def _sigmoid(x: Array, stages: Stages) -> Array:
    with np.errstate(over="ignore"):
        return stages("sigmoid", 1 / (1 + np.exp(-x)))


def _silu(x: Array, sigmoid: Array, stages: Stages) -> Array:
    with np.errstate(invalid="ignore"):
        return stages("silu", x * sigmoid)


def _times(stages: Stages, product: Array, *factors: Array) -> Array:
    """The product of all, from the left; each but the whole is at the site factor."""
    *first, last = factors
    for factor in first:
        product = stages("factor", product * factor)
    return product * last
