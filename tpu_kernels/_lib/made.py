"""Arrays that are made of others, element by element, and quantised."""

from collections.abc import Callable
from typing import NamedTuple

import jax


class Made(NamedTuple):
    """What a `Make` returns: the arrays, and terms of which the sum over each row is wanted, or None."""

    arrays: tuple[jax.Array, ...]
    terms: jax.Array | None = None


Make = Callable[..., Made]
"""Of float32: a factor for each row and some arrays, to as many rows."""
