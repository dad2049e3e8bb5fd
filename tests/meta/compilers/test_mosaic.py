"""The TPU compiler's report: real dumps are read as by hand, and what a compiler can do wrong is told apart."""

import gzip
import json
import os
import subprocess
import sys
from dataclasses import replace
from functools import partial
from importlib.util import find_spec
from pathlib import Path

import pytest

from parity.cli import main
from parity.compilers import bundles, cache, mosaic
from parity.compilers.bundles import UnknownDump, parse
from parity.compilers.chips import CHIPS
from parity.compilers.kernels import Block, Branch, Dot, Kernel, kernels
from parity.compilers.mosaic import Abstract, Compilation, Compiled, compile_for_tpu, read_dump, roofline
from parity.compilers.programs import Program
from tests.support.waiting import until

needs_libtpu = pytest.mark.skipif(
    find_spec("libtpu") is None, reason="the TPU compiler is not installed: pip install libtpu"
)

# --------------------------------------------------------------------- real dumps: gmm, tile 512 × 1024 × 512, bfloat16

M, K, N, GROUPS, VISITS = 8192, 2048, 512, 8, 24
TM, TK, TN = 512, 1024, 512
BY_N, BY_VISIT, BY_K = frozenset([0]), frozenset([1]), frozenset([2])
GMM = Kernel(
    name="gmm",
    grid=(1, None, 2),
    operands=((), (VISITS,), (VISITS,), (GROUPS + 1,), (1,), (M, K), (GROUPS, K, N), (M, N)),
    inputs=(
        Block((M, K), (TM, TK), TM * TK * 2, (BY_VISIT, BY_K)),
        Block((GROUPS, K, N), (1, TK, TN), TK * TN * 2, (BY_VISIT, BY_K, BY_N)),
    ),
    outputs=(Block((M, N), (TM, TN), TM * TN * 2, (BY_VISIT, BY_N)),),
    dots=(Dot(TM, TK, 256, "bf16", passes=1, count=1),) * 2,
    estimated_bytes=None,
)


def dump(chip):
    with gzip.open(Path(__file__).parent / "fixtures" / "mosaic" / f"gmm-{chip}.json.gz", "rt") as file:
        return json.load(file)


def texts(chip):
    files = dump(chip)
    (program,) = (text for name, text in files.items() if name.endswith("-final_bundles.txt"))
    (utilization,) = (text for name, text in files.items() if name.endswith("-per-bundle-utilization.txt"))
    return program, utilization


def test_tpu7x_is_read_as_by_hand():
    kernel = read_dump(dump("tpu7x"), GMM, "tpu7x")
    assert GMM.steps == 32 and GMM.steps_per_block == 2
    # Two branches of the loop's 0x2a to 0x46a lead around: the compute stage 0x64 to 0x458, and in it the sum 0x84 to
    # 0x313, a whole tile's store 0x321 to 0x37b and a masked one's 0x385 to 0x440.
    loop, stage, total, whole, masked = 0x46B - 0x2A, 0x459 - 0x64, 0x314 - 0x84, 0x37C - 0x321, 0x441 - 0x385
    assert (kernel.bundles, kernel.loop_bundles) == (1135, loop)
    assert kernel.step_bundles == loop - stage + (stage - total - whole - masked) + total
    assert kernel.periodic_bundles == whole / 2
    assert (kernel.hot_bundles, kernel.hot_vmatmuls, kernel.vmatmuls) == (total, 256, {"bf16": 256})
    assert kernel.mxu_cycles == kernel.static_cycles == 256 * 8 / 2
    assert (kernel.spills, kernel.fills, kernel.unknown_loops) == (0, 0, 0)
    assert kernel.vmem_bytes == 4 * 2**20
    assert (kernel.fetch_starvation, kernel.write_starvation) == (85 / 1809, 336 / 1809)
    assert [(p.operand, p.promised, p.emitted) for p in kernel.passes] == [("bf16", 1, 1)]
    assert roofline(kernel, "tpu7x").schedule == roofline(kernel, "tpu7x").mxu == 32 * 1024


def test_v6e_is_read_as_by_hand():
    kernel = read_dump(dump("v6e"), GMM, "v6e")
    loop, stage, total, whole, masked = 0x6D6 - 0x31, 0x6C3 - 0x9F, 0x574 - 0xB8, 0x5E3 - 0x57F, 0x6AA - 0x5EA
    assert (kernel.bundles, kernel.loop_bundles) == (1756, loop)
    assert kernel.step_bundles == loop - whole - masked == loop - stage + (stage - total - whole - masked) + total
    assert kernel.static_cycles == kernel.step_bundles + whole / 2 > kernel.mxu_cycles == 1024
    assert (kernel.spills, kernel.fills) == (178, 178)
    assert kernel.spill_share == 178 / 690  # vst instructions in the dump


def test_what_bounds_a_kernel():
    def bound(chip, bytes_accessed):
        return roofline(read_dump(dump(chip), replace(GMM, estimated_bytes=bytes_accessed), chip), chip).bound

    assert bound("tpu7x", 2**20) == "MXU" and bound("v6e", 2**20) == "schedule"
    assert bound("tpu7x", 2**30) == bound("v6e", 2**30) == "HBM"


def test_slots_are_of_the_step():
    kernel = read_dump(dump("tpu7x"), GMM, "tpu7x")
    used, there = kernel.slots["MATPUSH"]
    assert there == 2 * (kernel.step_bundles + kernel.periodic_bundles)
    assert 0 < used < there
    assert kernel.slots["XLU"][0] == 0


def test_blocks_without_an_estimate_are_counted():
    lhs, rhs, out = 32 * TM * TK * 2, 32 * TK * TN * 2, 16 * TM * TN * 2
    assert GMM.hbm_bytes == lhs + rhs + out
    assert replace(GMM, estimated_bytes=7).hbm_bytes == 7


def test_a_traced_axis_has_a_step_for_each_tile_of_the_result():
    """Rows that a step reads of its neighbour's are a smaller tile of the same axis."""
    neighbour = Block((M, K), (16, TK), 16 * TK * 2, (BY_VISIT, BY_K))
    assert GMM.lengths == replace(GMM, inputs=(neighbour, *GMM.inputs)).lengths == (1, M // TM, 2)
    of_groups = Block((GROUPS, K, N), (1, TK, TN), TK * TN * 4, (BY_VISIT, BY_K, BY_N))
    assert replace(GMM, outputs=(of_groups,)).lengths == GMM.lengths  # a matrix for each group is no tile of rows


@pytest.mark.parametrize("chip, tflops", [("v4", 275), ("v5e", 197), ("v5p", 459), ("v6e", 918), ("tpu7x", 2307)])
def test_peaks_are_the_published_ones(chip, tflops):
    assert CHIPS[chip].cores * CHIPS[chip].teraflops("bf16") == pytest.approx(tflops, rel=0.002)


def test_parity_schedule_shows_a_program_in_detail(monkeypatch, capsys, pytestconfig):
    kernel = read_dump(dump("tpu7x"), GMM, "tpu7x")
    compiled = Compiled("compiled", code_bytes=200_000, kernels=(kernel,))
    program = Program("gmm", "model-bf16", "module:gmm", (), chips=("tpu7x",), work=M)
    monkeypatch.setattr("parity.cli.schedule.load", lambda root: (program,))
    monkeypatch.setattr(
        "parity.cli.schedule.compile_all", lambda *_, lines: {(program.id, "tpu7x"): compiled} if lines else {}
    )

    def output(*arguments):
        assert main(["--root", str(pytestconfig.rootpath), "schedule", "gmm-model-bf16", *arguments]) == 0
        return capsys.readouterr().out

    ((figures,),) = (line["kernels"] for line in json.loads(output("--json")))
    assert (figures["steps"], figures["static_cycles"], figures["hbm_bytes"]) == (32, 1024, GMM.hbm_bytes)
    assert (figures["fetch_starvation"], figures["write_starvation"]) == (0.047, 0.1857)
    assert figures.keys() > {"lines", "line_passes", "vmem_bytes", "passes", "slots", "spills", "fills", "hot_bundles"}
    shown = output()
    assert "tpu7x gmm: 1024 cycles a step, 32 steps" in shown and "hottest lines" in shown


CORRUPTIONS = {
    "a bundle is missing": lambda p, u: (p.replace(" 0x31a ", " 0x9999 ", 1), u),
    "cut off": lambda p, u: (p[: len(p) // 2], u),
    "empty": lambda p, u: ("", u),
    "a row is missing": lambda p, u: (p, u.rsplit("\n", 2)[0] + "\n"),
    "another column": lambda p, u: (p, u.replace("XLU,", "XLU, YLU,", 1)),
    "not a number": lambda p, u: (p, u[:-3] + "x\n"),
    "a branch to nowhere": lambda p, u: (p.replace("target = $region36", "target = $region9999"), u),
    "another kind of branch": lambda p, u: (p.replace("sbr.rel", "sbr.abs", 1), u),
    "another operand type": lambda p, u: (p.replace("vmatmul.mubr.bf16", "vmatmul.mubr.f64", 1), u),
}


@pytest.mark.parametrize("what", CORRUPTIONS)
def test_a_corrupted_dump_is_an_error(what):
    program, utilization = texts("tpu7x")
    corrupted = CORRUPTIONS[what](program, utilization)
    assert corrupted != (program, utilization)
    with pytest.raises(UnknownDump):
        bundles.schedule(parse(*corrupted), CHIPS["tpu7x"])


def test_a_kernel_that_is_not_in_the_dump_is_an_error():
    with pytest.raises(UnknownDump, match="a program of kernel tgmm"):
        read_dump(dump("tpu7x"), replace(GMM, name="tgmm"), "tpu7x")


def test_a_loop_may_begin_in_the_delay_slots_of_the_one_before():
    first, second = bundles.Part(0, 100, loop=True), bundles.Part(98, 200, loop=True)
    assert bundles.nested([first, second]) == [bundles.Part(0, 100, loop=True), bundles.Part(100, 200, loop=True)]
    with pytest.raises(UnknownDump, match="are not inside"):
        bundles.nested([bundles.Part(0, 100, loop=True), bundles.Part(50, 200, loop=True)])


def test_a_conditional_loop_may_end_in_the_delay_slots_of_its_branch():
    """What it is in ends where its branch does, and yet is around it."""
    loop = bundles.Part(10, 102, loop=True, trips=8)
    assert bundles.nested([loop, bundles.Part(10, 100)]) == [bundles.Part(10, 100, inner=[replace(loop, end=100)])]


def test_a_loop_that_loads_the_grids_index_is_not_the_grids():
    """The comment on what the grid's loop carries goes with the value, into memory and back."""
    index = "%s7 = sphi %s6, %s8 /* phi copy :: iteration index, stage = 0 */"
    loaded = "%s9 = sld [smem:[#allocation3_spill]] /* iteration index, stage = 0 */ ;; %s4 = sphi %s3, %s5"
    product = "%10 = vmatmul.mubr.bf16.gmra.mxu0 %v1"
    texts = [
        "%s3 = smov.u32 0",
        f"{index} /* Start region 1 */",
        f"{loaded} ;; {product} /* Start region 2 */",
        "%s5 = sadd.s32 1, %s4",
        "%p1 = scmp.ge.s32.totalorder %s5, 3",
        "%11 = sbr.rel (!%p1) target = $region2 /* End region 2 */",
        *[""] * 7,  # beyond the delay slots
        "%12 = sbr.rel (!%p2) target = $region1 /* End region 1 */",
        "/* exit bundle: */",
    ]
    program = "".join(f"{address:#x} : {{ {text} }}\n" for address, text in enumerate(texts))
    columns, rows = ", ".join(bundles.UNITS), "1 " * len(bundles.UNITS) + "\n"
    read = bundles.schedule(parse(program, f"\n{columns}\n{rows}UTILIZATION\n{rows * len(texts)}"), CHIPS["tpu7x"])
    assert (read.vmatmuls, read.step_bundles, read.unknown_loops) == ({"bf16": 3}, 1 + 3 * 4 + 7 + 1, 0)


def test_what_copies_an_operand_that_is_in_vmem_is_not_the_stage():
    """It may store more than a stage, which would then count with all that is rare in it."""
    used = tuple(int(unit == "VSTORE") for unit in bundles.UNITS)
    stores = [
        bundles.Bundle("{ %1 = vst [vmem:%s2] %v3" + place + " }", used)
        for place in [""] * 11 + [' /* loc("/k.py":5:1 to :9) */'] * 4 + [' /* loc("/k.py":8:1 to :9) */'] * 6 + [""]
    ]
    stage = bundles.Part(11, 21, inner=[bundles.Part(11, 15), bundles.Part(15, 21)])
    steps = bundles.Part(0, 22, loop=True, trips=None, pipelined=True, inner=[bundles.Part(1, 11), stage])
    branches = [Branch(frozenset({"/k.py:5"}), False, 1.0, "data"), Branch(frozenset({"/k.py:8"}), False, 0.0, "data")]
    program = bundles.Program(tuple(stores), used, bundles.Part(0, 22, inner=[steps]))
    read = bundles.schedule(program, CHIPS["v6e"], branches=branches)
    assert read.step_bundles == 1 + 10 + 4 + 1


def test_what_is_rare_counts_for_none_where_it_only_stores():
    """In a kernel that multiplies, stores are no work: they would count as results of every few steps."""
    store, dot = (tuple(int(name == unit) for name in bundles.UNITS) for unit in ("VSTORE", "MATMUL"))
    program = [bundles.Bundle("{ %s1 = sphi }", (0,) * len(bundles.UNITS))]
    program += [bundles.Bundle('{ %1 = vmatmul.bf16.gmra.mxu0 %v2 /* loc("/k.py":5:1 to :9) */ }', dot)] * 4
    program += [bundles.Bundle('{ %1 = vst [vmem:%s2] %v3 /* loc("/k.py":8:1 to :9) */ }', store)] * 6
    stage = bundles.Part(1, 11, inner=[bundles.Part(5, 11)])
    steps = bundles.Part(0, 11, loop=True, trips=None, pipelined=True, inner=[stage])
    rare = Branch(frozenset({"/k.py:8"}), False, 0.0, "data")
    whole = bundles.Program(tuple(program), store, bundles.Part(0, 11, inner=[steps]))
    read = bundles.schedule(whole, CHIPS["v6e"], branches=[rare])
    assert (read.step_bundles, read.periodic_bundles) == (1 + 4, 0)


def test_results_of_every_few_steps_count_where_branches_do_the_same():
    """A branch that stores as it multiplies, and a shorter one whose results are stored after it."""
    store, dot = (tuple(int(name == unit) for name in bundles.UNITS) for unit in ("VSTORE", "MATMUL"))
    dots = [bundles.Bundle("{ %1 = vmatmul.bf16.gmra.mxu0 %v2 }", dot)] * 4
    stores = [bundles.Bundle("{ %1 = vst [vmem:%s2] %v3 }", store)] * 6
    program = (bundles.Bundle("{ %s1 = sphi }", (0,) * len(bundles.UNITS)), *dots, *stores[:3], *dots, *stores)
    later = bundles.Part(8, 18, inner=[bundles.Part(8, 12), bundles.Part(12, 18)])
    stage = bundles.Part(1, 18, inner=[bundles.Part(1, 8), later])
    steps = bundles.Part(0, 18, loop=True, trips=None, pipelined=True, inner=[stage])
    whole = bundles.Program(program, store, bundles.Part(0, 18, inner=[steps]))
    read = [bundles.schedule(whole, CHIPS["v6e"], steps_per_block) for steps_per_block in (1, 4)]
    assert [(each.step_bundles, each.periodic_bundles) for each in read] == [(1 + 4 + 3, 0), (1 + 4, 6 / 4)]


# -------------------------------------------------------------------------------------------------- the compiler itself


def case(name, chip="tpu7x", dtype="bfloat16", size=1024, **options):
    arguments = (Abstract((size, size), dtype), Abstract((size, 512), dtype))
    return Compilation(f"tests.meta.compilers.pallas_kernels:{name}", chip, arguments, **options)


KERNELS = {
    "half_refused": case("half_refused"),
    "dot": case("dot"),
    "beside_xla": case("beside_xla"),
    "two_dots": case("two_dots"),
    "two_lines": case("two_lines"),
    "looped": case("looped"),
    "mostly_one": case("mostly_one"),
    "in_turns": case("in_turns"),
    "scale": case("scale"),
    "pair": case("pair"),
    "own_pipeline": case("own_pipeline"),
    "nameless": case("nameless", size=256),
    "default": case("dot", dtype="float32"),
    "exact": case("exact", dtype="float32"),
    "exact_bf16": case("exact"),
    "beyond_vmem": case("beyond_vmem", size=8192, dtype="float32"),
    "fp8_on_v4": case("dot", chip="v4", dtype="float8_e4m3fn"),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        yield


@pytest.fixture(scope="module")
def compiled(folder):
    return dict(zip(KERNELS, compile_for_tpu(list(KERNELS.values()), lines=True), strict=True))


def kernel_of(result):
    assert result.ok, result.error
    (kernel,) = result.kernels
    return kernel


@pytest.mark.full
@needs_libtpu
def test_a_dot_pass_more_is_seen(compiled):
    one, two = kernel_of(compiled["dot"]), kernel_of(compiled["two_dots"])
    assert not compiled["half_refused"].ok  # and its dump is not read for the next one
    assert [p.emitted for p in one.passes] == [1] and one.passes[0].dots == 1
    assert two.passes[0].dots == 2 and two.vmatmuls["bf16"] == 2 * one.vmatmuls["bf16"]
    assert two.mxu_cycles == 2 * one.mxu_cycles


@needs_libtpu
def test_what_xla_computes_beside_kernels_is_counted(compiled):
    alone, beside = compiled["dot"], compiled["beside_xla"]
    assert alone.xla_cycles == 0 and kernel_of(alone).static_cycles == kernel_of(beside).static_cycles
    assert beside.xla_cycles > 2 * 1024 * 1024 * 2 / CHIPS["tpu7x"].hbm_gbs * CHIPS["tpu7x"].ghz  # it reads and writes


@needs_libtpu
def test_float32_passes_are_those_of_the_precision(compiled):
    one, six = kernel_of(compiled["default"]).passes, kernel_of(compiled["exact"]).passes
    assert [(p.operand, p.promised, p.emitted) for p in one + six] == [("f32", 1, 1), ("f32", 6, 6)]


@needs_libtpu
@pytest.mark.parametrize("name, passes", [("dot", [1]), ("two_dots", [1]), ("two_lines", [1, 1]), ("exact", [6])])
def test_source_lines_share_the_step(compiled, name, passes):
    source = Path(__file__).with_name("pallas_kernels.py").read_text().splitlines()
    kernel = kernel_of(compiled[name])
    assert sum(line.bundles for line in kernel.lines) == pytest.approx(kernel.step_bundles + kernel.periodic_bundles)
    assert [line.bundles for line in kernel.lines] == sorted((line.bundles for line in kernel.lines), reverse=True)
    text = {line.place: source[int(line.place.rpartition(":")[2]) - 1] for line in kernel.lines if line.place}
    assert all(place.startswith("tests/meta/compilers/pallas_kernels.py:") for place in text)
    assert "jnp.dot" in next(text[line.place] for line in kernel.lines if line.place)
    # Both dots of two_dots are one jitted function's: JAX lowers it once.
    assert [p.emitted for p in kernel.line_passes] == passes
    assert len({p.place for p in kernel.line_passes}) == len(passes)
    assert all("jnp.dot" in text[p.place] for p in kernel.line_passes)


def test_a_dump_without_places_has_no_lines():
    kernel = read_dump(dump("tpu7x"), GMM, "tpu7x")
    assert (kernel.lines, kernel.line_passes) == ((), ())


@needs_libtpu
def test_spills_are_seen(compiled):
    assert kernel_of(compiled["dot"]).spill_share == 0
    assert kernel_of(compiled["exact"]).spill_share > 0.5


@needs_libtpu
def test_a_loop_counts_as_often_as_it_runs(compiled):
    looped = kernel_of(compiled["looped"])
    assert looped.vmatmuls == kernel_of(compiled["dot"]).vmatmuls
    assert looped.hot_vmatmuls * 4 == looped.vmatmuls["bf16"] and looped.unknown_loops == 0
    assert [p.emitted for p in looped.passes] == [1]


@needs_libtpu
def test_what_some_steps_skip_counts_for_those_that_run_it(compiled):
    dot, mostly_one = kernel_of(compiled["dot"]), kernel_of(compiled["mostly_one"])
    assert [branch.share for branch in mostly_one.call.branches] == [1 / 2, 2 / 8]  # the first clears the result
    # Depth 128 always and 384 at times are, on units 256 deep, one pass and two, where the whole 512 are two.
    assert mostly_one.vmatmuls["bf16"] / dot.vmatmuls["bf16"] == (1 + 2 * 2 / 8) / 2


@needs_libtpu
def test_what_steps_do_in_turns_counts_for_each_and_what_is_rare_for_none(compiled):
    dot, in_turns = kernel_of(compiled["dot"]), kernel_of(compiled["in_turns"])
    branches = in_turns.call.branches
    assert [branch.share for branch in branches] == [1 / 2, 1 / 2, 1 / 2, 0] and branches[2].inner[0].share == 0
    assert in_turns.vmatmuls["bf16"] / dot.vmatmuls["bf16"] == (1 + 1 / 2) / 2


@needs_libtpu
def test_a_kernel_without_dots(compiled):
    scale = kernel_of(compiled["scale"])
    assert scale.static_cycles >= scale.hot_bundles > 0
    assert (scale.vmatmuls, scale.passes, scale.call.steps) == ({}, (), 8)


@needs_libtpu
def test_kernels_are_told_apart(compiled):
    assert [(kernel.name, kernel.call.steps) for kernel in compiled["pair"].kernels] == [("matmul", 8), ("matmul", 4)]
    nameless = kernel_of(compiled["nameless"])
    assert nameless.name and nameless.call.steps == 1 and nameless.loop_bundles == nameless.bundles


@needs_libtpu
def test_a_kernel_with_its_own_pipeline(compiled):
    own = kernel_of(compiled["own_pipeline"])
    assert (own.name, own.call.grid, own.call.inputs) == ("own", (), ())
    assert [(p.operand, p.dots, p.place != "") for p in own.line_passes] == [("bf16", 1, True)]
    assert own.mxu_cycles == 8 * kernel_of(compiled["dot"]).mxu_cycles  # its loop, all of it: the same product


@needs_libtpu
def test_errors_are_the_compilers_own(compiled):
    refused, vmem, fp8 = (compiled[name] for name in ("exact_bf16", "beyond_vmem", "fp8_on_v4"))
    assert [r.outcome for r in (refused, vmem, fp8)] == ["refused", "too large", "refused"]
    assert refused.reason == "Bad lhs type"
    assert vmem.reason.startswith("XLA:TPU compile permanent error. Ran out of memory in memory space vmem")
    assert fp8.code == "E2001" and "Unsupported matmul RHS type" in fp8.reason
    source = Path(__file__).with_name("pallas_kernels.py").read_text().splitlines()
    for result in refused, fp8:
        path, _, line = result.location.rpartition(":")
        assert path.endswith("pallas_kernels.py") and "jnp.dot" in source[int(line) - 1]


@pytest.mark.full
@needs_libtpu
def test_runs_are_identical_and_cached(compiled, monkeypatch, tmp_path):
    def figures(result):
        return replace(result, seconds=0.0, cached=False)

    (again,) = compile_for_tpu([KERNELS["dot"]], lines=True)
    assert again.cached and not compiled["dot"].cached
    assert figures(again) == figures(compiled["dot"])
    for kept in (cache.folder() / "mosaic").iterdir():
        kept.write_bytes(kept.read_bytes()[:-1])
    (anew,) = compile_for_tpu([KERNELS["dot"]], lines=True)
    assert not anew.cached
    assert figures(anew) == figures(again)


@pytest.mark.full
@needs_libtpu
def test_code_that_moved_is_not_compiled_again(folder, monkeypatch, tmp_path):
    monkeypatch.syspath_prepend(tmp_path)
    source = Path(__file__).with_name("pallas_kernels.py").read_text()
    texts = {
        "first": source,
        "moved": f"# a line more\n{source}",
        "changed": source.replace("TILE = (256, 512, 512)", "TILE = (512, 512, 512)"),
    }
    for name, text in texts.items():
        (tmp_path / f"{name}.py").write_text(text)
    cases = {name: replace(KERNELS["dot"], function=f"{name}:dot") for name in texts}
    first, moved, changed, refused = compile_for_tpu([*cases.values(), KERNELS["exact_bf16"]], schedule=True)
    assert (refused.outcome, "pallas_kernels.py:" in refused.location) == ("refused", True)
    assert (first.cached, moved.cached, changed.cached) == (False, True, False)
    kernel = kernel_of(moved)
    assert (kernel.lines, kernel.line_passes) == ((), ()) and [p.emitted for p in kernel.passes] == [1]
    # Lines are where the code is now, and all other figures the same with them as without.
    for name, result in zip(cases, compile_for_tpu([cases["first"], cases["moved"]], lines=True), strict=False):
        with_lines = kernel_of(result)
        (dot,) = with_lines.line_passes
        assert not result.cached and f"{name}.py" in dot.place
        assert "jnp.dot" in texts[name].splitlines()[int(dot.place.rpartition(":")[2]) - 1]
        assert replace(with_lines, lines=(), line_passes=(), call=kernel.call) == kernel
        assert result.code_bytes == first.code_bytes


@pytest.mark.full
@needs_libtpu
def test_a_dump_that_is_not_there_is_unreadable(folder, monkeypatch):
    monkeypatch.setattr(mosaic, "DUMP", mosaic.DUMP.replace("final_bundles|static", "static"))
    (result,) = compile_for_tpu([KERNELS["dot"]], schedule=True)
    assert (result.outcome, result.kernels) == ("unreadable", ())
    assert result.reason.startswith("the dump must have a program of kernel matmul")


@pytest.mark.full
@needs_libtpu
def test_a_crash_costs_one_case(folder):
    crashed, other = compile_for_tpu([case("crashes"), KERNELS["dot"]])
    assert crashed.outcome == "crashed"
    assert crashed.error.startswith("the compiler ended with signal SIGABRT: ")
    assert "last words" in crashed.log
    assert other.ok


@needs_libtpu
def test_a_hang_costs_one_case(folder):
    (hung,) = compile_for_tpu([case("hangs")], timeout=5)
    assert (hung.outcome, hung.error) == ("timed out", "the compiler took more than 5 s")


@needs_libtpu
def test_the_compiler_ends_with_the_process_that_asked(folder):
    ask = "from tests.meta.compilers.test_mosaic import case, compile_for_tpu; compile_for_tpu([case('hangs')])"
    with subprocess.Popen(
        [sys.executable, "-c", ask], env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    ) as asks:
        children = Path(f"/proc/{asks.pid}/task/{asks.pid}/children")
        until(lambda: children.read_text())
        (compiler,) = children.read_text().split()
        asks.kill()
    until(lambda: not Path(f"/proc/{compiler}").exists())


@needs_libtpu
def test_cores(folder):
    halves, missing = compile_for_tpu([case("split", cores=2), case("split", cores=99)], schedule=True)
    assert kernel_of(halves).call.steps == 4  # of 8, on each of two cores
    assert "cores must be at most" in missing.error


def test_wrong_usage():
    with pytest.raises(ValueError, match=r"chip must be one of v4, .*got 'v3'"):
        compile_for_tpu([case("dot", chip="v3")])
    with pytest.raises(ValueError, match="cores must be at least 1, got 0"):
        compile_for_tpu([case("dot", cores=0)])
    with pytest.raises(ValueError, match="timeout must be at least 1 s, got 0"):
        compile_for_tpu([case("dot")], timeout=0)


def of_stores(*lines):
    """A bundle for each of these lines that stores a register: 0 is none of the source's."""
    store = tuple(int(name == "VSTORE") for name in bundles.UNITS)
    places = [f' /* loc("/k.py":{line}:1 to :9) */' if line else "" for line in lines]
    return tuple(bundles.Bundle("{ %1 = vst [vmem:%s2] %v3" + place + " }", store) for place in places), store


def usual_and_rare(*lines):
    """What runs in each step, and beside it what is rare, on lines of the source."""
    places = [frozenset({f"/k.py:{line}"}) for line in lines]
    return [Branch(places[0], False, 1.0, "data", is_usual=True), Branch(places[1], False, 0.0, "data")]


def test_what_runs_where_a_rare_part_does_not_runs_in_each_step():
    """Also where a loop stores more, beside which it would be taken for results of every few steps."""
    parts = [bundles.Part(1, 12, loop=True, trips=2), bundles.Part(12, 18), bundles.Part(18, 22)]
    stage = bundles.Part(1, 22, inner=parts)
    steps = bundles.Part(0, 22, loop=True, trips=None, pipelined=True, inner=[stage])
    whole = bundles.Program(*of_stores(*[0] * 12, *[5] * 6, *[8] * 4), bundles.Part(0, 22, inner=[steps]))
    read = bundles.schedule(whole, CHIPS["v6e"], branches=usual_and_rare(5, 8))
    assert (read.step_bundles, read.periodic_bundles) == (1 + 2 * 11 + 6, 0)


def test_a_grid_of_one_step_has_branches_as_others():
    """It has no loop over the grid; of what is not known there the part that stores more would count."""
    whole = bundles.Part(0, 22, inner=[bundles.Part(12, 16), bundles.Part(16, 22)])
    read = bundles.schedule(
        bundles.Program(*of_stores(*[0] * 12, *[5] * 4, *[8] * 6), whole), CHIPS["v6e"], branches=usual_and_rare(5, 8)
    )
    assert read.step_bundles == 12 + 4


def test_a_kernel_without_a_grid_has_one_step():
    """Its loops are no steps, also where only the data say how often they run."""
    whole = bundles.Part(0, 20, inner=[bundles.Part(12, 18, loop=True, trips=None)])
    read = bundles.schedule(bundles.Program(*of_stores(*[5] * 20), whole), CHIPS["v6e"])
    assert (read.step_bundles, read.unknown_loops) == (20, 1)


@pytest.mark.parametrize("copies", [0, 5], ids=["alone", "after a copy"])
def test_branches_of_one_line_are_told_apart_by_their_order(copies):
    """One that always runs has no code of its own, and the shortest may have none. A copy that the compiler makes has a
    bundle on that line too."""
    lines = [0] * 12 + [5] * bool(copies) + [0] * copies + [5] * 10
    parts = [bundles.Part(12, len(lines) - 10)] * bool(copies)
    parts += [bundles.Part(len(lines) - 10, len(lines) - 6), bundles.Part(len(lines) - 6, len(lines))]
    usual, rare = (replace(branch, operations=9) for branch in usual_and_rare(5, 5))
    always = replace(usual, of="", is_usual=False)
    first = replace(always, share=0.5, operations=2)
    whole = bundles.Program(*of_stores(*lines), bundles.Part(0, len(lines), inner=parts))
    read = bundles.schedule(whole, CHIPS["v6e"], branches=[always, first, usual, rare])
    assert read.step_bundles == 12 + 4


def test_a_branch_is_known_in_the_program_of_an_equal_call():
    """XLA compiles equal kernels once, with the lines of one of their calls."""
    whole = bundles.Part(0, 18, inner=[bundles.Part(12, 18)])
    _, rare = usual_and_rare(8, 8)
    read = bundles.schedule(bundles.Program(*of_stores(*[0] * 12, *[5] * 6), whole), CHIPS["v6e"], branches=[rare])
    assert (read.step_bundles, read.periodic_bundles) == (12, 0)


def test_what_runs_where_a_rare_part_does_not_is_seen_in_the_source():
    jax = pytest.importorskip("jax")
    from tpu_kernels.quantize import fp8_quantize

    x = jax.ShapeDtypeStruct((256, 256), "bfloat16")
    quantise = partial(fp8_quantize, axis=1, check_finite=False, interpret=False)
    (kernel,) = kernels(jax.make_jaxpr(quantise)(x))
    assert [(branch.share, branch.is_usual) for branch in kernel.branches] == [(0, False), (1, True), (0, False)]


def test_a_kernel_whose_result_is_dropped_is_none_of_a_programs():
    """XLA compiles no such kernel, so that no dump has it."""
    jax = pytest.importorskip("jax")
    from tpu_kernels.quantize import fp8_quantize

    def second_of_two(x):
        return [fp8_quantize(part, axis=1, check_finite=False, interpret=False) for part in (x[:128], x)][1]

    (kernel,) = kernels(jax.make_jaxpr(second_of_two)(jax.ShapeDtypeStruct((256, 256), "bfloat16")))
    assert kernel.operands[0] == (1, 256, 256)
