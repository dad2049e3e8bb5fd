"""The schedule ledger: what the TPU compiler makes of a project's kernels, recorded and held against the record.

A project names its programs in `PROGRAMS` of the module `programs` beside its matrix. The ledger has one file per chip
and op, `records/schedule/<chip>/<op>.jsonl`, one line per program: all figures are the compiler's, so they are the same
on every host and change only with the kernel or the compiler.
"""

from __future__ import annotations

import argparse
import json
import linecache
import re
import subprocess
import sys
import textwrap
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from importlib import import_module
from importlib.metadata import version
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from parity import matrix
from parity.compilers.chips import CHIPS
from parity.compilers.mosaic import Abstract, Compilation, Compiled, CompiledKernel, compile_for_tpu, roofline
from parity.ledger import diff

FOLDER = Path(diff.FOLDER, diff.SCHEDULES)
GROWTH = 0.02
"""What a figure may grow by without a new record."""

GUARDED = ("cycles", "hbm_bytes", "spills", "code_bytes")
"""The figures of a line that must not grow."""

HOTTEST = 8
"""Source lines of a kernel that are shown."""

SCHEMA = 1


@dataclass(frozen=True)
class Program:
    """A function that the TPU compiler must take, at a production shape.

    function "module:function", arguments and keywords as a `Compilation` has them; name is unique among an op's
    programs. chips: those it must compile for; refused: those it cannot be compiled for, each with the compiler's own
    reason, or a part of it. work: how many units (rows, tokens, …) it works on.
    """

    op: str
    name: str
    function: str
    arguments: tuple[Abstract, ...]
    keywords: Mapping[str, Any] = field(default_factory=dict)
    chips: tuple[str, ...] = tuple(CHIPS)
    refused: Mapping[str, str] = field(default_factory=dict)
    work: int = 1
    unit: str = "row"

    @property
    def id(self) -> str:
        """Op and name."""
        return f"{self.op}-{self.name}"

    def on(self, chip: str) -> Compilation:
        """What the compiler is given for a chip."""
        return Compilation(self.function, chip, self.arguments, self.keywords)


@dataclass(frozen=True)
class Line:
    """One program on one chip.

    cycles: static ones of all steps of its kernels, on one core; floor_cycles: of them those that the MXU's floor has;
    hbm_cycles: what their HBM bytes take at the core's share of the published rate. bound: what bounds the slowest
    kernel. kernels: the figures of each.
    """

    chip: str
    op: str
    name: str
    libtpu: str
    work: int
    unit: str
    cycles: float
    floor_cycles: float
    hbm_cycles: float
    hbm_bytes: int
    spills: int
    code_bytes: int
    bound: str
    kernels: tuple[Mapping[str, Any], ...]
    schema: int = SCHEMA

    @property
    def key(self) -> tuple[str, str, str]:
        """What identifies it."""
        return self.chip, self.op, self.name

    @property
    def time(self) -> float:
        """Cycles it takes at least: its schedule or its HBM traffic."""
        return max(self.cycles, self.hbm_cycles)


def load(root: Path) -> tuple[Program, ...]:
    """The programs of the project at `root`.

    Raises ValueError where the matrix has no module `programs`, or a program is declared twice.
    """
    matrix.load(root)
    settings = tomllib.loads((root / "pyproject.toml").read_text())["tool"]["parity"]
    module = f"{settings['matrix']}.programs"
    try:
        programs: tuple[Program, ...] = tuple(import_module(module).PROGRAMS)
    except (ImportError, AttributeError) as error:
        raise ValueError(f"{module} must define PROGRAMS, a tuple of `Program`: {error}") from None
    ids = [program.id for program in programs]
    for program in programs:
        if ids.count(program.id) > 1:
            raise ValueError(f"PROGRAMS must have unique names, got {program.id} twice")
        if both := set(program.chips) & set(program.refused):
            raise ValueError(f"{program.id} must compile for {', '.join(sorted(both))} or be refused, not both")
    return programs


def compile_all(
    programs: Sequence[Program], chips: Sequence[str] = (), *, lines: bool = False
) -> dict[tuple[str, str], Compiled]:
    """What the compiler says of each program for each chip it names (of `chips` only, if any), by (id, chip).

    lines: with what each source line takes.
    """
    wanted = [(p, chip) for p in programs for chip in (*p.chips, *p.refused) if not chips or chip in chips]
    results = compile_for_tpu([program.on(chip) for program, chip in wanted], schedule=True, lines=lines)
    return {(program.id, chip): result for (program, chip), result in zip(wanted, results, strict=True)}


def surprises(programs: Iterable[Program], compiled: Mapping[tuple[str, str], Compiled]) -> list[str]:
    """Where the compiler says something else than the programs declare, in either direction."""
    found = []
    for program in programs:
        for chip in program.chips:
            result = compiled.get((program.id, chip))
            if result and not result.ok:
                found.append(f"{program.id} must compile for {chip}: {result.error}")
        for chip, reason in program.refused.items():
            result = compiled.get((program.id, chip))
            if result and result.ok:
                found.append(f"{program.id} is declared refused for {chip} ({reason}), but compiles")
            elif result and reason not in result.error:
                found.append(f"{program.id} must be refused for {chip} with {reason!r}, got {result.reason}")
    return found


def line(program: Program, chip: str, compiled: Compiled) -> Line:
    """The ledger's line of a program that compiled."""
    rooflines = [roofline(kernel, chip) for kernel in compiled.kernels]
    slowest = max(rooflines, key=lambda r: max(r.schedule, r.hbm))
    return Line(
        chip,
        program.op,
        program.name,
        libtpu=version("libtpu"),
        work=program.work,
        unit=program.unit,
        cycles=round(sum(r.schedule for r in rooflines), 1),
        floor_cycles=round(sum(r.mxu for r in rooflines), 1),
        hbm_cycles=round(sum(r.hbm for r in rooflines), 1),
        hbm_bytes=sum(kernel.call.hbm_bytes for kernel in compiled.kernels),
        spills=sum(kernel.spills for kernel in compiled.kernels),
        code_bytes=compiled.code_bytes,
        bound=slowest.bound,
        kernels=tuple(map(_figures, compiled.kernels)),
    )


def _figures(kernel: CompiledKernel) -> dict[str, Any]:
    return {
        "name": kernel.name,
        "steps": kernel.call.steps,
        "static_cycles": round(kernel.static_cycles, 1),
        "step_bundles": round(float(kernel.step_bundles), 1),
        "periodic_bundles": round(float(kernel.periodic_bundles), 1),
        "mxu_cycles": kernel.mxu_cycles,
        "hot_bundles": kernel.hot_bundles,
        "loop_bundles": kernel.loop_bundles,
        "bundles": kernel.bundles,
        "spills": kernel.spills,
        "fills": kernel.fills,
        "spill_share": round(kernel.spill_share, 4),
        "vmem_bytes": kernel.vmem_bytes,
        "passes": {passes.operand: round(passes.emitted, 3) for passes in kernel.passes},
        "slots": {unit: round(used / there, 4) for unit, (used, there) in kernel.slots.items()},
        "unknown_loops": kernel.unknown_loops,
    }


def read(root: Path) -> dict[tuple[str, str, str], Line]:
    """The ledger of the project at `root`. Raises ValueError for a line that this version does not know."""
    lines: dict[tuple[str, str, str], Line] = {}
    for path in sorted((root / FOLDER).glob("*/*.jsonl")):
        lines |= parse(path.read_text(), str(path))
    return lines


def parse(text: str, where: str) -> dict[tuple[str, str, str], Line]:
    """The lines of one file of the ledger; `where` is its name in errors."""
    lines = {}
    for number, content in enumerate(text.splitlines(), 1):
        try:
            found = json.loads(content)
            if found["schema"] != SCHEMA:
                raise ValueError(f"must have schema {SCHEMA}, got {found['schema']}")
            entry = Line(**found | {"kernels": tuple(found["kernels"])})
        except (ValueError, TypeError, KeyError) as error:
            raise ValueError(f"{where}:{number}: not a line of the schedule ledger: {error}") from None
        lines[entry.key] = entry
    return lines


def write(root: Path, lines: Iterable[Line]) -> None:
    """Put lines into the ledger of the project at `root`, in place of those of the same program and chip."""
    new: dict[tuple[str, str], dict[str, Line]] = {}
    for entry in lines:
        new.setdefault((entry.chip, entry.op), {})[entry.name] = entry
    for (chip, op), named in new.items():
        path = root / FOLDER / chip / f"{op}.jsonl"
        old = parse(path.read_text(), str(path)) if path.exists() else {}
        kept = {name: entry for (_, _, name), entry in old.items()} | named
        path.parent.mkdir(parents=True, exist_ok=True)
        part = path.with_name(path.name + ".part")
        part.write_text("".join(json.dumps(asdict(kept[name]), sort_keys=True) + "\n" for name in sorted(kept)))
        part.replace(path)


def grown(old: Line, new: Line) -> list[str]:
    """The guarded figures that grew by more than `GROWTH`, as text."""
    return [
        f"{name} {getattr(old, name):g} → {getattr(new, name):g}"
        for name in GUARDED
        if getattr(new, name) > getattr(old, name) * (1 + GROWTH)
    ]


def regressions(recorded: Mapping[tuple[str, str, str], Line], new: Iterable[Line]) -> list[str]:
    """What got worse than its record, and what has none."""
    found = []
    for entry in new:
        name = f"{entry.op}-{entry.name} on {entry.chip}"
        old = recorded.get(entry.key)
        if old is None:
            found.append(f"{name}: no record")
        elif old.libtpu != entry.libtpu:
            found.append(f"{name}: recorded with libtpu {old.libtpu}, this is {entry.libtpu}")
        elif worse := grown(old, entry):
            found.append(f"{name}: {', '.join(worse)}")
    return found


def at_revision(root: Path, revision: str) -> dict[tuple[str, str, str], Line]:
    """The ledger of a git revision. Raises ValueError where there is no such revision."""

    def git(*words: str) -> str:
        command = ["git", "--no-optional-locks", "-C", str(root), *words]
        return subprocess.run(command, capture_output=True, check=True, text=True, timeout=60).stdout

    try:
        if not re.fullmatch(r"[\w./~^@-]+", revision) or revision.startswith("-"):
            raise ValueError("not written as a revision is")
        names = git("ls-tree", "-r", "--name-only", "--full-name", revision, "--", FOLDER.as_posix()).splitlines()
        texts = {name: git("show", f"{revision}:{name}") for name in names if name.endswith(".jsonl")}
    except (OSError, ValueError, subprocess.SubprocessError):
        raise ValueError(f"--diff must name a git revision of {root}, got {revision!r}") from None
    return {key: entry for name, text in texts.items() for key, entry in parse(text, f"{revision}:{name}").items()}


def moved(old: Mapping[tuple[str, str, str], Line], new: Mapping[tuple[str, str, str], Line]) -> list[str]:
    """What differs between two ledgers, one line of text for each program and chip."""
    found = []
    for key in sorted(old.keys() | new.keys()):
        chip, op, name = key
        if key not in new or key not in old:
            found.append(f"{op}-{name} on {chip}: {'new' if key in new else 'gone'}")
            continue
        changes = [
            f"{figure} {before:g} → {after:g}" + (f" ({after / before - 1:+.1%})" if before else "")
            for figure in GUARDED
            if (before := getattr(old[key], figure)) != (after := getattr(new[key], figure))
        ]
        if changes:
            found.append(f"{op}-{name} on {chip}: {', '.join(changes)}")
    return found


# ---------------------------------------------------------------------------------------------------------- the command


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments of `parity schedule`."""
    parser.add_argument("program", nargs="?", help="compile this program (op-name) and print its kernels in detail")
    parser.add_argument("-k", metavar="EXPRESSION", default="", help="only programs whose id matches, as pytest's -k")
    parser.add_argument("--chip", action="append", default=[], metavar="CHIP", help="only this chip; may be repeated")
    what = parser.add_mutually_exclusive_group()
    what.add_argument("--record", action="store_true", help="compile, and write the ledger")
    what.add_argument(
        "--check", action="store_true", help="compile, and exit with 1 where a figure grew beyond its record"
    )
    what.add_argument("--diff", metavar="REV", help="what moved since the ledger of a git revision")
    parser.add_argument("--json", action="store_true", help="print JSON")


def command(given: argparse.Namespace) -> int:
    """`parity schedule`: the ledger as a table; with a program, --record or --check what the compiler says now."""
    if given.diff:
        changes = moved(
            _wanted_lines(given, at_revision(given.root, given.diff)), _wanted_lines(given, read(given.root))
        )
        print(json.dumps(changes, ensure_ascii=False) if given.json else "\n".join(changes) or "nothing moved")
        return 0
    if not (given.program or given.record or given.check):
        lines = list(_wanted_lines(given, read(given.root)).values())
        if not lines:
            raise ValueError(
                "the schedule ledger must have a line to show, has none (record it: parity schedule --record)"
            )
        _print(lines, given.json, refused=_refused(given, load(given.root)))
        return 0
    programs = [program for program in load(given.root) if _wanted(given, program.id)]
    if not programs:
        raise ValueError(f"a program must match, got {given.program or given.k!r}")
    compiled = compile_all(programs, given.chip, lines=bool(given.program))
    failed = surprises(programs, compiled)
    by_id = {program.id: program for program in programs}
    compiles = {(name, chip): result for (name, chip), result in compiled.items() if result.ok}
    lines = [line(by_id[name], chip, result) for (name, chip), result in compiles.items()]
    if given.record:
        write(given.root, lines)
    if given.check:
        failed += regressions(read(given.root), lines)
    if given.program:
        lines = [_in_detail(entry, result) for entry, result in zip(lines, compiles.values(), strict=True)]
    _print(lines, given.json, detailed=bool(given.program), refused=_refused(given, programs))
    for text in failed:
        print(text, file=sys.stderr)
    return 1 if failed else 0


def _wanted(given: argparse.Namespace, program: str, chip: str = "") -> bool:
    on_chip = not chip or not given.chip or chip in given.chip
    return given.program in (None, program) and diff.matches(given.k, program) and on_chip


def _wanted_lines(
    given: argparse.Namespace, ledger: Mapping[tuple[str, str, str], Line]
) -> dict[tuple[str, str, str], Line]:
    return {key: e for key, e in ledger.items() if _wanted(given, f"{e.op}-{e.name}", e.chip)}


def _refused(given: argparse.Namespace, programs: Iterable[Program]) -> list[tuple[Program, str]]:
    """The wanted programs and chips that the compiler refuses."""
    return [(p, chip) for p in programs for chip in p.refused if _wanted(given, p.id, chip)]


def _in_detail(entry: Line, compiled: Compiled) -> Line:
    """The line with what the ledger does not have, which is for people: what each kernel's source lines take, …"""
    kernels = tuple(
        {
            **figures,
            "hbm_bytes": kernel.call.hbm_bytes,
            "fetch_starvation": round(kernel.fetch_starvation, 4),
            "write_starvation": round(kernel.write_starvation, 4),
            "lines": list(map(asdict, kernel.lines)),
            "line_passes": list(map(asdict, kernel.line_passes)),
        }
        for figures, kernel in zip(entry.kernels, compiled.kernels, strict=True)
    )
    return replace(entry, kernels=kernels)


def _print(
    lines: Sequence[Line], as_json: bool, detailed: bool = False, refused: Sequence[tuple[Program, str]] = ()
) -> None:
    if as_json:
        print(json.dumps([asdict(entry) for entry in lines], sort_keys=True))
        return
    console = Console(width=None if sys.stdout.isatty() else 150)
    console.print(_table(lines, refused))
    if detailed:
        for entry in lines:
            for kernel in entry.kernels:
                print(f"{entry.chip} {kernel['name']}: {_detail(kernel)}\n{_hottest(kernel)}")


def _table(lines: Sequence[Line], refused: Sequence[tuple[Program, str]]) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for name in ("op", "program"):
        table.add_column(name, overflow="fold")
    table.add_column("chip", no_wrap=True)
    for name in ("cycles / unit", "of MXU floor", "of HBM floor", "spills", "code KiB"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("bound by")
    for e in lines:
        table.add_row(
            e.op,
            e.name,
            e.chip,
            f"{e.cycles / e.work:.4g} / {e.unit}",
            f"{e.floor_cycles / e.time:.0%}",
            f"{e.hbm_cycles / e.time:.0%}",
            str(e.spills),
            f"{e.code_bytes / 1024:.0f}",
            e.bound,
        )
    for program, chip in refused:
        table.add_row(program.op, program.name, chip, *["–"] * 5, f"refused: {program.refused[chip]}")
    return table


def _detail(kernel: Mapping[str, Any]) -> str:
    slots = "  ".join(f"{unit} {share:.0%}" for unit, share in kernel["slots"].items() if share)
    passes = ", ".join(f"{operand} ×{count:g}" for operand, count in kernel["passes"].items()) or "no dots"
    loops = f"\n  {kernel['unknown_loops']} loops counted once: only the data say how often they run"
    return (
        f"{kernel['static_cycles']:g} cycles a step, {kernel['steps']} steps"
        f"\n  bundles: {kernel['step_bundles']:g} a step + {kernel['periodic_bundles']:g} every few steps,"
        f" hot region {kernel['hot_bundles']}, loop {kernel['loop_bundles']}, program {kernel['bundles']};"
        f" MXU floor {kernel['mxu_cycles']:g}"
        f"\n  spills {kernel['spills']}, fills {kernel['fills']}, {kernel['spill_share']:.1%} of the store slots;"
        f" VMEM {kernel['vmem_bytes'] / 2**20:.1f} MiB; passes: {passes}"
        f"\n  HBM {kernel['hbm_bytes'] / 2**20:.1f} MiB; the compiler expects {kernel['fetch_starvation']:.1%} of its"
        f" bundles to wait for fetches, {kernel['write_starvation']:.1%} for writes"
        f"\n  slots: {slots}" + (loops if kernel["unknown_loops"] else "")
    )


def _hottest(kernel: Mapping[str, Any]) -> str:
    """The source lines that take most of a step, with the passes of their dots and their text."""
    total = kernel["step_bundles"] + kernel["periodic_bundles"]
    rows = ["  hottest lines, by bundles of a step:"]
    for line in [entry for entry in kernel["lines"] if entry["place"]][:HOTTEST]:
        path, _, number = line["place"].rpartition(":")
        dots = [entry for entry in kernel["line_passes"] if entry["place"] == line["place"]]
        passes = "".join(f" [{entry['operand']} ×{entry['emitted']:.3g}]" for entry in dots)
        text = textwrap.shorten(linecache.getline(path, int(number)), 80, placeholder=" …")
        rows.append(f"    {line['bundles']:7.1f} {line['bundles'] / total:4.0%}  {line['place']}{passes}  {text}")
    return "\n".join(rows)
