"""Softmax over the last axis, in float64: the definition."""

import numpy as np


def softmax(x, rounding=lambda site, value: value):
    """exp(x - max) / Σ exp(x - max) of x [M, N]; each named site is a place where a kernel may round."""
    shifted = rounding("shifted", x.astype(np.float64) - x.astype(np.float64).max(axis=1, keepdims=True))
    e = rounding("exp", np.exp(shifted))
    return rounding("out", e / rounding("sum", e.sum(axis=1, keepdims=True)))
