"""The plan ledger: how kernels cut a project's programs, recorded and held against the record.

On a TPU: grids, blocks and dots, read from the traced program; on a GPU: grids, warps, stages and tiles, read from what
is launched. Nothing is compiled, so all of it takes seconds. No result depends on a plan: one that is many times as
slow shows here alone, and where it is meant, as a diff of `records/plans/<chip>/<op>.jsonl`.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from parity import matrix
from parity.backends import load_kernel
from parity.compilers import kernels as pallas
from parity.compilers.chips import CHIPS
from parity.compilers.launches import launches
from parity.compilers.mosaic import Abstract
from parity.compilers.programs import Program
from parity.compilers.ptx import TARGETS
from parity.compilers.recorded import Entry, Recorded
from parity.ledger import diff

SCHEMA = 1
KINDS = {"v4": "TPU v4", "v5e": "TPU v5e", "v5p": "TPU v5p", "v6e": "TPU v6e", "tpu7x": "TPU7x"}
"""JAX's device kind of each chip."""


@dataclass(frozen=True)
class Plan(Entry):
    """One program on one chip: a TPU, or a GPU as `parity.compilers.ptx.TARGETS` names it.

    kernels, on a TPU: name, grid (null: a length that is traced), inputs and outputs (the shape of each one's block),
    dots ([rows, depth, columns, operand, how many of a step]) and vmem_bytes (blocks twice and what is held between
    steps). On a GPU: name, grid, warps, stages (where they are given) and constants, tiles among them.
    """

    schema: int = SCHEMA

    def changes(self, before: Plan) -> list[str]:
        """What differs between the kernels of two plans: `kernel.figure old → new`."""
        names = [[kernel["name"] for kernel in plan.kernels] for plan in (before, self)]
        if names[0] != names[1]:
            return [f"kernels {', '.join(names[0]) or 'none'} → {', '.join(names[1]) or 'none'}"]
        found = []
        for old, new in zip(map(_flat, before.kernels), map(_flat, self.kernels), strict=True):
            for figure in sorted(old.keys() | new.keys()):
                was, now = old.get(figure), new.get(figure)
                if was != now:
                    found.append(f"{new['name']}.{figure} {shown(was)} → {shown(now)}")
        return found


LEDGER = Recorded(diff.PLANS, "the plan ledger", Plan, SCHEMA)


def chips_of(program: Program) -> tuple[str, ...]:
    """Whom a program is planned for: the TPUs that it must compile for, and all GPUs."""
    return (*program.chips, *TARGETS)


def plan_all(root: Path, programs: Iterable[Program], chips: Sequence[str] = ()) -> Iterator[Plan]:
    """The plan of each program of the project at `root` for each of its chips (of `chips` only, if any)."""
    on_gpu = {op.name: op.gpu for op in matrix.load(root)}
    for program in programs:
        for chip in chips_of(program):
            if not chips or chip in chips:
                yield tpu_plan(program, chip) if chip in CHIPS else gpu_plan(program, chip, on_gpu[program.op])


def tpu_plan(program: Program, chip: str) -> Plan:
    """The plan of a program for a TPU."""
    traced = trace(program, chip)
    calls = [call for call, _ in pallas.equations(traced.jaxpr, "pallas_call", "mpmd_map")]
    found = pallas.kernels(traced, places=False)
    return Plan(chip, program.op, program.name, tuple(map(_tpu_kernel, found, calls)))


def trace(program: Program, chip: str) -> Any:
    """The closed jaxpr of a program, as it is traced for a TPU. Raises ValueError for an unknown chip."""
    import jax

    if chip not in KINDS:
        raise ValueError(f"chip must be one of {', '.join(KINDS)}, got {chip!r}")
    arrays = {name: _abstract(value) for name, value in program.keywords.items() if isinstance(value, Abstract)}
    static = {name: value for name, value in program.keywords.items() if name not in arrays}
    function = load_kernel(program.function)
    device = jax.sharding.AbstractDevice(device_kind=KINDS[chip], num_cores=1, platform="tpu")
    with jax.sharding.use_abstract_mesh(jax.sharding.AbstractMesh((1,), ("core",), abstract_device=device)):
        traced = jax.make_jaxpr(lambda *args, **kwargs: function(*args, **kwargs, **static))
        return traced(*map(_abstract, program.arguments), **arrays)


def _abstract(value: Abstract) -> Any:
    import jax

    return jax.ShapeDtypeStruct(value.shape, jax.numpy.dtype(value.dtype))


def _tpu_kernel(kernel: pallas.Kernel, call: Any) -> dict[str, Any]:
    dots: Counter[tuple[int, int, int, str]] = Counter()
    for dot in kernel.dots:
        dots[dot.rows, dot.depth, dot.columns, dot.operand] += dot.count
    return {
        "name": kernel.name,
        "grid": list(kernel.grid),
        "inputs": [list(block.shape) for block in kernel.inputs],
        "outputs": [list(block.shape) for block in kernel.outputs],
        "dots": [[*dot, count] for dot, count in sorted(dots.items())],
        "vmem_bytes": _vmem_bytes(call),
    }


def _vmem_bytes(call: Any) -> int:
    """Bytes of a kernel's blocks, twice (one is computed on, the next is on its way), and of its scratch in VMEM."""
    mapping = call.params.get("grid_mapping")
    if mapping is None:
        return 0
    held = 0
    for block in mapping.block_mappings:
        if _in_vmem(block.transformed_block_aval):
            sizes = [getattr(size, "block_size", 1) for size in block.block_shape]
            held += 2 * math.prod(sizes) * block.array_aval.dtype.itemsize
    scratch = call.params["jaxpr"].invars[len(call.params["jaxpr"].invars) - mapping.num_scratch_operands :]
    return held + sum(math.prod(v.aval.shape) * v.aval.dtype.itemsize for v in scratch if _in_vmem(v.aval))


def _in_vmem(ref: Any) -> bool:
    """Whether a reference is to VMEM, where the pipeline keeps blocks of no memory space of their own."""
    return str(getattr(ref, "memory_space", None) or "default").rpartition(".")[2].lower() in ("default", "vmem")


def gpu_plan(program: Program, target: str, function: str) -> Plan:
    """The plan of a program for a GPU, where `function` ("module:function") does the same, for tensors."""
    keywords = {name: value for name, value in program.keywords.items() if name != "interpret"}
    found = launches(load_kernel(function), *program.arguments, target=target, **keywords)
    kernels = []
    for launch in found:
        kernel = {"name": launch.name, "grid": list(launch.grid), "constants": dict(launch.constants)}
        for name, option in (("warps", "num_warps"), ("stages", "num_stages")):
            if option in launch.options:
                kernel[name] = launch.options[option]
        kernels.append(kernel)
    return Plan(target, program.op, program.name, tuple(kernels))


def _flat(kernel: Mapping[str, Any]) -> dict[str, Any]:
    """A kernel's figures, each constant as one of them."""
    return {name: value for name, value in kernel.items() if name != "constants"} | dict(kernel.get("constants", {}))


def shown(value: Any) -> str:
    """A figure as text: `256×512`, `?` for a length that is traced, `[256×512, 512×1024]`."""
    if not isinstance(value, list | tuple):
        return "none" if value is None else str(value)
    if any(isinstance(part, list | tuple) for part in value):
        return f"[{', '.join(map(shown, value))}]"
    return "×".join("?" if part is None else str(part) for part in value) or "[]"
