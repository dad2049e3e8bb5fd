"""A layer of a mixture of experts: the definition, in float64."""

from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np

from cpu_golden import Array
from cpu_golden._lib.arguments import scalar
from cpu_golden._lib.fp8 import by_columns, by_rows, weights
from cpu_golden._lib.permutation import permutation, take_rows
from cpu_golden.gmm import gmm, tgmm
from cpu_golden.grouped_gemm import grouped_gemm
from cpu_golden.mxfp8 import mxfp8_quantize
from cpu_golden.permute import unpermute
from cpu_golden.quantized_gmm import gmm_quantized, tgmm_quantized
from cpu_golden.stages import Stages, exact
from op_arguments import Tiling
from op_arguments.moe import Layer, LayerGrads, check_layer_dout, check_moe_layer
from op_arguments.permute import permuted_rows


def moe_layer(
    x: Array,
    w_router: Array,
    w_gate: Array,
    w_up: Array,
    w_down: Array,
    *,
    top_k: int,
    quantize: str | None = None,
    block_size: int | None = 128,
    capacity: int | None = None,
    renormalize: bool = True,
    group_offset: int = 0,
    sanitize_grads: bool = False,
    tiling: Tiling | None = None,
    stages: Stages = exact,
) -> Array:
    """A layer of SwiGLU experts, of which each token goes to the top_k that its router likes best.

    `out[t] = Σ_j weights[t, j] · (silu(x[t] @ w_gate[e]) · (x[t] @ w_up[e])) @ w_down[e]` with e = indices[t, j].

    x [T, D]; w_gate, w_up [G, D, F] and w_down [G, F, D] of x's dtype (float32, bfloat16 or float16); w_router [D, E]
    float32, bfloat16 or float16, all finite as x must be. Returns [T, D]: x's dtype, float64 here.
    Routing: logits x @ w_router in float32; the top_k largest, of equal ones the lower expert first; weights are their
    softmax, over the top_k chosen with renormalize (Mixtral, Qwen3), else over all E.
    capacity: rows that an expert takes at most. Of the tokens of an expert the later ones are dropped beyond it: their
    choice contributes nothing, and the weights of their other choices stay what they were.
    The G experts are those from group_offset on of the router's E: a choice of any other contributes nothing, so that
    the layers of all shards sum up to the whole.
    quantize: the operands of the matmuls of both passes in e4m3; "fp8": rows with a float32 scale per `block_size`
    elements, weights per block_size x block_size of them (None: whole axes; it must divide D and F), as
    `grouped_dense`; "mxfp8": with a power of two per 32, of any D and F, as `mxfp8_quantize`. Gradients are those of
    the quantised operands. What a matmul hands to the next one is then float32, so that each is rounded once; else it
    has x's dtype.
    The weights enter before the last matmul, which is linear: their gradient then needs no more than a product of what
    the backward pass has anyway. sanitize_grads: zero in place of every gradient that is NaN or infinite; by default
    they propagate. tiling: (tm, tk, tn) of every matmul of the experts, or a look-up (m, k, n) -> (tm, tk, tn); it is
    checked as kernels do, and otherwise theirs alone.
    Stages: depth, and router_depth of the router's matmuls, which are of float32 whatever the others are.
    Sites: logits, weights; gate, up and hidden (what the matmuls hand on), rows (of the last matmul), those of the
    matmuls and of `unpermute`.
    Raises TypeError for a wrong type or dtype, ValueError for a wrong shape or value.
    """
    o = _options(x, w_router, w_gate, w_up, w_down, top_k, quantize, block_size, capacity, renormalize, group_offset,
                 tiling, stages)  # fmt: skip
    routed = _route(o, x, w_router)
    return unpermute(_experts(o, x, routed, w_gate, w_up, w_down).rows, routed.slots, stages=stages)


def moe_layer_bwd(
    x: Array,
    w_router: Array,
    w_gate: Array,
    w_up: Array,
    w_down: Array,
    dout: Array,
    *,
    top_k: int,
    quantize: str | None = None,
    block_size: int | None = 128,
    capacity: int | None = None,
    renormalize: bool = True,
    group_offset: int = 0,
    sanitize_grads: bool = False,
    tiling: Tiling | None = None,
    stages: Stages = exact,
) -> LayerGrads:
    """The gradients of `moe_layer` in all five of its arrays, for a gradient dout [T, D] of its result.

    Float64, shaped as the primals; zero for experts without rows. All else as `moe_layer`.
    Sites: dhidden, dgate and dup (what the matmuls hand on), dweights, dlogits; drows (of each row), dexperts (their
    sum for a token) and drouter, the two parts of x's gradient; those of the matmuls and of `unpermute`.
    """
    o = _options(x, w_router, w_gate, w_up, w_down, top_k, quantize, block_size, capacity, renormalize, group_offset,
                 tiling, stages)  # fmt: skip
    check_layer_dout(dout, x, exact=True)
    routed = _route(o, x, w_router)
    with np.errstate(over="ignore", invalid="ignore"):
        grads = _backward(o, x, w_router, w_gate, w_up, w_down, routed, dout)
    if sanitize_grads:
        return LayerGrads(*(np.where(np.isfinite(grad), grad, 0.0) for grad in grads))
    return grads


class _Options(NamedTuple):
    """A checked `moe_layer` without its arrays."""

    layer: Layer
    top_k: int
    quantize: str | None
    block_size: int | None
    capacity: int | None
    renormalize: bool
    group_offset: int
    tiling: Tiling | None
    stages: Stages


def _options(
    x: Array,
    w_router: Array,
    w_gate: Array,
    w_up: Array,
    w_down: Array,
    top_k: int,
    quantize: str | None,
    block_size: int | None,
    capacity: int | None,
    renormalize: bool,
    group_offset: Any,
    tiling: Tiling | None,
    stages: Stages,
) -> _Options:
    offset = scalar(group_offset)
    layer = check_moe_layer(
        x, w_router, w_gate, w_up, w_down, top_k, quantize, block_size, capacity, offset, exact=True
    )
    return _Options(layer, top_k, quantize, block_size, capacity, renormalize, offset, tiling, stages)


class _Routed(NamedTuple):
    """Where tokens go: indices and weights [T, k], their `permutation`, and the softmax over all experts."""

    indices: Array
    weights: Array
    likelihoods: Array  # [T, E]
    source: Array
    slots: Array
    group_sizes: Array


def _route(o: _Options, x: Array, w_router: Array) -> _Routed:
    logits = o.stages("logits", _dot(o, x, w_router))
    indices = np.argsort(-logits, axis=1, kind="stable")[:, : o.top_k].astype(np.int32)
    chosen = np.take_along_axis(logits, indices, axis=1)
    likelihoods = _softmax(logits)
    weights = _softmax(chosen) if o.renormalize else np.take_along_axis(likelihoods, indices, axis=1)
    rows = permuted_rows(o.layer.tokens, o.top_k, o.layer.experts, o.capacity)
    plan = permutation(indices, o.layer.experts, o.capacity, rows)
    return _Routed(indices, o.stages("weights", weights), likelihoods, *plan)


class _Passed(NamedTuple):
    """What the forward pass computes for each row of an expert."""

    taken: Array  # x's rows, permuted
    weights: Array  # [M, 1]
    gate: Array
    up: Array
    hidden: Array
    rows: Array


def _experts(o: _Options, x: Array, routed: _Routed, w_gate: Array, w_up: Array, w_down: Array) -> _Passed:
    taken = take_rows(x, routed.source, o.top_k)
    weights = np.append(routed.weights.ravel(), 0.0)[routed.source][:, None]
    gate, up = (_product(o, routed, taken, w, site) for w, site in ((w_gate, "gate"), (w_up, "up")))
    hidden = o.stages("hidden", weights * _silu(gate) * up)
    return _Passed(taken, weights, gate, up, hidden, _product(o, routed, hidden, w_down, "rows"))


def _backward(
    o: _Options,
    x: Array,
    w_router: Array,
    w_gate: Array,
    w_up: Array,
    w_down: Array,
    routed: _Routed,
    dout: Array,
) -> LayerGrads:
    passed = _experts(o, x, routed, w_gate, w_up, w_down)
    drows = take_rows(dout, routed.source, o.top_k)
    dhidden = _product(o, routed, drows, w_down, "dhidden", transpose_rhs=True)
    sigmoid, silu = _sigmoid(passed.gate), _silu(passed.gate)
    dweights = o.stages("dweights", (dhidden * silu * passed.up).sum(axis=1))
    dgate = o.stages("dgate", dhidden * passed.weights * passed.up * sigmoid * (1 + passed.gate * (1 - sigmoid)))
    dup = o.stages("dup", dhidden * passed.weights * silu)
    of_both = ((dgate, w_gate), (dup, w_up))
    through_gate, through_up = (_product(o, routed, d, w, "dtaken", transpose_rhs=True) for d, w in of_both)
    dtaken = o.stages("drows", through_gate + through_up)
    dexperts = o.stages("dexperts", unpermute(dtaken, routed.slots, stages=o.stages.renamed(out="sum")))
    dlogits = o.stages("dlogits", _route_bwd(o, routed, np.append(dweights, 0.0)[routed.slots]))
    drouter = o.stages("drouter", _dot(o, dlogits, w_router.T))
    return LayerGrads(
        o.stages("out", dexperts + drouter),
        o.stages("out", _dot(o, x.T, dlogits)),
        _weight_gradient(o, routed, passed.taken, dgate),
        _weight_gradient(o, routed, passed.taken, dup),
        _weight_gradient(o, routed, passed.hidden, drows),
    )


def _route_bwd(o: _Options, routed: _Routed, dweights: Array) -> Array:
    """The gradient of the logits [T, E] for that of the weights [T, k]: of a softmax over the chosen, or over all."""
    mean = (routed.weights * dweights).sum(axis=1, keepdims=True)
    dlogits = np.zeros((o.layer.tokens, o.layer.experts))
    if o.renormalize:
        np.put_along_axis(dlogits, routed.indices, routed.weights * (dweights - mean), axis=1)
        return dlogits
    np.put_along_axis(dlogits, routed.indices, routed.weights * dweights, axis=1)
    return dlogits - routed.likelihoods * mean


def _dot(o: _Options, a: Array, b: Array) -> Array:
    """a @ b of the router, summed in its own steps or else in those of the other matmuls."""
    stages = replace(o.stages, depth=o.stages.router_depth or o.stages.depth)
    return stages.dot(a.astype(np.float64), b.astype(np.float64))


def _product(o: _Options, routed: _Routed, lhs: Array, rhs: Array, site: str, transpose_rhs: bool = False) -> Array:
    """Rows of each group times that group's weights, both quantised where that is asked for."""
    arguments: dict[str, Any] = {
        "group_offset": o.group_offset,
        "transpose_rhs": transpose_rhs,
        "tiling": o.tiling,
        "stages": o.stages.renamed(out=site),
    }
    if o.quantize is None:
        return gmm(lhs.astype(np.float64), rhs.astype(np.float64), routed.group_sizes, **arguments)
    arguments["preferred_element_type"] = "float32"
    if o.quantize == "fp8":
        a, b = by_rows(_single(lhs), o.block_size), weights(rhs, o.block_size)
        return gmm_quantized(*a, *b, routed.group_sizes, **arguments)
    a = mxfp8_quantize(_single(lhs), 1, check_finite=False)
    b = mxfp8_quantize(rhs, 2 if transpose_rhs else 1, check_finite=False)
    return grouped_gemm(a.qvalue, b.qvalue, routed.group_sizes, lhs_scale=a.scale, rhs_scale=b.scale, **arguments)


def _weight_gradient(o: _Options, routed: _Routed, lhs: Array, rhs: Array) -> Array:
    """lhs.T @ rhs over the rows of each group, both quantised by columns where that is asked for."""
    arguments: dict[str, Any] = {
        "group_offset": o.group_offset,
        "num_actual_groups": o.layer.groups,
        "tiling": o.tiling,
        "stages": o.stages,
    }
    if o.quantize is None:
        return tgmm(lhs.astype(np.float64), rhs.astype(np.float64), routed.group_sizes, **arguments)
    arguments["preferred_element_type"] = "float32"
    if o.quantize == "fp8":
        a, b = (by_columns(_single(x), o.block_size) for x in (lhs, rhs))
        return tgmm_quantized(*a, *b, routed.group_sizes, **arguments)
    a, b = (mxfp8_quantize(_single(x), 0, check_finite=False) for x in (lhs, rhs))
    return grouped_gemm(
        a.qvalue, b.qvalue, routed.group_sizes, lhs_scale=a.scale, rhs_scale=b.scale, ragged="contracting", **arguments
    )


def _single(x: Array) -> Array:
    """What is quantised: a float64 intermediate in float32, as it is handed on; anything else as it is."""
    return x.astype(np.float32) if x.dtype == np.float64 else x


def _softmax(x: Array) -> Array:
    grown = np.exp(x - x.max(axis=1, keepdims=True, initial=-np.inf))
    return grown / grown.sum(axis=1, keepdims=True)


def _sigmoid(x: Array) -> Array:
    with np.errstate(over="ignore"):
        return 1 / (1 + np.exp(-x))


def _silu(x: Array) -> Array:
    return x * _sigmoid(x)
