"""The results of scans, and their two passes as one differentiable function."""
# mypy: allow-untyped-defs

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable


class Output(NamedTuple):
    """o, and the final state where it was asked for."""

    o: Any
    ht: Any


class Gradients(NamedTuple):
    """The gradients of a scan's arguments, None for those that are None; dgates by the gates' names."""

    dq: Any
    dk: Any
    dv: Any
    dgates: dict[str, Any]
    dh0: Any


def differentiable(
    forward: Callable[..., Output],
    backward: Callable[..., Gradients],
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    gates: Mapping[str, Tensor | None],
    initial_state: Tensor | None = None,
    **options: Any,
) -> Output:
    """`forward` (`chunk_fwd` or `recurrent_fwd`), whose gradients `backward` computes."""
    applied = _Scan.apply(  # type: ignore[no-untyped-call]
        forward, backward, tuple(gates), options, q, k, v, initial_state, *gates.values()
    )
    return Output(*applied)


class _Scan(torch.autograd.Function):
    """The two passes."""

    @staticmethod
    def forward(ctx, forward, backward, names, options, q, k, v, initial_state, *gates):
        ctx.save_for_backward(q, k, v, initial_state, *gates)
        ctx.set_materialize_grads(False)
        ctx.backward_pass, ctx.names, ctx.options = backward, names, options
        return forward(q, k, v, gates=dict(zip(names, gates, strict=True)), initial_state=initial_state, **options)

    @staticmethod
    @once_differentiable
    def backward(ctx, do, dht):
        q, k, v, initial_state, *gates = ctx.saved_tensors
        options = {name: value for name, value in ctx.options.items() if name != "output_final_state"}
        gradients = ctx.backward_pass(
            q,
            k,
            v,
            torch.zeros_like(v) if do is None else do,
            gates=dict(zip(ctx.names, gates, strict=True)),
            initial_state=initial_state,
            dht=dht,
            **options,
        )
        dgates = (gradients.dgates[name] for name in ctx.names)
        return None, None, None, None, gradients.dq, gradients.dk, gradients.dv, gradients.dh0, *dgates
