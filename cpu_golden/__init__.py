"""Float64 goldens in plain NumPy: what each operation means. See `Rounding` for their staged form."""

from collections.abc import Callable
from typing import Any

import numpy as np

Array = np.ndarray[Any, np.dtype[Any]]
Rounding = Callable[[str, Array], Array]
"""Called at every named site of a staged golden with the site's name and its float64 value; returns what goes on
from there. `exact` gives the golden itself; rounding a site to a dtype emulates a kernel under that contract."""


def exact(site: str, value: Array) -> Array:
    """The rounding that rounds nothing."""
    return value
