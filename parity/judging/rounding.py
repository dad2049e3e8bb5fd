"""The golden in the steps of a kernel, and of its matrix unit, with a rounding at its sites."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from cpu_golden.stages import Stages, single_pass
from parity.declared import DeclarationError, check_sites, golden_of, steps_of
from parity.dtypes import Floats
from parity.judging.passes import PASSES
from parity.op import Case, Contract, Inputs, Op

Rounding = Callable[[str, Floats], Floats]


def staged(
    op: Op, case: Case, inputs: Inputs, contract: Contract, rounding: Rounding, runs: int | None = None, **steps: Any
) -> dict[str, Floats]:
    """The golden's outputs in the steps of a kernel under a contract. steps: those that are otherwise.

    runs: how many roundings are in a leading axis of every value. Raises DeclarationError where golden and contract do
    not speak of the same sites and steps, and where an output has not that axis.
    """
    reached: set[str] = set()

    def check_runs(what: str, value: Floats) -> None:
        if runs is not None and value.shape[:1] != (runs,):
            raise DeclarationError(op, case, "golden", f"must have {runs} runs of {what}, got {list(value.shape)}")

    def watched(site: str, value: Floats) -> Floats:
        reached.add(site)
        dtype = getattr(value, "dtype", type(value).__name__)
        if dtype != np.float64:
            raise DeclarationError(op, case, "golden", f"must hand float64 to its sites, got {dtype} at {site!r}")
        check_runs(repr(site), value)
        return rounding(site, value)

    with np.errstate(all="ignore"):
        found = golden_of(op, case, inputs, Stages(watched, runs=runs, **steps_of(op, case, contract, **steps)))
    for name, y in found.items():
        check_runs(f"the output {name!r}", y)
    check_sites(op, case, contract, reached)
    return found


def on_unit(contract: Contract) -> dict[str, Any]:
    """The steps of a matrix unit: in which passes it multiplies, and which sums it adds up by themselves."""
    return {"passes": PASSES.get(contract.dot, single_pass), "tile": contract.tile}
