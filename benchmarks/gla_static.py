"""Chunked gated linear attention on the real TPU compiler, without a TPU: cycles, HBM traffic, footprint.

    python -m benchmarks.gla_static                             every chip, gate, pass and route
    python -m benchmarks.gla_static --chip tpu7x --only g_gamma some of them
    python -m benchmarks.gla_static --json                      for programs

At B 2, H 16, T 4096, K = V = 128 in bfloat16. Cycles are static ones (`parity/compilers/bundles.py`) per 64 tokens and
head, all grid steps counted. HBM bytes are those that the whole program reads and writes, over those of its arguments
and results once: for arguments [B, T, H · width], as a projection writes them and the kernels read them, and for arrays
[B, T, H, width], which XLA has to lay out anew. All is deterministic: two runs print the same.
"""

import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from benchmarks import command
from benchmarks.command import Done, Figure, figure
from parity.compilers.mosaic import Abstract, Compilation, Compiled, roofline

B, T, H, K, V = 2, 4096, 16, 128, 128
DTYPE, DTYPE_BYTES = "bfloat16", 2
UNIT = B * H * T // 64  # of 64 tokens and a head
MIB = 2**20
HERE = __spec__.name if __spec__ else Path(__file__).stem  # what a compiler process imports; a script has no spec


@dataclass(frozen=True)
class Scan:
    """A pass of a chunked form: its gate ("g_gamma", "g" or "gk"), and whether one kernel does all."""

    gate: str
    backward: bool
    chunk: int
    fused: bool

    @property
    def name(self) -> str:
        """As in "g_gamma backward 64 fused"."""
        direction, route = "backward" if self.backward else "forward", "fused" if self.fused else "unfused"
        return f"{self.gate} {direction} {self.chunk} {route}"

    def compilation(self, chip: str, projected: bool) -> Compilation:
        """What the compiler is given."""
        module, op = ("gla", "gla") if self.gate == "gk" else ("simple_gla", "simple_gla")
        function = f"tpu_kernels.{module}:chunk_{op}_{'bwd' if self.backward else 'fwd'}"
        widths = {"q": K, "k": K, "v": V} | ({"do": V} if self.backward else {})
        arguments = {name: rows(width, DTYPE, projected) for name, width in widths.items()}
        gates = {"g_gamma": Abstract((H,), "float32"), "g": Abstract((B, T, H), "float32")}
        arguments[self.gate] = gates.get(self.gate) or rows(K, "float32", projected)
        options = {"chunk_size": self.chunk, "fused": self.fused, "interpret": False}
        if projected:
            return Compilation(f"{HERE}:of_projections", chip, (), {"function": function, **arguments, **options})
        return Compilation(function, chip, (), arguments | options)


def rows(width: int, dtype: str, projected: bool) -> Abstract:
    """The rows of all heads: [B, T, H · width] if they are a projection's, else [B, T, H, width]."""
    return Abstract((B, T, H * width) if projected else (B, T, H, width), dtype)


def of_projections(*, function: str, **arguments: Any) -> Any:
    """The function of arrays [B, T, H · width], so that no layout changes on the way to its kernels and back."""
    from importlib import import_module

    import jax

    def apart(x: Any) -> Any:
        return x.reshape(B, T, H, -1) if getattr(x, "ndim", 0) == 3 and x.shape[2] > H else x

    def together(x: Any) -> Any:
        return x.reshape(B, T, -1) if x.shape[:3] == (B, T, H) else x

    module, _, name = function.partition(":")
    results = getattr(import_module(module), name)(**{key: apart(value) for key, value in arguments.items()})
    return jax.tree.map(together, results)


SCANS = [
    Scan(gate, backward, chunk, fused=True)
    for gate in ("g_gamma", "g", "gk")
    for backward in (False, True)
    for chunk in (64, 128)
] + [Scan("g_gamma", backward, 64, fused=False) for backward in (False, True)]

MOST_CYCLES = {False: 120.0, True: 320.0}  # by whether it is a backward pass; of one decay per step, fused, on tpu7x
MOST_HBM = {False: 1.15, True: 2.0}
MOST_SPILLS = 0.05
MOST_TRAINING = 0.55  # of the peak of the unfused pipeline


@dataclass(frozen=True)
class Row(command.Row):
    """A scan on a chip."""

    scan: str
    cycles: Figure = figure("cycles", ".1f")  # static, per 64 tokens and head
    floor: Figure = figure("MXU floor", ".1f")  # for which the matrix units are busy
    spill_share: Figure = figure("spills", ".2f")  # of the vector store slots, of the kernel that multiplies most
    code_kb: Figure = figure("KB", ".0f")
    hbm: Figure = figure("× HBM", ".2f")  # bytes over the least, arguments of projections
    hbm_default: Figure = figure("× HBM, [B, T, H, ·]", ".2f")  # and laid out anew
    temp_mib: Figure = figure("temp MiB", ".0f")  # of HBM, beside arguments and results


def measure(chips: Sequence[str], only: str, jobs: int | None, done: Done) -> list[Row]:
    """The table: each scan, as `command.Measure`."""
    wanted = [(chip, scan) for chip in chips for scan in SCANS if only in scan.name]
    programs = [(chip, scan, projected) for chip, scan in wanted for projected in (True, False)]

    answers = command.compile_each(programs, lambda key: key[1].compilation(key[0], key[2]), jobs, done)
    return [_row(chip, scan, answers[chip, scan, True], answers[chip, scan, False]) for chip, scan in wanted]


def _row(chip: str, scan: Scan, answer: Compiled, default: Compiled) -> Row:
    row = Row(chip, scan.name, error=answer.reason or default.reason)
    if row.error:
        return row
    least = answer.argument_bytes + answer.output_bytes
    row = replace(
        row,
        **figures(answer, chip),
        hbm_default=None if default.hbm_bytes is None else default.hbm_bytes / least,
        temp_mib=answer.temp_bytes / MIB,
    )
    return _judged(row, scan)


def figures(answer: Compiled, chip: str) -> dict[str, Any]:
    """cycles, floor, spill_share, code_kb and hbm of a compiled program, as in `Row`."""
    spans = [roofline(kernel, chip) for kernel in answer.kernels]
    main = max(answer.kernels, key=lambda kernel: kernel.mxu_cycles)
    moved = answer.hbm_bytes
    return {
        "cycles": sum(span.schedule for span in spans) / UNIT,
        "floor": sum(span.mxu for span in spans) / UNIT,
        "spill_share": main.spill_share,
        "code_kb": answer.code_bytes / 1024,
        "hbm": None if moved is None else moved / (answer.argument_bytes + answer.output_bytes),
    }


def _judged(row: Row, scan: Scan) -> Row:
    """The row with its targets, and by how much they are missed."""
    if not scan.fused or row.chip != "tpu7x":
        return row
    limits: list[tuple[str, float | None, float]] = [
        (" × HBM", row.hbm, MOST_HBM[scan.backward]),
        (" spills", row.spill_share, MOST_SPILLS),
    ]
    if scan.gate != "gk":
        limits.insert(0, (" cycles", row.cycles, MOST_CYCLES[scan.backward]))
    target, result = command.judged(limits)
    return replace(row, target=target, result=result)


# ----------------------------------------------------------------------------------------------------- footprint


@dataclass(frozen=True)
class Footprint:
    """HBM that one layer's scan needs, in MiB, with a gate per head: computed from shapes, not measured.

    kept: activations from the forward pass to the backward one. forward, backward: the most at a time in each pass, its
    arguments and results among it. training: the most of both, while the activations are kept.
    """

    chunk: int
    route: str
    kept: Figure = figure("kept", ".0f")
    forward: Figure = figure("forward", ".0f")
    backward: Figure = figure("backward", ".0f")
    training: Figure = figure("training", ".0f")
    of_unfused: Figure = figure("× unfused", ".2f")  # of the unfused pipeline's training
    result: str = ""


def footprints() -> list[Footprint]:
    """Of both routes, for chunks of 64 and 128."""
    key, value = (B * T * H * size * DTYPE_BYTES / MIB for size in (K, V))
    rows = []
    for chunk in (64, 128):
        states = B * (T // chunk) * H * K * V * 4 / MIB
        for route, kept_states in (("fused", 0.0), ("unfused", states)):
            kept = 2 * key + value
            forward = kept + value + kept_states  # o
            backward = kept + value + 2 * key + value + 2 * kept_states  # do; dq, dk, dv; states and their gradients
            most = {"kept": kept, "forward": forward, "backward": backward, "training": max(forward, backward)}
            rows.append(Footprint(chunk, route, **most, of_unfused=1.0))
    unfused = {row.chunk: row.training for row in rows if row.route == "unfused"}
    return [_of_unfused(row, row.training / unfused[row.chunk]) if row.route == "fused" else row for row in rows]


def _of_unfused(row: Footprint, share: float) -> Footprint:
    """The row of a fused route, which holds arguments and results alone: what it misses no kernel can reach."""
    missed = "" if share <= MOST_TRAINING else f"missed by {share / MOST_TRAINING - 1:.0%}, with the least"
    return replace(row, of_unfused=share, result=missed or "met")


# --------------------------------------------------------------------------------------------------- command line


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the tables; returns the exit code: 1 where the compiler refused a program."""
    as_json = "one JSON object of both tables instead of these"
    given, table = command.measured(arguments, measure, 'scans ("g backward 64 fused")', as_json)
    data = {"scans": [asdict(row) for row in table], "footprints": [asdict(row) for row in footprints()]}
    title, names = "static cycles per 64 tokens and head", {"chip": "chip", "scan": "scan"}
    scans = command.table(title, table, names)
    title, names = "HBM footprint in MiB, from shapes", {"chunk": "chunk", "route": "route"}
    command.show(given, data, scans, command.table(title, footprints(), names, ("result",)))
    return int(any(row.error for row in table))


if __name__ == "__main__":
    sys.exit(main())
