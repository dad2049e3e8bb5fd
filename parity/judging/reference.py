"""What a case's outputs are measured against."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import islice

import numpy as np

from parity.declared import check_outs, checked_chain, checked_magnitude, contract_of, golden_of
from parity.dtypes import Floats
from parity.inputs import draw
from parity.judging import goldens
from parity.judging.fit import RUNS
from parity.judging.spread import allowances, typical_runs
from parity.op import BACKENDS, Case, Inputs, Op


@dataclass(frozen=True, eq=False)
class Reference:
    """What a case's outputs are measured against: drawn inputs, golden by output, and the longest chain.

    derived: M of each output, in its shape; empty if the op derives none, and chain is then 0.
    """

    op: Op
    case: Case
    inputs: Inputs
    golden: dict[str, Floats]
    derived: dict[str, Floats]
    chain: int

    @cached_property
    def magnitude(self) -> dict[str, Floats]:
        """M of each output, in its shape.

        If the op derives none: the size of the errors around each element that the GPU's contract explains, for values
        like these (`spread.typical_runs`), in roundoffs of its accumulator. Raises DeclarationError for a golden that
        does not keep to its sites.
        """
        if self.op.magnitude is not None or self.op.bit_exact:
            return self.derived
        contract = contract_of(self.op, self.case, "gpu")
        drawn = islice(typical_runs(self.op, self.case, self.inputs, contract, self.golden), RUNS[0])
        explained = allowances(list(drawn), self.golden, contract.roundoff)
        return {
            name: explained[name].size / contract.roundoff if y.size else np.zeros(y.shape)
            for name, y in self.golden.items()
        }


@lru_cache(maxsize=4)
def reference(op: Op, case: Case) -> Reference:
    """The inputs of a case, drawn, and what its outputs are measured against; the last few are kept."""
    inputs = draw(op, case)
    truth = goldens.shared(op, case, inputs, lambda: _truth(op, case, inputs))
    golden, derived = (
        {label.removeprefix(what): x for label, x in truth.items() if label.startswith(what)}
        for what in ("golden.", "magnitude.")
    )
    for backend in BACKENDS:
        check_outs(op, case, contract_of(op, case, backend), golden)
    return Reference(op, case, inputs, golden, derived, checked_chain(op, case, inputs))


def _truth(op: Op, case: Case, inputs: Inputs) -> dict[str, np.ndarray]:
    """Golden and magnitude of each output, in one dictionary."""
    with np.errstate(invalid="ignore", over="ignore"):
        golden = golden_of(op, case, inputs)
        magnitude = checked_magnitude(op, case, inputs, golden)
    labelled = {"golden": golden, "magnitude": magnitude}
    return {f"{what}.{name}": x for what, of in labelled.items() for name, x in of.items()}
