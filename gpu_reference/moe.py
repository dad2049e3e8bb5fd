"""The layer of a mixture of SwiGLU experts on the GPU; it is defined in `cpu_golden/moe.py`."""

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from gpu_reference._lib.autograd import probed
from gpu_reference._lib.exchange import exchange_plans, swap
from gpu_reference._lib.hardware import check_devices
from gpu_reference._lib.operands import on_device, primal_of, scalar
from gpu_reference._lib.pairs import dual_quantized, product, quantized, weight_product
from gpu_reference._lib.routing import combine, plan_rows, take
from gpu_reference.gmm import gmm, tgmm
from gpu_reference.grouped_gemm import grouped_gemm
from gpu_reference.mxfp8 import mxfp8_dual_quantize, mxfp8_quantize
from op_arguments.moe import LayerGrads, LayerOptions, check_expert_parallel, check_layer_dout, check_moe_layer
from op_arguments.options import options_of
from op_arguments.permute import permuted_rows
from op_arguments.probe import Probe, active, probe, probing
from op_arguments.quantize import Quantized


@dataclass(frozen=True, kw_only=True)
class _Options(LayerOptions):
    """As a GPU has them."""

    process_group: dist.ProcessGroup | None = None


@dataclass(frozen=True, kw_only=True)
class _Static(_Options):
    """What is no tensor in a checked `moe_layer`."""

    dtype: torch.dtype  # of x and the experts' weights

    @property
    def between(self) -> torch.dtype:
        """The dtype of what one matmul hands to the next."""
        return self.dtype if self.quantize is None else torch.float32


@options_of(_Options)
def moe_layer(
    x: Tensor,
    w_router: Tensor,
    w_gate: Tensor,
    w_up: Tensor,
    w_down: Tensor,
    *,
    top_k: int,
    group_offset: int | Tensor = 0,
    **options: Any,
) -> Tensor:
    """[T, D]: each token through the top_k SwiGLU experts that its router likes best, weighted; differentiable.

    Arguments, result and errors as `cpu_golden.moe.moe_layer`; the result has x's dtype. options: those of
    `LayerOptions`, and process_group. Here: with quantize the quantised operands are all that a backward pass keeps of
    them.
    process_group: expert parallelism over its processes. Each has T of the tokens, in order, w_router whole and
    G = E / processes of the experts, in order; rows travel by all-to-all in buffers for the worst case, so that no
    process waits for what another counts. Results are those of one process with all tokens and experts within the
    contract, not to the bit: the tile, and on some GPUs the matrix instruction with it, depends on how many rows there
    are.
    Sites shown to a probe: the golden's, of what the matmuls hand on in either pass, of logits, weights and the parts
    of x's gradient.
    Nothing is read back from the device. Also raises ValueError for several devices, and RuntimeError for CPU tensors
    where Triton's interpreter is off.
    """
    asked, first = _Options(top_k=top_k, **options), scalar(group_offset)
    layer = check_moe_layer(x, w_router, w_gate, w_up, w_down, asked, first)
    group_offset = on_device(group_offset, x.device)
    tensors = {"x": x, "w_router": w_router, "w_gate": w_gate, "w_up": w_up, "w_down": w_down}
    check_devices(tensors | {"group_offset": group_offset})
    o = _Static(**vars(asked), dtype=x.dtype)
    if o.process_group is not None:
        check_expert_parallel(layer, o.process_group.size(), first)
    if o.sanitize_grads:
        x, w_router, w_gate, w_up, w_down = (_sanitized(primal) for primal in tensors.values())
    weights, indices = _route(o, x, w_router)
    x = _shown(None, x, "dexperts")
    experts = w_gate, w_up, w_down
    if o.process_group is None:
        most = permuted_rows(layer.tokens, top_k, layer.experts, o.capacity)
        plan = plan_rows(indices, layer.experts, o.capacity, most)
        rows, of_rows = take(x, *plan[:2]), take(weights.reshape(-1, 1), plan.source, plan.slots.reshape(-1, 1))
        out = _experts(o, rows, of_rows, *experts, plan.group_sizes, group_offset)
        return combine(out, None, plan.slots, plan.source)
    sent, received = exchange_plans(o.process_group, indices, layer.experts, o.capacity)
    rows, of_rows = take(x, *sent[:2]), take(weights.reshape(-1, 1), sent.source, sent.slots.reshape(-1, 1))
    rows, of_rows = (take(swap(t, o.process_group), *received[:2]) for t in (rows, of_rows))
    out = _experts(o, rows, of_rows, *experts, received.group_sizes, group_offset)
    out = swap(take(out, received.slots.reshape(-1), received.source[:, None]), o.process_group)
    return combine(out, None, sent.slots, sent.source)


@options_of(_Options)
def moe_layer_bwd(
    x: Tensor,
    w_router: Tensor,
    w_gate: Tensor,
    w_up: Tensor,
    w_down: Tensor,
    dout: Tensor,
    *,
    top_k: int,
    group_offset: int | Tensor = 0,
    **options: Any,
) -> LayerGrads:
    """The gradients of `moe_layer` in all five of its tensors, as autograd gives them, for a gradient dout [T, D].

    In the dtypes of the primals; zero for experts without rows. With process_group w_router's is the part of this
    process's tokens. All else as `moe_layer`.
    """
    primals = [primal_of(tensor) for tensor in (x, w_router, w_gate, w_up, w_down)]
    with torch.enable_grad():
        out = moe_layer(*primals, top_k=top_k, group_offset=group_offset, **options)
    check_layer_dout(dout, x)
    return LayerGrads(*torch.autograd.grad(out, primals, dout))


def _route(o: _Static, x: Tensor, w_router: Tensor) -> tuple[Tensor, Tensor]:
    """The weights [T, k] float32 of each token's experts, and which these are."""
    logits: Tensor = _Logits.apply(_shown(None, x, "drouter"), w_router)  # type: ignore[no-untyped-call]
    logits = _shown("logits", logits, "dlogits")
    # Not torch.topk, which leaves open which of equal ones it takes.
    indices = torch.sort(logits.detach(), dim=1, descending=True, stable=True).indices[:, : o.top_k]
    weights = logits.gather(1, indices).softmax(1) if o.renormalize else logits.softmax(1).gather(1, indices)
    return _shown("weights", weights), indices.int()


class _Logits(torch.autograd.Function):
    """x @ w_router in float32, whatever torch's own matmuls are allowed to round to: a `gmm` of one group."""

    @staticmethod
    @probing(None)
    def forward(ctx: Any, x: Tensor, w_router: Tensor) -> Tensor:
        ctx.save_for_backward(x, w_router)
        return gmm(x.float(), w_router.float()[None], _one_group(x))

    @staticmethod
    @once_differentiable
    @probing(None)
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


def _shown(site: str | None, x: Tensor, gradient: str | None = None) -> Tensor:
    """x, shown to a probe as what is at a site, and its gradient as what is at another."""
    if active() is None:
        return x
    shown: Tensor = _Shown.apply(active(), site, gradient, x)  # type: ignore[no-untyped-call]
    return shown


class _Shown(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, shows: Probe, site: str | None, gradient: str | None, x: Tensor) -> Tensor:
        ctx.shows, ctx.gradient = shows, gradient
        return x.view_as(x) if site is None else shows(site, x).view_as(x)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return None, None, None, grad if ctx.gradient is None else ctx.shows(ctx.gradient, grad)


def _experts(*arguments: Any) -> Tensor:
    """rows [M, D], sorted by expert, through their experts, times their weights [M, 1]; as `_Experts.forward`."""
    out: Tensor = _Experts.apply(*arguments)  # type: ignore[no-untyped-call]
    return out


class _Experts(torch.autograd.Function):
    """The two passes. An operand is a pair (qvalue, scale) throughout; where it is not quantised, its scale is None."""

    @staticmethod
    def forward(
        ctx: Any,
        o: _Static,
        rows: Tensor,
        weights: Tensor,
        w_gate: Tensor,
        w_up: Tensor,
        w_down: Tensor,
        group_sizes: Tensor,
        group_offset: Tensor,
    ) -> Tensor:
        is_trained = any(ctx.needs_input_grad)
        shard = group_sizes, group_offset
        taken, saved_rows = _activations(o, rows, is_trained)
        (of_gate, saved_gate), (of_up, saved_up), (of_down, saved_down) = (
            _weights_of(o, w, is_trained) for w in (w_gate, w_up, w_down)
        )
        gate, up = (
            probe(site, _product(o, taken, w, shard, o.between)) for site, w in (("gate", of_gate), ("up", of_up))
        )
        hidden = probe("hidden", (weights * _silu(gate.float()) * up.float()).to(o.between))
        activated, saved_hidden = _activations(o, hidden, is_trained)
        ctx.probe, ctx.o, ctx.groups = active(), o, w_gate.shape[0]
        if is_trained:
            pairs = (saved_rows, saved_hidden, saved_gate, saved_up, saved_down)
            ctx.save_for_backward(*(part for pair in pairs for part in pair), gate, up, weights, *shard)
        return probe("rows", _product(o, activated, of_down, shard, o.dtype))

    @staticmethod
    @once_differentiable
    @probed
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor | None, ...]:
        o: _Static = ctx.o
        *saved, gate, up, weights, group_sizes, group_offset = ctx.saved_tensors
        rows, hidden, of_gate, of_up, of_down = (Quantized(*saved[i : i + 2]) for i in range(0, 10, 2))
        shard = group_sizes, group_offset
        by_rows, by_columns = _activations(o, dout, True)
        dhidden = probe("dhidden", _product(o, by_rows, of_down, shard, o.between, transpose_rhs=True)).float()
        gate, up = gate.float(), up.float()
        sigmoid, silu = gate.sigmoid(), _silu(gate)
        dweights = probe("dweights", (dhidden * silu * up).sum(1, keepdim=True))
        dgate = dhidden * weights * up * sigmoid * (1 + gate * (1 - sigmoid))
        dup = dhidden * weights * silu
        (dgate_rows, dgate_columns), (dup_rows, dup_columns) = (
            _activations(o, probe(site, d.to(o.between)), True) for site, d in (("dgate", dgate), ("dup", dup))
        )
        drows = _product(o, dgate_rows, of_gate, shard, torch.float32, transpose_rhs=True)
        drows += _product(o, dup_rows, of_up, shard, torch.float32, transpose_rhs=True)
        return (
            None,
            probe("drows", drows.to(o.dtype)),
            dweights,
            _weight_gradient(o, rows, dgate_columns, shard, ctx.groups),
            _weight_gradient(o, rows, dup_columns, shard, ctx.groups),
            _weight_gradient(o, hidden, by_columns, shard, ctx.groups),
            None,
            None,
        )


def _silu(x: Tensor) -> Tensor:
    return x * x.sigmoid()


@probing(None)
def _activations(o: _Static, x: Tensor, is_trained: bool) -> tuple[Quantized, Quantized]:
    """x [M, …] as an operand of products of rows, and (where it is trained) of weights' gradients."""
    if o.quantize is None:
        return Quantized(x, None), Quantized(x, None)
    if o.quantize == "fp8":
        return dual_quantized(x, o.block_size) if is_trained else (quantized(x, 1, o.block_size), Quantized(None, None))
    if not is_trained:
        return mxfp8_quantize(x, 1, check_finite=False), Quantized(None, None)
    both = mxfp8_dual_quantize(x, check_finite=False)
    return Quantized(*both[:2]), Quantized(*both[2:])


@probing(None)
def _weights_of(o: _Static, w: Tensor, is_trained: bool) -> tuple[Quantized, Quantized]:
    """w [G, …] as an operand of products, and (where it is trained) of those with it transposed."""
    if o.quantize is None:
        return Quantized(w, None), Quantized(w, None)
    if o.quantize == "fp8":
        both_ways = quantized(w, (1, 2), o.block_size)
        return both_ways, both_ways
    if not is_trained:
        return mxfp8_quantize(w, 1, check_finite=False), Quantized(None, None)
    both = mxfp8_dual_quantize(w, check_finite=False)
    return Quantized(*both[2:]), Quantized(*both[:2])


_Shard = tuple[Tensor, Tensor]
"""group_sizes and group_offset."""


@probing(None)
def _product(
    o: _Static, lhs: Quantized, rhs: Quantized, shard: _Shard, dtype: torch.dtype, transpose_rhs: bool = False
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
    return product(lhs, rhs, group_sizes, **arguments)


@probing(None)
def _weight_gradient(o: _Static, lhs: Quantized, rhs: Quantized, shard: _Shard, groups: int) -> Tensor:
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
    return weight_product(lhs, rhs, group_sizes, **arguments)
