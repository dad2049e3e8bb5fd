"""Chunked delta rules on the real TPU compiler, beside chunk_simple_gla and tokamax's fused one, without a TPU.

    python -m benchmarks.delta_static                           every chip, op, pass and chunk
    python -m benchmarks.delta_static --chip tpu7x --only kda   some of them
    python -m benchmarks.delta_static --json                    for programs

At B 2, H 16, T 4096, K = V = 128 in bfloat16. Cycles are static ones (`parity/compilers/bundles.py`) per 64 tokens and
head, all grid steps counted; two runs print the same. Arguments of ours are [B, T, H · width], as a projection writes
them and the kernels read them: arrays [B, T, H, width] XLA lays out anew first. chunk_simple_gla with a gate per step
is the yardstick of what the inverse and its products cost. tokamax's kernel (0.0.17, on Python 3.12; left out where it
cannot be imported) has the convolution, the norms and the gates in it, and its dots are of one bfloat16 pass, where
ours take two or three pieces of what is float32: `benchmarks.delta_rule_schemes` says what that costs in error.
"""

import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from benchmarks import command
from benchmarks.command import Done, Figure, figure
from benchmarks.gla_static import DTYPE, B, H, K, T, V, figures, of_projections, rows
from parity.compilers.mosaic import Abstract, Compilation, Compiled

HERE = __spec__.name if __spec__ else Path(__file__).stem  # what a compiler process imports; a script has no spec
TOKAMAX = "tokamax._src.ops.causal_conv1d_gated_delta_rule"
TAPS = 4  # of tokamax's convolution
LEAST_OF_FLOOR = {False: 0.35, True: 0.30}  # by whether it is a backward pass
MOST_SPILLS = 0.1
MOST_CODE_KB = 1200.0
MOST_HBM = 1.2


@dataclass(frozen=True)
class Pass:
    """A pass of an op, of this project or of a peer."""

    op: str
    chunk: int
    backward: bool = False
    peer: str = "ours"

    @property
    def name(self) -> str:
        """As in "chunk_kda backward 64"."""
        return f"{self.op} {'backward' if self.backward else 'forward'} {self.chunk}"

    def compilation(self, chip: str) -> Compilation:
        """What the compiler is given."""
        if self.peer != "ours":
            return Compilation(f"{HERE}:tokamax_delta_rule", chip, (), _of_tokamax(self))
        per_channel = self.op == "chunk_kda"
        module = {"chunk_kda": "kda", "chunk_gated_delta_rule": "gated_delta_rule"}.get(self.op, "simple_gla")
        widths = {"q": K, "k": K, "v": V} | ({"do": V} if self.backward else {})
        arguments: dict[str, Any] = {name: rows(width, DTYPE, projected=True) for name, width in widths.items()}
        step = Abstract((B, T, H), "float32")
        arguments["g"] = rows(K, "float32", projected=True) if per_channel else step
        if module != "simple_gla":
            arguments["beta"] = step
        function = f"tpu_kernels.{module}:{self.op}_{'bwd' if self.backward else 'fwd'}"
        arguments |= {"function": function, "chunk_size": self.chunk, "interpret": False}
        return Compilation(f"{of_projections.__module__}:{of_projections.__name__}", chip, (), arguments)


OPS = ("chunk_simple_gla", "chunk_gated_delta_rule", "chunk_kda")
PASSES = [Pass(op, chunk, backward) for op in OPS for backward in (False, True) for chunk in (64, 128)]
PEERS = [Pass(op, chunk, peer="tokamax") for op in OPS[1:] for chunk in (64, 128)]


def _of_tokamax(chosen: Pass) -> dict[str, Any]:
    per_channel, columns = chosen.op == "chunk_kda", H * (2 * K + V)
    gate = (H, K) if per_channel else (H,)
    arrays = {
        "qkv": ((B * T, columns), DTYPE),
        "b": ((B * T, H), DTYPE),
        "a": ((B * T, H * K if per_channel else H), DTYPE),
        "conv_state": ((B + 1, TAPS - 1, columns), DTYPE),
        "recurrent_state": ((B + 1, H, K, V), "float32"),
        "conv_weight": ((columns, 1, TAPS), DTYPE),
        "conv_bias": ((columns,), DTYPE),
        "a_log": ((H,), "float32"),
        "dt_bias": (gate, DTYPE),
        "query_start_loc": ((B + 1,), "int32"),
        "state_indices": ((B,), "int32"),
        "distribution": ((3,), "int32"),
        "seq_lens": ((B,), "int32"),
    }
    return {name: Abstract(*array) for name, array in arrays.items()} | {
        "per_channel": per_channel,
        "chunk": chosen.chunk,
    }


def tokamax_delta_rule(*, per_channel: bool, chunk: int, **arrays: Any) -> Any:
    """tokamax's convolution and delta rule of packed sequences, in chunks."""
    mode = import_module(f"{TOKAMAX}.config").AttentionMode
    return import_module(f"{TOKAMAX}.wrapper").fused_conv1d_gdn(
        **arrays,
        n_kq=H,
        n_v=H,
        d_k=K,
        d_v=V,
        kernel_size=TAPS,
        attention_mode=mode.KDA if per_channel else mode.GDN,
        mixed_tile_size=chunk,
    )


@dataclass(frozen=True)
class Row(command.Row):
    """A pass on a chip."""

    name: str
    peer: str
    cycles: Figure = figure("cycles", ".0f")  # static, per 64 tokens and head
    floor: Figure = figure("MXU floor", ".0f")  # for which the matrix units are busy
    of_gla: Figure = figure("× gla", ".2f")  # over those of chunk_simple_gla
    of_tokamax: Figure = figure("× tokamax", ".2f")  # over the fewest of tokamax's
    spill_share: Figure = figure("spills", ".2f")  # of the vector store slots, of the kernel that multiplies most
    code_kb: Figure = figure("KB", ".0f")
    kernels: Figure = figure("kernels", "d")
    hbm: Figure = figure("× HBM", ".2f")  # bytes that the kernels move, over those of arguments and results once


def measure(chips: Sequence[str], only: str, jobs: int | None, done: Done) -> list[Row]:
    """The table: each pass, as `command.Measure`, with what it is compared with."""
    shown = [each for each in (*PASSES, *(PEERS if find_spec("tokamax") else ())) if only in each.name]
    yardsticks = [replace(each, op=OPS[0]) for each in shown if each.peer == "ours"]
    keys = [(chip, each) for chip in chips for each in dict.fromkeys((*shown, *yardsticks))]
    answers = command.compile_each(keys, lambda key: key[1].compilation(key[0]), jobs, done)
    rows = {key: _row(*key, answer) for key, answer in answers.items()}
    return [_compared(rows, chip, each) for chip in chips for each in shown]


def _row(chip: str, chosen: Pass, answer: Compiled) -> Row:
    row = Row(chip, chosen.name, chosen.peer, error=answer.reason)
    if row.error:
        return row
    row = replace(row, kernels=len(answer.kernels))
    if chosen.peer == "ours":
        return replace(row, **figures(answer, chip))
    main = max(answer.kernels, key=lambda kernel: kernel.mxu_cycles)
    units = H * chosen.chunk / 64  # a pipeline of its own, a step of which has a chunk of all heads
    return replace(
        row,
        cycles=main.static_cycles / units,
        floor=main.mxu_cycles / units,
        spill_share=main.spill_share,
        code_kb=answer.code_bytes / 1024,
    )


def _compared(rows: dict[tuple[str, Pass], Row], chip: str, chosen: Pass) -> Row:
    """The row with its ratios, its targets, and by how much they are missed."""
    row = rows[chip, chosen]
    if chosen.peer != "ours" or not row.cycles or not row.floor:
        return row
    gla = rows[chip, replace(chosen, op=OPS[0])].cycles
    peers = [
        each.cycles
        for (on, peer), each in rows.items()
        if on == chip and peer.peer != "ours" and peer.op == chosen.op and each.cycles and not chosen.backward
    ]
    row = replace(row, of_gla=gla and row.cycles / gla, of_tokamax=row.cycles / min(peers) if peers else None)
    if chosen.op == OPS[0] or chosen.chunk != 64:
        return row
    least = LEAST_OF_FLOOR[chosen.backward]
    limits = [
        (" × the MXU's cycles", row.cycles / row.floor, 1 / least),
        (" spills", row.spill_share, MOST_SPILLS),
        (" KB", row.code_kb, MOST_CODE_KB),
        (" × HBM", row.hbm, MOST_HBM),
        *([(" × tokamax", row.of_tokamax, 1.0)] if row.of_tokamax else []),
    ]
    target, result = command.judged(limits)
    return replace(row, target=target, result=result)


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the table; returns the exit code: 1 where the compiler refused a program."""
    given, table = command.measured(arguments, measure, 'passes ("chunk_kda backward 64")')
    title, names = "static cycles per 64 tokens and head", {"chip": "chip", "pass": "name", "of": "peer"}
    view = command.table(title, table, names)
    command.show(given, [asdict(row) for row in table], view)
    if not given.json and not find_spec("tokamax"):
        command.say_without_tokamax()
    return int(any(row.error for row in table))


if __name__ == "__main__":
    sys.exit(main())
