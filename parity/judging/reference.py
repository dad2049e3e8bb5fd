"""What a case's outputs are measured against."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from parity.dtypes import Floats
from parity.inputs import draw
from parity.judging import goldens
from parity.op import Case, Inputs, Op, outputs


@dataclass(frozen=True)
class Reference:
    """What a case's outputs are measured against: drawn inputs; golden, magnitude and longest chain by output."""

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
    chain = op.chain(case, inputs)
    chains = dict.fromkeys(golden, chain) if isinstance(chain, int) else {name: chain[name] for name in golden}
    return Reference(inputs, golden, magnitude, chains)


def _truth(op: Op, case: Case, inputs: Inputs) -> dict[str, np.ndarray]:
    """Golden and magnitude of each output, in one dictionary."""
    with np.errstate(invalid="ignore", over="ignore"):
        golden = outputs(op.golden(**inputs, **op.arguments(case)))
        magnitude = {} if op.bit_exact else outputs(op.magnitude(op, case, inputs))
    labelled = {"golden": golden, "magnitude": magnitude}
    return {f"{what}.{name}": x for what, of in labelled.items() for name, x in of.items()}
