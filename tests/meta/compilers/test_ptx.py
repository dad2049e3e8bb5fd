"""The GPU compilers' report: each way in which a kernel fails is told apart, and figures are those of the machine code.

fixtures/ptx has real output for one small dot on most targets, less line tables and the encodings of instructions.
"""

import os
import re
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path

import pytest

from parity.compilers import cache
from parity.compilers.gpu_code import LIMITS, UnknownCode, keeps_dot, occupancy, read_amd, read_nvidia
from parity.compilers.ptx import TARGETS, Case, compile_kernels, deviations

FIXTURES = Path(__file__).parent / "fixtures" / "ptx"
NVIDIA = {
    # fixture: registers, bytes and kinds, counted in the file by other means
    "tf32-sm_80": (70, 360 * 16, {"tf32": 28}),
    "float32-sm_90": (64, 280 * 16, {"fma": 128}),
    "bfloat16-sm_90": (36, 248 * 16, {"bfloat16": 7}),
    "float8_e5m2-sm_100": (39, 304 * 16, {"float8_e5m2": 2}),
}
AMD = {
    "float32-gfx942": (32, 684, {"float32": 4}),
    "float8_e5m2-gfx950": (38, 848, {"float8_e5m2": 1}),
}


def text(name):
    return (FIXTURES / name).read_text()


def nvidia(name, report=lambda text: text, ptx=lambda text: text):
    source = FIXTURES / f"{name}.ptx"
    return read_nvidia(report(text(f"{name}.sass")), ptx(source.read_text() if source.exists() else ""), "dot")


@pytest.mark.parametrize("name", NVIDIA)
def test_reads_nvidia(name):
    code = nvidia(name)
    assert (code.registers, code.code_bytes, code.dot_kinds) == NVIDIA[name]
    assert code.spill_bytes == 0
    assert sum(code.instructions.values()) * 16 == code.code_bytes


@pytest.mark.parametrize("name", AMD)
def test_reads_amd(name):
    assembly, target = text(f"{name}.amdgcn"), name.split("-")[1]
    code = read_amd(assembly, target)
    assert (code.registers, code.code_bytes, code.dot_kinds) == AMD[name]
    assert (code.spill_bytes, code.spilled_registers) == (0, 0)
    # The compiler's own bound, in waves of each of four SIMDs.
    (waves,) = re.findall(r"^; Occupancy: (\d+)", assembly, re.MULTILINE)
    assert occupancy(LIMITS[target], warps=4, registers=code.registers, shared_bytes=0) == (4 * int(waves), "warps")


@pytest.mark.parametrize(
    ("mnemonic", "kind"),
    [
        ("HMMA.16816.F32", "float16"),
        ("HMMA.16816.F16", "float16"),
        ("HGMMA.64x128x8.F32.TF32", "tf32"),
        ("QGMMA.64x128x32.F32.E4M3.E4M3", "float8_e4m3fn"),
        ("QMMA.16832.F32.E4M3.E5M2", "float8_e4m3fn x float8_e5m2"),
        ("QMMA.SF.16832.F32.E4M3.E4M3.E8", "float8_e4m3fn"),
        ("IMMA.16832.S8.S8.SAT", "int8"),
        ("IGMMA.64x128x32.S8.S8", "int8"),
        ("DMMA.8x8x4", "float64"),
    ],
)
def test_knows_sass(mnemonic, kind):
    code = nvidia("bfloat16-sm_90", lambda report: report.replace("HGMMA.64x16x16.F32.BF16", mnemonic))
    assert code.dot_kinds == {kind: 7}


@pytest.mark.parametrize(
    ("instruction", "kind"),
    [
        ("v_mfma_f32_32x32x4_xf32 ", "tf32"),
        ("v_mfma_f32_32x32x8_bf16 ", "bfloat16"),
        ("v_mfma_f32_32x32x8bf16_1k ", "bfloat16"),
        ("v_mfma_i32_32x32x16_i8 ", "int8"),
        ("v_mfma_f64_16x16x4_f64 ", "float64"),
        ("v_mfma_f32_32x32x16_fp8_bf8 ", "float8_e4m3fnuz x float8_e5m2fnuz"),
        ("v_smfmac_f32_16x16x32_f16 ", "float16"),
        ("v_dot2_f32_f16 ", "float16"),
        ("v_dot4c_i32_i8_dpp ", "int8"),
        ("v_fmac_f32_e32 ", "fma"),
        ("v_mfma_scale_f32_32x32x64_f8f6f4 ", "float8_e4m3fn"),
    ],
)
def test_knows_amdgcn(instruction, kind):
    assembly = text("float32-gfx942.amdgcn").replace("v_mfma_f32_16x16x4_f32 ", instruction)
    assert read_amd(assembly, "gfx942").dot_kinds == {kind: 4}


def test_barriers_are_counted_by_the_line_that_they_come_from():
    """Of the last place that is named before one, whose file may be named after."""
    place = "\t.loc\t2 7 13                        ; kernel.py:7:13\n"
    barriers = "\ts_barrier\n\ts_waitcnt lgkmcnt(0)\n\ts_barrier\n\t.loc\t1 9 2\n\ts_barrier\n"
    files = '\t.file\t1 "/a" "other.py"\n\t.file\t2 "/a/b/kernel.py"\n'
    assembly = text("float32-gfx942.amdgcn").replace(
        "\ts_endpgm", f"\ts_barrier\n{place}{barriers}\ts_endpgm\n{files}", 1
    )
    assert read_amd(assembly, "gfx942").barriers == {"?": 1, "kernel.py:7": 2, "other.py:9": 1}
    assert sum(nvidia("float8_e5m2-sm_100").barriers.values()) == text("float8_e5m2-sm_100.ptx").count("bar.sync")


@pytest.mark.parametrize(
    ("report", "reason"),
    [
        (lambda t: t.replace("HGMMA.64x16x16.F32.BF16", "XMMA.64x16x16.F32"), "XMMA"),
        (lambda t: t.replace("HGMMA.64x16x16.F32.BF16", "HGMMA.64x16x16"), "HGMMA.64x16x16"),
        (lambda t: t.replace("        /*0100*/", "        /*0104*/"), "not the instruction at 0x100"),
        (lambda t: "\n".join(line for line in t.splitlines() if "/*0100*/" not in line), "at 0x100"),
        (lambda t: t.replace("HGMMA.64x16x16.F32.BF16 ", "???? "), r"\?\?\?\?"),
        (lambda t: t.replace("Function dot:", "Function other:"), "resource usage of dot"),
        (lambda t: t.partition("code for")[0], "no instructions"),
        (lambda t: "", "resource usage"),
        (lambda t: t.replace("HGMMA.64x16x16.F32.BF16 ", "UTCHMMA "), "in neither"),
    ],
)
def test_unknown_sass_is_an_error(report, reason):
    with pytest.raises(UnknownCode, match=reason):
        nvidia("bfloat16-sm_90", report)


@pytest.mark.parametrize(
    ("ptx", "reason"),
    [
        (lambda t: t.replace("kind::f8f6f4", "kind::new"), "kind new"),
        (lambda t: re.sub(r"mov\.b32(\s+%r\d+), \d+;", r"add.s32\1, %r1, %r2;", t), "operand types not known"),
        (lambda t: t.replace("tcgen05.mma.cta_group::1", "tcgen05.mma.ws.cta_group::1"), "unknown form"),
        (lambda t: "", "in neither"),
    ],
)
def test_unknown_ptx_is_an_error(ptx, reason):
    with pytest.raises(UnknownCode, match=reason):
        nvidia("float8_e5m2-sm_100", ptx=ptx)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda t: t.replace("v_mfma_f32_16x16x4_f32", "v_mfma_f32_16x16x4_new"), "v_mfma_f32_16x16x4_new"),
        (lambda t: t.replace("v_mfma_f32_16x16x4_f32", "v_wmfma"), "v_wmfma"),
        (lambda t: t.replace("s_endpgm", "s_trap"), "s_endpgm"),
        (lambda t: t.partition("\t.amdgpu_metadata")[0], "vgpr_count"),
        (lambda t: t.replace("codeLenInByte", "codeLen"), "codeLenInByte"),
        (lambda t: "", "s_endpgm"),
    ],
)
def test_unknown_assembly_is_an_error(change, reason):
    with pytest.raises(UnknownCode, match=reason):
        read_amd(change(text("float32-gfx942.amdgcn")), "gfx942")


@pytest.mark.parametrize(
    ("target", "resources", "expected"),
    [
        ("sm_80", dict(warps=4, registers=32, shared_bytes=0), (64, "warps")),
        ("sm_80", dict(warps=4, registers=128, shared_bytes=0), (16, "registers")),
        ("sm_80", dict(warps=4, registers=129, shared_bytes=0), (12, "registers")),
        ("sm_80", dict(warps=8, registers=255, shared_bytes=0), (8, "registers")),
        ("sm_80", dict(warps=1, registers=16, shared_bytes=0), (32, "blocks")),
        ("sm_80", dict(warps=4, registers=32, shared_bytes=81 << 10), (8, "shared memory")),  # 2 x (81 + 1) KiB
        ("sm_80", dict(warps=4, registers=32, shared_bytes=(81 << 10) + 1), (4, "shared memory")),
        ("sm_80", dict(warps=4, registers=32, shared_bytes=163 << 10), (4, "shared memory")),
        ("sm_80", dict(warps=4, registers=32, shared_bytes=(163 << 10) + 1), (0, "shared memory")),
        ("sm_100", dict(warps=4, registers=32, shared_bytes=0, tensor_columns=256), (8, "tensor memory")),
        ("sm_120", dict(warps=4, registers=32, shared_bytes=0), (48, "warps")),
        ("sm_90", dict(warps=32, registers=128, shared_bytes=0), (0, "registers")),
        ("gfx942", dict(warps=4, registers=259, shared_bytes=0), (4, "registers")),
        ("gfx950", dict(warps=4, registers=64, shared_bytes=70 << 10), (8, "shared memory")),
    ],
)
def test_occupancy(target, resources, expected):
    assert occupancy(LIMITS[target], **resources) == expected


@pytest.mark.parametrize(
    ("dot", "dtype", "kinds", "kept"),
    [
        ("ieee", "float32", {"fma": 9}, True),
        ("ieee", "float32", {"float32": 9}, True),
        ("ieee", "float32", {"fma": 9, "tf32": 1}, False),
        ("ieee", "float32", {"bfloat16": 9}, False),
        ("ieee", "float32", {}, False),
        ("native", "bfloat16", {"bfloat16": 9, "fma": 1}, True),
        ("native", "bfloat16", {"float16": 9}, False),
        ("native", "float8_e4m3fn", {"float16": 9}, True),
        ("native", "float8_e4m3fn", {"float8_e4m3fn x float8_e5m2": 9}, False),
        ("native", "float8_e4m3fn", {"float8_e4m3fnuz": 9}, False),
        ("native", "int8", {"bfloat16": 9}, False),
        ("bf16x3", "float32", {"bfloat16": 9}, True),
        ("bf16x3", "float32", {"fma": 9}, False),
        ("tf32", "float32", {"tf32": 9}, True),
        ("tf32", "float32", {"fma": 9}, False),
    ],
)
def test_keeps_dot(dot, dtype, kinds, kept):
    assert keeps_dot(dot, dtype, kinds) is kept


def test_keeps_dot_knows_its_words():
    with pytest.raises(ValueError, match=r"dot must be .*'fast'"):
        keeps_dot("fast", "float32", {})
    with pytest.raises(ValueError, match=r"dtype must be .*'float80'"):
        keeps_dot("ieee", "float80", {})


# What the compilers make of kernels.

needs_triton = pytest.mark.skipif(find_spec("triton") is None, reason="Triton is not installed: pip install triton")


def dot(target, pointer="*fp32", precision="ieee", tile=(32, 32, 32), **options):
    tm, tn, tk = tile
    arguments = dict(lhs=pointer, rhs=pointer, out="*fp32", K=4096, TM=tm, TN=tn, TK=tk, PRECISION=precision)
    return Case("compiler_kernels:dot", TARGETS[target], arguments, dict(num_warps=4, num_stages=2) | options)


def other(kernel, target, **arguments):
    return Case(kernel, TARGETS[target], arguments, {})


CASES = {
    "ieee": dot("sm_80"),
    "ieee-amd": dot("gfx942"),
    "tf32": dot("sm_80", precision="tf32"),
    "tf32-amd": dot("gfx942", precision="tf32"),
    "bfloat16": dot("sm_90", "*bf16", tile=(64, 32, 32)),
    "bfloat16-blackwell": dot("sm_100", "*bf16", tile=(128, 32, 32)),
    "spills": dot("sm_80", tile=(64, 64, 16), maxnreg=32),
    "too large": dot("sm_120", "*bf16", tile=(64, 64, 64), num_stages=8),
    "fp8": dot("sm_80", "*fp8e4nv"),
    "no tf32": dot("gfx950", precision="tf32"),
    "in a function": other("compiler_kernels:refused_in_a_function", "sm_90", out="*fp32"),
    "assembly": other("compiler_kernels:bad_assembly", "sm_90", out="*i32"),
    "assembly-amd": other("compiler_kernels:bad_assembly", "gfx942", out="*i32"),
    "no argument": other("compiler_kernels:bad_assembly", "sm_90"),
    "crash": other("aborting:kernel", "sm_90"),
    "after the crash": other("compiler_kernels:no_such_kernel", "sm_90"),
}


@pytest.fixture
def kernels(monkeypatch, tmp_path):
    """The kernels of the fixtures are there to import, and nothing is kept from earlier runs."""
    monkeypatch.syspath_prepend(FIXTURES)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path


@pytest.fixture(scope="module")
def compiled(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(FIXTURES)
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        return dict(zip(CASES, compile_kernels(list(CASES.values())), strict=True))


@needs_triton
@pytest.mark.parametrize("scales", [pytest.param(None, marks=pytest.mark.full), "*bf16"])
def test_a_field_of_a_struct_is_compiled_as_an_argument_alone_is(kernels, scales):
    operand, given = dict(data="*fp32", scales=scales, size=4096), dict(factor=0.5, BLOCK=1024)
    alone = other("compiler_kernels:scale", "sm_90", x=operand["data"], scales=scales, size=4096, **given)
    struct = other("compiler_kernels:scale_operand", "sm_90", x=operand, **given)
    expected, found = compile_kernels([alone, struct])
    assert found.error is None
    assert found.instructions == expected.instructions


@needs_triton
@pytest.mark.parametrize(
    ("name", "contract", "dtype", "kinds"),
    [
        ("ieee", "ieee", "float32", {"fma"}),
        ("ieee-amd", "ieee", "float32", {"float32"}),
        ("tf32", "tf32", "float32", {"tf32"}),
        ("tf32-amd", "tf32", "float32", {"tf32"}),
        ("bfloat16", "native", "bfloat16", {"bfloat16"}),
        ("bfloat16-blackwell", "native", "bfloat16", {"bfloat16"}),
    ],
)
def test_dots_are_what_was_asked_for(compiled, name, contract, dtype, kinds):
    result = compiled[name]
    assert result.outcome == "compiled", result.error
    assert {*result.dot_kinds} == kinds
    assert result.keeps_dot(contract, dtype)
    assert not result.keeps_dot({"ieee": "tf32", "tf32": "ieee", "native": "tf32"}[contract], dtype)
    assert result.spill_bytes == 0
    assert result.resident_warps >= 4


@needs_triton
def test_spills_are_seen(compiled):
    result = compiled["spills"]
    assert (result.outcome, result.registers) == ("compiled", 32)
    assert result.spill_bytes > 500
    assert result.instructions["STL"] > 50
    assert result.instructions["LDL"] > 50
    assert "STL" not in compiled["ieee"].instructions


@needs_triton
def test_what_fits_no_chip_is_too_large(compiled):
    result = compiled["too large"]
    assert result.outcome == "too large"
    assert result.shared_bytes > LIMITS["sm_120"].block_shared_bytes
    assert result.error.startswith("too much shared memory for one block: 4 warps with ")
    assert (result.resident_warps, result.bound_by) == (0, "shared memory")


@needs_triton
@pytest.mark.parametrize(
    ("name", "error", "line"),
    [
        ("fp8", "type fp8e4nv not supported in this architecture", "def dot("),
        ("no tf32", "input_precision must be one of", "sums = tl.dot("),
        ("in a function", "incompatible dimensions at index 0: 16 and 32", "# the line that is at fault"),
        ("assembly", "Unknown modifier '.such'", None),
        ("assembly-amd", "invalid instruction", None),
        ("no argument", "KeyError: 'out'", None),
        ("after the crash", "no attribute 'no_such_kernel'", None),
    ],
)
def test_refusals_have_the_compilers_reason(compiled, name, error, line):
    result = compiled[name]
    assert result.outcome == "refused"
    assert error in result.error
    assert "\n" not in result.error
    assert error in result.log
    assert result.registers is None
    if line is None:
        assert result.location is None
    else:
        file, _, number = result.location.rpartition(":")
        assert file == str(FIXTURES / "compiler_kernels.py")
        assert line in Path(file).read_text().splitlines()[int(number) - 1]


@needs_triton
def test_limits_are_strict_both_ways(compiled):
    problems = {name: compiled[name].error for name in ("ieee", "fp8")}
    assert deviations(problems, {"fp8": "type fp8e4nv not supported"}) == []
    (undeclared,) = deviations(problems, {})
    assert undeclared.startswith("fp8: ")
    (other_reason,) = deviations(problems, {"fp8": "shared memory"})
    assert other_reason.endswith("(declared: shared memory)")
    compiles_now, unmatched = sorted(
        deviations(problems, {"fp8": "not supported", "ieee": "not supported", "none": "not supported"})
    )
    assert compiles_now.startswith("ieee: nothing is wrong any more")
    assert unmatched.startswith("none is no case")


@needs_triton
def test_a_crash_keeps_its_log(compiled):
    result = compiled["crash"]
    assert result.outcome == "crashed"
    assert result.error == "the compiler ended with signal SIGABRT: LLVM ERROR: Cannot select: something"
    assert "LLVM ERROR" in result.log


@pytest.mark.full
def test_a_struct_compiles_as_its_fields(kernels):
    """A field that is None or 1 is a constant, as an argument is, and pointers are aligned."""
    plain = dict(x="*fp32", scale="*fp32", out="*fp32", rows=1, columns=96, BLOCK=128)
    structs = dict(
        operand=dict(x="*fp32", scale="*fp32"), out="*fp32", sizes=dict(rows=1, columns=96), bias=dict(x=None),
        TILE=dict(block=128),
    )  # fmt: skip
    cases = (
        other("compiler_kernels:copy", "sm_90", **plain),
        other("compiler_kernels:copy_of_structs", "sm_90", **structs),
    )
    of_fields, of_structs = compile_kernels(cases)
    assert (of_structs.error, of_structs.registers) == (None, of_fields.registers)
    assert of_structs.instructions == of_fields.instructions


@pytest.mark.full
@needs_triton
def test_a_hang_costs_its_case_alone(kernels):
    endless = other("compiler_kernels:endless", "sm_90", out="*fp32")
    hung, after = compile_kernels([endless, other("compiler_kernels:no_such_kernel", "sm_90")], timeout=4)
    assert (hung.outcome, hung.error) == ("timed out", "the compiler took more than 4 s")
    assert after.outcome == "refused"


@pytest.mark.full
@needs_triton
def test_a_corrupted_object_is_unreadable(kernels, monkeypatch):
    import triton

    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    damaging = kernels / "cuobjdump"
    damaging.write_text(
        f'#!/bin/sh\ncase "$*" in *.cubin) truncate -s 2000 "$3" ;; esac\nPATH={tool.parent}:$PATH exec {tool} "$@"\n'
    )
    damaging.chmod(0o755)
    monkeypatch.setenv("TRITON_CUOBJDUMP_PATH", str(damaging))
    (result,) = compile_kernels([dot("sm_80")])
    assert result.outcome == "unreadable"
    assert result.error.startswith("cuobjdump cannot read the cubin: ")
    assert result.registers is None


@pytest.mark.full
@needs_triton
def test_results_are_kept_and_the_same_again(kernels):
    case = dot("gfx942", tile=(16, 16, 16))
    (first,) = compile_kernels([case])
    (again,) = compile_kernels([case])
    assert again == first  # to the second: it was not compiled
    for entry in (kernels / "cache" / "kernel-parity" / "ptx").iterdir():
        entry.write_bytes(entry.read_bytes()[:-1])
    compiled_anew, more_warps = compile_kernels([case, replace(case, options={"num_warps": 8})])
    assert compiled_anew.seconds != first.seconds
    assert replace(compiled_anew, seconds=first.seconds) == first
    assert more_warps.instructions != first.instructions


@needs_triton
def test_a_changed_function_is_compiled_again(kernels, monkeypatch):
    monkeypatch.syspath_prepend(kernels)
    source = (
        "import triton\nimport triton.language as tl\n\n"
        "@triton.jit\ndef value():\n    return {}\n\n"
        "@triton.jit\ndef kernel(out):\n    tl.store(out, value())\n"
    )
    stored = []
    for value in ("1.0", "tl.program_id(0).to(tl.float32)"):
        (kernels / "changing_kernel.py").write_text(source.format(value))
        (result,) = compile_kernels([other("changing_kernel:kernel", "gfx942", out="*fp32")])
        assert result.outcome == "compiled", result.error
        stored.append(result.instructions)
    assert stored[0] != stored[1]


def test_a_compiler_that_does_not_start_says_why(monkeypatch, tmp_path):
    (tmp_path / "triton.py").write_text("raise ImportError('libcuda is of another age')\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(RuntimeError, match=r"did not start: .*status 1: .*libcuda is of another age"):
        compile_kernels([dot("sm_80")])


def test_a_target_must_be_known():
    with pytest.raises(ValueError, match=r"target must be one of .* got \('cuda', 70, 32\)"):
        compile_kernels([replace(dot("sm_80"), target=("cuda", 70, 32))])


def test_the_cache_takes_no_damaged_entry(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    key = cache.digest("a", "bc")
    assert key != cache.digest("ab", "c")
    assert cache.load("ptx", key) is None
    cache.store("ptx", key, {"registers": 7})
    assert cache.load("ptx", key) == {"registers": 7}
    (entry,) = (tmp_path / "kernel-parity" / "ptx").iterdir()
    whole = entry.read_bytes()
    for damaged in (whole[:-3], whole[:-3] + b"\x08" + whole[-2:], b"", bytes(len(whole))):
        entry.write_bytes(damaged)
        assert cache.load("ptx", key) is None
    monkeypatch.setenv("XDG_CACHE_HOME", "/proc/nowhere")
    cache.store("ptx", key, 1)
    assert cache.load("ptx", key) is None


def test_the_cache_forgets_what_was_not_asked_for_longest(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    keys = [cache.digest(str(number)) for number in range(4)]
    for age, key in enumerate(keys[:3]):
        cache.store("ptx", key, bytes(1000))
        os.utime(tmp_path / "kernel-parity" / "ptx" / key, (age, age))
    assert cache.load("ptx", keys[0]) is not None  # asked for: now the youngest
    size = (tmp_path / "kernel-parity" / "ptx" / keys[0]).stat().st_size
    monkeypatch.setattr(cache, "LIMIT_BYTES", 3 * size)
    cache.store("ptx", keys[3], bytes(1000))
    assert [cache.load("ptx", key) is not None for key in keys] == [True, False, True, True]
