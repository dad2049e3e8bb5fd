"""What the gates see of every loss of precision that is planted in the kernels: the table of docs/verdicts.md.

python -m tests.meta.faults.power [PATTERN]     # rows whose names match; about 5 minutes of a core for all
"""

import re
import sys
from collections import defaultdict
from collections.abc import Iterable, Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

from parity.backends import prepare_environment
from parity.judging.fit import Fit
from parity.judging.judge import gates
from parity.op import Backend, Case, Op
from parity.trial import Trial
from tests.matrix import OPS
from tests.meta.faults.planting import Fault, pairs, plant
from tests.meta.faults.test_faults_precision import FAULTS

SHORT = {"simple_gla": "simple", "gla": "channel", "gated_delta_rule": "gated", "kda": "KDA"}
FORMS = {"chunk_": "", "fused_recurrent_": " by steps"}
PASSES = ("_fwd", "_bwd")
Key = tuple[str, Backend, str]
"""The name of a loss, the backend and the op that it is planted in."""


def admitted(fault: Fault, op: Op) -> list[Case]:
    """The cases that are to show a fault: of the tiers before the full one, where there are any."""
    cases = [case for case in op.cases if fault.where(case)]
    return [case for case in cases if case.tier != "full"] or cases


def shown(fault: Fault, op: Op, directory: Path) -> Iterator[dict[str, Fit]]:
    """How the outputs of a kernel with a fault fit its contract, case by case."""
    kernel = getattr(plant(fault, directory), op.name)
    for case in admitted(fault, op):
        yield dict(gates(Trial(op, case, fault.backend, kernel)).fits)


def figure(fits: Iterable[Fit]) -> tuple[float, str]:
    """How many times a limit the output is that is furthest beyond one, and its ratio to the contract, or where nothing
    of the contract is to be seen in it its worst element in σ."""
    fit = max(fits, key=lambda fit: fit.load)
    ratio = max((look.ratio for look in fit.looks), default=None)
    size, unit = (fit.sigmas, " σ") if ratio is None else (ratio, "")
    return fit.load, f"{float(f'{size:.2g}'):,.15g}{unit}"


def measured(pattern: str) -> dict[Key, tuple[float, str]]:
    """Of each loss the figure of the first case that shows it; of several in one op the one that shows least."""
    found: dict[Key, tuple[float, str]] = {}
    for parameter in pairs(FAULTS, OPS):
        fault, op = parameter.values
        if not re.search(pattern, fault.name):
            continue
        key: Key = (fault.name, fault.backend, op.name)
        with TemporaryDirectory() as directory:
            caught = (fits for fits in shown(fault, op, Path(directory)) if any(f.verdict() for f in fits.values()))
            fits = next(caught, None)
        of_fault = (0.0, "not seen") if fits is None else figure(fits.values())
        found[key] = min(of_fault, found.get(key, of_fault))
        print(*key, *of_fault, file=sys.stderr, flush=True)
    return found


def called(stem: str) -> str:
    """An op without its pass, in fewer letters."""
    for form, how in FORMS.items():
        if stem.startswith(form):
            return SHORT[stem.removeprefix(form)] + how
    return stem


def rows(found: dict[Key, tuple[float, str]]) -> Iterator[str]:
    """The lines of the table, in Markdown."""
    cells: dict[str, dict[str, dict[str, list[str]]]] = defaultdict(lambda: {"tpu": {}, "gpu": {}})
    order = [op.name for op in OPS]
    for name in dict.fromkeys(name for name, *_ in found):
        for of, backend, op in sorted((key for key in found if key[0] == name), key=lambda key: order.index(key[2])):
            stem = op[:-4] if op.endswith(PASSES) else op
            alone = op.endswith("_bwd") and not {(of, backend, stem), (of, backend, f"{stem}_fwd")} & found.keys()
            label = f"{called(stem)}{' bwd' if alone else ''}"
            cells[name.removeprefix("float16 ")][backend].setdefault(label, []).append(found[of, backend, op][1])
    yield "| planted | TPU | GPU |"
    yield "|---|---|---|"
    for name, of_backend in cells.items():
        texts = ("; ".join(f"{op} {', '.join(figures)}" for op, figures in of.items()) for of in of_backend.values())
        yield f"| {name} | {' | '.join(texts)} |"


if __name__ == "__main__":
    prepare_environment()
    print(*rows(measured("".join(sys.argv[1:]))), sep="\n")
