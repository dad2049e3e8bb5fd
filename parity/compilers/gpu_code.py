"""What a GPU kernel's machine code says: registers, spills, instructions, what its dots became, how many warps fit.

NVIDIA: the disassembly of the cubin (SASS). AMD: the assembly that becomes the code object, instruction by instruction.
"""

import re
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass


class UnknownCode(ValueError):
    """The text is not in a format that this module reads."""


@dataclass(frozen=True)
class MachineCode:
    """A kernel's machine code.

    code_bytes: instructions, with the padding behind them. registers: 32-bit vector registers of a thread, on AMD with
    the accumulation registers among them. spill_bytes: memory of a thread for what the registers do not hold.
    instructions: how often each stands in the code, by its name without modifiers. dot_kinds: matrix instructions by
    the type of their operands (two types: `a x b`), and as "fma" the fused multiply-adds of single float32 numbers.
    barriers: of all threads of a block, how often each line of the source ("file.py:7") has one.
    scalar_registers, accumulation_registers, spilled_registers (vector registers): AMD alone says them.
    """

    code_bytes: int
    registers: int
    spill_bytes: int
    instructions: Mapping[str, int]
    dot_kinds: Mapping[str, int]
    barriers: Mapping[str, int]
    scalar_registers: int | None = None
    accumulation_registers: int | None = None
    spilled_registers: int | None = None


@dataclass(frozen=True)
class Limits:
    """What runs at once on one SM (NVIDIA) or CU (AMD), each of four partitions with 512 registers a thread.

    warps (AMD: waves) and blocks; shared memory in bytes, that of one block, what the system takes of each block and
    the step it is given out in.
    """

    warps: int
    blocks: int
    shared_bytes: int
    block_shared_bytes: int
    system_bytes: int
    shared_step: int


LIMITS = {
    # CUDA C++ Programming Guide, "Technical Specifications per Compute Capability".
    "sm_80": Limits(64, 32, 164 << 10, 163 << 10, 1 << 10, 128),
    "sm_90": Limits(64, 32, 228 << 10, 227 << 10, 1 << 10, 128),
    "sm_100": Limits(64, 32, 228 << 10, 227 << 10, 1 << 10, 128),
    "sm_120": Limits(48, 24, 100 << 10, 99 << 10, 1 << 10, 128),
    # LLVM, "User Guide for AMDGPU Backend" (LDS and its granularity) and GCNSubtarget (waves and work-groups of a CU).
    "gfx942": Limits(32, 16, 64 << 10, 64 << 10, 0, 512),
    "gfx950": Limits(32, 16, 160 << 10, 160 << 10, 0, 1280),
}
PARTITIONS = 4
PARTITION_REGISTERS = 512  # per thread; NVIDIA: 65536 32-bit registers of an SM / (4 partitions x 32 threads)
REGISTER_STEP = 8  # per thread
TENSOR_COLUMNS = 512  # of the tensor memory of an SM, sm_100 (PTX ISA, "Tensor Memory")

_EXACT_IN = {
    "float32": {"float32"},
    "bfloat16": {"bfloat16"},
    "float16": {"float16"},
    "float8_e4m3fn": {"float8_e4m3fn", "float16", "bfloat16"},
    "float8_e5m2": {"float8_e5m2", "float16", "bfloat16"},
    "int8": {"int8"},
}
"""Operand types of matrix instructions that hold every value of a dtype."""

_SASS_ADDRESS = re.compile(r"^\s+/\*([0-9a-f]{4,})\*/")
_SASS = re.compile(r"^\s+/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+\s+)?([A-Z][\w.]*)[^;]*;")
_SASS_BYTES = 16
_SASS_DTYPES = {
    "BF16": "bfloat16", "TF32": "tf32", "S8": "int8", "U8": "uint8", "S4": "int4", "U4": "uint4",
    "E4M3": "float8_e4m3fn", "E5M2": "float8_e5m2", "E2M3": "float6_e2m3fn", "E3M2": "float6_e3m2fn",
    "E2M1": "float4_e2m1fn",
}  # fmt: skip
# Operand types in the instruction descriptor of tcgen05.mma (PTX ISA, "Instruction descriptor"), by kind.
_NARROW_FLOATS = {0: "float8_e4m3fn", 1: "float8_e5m2", 3: "float6_e2m3fn", 4: "float6_e3m2fn", 5: "float4_e2m1fn"}
_TCGEN05_DTYPES = {
    "f16": {0: "float16", 1: "bfloat16"},
    "tf32": {2: "tf32"},
    "i8": {0: "uint8", 1: "int8"},
    "f8f6f4": _NARROW_FLOATS,
    "mxf8f6f4": _NARROW_FLOATS,
}
_TCGEN05 = re.compile(r"\btcgen05\.mma(?:\.sp)?\.cta_group::\d\.kind::(\w+)\S*\s+\[[^]]*\], [^,]+, [^,]+, (%r\d+)")

_GCN = re.compile(r"^\t([a-z]\w+)(.*)$", re.MULTILINE)
_GCN_ENCODING = re.compile(r"_(?:e32|e64|dpp|sdwa)$")
_GCN_MATRIX = re.compile(r"v_s?mfmac?_(?:scale_)?[fi]\d+_\d+x\d+x\d+_?(\w+?)(?:_1k)?$|v_dot\d+c?_\w\d+_(\w+)$")
_GCN_FMA = re.compile(r"v_(?:pk_)?(?:fma|fmac|fmamk|fmaak|mad|mac)_f32$")
_SOURCE_FILE = re.compile(r'^\s+\.file\s+(\d+)\s.*?([^"/]+)"$', re.MULTILINE)
_SOURCE_LINE = re.compile(r"\s+\.loc\s+(\d+) (\d+) ")
_GCN_DTYPES = {
    "bf16": "bfloat16", "f16": "float16", "f32": "float32", "xf32": "tf32", "f64": "float64", "i8": "int8",
    "i4": "int4", "u8": "uint8", "u4": "uint4",
}  # fmt: skip
_GCN_NARROW_FLOATS = dict(zip(range(5), [_NARROW_FLOATS[i] for i in (0, 1, 3, 4, 5)], strict=True))


def dot_operands(dot_kinds: Mapping[str, int]) -> set[str]:
    """The types that the matrix unit multiplies, of `MachineCode.dot_kinds`; none where it is not used."""
    return {operand for kind in dot_kinds if kind != "fma" for operand in kind.split(" x ")}


def keeps_dot(dot: str, dtype: str, dot_kinds: Mapping[str, int]) -> bool:
    """Whether machine code with these `MachineCode.dot_kinds` keeps a contract's dot for operands of a dtype.

    dot as in `parity.Contract`: `native` and `ieee` take every product exactly; of `bf16x1`, `bf16x3`, `bf16x6` only
    the type of the operands is in the code, not how many passes make one product. False where there is no dot at all.
    Raises ValueError for a dot or a dtype that is not known.
    """
    if dot in ("native", "ieee"):
        if dtype not in _EXACT_IN:
            raise ValueError(f"dtype must be one of {', '.join(_EXACT_IN)}, got {dtype!r}")
        kept = _EXACT_IN[dtype]
    elif dot in ("bf16x1", "bf16x3", "bf16x6", "tf32"):
        kept = {"tf32" if dot == "tf32" else "bfloat16"}
    else:
        raise ValueError(f"dot must be native, ieee, bf16x1, bf16x3, bf16x6 or tf32, got {dot!r}")
    operands = dot_operands(dot_kinds)
    return operands <= kept and (bool(operands) or (dot in ("native", "ieee") and "fma" in dot_kinds))


def occupancy(
    limits: Limits, *, warps: int, registers: int, shared_bytes: int, tensor_columns: int = 0
) -> tuple[int, str]:
    """(warps of a kernel that one SM or CU holds at most, what bounds them); 0 warps where not one block fits.

    warps and shared_bytes of a block, registers of a thread; tensor_columns of a block's tensor memory (sm_100).
    """
    shared = limits.system_bytes + _round_up(shared_bytes, limits.shared_step)
    fits = shared_bytes <= limits.block_shared_bytes
    blocks = {
        "warps": limits.warps // warps,
        "blocks": limits.blocks,
        "registers": PARTITIONS * (PARTITION_REGISTERS // _round_up(max(registers, 1), REGISTER_STEP)) // warps,
        "shared memory": (limits.shared_bytes // shared if shared else limits.blocks) if fits else 0,
        "tensor memory": TENSOR_COLUMNS // tensor_columns if tensor_columns else limits.blocks,
    }
    bound = min(blocks, key=lambda name: blocks[name])
    return blocks[bound] * warps, bound


def read_nvidia(report: str, ptx: str, kernel: str) -> MachineCode:
    """The machine code in the output of `cuobjdump -sass -res-usage` for a cubin.

    ptx is what the cubin was made of: the operand types of tcgen05.mma are data to the machine code, and named there.
    Raises UnknownCode.
    """
    usage = re.search(rf"Function {re.escape(kernel)}:\s+REG:(\d+) STACK:(\d+) ", report)
    if usage is None:
        raise UnknownCode(f"no resource usage of {kernel} in the report on its machine code")
    mnemonics = list(_sass(report))
    names = Counter(mnemonic.partition(".")[0] for mnemonic in mnemonics)
    tcgen05 = Counter(_tcgen05(ptx))
    if bool(tcgen05) != any(_is_tcgen05(name) for name in names):
        raise UnknownCode("tcgen05.mma must be in both the PTX and the machine code, or in neither")
    kinds = tcgen05 + Counter(kind for kind in map(_sass_kind, mnemonics) if kind)
    fmas = names["FFMA"] + names["FFMA32I"] + 2 * names["FFMA2"]
    return MachineCode(
        code_bytes=_SASS_BYTES * len(mnemonics),
        registers=int(usage[1]),
        # A kernel has no local arrays of its own: what lies on its stack was spilled.
        spill_bytes=int(usage[2]),
        instructions=dict(sorted(names.items())),
        dot_kinds=_with_fmas(kinds, fmas),
        barriers=_barriers(ptx, "bar.sync"),
    )


def read_amd(assembly: str, target: str) -> MachineCode:
    """The machine code in the assembly (amdgcn) of a kernel for target ("gfx942", "gfx950"). Raises UnknownCode."""

    def number(pattern: str) -> int:
        found = re.search(pattern, assembly, re.MULTILINE)
        if found is None:
            raise UnknownCode(f"nothing matches {pattern} in the assembly")
        return int(found[1])

    instructions = [(_GCN_ENCODING.sub("", name), operands) for name, operands in _GCN.findall(assembly)]
    names = Counter(name for name, _ in instructions)
    if not names["s_endpgm"]:
        raise UnknownCode("the assembly has no s_endpgm")
    kinds = Counter(kind for kind in (_gcn_kind(*instruction, target) for instruction in instructions) if kind)
    fmas = sum(count * (2 if "_pk_" in name else 1) for name, count in names.items() if _GCN_FMA.match(name))
    return MachineCode(
        code_bytes=number(r"^; codeLenInByte = (\d+)"),
        registers=number(r"^ +\.vgpr_count: +(\d+)"),
        spill_bytes=number(r"^ +\.private_segment_fixed_size: +(\d+)"),
        instructions=dict(sorted(names.items())),
        dot_kinds=_with_fmas(kinds, fmas),
        barriers=_barriers(assembly, "s_barrier"),
        scalar_registers=number(r"^ +\.sgpr_count: +(\d+)"),
        accumulation_registers=number(r"^ +(?:- )?\.agpr_count: +(\d+)"),
        spilled_registers=number(r"^ +\.vgpr_spill_count: +(\d+)"),
    )


def _sass(report: str) -> Iterable[str]:
    """The instructions with their modifiers; every function counts its addresses from 0."""
    expected = 0
    for line in report.splitlines():
        address = _SASS_ADDRESS.match(line)
        if address is None:
            continue
        instruction = _SASS.match(line)
        if instruction is None or int(address[1], 16) not in (0, expected):
            raise UnknownCode(f"not the instruction at {expected:#x}: {line.strip()[:80]}")
        expected = int(address[1], 16) + _SASS_BYTES
        yield instruction[1]
    if not expected:
        raise UnknownCode("no instructions in the report on the machine code")


def _barriers(assembly: str, mnemonic: str) -> dict[str, int]:
    """How often a line of the source has an instruction, in assembly with the places (`.loc`) that it comes from."""
    files, found, line = dict(_SOURCE_FILE.findall(assembly)), Counter[str](), "?"
    for text in assembly.splitlines():
        if place := _SOURCE_LINE.match(text):
            line = f"{files.get(place[1], '?')}:{place[2]}"
        elif text.split(maxsplit=1)[:1] == [mnemonic]:
            found[line] += 1
    return dict(sorted(found.items()))


def _is_tcgen05(name: str) -> bool:
    return name.startswith("UTC") and name.endswith("MMA")


def _sass_kind(mnemonic: str) -> str | None:
    """The operand types of a matrix instruction, `HGMMA.64x128x16.F32.BF16`; None for any other."""
    name, *modifiers = mnemonic.split(".")
    if not name.endswith("MMA") or _is_tcgen05(name):
        return None
    unit = name.removesuffix("MMA").removesuffix("G")
    types = [_SASS_DTYPES[modifier] for modifier in modifiers if modifier in _SASS_DTYPES]
    if unit == "D":
        return "float64"
    if unit == "H" and len(types) < 2 and {"F16", "F32"} & {*modifiers}:
        return types[0] if types else "float16"
    if unit in ("Q", "O", "I") and len(types) >= 2:
        return _pair(*types[:2])
    raise UnknownCode(f"a matrix instruction of an unknown kind: {mnemonic}")


def _tcgen05(ptx: str) -> Iterable[str]:
    constants = dict(re.findall(r"\bmov\.b32\s+(%r\d+), (-?\d+);", ptx))
    calls = _TCGEN05.findall(ptx)
    if len(calls) != len(re.findall(r"\btcgen05\.mma\.", ptx)):
        raise UnknownCode("a tcgen05.mma in the PTX is of an unknown form")
    for kind, register in calls:
        dtypes = _TCGEN05_DTYPES.get(kind, {})
        try:
            descriptor = int(constants[register])
            yield _pair(dtypes[descriptor >> 7 & 7], dtypes[descriptor >> 10 & 7])
        except KeyError:
            raise UnknownCode(f"tcgen05.mma of kind {kind}: operand types not known from {register}") from None


def _gcn_kind(name: str, operands: str, target: str) -> str | None:
    """The operand types of a matrix or dot instruction, `v_mfma_f32_32x32x8_bf16`; None for any other."""
    found = _GCN_MATRIX.match(name)
    if found is None:
        if "mfma" in name or name.startswith("v_dot"):
            raise UnknownCode(f"a matrix instruction of an unknown kind: {name}")
        return None
    dtype = found[1] or found[2]
    # MI300's 8-bit floats have no infinities and no -0; MI350's are those of the OCP.
    variant = "fnuz" if target == "gfx942" else ""
    narrow = {"fp8": "float8_e4m3" + (variant or "fn"), "bf8": "float8_e5m2" + variant}
    try:
        if dtype == "f8f6f4":
            chosen = [re.search(rf"\b{field}:(\d)", operands) for field in ("cbsz", "blgp")]
            return _pair(*(_GCN_NARROW_FLOATS[int(choice[1]) if choice else 0] for choice in chosen))
        if dtype in _GCN_DTYPES:
            return _GCN_DTYPES[dtype]
        return _pair(*(narrow[part] for part in dtype.split("_")))
    except (KeyError, TypeError):
        raise UnknownCode(f"a matrix instruction of unknown operands: {name} {operands.strip()}") from None


def _pair(first: str, second: str) -> str:
    return first if first == second else f"{first} x {second}"


def _with_fmas(kinds: Mapping[str, int], fmas: int) -> dict[str, int]:
    return dict(sorted(kinds.items())) | ({"fma": fmas} if fmas else {})


def _round_up(value: int, step: int) -> int:
    return -(-value // step) * step
