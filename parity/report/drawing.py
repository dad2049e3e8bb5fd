"""The report's drawings, as inline SVG. What colour says, size, shape or words say too."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from markupsafe import Markup

from parity.judging.metrics import HISTOGRAM

LEVELS = 7
"""Sizes of the squares of a heat map."""
CELL = 16
"""Units of a heat map's cell."""

MARKS = {
    "WIN": "M0 5.5L-5 -4H5z",
    "TIE": "M-4.5 0a4.5 4.5 0 1 0 9 0a4.5 4.5 0 1 0 -9 0z",
    "LOSS": "M0 -5.5L-5 4H5z",
    "EXPECTED LOSS": "M0 -5.5L-5 4H5z",
    "one seed": "M-2.5 0a2.5 2.5 0 1 0 5 0a2.5 2.5 0 1 0 -5 0z",
    "other": "M-5 -3L-3 -5L0 -2L3 -5L5 -3L2 0L5 3L3 5L0 2L-3 5L-5 3L-2 0z",
}
"""Outlines of the scatter's points, by kind: WIN points down, where the TPU errs less; LOSS points up."""


def svg(width: float, height: float, content: str, label: str, classes: str = "") -> Markup:
    """An image of that size; `label` says in words what it shows."""
    return Markup('<svg class="{}" viewBox="0 0 {:g} {:g}" role="img"><title>{}</title>{}</svg>').format(
        classes, width, height, label, Markup(content)
    )


def heat_map(tiles: Sequence[Sequence[float]]) -> Markup:
    """Tiles as squares, larger and darker where the error is larger; the worst one is framed.

    Sizes are linear in rms η; a tile with an error that is not finite is a full square.
    """
    rows, columns = len(tiles), len(tiles[0])
    top = max((value for row in tiles for value in row if math.isfinite(value)), default=0.0) or 1.0
    centres: dict[int, list[str]] = {}
    for r, row in enumerate(tiles):
        for c, value in enumerate(row):
            level = min(math.ceil(LEVELS * value / top), LEVELS) if math.isfinite(value) else LEVELS + 1
            if level:
                centres.setdefault(level, []).append(f"M{c * CELL + CELL // 2} {r * CELL + CELL // 2}h0")
    # A stroke of no length with square ends is a square; how wide and how dark, the style sheet says of each level.
    paths = "".join(f'<path class="h{level}" d="{"".join(path)}"/>' for level, path in sorted(centres.items()))
    r, c = max(((r, c) for r in range(rows) for c in range(columns)), key=lambda rc: tiles[rc[0]][rc[1]])
    frame = f'<rect class="frame" x="{c * CELL}" y="{r * CELL}" width="{CELL}" height="{CELL}"/>'
    ground = f'<rect class="ground" width="{columns * CELL}" height="{rows * CELL}"/>'
    label = f"rms η by tile, {rows} by {columns}: worst {tiles[r][c]:.3g} in row {r}, column {c}"
    return svg(columns * CELL, rows * CELL, ground + paths + frame, label, "map")


def histogram(counts: Sequence[int], bound: float) -> Markup:
    """Counts of log2 η as bars, and where the bound lies; bars beyond it are hatched."""
    filled = [n for n, count in enumerate(counts) if count]
    limit = math.log2(bound) if bound else None
    first, last = HISTOGRAM[filled[0]], HISTOGRAM[filled[-1] + 1]
    if limit is not None:
        first, last = min(first, math.floor(limit)), max(last, math.ceil(limit))
    last = max(last, first + 8)
    width, height, base = 260.0, 120.0, 96.0
    left, right = 12.0, width - 12.0

    def x(log: float) -> float:
        return left + (log - first) / (last - first) * (right - left)

    top, step = max(counts), x(first + 1) - x(first)
    bars: dict[str, list[str]] = {}
    for n in filled:
        kind = "bar beyond" if limit is not None and HISTOGRAM[n] >= limit else "bar"
        tall = max((base - 14) * counts[n] / top, 2)
        bars.setdefault(kind, []).append(f"M{x(HISTOGRAM[n]) + step / 2:.1f} {base:g}v-{tall:.0f}")
    wide = f'stroke-width="{step - 1:.1f}"'
    content = "".join(f'<path class="{kind}" {wide} d="{"".join(path)}"/>' for kind, path in bars.items())
    content += f'<path class="axis" d="M{left} {base}H{right}"/>'
    ends = [(first, "start", left), (last, "end", right)]
    content += "".join(
        f'<text x="{at:g}" y="{base + 15:g}" text-anchor="{anchor}">2{_superscript(int(log))}</text>'
        for log, anchor, at in ends
    )
    if limit is not None:
        at = x(limit)
        content += f'<path class="limit" d="M{at:.1f} 4V{base}"/>'
        side, anchor = (-4, "end") if at > width / 2 else (4, "start")
        content += f'<text class="limit" x="{at + side:.1f}" y="12" text-anchor="{anchor}">bound</text>'
    return svg(width, height, content, "how many elements have which η", "histogram")


def sparkline(values: Sequence[float | None], labels: Sequence[str]) -> Markup:
    """A quantity over revisions; a gap where a revision has none. `labels` name the points."""
    known = [value for value in values if value is not None]
    middle = (max(known) + min(known)) / 2
    # What is within 10 % of each other looks flat.
    reach = max(max(known) - min(known), 0.2 * middle) or 1.0
    width, height, margin = 150.0, 34.0, 6.0
    step = (width - 2 * margin) / max(len(values) - 1, 1)

    def place(n: int, value: float) -> tuple[float, float]:
        return margin + n * step, height / 2 - (value - middle) / reach * (height - 2 * margin)

    points = [(n, *place(n, value)) for n, value in enumerate(values) if value is not None]
    line = ""
    for n, (index, x, y) in enumerate(points):
        joined = n and points[n - 1][0] == index - 1
        line += f"{'L' if joined else 'M'}{x:.1f} {y:.1f}"
    dots = Markup("").join(
        Markup('<circle cx="{:.1f}" cy="{:.1f}" r="2.6"><title>{}</title></circle>').format(x, y, labels[n])
        for n, x, y in points
    )
    return svg(width, height, f'<path class="line" d="{line}"/>{dots}', "ε by revision", "spark")


@dataclass(frozen=True)
class Point:
    """One case of the scatter: ε on both sides (positive), its kind (a key of `MARKS`), its title, and its link."""

    gpu: float
    tpu: float
    kind: str
    title: str
    link: str | None = None


def scatter(points: Iterable[Point]) -> Markup:
    """ε_TPU over ε_GPU, both logarithmic and to the same scale, with the diagonal where they are equal."""
    points = sorted(points, key=lambda point: list(MARKS).index("one seed") != list(MARKS).index(point.kind))
    logs = [math.log10(value) for point in points for value in (point.gpu, point.tpu)]
    low, high = math.floor(min(logs)), math.ceil(max(logs))
    high += low == high
    width, height, left, right, top, bottom = 560.0, 520.0, 74.0, 14.0, 14.0, 64.0
    side_x, side_y = width - left - right, height - top - bottom

    def x(log: float) -> float:
        return left + (log - low) / (high - low) * side_x

    def y(log: float) -> float:
        return top + (high - log) / (high - low) * side_y

    content = [f'<rect class="ground" x="{left}" y="{top}" width="{side_x}" height="{side_y}"/>']
    every = max(1, -(-(high - low) // 7))
    grid = ""
    for log in range(low, high + 1, every):
        grid += f"M{x(log):.1f} {top}V{top + side_y}M{left} {y(log):.1f}H{left + side_x}"
        content.append(f'<text x="{x(log):.1f}" y="{height - bottom + 25:g}" text-anchor="middle">{_power(log)}</text>')
        content.append(f'<text x="{left - 8:g}" y="{y(log) + 4:.1f}" text-anchor="end">{_power(log)}</text>')
    content.append(f'<path class="grid" d="{grid}"/>')
    content.append(f'<path class="diagonal" d="M{x(low):.1f} {y(low):.1f}L{x(high):.1f} {y(high):.1f}"/>')
    content += [
        f'<text class="name" x="{left + side_x / 2:g}" y="{height - 14:g}" text-anchor="middle">ε_GPU</text>',
        f'<text class="name" transform="translate(20 {top + side_y / 2:g}) rotate(-90)" text-anchor="middle">'
        "ε_TPU</text>",
        f'<text class="note" x="{left + 12:g}" y="{top + 24:g}">▲ the TPU errs more</text>',
        f'<text class="note" x="{left + side_x - 12:g}" y="{top + side_y - 14:g}" text-anchor="end">'
        "▼ the TPU errs less</text>",
    ]
    marks = [
        Markup('<path class="mark {}" d="{}" transform="translate({:.1f} {:.1f})"><title>{}</title></path>').format(
            mark_class(point.kind), MARKS[point.kind], x(math.log10(point.gpu)), y(math.log10(point.tpu)), point.title
        )
        for point in points
    ]
    linked = [
        Markup('<a href="#{}" tabindex="-1">{}</a>').format(point.link, mark) if point.link else mark
        for point, mark in zip(points, marks, strict=True)
    ]
    return svg(width, height, "".join([*content, *linked]), f"ε_TPU over ε_GPU of {len(points)} cases", "plot")


def mark(kind: str) -> Markup:
    """The outline of a kind of points, for a legend."""
    path = Markup('<path class="mark {}" d="{}" transform="translate(8 8)"/>').format(mark_class(kind), MARKS[kind])
    return svg(16, 16, path, kind, "key")


def mark_class(kind: str) -> str:
    """The class of a kind of points."""
    return kind.lower().replace(" ", "-")


def _power(log: int) -> str:
    return f"10{_superscript(log)}"


def _superscript(number: int) -> str:
    return str(number).translate(str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹"))
