"""The schedule ledger: what the TPU compiler makes of a project's kernels, recorded and held against the record.

All figures are the compiler's, so they are the same on every host and change only with the kernel or the compiler.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from typing import Any

from parity.compilers.mosaic import Compiled, CompiledKernel, compile_for_tpu, roofline
from parity.compilers.programs import Program
from parity.compilers.recorded import Entry, Key, Recorded
from parity.ledger import diff

GROWTH = 0.02
"""What a figure may grow by without a new record."""

GUARDED = ("cycles", "hbm_bytes", "spills", "code_bytes")
"""The figures of a line that must not grow."""
SCHEMA = 1


@dataclass(frozen=True)
class Line(Entry):
    """One program on one chip.

    cycles: static ones of all steps of its kernels, on one core; floor_cycles: of them those that the MXU's floor has;
    hbm_cycles: what their HBM bytes take at the core's share of the published rate. bound: what bounds the slowest
    kernel.
    """

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
    schema: int = SCHEMA

    @property
    def time(self) -> float:
        """Cycles it takes at least: its schedule or its HBM traffic."""
        return max(self.cycles, self.hbm_cycles)

    def changes(self, before: Line) -> list[str]:
        """The guarded figures that are others."""
        return [
            f"{figure} {old:g} → {new:g}" + (f" ({new / old - 1:+.1%})" if old else "")
            for figure in GUARDED
            if (old := getattr(before, figure)) != (new := getattr(self, figure))
        ]


LEDGER = Recorded(diff.SCHEDULES, "the schedule ledger", Line, SCHEMA)


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
        tuple(map(_figures, compiled.kernels)),
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


def grown(old: Line, new: Line) -> list[str]:
    """The guarded figures that grew by more than `GROWTH`, as text."""
    return [
        f"{name} {getattr(old, name):g} → {getattr(new, name):g}"
        for name in GUARDED
        if getattr(new, name) > getattr(old, name) * (1 + GROWTH)
    ]


def regressions(recorded: Mapping[Key, Line], new: Iterable[Line]) -> list[str]:
    """What got worse than its record, and what has none."""
    found = []
    for entry in new:
        old = recorded.get(entry.key)
        if old is None:
            found.append(f"{entry}: no record")
        elif old.libtpu != entry.libtpu:
            found.append(f"{entry}: recorded with libtpu {old.libtpu}, this is {entry.libtpu}")
        elif worse := grown(old, entry):
            found.append(f"{entry}: {', '.join(worse)}")
    return found
