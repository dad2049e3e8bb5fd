"""Large arrays, a block at a time: what is between their values and a result stays in a processor's cache."""

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

ELEMENTS = 2**13
"""Elements of a block: 64 KiB in float64. Several fit the second cache, and the operating system maps no new pages for
one."""


def in_blocks(function: Callable[..., np.ndarray], *arrays: np.ndarray, dtype: npt.DTypeLike) -> np.ndarray:
    """function(*arrays) as an array of `dtype`, in the arrays' layout; they have one shape.

    The function gets blocks [n] of them and returns [n]: each element comes from the arrays' elements in its place.
    Raises ValueError where the shapes do not broadcast.
    """
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
