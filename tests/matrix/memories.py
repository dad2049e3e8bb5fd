"""What an associative memory of a trained model meets: keys that point much the same way, and values that it knows.

Random keys are next to orthogonal, and a memory of them has little to correct; kernels that fail on a trained model's
keys pass on random ones. Everything here is drawn by a case's own bits and single IEEE operations, as `parity.inputs`
draws, so every host has the same bytes.
"""

from collections.abc import Callable, Mapping
from functools import cached_property

import numpy as np

from parity import Array, Case, Given
from parity.dtypes import Floats, round_to
from parity.inputs import DISTRIBUTIONS, stream

RHOS = [0.0, 0.5, 1.0, 2.0, "equal"]
"""How long what keys have in common is, beside what each has of its own. Of 64 keys with beta 0.9 the rows of
A = beta K Kᵀ sum to 4.7, 14, 30, 46 and 57."""
BETAS = ["gated", "near1", "up_to_2"]
RECALLED = [1.0, 0.1, 0.01, 0.001]
"""σ of what is new in a value that the state else has already."""


class Drawn(Given):
    """An array [shape] of a dtype that `draw` makes where its values are first read.

    Shapes and dtypes are asked of a case far more often, by whoever looks for the case of a call.
    """

    def __init__(self, shape: tuple[int, ...], dtype: str, draw: Callable[[], Floats]) -> None:
        vars(self).update(_shape=shape, _dtype=dtype, _draw=draw)

    @cached_property
    def array(self) -> np.ndarray:  # type: ignore[override]
        """See the class."""
        return round_to(self._draw(), self._dtype)

    @property
    def shape(self) -> tuple[int, ...]:
        """As it was given."""
        return self._shape

    @property
    def dtype(self) -> str:
        """Likewise."""
        return self._dtype


def keys(c: Case, shape: tuple[int, ...], *, unit: bool = True) -> Given:
    """k [B, T, H, K] of the case's dtype: rows of length 1, a component in common (`c.rho`, of `RHOS`) in each head.

    Not `unit`: of lengths from 1/2 to 2, for a kernel that normalises them. Integer data are ±1 in one channel.
    """
    return Drawn(shape, c.dtype, lambda: _keys(c, shape, unit))


def _keys(c: Case, shape: tuple[int, ...], unit: bool) -> Floats:
    words = stream(c, "k")
    if c.data == "integers":
        where = words(shape[:-1])
        signs = 1.0 - 2.0 * (where >> np.uint64(63))
        of_channel = (where % np.uint64(max(shape[-1], 1)))[..., None] == np.arange(shape[-1], dtype=np.uint64)
        return of_channel * signs[..., None]
    own = DISTRIBUTIONS[c.data](Array(shape, c.dtype, sum_over=3, pair_sign=-1), words, c.out)
    common = DISTRIBUTIONS["normal"](Array((1, 1, *shape[2:]), c.dtype), stream(c, "common"), c.out)
    x = np.broadcast_to(common, shape) if c.rho == "equal" else own + c.rho * common
    x = x / np.sqrt(np.maximum(summed(x * x), 2.0**-40))[..., None]
    return x if unit else x * (0.5 + 1.5 * _uniform(stream(c, "length"), shape[:-1]))[..., None]


def betas(c: Case, shape: tuple[int, ...], dtype: str) -> Given:
    """beta [B, T, HV], by `c.beta`: "gated", uniform in (0, 1), as a sigmoid makes it; "near1", in (31/32, 1); and
    "up_to_2", uniform in (0, 2). Of integer data 0, 1 and 2."""
    return Drawn(shape, dtype, lambda: _betas(c, shape))


def _betas(c: Case, shape: tuple[int, ...]) -> Floats:
    words = stream(c, "beta")
    if c.data == "integers":
        return (words(shape) % np.uint64(3)).astype(np.float64)
    x = _uniform(words, shape)
    drawn: Mapping[str, Floats] = {"gated": x, "near1": 1 - x / 32, "up_to_2": 2 * x}
    return drawn[c.beta]


def recalled(c: Case, shape: tuple[int, ...], k: Given, state: Given, offsets: np.ndarray | None) -> Given:
    """v [B, T, HV, V] that the state before the first step has under k already, but for noise of size `c.recall`.

    v - Sᵀ k is the noise then: what a kernel loses of either is all of what it writes.
    """
    return Drawn(shape, c.dtype, lambda: _recalled(c, shape, k, state, offsets))


def _recalled(c: Case, shape: tuple[int, ...], k: Given, state: Given, offsets: np.ndarray | None) -> Floats:
    noise = DISTRIBUTIONS["normal"](Array(shape, c.dtype), stream(c, "v"), c.out)
    key, memory = k.array.astype(np.float64), state.array.astype(np.float64)
    key = np.repeat(key, shape[2] // key.shape[2], axis=2)
    of_step = np.zeros(shape[1], int) if offsets is None else np.searchsorted(offsets[1:], np.arange(shape[1]), "right")
    known = np.zeros(shape)
    for channel in range(key.shape[-1]):
        rows = memory[:, None, :, channel] if offsets is None else memory[None, of_step, :, channel]
        known = known + key[..., channel, None] * rows
    return known + c.recall * noise


def summed(x: Floats) -> Floats:
    """Over the last axis, one after the other, which every host adds alike."""
    total = np.zeros(x.shape[:-1])
    for n in range(x.shape[-1]):
        total = total + x[..., n]
    return total


def _uniform(words, shape: tuple[int, ...]) -> Floats:
    return ((words(shape) >> np.uint64(11)) + 0.5) * 2.0**-53
