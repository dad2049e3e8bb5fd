"""The golden in the steps of a kernel, and of its matrix unit, with a rounding at its sites."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from cpu_golden.stages import Stages, single_pass
from parity.dtypes import Floats
from parity.judging.passes import PASSES
from parity.op import Case, Contract, Inputs, Op, outputs

Rounding = Callable[[str, Floats], Floats]


def staged(
    op: Op, case: Case, inputs: Inputs, contract: Contract, rounding: Rounding, **steps: Any
) -> dict[str, Floats]:
    """The golden's outputs in the steps of a kernel under a contract. steps: those that are otherwise."""
    stages = Stages(rounding, **{**op.steps(case, contract), **steps})
    with np.errstate(all="ignore"):
        return outputs(op.golden(**inputs, **op.arguments(case), stages=stages))


def on_unit(contract: Contract) -> dict[str, Any]:
    """The steps of a matrix unit: in which passes it multiplies, and which sums it adds up by themselves."""
    return {"passes": PASSES.get(contract.dot, single_pass), "tile": contract.tile}
