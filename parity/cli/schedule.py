"""`parity schedule`: what the TPU compiler makes of the kernels."""

from __future__ import annotations

import argparse
import json
import linecache
import sys
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any

from rich import box
from rich.table import Table

from parity.cli.options import console, program_arguments, show_recorded, wanted_programs, wants
from parity.compilers.mosaic import Compiled
from parity.compilers.programs import Program, load
from parity.compilers.schedule import LEDGER, Line, compile_all, line, regressions, surprises

ABOUT = "what the TPU compiler makes of the kernels: the recorded table, or what has changed"

HOTTEST = 8


add_arguments = program_arguments(
    how="compile",
    program="compile this program (op-name) and print its kernels in detail",
    check="exit with 1 where a figure grew beyond its record",
)


def command(given: argparse.Namespace) -> int:
    """`parity schedule`: the ledger as a table; with a program, --record or --check what the compiler says now."""
    if show_recorded(given, LEDGER, lambda lines: _print(lines, given.json, _refused(given, load(given.root)))):
        return 0
    programs = wanted_programs(given, load(given.root))
    compiled = compile_all(programs, given.chip, lines=bool(given.program))
    failed = surprises(programs, compiled)
    by_id = {program.id: program for program in programs}
    compiles = {(name, chip): result for (name, chip), result in compiled.items() if result.ok}
    lines = [line(by_id[name], chip, result) for (name, chip), result in compiles.items()]
    if given.record:
        LEDGER.write(given.root, lines)
    if given.check:
        failed += regressions(LEDGER.read(given.root), lines)
    if given.program:
        lines = [_in_detail(entry, result) for entry, result in zip(lines, compiles.values(), strict=True)]
    _print(lines, given.json, _refused(given, programs), detailed=bool(given.program))
    for text in failed:
        print(text, file=sys.stderr)
    return 1 if failed else 0


def _refused(given: argparse.Namespace, programs: Iterable[Program]) -> list[tuple[Program, str]]:
    """The wanted programs and chips that the compiler refuses."""
    return [(p, chip) for p in programs for chip in p.refused if wants(given, p.id, chip)]


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
    lines: Sequence[Line], as_json: bool, refused: Sequence[tuple[Program, str]], detailed: bool = False
) -> None:
    if as_json:
        print(json.dumps([asdict(entry) for entry in lines], sort_keys=True))
        return
    console(150).print(table(lines, refused))
    if detailed:
        for entry in lines:
            for kernel in entry.kernels:
                print(f"{entry.chip} {kernel['name']}: {detail(kernel)}\n{hottest(kernel)}")


def table(lines: Sequence[Line], refused: Sequence[tuple[Program, str]]) -> Table:
    """Lines of the ledger, and the programs that the compiler refuses."""
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


def detail(kernel: Mapping[str, Any]) -> str:
    """All that is known of a kernel, in a few lines."""
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


def hottest(kernel: Mapping[str, Any]) -> str:
    """The source lines that take most of a step, with the passes of their dots and their text."""
    total = kernel["step_bundles"] + kernel["periodic_bundles"]
    rows = ["  hottest lines, by bundles of a step:"]
    for hot in [entry for entry in kernel["lines"] if entry["place"]][:HOTTEST]:
        path, _, number = hot["place"].rpartition(":")
        dots = [entry for entry in kernel["line_passes"] if entry["place"] == hot["place"]]
        passes = "".join(f" [{entry['operand']} ×{entry['emitted']:.3g}]" for entry in dots)
        text = textwrap.shorten(linecache.getline(path, int(number)), 80, placeholder=" …")
        rows.append(f"    {hot['bundles']:7.1f} {hot['bundles'] / total:4.0%}  {hot['place']}{passes}  {text}")
    return "\n".join(rows)
