"""Causal attention as flash attention computes it, in float64: the definition, and every place where kernels round."""

import numpy as np
from result import Attention

from cpu_golden.stages import tree_sum

BLOCK = 64


def attention(q, k, v, stages=lambda site, value: value):
    """softmax(q kᵀ / √D) v of q, k, v [H, T, D], where a row sees no key behind it; `Attention`.

    The softmax runs over one block of keys after the other. `top` [H, T, 1] is the largest score so far, `mass` the
    sum of exp(score - top), `acc` [H, T, D] that of exp(score - top) v; a larger `top` shrinks both by `shrink`.
    """
    q, k, v = (x.astype(np.float64) for x in (q, k, v))
    heads, length, width = q.shape
    rows = np.arange(length)[:, None]
    top, mass, acc = np.full((heads, length, 1), -np.inf), np.zeros((heads, length, 1)), np.zeros(q.shape)
    for first in range(0, length, BLOCK):
        keys = np.arange(first, min(first + BLOCK, length))
        scores = stages("scores", q @ k[:, keys].mT / np.sqrt(width))
        scores = np.where(keys <= rows, scores, -np.inf)
        before, top = top, np.maximum(top, scores.max(axis=-1, keepdims=True))
        shrink = stages("shrink", np.exp(before - top))
        e = stages("exp", np.exp(stages("shifted", scores - top)))
        mass = stages("mass", shrink * mass + tree_sum(e, stages))
        acc = stages("acc", shrink * acc + stages("Pv", stages("P", e) @ v[:, keys]))
    return Attention(stages("quotient", acc / mass), (top + stages("log", np.log(mass)))[..., 0])
