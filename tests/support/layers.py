"""Layers of published models between their projections, of our operations alone: convolution, gates, delta rule.

Golden and kernels are one function of the operations of their package; the kernels' backward passes are those that
JAX and torch make of it.
"""

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from importlib import import_module
from typing import Any, NamedTuple

import numpy as np

from cpu_golden import causal_conv1d, gated_delta_rule, gates, kda
from cpu_golden._lib.activations import sigmoid
from cpu_golden.stages import Stages, exact
from parity import Array, Case, Contract, Op
from parity.op import Backend
from tests.matrix.delta_rule import CHUNKED, contract, conv_contract, gate_contract, is_backward_op
from tests.matrix.ops import F32, is_backward

GATE = {"gated_delta_rule": "softplus_gate", "kda": "bounded_gate"}
"""Of Qwen3-Next, and of Kimi K3."""


class Output(NamedTuple):
    """o [B, T, HV, V], before its norm and output gate."""

    o: Any


class Grads(NamedTuple):
    """The gradients of a layer's arguments of the same names."""

    dx: Any
    dweight: Any
    da: Any
    db: Any
    dA_log: Any
    ddt_bias: Any


class Sizes(NamedTuple):
    """Heads of keys, and channels of a key's head."""

    heads: int
    keys: int

    def heads_of(self, y: Any, values: int) -> list[Any]:
        """q, k and v of y [B, T, 2 H K + HV V], v of so many heads."""
        width = self.heads * self.keys
        parts = y[..., :width], y[..., width : 2 * width], y[..., 2 * width :]
        return [x.reshape(*y.shape[:2], h, -1) for x, h in zip(parts, (self.heads, self.heads, values), strict=True)]


def layer(ops: Any, sizes: Sizes, x: Any, weight: Any, a: Any, b: Any, A_log: Any, dt_bias: Any) -> Any:
    """o of a layer with the operations of a package: conv, gate, rule, and a sigmoid."""
    q, k, v = sizes.heads_of(ops["conv"](x, weight, activation="silu").y, b.shape[2])
    g = ops["gate"](a, A_log=A_log, dt_bias=dt_bias)
    return ops["rule"](q, k, v, g=g, beta=ops["sigmoid"](b), use_qk_l2norm_in_kernel=True).o


def kernels(package: str, rule: str, sigmoid: Any) -> dict[str, Any]:
    """The operations of a layer in a package of kernels."""
    modules = {"conv": "causal_conv1d", "gate": "gates", "rule": rule}
    names = {"conv": "causal_conv1d", "gate": GATE[rule], "rule": f"chunk_{rule}"}
    found = {what: getattr(import_module(f"{package}.{modules[what]}"), name) for what, name in names.items()}
    return found | {"sigmoid": sigmoid}


def on_tpu(*, rule: str, sizes: Sizes, **tensors: Any) -> Output:
    """The layer in JAX."""
    import jax

    ops = kernels("tpu_kernels", rule, lambda b: jax.nn.sigmoid(b.astype(F32)))
    return Output(layer(ops, sizes, **tensors))


def on_tpu_bwd(*, rule: str, sizes: Sizes, do: Any, **tensors: Any) -> Grads:
    """Its gradients."""
    import jax

    _, backward = jax.vjp(lambda given: on_tpu(rule=rule, sizes=sizes, **given).o, tensors)
    (grads,) = backward(do)
    return Grads(*(grads[name.removeprefix("d")] for name in Grads._fields))


def on_gpu(*, rule: str, sizes: Sizes, **tensors: Any) -> Output:
    """The layer in torch."""
    ops = kernels("gpu_reference", rule, lambda b: b.float().sigmoid())
    return Output(layer(ops, sizes, **tensors))


def on_gpu_bwd(*, rule: str, sizes: Sizes, do: Any, **tensors: Any) -> Grads:
    """Its gradients."""
    import torch

    leaves = {name: x.detach().requires_grad_() for name, x in tensors.items()}
    o = on_gpu(rule=rule, sizes=sizes, **leaves).o
    return Grads(*torch.autograd.grad(o, [leaves[name.removeprefix("d")] for name in Grads._fields], do))


RENAMED = {"acc": "conv_acc", "product": "conv_product"}
"""Sites of the convolution that a delta rule's dots have too, with another rounding."""


def golden(*, rule: str, sizes: Sizes, stages: Stages = exact, **tensors: Any) -> Output:
    """The layer in float64. Sites: those of its operations, and beta."""
    module = {"gated_delta_rule": gated_delta_rule, "kda": kda}[rule]
    ops = {
        "conv": partial(causal_conv1d.causal_conv1d, stages=stages.renamed(**RENAMED)),
        "gate": partial(getattr(gates, GATE[rule]), stages=stages),
        "rule": partial(getattr(module, f"chunk_{rule}_fwd"), stages=stages),
        "sigmoid": partial(beta, stages),
    }
    return Output(layer(ops, sizes, **tensors))


def golden_bwd(*, rule: str, sizes: Sizes, do: Any, stages: Stages = exact, **tensors: Any) -> Grads:
    """Its gradients, by the operations' own. Sites: those of both passes, and dy (the gradients of q, k and v)."""
    seen: dict[str, Any] = {}
    module = {"gated_delta_rule": gated_delta_rule, "kda": kda}[rule]

    def keep(q: Any, k: Any, v: Any, **others: Any) -> Output:
        seen.update(q=q, k=k, v=v, **others)
        return Output(None)

    x, weight, a, b, A_log, dt_bias = (tensors[name.removeprefix("d")] for name in Grads._fields)
    of_conv = stages.renamed(**RENAMED)
    ops = {
        "conv": partial(causal_conv1d.causal_conv1d, stages=of_conv),
        "gate": partial(getattr(gates, GATE[rule]), stages=stages),
        "rule": keep,
        "sigmoid": partial(beta, stages),
    }
    layer(ops, sizes, x, weight, a, b, A_log, dt_bias)
    of_rule = getattr(module, f"chunk_{rule}_bwd")(**seen, do=do.astype(np.float64), stages=stages)
    parts = [grad.reshape(*x.shape[:2], -1) for grad in of_rule[:3]]
    dy = stages("dy", np.concatenate(parts, axis=-1))
    given = {"activation": "silu", "stages": of_conv}
    of_x = causal_conv1d.causal_conv1d_bwd(x.astype(np.float64), weight.astype(np.float64), dy, **given)
    of_a = getattr(gates, f"{GATE[rule]}_bwd")(a, of_rule.dg, A_log=A_log, dt_bias=dt_bias, stages=stages)
    db = of_rule.dbeta * seen["beta"] * (1 - seen["beta"])
    return Grads(of_x.dx, of_x.dweight, of_a.da, db, of_a.dA_log, of_a.ddt_bias)


def beta(stages: Stages, b: Any) -> Any:
    """The sigmoid of b in float64. Site: beta."""
    return stages("beta", sigmoid(b.astype(np.float64), exact))


def rule_of(c: Case) -> str:
    """Which delta rule a layer has."""
    return "kda" if "kda" in c.op else "gated_delta_rule"


def inputs(c: Case) -> Mapping[str, Array]:
    """A layer's tensors: x holds q, k and v."""
    per_head = (c.HV, c.K) if rule_of(c) == "kda" else (c.HV,)
    channels = 2 * c.H * c.K + c.HV * c.V
    given = {
        "x": Array((c.B, c.T, channels), c.dtype),
        "weight": Array((channels, c.W), c.dtype),
        "a": Array((c.B, c.T, *per_head), c.dtype),
        "b": Array((c.B, c.T, c.HV), c.dtype),
        "A_log": Array((c.HV,), F32),
        "dt_bias": Array(per_head, F32),
    }
    return given | ({"do": Array((c.B, c.T, c.HV, c.V), c.dtype)} if is_backward(c) else {})


def layer_contract(c: Case, backend: Backend) -> Contract:
    """Those of its operations, one after the other."""
    way = "_bwd" if is_backward(c) else ""
    rule = contract(replace(c, op=f"chunk_{rule_of(c)}{way or '_fwd'}"), backend)
    conv = conv_contract(replace(c, op=f"causal_conv1d{way}"), backend).sites
    gate = gate_contract(replace(c, op=f"{GATE[rule_of(c)]}{way}"), backend).sites
    between = {"y": c.dtype, "g": F32, "beta": F32} | ({"dy": c.dtype, "dg": F32, "dbeta": F32} if way else {})
    sites = gate | {RENAMED.get(name, name): dtype for name, dtype in conv.items()} | rule.sites | between
    outs = {"dA_log": F32, "ddt_bias": F32} if way else {}
    return replace(rule, out=c.dtype, outs=outs, sites=sites)


def arguments(c: Case) -> Mapping[str, Any]:
    """Which rule, and how x is cut into heads."""
    return {"rule": rule_of(c), "sizes": Sizes(c.H, c.K)}


DEFAULTS = CHUNKED | dict(l2norm=True, rate=True, bias=True, activation="silu", wide_weight=False)
SMALL = dict(B=1, T=40, H=1, HV=2, K=16, V=16, W=4)
QWEN3_NEXT = dict(B=1, T=130, H=1, HV=2, K=128, V=128, W=4)  # one of 16 heads of keys
KIMI_K3 = dict(B=1, T=130, H=1, HV=1, K=128, V=128, W=4)  # one of 96 heads
LAYERS = tuple(
    op.with_cases(
        op.grid([SMALL], dtype=[F32], tier="full" if is_backward_op(op) else "default"),
        op.grid([SMALL, shape], dtype=[F32, "bfloat16"], tier="full"),
    )
    for name, shape in (("gated_delta_rule_layer", QWEN3_NEXT), ("kda_layer", KIMI_K3))
    for op in (
        Op(f"{name}{way}", golden=reference, tpu=f"{__name__}:on_tpu{way}", gpu=f"{__name__}:on_gpu{way}",
           inputs=inputs, arguments=arguments, contract=layer_contract, defaults=DEFAULTS, twin=False)
        for way, reference in (("", golden), ("_bwd", golden_bwd))
    )
)  # fmt: skip
