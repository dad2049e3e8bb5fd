"""What the goldens give where every site is rounded to eight bits: recorded, by op and output.

`python -m tests.support.goldens` writes it. Numbers of eight bits have exact products, and sums that are exact or far
from a tie: no processor's BLAS or exponential shows in them.
"""

import hashlib
import inspect
import json
from pathlib import Path

import numpy as np

from parity.declared import golden_of
from parity.dtypes import Floats, round_to
from parity.inputs import draw
from parity.judging.stages import staged
from parity.op import BACKENDS, Op
from parity.trial import Trial
from tests.matrix import OPS
from tests.support.tiny import in_every_way

RECORDED = Path(__file__).parents[1] / "goldens.json"


def digests(op: Op) -> dict[str, str]:
    """Of each output of all cases, in the steps of both backends, 32 bits of a hash."""
    found = {}
    for case in in_every_way(op):
        for backend in BACKENDS:
            for name, y in rounded(Trial(op, case, backend)).items():
                found.setdefault(name, hashlib.sha256()).update(y.tobytes())
    return {name: digest.hexdigest()[:8] for name, digest in found.items()}


def rounded(trial: Trial) -> dict[str, np.ndarray]:
    """The golden's outputs; of float64 the multiples of 2^-20 of the largest that are nearest."""
    if "stages" in inspect.signature(trial.op.golden).parameters:
        found = staged(trial, lambda site, x: round_to(x, "bfloat16").astype(np.float64))
    else:
        found = golden_of(trial.op, trial.case, draw(trial.op, trial.case))
    return {name: on_grid(y) if y.dtype == np.float64 else y for name, y in found.items()}


def on_grid(y: Floats) -> np.ndarray:
    """Integers; what is not finite is left out."""
    finite = np.where(np.isfinite(y), y, 0)
    return np.rint(finite / (np.abs(finite).max(initial=0) or 1) * 2**20).astype(np.int32)


def recorded() -> dict[str, dict[str, str]]:
    """The digests of every op by output."""
    found: dict[str, dict[str, str]] = json.loads(RECORDED.read_text())
    return found


if __name__ == "__main__":
    RECORDED.write_text(json.dumps({op.name: digests(op) for op in OPS}, indent=0) + "\n")
