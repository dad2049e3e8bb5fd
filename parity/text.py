"""Judgements in words: what a failing test and a summary print."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from parity.judge import Compared, Judgement
from parity.metrics import HISTOGRAM

BLOCKS = "▁▂▃▄▅▆▇█"
SHADES = " ░▒▓█"


def failure(judged: Judgement, twin: Judgement | None, rerun: str) -> str:
    """Why a case failed, on one screen; `twin` is the same case on integer data."""
    v, device = judged.verdict, "real" if judged.real else "emulated"
    lines = [f"{v.outcome}  {v.gate}: {v.reason}   {judged.backend}: {device}   {judged.case.id}  [{judged.output}]"]
    if worst := judged.worst:
        index = ", ".join(map(str, worst.index))
        compared = f"golden {worst.golden:.9g}  got {worst.got:.9g}  bound ±{worst.allowed:.3g}"
        lines.append(f"worst {judged.output}[{index}]: {compared}")
        if worst.box:
            ranges = ", ".join(f"{first}-{last}" for first, last in worst.box)
            lines.append(f"where: {worst.beyond:,} elements beyond the bound, all within [{ranges}]")
    if m := judged.metrics:
        lines.append(f"{m.differing:,} of {m.elements:,} elements err   ε = {m.epsilon:.3g}  floor {m.floor:.3g}")
        if any(m.histogram):
            lines.append(f"η  {sparkline(m.histogram)}")
        if any(any(row) for row in m.tiles):
            lines.append("rms η by tile, worst at " + _worst_tile(m.tiles))
            lines += [f"   |{row}|" for row in heat_map(m.tiles)]
    if twin is not None:
        also = "passes too (so: precision, not logic)" if twin.verdict.passed else "fails too (so: not rounding)"
        lines.append(f"integer twin: {also}")
    lines.append(f"rerun: {rerun}")
    return "\n".join(lines)


def sparkline(counts: Sequence[int]) -> str:
    """A histogram of log2 η in one line, over the bins that hold anything, with its ends."""
    filled = [i for i, count in enumerate(counts) if count]
    first, last = filled[0], filled[-1]
    shown, top = counts[first : last + 1], max(counts)
    bars = "".join(BLOCKS[min(7, -(-7 * count // top))] for count in shown)
    return f"2^{HISTOGRAM[first]:.0f} {bars} 2^{HISTOGRAM[last + 1]:.0f}"


def heat_map(tiles: Sequence[Sequence[float]]) -> list[str]:
    """Tiles as rows of shades, darkest where the error is largest."""
    top = max(max(row) for row in tiles) or 1.0
    return [
        "".join(SHADES[min(4, int(4 * value / top + 0.999))] * 2 if value < float("inf") else "██" for value in row)
        for row in tiles
    ]


def _worst_tile(tiles: Sequence[Sequence[float]]) -> str:
    row, column = max(
        ((r, c) for r, line in enumerate(tiles) for c in range(len(line))), key=lambda rc: tiles[rc[0]][rc[1]]
    )
    return f"({row}, {column}) of {len(tiles)} x {len(tiles[0])}: {tiles[row][column]:.3g}"


def comparison(compared: Compared, rerun: str) -> str:
    """Why a comparison of the backends failed: the verdict, both ε, every seed's ratio, the command that reruns it."""
    v, metrics = compared.comparison.verdict, {b: [j.metrics for j in js] for b, js in compared.judged.items()}
    lines = [f"{v.outcome}  {v.gate}: {v.reason}   {compared.case.id}"]
    for backend, judged in compared.judged.items():
        device = "real" if judged[0].real else "emulated"
        eta = max(j.eta_max for j in judged)
        lines.append(f"{backend} {device}: ε = {compared.epsilon(backend):.3g}   worst η {eta:.3g}")
    ratios = [t.epsilon / g.epsilon for t, g in zip(*metrics.values(), strict=True) if t and g and g.epsilon]
    lines.append("ε_TPU/ε_GPU by seed: " + " ".join(f"{ratio:.3g}" for ratio in ratios))
    lines.append(f"rerun: {rerun}")
    return "\n".join(lines)


def summary(judged: Iterable[Mapping[str, Any]]) -> list[str]:
    """One line per op and backend over `Judgement.summary` and `Compared.summary` entries."""
    all_entries = list(judged)
    groups: dict[tuple[str, str, bool], list[Mapping[str, Any]]] = {}
    for entry in all_entries:
        groups.setdefault((entry["op"], entry["backend"], entry["real"]), []).append(entry)
    if not groups:
        return []
    lines = [f"{'op':<8} {'backend':<12} {'cases':>6} {'worst η/bound':>14} {'worst ε_TPU/ε_GPU':>22}  verdicts"]
    for (op, backend, real), entries in sorted(groups.items()):
        loads = [e["eta_max"] / e["bound"] for e in entries if "eta_max" in e and e["bound"]]
        compared = max((e for e in entries if "ratio" in e), key=lambda e: e["ratio"], default=None)
        ratio = f"{compared['ratio']:.2f} [{compared['low']:.2f}, {compared['high']:.2f}]" if compared else "–"
        counts = Counter(entry["outcome"] for entry in entries)
        verdicts = "  ".join(f"{count} {outcome}" for outcome, count in sorted(counts.items()))
        where = backend if real else f"{backend} emulated"
        cases = len({entry["case"] for entry in entries})
        lines.append(f"{op:<8} {where:<12} {cases:>6} {max(loads, default=0.0):>14.2f} {ratio:>22}  {verdicts}")
    statuses = Counter(entry["record"] for entry in all_entries if "record" in entry)
    if statuses.keys() - {"VALID"}:
        counted = "  ".join(f"{count} {status}" for status, count in sorted(statuses.items()))
        lines.append(f"records: {counted}   (measure them anew: pytest --parity-record)")
    return lines
