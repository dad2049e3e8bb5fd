"""Where Triton's kernels run in these tests, and what tests need that look into its interpreter."""

import os
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest

from op_arguments.probe import probing

_IS_ON = os.environ.get("TRITON_INTERPRET") == "1"  # the root conftest sets it where there is no GPU

DEVICE = "cpu" if _IS_ON else "cuda"
"""Of the tensors that kernels are given: interpreted ones take the CPU's alone, compiled ones a GPU's alone."""

interpreted = pytest.mark.skipif(not _IS_ON, reason="Triton's interpreter is off")
"""For tests that look into the interpreter, or run a kernel as on another GPU; others take tensors of `DEVICE`."""

INTERPRETED = {"tpu": [pytest.mark.tpu], "gpu": [pytest.mark.gpu, interpreted]}
"""By backend, the marks of a test of a kernel that is followed step by step, which Triton's interpreter alone allows,
or that has a fault: one that reads beyond its arrays leaves a process no GPU."""


@contextmanager
def shown() -> Iterator[Counter[str]]:
    """How many values the kernels that run inside show a probe, by their site."""
    counts: Counter[str] = Counter()

    def count(site: str, value: Any, where: Any = None, **_: Any) -> Any:
        first = value[0] if isinstance(value, tuple) else value
        is_shown = True if where is None else where.handle.data
        counts[site] += int(np.broadcast_to(is_shown, first.handle.data.shape).sum())
        return value

    with probing(count):
        yield counts
