"""What tests need that look into Triton's interpreter."""

import os
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest

from op_arguments.probe import probing

interpreted = pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") != "1", reason="Triton's interpreter is off")
"""For tests of kernels on the CPU. The root conftest turns the interpreter on where there is no GPU."""


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
