"""The quantisers on the real TPU compiler, beside XLA's fusion of the same definition in jnp, without a TPU.

    python -m benchmarks.quantize_static                                every chip, model and operation
    python -m benchmarks.quantize_static --chip v6e --only fp8_dual     some of them
    python -m benchmarks.quantize_static --json                         for programs

At 8192 rows of bfloat16 as wide as the models' layers, in blocks of 128 (MXFP8: of 32); a model whose rows such blocks
do not divide is left out. Cycles are static ones (`parity/compilers/bundles.py`) a row, beside those in which HBM
moves its bytes. What XLA takes is its own estimate of its fusions; libtpu does not print the one for tpu7x. Code is of
elements and codes row by row in memory, as kernels hand them on: XLA lays those of a program's own otherwise where that
pads less, which is in columns where these are 2880, and adds copies.
"""

import os
import re
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

from benchmarks import command
from benchmarks.command import Done, Figure, figure
from parity.compilers.mosaic import TOPOLOGIES, Abstract, Compilation, Compiled, roofline
from parity.compilers.processes import compile_each

ROWS = 8192
WIDTHS = {"DeepSeek-V3": 7168, "Qwen3-30B-A3B": 2048, "Mixtral-8x7B": 4096, "gpt-oss-120b": 2880}
HERE = __spec__.name if __spec__ else Path(__file__).stem  # what a compiler process imports; a script has no spec
LEAST_OF_FLOOR = {"v6e": 0.6, "tpu7x": 0.45}
MOST_CODE_KB = 400.0
MOST_OF_XLA = 0.5
ESTIMATE = re.compile(r'"estimated_cycles":"(\d+)"')


@dataclass(frozen=True)
class Program:
    """An operation on the activations of a model; axis: None for both."""

    op: str
    model: str
    axis: int | None = None

    @property
    def name(self) -> str:
        """As in "fp8_quantize axis 1"."""
        return self.op if self.axis is None else f"{self.op} axis {self.axis}"

    @property
    def block(self) -> int:
        """Elements that share a scale."""
        return 32 if self.op.startswith("mxfp8") else 128

    def compilation(self, chip: str, function: str = "") -> Compilation:
        """What the compiler is given: the kernel, or another function of the same array."""
        module = "mxfp8" if self.op.startswith("mxfp8") else "quantize"
        options: dict[str, Any] = {} if self.axis is None else {"axis": self.axis}
        options |= {"block": self.block} if function else {"interpret": False}
        x = Abstract((ROWS, WIDTHS[self.model]), "bfloat16")
        return Compilation(function or f"tpu_kernels.{module}:{self.op}", chip, (x,), options)


PROGRAMS = [
    Program(op, model, axis)
    for model, width in WIDTHS.items()
    for op in ("fp8_quantize", "int8_quantize", "fp8_dual_quantize", "mxfp8_quantize", "mxfp8_dual_quantize")
    for axis in ((None,) if "dual" in op else (0, 1))
    if width % Program(op, model).block == 0
]


def in_jnp(x: Any, *, axis: int | None = None, block: int, int8: bool = False, powers: bool = False) -> Any:
    """The quantised x [M, K] and its scales, as one writes it in jnp: along an axis, or along both."""
    import jax.numpy as jnp
    from jax import lax

    if axis is None:
        return [in_jnp(x, axis=each, block=block, powers=powers) for each in (1, 0)]
    largest = 127.0 if int8 else 448.0
    m, k = x.shape
    blocks = x.astype(jnp.float32).reshape((m // block, block, k) if axis == 0 else (m, k // block, block))
    absmax = jnp.max(jnp.abs(blocks), axis=1 + axis, keepdims=True)
    scale = jnp.where(absmax > 0, absmax / largest, 1.0)
    if powers:
        bits = lax.bitcast_convert_type(scale, jnp.int32)
        scale = lax.bitcast_convert_type((bits + 0x7FFFFF) & 0x7F800000, jnp.float32)
    quotient = blocks / scale
    codes = jnp.round(quotient).astype(jnp.int8) if int8 else quotient.astype(jnp.float8_e4m3fn)
    return codes.reshape(m, k), scale.squeeze(1 + axis).astype(jnp.float8_e8m0fnu if powers else jnp.float32)


fp8_in_jnp = in_jnp
int8_in_jnp = partial(in_jnp, int8=True)
mxfp8_in_jnp = partial(in_jnp, powers=True)


@dataclass(frozen=True)
class Row(command.Row):
    """A program on a chip."""

    model: str
    program: str
    cycles: Figure = figure("cycles", ".1f")  # static, a row
    floor: Figure = figure("HBM floor", ".1f")  # cycles in which HBM moves a row's bytes
    of_floor: Figure = figure("of floor", ".0%")  # the part of the cycles that the floor is
    code_kb: Figure = figure("KB", ".0f")  # with elements and codes row by row in memory, as kernels hand them on
    alone_kb: Figure = figure("KB alone", ".0f")  # with copies to and from layouts that XLA picks for a program's own
    spills: Figure = figure("spills", ".0f")
    xla: Figure = figure("XLA", ".0f")  # cycles a row that XLA estimates of its own fusions


def measure(chips: Sequence[str], only: str, jobs: int | None, done: Done) -> list[Row]:
    """The table: each program, as `command.Measure`."""
    wanted = [(chip, program) for chip in chips for program in PROGRAMS if only in f"{program.name} {program.model}"]
    answers = command.compile_each(wanted, lambda key: key[1].compilation(key[0]), jobs, done)
    estimated = [key for key in wanted if key[0] != "tpu7x"]
    of_jnp = [program.compilation(chip, f"{HERE}:{program.op.split('_')[0]}_in_jnp") for chip, program in estimated]
    estimates = dict(zip(estimated, _figures("xla_cycles", of_jnp), strict=True))
    codes = dict(zip(wanted, _figures("row_major_code", [key[1].compilation(key[0]) for key in wanted]), strict=True))
    return [_row(*key, answers[key], codes[key], estimates.get(key)) for key in wanted]


def _figures(function: str, cases: Sequence[Compilation]) -> list[int | None]:
    """What a function of this module says of each case, in a process of its own; None where it did not come to that."""
    environment = os.environ | {"TPU_SKIP_MDS_QUERY": "1", "JAX_PLATFORMS": "cpu", "ALLOW_MULTIPLE_LIBTPU_LOAD": "1"}
    there = getattr(import_module(HERE), function)  # by a name that the process knows
    figures = compile_each(there, cases, 300.0, framework="jax", environment=environment)
    return [figure if isinstance(figure, int) else None for figure in figures]


def xla_cycles(case: Compilation, log: Path) -> int:
    """The cycles that XLA estimates of all fusions of a function of one array; log: not written."""
    import jax

    function, shape, _ = _traceable(case)
    text = jax.jit(function).lower(shape).compile().as_text()
    return sum(map(int, ESTIMATE.findall(text or "")))


def row_major_code(case: Compilation, log: Path) -> int:
    """The bytes of code of a quantiser of an array [M, K]: it and codes row by row in memory; log: not written."""
    import jax
    from jax.experimental.layout import Format, Layout

    function, shape, mesh = _traceable(case)
    rows, scales = Format(Layout((0, 1)), shape.sharding), Format(Layout.AUTO, shape.sharding)
    shape = jax.ShapeDtypeStruct(shape.shape, shape.dtype, sharding=rows)
    with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
        results = jax.eval_shape(function, shape)
        formats = jax.tree.map(lambda result: rows if result.shape == shape.shape else scales, results)
        memory = jax.jit(function, out_shardings=formats).lower(shape).compile().memory_analysis()
    if memory is None:
        raise RuntimeError("libtpu gave no memory analysis")
    return int(memory.generated_code_size_in_bytes)


def _traceable(case: Compilation) -> tuple[Any, Any, Any]:
    """A case's function, the shape of its array, on the chip, and the mesh of that."""
    import jax
    from jax.experimental import topologies

    devices = topologies.get_topology_desc(platform="tpu", topology_name=TOPOLOGIES[case.chip]).devices[:1]
    mesh = jax.sharding.Mesh(devices, ("core",))
    module, _, name = case.function.partition(":")
    function = partial(getattr(import_module(module), name), **case.keywords)
    (x,) = case.arguments
    sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
    return function, jax.ShapeDtypeStruct(x.shape, jax.numpy.dtype(x.dtype), sharding=sharding), mesh


def _row(chip: str, program: Program, answer: Compiled, code: int | None, xla: int | None) -> Row:
    row = Row(chip, program.model, program.name, error=answer.reason)
    if row.error:
        return row
    spans = [roofline(kernel, chip) for kernel in answer.kernels]
    cycles, floor = (sum(figures) / ROWS for figures in ([s.schedule for s in spans], [s.hbm for s in spans]))
    row = replace(
        row,
        cycles=cycles,
        floor=floor,
        of_floor=floor / cycles,
        code_kb=None if code is None else code / 1024,
        alone_kb=answer.code_bytes / 1024,
        spills=sum(kernel.spills for kernel in answer.kernels),
        xla=None if xla is None else xla / ROWS,
    )
    limits = [(" × HBM", cycles / floor, 1 / LEAST_OF_FLOOR[chip])]
    if row.code_kb:
        limits.append((" KB", row.code_kb, MOST_CODE_KB))
    if row.xla:
        limits.append((" × XLA", max(cycles, floor) / row.xla, MOST_OF_XLA))
    target, result = command.judged(limits)
    return replace(row, target=target, result=result)


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the table; returns the exit code: 1 where the compiler refused a program."""
    given, table = command.measured(arguments, measure, 'programs ("fp8_quantize axis 1 DeepSeek-V3")')
    names = {name: name for name in ("chip", "model", "program")}
    view = command.table("static cycles a row", table, names)
    command.show(given, [asdict(row) for row in table], view)
    return int(any(row.error for row in table))


if __name__ == "__main__":
    sys.exit(main())
