"""What a backward pass reads is what its forward pass was given, or torch says that it is not.

Buffers of offsets and group sizes are used again, in pipelines and by replayed CUDA graphs: one kept anywhere but in
`save_for_backward` would be read with the next step's values, and nobody would know.
"""

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import pytest

from parity.backends import load_kernel
from parity.inputs import draw
from parity.interop import to_jax, to_torch
from parity.op import Op
from tests.matrix import OPS
from tests.support.functions import FRAMEWORKS, PACKAGES, public
from tests.support.interpreter import DEVICE
from tests.support.tiny import tiny

CHOICES = ("permute", "unpermute")
"""Differentiable, with no function of their own for the gradients."""
BACKWARD = [op for op in OPS if op.name.endswith("_bwd") or op.name in CHOICES]
COTANGENTS = ("do", "dy", "dht", "dout", "dg")
SETTINGS: dict[str, list[dict[str, Any]]] = {
    "grouped_dense_bwd": [dict(quantize=False, bwd_quantize=False), {}],
    "moe_layer_bwd": [{}, dict(quantize="fp8"), dict(quantize="mxfp8")],
}
USUAL = ("unpermute", "grouped_dense_bwd", "chunk_simple_gla_bwd")
"""One of each way to keep tensors; those of `moe_layer` are of the others."""
CALLS = [
    pytest.param(op, settings, id="-".join([op.name, *map(str, settings.values())]), marks=[pytest.mark.full] * is_full)
    for op in BACKWARD
    for nth, settings in enumerate(SETTINGS.get(op.name, [{}]))
    for is_full in [op.name not in USUAL or nth > 0]
]


def forward_of(op: Op, backend: str) -> Callable[..., Any]:
    """The differentiable function of a backward pass."""
    return load_kernel(getattr(op, backend).removesuffix("_bwd"))


def options_of(op: Op, settings: Mapping[str, Any]) -> dict[str, Any]:
    case = tiny(op, **settings)
    of_scan = {"output_final_state": True} if "dht" in op.inputs(case) else {}
    return {**op.arguments(case), **op.route(case), **of_scan}


def given(op: Op, settings: Mapping[str, Any]) -> dict[str, np.ndarray]:
    """The tensors of a call; a shard's offset too."""
    tensors = {name: x for name, x in draw(op, tiny(op, **settings)).items() if x is not None}
    first = options_of(op, settings).get("group_offset")
    return tensors if first is None else {**tensors, "group_offset": np.array([first], np.int32)}


def other_values(name: str, x: np.ndarray) -> np.ndarray:
    """Other values for an argument, as good as those that it has."""
    if name == "cu_seqlens":
        return np.array([0, *(x[1:-1] + 1), x[-1]], x.dtype)
    if name == "group_offset":
        return x - 1
    return x[::-1].copy() if x.dtype.kind == "i" else -x


@pytest.mark.parametrize("backend", ["tpu", "gpu"])
def test_every_differentiable_function_is_here(backend):
    pytest.importorskip(FRAMEWORKS[backend])
    names = public(PACKAGES[backend])
    assert {name for name in names if f"{name}_bwd" in names} | {*CHOICES} == {
        op.name.removesuffix("_bwd") for op in BACKWARD
    }


@pytest.mark.gpu
@pytest.mark.parametrize(("op", "settings"), CALLS)
def test_torch_says_so_where_an_argument_has_changed_since(op, settings):
    torch = pytest.importorskip("torch")
    pytest.importorskip("triton")
    options = options_of(op, settings)

    def placed(arrays: Mapping[str, np.ndarray]) -> dict[str, Any]:
        return {name: to_torch(x, device=DEVICE) for name, x in arrays.items()}

    others = placed({name: other_values(name, x) for name, x in given(op, settings).items()})

    def gradients(changed: str | None) -> list[Any]:
        tensors = placed(given(op, settings))
        cotangents = [tensors.pop(name) for name in COTANGENTS if name in tensors]
        primals = {name: x.requires_grad_() for name, x in tensors.items() if x.is_floating_point()}
        results = forward_of(op, "gpu")(**options | tensors)
        outs = [x for x in (results if isinstance(results, tuple) else (results,)) if x is not None and x.requires_grad]
        if changed is not None:
            tensors[changed].detach().copy_(others[changed])
        return list(torch.autograd.grad(outs, list(primals.values()), cotangents or [x.detach() for x in outs]))

    expected, noticed = gradients(None), set()
    for name in given(op, settings).keys() - {*COTANGENTS}:
        try:
            got = gradients(name)
        except RuntimeError as error:
            assert "modified by an inplace operation" in str(error)
            noticed.add(name)
        else:
            assert all(map(torch.equal, got, expected)), name
    assert noticed or op.name == "permute"  # whose backward pass reads its own plan alone


@pytest.mark.tpu
@pytest.mark.parametrize(("op", "settings"), CALLS)
def test_jax_keeps_what_a_numpy_argument_said(op, settings):
    """JAX's own arrays cannot change; of NumPy's it shares the memory on the CPU. Floats are `jax.vjp`'s own."""
    jax = pytest.importorskip("jax")
    options, tensors = options_of(op, settings), given(op, settings)
    cotangents = [to_jax(tensors.pop(name)) for name in COTANGENTS if name in tensors]
    primals = {name: to_jax(x) for name, x in tensors.items() if x.dtype.kind != "i"}
    numpy = {name: x for name, x in tensors.items() if x.dtype.kind == "i"}
    changed = {name: other_values(name, x) for name, x in numpy.items()}

    def called(primals: Any) -> list[Any]:
        results = forward_of(op, "tpu")(**options | numpy | primals)
        return [x for x in jax.tree.leaves(results) if x.dtype.kind != "i"]

    outs, backward = jax.vjp(called, primals)
    expected = backward(cotangents or outs)
    outs, backward = jax.vjp(called, primals)
    jax.block_until_ready(outs)
    for name, values in changed.items():
        numpy[name][...] = values
    assert jax.tree.all(jax.tree.map(np.array_equal, backward(cotangents or outs), expected))
