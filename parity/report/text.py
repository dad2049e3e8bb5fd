"""Judgements in words: what a failing test and a summary print."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence, Set
from typing import Any

from parity.judging.fit import Look
from parity.judging.judge import Compared, Judgement
from parity.judging.metrics import HISTOGRAM
from parity.words import command

BLOCKS = "▁▂▃▄▅▆▇█"
SHADES = " ░▒▓█"
NO_TWIN = "no integer twin: the golden is not exact on integer data"
MOST_AXES, MOST_LABELS = 2, 6
"""Axes of a failed output, and labels of each, whose errors are shown beside the contract."""


def failure(judged: Judgement, twin: Judgement | None, rerun: str) -> str:
    """Why a case failed, on one screen; `twin` is the same case on integer data."""
    v, device = judged.verdict, "real" if judged.real else "emulated"
    output = f"  [{judged.output}]" if judged.output else ""
    lines = [f"{v.outcome}  {v.gate}: {v.reason}   {judged.backend}: {device}   {judged.case.id}{output}"]
    lines += [judged.trace] if judged.trace else []
    if judged.worst:
        lines.append(worst_element(judged))
        if where := where_beyond(judged):
            lines.append(f"where: {where}")
    lines += by_contract(judged)
    if m := judged.metrics:
        lines.append(f"{m.differing:,} of {m.elements:,} elements err   ε = {m.epsilon:.3g}  floor {m.floor:.3g}")
        if any(m.histogram):
            lines.append(f"η  {sparkline(m.histogram)}")
        if any(any(row) for row in m.tiles):
            lines.append("rms η by tile, worst at " + worst_tile(m.tiles))
            lines += [f"   |{row}|" for row in heat_map(m.tiles)]
    if twin is not None:
        also = "passes" if twin.verdict.passed else "fails too"
        lines.append(f"integer twin: {also} (parity explain says whether it is rounding or logic)")
    elif not (judged.ended or judged.bound == 0):
        lines.append(NO_TWIN)
    lines.append(f"rerun: {rerun}")
    return "\n".join(lines)


def worst_element(judged: Judgement) -> str:
    """The element of the output that decided which errs most. Of a judgement that has one."""
    worst = judged.worst
    assert worst is not None
    index = ", ".join(map(str, worst.index))
    value = f"golden {worst.golden:.9g}  got {worst.got:.9g}  bound ±{worst.allowed:.3g}"
    return f"worst {judged.output}[{index}]: {value}"


def where_beyond(judged: Judgement) -> str:
    """How many elements are beyond their bound, and between which indices; "" where none is."""
    if not judged.worst or not judged.worst.box:
        return ""
    ranges = ", ".join(f"{first}-{last}" for first, last in judged.worst.box)
    return f"{judged.worst.beyond:,} elements beyond the bound, all within [{ranges}]"


def by_contract(judged: Judgement) -> list[str]:
    """How each output fits its contract, and by label the one that decided, along the axes where that differs most."""
    if judged.fit is None:
        return []
    by_axis: dict[str, list[Look]] = {}
    for look in judged.fit.looks:
        if look.axis:
            by_axis.setdefault(look.axis, []).append(look)
    uneven = sorted(by_axis.items(), key=lambda item: -max(look.load for look in item[1]))
    lines = [str(fit) for fit in sorted(judged.fits.values(), key=lambda fit: -fit.load)]
    for axis, looks in uneven[:MOST_AXES]:
        worst = sorted(looks, key=lambda look: -look.ratio)[:MOST_LABELS]
        lines.append(f"× its contract by {axis}: " + ", ".join(f"{look.label} {look.ratio:.3g}" for look in worst))
    return [line for line in lines if not judged.verdict.reason.startswith(line)]


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


def worst_tile(tiles: Sequence[Sequence[float]]) -> str:
    """Where the largest of them is, and how large."""
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
        fit = max(judged, key=lambda j: j.load).fit
        lines.append(f"{backend} {device}: ε = {compared.epsilon(backend):.3g}" + (f"   {fit}" if fit else ""))
    ratios = [t.epsilon / g.epsilon for t, g in zip(*metrics.values(), strict=True) if t and g and g.epsilon]
    lines += ["ε_TPU/ε_GPU by seed: " + " ".join(f"{ratio:.3g}" for ratio in ratios)] if ratios else []
    lines += [next((j.trace for j in compared.everything if j.trace), "")]
    lines.append(f"rerun: {rerun}")
    return "\n".join(filter(None, lines))


def summary(judged: Iterable[Mapping[str, Any]], recording: str = "pytest --parity-record") -> list[str]:
    """One line per op and backend over `Judgement.summary` and `Compared.summary` entries, then what to record.

    An entry's `record` is the status of its record and `record_of` the backend that has or lacks it; `where` names the
    host that can make it, if that is not this one; `project`, where there are several, the folder of its project.
    `recording` is the command that records the cases of this run.
    """
    all_entries = list(judged)
    groups: dict[tuple[str, str, bool], list[Mapping[str, Any]]] = {}
    twice = in_several((entry["op"], entry.get("project", "")) for entry in all_entries)
    for entry in all_entries:
        op = f"{entry['op']} ({entry['project']})" if entry["op"] in twice else entry["op"]
        groups.setdefault((op, entry["backend"], entry["real"]), []).append(entry)
    if not groups:
        return []
    lines = [f"{'op':<8} {'backend':<12} {'cases':>6} {'error/bound':>14} {'worst ε_TPU/ε_GPU':>22}  verdicts"]
    for (op, backend, real), entries in sorted(groups.items()):
        loads = [e["load"] for e in entries if "load" in e]
        compared = max((e for e in entries if "ratio" in e), key=lambda e: e["ratio"], default=None)
        ratio = _interval(compared) if compared else "–"
        counts = Counter(entry["outcome"] for entry in entries)
        verdicts = "  ".join(f"{count} {outcome}" for outcome, count in sorted(counts.items()))
        where = backend if real else f"{backend} emulated"
        cases = len({entry["case"] for entry in entries})
        lines.append(f"{op:<8} {where:<12} {cases:>6} {_times(max(loads, default=0.0)):>14} {ratio:>22}  {verdicts}")
    return lines + _to_record([entry for entry in all_entries if "record" in entry], recording)


def in_several(named: Iterable[tuple[str, str]]) -> set[str]:
    """The ops, of pairs of an op and its project, that more than one project has."""
    counts = Counter(op for op, _ in set(named))
    return {op for op, count in counts.items() if count > 1}


def _interval(compared: Mapping[str, Any]) -> str:
    ratio, low, high = (_times(compared[name]) for name in ("ratio", "low", "high"))
    return f"{ratio} [{low}, {high}]"


def _times(x: float) -> str:
    """A multiple: of a GPU that makes no error, and of a bound by a wrong kernel, it is astronomical."""
    return f"{x:.2f}" if x < 1000 else f"{x:.3g}"


def _to_record(entries: Sequence[Mapping[str, Any]], recording: str) -> list[str]:
    """How many records have which status, and for each but VALID, by backend, the command that measures them anew."""
    counts = Counter(entry["record"] for entry in entries)
    if not counts.keys() - {"VALID"}:
        return []
    lines = ["records: " + "  ".join(f"{count} {status}" for status, count in sorted(counts.items()))]
    groups: dict[tuple[str, str, str, str], dict[str, set[str]]] = {}
    for entry in entries:
        if entry["record"] != "VALID":
            key = entry["record"], entry["record_of"], entry.get("where", ""), entry.get("project", "")
            groups.setdefault(key, {}).setdefault(entry["op"], set()).add(entry["case"])
    for (status, backend, where, project), cases in sorted(groups.items()):
        counted = ", ".join(f"{len(of_op)} of {op}" for op, of_op in sorted(cases.items()))
        what = ", ".join(filter(None, [f"{counted} on {backend}", where]))
        of_project = f"{recording} {command(project)}" if project else recording
        lines.append(f"  {status}  {what}: {record_command(of_project, backend, cases)}")
    return lines


NAMED = 3
"""Cases of one op that a command names one by one; of more it records the whole op, which changes no valid record's
figures."""


def record_command(recording: str, backend: str, cases: Mapping[str, Set[str]]) -> str:
    """`recording`, narrowed down to some cases, by op, on one backend."""
    words: list[str] = []
    for op, of_op in sorted(cases.items()):
        # Brackets, as in a test's name: `gmm-` alone is also in the names of tgmm.
        words += [f"[{case}]" for case in sorted(of_op)] if len(of_op) <= NAMED else [f"[{op}-"]
    return f"{recording} {command('-m', backend, '-k', ' or '.join(words))}"
