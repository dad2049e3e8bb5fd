"""What the device at hand can do, asked before a kernel is launched."""
# mypy: allow-untyped-defs, allow-untyped-decorators

from collections.abc import Mapping

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.runtime.interpreter import InterpretedFunction


@triton.jit
def _bfloat16_probe_kernel(lhs, rhs, out):
    i = tl.arange(0, 16)
    tile = i[:, None] * 16 + i[None, :]
    product = tl.dot(tl.load(lhs + tile), tl.load(rhs + tile), input_precision="ieee")
    tl.store(out + tile, product.to(tl.bfloat16))


def is_interpreted() -> bool:
    """Whether kernels run in Triton's interpreter.

    Triton reads TRITON_INTERPRET once for its own functions and once for each kernel, so both are asked.
    """
    return isinstance(_bfloat16_probe_kernel, InterpretedFunction) and isinstance(tl.cdiv, InterpretedFunction)


def check_devices(tensors: Mapping[str, Tensor | None]) -> torch.device:
    """The device that all `tensors` are on (None is skipped).

    Raises ValueError where they are on several, RuntimeError where it is the CPU and kernels are not interpreted.
    """
    devices = {name: tensor.device for name, tensor in tensors.items() if tensor is not None}
    if len(set(devices.values())) != 1:
        where = ", ".join(f"{name} on {device}" for name, device in devices.items())
        raise ValueError(f"all tensors must be on one device, got {where}")
    device = next(iter(devices.values()))
    if device.type == "cpu" and not is_interpreted():
        raise RuntimeError(
            "Triton kernels run on CPU tensors only if TRITON_INTERPRET=1 was set before triton was imported"
        )
    return device


def computes_bfloat16(device: torch.device) -> bool:
    """Whether kernels on `device` multiply bfloat16 operands and round to bfloat16 as the format says.

    Every GPU does. Triton's interpreter (3.6 to 3.9) multiplies the bit patterns and truncates, unless it is
    mended: so it is tried out, and on every call, because a mended one may be swapped in at any time.
    """
    if device.type != "cpu":
        return True
    lhs = torch.zeros(16, 16, dtype=torch.bfloat16)
    lhs[:, 0], lhs[:, 1] = 1.0, 3 * 2.0**-8  # the sum is a tie, which nearest-even and truncation settle differently
    out = torch.empty_like(lhs)
    _bfloat16_probe_kernel[(1,)](lhs, torch.ones_like(lhs), out)
    return bool((out == 1 + 2 * 2.0**-7).all())
