"""Softmax over the last axis, in float64: the definition."""

import numpy as np

from cpu_golden.stages import tree_sum


def softmax(x, stages=lambda site, value: value):
    """exp(x - max) / Σ exp(x - max) of x [M, N]; each named site is a place where a kernel may round."""
    x = x.astype(np.float64)
    e = stages("exp", np.exp(stages("shifted", x - x.max(axis=1, keepdims=True))))
    return stages("quotient", e / tree_sum(e, stages))
