"""What a case's outputs are measured against."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from itertools import islice

import numpy as np

from parity.dtypes import Floats
from parity.inputs import draw
from parity.judging import goldens
from parity.judging.spread import allowances, runs
from parity.op import Case, Inputs, Op, outputs

MAGNITUDE_RUNS = 16
"""Runs that a magnitude is taken from where none is derived: σ of an element to 18 %, of a row or column better."""


@dataclass(frozen=True)
class Reference:
    """What a case's outputs are measured against: drawn inputs; golden, magnitude and longest chain by output.

    Where the op derives no magnitude, it is the error that the GPU's contract explains, in roundoffs of its
    accumulator, and there is no chain.
    """

    inputs: Inputs
    golden: dict[str, Floats]
    magnitude: dict[str, Floats]
    chain: dict[str, int]


@lru_cache(maxsize=4)
def reference(op: Op, case: Case) -> Reference:
    """The inputs of a case, drawn, and what its outputs are measured against; the last few are kept."""
    inputs = draw(op, case)
    truth = goldens.shared(op, case, inputs, lambda: _truth(op, case, inputs))
    golden, magnitude = (
        {label.removeprefix(what): x for label, x in truth.items() if label.startswith(what)}
        for what in ("golden.", "magnitude.")
    )
    if op.magnitude is None and not op.bit_exact:
        magnitude = _explained(op, case, inputs, golden)
    chain = 0 if op.chain is None else op.chain(case, inputs)
    chains = dict.fromkeys(golden, chain) if isinstance(chain, int) else {name: chain[name] for name in golden}
    return Reference(inputs, golden, magnitude, chains)


def _truth(op: Op, case: Case, inputs: Inputs) -> dict[str, np.ndarray]:
    """Golden and magnitude of each output, in one dictionary."""
    with np.errstate(invalid="ignore", over="ignore"):
        golden = outputs(op.golden(**inputs, **op.arguments(case)))
        magnitude = {} if op.bit_exact or op.magnitude is None else outputs(op.magnitude(op, case, inputs))
    labelled = {"golden": golden, "magnitude": magnitude}
    return {f"{what}.{name}": x for what, of in labelled.items() for name, x in of.items()}


def _explained(op: Op, case: Case, inputs: Inputs, golden: dict[str, Floats]) -> dict[str, Floats]:
    contract = op.contract(case, "gpu")
    drawn = list(islice(runs(op, case, inputs, contract, golden), MAGNITUDE_RUNS))
    explained = allowances(drawn, golden, contract.roundoff)
    return {
        name: explained[name].sigma / contract.roundoff if y.size else np.zeros(y.shape) for name, y in golden.items()
    }
