"""A forward pass and its backward pass as one differentiable function, both shown to one probe."""
# mypy: allow-untyped-defs

from collections.abc import Callable
from functools import wraps
from typing import Any, ParamSpec, TypeVar

import torch
from torch.autograd.function import once_differentiable

from op_arguments.gla import Output
from op_arguments.options import variant
from op_arguments.probe import probing

P = ParamSpec("P")
Backward = TypeVar("Backward", bound=Callable[..., Any])
OTHERS = ("g", "g_gamma", "gk", "beta", "initial_state", "cu_seqlens")
"""Tensors that are options: to be saved as all others, since autograd sees only then that one was changed."""


def differentiable(forward: Callable[P, Output], backward: Callable[..., Any]) -> Callable[P, Output]:
    """The function `…` of a `…_fwd`, differentiable in its tensors: `backward` computes their gradients."""

    def both(q, k, v, **options):
        tensors = {"q": q, "k": k, "v": v}
        tensors |= {name: options.pop(name) for name in OTHERS if name in options}
        return Output(*_Passes.apply(forward, backward, options, tuple(tensors), *tensors.values()))  # type: ignore[no-untyped-call]

    name = forward.__name__
    return variant(both, forward, name.removesuffix("_fwd"), f"`{name}`, differentiable in its tensors.")


class _Passes(torch.autograd.Function):
    """The two passes."""

    @staticmethod
    def forward(ctx, forward, backward, options, names, *tensors):
        ctx.save_for_backward(*tensors)
        ctx.set_materialize_grads(False)
        ctx.backward_pass, ctx.options, ctx.names = backward, options, names
        return forward(**dict(zip(names, tensors, strict=True)), **options)

    @staticmethod
    @once_differentiable
    def backward(ctx, do, dht):
        given = dict(zip(ctx.names, ctx.saved_tensors, strict=True))
        options = {name: value for name, value in ctx.options.items() if name != "output_final_state"}
        do = torch.zeros_like(given["v"]) if do is None else do
        grads = ctx.backward_pass(**given, do=do, dht=dht, **options)._asdict()
        grads |= {"dinitial_state": grads["dh0"], "dcu_seqlens": None}
        return None, None, None, None, *(grads[f"d{name}"] for name in ctx.names)


def probed(backward: Backward) -> Backward:
    """A `backward(ctx, …)` that is shown to ctx.probe: autograd may call it where none is active any more."""

    @wraps(backward)
    def shown(ctx, *grads):
        with probing(ctx.probe):
            return backward(ctx, *grads)

    return shown  # type: ignore[return-value]
