"""A forward pass and its backward pass as one differentiable function."""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple, ParamSpec

import jax

from op_arguments.gla import Output, check_forward
from op_arguments.options import variant
from tpu_kernels._lib.arguments import concrete_values, held, resolve_interpret

P = ParamSpec("P")
GATES = ("g", "g_gamma", "gk")


def differentiable(forward: Callable[P, Output], backward: Callable[..., Any]) -> Callable[P, Output]:
    """The function `…` of a `…_fwd`, differentiable in its arrays, which are all that is kept for it."""

    def both(q: jax.Array, k: jax.Array, v: jax.Array, **options: Any) -> Output:
        gates = {name: options.pop(name) for name in GATES if name in options}
        initial_state, cu_seqlens = options.pop("initial_state", None), options.pop("cu_seqlens", None)
        # Here and not only in the passes: inside a custom_vjp all values are traced.
        offsets = concrete_values(cu_seqlens)
        check_forward(q, k, v, gates, options.get("scale"), initial_state, cu_seqlens, offsets)
        arrays = dict(q=q, k=k, v=v, **gates, initial_state=initial_state, cu_seqlens=held(cu_seqlens))
        return differentiated(forward, backward, arrays, options)

    name = forward.__name__
    return variant(both, forward, name.removesuffix("_fwd"), f"`{name}`, differentiable in its arrays.")


def differentiated(
    forward: Callable[..., Output], backward: Callable[..., Any], arrays: dict[str, Any], options: dict[str, Any]
) -> Output:
    """forward(**arrays, **options), whose gradients are those of `backward`; the arrays are all that is kept."""
    options = options | {"interpret": resolve_interpret(options.get("interpret"), arrays["q"])}
    result: Output = _scan(_Passes(forward, backward, tuple(options.items())), arrays)
    return result


class _Passes(NamedTuple):
    forward: Callable[..., Output]
    backward: Callable[..., Any]
    options: tuple[tuple[str, Any], ...]


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _scan(passes: _Passes, arrays: dict[str, Any]) -> Any:
    return passes.forward(**arrays, **dict(passes.options))


def _scan_fwd(passes: _Passes, arrays: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    return _scan(passes, arrays), arrays


def _scan_bwd(passes: _Passes, arrays: dict[str, Any], cotangents: Output) -> tuple[dict[str, Any]]:
    do, dht = cotangents
    options = {name: value for name, value in passes.options if name != "output_final_state"}
    grads = passes.backward(**arrays, do=do, dht=dht, **options)._asdict()
    grads |= {"dinitial_state": grads["dh0"], "dcu_seqlens": None}
    return ({name: grads[f"d{name}"] for name in arrays},)


_scan.defvjp(_scan_fwd, _scan_bwd)
