"""Triton kernels: on a CUDA device where torch has one and Triton compiles, else interpreted, tensor cores emulated."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

import torch

from parity.backends import EMULATED, check_unwritten, to_numpy_tree
from parity.backends.emulation import tensor_core
from parity.interop import to_numpy, to_torch
from parity.op import Backend, Inputs


class GpuRunner:
    """Runs Triton kernels; see `parity.backends.Runner`."""

    name: Backend = "gpu"

    def __init__(self) -> None:
        self.real = torch.cuda.is_available() and not tensor_core.interprets()
        self._device = "cuda" if self.real else "cpu"

    @property
    def device_kind(self) -> str:
        """What CUDA calls the GPU, or `emulated`."""
        return torch.cuda.get_device_name() if self.real else EMULATED

    def describe(self) -> str:
        """The device, or what stands in for it."""
        return self.device_kind if self.real else "emulated (Triton interpreted, tensor cores)"

    def run(self, kernel: Callable[..., Any], inputs: Inputs, arguments: Mapping[str, Any]) -> Any:
        """See `parity.backends.Runner.run`."""
        tensors = {name: to_torch(x, device=self._device) for name, x in inputs.items() if x is not None}
        with ExitStack() as emulation:
            if not self.real:
                emulation.enter_context(tensor_core.emulated())
                emulation.enter_context(filled_memory())
            result = to_numpy_tree(kernel(**tensors, **arguments), to_numpy)
        check_unwritten(inputs, tensors, to_numpy)
        return result


@contextmanager
def filled_memory() -> Iterator[None]:
    """Let new tensors be NaN, of integers the largest: what a kernel leaves unwritten is not what was there before."""
    before = torch.get_deterministic_debug_mode()
    # Fills them (torch.utils.deterministic.fill_uninitialized_memory). `use_deterministic_algorithms` does the same
    # and loads torch's compiler, which takes 1.3 s and sets the environment: the first kernel would run twice.
    torch.set_deterministic_debug_mode("error")
    try:
        yield
    finally:
        torch.set_deterministic_debug_mode(before)


def make_runner() -> GpuRunner:
    """The runner of this process."""
    return GpuRunner()
