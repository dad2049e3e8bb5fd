"""Functions of one element, without an overflow, and sums over time in pairs: what gates and convolutions share."""

import math

import numpy as np

from cpu_golden import Array
from cpu_golden.stages import Stages, tree_sum


def sigmoid(x: Array, stages: Stages) -> Array:
    """1 / (1 + exp(-x)), without an overflow. Sites: exp, above (1 + exp), lesser, sigmoid."""
    small = stages("exp", np.exp(-np.abs(x)))
    lesser = stages("lesser", small / stages("above", 1 + small))
    return stages("sigmoid", np.where(x < 0, lesser, 1 - lesser))


def over_time(terms: Array, kept: int, stages: Stages) -> Array:
    """The sum over all axes [B, T, …] but the first `kept` ones after T, in pairs. Site: sum."""
    first = np.moveaxis(terms, (0, 1), (-2, -1))
    summed = math.prod(first.shape[kept:])
    return tree_sum(first.reshape(*first.shape[:kept], summed), stages)[..., 0]
