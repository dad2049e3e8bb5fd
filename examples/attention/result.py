"""What golden and kernels return: outputs are told apart by name."""

from typing import Any, NamedTuple


class Attention(NamedTuple):
    """The result of attention, and what a backward pass needs of its softmax."""

    out: Any  # [H, T, D]
    lse: Any  # [H, T]: log Σ exp(score)
