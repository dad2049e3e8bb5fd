"""Grouped matmuls on the real TPU compiler, side by side with JAX's megablox and tokamax, without a TPU.

    python -m benchmarks.tpu_static                             every chip, shape and kernel
    python -m benchmarks.tpu_static --chip tpu7x --only tgmm    some of them
    python -m benchmarks.tpu_static --json                      for programs

The figure is the static cycles of one whole middle grid step (`parity/compilers/bundles.py` says which bundles these
are); ratios between kernels are of cycles per multiplication, whatever their tiles. It is deterministic: two runs
print the same, whatever else the machine does. Use it for ratios, not for milliseconds: what HBM delivers is not in it.
"""

import math
import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks import command
from benchmarks.command import Done, Figure, figure
from parity.compilers.chips import CHIPS, Chip
from parity.compilers.mosaic import Abstract, Compilation, Compiled, CompiledKernel

Tile = tuple[int, int, int]

SHORT = {"bfloat16": "bf16", "float8_e4m3fn": "fp8", "int8": "int8"}
HERE = __spec__.name if __spec__ else Path(__file__).stem  # what a compiler process imports; a script has no spec


class Shape(NamedTuple):
    """A grouped matmul [M, K] · [G, K, N]."""

    m: int
    k: int
    n: int
    groups: int

    def __str__(self) -> str:
        return f"{self.k}×{self.n} {self.groups}"


SHAPES = [Shape(8192, k, n, groups) for k, n in ((2048, 512), (512, 2048)) for groups in (8, 64)]
# (tm, tk, tn) of the peers, by (K, N); their own default, 128 x 128 x 128, is far from the best that they can do.
PEER_TILES: dict[tuple[int, int], Tile] = {(2048, 512): (512, 1024, 512), (512, 2048): (512, 512, 1024)}


@dataclass(frozen=True)
class Kernel:
    """A kernel of the table: whose, "gmm" or "tgmm", the dtype it multiplies, and how its scales lie.

    block: elements of the contraction that share a scale (None: all); columns: columns of the weights that do. mxfp8:
    the scales are powers of two of the blocks of 32 (`grouped_gemm`), else float32.
    """

    peer: str
    product: str
    dtype: str = "bfloat16"
    block: int | None = None
    columns: int = 1
    mxfp8: bool = False

    @property
    def name(self) -> str:
        """As in "gmm fp8 block 512"."""
        if self.mxfp8:
            return f"{self.product} mxfp8"
        scales = " per channel" if self.block is None else f" block {self.block}"
        if self.columns > 1:
            scales = f" 1×{self.block} · {self.block}×{self.columns}"
        return f"{self.product} {SHORT[self.dtype]}{scales if self.is_quantised else ''}"

    @property
    def is_quantised(self) -> bool:
        """Whether its operands have scales."""
        return self.dtype != "bfloat16"

    def compilation(self, shape: Shape, chip: str) -> Compilation:
        """What the compiler is given."""
        m, k, n, groups = shape
        keywords: dict[str, Any] = {
            "lhs": Abstract((m, k), self.dtype),
            "rhs": Abstract((groups, k, n) if self.product == "gmm" else (m, n), self.dtype),
            "group_sizes": Abstract((groups,), "int32"),
            "tiling": None if self.peer == "ours" else PEER_TILES[k, n],
        }
        if self.is_quantised:
            contracted = k if self.product == "gmm" else m
            blocks = contracted // (self.block or contracted)
            gmm_scales = (m, blocks), (groups, blocks, n // self.columns)
            lhs_scale, rhs_scale = gmm_scales if self.product == "gmm" else ((blocks, k), (blocks, n))
            dtype = "float8_e8m0fnu" if self.mxfp8 else "float32"
            keywords |= {"lhs_scale": Abstract(lhs_scale, dtype), "rhs_scale": Abstract(rhs_scale, dtype)}
        if self.mxfp8:
            keywords["ragged"] = "lhs" if self.product == "gmm" else "contracting"
        return Compilation(self._function, chip, (), keywords)

    @property
    def _function(self) -> str:
        if self.peer != "ours":
            return f"{HERE}:{self.peer}_{self.product}"
        if self.mxfp8:
            return "tpu_kernels.grouped_gemm:grouped_gemm"
        if self.is_quantised:
            return f"tpu_kernels.quantized_gmm:{self.product}_quantized"
        return f"tpu_kernels.gmm:{self.product}"


FP8 = "float8_e4m3fn"
KERNELS = [
    Kernel("ours", "gmm"),
    Kernel("megablox", "gmm"),
    Kernel("tokamax", "gmm"),
    Kernel("tokamax_v2", "gmm"),
    *(Kernel(peer, "gmm", FP8, block) for block in (None, 512, 256, 128) for peer in ("ours", "tokamax")),
    Kernel("ours", "gmm", FP8, 128, columns=128),
    Kernel("ours", "gmm", FP8, 32, mxfp8=True),
    Kernel("ours", "gmm", "int8"),
    Kernel("ours", "tgmm"),
    Kernel("megablox", "tgmm"),
    Kernel("tokamax", "tgmm"),
    Kernel("tokamax_v2", "tgmm"),
    *(Kernel(peer, "tgmm", FP8, block) for block in (None, 512) for peer in ("ours", "tokamax")),
    Kernel("ours", "tgmm", FP8, 32, mxfp8=True),
]


class Target(NamedTuple):
    """The most cycles that a kernel of ours may take, times the MXU's floor or our bf16 kernel of the same product."""

    most: float
    of: str


TARGETS = {
    "tpu7x": {
        "gmm bf16": Target(1.02, "floor"),
        "tgmm bf16": Target(1.05, "floor"),
        "gmm fp8 per channel": Target(0.6, "bf16"),
        "gmm fp8 block 512": Target(0.65, "bf16"),
        "gmm fp8 block 128": Target(1.5, "bf16"),
        "gmm fp8 1×128 · 128×128": Target(1.5, "bf16"),
        "tgmm fp8 per channel": Target(0.8, "bf16"),
        "tgmm fp8 block 512": Target(1.0, "bf16"),
        "gmm mxfp8": Target(1.1, "bf16"),
        "tgmm mxfp8": Target(1.1, "bf16"),
    },
    "v6e": {
        "gmm bf16": Target(1 / 0.9, "floor"),
        "gmm int8 per channel": Target(0.6, "bf16"),
        **{kernel.name: Target(1.1, "bf16") for kernel in KERNELS if kernel.dtype == FP8},
    },
}
MOST_SPILLS = {"tpu7x": 0.05}
MOST_CODE_KB = {"tpu7x": 300.0}


@dataclass(frozen=True)
class Row(command.Row):
    """A kernel at a shape on a chip."""

    shape: Shape
    kernel: str
    peer: str
    cycles: Figure = figure("cycles", ".0f")  # static, of one whole middle grid step
    floor: Figure = figure("floor", ".0f")  # cycles of the step's multiplications with every matrix unit full
    of_floor: Figure = figure("× floor", ".2f")
    of_bf16: Figure = figure("× bf16", ".2f")  # cycles per multiplication over those of our bf16 kernel of that product
    of_megablox: Figure = figure("× megablox", ".2f")  # and over those of megablox's
    spill_share: Figure = figure("spills", ".1%")  # of the vector store slots
    code_kb: Figure = figure("KB", ".0f")  # of the program, the group metadata included


Case = tuple[str, Shape, Kernel]


def measure(chips: Sequence[str], only: str, jobs: int | None, done: Done) -> list[Row]:
    """The table: each kernel at each shape, as `command.Measure`; tokamax's where it can be imported."""
    kernels = [kernel for kernel in KERNELS if not kernel.peer.startswith("tokamax") or has_tokamax()]
    shown = [kernel for kernel in kernels if only in kernel.name]
    products = {kernel.product for kernel in shown}
    base = [k for k in kernels if k.product in products and not k.is_quantised and k.peer in ("ours", "megablox")]
    wanted = [(chip, shape, k) for chip in chips for shape in SHAPES for k in dict.fromkeys([*base, *shown])]

    answers = command.compile_each(wanted, lambda case: case[2].compilation(case[1], case[0]), jobs, done)
    return [_row(chip, shape, k, answers) for chip in chips for shape in SHAPES for k in shown]


def _row(chip: str, shape: Shape, kernel: Kernel, answers: Mapping[Case, Compiled]) -> Row:
    answer = answers[chip, shape, kernel]
    row = Row(chip, shape, kernel.name, kernel.peer, error=answer.reason)
    main = _main_kernel(answer)
    if main is None:
        return row
    multiplications = _multiplications(shape, main)
    floor = mxu_floor(CHIPS[chip], multiplications, kernel.dtype)

    def over(peer: str) -> float | None:
        rival = _main_kernel(answers[chip, shape, Kernel(peer, kernel.product)])
        if rival is None:
            return None
        return main.static_cycles / multiplications / (rival.static_cycles / _multiplications(shape, rival))

    row = replace(
        row,
        cycles=main.static_cycles,
        floor=floor,
        of_floor=main.static_cycles / floor,
        of_bf16=over("ours"),
        of_megablox=over("megablox"),
        spill_share=main.spill_share,
        code_kb=answer.code_bytes / 1024,
    )
    return _judged(row) if kernel.peer == "ours" else row


def mxu_floor(chip: Chip, multiplications: float, dtype: str) -> float:
    """Cycles in which the chip's matrix units could do so many multiplications of operands of `dtype`."""
    return multiplications / (chip.width**2 * chip.mxus * chip.rows_per_cycle[SHORT[dtype]])


def _main_kernel(answer: Compiled) -> CompiledKernel | None:
    """The kernel that multiplies, of those of a program."""
    return max((k for k in answer.kernels if k.mxu_cycles), key=lambda k: k.static_cycles, default=None)


def _multiplications(shape: Shape, kernel: CompiledKernel) -> int:
    """Of one grid step, tm · tk · tn, from its blocks of lhs [M, K] (or its transpose) and of the output [.., N].

    Without a grid (tokamax's kernels have pipelines of their own) the tile is the one in the kernel's name, or else
    the one that it was given.
    """
    if not kernel.call.grid:
        named = [int(size) for size in re.findall(r"-t[mkn]_(\d+)", kernel.name)]
        return math.prod(named or PEER_TILES[shape.k, shape.n])
    lhs = next(block for block in kernel.call.inputs if sorted(block.array) == sorted((shape.m, shape.k)))
    return math.prod(lhs.shape) * kernel.call.outputs[0].shape[-1]


def _judged(row: Row) -> Row:
    """The row of a kernel of ours with its targets, and by how much they are missed."""
    limits: list[tuple[str, float | None, float]] = []
    target = TARGETS[row.chip].get(row.kernel)
    if target:
        limits.append((f"× {target.of}", row.of_floor if target.of == "floor" else row.of_bf16, target.most))
    if row.chip in MOST_SPILLS:
        limits.append((" spills", row.spill_share, MOST_SPILLS[row.chip]))
    if row.chip in MOST_CODE_KB:
        limits.append((" KB", row.code_kb, MOST_CODE_KB[row.chip]))
    asked, result = command.judged(limits)
    return replace(row, target=asked, result=result)


def has_tokamax() -> bool:
    """Whether tokamax, and with it qwix, can be imported; it needs Python 3.12."""
    return all(find_spec(name) for name in ("tokamax", "qwix"))


# --------------------------------------------------------------------------------------------------------- peers


# The module of a peer's functions, found by name: the packages' attributes of that name are functions.
TOKAMAX_V2 = "tokamax._src.ops.experimental.gmm_v2"
MEGABLOX = "jax.experimental.pallas.ops.tpu.megablox.gmm"
TOKAMAX = "tokamax._src.ops.ragged_dot.pallas_mosaic_tpu_kernel"


def megablox_gmm(lhs: Any, rhs: Any, group_sizes: Any, *, tiling: Tile) -> Any:
    """JAX's own `gmm`."""
    return import_module(MEGABLOX).gmm(lhs, rhs, group_sizes, lhs.dtype, tiling)


def megablox_tgmm(lhs: Any, rhs: Any, group_sizes: Any, *, tiling: Tile) -> Any:
    """JAX's own `tgmm`. It takes lhs as [K, M], and turns that around again."""
    return import_module(MEGABLOX).tgmm(lhs.swapaxes(0, 1), rhs, group_sizes, lhs.dtype, tiling)


def tokamax_gmm(
    lhs: Any, rhs: Any, group_sizes: Any, *, tiling: Tile, lhs_scale: Any = None, rhs_scale: Any = None
) -> Any:
    """The first of tokamax's kernels for the TPU."""
    operands = _qarray(lhs, lhs_scale), _qarray(rhs, rhs_scale)
    return import_module(TOKAMAX).gmm(*operands, group_sizes, **_tokamax_options(tiling))


def tokamax_tgmm(
    lhs: Any, rhs: Any, group_sizes: Any, *, tiling: Tile, lhs_scale: Any = None, rhs_scale: Any = None
) -> Any:
    """As `tokamax_gmm`. It takes lhs as [K, M]."""
    lhs, lhs_scale = lhs.swapaxes(0, 1), None if lhs_scale is None else lhs_scale.swapaxes(0, 1)
    operands = _qarray(lhs, lhs_scale), _qarray(rhs, rhs_scale)
    return import_module(TOKAMAX).tgmm(*operands, group_sizes, **_tokamax_options(tiling))


def tokamax_v2_gmm(lhs: Any, rhs: Any, group_sizes: Any, *, tiling: Tile) -> Any:
    """The second one, which picks its tile itself: `tiling` is not used, larger ones than its own take minutes."""
    gmm_v2 = import_module(f"{TOKAMAX_V2}.gmm_v2").gmm_v2
    return gmm_v2(lhs, rhs, group_sizes, maybe_quantize_lhs=False, preferred_element_type=lhs.dtype)


def tokamax_v2_tgmm(lhs: Any, rhs: Any, group_sizes: Any, *, tiling: Tile) -> Any:
    """As `tokamax_v2_gmm`."""
    tgmm_v2 = import_module(f"{TOKAMAX_V2}.tgmm_v2").tgmm_v2
    return tgmm_v2(lhs, rhs, group_sizes, group_sizes.shape[0], preferred_element_type=lhs.dtype)


def _qarray(x: Any, scale: Any) -> Any:
    return x if scale is None else import_module("qwix").QArray(x, scale)


def _tokamax_options(tiling: Tile) -> dict[str, Any]:
    import jax

    default = jax.lax.Precision.DEFAULT
    return {"precision": (default, default), "out_dtype": jax.numpy.bfloat16, "tiling": tiling}


# --------------------------------------------------------------------------------------------------- command line


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the table; returns the exit code: 1 where the compiler refused a kernel of ours."""
    given, table = command.measured(arguments, measure, "kernels")
    names = {"chip": "chip", "K×N G": "shape", "kernel": "kernel", "whose": "peer"}
    title, apart = "static cycles of one whole middle grid step", ("chip", "shape")
    view = command.table(title, table, names, apart=apart)
    command.show(given, [asdict(row) | {"shape": row.shape._asdict()} for row in table], view)
    if not given.json and not has_tokamax():
        command.say_without_tokamax()
    return int(any(row.error and row.peer == "ours" for row in table))


if __name__ == "__main__":
    sys.exit(main())
