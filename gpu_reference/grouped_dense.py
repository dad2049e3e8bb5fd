"""Dense layers of groups on the GPU, in all precisions; they are defined in `cpu_golden/grouped_dense.py`."""

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn.functional import pad

from gpu_reference._lib.autograd import probed
from gpu_reference._lib.hardware import architecture, check_devices, supports_matmul
from gpu_reference._lib.operands import groups_of, on_device, primal_of
from gpu_reference._lib.pairs import dual_quantized, padded, product, quantized, weight_product, with_rows
from op_arguments import check_array, check_shape, dtype_name
from op_arguments.gmm import check_gmm
from op_arguments.grouped_dense import DenseOptions, Grads, Quantize
from op_arguments.options import options_of
from op_arguments.probe import active, renamed
from op_arguments.quantize import Quantized


@options_of(DenseOptions)
def grouped_dense(
    lhs: Tensor,
    rhs: Tensor,
    group_sizes: Tensor,
    existing_out: Tensor | None = None,
    *,
    group_offset: int | Tensor = 0,
    **options: Any,
) -> Tensor:
    """`gmm` [M, N], differentiable in lhs, rhs and existing_out, with its operands quantised to e4m3 on request.

    Arguments, result and errors as `cpu_golden.grouped_dense.grouped_dense`, options those of `DenseOptions`, dtypes,
    strides and further errors as `gpu_reference.gmm.gmm`. "auto" quantises where the matrix unit multiplies fp8
    natively, which an interpreter does not. Where anything is quantised, what a backward pass keeps of lhs (by columns)
    and rhs is fp8 pairs alone. Gradients have the dtypes of what they are gradients of.
    Sites shown to a probe: those of the forward pass's matmul, and the sums of the other two at dlhs and drhs.
    """
    o = DenseOptions(**options)
    groups = groups_of(group_sizes, group_offset)
    p = check_gmm(lhs, rhs, groups, existing_out, o.transpose_rhs, o.preferred_element_type)
    group_offset = on_device(group_offset, group_sizes.device)
    tensors = {"lhs": lhs, "rhs": rhs, "group_sizes": group_sizes, "existing_out": existing_out}
    device = check_devices(tensors | {"group_offset": group_offset})
    resolved = replace(
        o,
        quantize=_resolved(o.quantize, device),
        bwd_quantize=_resolved(o.bwd_quantize, device),
        preferred_element_type=getattr(torch, p.out_dtype),
    )
    out: Tensor = _GroupedDense.apply(  # type: ignore[no-untyped-call]
        resolved, lhs, rhs, group_sizes, group_offset, existing_out
    )
    return out


@options_of(DenseOptions)
def grouped_dense_bwd(
    lhs: Tensor,
    rhs: Tensor,
    group_sizes: Tensor,
    dout: Tensor,
    existing_out: Tensor | None = None,
    *,
    group_offset: int | Tensor = 0,
    **options: Any,
) -> Grads:
    """The gradients of `grouped_dense` in lhs, rhs and existing_out, as `torch.autograd.grad` gives them.

    dout [M, N]: the gradient of its result, in the dtype of that. All else as `grouped_dense`, but that
    a probe sees nothing of the forward pass.
    """
    primals = [primal_of(x) for x in (lhs, rhs, existing_out) if x is not None]
    lhs, rhs, *existing = primals
    with torch.enable_grad(), renamed(_of_gradients):
        out = grouped_dense(lhs, rhs, group_sizes, *existing, group_offset=group_offset, **options)
    check_array("dout", dout, "M, N", (dtype_name(out.dtype),))
    check_shape("dout", dout, "M, N", tuple(out.shape))
    dlhs, drhs, *passed = torch.autograd.grad(out, primals, dout)
    return Grads(dlhs, drhs, passed[0] if passed else None)


def _resolved(quantize: Quantize, device: torch.device) -> bool:
    if quantize == "auto":
        return supports_matmul(torch.float8_e4m3fn, architecture(device))
    return bool(quantize)


_AT_DLHS, _AT_DRHS = {"acc": "dlhs"}.get, {"acc": "drhs"}.get


def _of_gradients(site: str) -> str | None:
    """The name of a site of the backward pass; the golden of the gradients has none of the forward pass."""
    return site if site in ("dlhs", "drhs") else None


class _GroupedDense(torch.autograd.Function):
    """The two passes. An operand is a pair (qvalue, scale) throughout; where it is not quantised, its scale is None."""

    @staticmethod
    def forward(
        ctx: Any,
        options: DenseOptions,
        lhs: Tensor,
        rhs: Tensor,
        group_sizes: Tensor,
        group_offset: Tensor,
        existing_out: Tensor | None,
    ) -> Tensor:
        _, needs_dlhs, needs_drhs, *_ = ctx.needs_input_grad
        a = saved_a = Quantized(lhs, None)
        b = saved_b = Quantized(rhs, None)
        if options.quantize or (options.bwd_quantize and needs_dlhs):
            saved_b = quantized(rhs, (1, 2), options.block_size)
        if options.quantize:
            b = saved_b
            a, saved_a = (
                dual_quantized(lhs, options.block_size)
                if needs_drhs
                else (quantized(lhs, 1, options.block_size), saved_a)
            )
        elif options.bwd_quantize and needs_drhs:
            saved_a = quantized(padded(lhs, options.block_size), 0, options.block_size)
        ctx.probe, ctx.options, ctx.groups, ctx.dtype = active(), options, rhs.shape[0], lhs.dtype
        nothing = Quantized(None, None)
        kept = *(saved_a if needs_drhs else nothing), *(saved_b if needs_dlhs else nothing)
        ctx.save_for_backward(*kept, group_sizes, group_offset)
        return product(
            a,
            b,
            group_sizes,
            group_offset=group_offset,
            existing_out=existing_out,
            transpose_rhs=options.transpose_rhs,
            preferred_element_type=options.preferred_element_type,
            tiling=options.tiling,
        )

    @staticmethod
    @once_differentiable
    @probed
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor | None, ...]:
        options = ctx.options
        *saved, group_sizes, group_offset = ctx.saved_tensors
        lhs, rhs = Quantized(*saved[:2]), Quantized(*saved[2:])
        _, needs_dlhs, needs_drhs, _, _, needs_passed = ctx.needs_input_grad
        by_rows = by_columns = Quantized(dout, None)
        if options.bwd_quantize and needs_drhs:
            by_rows, by_columns = dual_quantized(dout, options.block_size)
        elif options.bwd_quantize and needs_dlhs:
            by_rows = quantized(dout, 1, options.block_size)
        elif needs_drhs:
            by_columns = Quantized(with_rows(dout, lhs.qvalue.shape[0]), None)

        shared: dict[str, Any] = {"group_offset": group_offset, "preferred_element_type": ctx.dtype}
        dlhs = drhs = passed = None
        if needs_dlhs:
            by_gmm = {"transpose_rhs": not options.transpose_rhs, "tiling": options.swapped_tiling}
            with renamed(_AT_DLHS):
                dlhs = product(by_rows, rhs, group_sizes, **by_gmm, **shared)
        if needs_drhs:
            left, right, tiling = lhs, by_columns, options.tiling
            if options.transpose_rhs:
                left, right, tiling = by_columns, lhs, options.swapped_tiling
            by_tgmm = {"num_actual_groups": ctx.groups, "tiling": tiling}
            with renamed(_AT_DRHS):
                drhs = weight_product(left, right, group_sizes, **by_tgmm, **shared)
        if needs_passed:
            passed = _outside(dout, group_sizes, group_offset, ctx.groups)
        return None, dlhs, drhs, None, None, passed


def _outside(x: Tensor, group_sizes: Tensor, group_offset: Tensor, groups: int) -> Tensor:
    """x [M, N], zero in the rows of active groups. Nothing is read back from the device."""
    ends = pad(group_sizes.cumsum(0), (1, 0))
    first = group_offset.reshape(1).clamp(0, len(group_sizes) - groups).long()
    row = torch.arange(len(x), device=x.device)
    is_active = (ends[first] <= row) & (row < ends[first + groups])
    return torch.where(is_active[:, None], 0, x)
