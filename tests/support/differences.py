"""Gradients against differences."""

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import pytest


def check_differences(
    loss: Callable[[dict[str, np.ndarray]], float],
    given: Mapping[str, np.ndarray],
    grads: Any,
    *,
    step: float = 1e-5,
    within: float = 1e-7,
    every: int = 1,
):
    """The gradient of each of `given`, called as it is, d and its name or dh0 among `grads`, against central
    differences of the loss; every: of so many elements one is asked."""
    for name, x in given.items():
        got = getattr(grads, next(field for field in (name, f"d{name}", "dh0") if hasattr(grads, field)))
        assert got.shape == x.shape
        for index in list(np.ndindex(x.shape))[::every]:
            above, below = ({**given, name: x.copy()} for _ in range(2))
            above[name][index] += step
            below[name][index] -= step
            difference = (loss(above) - loss(below)) / (2 * step)
            assert got[index] == pytest.approx(difference, rel=1e-6, abs=within), (name, index)
