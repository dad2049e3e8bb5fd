"""Layers of a mixture of experts: the definition, in float64."""

from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np

from cpu_golden import Array
from cpu_golden.gmm import active_groups, gmm, one_tile, scalar, tgmm, values
from cpu_golden.quantize import Quantized, fp8_quantize, mxfp8_quantize
from cpu_golden.quantized_gmm import gmm_quantized, grouped_gemm, tgmm_quantized
from cpu_golden.stages import Stages, exact
from op_arguments import Tiling, resolve_tiling
from op_arguments.gmm import Problem, check_gmm
from op_arguments.moe import (
    Layer,
    check_dout,
    check_layer_dout,
    check_moe_layer,
    check_permute,
    check_quantize_options,
    check_unpermute,
    permuted_rows,
)

Quantize = bool | str


class Grads(NamedTuple):
    """The gradients of `grouped_dense`; existing_out's is None where none was given."""

    lhs: Any
    rhs: Any
    existing_out: Any


def grouped_dense(
    lhs: Array,
    rhs: Array,
    group_sizes: Array,
    existing_out: Array | None = None,
    *,
    group_offset: int = 0,
    transpose_rhs: bool = False,
    quantize: Quantize = "auto",
    bwd_quantize: Quantize = "auto",
    block_size: int | None = 128,
    preferred_element_type: Any = None,
    tiling: Tiling | None = None,
    stages: Stages = exact,
) -> Array:
    """`gmm`, differentiable in lhs, rhs and existing_out, with its operands quantised to e4m3 on request.

    Arguments, result and errors as `gmm` (float64 [M, N] here). quantize: multiply in fp8, lhs with one scale per row
    and `block_size` elements of K, rhs with one per block_size x block_size elements (None: whole axes), the recipe
    of DeepSeek-V3 (arXiv:2412.19437, section 3.3). bwd_quantize: the same for the two matmuls of the backward pass:
    dout by rows and blocks of N for lhs's gradient, by columns and global blocks of M for rhs's. "auto" quantises
    where the matrix unit multiplies fp8 natively, which a golden's host does not. block_size must divide K and N
    where anything is quantised; M need not be a multiple of it. tiling: (tm, tk, tn) of this pass, whose backward
    matmuls take (tm, tn, tk) and (tm, tk, tn), or a look-up (m, k, n) that is asked for each of them.
    Stages and sites as `gmm` or `gmm_quantized`.
    """
    check_quantize_options(quantize, bwd_quantize, block_size)
    p = _check(lhs, rhs, group_sizes, existing_out, group_offset, transpose_rhs, preferred_element_type)
    arguments: dict[str, Any] = {
        "group_offset": group_offset,
        "existing_out": existing_out,
        "transpose_rhs": transpose_rhs,
        "preferred_element_type": p.out_dtype,
        "tiling": tiling,
        "stages": stages,
    }
    if quantize is not True:
        return gmm(lhs, rhs, group_sizes, **arguments)
    a, b = fp8_quantize(lhs, 1, block_size, check_finite=False), _weights(rhs, block_size)
    return gmm_quantized(*a, *b, group_sizes, **arguments)


def grouped_dense_bwd(
    lhs: Array,
    rhs: Array,
    group_sizes: Array,
    dout: Array,
    existing_out: Array | None = None,
    *,
    group_offset: int = 0,
    transpose_rhs: bool = False,
    quantize: Quantize = "auto",
    bwd_quantize: Quantize = "auto",
    block_size: int | None = 128,
    preferred_element_type: Any = None,
    tiling: Tiling | None = None,
    stages: Stages = exact,
) -> Grads:
    """The gradients of `grouped_dense` in lhs, rhs and existing_out, for a gradient dout [M, N] of its result.

    Where anything is quantised the residuals are fp8 pairs, so the gradients are those of the quantised operands:
    lhs by columns, with one scale per `block_size` rows, and rhs as in the forward pass. Returns float64 gradients
    shaped as the primals: zero for rows of no active group (lhs), for empty groups (rhs) and for rows that were
    overwritten (existing_out).
    Stages: depth. Sites as `gmm` and `tgmm` or `gmm_quantized` and `tgmm_quantized`, but for the running sums, which
    are at dlhs and drhs.
    """
    check_quantize_options(quantize, bwd_quantize, block_size)
    p = _check(lhs, rhs, group_sizes, existing_out, group_offset, transpose_rhs, preferred_element_type)
    check_dout(dout, p, exact=True)
    offset, sizes = scalar(group_offset), values(group_sizes)
    groups = rhs.shape[0]
    left, right = (dout, lhs) if transpose_rhs else (lhs, dout)
    swapped = tiling
    if not (tiling is None or callable(tiling)):
        tm, tk, tn = resolve_tiling(tiling, one_tile, p.m, p.k, p.n)
        swapped = tm, tn, tk
    by_gmm: dict[str, Any] = {
        "group_offset": group_offset,
        "transpose_rhs": not transpose_rhs,
        "tiling": swapped,
        "stages": stages.renamed(acc="dlhs"),
    }
    by_tgmm: dict[str, Any] = {
        "group_offset": group_offset,
        "num_actual_groups": groups,
        "tiling": swapped if transpose_rhs else tiling,
        "stages": stages.renamed(acc="drhs"),
    }
    if quantize is not True and bwd_quantize is not True:
        # dout has the dtype of the result, which need not be that of lhs and rhs.
        dlhs = gmm(*_exactly(dout, rhs), group_sizes, **by_gmm)
        drhs = tgmm(*_exactly(left, right), group_sizes, **by_tgmm)
    else:
        by_rows: tuple[Any, Any] = (dout, None)
        by_columns: tuple[Any, Any] = (_padded(dout, block_size), None)
        if bwd_quantize is True:
            by_rows = fp8_quantize(dout, 1, block_size, check_finite=False)
            by_columns = fp8_quantize(by_columns[0], 0, block_size, check_finite=False)
        dlhs = gmm_quantized(*by_rows, *_weights(rhs, block_size), group_sizes, **by_gmm)
        saved = fp8_quantize(_padded(lhs, block_size), 0, block_size, check_finite=False)
        pairs = (by_columns, saved) if transpose_rhs else (saved, by_columns)
        drhs = tgmm_quantized(*pairs[0], *pairs[1], group_sizes, **by_tgmm)
    if existing_out is None:
        return Grads(dlhs, drhs, None)
    passed = dout.astype(np.float64)
    for _, rows in active_groups(sizes, offset, groups):
        passed[rows] = 0.0
    return Grads(dlhs, drhs, passed)


def _check(
    lhs: Array,
    rhs: Array,
    group_sizes: Array,
    existing_out: Array | None,
    group_offset: Any,
    transpose_rhs: bool,
    preferred_element_type: Any,
) -> Problem:
    return check_gmm(
        lhs,
        rhs,
        group_sizes,
        group_offset=scalar(group_offset),
        existing_out=existing_out,
        transpose_rhs=transpose_rhs,
        preferred_element_type=preferred_element_type,
        sizes=values(group_sizes),
        exact=True,
    )


def _exactly(a: Array, b: Array) -> tuple[Array, Array]:
    return a.astype(np.float64), b.astype(np.float64)


def _weights(rhs: Array, block_size: int | None) -> Quantized:
    return fp8_quantize(rhs, (1, 2), block_size, check_finite=False)


def _padded(x: Array, block_size: int | None) -> Array:
    """x with rows of zeros up to a multiple of block_size."""
    missing = 0 if block_size is None else -x.shape[0] % block_size
    return np.pad(x, [(0, missing), (0, 0)])


# ------------------------------------------------------------------------------------------------ the whole layer


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


def permute(x: Array, indices: Array, *, num_experts: int, capacity: int | None = None) -> Permuted:
    """Copies of the rows of x sorted by the experts that they go to, for a grouped matmul.

    x [T, D] float32, bfloat16 or float16; indices [T, k] int32 in [0, num_experts): the experts of each token, all
    different. Within an expert rows are in the order of their tokens. capacity: rows that an expert takes at most; of
    those beyond it the later ones are dropped. Returns rows [M, D] in x's dtype, M = T·k or, if that is less,
    num_experts·capacity, and zero beyond sum(group_sizes); slots [T, k] int32, the row of each choice, -1 where it was
    dropped; group_sizes [num_experts] int32. Every bit of a row is x's.
    Raises TypeError for a wrong type or dtype, ValueError for a wrong shape or value.
    """
    rows = check_permute(x, indices, num_experts, capacity, range_of=_range_of(indices), exact=True)
    source, slots, group_sizes = _plan(indices, num_experts, capacity, rows)
    return Permuted(_of_rows(x, source, indices.shape[1]), slots, group_sizes)


def unpermute(rows: Array, slots: Array, weights: Array | None = None, *, stages: Stages = exact) -> Array:
    """The rows of each token, summed, times their weights where these are given: the inverse of `permute`.

    rows [M, D] float32, bfloat16 or float16; slots [T, k] int32 in [-1, M), as `permute` gives them; weights [T, k]
    float32. Returns `out[t] = Σ_j weights[t, j] · rows[slots[t, j]]` [T, D], float64 here; a slot of -1 adds nothing.
    Sites: product, sum (the running sum, in the order of j), out.
    Raises TypeError for a wrong type or dtype, ValueError for a wrong shape or value.
    """
    check_unpermute(rows, slots, weights, range_of=_range_of(slots), exact=True)
    out = np.zeros((slots.shape[0], rows.shape[1]))
    for j in range(slots.shape[1]):
        kept = slots[:, j] >= 0
        taken = rows[slots[kept, j]].astype(np.float64)
        if weights is not None:
            taken = stages("product", taken * weights[kept, j, None].astype(np.float64))
        out[kept] = stages("sum", out[kept] + taken)
    return stages("out", out)


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
        x,
        w_router,
        w_gate,
        w_up,
        w_down,
        top_k=top_k,
        quantize=quantize,
        block_size=block_size,
        capacity=capacity,
        group_offset=offset,
        exact=True,
    )
    return _Options(layer, top_k, quantize, block_size, capacity, renormalize, offset, tiling, stages)


class _Routed(NamedTuple):
    """Where tokens go: indices and weights [T, k], what `_plan` makes of them, and the softmax over all experts."""

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
    plan = _plan(indices, o.layer.experts, o.capacity, rows)
    return _Routed(indices, o.stages("weights", weights), likelihoods, *plan)


def _plan(indices: Array, num_experts: int, capacity: int | None, rows: int) -> tuple[Array, Array, Array]:
    """(source [rows]: the choice t·k + j of each row, or -1; slots and group_sizes as `Permuted` has them)."""
    choices = indices.ravel()
    source, slots = np.full(rows, -1), np.full(choices.size, -1, np.int32)
    group_sizes = np.zeros(num_experts, np.int32)
    first = 0
    for expert in range(num_experts):
        of_expert = np.flatnonzero(choices == expert)[:capacity]
        end = first + len(of_expert)
        source[first:end], slots[of_expert] = of_expert, np.arange(first, end)
        group_sizes[expert], first = len(of_expert), end
    return source, slots.reshape(indices.shape), group_sizes


class _Passed(NamedTuple):
    """What the forward pass computes for each row of an expert."""

    taken: Array  # x's rows, permuted
    weights: Array  # [M, 1]
    gate: Array
    up: Array
    hidden: Array
    rows: Array


def _experts(o: _Options, x: Array, routed: _Routed, w_gate: Array, w_up: Array, w_down: Array) -> _Passed:
    taken = _of_rows(x, routed.source, o.top_k)
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
    drows = _of_rows(dout, routed.source, o.top_k)
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


def _of_rows(x: Array, source: Array, top_k: int) -> Array:
    """x's row for each source, zero for -1."""
    taken = np.zeros((len(source), x.shape[1]), x.dtype)
    taken[source >= 0] = x[source[source >= 0] // top_k]
    return taken


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
        a = fp8_quantize(_single(lhs), 1, o.block_size, check_finite=False)
        return gmm_quantized(*a, *_weights(rhs, o.block_size), routed.group_sizes, **arguments)
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
        a, b = (
            fp8_quantize(_padded(_single(x), o.block_size), 0, o.block_size, check_finite=False) for x in (lhs, rhs)
        )
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


def _range_of(values: Any) -> tuple[int, int] | None:
    """The least and the largest of an int array (None where there is none, or where it is no such array)."""
    integers = isinstance(values, np.ndarray) and values.dtype == np.int32 and values.size > 0
    return (int(values.min()), int(values.max())) if integers else None
