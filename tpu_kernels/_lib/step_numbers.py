"""Numbers per step of the chunks of a block, which decays need as rows and as columns."""

from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from tpu_kernels._lib.chip import LANES, sublanes
from tpu_kernels._lib.chunk_dots import WHOLE, bf16_split, dot_with_all, f32, iota, ones
from tpu_kernels._lib.chunk_plan import Scan

ROWS = sublanes(jnp.float32)  # of a register: the bfloat16 pieces of two numbers, and both


class StepNumbers:
    """Two numbers of each step of a chunk, as rows and as columns.

    They lie in VMEM, a row for all chunks; where the matrix unit spreads them, with their bfloat16 pieces, a register
    for each chunk of a head.
    """

    def __init__(self, ref: Any, chunk: Any, scan: Scan) -> None:
        self._ref, self._chunk, self._scan = ref, chunk, scan

    @staticmethod
    def scratch(scan: Scan) -> Any:
        """The VMEM that `keep` fills, of all chunks of a block."""
        rows = ROWS if scan.spread else 2
        return pltpu.VMEM((scan.heads, rows * scan.chunks, max(scan.chunk, LANES)), jnp.float32)

    @staticmethod
    def keep(ref: Any, first: jax.Array, second: jax.Array, scan: Scan) -> None:
        """Store both numbers of the steps of all chunks, [heads, chunks, C or more]."""
        numbers = first, second
        pieces = [f32(piece) for number in numbers for piece in bf16_split(number, WHOLE)] if scan.spread else []
        for n, row in enumerate((*pieces, *numbers)):
            rows = pl.ds(n, scan.chunks, ROWS) if scan.spread else pl.ds(n * scan.chunks, scan.chunks)
            ref[:, rows, : row.shape[2]] = row

    @property
    def rows(self) -> tuple[jax.Array, jax.Array]:
        """Both, [heads, 1, C]."""
        if self._scan.spread:
            return self._load(ROWS * self._chunk + 2 * WHOLE), self._load(ROWS * self._chunk + 2 * WHOLE + 1)
        return self._load(self._chunk), self._load(self._scan.chunks + self._chunk)

    def _load(self, first: Any, count: int = 1) -> jax.Array:
        return self._ref[:, pl.ds(first, count), :][:, :, : self._scan.chunk]

    def column(self, n: int) -> jax.Array:
        """The first number or the second, [heads, C, 1]: a sum over lanes for every eight steps."""
        i, j = (iota((1, self._scan.chunk, self._scan.chunk), axis) for axis in (1, 2))
        return jnp.sum(jnp.where(i == j, self.rows[n], 0.0), axis=2, keepdims=True)

    def spread(self, n: int, width: int) -> jax.Array:
        """The first number or the second, [heads, C, width]: the matrix unit adds up its pieces in all lanes."""
        tile, piece = self._load(ROWS * self._chunk, ROWS), iota((ROWS, LANES), 0)
        of_number = ones((piece >= n * WHOLE) & (piece < (n + 1) * WHOLE))
        column = dot_with_all(tile.swapaxes(1, 2), of_number, self._scan, 1)
        return jnp.concatenate([column] * pl.cdiv(width, LANES), 2)[:, :, :width]
