"""RMSNorm and its gradients, in float64: the definition, and every place where kernels round."""

import numpy as np
from result import Gradients

from cpu_golden.stages import tree_sum

EPS = 1e-6
ROWS = 8
"""Rows whose gradients of the weight are summed before they are added to those of the rows before."""


def rmsnorm(x, weight, stages=lambda site, value: value):
    """x / √(mean(x²) + ε) · weight of x [M, N] and weight [N]."""
    normed, _ = _normed(x.astype(np.float64), stages)
    return stages("y", normed * weight.astype(np.float64))


def rmsnorm_bwd(x, weight, dy, stages=lambda site, value: value):
    """The `Gradients` of x and weight, dy [M, N] being that of `rmsnorm`."""
    x, weight, dy = (a.astype(np.float64) for a in (x, weight, dy))
    normed, rstd = _normed(x, stages)
    g = stages("g", dy * weight)
    mean = stages("mean", tree_sum(stages("product", g * normed), stages) / x.shape[1])
    dx = stages("dx", rstd * stages("rest", g - stages("along", normed * mean)))
    terms, dweight = stages("term", dy * normed), np.zeros(x.shape[1])
    for first in range(0, len(x), ROWS):
        dweight = stages("dweight", dweight + tree_sum(terms[first : first + ROWS].T, stages)[:, 0])
    return Gradients(dx, dweight)


def _normed(x, stages):
    """x / √(mean(x²) + ε), and the factor [M, 1]."""
    mean = stages("mean", tree_sum(stages("product", x * x), stages) / x.shape[1])
    rstd = stages("rstd", 1 / np.sqrt(mean + EPS))
    return stages("normed", x * rstd), rstd
