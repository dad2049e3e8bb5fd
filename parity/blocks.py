"""Large arrays, a block at a time: what is between their values and a result stays in a processor's cache."""

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

ELEMENTS = 2**13
"""Of a block. In float64 these are 64 KiB: several fit the second cache, and none has pages of its own, which the
operating system would give and take for each block."""


def in_blocks(function: Callable[..., np.ndarray], *arrays: np.ndarray, dtype: npt.DTypeLike) -> np.ndarray:
    """function(*arrays), each element of which comes from the arrays' elements there, as an array of that dtype."""
    operands: Any = [*arrays, None]
    flags: Any = [["readonly"]] * len(arrays) + [["writeonly", "allocate"]]
    walk: Any = np.nditer(
        operands,
        ["external_loop", "buffered", "zerosize_ok"],
        flags,
        [None] * len(arrays) + [dtype],
        buffersize=ELEMENTS,
    )
    with walk:
        for *given, result in walk:
            result[...] = function(*given)
        whole: np.ndarray = walk.operands[-1]
    return whole
