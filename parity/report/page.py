"""The report as one HTML file: a verdict for each op, then what it rests on, case by case."""

from __future__ import annotations

import base64
import hashlib
import math
from collections import Counter
from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any

from jinja2 import DictLoader, Environment, StrictUndefined
from markupsafe import Markup

from parity.compilers import programs, schedule
from parity.judging.verdict import PASSING
from parity.op import BACKENDS
from parity.report import drawing
from parity.report.drawing import Point
from parity.report.entries import COMPARED, Entry, Measured
from parity.report.history import history

LIMIT = 5_000_000
"""Bytes that the file stays under."""
SPARE = 2000
"""Of them kept for sentences about what is left out."""
LISTED, MEASURED, DRAWN = range(3)
"""How much the page has of a judgement: its row, its figures too, and its drawings as well."""
FIRST = 200
"""The judgements of most interest, which are drawn before the others are listed."""
POINTS = 1500
"""Points of the scatter, at most: comparisons that failed, other comparisons, single seeds; of each kind those furthest
from the diagonal first."""

SIDES = (*BACKENDS, COMPARED)
SYMBOLS = {True: "✓", False: "✗", None: "–"}
STATES = {True: "ok", False: "bad", None: "none"}


@dataclass(frozen=True)
class Run:
    """What was run: the command, the devices in words, when, and what else the reader must know."""

    command: str
    devices: tuple[str, ...]
    utc: str
    notices: tuple[str, ...] = ()


@dataclass(frozen=True)
class Written:
    """What `write` wrote: the file's size, and how many of the judgements it lists."""

    path: Path
    size: int
    entries: int
    listed: int

    def __str__(self) -> str:
        listed = "" if self.listed == self.entries else f", {self.listed} of them listed"
        return f"{self.path}: {self.entries} judgements{listed}, {self.size / 1e6:.1f} MB"


def write(path: Path, entries: Sequence[Entry], run: Run, projects: Mapping[str, Path]) -> Written:
    """Write the report of a run of these projects, by name; their ledgers are read from their folders.

    Where not everything fits, the page says so: of judgements that passed far from their bounds it leaves out the
    drawings first, then the figures, then the judgements themselves. Raises OSError where the file cannot be written.
    """
    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    environment.loader = DictLoader({name: _text(name) for name in ("page.html", "case.html")})
    environment.filters |= {"number": _number, "load": _load, "breakable": _breakable}
    provenances = _provenances(entries)
    given: dict[str, Any] = {
        "run": run,
        "counts": Counter(entry.passed for entry in entries),
        "matrix": _matrix(entries),
        "projects": [(name, _history(root), _schedules(root)) for name, root in projects.items()],
        "provenances": list(provenances.values()),
        "sides": SIDES,
        "ops": list(dict.fromkeys(entry.op for entry in entries)),
        "outcomes": sorted({entry.outcome for entry in entries}),
        "style": Markup(_text("page.css")),
        "script": Markup(_text("page.js")),
        "hashes": {name: _hash(_text(name)) for name in ("page.css", "page.js")},
        "SYMBOLS": SYMBOLS,
        "STATES": STATES,
    }
    page, case = environment.get_template("page.html"), environment.get_template("case.html")
    order = _in_order(entries)
    identity = {id(entry): f"c{n}" for n, entry in enumerate(order)}

    def whole(cases: Iterable[Markup], listed: Container[int], left_out: Sequence[str]) -> str:
        links = {key: link for key, link in identity.items() if key in listed}
        text = Markup("").join(cases)
        return page.render(**given, cases=text, left_out=left_out, total=len(entries), scatter=_scatter(entries, links))

    def fragment(entry: Entry, detail: int) -> Markup:
        measured = [
            {
                "of": m,
                "provenance": provenances[_key(m)]["id"] if m.provenance else None,
                "histogram": drawing.histogram(m.histogram, m.bound) if detail == DRAWN and m.histogram else None,
                "map": drawing.heat_map(m.tiles) if detail == DRAWN and m.tiles else None,
            }
            for m in entry.measured
        ]
        state = {"symbol": SYMBOLS[entry.passed], "state": STATES[entry.passed], "brief": detail == LISTED}
        return Markup(case.render(entry=entry, id=identity[id(entry)], measured=measured, **state))

    left = LIMIT - SPARE - len(whole((), identity, ()).encode())
    fragments: dict[int, Markup] = {}
    details: dict[int, int] = {}
    ranked = sorted(order, key=_interest)
    for some, detail in ((ranked[:FIRST], DRAWN), (ranked, LISTED), (ranked, MEASURED), (ranked, DRAWN)):
        for entry in some:
            key = id(entry)
            if details.get(key, -1) >= detail or left <= 0:
                continue
            new = fragment(entry, detail)
            grown = len(new.encode()) - len(fragments.get(key, "").encode())
            if grown <= left:
                left -= grown
                fragments[key], details[key] = new, detail
    content = whole(
        [fragments[id(entry)] for entry in order if id(entry) in fragments], fragments, _left_out(entries, details)
    )
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(content, encoding="utf-8")
    return Written(path, len(content.encode()), len(entries), len(fragments))


def _left_out(entries: Sequence[Entry], details: Mapping[int, int]) -> list[str]:
    """What the page does not have for want of room, in sentences."""
    reached = {
        detail: sum(details.get(id(entry), -1) >= detail for entry in entries) for detail in (LISTED, MEASURED, DRAWN)
    }
    what = {LISTED: "listed", MEASURED: "listed with their figures", DRAWN: "drawn"}
    return [
        f"{count} of {len(entries)} judgements are {what[detail]}: the file stays under {LIMIT // 10**6} MB. "
        "Those that failed come first, then those that were explained, compared, or nearest to their bounds."
        for detail, count in reached.items()
        if count < len(entries)
    ]


def _text(name: str) -> str:
    return resources.files(__package__).joinpath(name).read_text(encoding="utf-8")


def _hash(text: str) -> str:
    """What a browser is told that this inline text is, so that it takes no other."""
    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()


def _number(value: float | None) -> str:
    return "–" if value is None or math.isnan(value) else "∞" if math.isinf(value) else f"{value:.3g}"


def _breakable(name: str) -> Markup:
    """A name of words with underscores, which may be broken between two."""
    return Markup("_<wbr>").join(name.split("_"))


def _load(value: float) -> str:
    return _number(value) if value >= 0.001 or not value else "<0.001"


def _in_order(entries: Sequence[Entry]) -> list[Entry]:
    """As they are listed: those that failed, those that came to no judgement, and the rest as it was judged."""
    return sorted(entries, key=lambda entry: [False, None, True].index(entry.passed))


def _interest(entry: Entry) -> tuple[bool, bool, bool, float]:
    return entry.passed is True, not entry.attribution, entry.side != COMPARED, -entry.load


# ------------------------------------------------------------------------------------------------------- the sections


@dataclass(frozen=True)
class Cell:
    """The verdicts on an op on one side: how many cases had which, and the worst."""

    passed: bool | None
    outcomes: tuple[tuple[str, int], ...]
    worst: str


def _matrix(entries: Sequence[Entry]) -> list[tuple[str, dict[str, Cell]]]:
    """The cells of each op by side; a case that was judged twice counts once, with the worse outcome."""
    found: dict[str, dict[str, dict[str, tuple[bool | None, str]]]] = {}
    loads: dict[tuple[str, str], float] = {}

    def add(entry: Entry, side: str, passed: bool | None, outcome: str) -> None:
        cases = found.setdefault(entry.op, {}).setdefault(side, {})
        before = cases.get(entry.case)
        if before is None or before[0] is not False:
            cases[entry.case] = passed, outcome

    for entry in entries:
        add(entry, entry.side, entry.passed, entry.outcome)
        for m in entry.measured:
            loads[entry.op, m.backend] = max(m.load, loads.get((entry.op, m.backend), 0.0))
            if entry.side == COMPARED and m.provenance:
                add(entry, m.backend, m.outcome in PASSING, m.outcome)
    cells = {
        op: {side: _cell(cases, loads.get((op, side))) for side, cases in of_op.items()} for op, of_op in found.items()
    }
    for op, of_op in cells.items():
        ratios = [entry.ratio for entry in entries if entry.op == op and entry.ratio]
        if ratios:
            ratio, low, high = map(_number, max(ratios))
            cell = of_op[COMPARED]
            of_op[COMPARED] = Cell(cell.passed, cell.outcomes, f"worst {ratio} [{low}, {high}]")
    return list(cells.items())


def _cell(cases: Mapping[str, tuple[bool | None, str]], load: float | None) -> Cell:
    states = {passed for passed, _ in cases.values()}
    passed = False if False in states else True if True in states else None
    outcomes = sorted(Counter(outcome for _, outcome in cases.values()).items())
    return Cell(passed, tuple(outcomes), f"error {_load(load)} of its bound" if load else "")


def _scatter(entries: Sequence[Entry], links: Mapping[int, str]) -> dict[str, Any] | None:
    """The drawing and what its caption must say; None where no case has an ε above 0 on both backends."""
    failed: list[Point] = []
    compared: list[Point] = []
    zero = 0
    single: dict[str, dict[str, Entry]] = {}
    decided = {entry.case for entry in entries if entry.side == COMPARED}
    for entry in entries:
        if entry.side != COMPARED:
            single.setdefault(entry.case, {})[entry.side] = entry
        elif set(entry.epsilon) == set(BACKENDS):
            if _drawable(entry.epsilon):
                kind = entry.outcome if entry.outcome in drawing.MARKS else "other"
                (compared if entry.passed else failed).append(_point(entry, entry.epsilon, kind, links))
            else:
                zero += 1
    pairs = []
    for case, sides in single.items():
        epsilon = {side: entry.epsilon[side] for side, entry in sides.items() if side in entry.epsilon}
        if case not in decided and len(epsilon) == len(BACKENDS):
            if _drawable(epsilon):
                pairs.append(_point(sides["tpu"], epsilon, "one seed", links))
            else:
                zero += 1
    ranked = [
        p for some in (failed, compared, pairs) for p in sorted(some, key=lambda p: -abs(math.log(p.tpu / p.gpu)))
    ]
    points = ranked[:POINTS]
    if not points:
        return None
    kinds = [kind for kind in drawing.MARKS if any(point.kind == kind for point in points)]
    return {
        "drawing": drawing.scatter(points),
        "kinds": [(kind, drawing.mark(kind), sum(point.kind == kind for point in points)) for kind in kinds],
        "zero": zero,
        "left_out": len(ranked[POINTS:]),
    }


def _drawable(epsilon: Mapping[str, float]) -> bool:
    return all(0 < value < math.inf for value in epsilon.values())


def _point(entry: Entry, epsilon: Mapping[str, float], kind: str, links: Mapping[int, str]) -> Point:
    verdict = "one seed, not compared" if kind == "one seed" else f"{entry.outcome} {entry.reason}"
    title = f"{entry.case}: ε_TPU {epsilon['tpu']:.3g}, ε_GPU {epsilon['gpu']:.3g}; {verdict}"
    return Point(epsilon["gpu"], epsilon["tpu"], kind, title, links.get(id(entry)))


def _history(root: Path) -> dict[str, Any]:
    found = history(root)
    rows = []
    for series in found.series:
        known = [value for value in series.epsilon if value is not None]
        labels = [f"{name}: ε = {_number(value)}" for name, value in zip(found.revisions, series.epsilon, strict=True)]
        change = f"{known[-1] / known[0]:.3g}×" if known[0] else "–"
        rows.append((series, drawing.sparkline(series.epsilon, labels), known[0], known[-1], change))
    return {"revisions": found.revisions, "rows": rows, "note": found.note}


def _schedules(root: Path) -> dict[str, Any]:
    """The compiler's figures that the project has recorded, and the programs that it refuses."""
    try:
        lines = list(schedule.LEDGER.read(root).values())
    except ValueError as error:
        return {"lines": [], "refused": [], "note": str(error)}
    if not lines:
        return {"lines": [], "refused": [], "note": ""}
    try:
        refused = [(program, chip) for program in programs.load(root) for chip in program.refused]
    except ValueError as error:
        return {"lines": lines, "refused": [], "note": str(error)}
    return {"lines": lines, "refused": refused, "note": ""}


def _provenances(entries: Iterable[Entry]) -> dict[str, dict[str, Any]]:
    """Each provenance of the run once, by `_key`, with the `id` that cases refer to."""
    found: dict[str, dict[str, Any]] = {}
    for entry in entries:
        for m in entry.measured:
            if m.provenance and _key(m) not in found:
                found[_key(m)] = {"id": f"p{len(found) + 1}", **m.provenance}
    return found


def _key(m: Measured) -> str:
    return repr(sorted(m.provenance.items()))
