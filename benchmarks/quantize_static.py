"""Quantisers and dequantisers on the real TPU compiler, beside XLA's fusion of the same in jnp, without a TPU.

    python -m benchmarks.quantize_static                                every chip, model and operation
    python -m benchmarks.quantize_static --chip v6e --only fp8_dual     some of them
    python -m benchmarks.quantize_static --json                         for programs

At 8192 rows of bfloat16 as wide as the models' layers, in blocks of 128 (MXFP8: of 32); a model whose rows such blocks
do not divide is left out. MXFP8 is dequantised to bfloat16, fp8 and int8 to float32. Cycles are static ones
(`parity/compilers/bundles.py`) a row, beside those in which HBM moves its bytes. What XLA takes is its own estimate of
its fusions; libtpu does not print the one for tpu7x. Code is of elements and codes row by row in memory, as kernels
hand them on. XLA transposes arguments and results of a program where that pads less, as of 2880 columns, by copies.
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
OPS = ("fp8_quantize", "int8_quantize", "fp8_dual_quantize", "mxfp8_quantize", "mxfp8_dual_quantize",
       "fp8_dequantize", "int8_dequantize", "mxfp8_dequantize")  # fmt: skip
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
    def is_mxfp8(self) -> bool:
        """Whether scales are powers of two, for 32 elements."""
        return self.op.startswith("mxfp8")

    @property
    def dequantizes(self) -> bool:
        """Whether arguments are codes and scales."""
        return self.op.endswith("dequantize")

    @property
    def block(self) -> int:
        """Elements that share a scale."""
        return 32 if self.is_mxfp8 else 128

    def kernel(self, chip: str) -> Compilation:
        """The kernel, as the compiler is given it."""
        axis: dict[str, Any] = {} if self.axis is None or self.dequantizes else {"axis": self.axis}
        module = "mxfp8" if self.is_mxfp8 else "quantize"
        return self._compilation(chip, f"tpu_kernels.{module}:{self.op}", axis | {"interpret": False})

    def beside(self, chip: str) -> Compilation:
        """The same in jnp."""
        if self.dequantizes:
            return self._compilation(chip, f"{HERE}:dequantized_in_jnp", {})
        how = {"axis": self.axis, "block": self.block, "int8": self.op.startswith("int8"), "powers": self.is_mxfp8}
        return self._compilation(chip, f"{HERE}:quantized_in_jnp", how)

    def _compilation(self, chip: str, function: str, options: dict[str, Any]) -> Compilation:
        shape = m, k = ROWS, WIDTHS[self.model]
        if not self.dequantizes:
            return Compilation(function, chip, (Abstract(shape, "bfloat16"),), options)
        codes = Abstract(shape, "int8" if self.op.startswith("int8") else "float8_e4m3fn")
        of_blocks = (m, k // self.block) if self.axis else (m // self.block, k)
        scale = Abstract(of_blocks, "float8_e8m0fnu" if self.is_mxfp8 else "float32")
        return Compilation(function, chip, (codes, scale), options | ({"dtype": "bfloat16"} if self.is_mxfp8 else {}))


PROGRAMS = [
    Program(op, model, axis)
    for model, width in WIDTHS.items()
    for op in OPS
    for axis in ((None,) if "dual" in op else (0, 1))
    if width % Program(op, model).block == 0
]


def quantized_in_jnp(x: Any, *, axis: int | None, block: int, int8: bool, powers: bool) -> Any:
    """The quantised x [M, K] and its scales, as one writes it in jnp: along an axis, or along both."""
    import jax.numpy as jnp
    from jax import lax

    if axis is None:
        return [quantized_in_jnp(x, axis=each, block=block, int8=int8, powers=powers) for each in (1, 0)]
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


def dequantized_in_jnp(codes: Any, scale: Any, *, dtype: str = "float32") -> Any:
    """codes [M, K] times the scales of their blocks, which lie along one axis."""
    import jax.numpy as jnp

    (m, k), (rows, columns) = codes.shape, scale.shape
    blocks = codes.astype(jnp.float32).reshape(rows, m // rows, columns, k // columns)
    return (blocks * scale.astype(jnp.float32)[:, None, :, None]).reshape(m, k).astype(dtype)


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
    answers = command.compile_each(wanted, lambda key: key[1].kernel(key[0]), jobs, done)
    estimated = [key for key in wanted if key[0] != "tpu7x"]
    estimates = dict(zip(estimated, _figures("xla_cycles", [of.beside(chip) for chip, of in estimated]), strict=True))
    codes = dict(zip(wanted, _figures("row_major_code", [of.kernel(chip) for chip, of in wanted]), strict=True))
    return [_row(*key, answers[key], codes[key], estimates.get(key)) for key in wanted]


def _figures(function: str, cases: Sequence[Compilation]) -> list[int | None]:
    """What a function of this module says of each case, in a process of its own; None where it did not come to that."""
    environment = os.environ | {"TPU_SKIP_MDS_QUERY": "1", "JAX_PLATFORMS": "cpu", "ALLOW_MULTIPLE_LIBTPU_LOAD": "1"}
    there = getattr(import_module(HERE), function)  # by a name that the process knows
    figures = compile_each(there, cases, 300.0, framework="jax", environment=environment)
    return [figure if isinstance(figure, int) else None for figure in figures]


def xla_cycles(case: Compilation, log: Path) -> int:
    """The cycles that XLA estimates of all fusions of a function of arrays; log: not written."""
    import jax

    function, arguments, _ = _traceable(case)
    text = jax.jit(function).lower(*arguments).compile().as_text()
    return sum(map(int, ESTIMATE.findall(text or "")))


def row_major_code(case: Compilation, log: Path) -> int:
    """The bytes of code of a function whose elements and codes, alike in shape, lie row by row; log: not written."""
    import jax
    from jax.experimental.layout import Format, Layout

    function, arguments, mesh = _traceable(case)
    elements, sharding = arguments[0].shape, arguments[0].sharding
    rows, scales = Format(Layout((0, 1)), sharding), Format(Layout.AUTO, sharding)
    arguments = [jax.ShapeDtypeStruct(each.shape, each.dtype) for each in arguments]

    def formats(arrays: Any) -> Any:
        return jax.tree.map(lambda array: rows if array.shape == elements else scales, arrays)

    with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
        given, returned = formats(tuple(arguments)), formats(jax.eval_shape(function, *arguments))
        compiled = jax.jit(function, in_shardings=given, out_shardings=returned).lower(*arguments).compile()
    memory = compiled.memory_analysis()
    if memory is None:
        raise RuntimeError("libtpu gave no memory analysis")
    return int(memory.generated_code_size_in_bytes)


def _traceable(case: Compilation) -> tuple[Any, list[Any], Any]:
    """A case's function, the shapes of its arrays, on the chip, and the mesh of that."""
    import jax
    from jax.experimental import topologies

    devices = topologies.get_topology_desc(platform="tpu", topology_name=TOPOLOGIES[case.chip]).devices[:1]
    mesh = jax.sharding.Mesh(devices, ("core",))
    module, _, name = case.function.partition(":")
    function = partial(getattr(import_module(module), name), **case.keywords)
    sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
    shapes = [
        jax.ShapeDtypeStruct(each.shape, jax.numpy.dtype(each.dtype), sharding=sharding) for each in case.arguments
    ]
    return function, shapes, mesh


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
