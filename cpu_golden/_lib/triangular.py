"""The inverse of a unit lower triangular matrix by substitution, in float64 and staged.

Rows of diagonal blocks of 16 are solved one after the other; the blocks below come from products, of the blocks of
twice, four times … as many rows: [[I + A₁, 0], [A₂₁, I + A₂]]⁻¹ = [[T₁, 0], [-T₂ A₂₁ T₁, T₂]]. Both are substitution:
the error is within a few roundoffs of |T| |A| |T|, and no power of A is formed (Higham 2002, Accuracy and Stability of
Numerical Algorithms, section 14.2). Keys with a common component make powers of A grow like 50^64.
"""

from dataclasses import replace

import numpy as np

from cpu_golden import Array
from cpu_golden._lib.chunks import diagonal, halves, missing_to_halve, square_filled_up
from cpu_golden.stages import Inverse, Stages

BLOCK = 16
"""Rows of a diagonal block."""
DOT_SITES = {
    "lhs": "solve_lhs",
    "rhs": "solve_rhs",
    "partial": "solve_partial",
    "acc": "solve_acc",
    "tiles": "solve_tiles",
}


def by_rows(a: Array, stages: Stages) -> Array:
    """The inverse of one diagonal block: each row, once it is known, is taken from all rows below.

    Sites: solve_product, solve_sum.
    """
    t = np.broadcast_to(np.eye(a.shape[-1]), a.shape).copy()
    for row in range(a.shape[-1] - 1):
        below = slice(row + 1, None)
        taken = stages("solve_product", a[..., below, row, None] * t[..., row, None, :])
        t[..., below, :] = stages("solve_sum", t[..., below, :] - taken)
    return t


def inverse(a: Array, stages: Stages, of_block: Inverse = by_rows) -> Array:
    """T = (I + A)⁻¹ [..., C, C] of a strictly lower triangular A; of_block: that of a diagonal block.

    Stages: solve_depth, solve_passes. Sites: solve_product and solve_sum (of a diagonal block's rows, and the running
    sums of that), those of `Stages.dot` with solve_ before their names, T.
    """
    size = a.shape[-1]
    a = square_filled_up(a, missing_to_halve(size, BLOCK))
    products = replace(
        stages.renamed(**DOT_SITES),
        depth=stages.solve_depth or stages.depth,
        passes=stages.solve_passes or stages.passes,
    )
    t = np.zeros(a.shape)
    diagonal(t, BLOCK)[...] = of_block(diagonal(a, BLOCK), stages)
    for half in halves(a, BLOCK):
        a_h, t_h = diagonal(a, 2 * half), diagonal(t, 2 * half)
        below = products.dot(a_h[..., half:, :half], t_h[..., :half, :half])
        t_h[..., half:, :half] = -products.dot(t_h[..., half:, half:], below)
    return np.tril(stages("T", t[..., :size, :size]))
