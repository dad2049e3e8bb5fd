"""`parity explain`: where the error of a case comes from, on one screen; of a run, or of what the ledger has of it."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from rich.progress import TextColumn
from rich.text import Text

from parity import matrix
from parity.cli.options import (
    add_output_argument,
    add_trial_arguments,
    console,
    decided,
    exit_code,
    progress,
    trial_of,
    verdict_line,
)
from parity.debugging.bits import BitsExplanation, Difference, explain_bits
from parity.debugging.contrasts import Contrast
from parity.debugging.explain import Explanation, explain
from parity.debugging.sketches import Sketch, explain_record
from parity.judging.metrics import Metrics, histogram, tile_map
from parity.judging.verdict import PASSING
from parity.ledger import diff
from parity.ledger.freshness import moved_floors
from parity.ledger.read import read_all
from parity.ledger.schema import Record
from parity.op import Backend, Case, Op
from parity.report.text import NO_TWIN, SHADES, by_contract, heat_map, sparkline, worst_element, worst_tile
from parity.words import command as command_line

ABOUT = "say where the error of a case comes from: which rounding, or which fault"

EPILOG = """\
A rounding is "DTYPE at SITE": a site is a name of the op's staged golden (lhs, rhs, partial, acc, inner, out; q, k,
v, c, decay, A, state, …), the dtype what it is rounded to, "cut" where toward zero. Verdicts: AGREES, EXACT and TIE,
WIN pass; OFF CONTRACT, UNEVEN and OUT OF BOUND (G3), LOGIC FAULT (integer data fail too), NON-FINITE, WRONG SHAPE and
DTYPE, NOT REPEATABLE, CRASH (G1), REGRESSION (beside its record), LOSS, TAIL, BIAS and UNFIT (beside the other
backend) do not; see docs/verdicts.md. Exit codes: 0 the case passes, 1 it fails, 3 its kernel raised.
"""
HEAT = ("", "blue", "cyan", "yellow", "red")
MOST_AXES = 6
"""Axes of an output that has other bits, at most: those that say most."""
UNEVEN = 1.25
"""The contrast from which on an axis is shown with the bins that carry the error."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments of `parity explain`."""
    add_trial_arguments(parser)
    add_output_argument(parser)
    parser.add_argument(
        "--record",
        nargs="?",
        const="",
        metavar="REV",
        help="explain what the ledger has of the case, or had at a git revision, and run no kernel",
    )


@np.errstate(all="ignore")  # hardware says nothing of what is not finite, and interpreters need not
def command(given: argparse.Namespace) -> int:
    """`parity explain`: 0 where the case passes, 1 where it fails, 3 where its kernel raised."""
    trial = trial_of(given)
    op, case = trial.op, trial.case
    twin = recorded(given.root, given.record or "", op, case, "gpu" if given.backend == "tpu" else "tpu")
    with progress(TextColumn("emulating roundings"), TextColumn("{task.completed:.0f}")) as done:
        if op.bit_exact and given.record is None:
            bits = explain_bits(trial, done)
            code, screen = exit_code(bits.judged), of_bits(bits)
        elif given.record is None:
            judged = decided(given, trial)
            ops = matrix.load(given.root)
            found = explain(trial, done, judged=judged, output=given.output, ops=ops)
            code = exit_code(judged)
            screen = explanation(found, beside(op, case, found.judged.output, found.judged.metrics, twin))
        else:
            record = recorded(given.root, given.record, op, case, given.backend)
            if record is None:
                recording = command_line("pytest", "--parity-record", "-m", given.backend, "-k", given.case)
                raise ValueError(
                    f"case must be in the ledger of {given.backend}, got {given.case} (record: {recording})"
                )
            sketch = explain_record(trial, record, done)
            code = int(record.verdict not in PASSING)
            screen = sketched(sketch, beside(op, case, sketch.output, sketch.metrics, twin))
    console(150, soft_wrap=True, highlight=False).print(screen)
    return code


def recorded(root: Path, source: str, op: Op, case: Case, backend: Backend) -> Record | None:
    """The newest record of a case and seed on a backend, a real one before an emulated one.

    source: a git revision, or the ledgers of the project at `root` if it is "". Raises ValueError for what is neither.
    """
    folder = root / diff.FOLDER
    if not source and not folder.is_dir():
        return None
    if source:
        ledgers = [x for (of, _, name), x in diff.load(source, root).items() if (of, name) == (backend, op.name)]
    else:
        ledgers = list(read_all(folder, backend, op.name).values())
    key = case.with_seed(0).id, case.seed
    found = [ledger[key] for ledger in ledgers if key in ledger]
    return max(found, key=lambda r: (r.provenance.real, r.provenance.utc), default=None)


def beside(op: Op, case: Case, output: str, metrics: Metrics | None, other: Record | None) -> str:
    """How an output compares with the other backend's record, in words: ε or, of a narrow one, what is misrounded.

    Nothing where that was counted in other units.
    """
    if metrics is None or other is None or output not in other.outputs:
        return ""
    by, theirs = other.provenance, other.outputs[output]
    if moved_floors({output: metrics.floor}, other.outputs):
        return ""
    name = "misrounded" if op.contract(case, by.backend).is_narrow(output) else "epsilon"
    mine, its = getattr(metrics, name), getattr(theirs, name)
    ratio = f"{mine / its:.3g} ×" if its else f"{mine:.3g} against"
    what = "ε" if name == "epsilon" else "share of misrounded elements"
    return f"{what}: {ratio} the {by.backend}'s {its:.3g}, recorded {by.utc[:10]} on {by.backend}: {by.device_kind}"


def explanation(found: Explanation, compared: str = "") -> Text:
    """An explanation on one screen, with a line that compares it with the other backend."""
    judged, m = found.judged, found.judged.metrics
    out = verdict_line(judged)
    out.append(found.conclusion + "\n", "bold")
    roundings = found.attribution.roundings
    if len(found.attribution.steps) > 1:
        shares = zip(roundings, found.attribution.steps, strict=False)
        out.append("explained by " + ", then ".join(f"{r}: {share:.0%}" for r, share in shares) + "\n")
    if m:
        out.append(f"ε = {m.epsilon:.3g}  floor {m.floor:.3g}\n")
    for line in by_contract(judged):
        out.append(line + "\n")
    if compared:
        out.append(compared + "\n")
    if judged.worst:
        out.append(worst_element(judged) + "\n")
    out.append(f"integer twin: {found.twin.verdict.outcome}\n" if found.twin else f"{NO_TWIN}\n")
    _append_contrasts(out, found.contrasts, times=f"the {found.symbol} of")
    if found.errors is not None and found.errors.size:
        differing = int((found.errors > 0).sum())
        _append_drawings(
            out, found.symbol, histogram(found.errors), tile_map(found.errors), differing, found.errors.size
        )
    return out


def of_bits(found: BitsExplanation) -> Text:
    """What is other than the golden's bits, on one screen."""
    out = verdict_line(found.judged)
    out.append(found.conclusion + "\n", "bold")
    if found.same:
        out.append("every bit is the golden's in " + ", ".join(found.same) + "\n")
    for difference in found.differences:
        _append_difference(out, difference)
    return out


def _append_difference(out: Text, d: Difference) -> None:
    out.append(f"{d.output}: {d.wrong:,} of {d.elements:,} elements have other bits: {d.looks}\n")
    index = ", ".join(map(str, d.worst.index))
    out.append(f"worst {d.output}[{index}]: golden {d.worst.golden}  got {d.worst.got}\n")
    if d.wrong == d.elements:
        return
    _append_contrasts(out, d.contrasts, MOST_AXES, "the only ones", "as often as", "them")
    out.append("share by tile, worst at " + worst_tile(d.tiles) + "\n")
    _append_heat_map(out, d.tiles)


def sketched(found: Sketch, compared: str = "") -> Text:
    """What a record says, on one screen, with a line that compares it with the other backend."""
    record, m, by = found.record, found.metrics, found.record.provenance
    out = Text()
    out.append(f"{record.verdict}  ", "bold green" if record.verdict in PASSING else "bold red")
    out.append(f"recorded {by.utc[:10]} on {by.backend}: {by.device_kind}   {record.case}, seed {record.seed}")
    out.append(f"  [{found.output}]\n")
    out.append(found.conclusion + "\n", "bold")
    contract = record.contract_epsilon
    predicted = f"  its contract, emulated: {contract:.3g}" if contract is not None else ""
    out.append(f"ε = {m.epsilon:.3g}  floor {m.floor:.3g}{predicted}\n")
    if found.fit and found.fit.looks:
        out.append(f"{found.output}: {found.fit.ratio:.3g} × its contract\n")
    if compared:
        out.append(compared + "\n")
    for place in found.places[:3]:
        index = ", ".join(map(str, place.index))
        out.append(f"worst {found.output}[{index}]: golden {place.golden:.9g}  bound ±{place.allowed:.3g}\n")
    if found.common:
        where = ", ".join(f"{axis} {bins}" for axis, bins in found.common)
        out.append(f"the {len(found.places)} worst elements are in {where}\n")
    _append_contrasts(out, found.contrasts)
    _append_drawings(out, "η", m.histogram, m.tiles, m.differing, m.elements)
    return out


def _append_contrasts(
    out: Text,
    contrasts: tuple[Contrast, ...],
    most: int | None = None,
    only: str = "the only error",
    times: str = "the η of",
    whole: str = "the error",
) -> None:
    """At most `most` axes and the bins of each that carry `whole`."""
    for c in contrasts[:most]:
        if c.contrast >= UNEVEN:
            than = only if c.contrast == float("inf") else f"{c.contrast:.3g}× {times} the rest"
            out.append(f"  {c.axis:<18} {c.bin:<28} {than:<26} {c.share:.0%} of {whole}\n")
    if even := [c.axis for c in contrasts if c.contrast < UNEVEN]:
        out.append(f"  even along {', '.join(even)}\n")


def _append_drawings(
    out: Text,
    symbol: str,
    counts: Sequence[int],
    tiles: Sequence[Sequence[float]],
    differing: int,
    elements: int,
) -> None:
    """A histogram and a map of errors, which `symbol` is the name of."""
    if any(counts):
        out.append(f"{symbol}  {sparkline(counts)}   {differing:,} of {elements:,} elements err\n")
    if any(any(row) for row in tiles):
        out.append(f"rms {symbol} by tile, worst at " + worst_tile(tiles) + "\n")
        _append_heat_map(out, tiles)


def _append_heat_map(out: Text, tiles: Sequence[Sequence[float]]) -> None:
    for row in heat_map(tiles):
        out.append("   |")
        for shade in row:
            out.append(shade, HEAT[SHADES.index(shade)])
        out.append("|\n")
