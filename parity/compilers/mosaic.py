"""The real TPU compiler on a host without a TPU: `libtpu` compiles JAX functions for any generation.

Only shapes and dtypes go in, no data. libtpu reads its environment when it loads and a process can load it once, so
cases are compiled in processes of their own (`parity.compilers.processes`).
Results are cached by the lowered module, without the places in the source that it came from: a second run traces and
lowers, and compiles nothing, also where code only moved.
"""

import importlib
import os
import re
import shutil
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

from parity.backends import INTERPRETED
from parity.compilers import bundles, cache, chips
from parity.compilers import kernels as pallas
from parity.compilers.bundles import Schedule, UnknownDump
from parity.compilers.chips import CHIPS, packed_rows
from parity.compilers.kernels import Dot, DotPasses, Kernel, dot_passes
from parity.compilers.processes import LOG_CHARACTERS, Death, compile_each

TOPOLOGIES = {name: chip.topology for name, chip in CHIPS.items()}
"""The smallest topology libtpu knows of each chip."""

_ENVIRONMENT = {
    "TPU_SKIP_MDS_QUERY": "1",  # no cloud metadata server to ask
    "JAX_PLATFORMS": "cpu",  # the host's own backend
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",  # other processes may hold libtpu's lock file
}
DUMP = (
    "--xla_jf_dump_to={} --xla_jf_dump_hlo_text=true --xla_jf_dump_llo_text=true"
    " --xla_jf_dump_llo_pass_label_regex=final_bundles|static"
    " --xla_mosaic_enable_llo_source_annotations=true"  # comments in the dump: the code is the same
)
_NO_ESTIMATE = 2**63 - 1
_BEYOND_MEMORY = re.compile(r"Ran out of memory in memory space|would exceed memory")

Outcome = Literal["compiled", "refused", "too large", "crashed", "timed out", "unreadable"]


@dataclass(frozen=True)
class Abstract:
    """The shape and the dtype (by name) of an array. split: the axis that is cut across the cores."""

    shape: tuple[int, ...]
    dtype: str
    split: int | None = None


@dataclass(frozen=True)
class Compilation:
    """A function to compile for a chip.

    function is `"module:function"`, chip a key of `TOPOLOGIES`. `Abstract` arguments become traced arrays; all other
    keywords are passed as they are. With cores > 1 the function sees a mesh of so many, of the one axis "core", and
    an argument is whole on each core unless it says along which axis it is split.
    """

    function: str
    chip: str
    arguments: tuple[Abstract, ...]
    keywords: Mapping[str, Any] = field(default_factory=dict)
    cores: int = 1


@dataclass(frozen=True)
class CompiledKernel(Schedule):
    """One Pallas kernel of a compiled function: its schedule, and more.

    passes: over the matrix unit, of all the source's dots; line_passes: of those on each line. vmem_bytes: the scoped
    VMEM that it takes. fetch_starvation, write_starvation: the share of its bundles in which the compiler expects to
    wait for HBM.
    """

    call: Kernel
    passes: tuple[DotPasses, ...]
    line_passes: tuple[DotPasses, ...]
    vmem_bytes: int
    fetch_starvation: float
    write_starvation: float

    @property
    def name(self) -> str:
        """The `pallas_call`'s name, or what XLA calls it."""
        return self.call.name


@dataclass(frozen=True)
class Roofline:
    """Cycles that a kernel takes at least, all steps on one core: its schedule, the matrix units alone, HBM alone."""

    schedule: float
    mxu: float
    hbm: float

    @property
    def bound(self) -> str:
        """What bounds it: "HBM", "MXU" or its "schedule"."""
        if self.hbm >= self.schedule:
            return "HBM"
        return "MXU" if self.mxu >= 0.99 * self.schedule else "schedule"


def roofline(kernel: CompiledKernel, chip: str) -> Roofline:
    """The roofline of a kernel on a chip, from its grid, its HBM bytes and the chip's published peaks."""
    steps, peaks = kernel.call.steps, CHIPS[chip]
    return Roofline(
        schedule=steps * kernel.static_cycles,
        mxu=steps * kernel.mxu_cycles,
        hbm=kernel.call.hbm_bytes / peaks.hbm_gbs * peaks.ghz,
    )


@dataclass(frozen=True)
class Compiled:
    """What the compiler said. Where it did not compile, error is its own text and the byte counts are 0.

    outcome: `compiled`; `refused` by the compiler (or by Python, before it came to that); `too large` for the chip's
    memory; `crashed`, `timed out`: so did the compiler; `unreadable`: it left a dump in an unknown format.
    code is its error's code (E2001) and location the line of ours that it blames, "path:line", each empty where it
    names none; log is what it wrote before it crashed or hung. hbm_bytes: what XLA counts for the whole program, None
    where it counts none. kernels: with `schedule`, the Pallas kernels in program order. xla_cycles: with `schedule`,
    what XLA estimates of all else that it runs, where it does. cached: nothing was compiled.
    """

    outcome: Outcome
    seconds: float = 0.0
    error: str = ""
    location: str = ""
    log: str = ""
    code_bytes: int = 0
    argument_bytes: int = 0
    output_bytes: int = 0
    temp_bytes: int = 0
    hbm_bytes: int | None = None
    kernels: tuple[CompiledKernel, ...] = ()
    xla_cycles: int | None = None
    cached: bool = False

    @property
    def ok(self) -> bool:
        """Whether it compiled."""
        return self.outcome == "compiled"

    @property
    def code(self) -> str:
        """The compiler's code of the error."""
        found = re.search(r"\bE\d{4}\b", self.error)
        return found[0] if found else ""

    @property
    def reason(self) -> str:
        """The first line of the error, without the exception's name, the status and the kernel's."""
        line = self.error.partition("\n")[0]
        return re.sub(r"^\w+: (?:[A-Z_]+: )?(?:Mosaic failed to compile TPU kernel .*?HLO name `[^`]*`: )?", "", line)


def compile_for_tpu(
    cases: Sequence[Compilation], timeout: float = 300.0, *, schedule: bool = False, lines: bool = False
) -> list[Compiled]:
    """Compile each case, in order, in as few fresh processes as possible; one result per case.

    A case whose process dies, or that takes longer than `timeout` seconds, fails; the rest go on in a new one.
    schedule: also read the schedules of the Pallas kernels; a dump that cannot be read is then an error of its case.
    lines: schedules with what each source line takes; code that moved is then compiled again.
    Raises ValueError for an unknown chip or a number of cores that its topology does not have.
    """
    for case in cases:
        if case.chip not in TOPOLOGIES:
            raise ValueError(f"chip must be one of {', '.join(TOPOLOGIES)}, got {case.chip!r}")
        if case.cores < 1:
            raise ValueError(f"cores must be at least 1, got {case.cores}")
    if timeout < 1:
        raise ValueError(f"timeout must be at least 1 s, got {timeout:g}")
    with tempfile.TemporaryDirectory() as folder:
        environment = os.environ | _ENVIRONMENT
        environment["XLA_FLAGS"] = os.environ.get("XLA_FLAGS", "").replace(INTERPRETED, "").strip()
        dump = Path(folder) if schedule or lines else None
        if dump:
            flags = os.environ.get("LIBTPU_INIT_ARGS", "")
            environment["LIBTPU_INIT_ARGS"] = f"{flags} {DUMP.format(dump)}".strip()
        compile = partial(_answer, dump=dump, lines=lines)
        answers = compile_each(compile, cases, timeout, framework="jax", environment=environment)
    return [Compiled(**vars(answer)) if isinstance(answer, Death) else answer for answer in answers]


def _answer(case: Compilation, log: Path, *, dump: Path | None, lines: bool) -> Compiled:
    """What the compiler says of a case: whatever it raises is an answer."""
    if dump:  # what the case before left
        shutil.rmtree(dump)
        dump.mkdir()
    start = time.perf_counter()
    try:
        answer = _compile(case, dump, lines)
    except Exception as error:
        text = f"{type(error).__name__}: {error}"
        location = _blamed(text) or _raised_at(error)
        answer = Compiled(_outcome(error), error=text[:LOG_CHARACTERS], location=location)
    return replace(answer, seconds=time.perf_counter() - start)


def _outcome(error: Exception) -> Outcome:
    if isinstance(error, UnknownDump):
        return "unreadable"
    return "too large" if _BEYOND_MEMORY.search(str(error)) else "refused"


def _compile(case: Compilation, dump: Path | None, lines: bool) -> Compiled:
    import jax
    from jax.experimental import topologies

    devices = topologies.get_topology_desc(platform="tpu", topology_name=TOPOLOGIES[case.chip]).devices
    if case.cores > len(devices):
        raise ValueError(f"cores must be at most {len(devices)} on {TOPOLOGIES[case.chip]}, got {case.cores}")
    mesh = jax.sharding.Mesh(devices[: case.cores], ("core",))

    def traced(value: Abstract) -> jax.ShapeDtypeStruct:
        axes = [] if value.split is None else [None] * value.split + ["core"]
        sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec(*axes))
        return jax.ShapeDtypeStruct(value.shape, jax.numpy.dtype(value.dtype), sharding=sharding)

    module, _, name = case.function.partition(":")
    function = getattr(importlib.import_module(module), name)
    arrays = {word: traced(value) for word, value in case.keywords.items() if isinstance(value, Abstract)}
    static = {word: value for word, value in case.keywords.items() if word not in arrays}

    def trace() -> Any:
        program = jax.jit(lambda *args, **kwargs: function(*args, **kwargs, **static))
        return program.trace(*map(traced, case.arguments), **arrays)

    # The abstract mesh makes questions about the device (get_tpu_info) answer for the target, not for this host.
    with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
        key = _cache_key(case, _lowered(trace(), places=lines).as_text(), dump, lines)
        known = cache.load("mosaic", key)
        if isinstance(known, Compiled):
            return replace(known, cached=True)
        program = trace()  # anew: JAX lowers a trace once
        options = {"xla_dump_to": str(dump), "xla_dump_hlo_as_text": True} if dump else None
        compiled = _lowered(program, places=True).compile(options)  # with places, so that errors have them
    memory, costs = compiled.memory_analysis(), compiled.cost_analysis() or {}
    if memory is None:
        raise RuntimeError("libtpu gave no memory analysis")
    result = Compiled(
        "compiled",
        code_bytes=memory.generated_code_size_in_bytes,
        argument_bytes=memory.argument_size_in_bytes,
        output_bytes=memory.output_size_in_bytes,
        temp_bytes=memory.temp_size_in_bytes,
        hbm_bytes=int(costs["bytes accessed"]) if "bytes accessed" in costs else None,
        kernels=_kernels(dump, case.chip, pallas.kernels(program.jaxpr), lines) if dump else (),
        xla_cycles=_xla_cycles(dump) if dump else None,
    )
    cache.store("mosaic", key, result)
    return result


def _lowered(trace: Any, *, places: bool) -> Any:
    """The module of a traced function; places: with those in the source that its operations come from."""
    import jax

    limit = "jax_traceback_in_locations_limit"
    frames = getattr(jax.config, limit)
    try:
        jax.config.update(limit, frames if places else 0)
        return trace.lower()
    finally:
        jax.config.update(limit, frames)


def _cache_key(case: Compilation, module: str, dump: Path | None, lines: bool) -> str:
    from importlib.metadata import version

    flags = os.environ.get("LIBTPU_INIT_ARGS", "").replace(str(dump), "")
    readers = "".join(Path(file).read_text() for file in (bundles.__file__, chips.__file__, pallas.__file__, __file__))
    versions = version("libtpu"), version("jaxlib")
    return cache.digest(module, case.chip, str(case.cores), *versions, flags, str(lines), readers)


def _kernels(dump: Path, chip: str, calls: Sequence[Kernel], lines: bool) -> tuple[CompiledKernel, ...]:
    """Each call with what the dump has of it, with `lines` of its places in the source too."""
    files = {path.name: path.read_text() for path in sorted(dump.glob("*.txt"))}
    seen: Counter[tuple[str, tuple[tuple[int, ...], ...]]] = Counter()
    compiled = []
    for call in calls:
        kernel = read_dump(files, call, chip, nth=seen[call.name, call.operands])
        elsewhere = replace(kernel, lines=(), line_passes=(), call=pallas.without_places(kernel.call))
        compiled.append(kernel if lines else elsewhere)
        seen[call.name, call.operands] += 1
    return tuple(compiled)


def _xla_cycles(dump: Path) -> int | None:
    """The sum of what XLA estimates of a program's instructions; it has no estimate of Pallas kernels, nor of sorts,
    gathers and loops."""
    module = max((path.read_text() for path in dump.glob("*.after_codegen.txt")), key=len, default=None)
    if module is None:
        return None
    estimates = map(int, re.findall(r'"estimated_cycles":"(\d+)"', module.partition("\nENTRY ")[2]))
    return sum(cycles for cycles in estimates if cycles != _NO_ESTIMATE)


def read_dump(files: Mapping[str, str], call: Kernel, chip: str, nth: int = 0) -> CompiledKernel:
    """The kernel of a call in a dump (file name → text), the nth of those with its name and operands.

    Raises UnknownDump where the dump has no such kernel or is not in the format that is known here.
    """
    stem = _stem(files, call, nth)
    (utilization,) = _named(files, rf"{re.escape(stem)}-\d+-final_hlo-static-per-bundle-utilization\.txt").values()
    (text,) = _named(files, rf"{re.escape(stem)}-\d+-final_bundles\.txt").values()
    program = bundles.parse(text, utilization)
    instruction = stem.partition("-")[2]
    profile = "".join(_named(files, r".*-hlo-static-bundle-profile\.txt").values())
    section = re.search(rf"^HLO: %{re.escape(instruction)} = (.*?)(?=^HLO: |\Z)", profile, re.MULTILINE | re.DOTALL)
    scoped = section and re.search(
        r'"used_scoped_memory_configs":\[\{"memory_space":"1","offset":"\d+","size":"(\d+)"', section[1]
    )
    if not section or not scoped:
        raise UnknownDump(f"the dump must have a profile of {instruction} with the VMEM that it uses")

    def share(counter: str) -> float:
        used = re.search(rf"{counter}: \((\d+)/(\d+)\)", section[1])
        if used is None:
            raise UnknownDump(f"the profile of {instruction} must have {counter}")
        return int(used[1]) / int(used[2])

    width = CHIPS[chip].width
    rows: Counter[str] = Counter()
    rows_at: dict[str, Counter[str]] = {}
    for (place, operand), count in bundles.emitted(program).items():
        rows[operand] += count * packed_rows(operand)
        rows_at.setdefault(place, Counter())[operand] += count * packed_rows(operand)
    schedule = bundles.schedule(program, CHIPS[chip], call.steps_per_block, call.branches)
    return CompiledKernel(
        **vars(schedule) | {"lines": tuple(replace(line, place=_shown(line.place)) for line in schedule.lines)},
        call=call if call.name else replace(call, name=re.sub(r"(\.\d+)+$", "", instruction)),
        passes=dot_passes(call.dots, rows, width),
        line_passes=_line_passes(call.dots, rows_at, width) if schedule.lines else (),
        vmem_bytes=int(scoped[1]),
        fetch_starvation=share("HBM_TO_VMEM_ESTIMATED_STARVATION"),
        write_starvation=share("VMEM_TO_HBM_ESTIMATED_STARVATION"),
    )


def _line_passes(dots: Sequence[Dot], rows_at: Mapping[str, Counter[str]], width: int) -> tuple[DotPasses, ...]:
    """The passes of the dots on each line.

    JAX lowers a jitted function such as `jnp.dot` once for equal arguments: later calls are on the line of the first.
    """
    homes: dict[Dot, str] = {}
    by_place: dict[str, list[Dot]] = {}
    for dot in dots:
        alike = replace(dot, place="")
        home = homes.setdefault(alike, dot.place)
        by_place.setdefault(dot.place if dot.place in rows_at else home, []).append(dot)
    return tuple(
        passes
        for place, same in sorted(by_place.items())
        for passes in dot_passes(same, rows_at.get(place, {}), width, _shown(place))
    )


def _stem(files: Mapping[str, str], call: Kernel, nth: int) -> str:
    """What the names of a kernel's files begin with: a time and the name of its HLO instruction."""
    # XLA names a kernel without a name as it likes. (Names in capitals or brackets are of no instruction.)
    name = re.escape(call.name) if call.name else r"[a-z_][^-]*"
    pattern = rf"\d+-{name}(?:\.\d+)*-\d+-final_bundles\.txt"
    stems = {re.sub(r"-\d+-final_bundles\.txt$", "", name): text for name, text in _named(files, pattern).items()}
    if len(stems) > 1:  # equal calls may share a program
        stems = {stem: text for stem, text in stems.items() if _operands(text) == call.operands}
    if not stems:
        raise UnknownDump(f"the dump must have a program of kernel {call.name} with operands {call.operands}")
    return list(stems)[min(nth, len(stems) - 1)]


def _named(files: Mapping[str, str], pattern: str) -> dict[str, str]:
    return {name: text for name, text in files.items() if re.fullmatch(pattern, name)}


def _operands(text: str) -> tuple[tuple[int, ...], ...]:
    """The shapes of a program's operands, inputs and outputs, in order."""
    found = re.findall(r"inlined_call_operand[^\[]*\[shape: \w+\[([\d,]*)\], index: (\d+), kind: ", text)
    in_order = sorted((int(index), shape) for shape, index in found)
    return tuple(tuple(int(size) for size in shape.split(",") if size) for _, shape in in_order)


def _blamed(error: str) -> str:
    """The innermost source line of ours among the locations that the compiler's error gives, or none."""
    for path, line in re.findall(r'"([^"]+\.py)":(\d+)', error):
        if "site-packages" not in path:
            return f"{_shown(path)}:{line}"
    return ""


def _raised_at(error: Exception) -> str:
    """The innermost line of ours that was running when an error was raised, or none."""
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        if "site-packages" not in frame.filename and frame.filename != __file__ and Path(frame.filename).is_file():
            return f"{_shown(frame.filename)}:{frame.lineno}"
    return ""


def _shown(path: str) -> str:
    return os.path.relpath(path) if Path(path).is_relative_to(Path.cwd()) else path
