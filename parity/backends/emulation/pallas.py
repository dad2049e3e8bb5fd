"""Pallas's interpreter without what it does for nothing: the results are the same, its programs shorter.

Every step of a grid takes the blocks of all operands out of their arrays and puts them back. Here a block that the
kernel has not touched stays where it is: the array is copied otherwise. Every start of a slice may be negative, and
then counts from the end, which takes three operations an axis: what Pallas works out never is, and on a TPU it would be
out of bounds.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from functools import cache
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax._src.pallas import hlo_interpreter
from jax._src.state import discharge


@cache
def shorten() -> None:
    """Let every Pallas kernel that is interpreted in this process from now on do without; once."""
    taken: weakref.WeakValueDictionary[int, jax.Array] = weakref.WeakValueDictionary()

    def take_block(start: Sequence[Any], shape: tuple[int, ...], array: jax.Array, squeezed: Sequence[bool]) -> Any:
        block = lax.squeeze(_take(array, _int32(start), shape), _axes(squeezed))
        taken[id(block)] = block
        return block

    def put_block(
        start: Sequence[Any], shape: tuple[int, ...], array: jax.Array, block: jax.Array, squeezed: Sequence[bool]
    ) -> jax.Array:
        if taken.get(id(block)) is block:
            return array
        kept = _axes([not is_squeezed for is_squeezed in squeezed])
        return _put(array, lax.broadcast_in_dim(block, shape, kept), _int32(start))

    slicing = vars(discharge)["lax_slicing"]
    changed = {**vars(slicing), "dynamic_slice": _take, "dynamic_update_slice": _put}
    vars(discharge).update(lax_slicing=SimpleNamespace(**changed))
    vars(hlo_interpreter).update(_dynamic_slice=take_block, _dynamic_update_slice=put_block)


def _axes(chosen: Sequence[bool]) -> list[int]:
    return [axis for axis, is_chosen in enumerate(chosen) if is_chosen]


def _int32(start: Sequence[Any]) -> list[jax.Array]:
    return [jnp.asarray(n, jnp.int32) for n in start]


def _take(array: jax.Array, start: Sequence[Any], sizes: Sequence[int]) -> jax.Array:
    return lax.dynamic_slice(array, start, sizes, allow_negative_indices=_are_known(start))


def _put(array: jax.Array, block: jax.Array, start: Sequence[Any]) -> jax.Array:
    return lax.dynamic_update_slice(array, block, start, allow_negative_indices=_are_known(start))


def _are_known(start: Sequence[Any]) -> list[bool]:
    """Of Python's numbers a sign costs nothing."""
    return [isinstance(n, int) for n in start]
