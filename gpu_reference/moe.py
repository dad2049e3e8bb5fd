"""Layers of a mixture of experts on the GPU; they are defined in `cpu_golden/moe.py`."""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn.functional import pad

from gpu_reference._lib.formats import Quantized
from gpu_reference._lib.hardware import architecture, check_devices, supports_matmul
from gpu_reference._lib.operands import on_device, only_tensor, scalar, values
from gpu_reference.gmm import gmm, tgmm
from gpu_reference.grouped_gemm import grouped_gemm
from gpu_reference.mxfp8 import mxfp8_dual_quantize, mxfp8_quantize
from gpu_reference.quantize import fp8_dual_quantize, fp8_quantize
from gpu_reference.quantized_gmm import gmm_quantized, tgmm_quantized
from op_arguments import Tiling, check_array, check_shape, dtype_name
from op_arguments.debug import Debug, backward_alone, sums_at
from op_arguments.gmm import check_gmm
from op_arguments.moe import (
    check_expert_parallel,
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


class _Options(NamedTuple):
    """What is no tensor in a `grouped_dense`."""

    quantize: bool
    bwd_quantize: bool
    block_size: int | None
    transpose_rhs: bool
    out_dtype: torch.dtype
    tiling: Tiling | None
    debug: Debug


class _LayerOptions(NamedTuple):
    """What is no tensor in a `moe_layer`."""

    top_k: int
    quantize: str | None
    block_size: int | None
    capacity: int | None
    renormalize: bool
    tiling: Tiling | None
    process_group: dist.ProcessGroup | None
    dtype: torch.dtype  # of x and the experts' weights
    debug: Debug

    @property
    def between(self) -> torch.dtype:
        """The dtype of what one matmul hands to the next."""
        return self.dtype if self.quantize is None else torch.float32


def grouped_dense(
    lhs: Tensor,
    rhs: Tensor,
    group_sizes: Tensor,
    existing_out: Tensor | None = None,
    *,
    group_offset: int | Tensor = 0,
    transpose_rhs: bool = False,
    quantize: Quantize = "auto",
    bwd_quantize: Quantize = "auto",
    block_size: int | None = 128,
    preferred_element_type: torch.dtype | None = None,
    tiling: Tiling | None = None,
    debug: Debug = None,
) -> Tensor:
    """`gmm`, differentiable in lhs, rhs and existing_out, with its operands quantised to e4m3 on request.

    Arguments, result and errors as `gmm`. quantize: multiply in fp8, lhs with one scale per row and `block_size`
    elements of K, rhs with one per block_size x block_size elements (None: whole axes), the recipe of DeepSeek-V3
    (arXiv:2412.19437, section 3.3). bwd_quantize: the same for the two matmuls of the backward pass: dout by rows and
    blocks of N for lhs's gradient, by columns and global blocks of M for rhs's. "auto" quantises where the matrix
    unit multiplies fp8 natively, which an interpreter does not. block_size must divide K and N where anything is
    quantised; M need not be a multiple of it.
    Where anything is quantised, what a backward pass keeps of lhs (by columns) and rhs is fp8 pairs alone. Gradients
    have the dtypes of what they are gradients of: zero for rows of no active group (lhs), for empty groups (rhs) and
    for rows that were overwritten (existing_out).
    tiling: (tm, tk, tn) of the forward pass, whose backward matmuls take (tm, tn, tk) and (tm, tk, tn), or a look-up
    (m, k, n) -> (tm, tk, tn) that is asked for each of them. debug: as the matmul of the forward pass has it, and the
    sums of the other two at dlhs and drhs.
    """
    check_quantize_options(quantize, bwd_quantize, block_size)
    group_offset = scalar(group_offset)
    p = check_gmm(
        lhs,
        rhs,
        group_sizes,
        group_offset=group_offset,
        existing_out=existing_out,
        transpose_rhs=transpose_rhs,
        preferred_element_type=preferred_element_type,
        sizes=values(group_sizes),
    )
    tensors = {"lhs": lhs, "rhs": rhs, "group_sizes": group_sizes, "existing_out": existing_out}
    device = check_devices(tensors | only_tensor("group_offset", group_offset))
    options = _Options(
        quantize=_resolved(quantize, device),
        bwd_quantize=_resolved(bwd_quantize, device),
        block_size=block_size,
        transpose_rhs=bool(transpose_rhs),
        out_dtype=getattr(torch, p.out_dtype),
        tiling=tiling,
        debug=debug,
    )
    out: Tensor = _GroupedDense.apply(  # type: ignore[no-untyped-call]
        options, lhs, rhs, group_sizes, group_offset, existing_out
    )
    return out


def grouped_dense_bwd(
    lhs: Tensor,
    rhs: Tensor,
    group_sizes: Tensor,
    dout: Tensor,
    existing_out: Tensor | None = None,
    *,
    group_offset: int | Tensor = 0,
    transpose_rhs: bool = False,
    quantize: Quantize = "auto",
    bwd_quantize: Quantize = "auto",
    block_size: int | None = 128,
    preferred_element_type: torch.dtype | None = None,
    tiling: Tiling | None = None,
    debug: Debug = None,
) -> Grads:
    """The gradients of `grouped_dense` in lhs, rhs and existing_out, as `torch.autograd.grad` gives them.

    dout [M, N]: the gradient of its result, in the dtype of that. All else as `grouped_dense`, but that debug has no
    stage of the forward pass.
    """
    primals = [_primal(x) for x in (lhs, rhs, existing_out) if x is not None]
    lhs, rhs, *existing = primals
    with torch.enable_grad():
        out = grouped_dense(
            lhs,
            rhs,
            group_sizes,
            *existing,
            group_offset=group_offset,
            transpose_rhs=transpose_rhs,
            quantize=quantize,
            bwd_quantize=bwd_quantize,
            block_size=block_size,
            preferred_element_type=preferred_element_type,
            tiling=tiling,
            debug=backward_alone(debug),
        )
    check_array("dout", dout, "M, N", (dtype_name(out.dtype),))
    check_shape("dout", dout, "M, N", tuple(out.shape))
    dlhs, drhs, *passed = torch.autograd.grad(out, primals, dout)
    return Grads(dlhs, drhs, passed[0] if passed else None)


class _GroupedDense(torch.autograd.Function):
    """The two passes. An operand is a pair (qvalue, scale) throughout; where it is not quantised, its scale is None."""

    @staticmethod
    def forward(
        ctx: Any,
        options: _Options,
        lhs: Tensor,
        rhs: Tensor,
        group_sizes: Tensor,
        group_offset: int | Tensor,
        existing_out: Tensor | None,
    ) -> Tensor:
        _, needs_dlhs, needs_drhs, *_ = ctx.needs_input_grad
        a = saved_a = Quantized(lhs, None)
        b = saved_b = Quantized(rhs, None)
        if options.quantize or (options.bwd_quantize and needs_dlhs):
            saved_b = _quantize(rhs, (1, 2), options)
        if options.quantize:
            b = saved_b
            a, saved_a = _dual_quantize(lhs, options) if needs_drhs else (_quantize(lhs, 1, options), saved_a)
        elif options.bwd_quantize and needs_drhs:
            saved_a = _quantize(_padded(lhs, options.block_size), 0, options)
        ctx.options, ctx.group_offset, ctx.groups, ctx.dtype = options, group_offset, rhs.shape[0], lhs.dtype
        ctx.save_for_backward(
            *(saved_a if needs_drhs else (None, None)), *(saved_b if needs_dlhs else (None, None)), group_sizes
        )
        return _gmm(
            a,
            b,
            group_sizes,
            group_offset=group_offset,
            existing_out=existing_out,
            transpose_rhs=options.transpose_rhs,
            preferred_element_type=options.out_dtype,
            tiling=options.tiling,
            debug=options.debug,
        )

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor | None, ...]:
        options, group_offset = ctx.options, ctx.group_offset
        *saved, group_sizes = ctx.saved_tensors
        lhs, rhs = Quantized(*saved[:2]), Quantized(*saved[2:])
        _, needs_dlhs, needs_drhs, _, _, needs_passed = ctx.needs_input_grad
        by_rows = by_columns = Quantized(dout, None)
        if options.bwd_quantize and needs_drhs:
            by_rows, by_columns = _dual_quantize(dout, options)
        elif options.bwd_quantize and needs_dlhs:
            by_rows = _quantize(dout, 1, options)
        elif needs_drhs:
            by_columns = Quantized(_with_rows(dout, lhs.qvalue.shape[0]), None)

        shared: dict[str, Any] = {"group_offset": group_offset, "preferred_element_type": ctx.dtype}
        swapped = _swapped(options.tiling)
        dlhs = drhs = passed = None
        if needs_dlhs:
            by_gmm = {"transpose_rhs": not options.transpose_rhs, "tiling": swapped}
            dlhs = _gmm(by_rows, rhs, group_sizes, **by_gmm, debug=sums_at("dlhs", options.debug), **shared)
        if needs_drhs:
            left, right, tiling = lhs, by_columns, options.tiling
            if options.transpose_rhs:
                left, right, tiling = by_columns, lhs, swapped
            by_tgmm = {"num_actual_groups": ctx.groups, "tiling": tiling}
            drhs = _tgmm(left, right, group_sizes, **by_tgmm, debug=sums_at("drhs", options.debug), **shared)
        if needs_passed:
            passed = _outside(dout, group_sizes, group_offset, ctx.groups)
        return None, dlhs, drhs, None, None, passed


def _primal(x: Tensor) -> Tensor:
    """x with a gradient of its own. What can have none stays as it is, for the function to refuse it."""
    return x.detach().requires_grad_() if isinstance(x, Tensor) and x.is_floating_point() else x


def _resolved(quantize: Quantize, device: torch.device) -> bool:
    if quantize == "auto":
        return supports_matmul(torch.float8_e4m3fn, architecture(device))
    return bool(quantize)


def _gmm(lhs: Quantized, rhs: Quantized, group_sizes: Tensor, **arguments: Any) -> Tensor:
    if lhs.scale is None and rhs.scale is None:
        return gmm(*_same_dtype(lhs.qvalue, rhs.qvalue), group_sizes, **arguments)
    return gmm_quantized(*lhs, *rhs, group_sizes, **arguments)


def _tgmm(lhs: Quantized, rhs: Quantized, group_sizes: Tensor, **arguments: Any) -> Tensor:
    if lhs.scale is None and rhs.scale is None:
        return tgmm(*_same_dtype(lhs.qvalue, rhs.qvalue), group_sizes, **arguments)
    return tgmm_quantized(*lhs, *rhs, group_sizes, **arguments)


def _same_dtype(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    """a and b in the narrowest dtype that holds both exactly: dout has the result's dtype, not always lhs's."""
    dtype = torch.promote_types(a.dtype, b.dtype)
    return a.to(dtype), b.to(dtype)


def _swapped(tiling: Tiling | None) -> Tiling | None:
    """The tile of a matmul in which K and N have changed places; a look-up is asked with its sizes anyway."""
    if tiling is None or callable(tiling):
        return tiling
    tm, tk, tn = tiling
    return tm, tn, tk


def _quantize(x: Tensor, axis: int | tuple[int, ...], options: _Options | _LayerOptions) -> Quantized:
    # Values of x are at hand on some devices only; a training step saturates infinities on all of them.
    return fp8_quantize(x, axis, options.block_size, check_finite=False)


def _dual_quantize(x: Tensor, options: _Options | _LayerOptions) -> tuple[Quantized, Quantized]:
    """x [M, …] by rows, and by columns with rows of zeros up to a multiple of the block."""
    rows = x.shape[0]
    both = fp8_dual_quantize(_padded(x, options.block_size), options.block_size, check_finite=False)
    return (
        Quantized(both.rowwise[:rows], both.rowwise_scale[:rows]),
        Quantized(both.columnwise, both.columnwise_scale),
    )


def _padded(x: Tensor, block_size: int | None) -> Tensor:
    """x with rows of zeros up to a multiple of block_size."""
    rows = x.shape[0]
    return x if block_size is None else _with_rows(x, rows + -rows % block_size)


def _with_rows(x: Tensor, rows: int) -> Tensor:
    """x with rows of zeros up to `rows` of them."""
    return x if x.shape[0] == rows else pad(x, (0, 0, 0, rows - x.shape[0]))


def _outside(x: Tensor, group_sizes: Tensor, group_offset: int | Tensor, groups: int) -> Tensor:
    """x [M, N], zero in the rows of active groups. Nothing is read back from the device."""
    ends = pad(group_sizes.cumsum(0), (1, 0))
    first = on_device(group_offset, x.device).reshape(1).clamp(0, len(group_sizes) - groups).long()
    row = torch.arange(len(x), device=x.device)
    is_active = (ends[first] <= row) & (row < ends[first + groups])
    return torch.where(is_active[:, None], 0, x)


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


def permute(x: Tensor, indices: Tensor, *, num_experts: int, capacity: int | None = None) -> Permuted:
    """Copies of the rows of x sorted by the experts that they go to, for a grouped matmul.

    x [T, D] float32, bfloat16 or float16; indices [T, k] int32 in [0, num_experts): the experts of each token, all
    different. Within an expert rows are in the order of their tokens. capacity: rows that an expert takes at most; of
    those beyond it the later ones are dropped. Returns rows [M, D] in x's dtype, M = T·k or, if that is less,
    num_experts·capacity, and zero beyond sum(group_sizes); slots [T, k] int32, the row of each choice, -1 where it was
    dropped; group_sizes [num_experts] int32. Every bit of a row is x's. Differentiable in x.
    Raises TypeError for a wrong type or dtype, ValueError for a wrong shape or value (of a CPU tensor).
    """
    rows = check_permute(x, indices, num_experts, capacity, range_of=_range_of(indices), exact=False)
    plan = _plan(indices, num_experts, capacity, rows)
    return Permuted(_take(x, plan.source, plan.slots), plan.slots, plan.group_sizes)


def unpermute(rows: Tensor, slots: Tensor, weights: Tensor | None = None) -> Tensor:
    """The rows of each token, summed, times their weights where these are given: the inverse of `permute`.

    rows [M, D] float32, bfloat16 or float16; slots [T, k] int32 in [-1, M), as `permute` gives them; weights [T, k]
    float32. Returns `out[t] = Σ_j weights[t, j] · rows[slots[t, j]]` [T, D] in rows' dtype, products and sums in
    float32; a slot of -1 adds nothing. Differentiable in rows and weights. Raises as `permute`.
    """
    check_unpermute(rows, slots, weights, range_of=_range_of(slots), exact=False)
    return _combine(rows, weights, slots, _inverse(slots.reshape(-1), rows.shape[0]))


def moe_layer(
    x: Tensor,
    w_router: Tensor,
    w_gate: Tensor,
    w_up: Tensor,
    w_down: Tensor,
    *,
    top_k: int,
    quantize: str | None = None,
    block_size: int | None = 128,
    capacity: int | None = None,
    renormalize: bool = True,
    group_offset: int | Tensor = 0,
    sanitize_grads: bool = False,
    tiling: Tiling | None = None,
    process_group: dist.ProcessGroup | None = None,
    debug: Debug = None,
) -> Tensor:
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
    the quantised operands, which are all that a backward pass keeps of them. What a matmul hands to the next one is
    then float32, so that each is rounded once; else it has x's dtype.
    The weights enter before the last matmul, which is linear: their gradient then needs no more than a product of what
    the backward pass has anyway. sanitize_grads: zero in place of every gradient that is NaN or infinite; by default
    they propagate. tiling: (tm, tk, tn) of every matmul, or a look-up (m, k, n) -> (tm, tk, tn).
    process_group: expert parallelism over its processes. Each has T of the tokens, in order, w_router whole and
    G = E / processes of the experts, in order; rows travel by all-to-all in buffers for the worst case, so that no
    process waits for what another counts. Results are those of one process with all tokens and experts.
    debug: see `op_arguments.debug`, of what the matmuls hand on in either pass, of logits, weights and the parts
    of x's gradient, at the golden's sites; None leaves nothing of it.
    Nothing is read back from the device. Raises TypeError for a wrong type or dtype, ValueError for a wrong shape or
    value or several devices, and RuntimeError for CPU tensors where Triton's interpreter is off.
    """
    group_offset = scalar(group_offset)
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
    tensors = {"x": x, "w_router": w_router, "w_gate": w_gate, "w_up": w_up, "w_down": w_down}
    check_devices(tensors | only_tensor("group_offset", group_offset))
    if process_group is not None:
        check_expert_parallel(layer, process_group.size(), group_offset)
    o = _LayerOptions(top_k, quantize, block_size, capacity, bool(renormalize), tiling, process_group, x.dtype, debug)
    if sanitize_grads:
        x, w_router, w_gate, w_up, w_down = (_sanitized(primal) for primal in tensors.values())
    weights, indices = _route(o, x, w_router)
    x = _watched(o, None, x, "dexperts")
    shard: dict[str, Any] = {"w_gate": w_gate, "w_up": w_up, "w_down": w_down, "group_offset": group_offset}
    if process_group is None:
        plan = _plan(indices, layer.experts, capacity, permuted_rows(layer.tokens, top_k, layer.experts, capacity))
        rows, of_rows = _take(x, *plan[:2]), _take(weights.reshape(-1, 1), plan.source, plan.slots.reshape(-1, 1))
        out = _experts(o, rows, of_rows, group_sizes=plan.group_sizes, **shard)
        return _combine(out, None, plan.slots, plan.source)
    sent, received = _exchange_plans(process_group, indices, layer.experts, capacity)
    rows, of_rows = _take(x, *sent[:2]), _take(weights.reshape(-1, 1), sent.source, sent.slots.reshape(-1, 1))
    rows, of_rows = (_take(_swap(t, process_group), *received[:2]) for t in (rows, of_rows))
    out = _experts(o, rows, of_rows, group_sizes=received.group_sizes, **shard)
    out = _swap(_take(out, received.slots.reshape(-1), received.source[:, None]), process_group)
    return _combine(out, None, sent.slots, sent.source)


def moe_layer_bwd(
    x: Tensor,
    w_router: Tensor,
    w_gate: Tensor,
    w_up: Tensor,
    w_down: Tensor,
    dout: Tensor,
    *,
    top_k: int,
    quantize: str | None = None,
    block_size: int | None = 128,
    capacity: int | None = None,
    renormalize: bool = True,
    group_offset: int | Tensor = 0,
    sanitize_grads: bool = False,
    tiling: Tiling | None = None,
    process_group: dist.ProcessGroup | None = None,
    debug: Debug = None,
) -> LayerGrads:
    """The gradients of `moe_layer` in all five of its tensors, as autograd gives them, for a gradient dout [T, D].

    In the dtypes of the primals; zero for experts without rows. With process_group w_router's is the part of this
    process's tokens. All else as `moe_layer`.
    """
    primals = [_primal(tensor) for tensor in (x, w_router, w_gate, w_up, w_down)]
    with torch.enable_grad():
        out = moe_layer(
            *primals,
            top_k=top_k,
            quantize=quantize,
            block_size=block_size,
            capacity=capacity,
            renormalize=renormalize,
            group_offset=group_offset,
            sanitize_grads=sanitize_grads,
            tiling=tiling,
            process_group=process_group,
            debug=debug,
        )
    check_layer_dout(dout, x)
    return LayerGrads(*torch.autograd.grad(out, primals, dout))


def _route(o: _LayerOptions, x: Tensor, w_router: Tensor) -> tuple[Tensor, Tensor]:
    """The weights [T, k] float32 of each token's experts, and which these are."""
    logits: Tensor = _Logits.apply(_watched(o, None, x, "drouter"), w_router)  # type: ignore[no-untyped-call]
    logits = _watched(o, "logits", logits, "dlogits")
    # Not torch.topk, which leaves open which of equal ones it takes.
    indices = torch.sort(logits.detach(), dim=1, descending=True, stable=True).indices[:, : o.top_k]
    weights = logits.gather(1, indices).softmax(1) if o.renormalize else logits.softmax(1).gather(1, indices)
    return _watched(o, "weights", weights), indices.int()


def _watched(o: _LayerOptions, site: str | None, x: Tensor, gradient: str | None = None) -> Tensor:
    """x, shown to `debug` as what is at a site, and its gradient as what is at another."""
    if o.debug is None:
        return x
    shown: Tensor = _Shown.apply(o.debug, site, gradient, x)  # type: ignore[no-untyped-call]
    return shown


class _Shown(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, debug: Callable[..., Any], site: str | None, gradient: str | None, x: Tensor) -> Tensor:
        ctx.debug, ctx.gradient = debug, gradient
        return x.view_as(x) if site is None else debug(site, x).view_as(x)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return None, None, None, grad if ctx.gradient is None else ctx.debug(ctx.gradient, grad)


class _Logits(torch.autograd.Function):
    """x @ w_router in float32, whatever torch's own matmuls are allowed to round to: a `gmm` of one group."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, w_router: Tensor) -> Tensor:
        ctx.save_for_backward(x, w_router)
        return gmm(x.float(), w_router.float()[None], _one_group(x))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dlogits: Tensor) -> tuple[Tensor, Tensor]:
        x, w_router = ctx.saved_tensors
        dx = gmm(dlogits, w_router.float()[None], _one_group(x), transpose_rhs=True)
        return dx.to(x.dtype), tgmm(x.float(), dlogits, _one_group(x))[0].to(w_router.dtype)


def _one_group(x: Tensor) -> Tensor:
    return torch.full((1,), x.shape[0], dtype=torch.int32, device=x.device)


class _Sanitized(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return torch.where(grad.isfinite(), grad, 0)


def _sanitized(x: Tensor) -> Tensor:
    """x, whose gradient is zero wherever it would not be finite."""
    sanitized: Tensor = _Sanitized.apply(x)  # type: ignore[no-untyped-call]
    return sanitized


# ------------------------------------------------------------------------------------------- rows to and from experts


class _Plan(NamedTuple):
    """Which row is whose: source [M], the choice t·k + j of each row or -1; slots and group_sizes as `Permuted`."""

    source: Tensor
    slots: Tensor
    group_sizes: Tensor


def _plan(indices: Tensor, num_experts: int, capacity: int | None, rows: int, preceding: Tensor | int = 0) -> _Plan:
    """The plan of `permute`. preceding [E]: rows that other processes' tokens take of each expert's capacity first."""
    choices = indices.reshape(-1).long()
    in_order, order = torch.sort(choices, stable=True)
    starts = torch.searchsorted(in_order, torch.arange(num_experts + 1, device=indices.device))
    group_sizes = starts.diff()
    if capacity is not None:
        group_sizes = group_sizes.minimum(torch.clamp(torch.as_tensor(capacity - preceding), min=0))
    position = torch.empty_like(order).scatter_(0, order, torch.arange(len(order), device=indices.device))
    position -= starts[choices]
    slots = torch.where(position < group_sizes[choices], _starts(group_sizes)[choices] + position, -1).int()
    return _Plan(_inverse(slots, rows), slots.reshape(indices.shape), group_sizes.int())


def _inverse(slots: Tensor, rows: int) -> Tensor:
    """Which of the slots is row 0, 1, …, up to `rows` of them: -1 for none."""
    source = torch.full((rows + 1,), -1, device=slots.device)
    places = torch.where(slots < 0, rows, slots).long()  # the last, which is cut off, is that of the dropped
    return source.scatter_(0, places, torch.arange(len(slots), device=slots.device))[:rows]


def _starts(sizes: Tensor, axis: int = 0) -> Tensor:
    """Where each of consecutive parts of these sizes begins."""
    return sizes.cumsum(axis) - sizes


def _rows_of(x: Tensor, source: Tensor, slots: Tensor) -> Tensor:
    """x's row for each source (the choice t·k + j), zero for -1."""
    if not x.shape[0]:
        return x.new_zeros(len(source), x.shape[1])
    return torch.where(source[:, None] >= 0, x[source.clamp(min=0) // slots.shape[1]], 0)


def _sum_of(rows: Tensor, weights: Tensor | None, slots: Tensor) -> Tensor:
    """Σ_j weights[:, j] · rows[slots[:, j]] in float32, in the order of j."""
    total = torch.zeros(slots.shape[0], rows.shape[1], device=rows.device)
    for j in range(slots.shape[1] if rows.shape[0] else 0):
        taken = rows[slots[:, j].clamp(min=0)].float()
        taken = taken if weights is None else taken * weights[:, j, None]
        total += torch.where(slots[:, j, None] >= 0, taken, 0.0)
    return total


class _Take(torch.autograd.Function):
    """Rows to experts, whose gradient is a sum over each token's rows, in order: no atomics, the same bits always."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, source: Tensor, slots: Tensor) -> Tensor:
        ctx.save_for_backward(slots)
        return _rows_of(x, source, slots)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, drows: Tensor) -> tuple[Tensor | None, ...]:
        (slots,) = ctx.saved_tensors
        return _sum_of(drows, None, slots).to(drows.dtype), None, None


def _take(x: Tensor, source: Tensor, slots: Tensor) -> Tensor:
    """x's row for each source, and how its gradient comes back: slots, the inverse of source."""
    rows: Tensor = _Take.apply(x, source, slots)  # type: ignore[no-untyped-call]
    return rows


class _Combine(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, weights: Tensor | None, slots: Tensor, source: Tensor) -> Tensor:
        ctx.save_for_backward(None if weights is None else rows, weights, slots, source)
        return _sum_of(rows, weights, slots).to(rows.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor | None, ...]:
        rows, weights, slots, source = ctx.saved_tensors
        drows = _rows_of(dout, source, slots)
        if weights is None:
            return drows, None, None, None
        by_row = _rows_of(weights.reshape(-1, 1), source, slots.reshape(-1, 1))
        dweights = torch.zeros_like(weights)
        if rows.shape[0]:
            taken = torch.where(slots[..., None] >= 0, rows[slots.clamp(min=0)].float(), 0.0)
            dweights = (taken * dout[:, None].float()).sum(2)
        return (drows.float() * by_row).to(drows.dtype), dweights, None, None


def _combine(rows: Tensor, weights: Tensor | None, slots: Tensor, source: Tensor) -> Tensor:
    """`unpermute`, with the inverse of slots."""
    out: Tensor = _Combine.apply(rows, weights, slots, source)  # type: ignore[no-untyped-call]
    return out


# ------------------------------------------------------------------------------------------------ expert parallelism


def _exchange_plans(
    group: dist.ProcessGroup, indices: Tensor, num_experts: int, capacity: int | None
) -> tuple[_Plan, _Plan]:
    """How rows lie in the buffer that is sent, a part for each process; and how what is received is sorted by expert.

    The second plan's source and slots are of rows of the received buffer, [M] and [parts · width, 1].
    """
    processes = group.size()
    groups = num_experts // processes
    tokens, top_k = indices.shape
    width = permuted_rows(tokens, min(top_k, groups), groups, capacity)
    preceding: Tensor | int = 0
    if capacity is not None:
        counts = (indices.reshape(-1, 1) == torch.arange(num_experts, device=indices.device)).sum(0)
        gathered = [torch.empty_like(counts) for _ in range(processes)]
        dist.all_gather(gathered, counts, group=group)
        preceding = torch.stack(gathered)[: group.rank()].sum(0)
    plan = _plan(indices, num_experts, capacity, permuted_rows(tokens, top_k, num_experts, capacity), preceding)

    sizes = plan.group_sizes.reshape(processes, groups).long()
    starts = _starts(sizes.sum(1))
    column = torch.arange(width, device=indices.device)
    source = plan.source[(starts[:, None] + column).clamp(max=len(plan.source) - 1)]
    source = torch.where(column < sizes.sum(1)[:, None], source, -1).reshape(-1)
    process = (indices // groups).long()
    slots = torch.where(plan.slots >= 0, process * width + plan.slots - starts[process], -1)
    sent = _Plan(source, slots, plan.group_sizes)

    sizes = _exchanged(sizes, group)  # [processes, G]: rows that each of them sends to each expert here
    ends = sizes.cumsum(1)
    expert = (column[:, None] >= ends[:, None]).sum(2)  # [processes, width]; G where there is no row
    begins = pad(_starts(sizes.sum(0)) + _starts(sizes) - _starts(sizes, 1), (0, 1))
    places = begins.gather(1, expert) + column
    slots = torch.where(expert < groups, places, -1).reshape(-1)
    rows = len(slots) if capacity is None else min(len(slots), groups * capacity)
    return sent, _Plan(_inverse(slots, rows), slots[:, None], sizes.sum(0).int())


class _Swap(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, buffer: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return _exchanged(buffer, group)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return _exchanged(grad, ctx.group), None


def _swap(buffer: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Part i of the buffer to process i, and part i of the result from it; differentiable."""
    swapped: Tensor = _Swap.apply(buffer, group)  # type: ignore[no-untyped-call]
    return swapped


def _exchanged(buffer: Tensor, group: dist.ProcessGroup) -> Tensor:
    received = torch.empty_like(buffer, memory_format=torch.contiguous_format)
    dist.all_to_all_single(received, buffer.contiguous(), group=group)
    return received


# --------------------------------------------------------------------------------------------------- the experts


def _experts(
    o: _LayerOptions,
    rows: Tensor,
    weights: Tensor,
    *,
    w_gate: Tensor,
    w_up: Tensor,
    w_down: Tensor,
    group_sizes: Tensor,
    group_offset: int | Tensor,
) -> Tensor:
    """rows [M, D], sorted by expert, through their experts, times their weights [M, 1]."""
    out: Tensor = _Experts.apply(  # type: ignore[no-untyped-call]
        o, rows, weights, w_gate, w_up, w_down, group_sizes, group_offset
    )
    return out


class _Experts(torch.autograd.Function):
    """The two passes. An operand is a pair (qvalue, scale) throughout; where it is not quantised, its scale is None."""

    @staticmethod
    def forward(
        ctx: Any,
        o: _LayerOptions,
        rows: Tensor,
        weights: Tensor,
        w_gate: Tensor,
        w_up: Tensor,
        w_down: Tensor,
        group_sizes: Tensor,
        group_offset: int | Tensor,
    ) -> Tensor:
        is_trained = any(ctx.needs_input_grad)
        shard = group_sizes, group_offset
        taken, saved_rows = _activations(o, rows, is_trained)
        (of_gate, saved_gate), (of_up, saved_up), (of_down, saved_down) = (
            _weights_of(o, w, is_trained) for w in (w_gate, w_up, w_down)
        )
        gate, up = (
            _watched(o, site, _product(o, taken, w, shard, o.between)) for site, w in (("gate", of_gate), ("up", of_up))
        )
        hidden = _watched(o, "hidden", (weights * _silu(gate.float()) * up.float()).to(o.between))
        activated, saved_hidden = _activations(o, hidden, is_trained)
        ctx.o, ctx.group_offset, ctx.groups = o, group_offset, w_gate.shape[0]
        if is_trained:
            pairs = (saved_rows, saved_hidden, saved_gate, saved_up, saved_down)
            ctx.save_for_backward(*(part for pair in pairs for part in pair), gate, up, weights, group_sizes)
        return _watched(o, "rows", _product(o, activated, of_down, shard, o.dtype))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor | None, ...]:
        o: _LayerOptions = ctx.o
        *saved, gate, up, weights, group_sizes = ctx.saved_tensors
        rows, hidden, of_gate, of_up, of_down = (Quantized(*saved[i : i + 2]) for i in range(0, 10, 2))
        shard = group_sizes, ctx.group_offset
        by_rows, by_columns = _activations(o, dout, True)
        dhidden = _watched(o, "dhidden", _product(o, by_rows, of_down, shard, o.between, transpose_rhs=True)).float()
        gate, up = gate.float(), up.float()
        sigmoid, silu = gate.sigmoid(), _silu(gate)
        dweights = _watched(o, "dweights", (dhidden * silu * up).sum(1, keepdim=True))
        dgate = dhidden * weights * up * sigmoid * (1 + gate * (1 - sigmoid))
        dup = dhidden * weights * silu
        (dgate_rows, dgate_columns), (dup_rows, dup_columns) = (
            _activations(o, _watched(o, site, d.to(o.between)), True) for site, d in (("dgate", dgate), ("dup", dup))
        )
        drows = _product(o, dgate_rows, of_gate, shard, torch.float32, transpose_rhs=True)
        drows += _product(o, dup_rows, of_up, shard, torch.float32, transpose_rhs=True)
        return (
            None,
            _watched(o, "drows", drows.to(o.dtype)),
            dweights,
            _weight_gradient(o, rows, dgate_columns, shard, ctx.groups),
            _weight_gradient(o, rows, dup_columns, shard, ctx.groups),
            _weight_gradient(o, hidden, by_columns, shard, ctx.groups),
            None,
            None,
        )


def _silu(x: Tensor) -> Tensor:
    return x * x.sigmoid()


def _activations(o: _LayerOptions, x: Tensor, is_trained: bool) -> tuple[Quantized, Quantized]:
    """x [M, …] as an operand of products of rows, and (where it is trained) of weights' gradients."""
    if o.quantize is None:
        return Quantized(x, None), Quantized(x, None)
    if o.quantize == "fp8":
        return _dual_quantize(x, o) if is_trained else (_quantize(x, 1, o), Quantized(None, None))
    if not is_trained:
        return mxfp8_quantize(x, 1, check_finite=False), Quantized(None, None)
    both = mxfp8_dual_quantize(x, check_finite=False)
    return Quantized(*both[:2]), Quantized(*both[2:])


def _weights_of(o: _LayerOptions, w: Tensor, is_trained: bool) -> tuple[Quantized, Quantized]:
    """w [G, …] as an operand of products, and (where it is trained) of those with it transposed."""
    if o.quantize is None:
        return Quantized(w, None), Quantized(w, None)
    if o.quantize == "fp8":
        quantized = _quantize(w, (1, 2), o)
        return quantized, quantized
    if not is_trained:
        return mxfp8_quantize(w, 1, check_finite=False), Quantized(None, None)
    both = mxfp8_dual_quantize(w, check_finite=False)
    return Quantized(*both[2:]), Quantized(*both[:2])


_Shard = tuple[Tensor, int | Tensor]
"""group_sizes and group_offset."""


def _product(
    o: _LayerOptions, lhs: Quantized, rhs: Quantized, shard: _Shard, dtype: torch.dtype, transpose_rhs: bool = False
) -> Tensor:
    group_sizes, group_offset = shard
    arguments: dict[str, Any] = {
        "group_offset": group_offset,
        "transpose_rhs": transpose_rhs,
        "preferred_element_type": dtype,
        "tiling": o.tiling,
    }
    if o.quantize == "mxfp8":
        return grouped_gemm(lhs.qvalue, rhs.qvalue, group_sizes, lhs_scale=lhs.scale, rhs_scale=rhs.scale, **arguments)
    return _gmm(lhs, rhs, group_sizes, **arguments)


def _weight_gradient(o: _LayerOptions, lhs: Quantized, rhs: Quantized, shard: _Shard, groups: int) -> Tensor:
    group_sizes, group_offset = shard
    arguments: dict[str, Any] = {
        "group_offset": group_offset,
        "num_actual_groups": groups,
        "preferred_element_type": o.dtype,
        "tiling": o.tiling,
    }
    if o.quantize == "mxfp8":
        scales = {"lhs_scale": lhs.scale, "rhs_scale": rhs.scale}
        return grouped_gemm(lhs.qvalue, rhs.qvalue, group_sizes, ragged="contracting", **scales, **arguments)
    return _tgmm(lhs, rhs, group_sizes, **arguments)


def _range_of(values: Any) -> tuple[int, int] | None:
    """The least and the largest of an int tensor that the host can read at once, None where there is none."""
    readable = isinstance(values, Tensor) and values.device.type == "cpu" and values.dtype == torch.int32
    return (int(values.min()), int(values.max())) if readable and values.numel() else None
