"""A GPU's functions as Triton compiles them, and what only CUDA has: streams and graphs."""
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators

from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import numpy as np
import torch
import triton
import triton.language as tl

from parity.backends import runner
from parity.interop import to_numpy, to_torch

BLOCK = 1024
T = TypeVar("T")


@triton.jit
def _unary_kernel(x, out, n, FUNCTION: tl.constexpr, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    value = tl.load(x + at, mask=at < n, other=1.0)
    if FUNCTION == "exp":
        value = tl.exp(value)
    elif FUNCTION == "exp2":
        value = tl.exp2(value)
    elif FUNCTION == "log":
        value = tl.log(value)
    elif FUNCTION == "reciprocal":
        value = 1.0 / value
    elif FUNCTION == "rsqrt":
        value = tl.rsqrt(value)
    elif FUNCTION == "minimum":
        value = tl.minimum(value, 1.0)
    else:
        value = value * 1.0
    tl.store(out + at, value.to(out.dtype.element_ty), mask=at < n)


@triton.jit
def _dot_kernel(a, b, out, M: tl.constexpr, K: tl.constexpr):
    i, j, k = tl.arange(0, M)[:, None], tl.arange(0, 16)[None, :], tl.arange(0, K)
    product = tl.dot(tl.load(a + i * K + k[None, :]), tl.load(b + k[:, None] * 16 + j))
    tl.store(out + i * 16 + j, product)


def _unary(x, *, function: str, dtype: str = "float32"):
    out = torch.empty(x.shape, dtype=getattr(torch, dtype), device=x.device)
    _unary_kernel[(triton.cdiv(x.numel(), BLOCK),)](x, out, x.numel(), FUNCTION=function, BLOCK=BLOCK)
    return out


def _dot(a, b):
    out = torch.empty(a.shape[0], 16, dtype=torch.float32, device=a.device)
    _dot_kernel[(1,)](a, b, out, M=a.shape[0], K=a.shape[1])
    return out


class Gpu:
    """`probes.Device` of the GPU, or of Triton's interpreter."""

    def unary(self, x: np.ndarray, *, function: str) -> np.ndarray:
        """See `probes.Device`."""
        return np.asarray(runner("gpu").run(_unary, {"x": x}, {"function": function}))

    def convert(self, x: np.ndarray, *, dtype: str) -> np.ndarray:
        """See `probes.Device`."""
        return np.asarray(runner("gpu").run(_unary, {"x": x}, {"function": "", "dtype": dtype}))

    def dot(self, a: np.ndarray, b: np.ndarray) -> np.ndarray:
        """See `probes.Device`."""
        return np.asarray(runner("gpu").run(_dot, {"a": a, "b": b}, {}))


def device() -> Gpu:
    """The functions of the GPU of this process."""
    return Gpu()


def kind() -> str:
    """As in `parity.contact.assumptions`."""
    if torch.version.hip:
        return "hip"
    return "hopper" if torch.cuda.is_available() and torch.cuda.get_device_capability() in ((8, 9), (9, 0)) else "cuda"


def _arrays(result: Any) -> list[np.ndarray]:
    """The outputs of a call, those that are there."""
    return [to_numpy(x) for x in (result if isinstance(result, tuple) else (result,)) if x is not None]


def on_streams(
    kernel: Callable[..., Any], inputs: Mapping[str, Any], arguments: Mapping[str, Any]
) -> list[list[np.ndarray]]:
    """What a call returns on two streams at once. Raises NotImplementedError without a CUDA device."""
    if not torch.cuda.is_available():
        raise NotImplementedError("needs a CUDA device")
    streams = [torch.cuda.Stream() for _ in range(2)]  # type: ignore[no-untyped-call]
    tensors = {name: to_torch(x, device="cuda") for name, x in inputs.items() if x is not None}
    torch.cuda.synchronize()
    results = []
    for stream in streams:
        with torch.cuda.stream(stream):
            results.append(kernel(**tensors, **arguments))
    torch.cuda.synchronize()
    return [_arrays(result) for result in results]


def captured(call: Callable[[], T]) -> tuple[torch.cuda.CUDAGraph, T]:
    """A graph of a call's kernels, and the call's result, which the graph fills anew where it is replayed.

    A backward pass runs on its forward pass's stream: where that is to be captured, it must be the current one and not
    the default.
    """
    stream = torch.cuda.current_stream()
    if stream == torch.cuda.default_stream():
        stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    with torch.cuda.stream(stream):
        call()  # compiles
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        result = call()
    return graph, result


def replayed(
    kernel: Callable[..., Any],
    inputs: Mapping[str, Any],
    changed: Mapping[str, Any],
    arguments: Mapping[str, Any],
) -> tuple[list[np.ndarray], list[np.ndarray]]:
    """What a captured graph of a call returns after some of its tensors `changed`, and what a call with these does.

    Raises NotImplementedError without a CUDA device.
    """
    if not torch.cuda.is_available():
        raise NotImplementedError("needs a CUDA device")
    tensors = {name: to_torch(x, device="cuda") for name, x in inputs.items() if x is not None}
    graph, result = captured(lambda: kernel(**tensors, **arguments))
    for name, x in changed.items():
        tensors[name].copy_(to_torch(x, device="cuda"))
    graph.replay()
    torch.cuda.synchronize()
    return _arrays(result), _arrays(kernel(**tensors, **arguments))
