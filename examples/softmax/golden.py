"""Softmax over the last axis, in float64: the definition."""

import numpy as np


def softmax(x, stages=lambda site, value: value):
    """exp(x - max) / Σ exp(x - max) of x [M, N]; each named site is a place where a kernel may round."""
    shifted = stages("shifted", x.astype(np.float64) - x.astype(np.float64).max(axis=1, keepdims=True))
    e = stages("exp", np.exp(shifted))
    return stages("out", e / stages("sum", e.sum(axis=1, keepdims=True)))
