"""What scans allocate for their kernels to fill, and what is made of it between kernels."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from op_arguments.gla import Problem


def contiguous(tensor: Any) -> Any:
    """The tensor as kernels address it; None stays."""
    return None if tensor is None else tensor.contiguous()


def empty_rows(shape: tuple[int, ...], like: Tensor, dtype: torch.dtype, cu_seqlens: Tensor | None) -> Tensor:
    """A tensor of rows on the device of `like` for kernels to fill, zero where there may be rows of no sequence."""
    return (torch.empty if cu_seqlens is None else torch.zeros)(shape, dtype=dtype, device=like.device)


def empty_states(p: Problem, count: int, like: Tensor) -> Tensor:
    """[count, H, K, V] float32 on the device of `like`."""
    return torch.empty(count, p.h, p.k, p.v, dtype=torch.float32, device=like.device)


def fill_state(into: Tensor | None, state: Tensor | None) -> Tensor | None:
    """`into`, filled with a state (None: zero)."""
    if into is None:
        return None
    return into.zero_() if state is None else into.copy_(state)


def sum_of_tiles(tiles: Tensor) -> Tensor:
    """The sum over the first axis, in order: `torch.sum` may choose another order for another batch size."""
    first, *others = tiles.unbind()
    for tile in others:
        first += tile
    return first


def gate_gradients(dgate: Tensor | None, gates: Mapping[str, Tensor | None]) -> dict[str, Tensor | None]:
    """By the gates' names: of gk as it is, of g and g_gamma from the parts [tiles of K, B, T, H] of each step's."""
    if "gk" in gates:
        return {"gk": dgate}
    step = None if dgate is None else sum_of_tiles(dgate)
    return {name: _gate_gradient(step, gate) for name, gate in gates.items()}


def _gate_gradient(step: Tensor | None, gate: Tensor | None) -> Tensor | None:
    if step is None or gate is None:
        return None
    if gate.ndim == 1:
        return step.sum((0, 1), dtype=torch.float64).float()
    return step.to(gate.dtype)
