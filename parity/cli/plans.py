"""`parity plans`: how the kernels cut the programs, on TPUs and GPUs."""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from rich import box
from rich.table import Table

from parity.cli.options import (
    console,
    print_changes,
    program_arguments,
    show_recorded,
    wanted_lines,
    wanted_programs,
)
from parity.compilers.plans import LEDGER, Plan, plan_all, shown
from parity.compilers.programs import load
from parity.compilers.recorded import differences

ABOUT = "how kernels cut the programs (grids, tiles, dots, warps): the recorded table, or what has changed"


add_arguments = program_arguments(
    how="trace",
    program="plan this program (op-name) now, and print it",
    check="exit with 1 where a plan differs from its record",
)


def command(given: argparse.Namespace) -> int:
    """`parity plans`: the ledger as a table; with a program, --record or --check what is planned now."""
    if show_recorded(given, LEDGER, lambda lines: _print(lines, given.json)):
        return 0
    recorded = LEDGER.read(given.root)
    plans = list(plan_all(given.root, wanted_programs(given, load(given.root, planned=True)), given.chip))
    if given.record:
        LEDGER.write(given.root, plans)
    if given.check:
        changes = differences(wanted_lines(given, recorded), {plan.key: plan for plan in plans})
        print_changes(given, changes, "as recorded")
        return 1 if changes else 0
    _print(plans, given.json)
    return 0


def _print(plans: Sequence[Plan], as_json: bool) -> None:
    if as_json:
        print(json.dumps([asdict(plan) for plan in plans], sort_keys=True))
        return
    console(180).print(table(plans))


def table(plans: Sequence[Plan]) -> Table:
    """A row for each kernel of each plan."""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for name in ("op", "program", "chip", "kernel", "grid", "blocks or tiles"):
        table.add_column(name, overflow="fold")
    for plan in plans:
        for kernel in plan.kernels:
            table.add_row(plan.op, plan.name, plan.chip, kernel["name"], shown(kernel["grid"]), cut(kernel))
    return table


def cut(kernel: Mapping[str, Any]) -> str:
    """How a kernel cuts its operands: on a TPU blocks, dots and VMEM, on a GPU constants, warps and stages."""
    if "constants" in kernel:
        words = [f"{name}={value}" for name, value in kernel["constants"].items()]
        return " ".join([*words, *(f"{name}={kernel[name]}" for name in ("warps", "stages") if name in kernel)])
    dots = " + ".join(f"{count} of {'×'.join(map(str, sizes))} {kind}" for *sizes, kind, count in kernel["dots"])
    blocks = f"{shown(kernel['inputs'])} → {shown(kernel['outputs'])}"
    return f"{blocks}; dots: {dots or 'none'}; VMEM {kernel['vmem_bytes'] / 2**20:.1f} MiB"
