"""Triton's ahead-of-time compiler: kernels become machine code for GPUs that are not here.

The compiler (ptxas included) ships inside Triton and needs no GPU, but it takes no kernel that was decorated while
TRITON_INTERPRET=1: so cases are compiled in a subprocess, which is given them as JSON lines and answers in kind.
"""

import importlib
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

Target = tuple[str, int | str, int]
Argument = int | bool | str | None

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


@dataclass(frozen=True)
class Case:
    """A kernel as it would be launched.

    kernel "module:name"; target as in TARGETS; arguments by name: a tensor as its pointer type (POINTERS; taken to be
    16-byte aligned, as allocators make them), all else by value; options of the launch (num_warps, num_stages, ...).
    """

    kernel: str
    target: Target
    arguments: Mapping[str, Argument]
    options: Mapping[str, int | bool]


@dataclass(frozen=True)
class Compiled:
    """What the compiler made of a case: `error` (None where it compiled), and bytes or registers where it says."""

    error: str | None = None
    shared_bytes: int | None = None
    registers: int | None = None
    spill_bytes: int | None = None
    code_bytes: int | None = None


def compile_kernels(cases: Sequence[Case], timeout: float = 300.0) -> list[Compiled]:
    """Compile all cases, in order. `timeout` is in seconds, for each run of the compiler.

    A case that crashes or hangs the compiler is an error of that case alone: the rest go to a fresh one.
    """
    results: list[Compiled] = []
    while len(results) < len(cases):
        done, failure = _run(cases[len(results) :], timeout)
        results += done
        if len(results) < len(cases):
            results.append(Compiled(error=failure))
    return results


def _run(cases: Sequence[Case], timeout: float) -> tuple[list[Compiled], str]:
    """The results that one subprocess came to, and why there are no more."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, sys.path))
    environment.setdefault("TRITON_DEFAULT_FP_FUSION", "1")
    process = subprocess.Popen(
        [sys.executable, "-m", __name__],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=environment,
        text=True,
    )
    try:
        output, errors = process.communicate("".join(json.dumps(asdict(case)) + "\n" for case in cases), timeout)
        failure = f"the compiler ended with status {process.returncode}: {errors[-2000:]}"
    except subprocess.TimeoutExpired:
        process.kill()
        output, _ = process.communicate()
        failure = f"the compiler took more than {timeout:g} s"
    return [Compiled(**json.loads(line)) for line in output.splitlines() if line.endswith("}")], failure


def _serve(requests: Iterator[str]) -> None:
    for request in requests:
        case = json.loads(request)
        try:
            result = _compile(Case(**case))
        except Exception as error:
            result = Compiled(error=f"{type(error).__name__}: {error}")
        print(json.dumps(asdict(result)), flush=True)


def _compile(case: Case) -> Compiled:
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    module, _, name = case.kernel.partition(":")
    kernel = getattr(importlib.import_module(module), name)
    signature, constants, attributes = _specialise(kernel, case.arguments)
    source = ASTSource(kernel, signature, constants, attributes)
    compiled = triton.compile(source, target=GPUTarget(*case.target), options=dict(case.options))
    result = Compiled(shared_bytes=compiled.metadata.shared)
    if "cubin" in compiled.asm:
        return replace(result, code_bytes=len(compiled.asm["cubin"]), **_cubin_resources(compiled.asm["cubin"]))
    return replace(result, code_bytes=len(compiled.asm["hsaco"]), **_amdgcn_resources(compiled.asm["amdgcn"]))


def _specialise(
    kernel: Any, arguments: Mapping[str, Argument]
) -> tuple[dict[str, str], dict[str, Argument], dict[tuple[int], list[tuple[str, int]]]]:
    """(signature, constants, attributes) as Triton's launcher derives them from the values: an absent tensor and the
    integer 1 become constants, divisibility by 16 is passed on."""
    signature: dict[str, str] = {}
    constants: dict[str, Argument] = {}
    attributes: dict[tuple[int], list[tuple[str, int]]] = {}
    for parameter in kernel.params:
        name, value = parameter.name, arguments[parameter.name]
        if parameter.is_constexpr or value is None or value is True or value is False or value == 1:
            signature[name] = "constexpr"
            constants[name] = value
            continue
        signature[name] = value if isinstance(value, str) else "i32" if -(2**31) <= value < 2**31 else "i64"
        if isinstance(value, str) or value % 16 == 0:
            attributes[(parameter.num,)] = [("tt.divisibility", 16)]
    return signature, constants, attributes


def _cubin_resources(cubin: bytes) -> dict[str, Any]:
    from triton import knobs

    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        report = subprocess.run(
            [knobs.nvidia.cuobjdump.path, "-res-usage", file.name], capture_output=True, text=True, check=True
        ).stdout
    # A kernel has no local arrays of its own: what lies on its stack was spilled.
    return _numbers(report, registers=r"REG:(\d+)", spill_bytes=r"STACK:(\d+)")


def _amdgcn_resources(assembly: str) -> dict[str, Any]:
    return _numbers(assembly, registers=r"\.vgpr_count:\s+(\d+)", spill_bytes=r"\.private_segment_fixed_size:\s+(\d+)")


def _numbers(text: str, **patterns: str) -> dict[str, Any]:
    found = {name: re.search(pattern, text) for name, pattern in patterns.items()}
    return {name: int(match[1]) for name, match in found.items() if match}


if __name__ == "__main__":
    _serve(iter(sys.stdin))
