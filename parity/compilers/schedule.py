"""The schedule ledger: what the TPU compiler makes of a project's kernels, recorded and held against the record.

A project names its programs in `PROGRAMS` of the module `programs` beside its matrix. The ledger has one file per chip
and op, `records/schedule/<chip>/<op>.jsonl`, one line per program: all figures are the compiler's, so they are the same
on every host and change only with the kernel or the compiler.
"""

from __future__ import annotations

import json
import re
import subprocess
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from importlib import import_module
from importlib.metadata import version
from pathlib import Path
from typing import Any

from parity import matrix
from parity.compilers.chips import CHIPS
from parity.compilers.mosaic import Abstract, Compilation, Compiled, CompiledKernel, compile_for_tpu, roofline
from parity.ledger import diff

FOLDER = Path(diff.FOLDER, diff.SCHEDULES)
GROWTH = 0.02
"""What a figure may grow by without a new record."""

GUARDED = ("cycles", "hbm_bytes", "spills", "code_bytes")
"""The figures of a line that must not grow."""

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
