"""M: the size of what was summed behind each output element, which errors are measured against.

The XBLAS test ratio (Li et al. 2002, ACM TOMS 28:152): a backward-stable sum errs in proportion to Σ|terms|, not to
the sum, which cancellation makes arbitrarily small. Where an op derives none, it is the size of errors by contract
(`reference.py`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from parity.op import Case, Inputs, Op

REVISION = 1
BY_CONTRACT = 2
"""The revision of one that is not derived: 1 was σ of the GPU's contract."""


def revision(op: Op) -> int:
    """The revision of the magnitude that the errors of an op are recorded in."""
    return BY_CONTRACT if op.magnitude is None and not op.bit_exact else REVISION


def abs_of(*names: str) -> Callable[[Op, Case, Inputs], Any]:
    """The golden itself on the absolute values of its multilinear arguments `names`, all others at their true value."""

    def magnitude(op: Op, case: Case, inputs: Inputs) -> Any:
        absolute = {name: np.abs(x) if name in names and x is not None else x for name, x in inputs.items()}
        return op.golden(**absolute, **op.arguments(case))

    return magnitude
