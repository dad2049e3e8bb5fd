"""How the product of two tiles is cut into dots, and what a dot is."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from tpu_kernels._lib import chip
from tpu_kernels._lib.call import is_interpreted
from tpu_kernels._lib.chip import LANES, MXU, REGISTER, sublanes

HEIGHT = sublanes(jnp.float32)  # rows of a register of 32 bits


def blocks(size: int, width: int) -> list[Any]:
    """The slices of `width`, the last one maybe less, that make up an axis of `size`.

    A dot over a whole tile needs more registers than there are, and spills.
    """
    return [pl.ds(first, min(width, size - first)) for first in range(0, size, width)]


def for_blocks(size: int, width: int, body: Callable[[Any], None]) -> None:
    """body of each slice of `width` that makes up an axis of `size`; in a loop, unless the last one is less."""
    if size <= width or size % width:
        for block in blocks(size, width):
            body(block)
    else:
        lax.fori_loop(0, size // width, lambda i, _: body(pl.ds(pl.multiple_of(i * width, width), width)), None)


def repeated_row(ref: Any, nth: Any, columns: Any, by_load: bool = True) -> jax.Array:
    """Row nth of a block in VMEM, in all rows of a register: [8, columns] of 32 bits.

    by_load: whether a load with a stride of 0 repeats it, in place of an operation of the vector unit. Interpreters
    have no such loads, and Mosaic has none for a row that the data choose, nor of several registers the last of which
    is not full: there an operation repeats it all the same. These loads begin at a block's first column, and the
    compiler drops those that are not used.
    """
    width = ref.shape[1]
    by_load &= isinstance(nth, int) and (width < LANES or width % LANES == 0) and not is_interpreted()
    if isinstance(columns.start, int):
        wanted = slice(columns.start, columns.start + columns.size)
    else:
        ref, wanted = ref.at[:, columns], slice(None)
    row = ref[pl.ds(nth, HEIGHT, stride=0) if by_load else pl.ds(nth, 1), :][:, wanted]
    return jnp.broadcast_to(row, (HEIGHT, row.shape[1]))


def over_rows(row: jax.Array, height: int) -> jax.Array:
    """A `repeated_row` [8, columns] as [height, columns]: the same registers over and over.

    Interpreted it is broadcast: XLA takes 22% longer to compile kernels with so many parts.
    """
    if is_interpreted():
        return jnp.broadcast_to(row[:1], (height, row.shape[1]))
    return jnp.concatenate([row] * pl.cdiv(height, HEIGHT), axis=0)[:height]


def for_depth(k: int, tk: int, step: Any, last_step: Any, body: Callable[[int], None]) -> None:
    """body(depth) with how much of K a step has. The last block holds garbage beyond K, and 0 * NaN is NaN."""
    rest = k % tk or tk
    if rest == tk:
        body(tk)
    else:
        pl.when(step < last_step)(lambda: body(tk))
        pl.when(step == last_step)(lambda: body(rest))


def dot_depth(changed: bool = False) -> int:
    """How deep a dot may be, where an operand is changed in registers (transposed, widened) or not.

    The matrix unit of tpu7x adds up what it multiplies. Those before it leave that to registers, which run out: the
    sums go through memory as often as keeps them from spilling.
    """
    if chip.generation() >= 7:
        return 2**20  # more than any tile has
    return 2 * MXU if chip.generation() == 6 and not changed else MXU


def dot(a: jax.Array, b: jax.Array, contract: tuple[int, int]) -> jax.Array:
    """float32 sums over axis `contract[0]` of a and `contract[1]` of b."""
    if contract == (1, 1) and b.shape[0] == 1:
        # Pallas takes a bfloat16 product with a single row for a matrix-vector one, and fails to lower that to float32.
        a, b = a.astype(jnp.float32), b.astype(jnp.float32)
    # bfloat16 products are exact in one pass, and Mosaic refuses HIGHEST for them; float32 takes six.
    precision = lax.Precision.HIGHEST if a.dtype == jnp.float32 else lax.Precision.DEFAULT
    axes = (((contract[0],), (contract[1],)), ((), ()))
    return lax.dot_general(a, b, axes, precision=precision, preferred_element_type=jnp.float32)


def held_back(x: jax.Array, dots: Sequence[jax.Array], registers: int, true: Any) -> jax.Array:
    """x itself [rows, depth], bit for bit, so that its dot waits for the sums of dots before it.

    The compiler for tpu7x multiplies as early as it can. Sums [rows, columns] that have yet to be scaled then need more
    registers than there are, and go through memory. So one register of x is selected from itself and bits of the sums
    in `dots` (the last one just before) that are `registers` back: with fewer on their way the units are idle, with
    more they spill. true: a condition that holds, and the compiler cannot know it, else it drops the selection.
    """
    before = 0
    for sums in reversed(dots):
        before += sums.size
        if before >= registers * REGISTER:
            break
    else:
        return x
    if x.shape[0] % sublanes(x.dtype) or sums.shape[1] < LANES:  # no whole register
        return x
    row = (before - registers * REGISTER) // sums.shape[1] // 8 * 8
    words, width = pltpu.bitcast(x, jnp.int32), x.shape[1]
    bits = jnp.concatenate([pltpu.bitcast(sums[row : row + 8, :LANES], jnp.int32)] * pl.cdiv(width, LANES), axis=1)
    return pltpu.bitcast(jnp.concatenate([jnp.where(true, words[:8], bits[:, :width]), words[8:]], axis=0), x.dtype)
