"""What the goldens give where every site is rounded to eight bits: recorded, by op and output.

`python -m tests.support.goldens` writes it. Numbers of eight bits have exact products, and sums that are exact or far
from a tie: no processor's BLAS or exponential shows in them.
"""

import hashlib
import inspect
import json
from pathlib import Path
from typing import Any

import numpy as np

from parity.declared import golden_of
from parity.dtypes import Floats, round_to
from parity.inputs import draw
from parity.judging.stages import staged
from parity.op import BACKENDS, Case, Op
from parity.trial import Trial
from tests.matrix import OPS
from tests.support.tiny import tiny

RECORDED = Path(__file__).parents[1] / "goldens.json"
ABSENT = dict(existing_out=False, shard=None, capacity=None, weights=False, bias=False, h0=False, ht=False)
"""Of the tensors that an op may be given none."""
OTHERS: list[tuple[str, dict[str, Any]]] = [
    ("chunk", dict(K=160, V=24, T=20)),  # channels of keys in several tiles
    ("bounded_gate", dict(rate=False)),
    ("moe_layer", dict(quantize="fp8")),
    ("moe_layer", dict(quantize="mxfp8")),
]
"""What else there is of ops whose names have such a part."""


def cases(op: Op) -> list[Case]:
    """The smallest with all tensors that there are, with as few as can be, with every flag turned, and `OTHERS`."""
    absent = {name: value for name, value in ABSENT.items() if name in op.defaults}
    flags = {n: not on for n, on in op.defaults.items() if isinstance(on, bool) and n not in (*ABSENT, "rate")}
    others = [settings for part, settings in OTHERS if part in op.name]
    return list(dict.fromkeys(tiny(op, **settings) for settings in ({}, absent, flags, *others)))


def digests(op: Op) -> dict[str, str]:
    """Of each output of all cases, in the steps of both backends, 32 bits of a hash."""
    found = {}
    for case in cases(op):
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
