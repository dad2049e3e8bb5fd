"""Softmax over the last axis, in float64: the definition."""

import numpy as np


def softmax(x, stages=lambda site, value: value):
    """exp(x - max) / Σ exp(x - max) of x [M, N]; each named site is a place where a kernel may round."""
    x = x.astype(np.float64)
    e = stages("exp", np.exp(stages("shifted", x - x.max(axis=1, keepdims=True))))
    return stages("quotient", e / total(e, stages))


def total(terms, stages):
    """Σ over the columns of [M, N], [M, 1]: in a tree, as vector units add up what their lanes hold."""
    while terms.shape[1] > 1:
        if terms.shape[1] % 2:
            terms = np.pad(terms, ((0, 0), (0, 1)))
        terms = stages("sum", terms[:, ::2] + terms[:, 1::2])
    return terms
