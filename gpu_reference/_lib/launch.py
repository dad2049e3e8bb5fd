"""A Triton kernel with all that its launch takes: the same value is run, compiled ahead of time and checked."""

from typing import Any, NamedTuple

import torch
from triton.runtime.errors import OutOfResources

STAGE_BYTES = 96 * 1024
"""Shared memory for the operand tiles in flight; the least that NVIDIA's have is 99 KiB (sm_120)."""
HOPPER_BYTES = 200 * 1024
"""Likewise on sm_90, which has 227 KiB."""
AMD_BYTES = 64 * 1024
"""All of gfx942's, which has one stage fewer in it: that one's tiles are in registers."""


class Launch(NamedTuple):
    """A kernel with all that its launch takes. Built from shapes alone, so tensors of the meta device will do.

    sized_by: the arguments of the public function that its tiles grow with.
    """

    kernel: Any
    grid: tuple[int]
    arguments: dict[str, Any]
    options: dict[str, Any]
    sized_by: str = "its arguments"

    def run(self, device: torch.device) -> None:
        """Launch on the current stream of `device`.

        Raises ValueError where a program's shared memory, or what else it takes, is more than the device has.
        """
        try:
            with torch.cuda.device(device if device.type == "cuda" else -1):
                self.kernel[self.grid](**self.arguments, **self.options)
        except OutOfResources as error:
            needs = f"needs {error.required} bytes of {error.name}, and the device has {error.limit}"
            raise ValueError(f"{self.sized_by} must be smaller: {self.kernel.fn.__name__} {needs}") from error


def launch_options(rows: int, depth: int, columns: int, element_size: int, target: str | None = None) -> dict[str, Any]:
    """How to run a kernel whose dot is [rows, depth] @ [depth, columns] on `target` (None: on any)."""
    stage_bytes = (rows + columns) * depth * element_size
    everywhere = min(STAGE_BYTES // stage_bytes, 1 + AMD_BYTES // stage_bytes)
    stages = min(HOPPER_BYTES // stage_bytes if target == "sm_90" else everywhere, 4)
    return {
        "num_warps": max(4, min(rows * columns * element_size // 4096, 8)),
        "num_stages": max(1, stages),
        "enable_fp_fusion": True,
    }
