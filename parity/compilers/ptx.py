"""Triton's ahead-of-time compiler: kernels become machine code for GPUs that are not here.

The compiler (ptxas and the disassembler included) ships inside Triton and needs no GPU, but it takes no kernel that was
decorated while TRITON_INTERPRET=1, and what it does not survive it takes with it: so it has a process of its own
(`parity.compilers.processes`). What was compiled is kept (`parity.compilers.cache`).
"""

import importlib
import inspect
import os
import re
import subprocess
import sys
import tempfile
import time
from collections import namedtuple
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

from parity.compilers import cache, gpu_code
from parity.compilers.processes import Death, compile_each, first_error, shortened

Target = tuple[str, int | str, int]
Argument = int | float | bool | str | None | Mapping[str, "Argument"]

TARGETS: dict[str, Target] = {
    "sm_80": ("cuda", 80, 32),
    "sm_90": ("cuda", 90, 32),
    "sm_100": ("cuda", 100, 32),
    "sm_120": ("cuda", 120, 32),
    "gfx942": ("hip", "gfx942", 64),
    "gfx950": ("hip", "gfx950", 64),
}
"""(backend, architecture, threads per warp): A100, H100/H200, B200, RTX 50, MI300, MI350."""

POINTERS = {
    "bool": "*i1",
    "int8": "*i8",
    "int32": "*i32",
    "int64": "*i64",
    "float16": "*fp16",
    "bfloat16": "*bf16",
    "float32": "*fp32",
    "float64": "*fp64",
    "float8_e4m3fn": "*fp8e4nv",
    "float8_e5m2": "*fp8e5",
    "uint8": "*u8",
}
"""Triton's name of a tensor argument, by the name of its dtype."""

NEAR = "@32"
"""Follows the name of a tensor whose memory is less than 2 GiB: AMD's compiler then addresses it by 32 bits."""

Outcome = Literal["compiled", "refused", "too large", "crashed", "timed out", "unreadable"]


@dataclass(frozen=True)
class Case:
    """A kernel as it would be launched.

    kernel "module:name"; target as in TARGETS; arguments by name: a tensor as its pointer
    type (POINTERS, NEAR behind it; taken to be 16-byte aligned, as allocators make them), a NamedTuple as the mapping
    of its fields, all else by value; options of the launch (num_warps, num_stages, ...).
    """

    kernel: str
    target: Target
    arguments: Mapping[str, Argument]
    options: Mapping[str, int | bool]


@dataclass(frozen=True)
class Compiled:
    """What the compiler made of a case, as far as it came: None is what it did not say.

    outcome: `compiled`; `refused` by the compiler (or by Python, before it came to that); `too large`: compiled, but no
    block fits the chip; `crashed`, `timed out`: so did the compiler; `unreadable`: machine code in an unknown format.
    error: the compiler's own line, None where it compiled. location: "file:line" of the kernel's source, where it names
    one. log: all it wrote, shortened in the middle. seconds: of compilation; where the result was kept, of the first.
    shared_bytes of a block; registers ... barriers as in `gpu_code.MachineCode`. resident_warps: how many of its warps
    one SM (AMD: CU) holds at most, bound_by what (`gpu_code.occupancy`).
    """

    outcome: Outcome
    error: str | None = None
    location: str | None = None
    log: str = ""
    seconds: float | None = None
    shared_bytes: int | None = None
    registers: int | None = None
    spill_bytes: int | None = None
    code_bytes: int | None = None
    scalar_registers: int | None = None
    accumulation_registers: int | None = None
    spilled_registers: int | None = None
    resident_warps: int | None = None
    bound_by: str | None = None
    instructions: Mapping[str, int] = field(default_factory=dict)
    dot_kinds: Mapping[str, int] = field(default_factory=dict)
    barriers: Mapping[str, int] = field(default_factory=dict)

    @property
    def dot_operands(self) -> set[str]:
        """The types that the matrix unit multiplies: `gpu_code.dot_operands`."""
        return gpu_code.dot_operands(self.dot_kinds)

    def keeps_dot(self, dot: str, dtype: str) -> bool:
        """Whether the machine code keeps a contract's dot for operands of a dtype: `gpu_code.keeps_dot`."""
        return gpu_code.keeps_dot(dot, dtype, self.dot_kinds)


def case_of(launch: Any, target: str) -> Case:
    """The case of a launch for one of TARGETS.

    launch: an object with a `kernel`, its `arguments` by name (tensors of any framework, NamedTuples, values) and the
    `options` of its launch. Raises KeyError for a tensor of a dtype that is not in POINTERS.
    """
    function = launch.kernel.fn
    arguments = {name: _argument(value) for name, value in launch.arguments.items()}
    return Case(f"{function.__module__}:{function.__name__}", TARGETS[target], arguments, launch.options)


def _argument(value: Any) -> Argument:
    if hasattr(value, "_asdict"):
        return {name: _argument(field) for name, field in value._asdict().items()}
    if hasattr(value, "shape"):
        memory = value.untyped_storage() if hasattr(value, "untyped_storage") else value
        bytes_of_memory = memory.nbytes() if callable(memory.nbytes) else memory.nbytes
        return POINTERS[str(value.dtype).rpartition(".")[2]] + NEAR * (bytes_of_memory < 2**31)
    argument: Argument = value
    return argument


def compile_kernels(cases: Sequence[Case], timeout: float = 300.0) -> list[Compiled]:
    """Compile all cases, in order; one result each. `timeout` is in seconds, for each case.

    A case that crashes or hangs the compiler costs that case alone: the rest go to a fresh one.
    Raises ValueError for a target that is not in TARGETS, RuntimeError where the compiler does not start.
    """
    for case in cases:
        _name(case.target)
    with tempfile.TemporaryDirectory() as folder:  # Triton's own cache would answer without time and diagnostics
        environment = {"TRITON_DEFAULT_FP_FUSION": "1", **os.environ, "TRITON_CACHE_DIR": folder}
        environment.pop("TRITON_INTERPRET", None)
        answers = compile_each(_answer, cases, timeout, framework="triton", environment=environment)
    return [Compiled(**vars(answer)) if isinstance(answer, Death) else answer for answer in answers]


def deviations(problems: Mapping[str, str | None], limits: Mapping[str, str]) -> list[str]:
    """How cases differ from what is declared of them, in both directions; empty where all is as declared.

    problems: by the name of a case, what is wrong with it (a compiler's error), None where nothing is. limits: by the
    name of a case that a chip is known not to support, a part of what must be wrong with it.
    """
    found = [f"{name} is no case, but a limit is declared" for name in limits if name not in problems]
    for name, problem in problems.items():
        limit = limits.get(name)
        if limit is not None and problem is None:
            found.append(f"{name}: nothing is wrong any more, but a limit is declared: {limit}")
        elif problem is not None and (limit is None or limit not in problem):
            found.append(f"{name}: {problem}" + (f" (declared: {limit})" if limit else ""))
    return found


def _name(target: Target) -> str:
    for name, known in TARGETS.items():
        if known == tuple(target):
            return name
    raise ValueError(f"target must be one of {', '.join(map(str, TARGETS.values()))}, got {target}")


def _answer(case: Case, log: Path) -> Compiled:
    try:
        module, _, name = case.kernel.partition(":")
        kernel = getattr(importlib.import_module(module), name)
        source = _source(kernel, case)
    except Exception as error:
        text = f"{type(error).__name__}: {error}"
        return Compiled("refused", error=text.partition("\n")[0], log=shortened(text))
    try:
        return _kept_or_compiled(source, case)
    except gpu_code.UnknownCode as error:
        return Compiled("unreadable", error=str(error).partition("\n")[0], log=shortened(str(error)))
    except Exception as error:
        sys.stderr.flush()
        return _refusal(error, kernel, log.read_text(errors="replace"))


def _source(kernel: Any, case: Case) -> Any:
    from triton.compiler import ASTSource

    return ASTSource(kernel, *_specialise(kernel, case.arguments, is_amd=case.target[0] == "hip"))


def _kept_or_compiled(source: Any, case: Case) -> Compiled:
    import triton
    from triton._C.libtriton import get_cache_invalidating_env_vars
    from triton.backends.compiler import GPUTarget
    from triton.compiler import make_backend

    target = GPUTarget(*case.target)
    backend = make_backend(target)
    key = cache.digest(
        *(Path(path).read_bytes() for path in (__file__, gpu_code.__file__)),
        triton.__version__,
        backend.hash(),  # of the target and of ptxas
        backend.parse_options(dict(case.options)).hash(),
        repr(sorted(get_cache_invalidating_env_vars().items())),
        source.hash(),  # of the kernel, the functions it calls, its signature and its constants
    )
    kept = cache.load("ptx", key)
    if isinstance(kept, Compiled):
        return kept
    start = time.perf_counter()
    compiled = triton.compile(source, target=target, options=dict(case.options))
    result = _read(compiled, _name(case.target), time.perf_counter() - start)
    cache.store("ptx", key, result)
    return result


def _read(compiled: Any, target: str, seconds: float) -> Compiled:
    metadata = compiled.metadata
    if "cubin" in compiled.asm:
        code = gpu_code.read_nvidia(_disassembly(compiled.asm["cubin"]), compiled.asm["ptx"], metadata.name)
    else:
        code = gpu_code.read_amd(compiled.asm["amdgcn"], target)
    columns = getattr(metadata, "tmem_size", None) or 0
    limits = gpu_code.LIMITS[target]
    warps, bound = gpu_code.occupancy(
        limits,
        warps=metadata.num_warps,
        registers=code.registers,
        shared_bytes=metadata.shared,
        tensor_columns=columns,
    )
    error = None
    if not warps:
        block = f"{metadata.num_warps} warps with {code.registers} registers a thread"
        shared = f"{metadata.shared} of {limits.block_shared_bytes} bytes of shared memory"
        tensor = f"{columns} of {gpu_code.TENSOR_COLUMNS} columns of tensor memory"
        error = f"too much {bound} for one block: {block}, {shared}, {tensor}"
    return Compiled(
        "compiled" if warps else "too large",
        error=error,
        seconds=seconds,
        shared_bytes=metadata.shared,
        resident_warps=warps,
        bound_by=bound,
        **asdict(code),
    )


def _disassembly(cubin: bytes) -> str:
    """What cuobjdump says about a cubin: its resources and its instructions. Raises gpu_code.UnknownCode."""
    from triton import knobs

    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [knobs.nvidia.cuobjdump.path, "-sass", "-res-usage", file.name]
        run = subprocess.run(command, capture_output=True, text=True, check=False)
    if run.returncode:
        raise gpu_code.UnknownCode(f"cuobjdump cannot read the cubin: {run.stderr.strip()}")
    return run.stdout


def _refusal(error: Exception, kernel: Any, diagnostics: str) -> Compiled:
    """What the compiler says in an exception, or has written while it ran."""
    chain = list(_chain(error))
    log = shortened("\n".join([*(f"{type(e).__name__}: {e}" for e in chain), diagnostics]))
    place = r'(?:loc\()?"?([^\s":]+)"?:(\d+):\d+\)?: '
    found = re.search(rf"^(?:{place})?error: (.+)$", diagnostics, re.MULTILINE)
    if found is not None:
        location = f"{found[1]}:{found[2]}" if found[1] and found[1].endswith(".py") else None
        return Compiled("refused", error=found[3], location=location, log=log)
    # Of an error in a called function there is one for each call on the way; the innermost has the reason.
    reasons = [(e.error_message or "") if hasattr(e, "error_message") else str(e) for e in chain]
    reason = next((reason.strip() for reason in reversed(reasons) if reason), "")
    line = first_error(reason) or reason.partition("\n")[0]
    return Compiled("refused", error=f"{type(error).__name__}: {line}", location=_location(chain, kernel), log=log)


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    while error is not None:
        yield error
        error = error.__cause__


def _location(chain: Sequence[BaseException], kernel: Any) -> str | None:
    """Where the innermost error is whose function we can find: an error names a line of its function's source."""
    functions = [f for f in (*kernel.fn.__globals__.values(), kernel) if isinstance(f, type(kernel))]
    sources = {function.src: function.fn for function in functions}
    for error in reversed(chain):
        line = getattr(getattr(error, "node", None), "lineno", None)
        function = sources.get(getattr(error, "src", None))
        if line is not None and function is not None:
            lines, first = inspect.getsourcelines(function)
            decorators = next(i for i, text in enumerate(lines) if text.lstrip().startswith("def "))
            return f"{inspect.getsourcefile(function)}:{first + decorators + line - 1}"
    return None


def _specialise(
    kernel: Any, arguments: Mapping[str, Argument], *, is_amd: bool
) -> tuple[dict[str, Any], dict[tuple[int, ...], Any], dict[tuple[int, ...], list[tuple[str, int]]]]:
    """(signature, constants, attributes), as Triton's launcher derives them from the values.

    An absent tensor and the integer 1 become constants, and divisibility by 16 is passed on, to AMD's compiler also
    that a tensor is NEAR: of arguments, and of the fields of a NamedTuple.
    """
    constants: dict[tuple[int, ...], Any] = {}
    attributes: dict[tuple[int, ...], list[tuple[str, int]]] = {}

    def specialised(value: Argument, path: tuple[int, ...], is_constant: bool) -> Any:
        if isinstance(value, Mapping) and is_constant:
            constants[path] = namedtuple("Struct", value.keys())(**value)
            return "constexpr"
        if isinstance(value, Mapping):
            fields = (specialised(field, (*path, nth), is_constant) for nth, field in enumerate(value.values()))
            return namedtuple("Struct", value.keys())(*fields)
        if isinstance(value, float) and not is_constant:
            return "fp32"
        if is_constant or value is None or value is True or value is False or value == 1:
            constants[path] = value
            return "constexpr"
        if isinstance(value, str):
            near = [("tt.pointer_range", 32)] if is_amd and value.endswith(NEAR) else []
            attributes[path] = [("tt.divisibility", 16), *near]
            return value.removesuffix(NEAR)
        if value % 16 == 0:
            attributes[path] = [("tt.divisibility", 16)]
        return "i32" if -(2**31) <= value < 2**31 else "i64"

    signature = {
        parameter.name: specialised(arguments[parameter.name], (parameter.num,), parameter.is_constexpr)
        for parameter in kernel.params
    }
    return signature, constants, attributes
