"""M: the size of what was summed behind each output element, which errors are measured against.

The XBLAS test ratio (Li et al. 2002, ACM TOMS 28:152): a backward-stable sum errs in proportion to Σ|terms|, not to
the sum, which cancellation makes arbitrarily small.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from parity.op import Case, Inputs, Op

REVISION = 1


def abs_of(*names: str) -> Callable[[Op, Case, Inputs], Any]:
    """The golden itself on the absolute values of its multilinear arguments `names`, all others at their true value."""

    def magnitude(op: Op, case: Case, inputs: Inputs) -> Any:
        absolute = {name: np.abs(x) if name in names and x is not None else x for name, x in inputs.items()}
        return op.golden(**absolute, **op.arguments(case))

    return magnitude
