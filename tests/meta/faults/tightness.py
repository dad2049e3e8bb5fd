"""How near right kernels come to what one element may err: the table of docs/verdicts.md.

python -m tests.meta.faults.tightness [PATTERN]     # families whose names match; about 3 minutes of a core for all
"""

import inspect
import re
import sys
from collections import defaultdict
from collections.abc import Iterator, Mapping
from statistics import median

from parity.backends import prepare_environment
from parity.judging.fit import K
from parity.judging.judge import Judgement, gates
from parity.op import BACKENDS, Backend, Op
from parity.trial import Trial
from tests.matrix import OPS
from tests.support.agreement import asked

Key = tuple[str, bool, Backend]
"""The family, whether the outputs are float32, and the backend."""


def family(op: Op) -> str:
    """The module that defines an op."""
    return inspect.unwrap(op.golden).__module__.rpartition(".")[2]


def worst(judged: Judgement, name: str) -> float:
    """The worst element of an output, as a share of what it may err."""
    fit = judged.fits.get(name)
    return fit.sigmas / K if fit else judged.outputs[name].eta_max / judged.bound


def measured(pattern: str) -> Mapping[Key, list[float]]:
    """The worst element of each case of the default tier, by its float32 outputs and its narrower ones."""
    found: dict[Key, list[float]] = defaultdict(list)
    for op in (op for op in OPS if not op.bit_exact and re.search(pattern, family(op))):
        for backend in BACKENDS:
            for trial in (Trial(op, case, backend) for case in asked(op, backend)):
                judged, by_width = gates(trial), defaultdict[bool, list[float]](list)
                for name in judged.worsts:
                    by_width[trial.contract.dtype(name) == "float32"].append(worst(judged, name))
                for is_wide, shares in by_width.items():
                    found[family(op), is_wide, backend].append(max(shares))
        print(op.name, file=sys.stderr, flush=True)
    return found


def rows(found: Mapping[Key, list[float]]) -> Iterator[str]:
    """The lines of the table, in Markdown."""
    yield "| family | float32: TPU | GPU | narrower: TPU | GPU |"
    yield "|---|---|---|---|---|"
    for name in dict.fromkeys(name for name, *_ in found):
        shares = [found.get((name, is_wide, backend), []) for is_wide in (True, False) for backend in BACKENDS]
        texts = (f"{median(of):.2f} ({len(of)})" if of else "–" for of in shares)
        yield f"| {name} | {' | '.join(texts)} |"


if __name__ == "__main__":
    prepare_environment()
    print(*rows(measured("".join(sys.argv[1:]))), sep="\n")
