"""What golden and kernels return: outputs are told apart by name."""

from typing import Any, NamedTuple


class Gradients(NamedTuple):
    """What the backward pass of RMSNorm returns."""

    dx: Any  # [M, N]
    dweight: Any  # [N]
