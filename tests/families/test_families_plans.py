"""How kernels cut the programs of the matrix: as the plan ledger has it, and by the laws that hold for every plan.

No result depends on a plan, so that no comparison would notice one that is many times as slow, or does not fit. Where
one is meant to change: `parity plans --record`, and read the diff.
"""

import math
from importlib.util import find_spec

import pytest

from parity.compilers import plans
from parity.compilers.chips import CHIPS
from parity.compilers.launches import PROCESSORS
from parity.compilers.ptx import TARGETS
from parity.compilers.recorded import differences
from tests.matrix.programs import PLANNED, PROGRAMS

pytestmark = [
    pytest.mark.skipif(find_spec("jax") is None, reason="TPU programs are traced by JAX"),
    pytest.mark.skipif(find_spec("triton") is None, reason="GPU programs are launched by Triton"),
]
ALL = (*PROGRAMS, *PLANNED)
MODELS = ("DeepSeek-V3", "gpt-oss-120b", "K1024_N1025", "K130_N96")
SHAPES = ("B2_T4096_H16_K128_V128-g", "B2_T100", "N5")
REPRESENTATIVE = tuple(p for p in ALL if p.name.startswith(MODELS) or any(s in p.name for s in SHAPES))
MIB = 2**20
DEFAULT_VMEM = {"v4": 16, "v5e": 16, "v5p": 16, "v6e": 32, "tpu7x": 32}  # MiB of a kernel that asks for none
SCAN_VMEM = 40  # MiB, of 56 for which the scans ask
HELD_VMEM = 50  # with k and v of a delta rule held for the way back
MATMULS = ("gmm", "tgmm", "gmm_quantized", "tgmm_quantized", "grouped_gemm")


@pytest.fixture(scope="module")
def recorded(pytestconfig):
    return plans.LEDGER.read(pytestconfig.rootpath)


def check(programs, chip, recorded, root):
    new = {plan.key: plan for plan in plans.plan_all(root, programs, [chip])}
    old = {key: plan for key, plan in recorded.items() if key in new}
    assert differences(old, new) == [], "if it is meant: parity plans --record"


@pytest.mark.parametrize(
    "chip", ["sm_90", *(pytest.param(chip, marks=pytest.mark.full) for chip in ("tpu7x", "v5e", "sm_100"))]
)
def test_representative_programs_are_planned_as_recorded(chip, recorded, pytestconfig):
    check(REPRESENTATIVE, chip, recorded, pytestconfig.rootpath)


@pytest.mark.full
@pytest.mark.parametrize("chip", [*CHIPS, *TARGETS])
def test_all_programs_are_planned_as_recorded(chip, recorded, pytestconfig):
    check(ALL, chip, recorded, pytestconfig.rootpath)


def test_every_line_of_the_ledger_has_a_program(recorded):
    declared = {(chip, program.op, program.name) for program in ALL for chip in plans.chips_of(program)}
    assert recorded.keys() == declared


# ------------------------------------------------------------------------------- laws of every plan that is recorded


def kernels_of(recorded, chips):
    """(plan, kernel) of every kernel planned for one of these chips."""
    return [(plan, kernel) for plan in recorded.values() if plan.chip in chips for kernel in plan.kernels]


def is_scan(plan):
    """Of chunks or of steps, with a state."""
    return plan.op.startswith(("chunk", "fused_chunk", "fused_recurrent"))


def is_delta_rule(plan):
    """Whose kernels on the GPU are always the same."""
    return "delta_rule" in plan.op or "kda" in plan.op


def sizes_of(plan):
    """The sizes in the name of a scan's program: B, T, H, K, V."""
    words = plan.name.partition("-")[0].split("_")
    return {word[0]: int(word[1:]) for word in words}


def test_blocks_fit_vmem_twice(recorded):
    for plan, kernel in kernels_of(recorded, CHIPS):
        limit = SCAN_VMEM if is_scan(plan) else DEFAULT_VMEM[plan.chip]
        if kernel["name"] == "chunk_delta_bwd":
            limit = HELD_VMEM
        assert kernel["vmem_bytes"] <= limit * MIB, (plan.key, kernel)


def test_dots_of_a_step_cover_its_tile_once(recorded):
    """And 256 of its rows once more, for tiles of several groups; a last step along K has dots of its own length.

    tgmm with scales has dots of its own for a tile that is all of its group.
    """
    depths = {(program.op, program.name): depth_of(program) for program in ALL}
    for plan, kernel in kernels_of(recorded, CHIPS):
        if plan.op in MATMULS and kernel["dots"]:
            (tm, depth), (*_, rows, tn) = kernel["inputs"][0][-2:], kernel["outputs"][0]
            tk = rows if "tgmm" in kernel["name"] else depth
            last = 0 if "tgmm" in kernel["name"] else depths[plan.op, plan.name] % tk
            covered = sum(math.prod(sizes) * count for *sizes, _, count in kernel["dots"])
            heights = (tm, tm + 256, 2 * tm + 256) if kernel["name"] == "tgmm_quantized" else (tm, tm + 256)
            assert covered in {m * k * tn for m in heights for k in (tk, tk + last)}, (plan.key, kernel)


def depth_of(program):
    """K of a grouped matmul."""
    given = program.keywords.get("lhs") or (program.arguments[0] if program.arguments else None)
    return given.shape[-1] if given else 0


def test_a_chunked_scan_multiplies_bfloat16_alone(recorded):
    """What is float32 goes in pieces, side by side."""
    for plan, kernel in kernels_of(recorded, CHIPS):
        if plan.op.startswith("chunk"):
            assert {operand for *_, operand, _ in kernel["dots"]} == {"bf16"}, plan.key


def test_tiles_on_the_gpu_are_powers_of_two(recorded):
    tiles = ("TILE.m", "TILE.k", "TILE.n", "TILE.rows", "TILE.columns", "TILE_ROWS", "TILE_COLUMNS", "ROWS", "BK", "BV")
    for plan, kernel in kernels_of(recorded, TARGETS):
        found = {name: size for name, size in kernel["constants"].items() if name in tiles}
        assert all(size & (size - 1) == 0 for size in found.values()), (plan.key, kernel)
        assert kernel["warps"] in (4, 8, 16), (plan.key, kernel)


def test_sums_fit_registers_and_tiles_in_flight_fit_shared_memory_on_the_gpu(recorded):
    """128 registers of a thread at most hold sums; a block has 96 KiB on every GPU (sm_120: 99), on Hopper 227."""
    for plan, kernel in kernels_of(recorded, TARGETS):
        constants = kernel["constants"]
        if "TILE.m" in constants:
            m, k, n = (constants[f"TILE.{axis}"] for axis in "mkn")
            rows, depth = (k, m) if "tgmm" in kernel["name"] or "wgrad" in kernel["name"] else (m, k)
            dot = constants.get("SCALING.dot", "float32" if plan.name.endswith("f32") else "bfloat16")
            size = {"fp8": 1, "int8": 1, "block_scaled": 1, "float32": 4}.get(dot, 2)
            assert rows * n / (32 * kernel["warps"]) <= 128, (plan.key, kernel)
            most = (200 if plan.chip == "sm_90" else 96) * 1024
            assert kernel["stages"] == 1 or kernel["stages"] * (rows + n) * depth * size <= most, plan.key


def test_a_scan_is_one_kernel_where_that_keeps_the_gpu_busy(recorded):
    """One program for each sequence, head and tile of V (of K in the backward pass), and as many as processors."""
    for plan in recorded.values():
        if plan.op.startswith("chunk") and not is_delta_rule(plan) and plan.chip in TARGETS and "_N" not in plan.name:
            size, backward = sizes_of(plan), plan.op.endswith("bwd")
            last = plan.kernels[-1]
            axis = "K" if backward else "V"
            programs = size["B"] * size["H"] * -(-size[axis] // last["constants"][f"B{axis}"])
            fused = len(plan.kernels) == 1 + backward
            assert fused == (programs >= PROCESSORS[plan.chip]), plan.key
            assert not fused or last["grid"] == [programs], plan.key
