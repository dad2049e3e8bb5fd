# ruff: noqa: E402 (frameworks may be missing, and are asked for before they are imported)
"""What holds for every launch of the grouped matmuls on a GPU, whatever its tiles; no result shows it."""

from contextlib import nullcontext

import pytest

pytest.importorskip("triton")
torch = pytest.importorskip("torch")

from gpu_reference import gmm, grouped_gemm, quantized_gmm
from parity.backends.emulation.tensor_core import emulated
from parity.compilers.launches import intercepted
from tests.matrix.gmm import GMM, TGMM
from tests.matrix.mxfp8 import GROUPED_GEMM
from tests.matrix.quantized_gmm import GMM_QUANTIZED, PLAIN, TGMM_QUANTIZED
from tests.support import calls
from tests.support.calls import point
from tests.support.interpreter import interpreted

E4M3, FLOAT32, BFLOAT16 = torch.float8_e4m3fn, torch.float32, torch.bfloat16
OF_ROWS, OF_GROUPS = ("gmm", "gmm_quantized", "grouped_gemm"), ("tgmm", "tgmm_quantized", "grouped_wgrad")
OPS = dict(
    zip(OF_ROWS + OF_GROUPS, (GMM, GMM_QUANTIZED, GROUPED_GEMM, TGMM, TGMM_QUANTIZED, GROUPED_GEMM), strict=True)
)


def launched(name, m=1000, k=256, n=200, groups=4, lhs="float8_e4m3fn", rhs="float8_e4m3fn", block=None, **options):
    """The launches of a grouped matmul on an sm_90 (unless `target` says another); block: of scales along the sum."""
    dtype, target = ("float32", "float32"), options.pop("target", "sm_90")
    if name not in ("gmm", "tgmm"):
        dtype, options["rhs_dtype"] = (lhs, "bfloat16"), rhs
    if "quantized" in name:
        layout = f"1x{block or 'K'}", f"1x{block or 'K'}x1"
        if name in OF_GROUPS:
            layout = (f"{block or 'M'}x1",) * 2
        wide = "bfloat16", "float16"
        options["lhs_blocks"], options["rhs_blocks"] = (
            PLAIN if dtype in wide else blocks for dtype, blocks in zip((lhs, rhs), layout, strict=True)
        )
    elif name == "grouped_wgrad":
        options["ragged"] = "contracting"
    op = OPS[name]
    return calls.launched(op, point(op, dtype, M=m, K=k, N=n, G=groups, shard=(0, 8), **options), target)


def tile_of(launch):
    return [launch.constants[f"TILE.{axis}"] for axis in "mkn"]


@pytest.mark.parametrize("name", OF_ROWS)
@pytest.mark.parametrize(("m", "n", "groups"), [(1000, 200, 4), (1024, 256, 8), (1, 1, 1), (128, 64, 7)])
def test_every_visit_and_column_tile_has_a_program(name, m, n, groups):
    """A tile more for every group is the most that boundaries can cost."""
    metadata, launch = launched(name, m=m, n=n, groups=groups)
    tm, _, tn = tile_of(launch)
    visits = -(-m // tm) + groups
    assert visits * -(-n // tn) <= launch.grid[0] < (visits + 8) * -(-n // tn)
    assert metadata.grid == (-(-visits // metadata.constants["VISITS_BLOCK"]),)


@pytest.mark.parametrize("name", OF_GROUPS)
@pytest.mark.parametrize(("k", "n", "groups"), [(256, 200, 4), (130, 64, 1), (1, 1, 3)])
def test_every_tile_of_every_group_has_a_program(name, k, n, groups):
    (launch,) = launched(name, k=k, n=n, groups=groups)
    _, tk, tn = tile_of(launch)
    assert launch.grid == (groups * -(-k // tk) * -(-n // tn),)


@pytest.mark.parametrize("name", OF_ROWS + OF_GROUPS)
@pytest.mark.parametrize("tiling", [None, (8, 16, 8), (100, 17, 8), (512, 512, 512)])
def test_tiles_are_powers_of_two_from_16_and_no_larger_than_the_sizes_need(name, tiling):
    sizes = (40, 32, 65)
    launch = launched(name, *sizes, groups=2, tiling=tiling)[-1]
    for tile, size in zip(tile_of(launch), sizes, strict=True):
        assert tile & (tile - 1) == 0 and 16 <= tile <= 128
        assert tile < 2 * max(size, 32)


@pytest.mark.parametrize(("groups", "rows"), [(2, 300), (2, 100), (4, 20)])
def test_a_tile_has_no_more_rows_than_an_average_group_but_the_least(groups, rows):
    for name in OF_ROWS:
        tm, *_ = tile_of(launched(name, m=groups * rows, groups=groups)[-1])
        assert tm <= max(rows, 16)


@pytest.mark.parametrize("name", OF_ROWS)
@pytest.mark.parametrize("k", [32, 64, 128, 160, 192])
def test_steps_are_masked_where_the_last_is_not_whole_and_nowhere_else(name, k):
    launch = launched(name, k=k)[-1]
    assert launch.constants["EVEN_K"] == (k % tile_of(launch)[1] == 0)


@pytest.mark.parametrize(("lhs", "block"), [("float8_e4m3fn", 64), ("float16", 64), ("bfloat16", 32), ("int8", 128)])
@pytest.mark.parametrize("name", ["gmm_quantized", "tgmm_quantized"])
def test_a_step_is_no_longer_than_a_block_of_scales(name, lhs, block):
    rhs = "int8" if lhs == "int8" else "float8_e4m3fn"
    launch = launched(name, m=1024, k=1024, lhs=lhs, rhs=rhs, block=block)[-1]
    tm, tk, _ = tile_of(launch)
    assert block % (tk if name == "gmm_quantized" else tm) == 0


@pytest.mark.parametrize("name", ["gmm_quantized", "tgmm_quantized"])
def test_scales_that_do_not_change_along_the_sum_multiply_it_once(name):
    for block, expected in ((512, 512), (1024, 0)):
        constants = launched(name, m=1024, k=1024, block=block, lhs="int8", rhs="int8")[-1].constants
        assert constants["SCALING.lhs_block"] == constants["SCALING.rhs_block"] == expected
        assert constants["SCALING.in_int32"] == (block == 1024)
    wide = launched(name, m=1024, k=1024, block=64, lhs="bfloat16")[-1].constants
    assert (wide["SCALING.lhs_block"], wide["SCALING.rhs_block"]) == (0, 64)


def test_sums_are_int32_where_the_largest_cannot_overflow():
    """-128 times -128 is 2^14: 2^17 of them are 2^31, one more than int32 holds."""
    for k, in_int32 in ((2**17 - 1, True), (2**17, False)):
        launch = launched("gmm_quantized", k=k, lhs="int8", rhs="int8")[-1]
        assert launch.constants["SCALING.in_int32"] == in_int32
    assert not launched("gmm_quantized")[-1].constants["SCALING.in_int32"]


@pytest.mark.parametrize("name", ["gmm_quantized", "tgmm_quantized"])
def test_only_what_the_dot_does_not_multiply_is_decoded(name):
    for dtype, target, dot, decoded in (
        ("float8_e4m3fn", "sm_100", "fp8", ""),
        ("int8", "sm_90", "int8", ""),
        ("float8_e4m3fn", "sm_80", "float16", "float8_e4m3fn"),
    ):
        constants = launched(name, lhs=dtype, rhs=dtype, target=target)[-1].constants
        assert constants["SCALING.dot"] == dot
        assert constants["SCALING.lhs_format"] == constants["SCALING.rhs_format"] == decoded


@pytest.mark.parametrize(("target", "least"), [("sm_90", 32), ("sm_100", 32), ("sm_120", 32), ("gfx950", 128)])
def test_a_step_of_mxfp8_has_whole_blocks_that_the_matrix_unit_takes(target, least):
    for name, depth, tiling in (("grouped_gemm", 1, (8, 16, 8)), ("grouped_wgrad", 0, (16, 8, 8))):
        launch = launched(name, m=1024, k=1024, target=target, tiling=tiling)[-1]
        assert tile_of(launch)[depth] % least == 0
        scaled = launch.constants["SCALING.dot"] == "block_scaled"
        assert scaled == (target != "sm_90")
        if scaled and target == "sm_100":
            assert tile_of(launch)[1 - depth] >= 128  # the rows of a tcgen05 with scales


@pytest.mark.parametrize("target", ["sm_80", "sm_90", "sm_100", "gfx942"])
def test_what_is_as_exact_as_can_be_is_no_fallback(target):
    for dtype in (FLOAT32, BFLOAT16):
        support = grouped_gemm.grouped_gemm_support(dtype, dtype, target=target)
        assert (support.path, support.fallback) == ("unquantised", False)
        support = grouped_gemm.grouped_gemm_support(dtype, E4M3, target=target)
        assert (support.path, support.fallback) == (str(dtype).removeprefix("torch."), False)


SIZES = torch.tensor([3, 0, 5], dtype=torch.int32)


def call(name, groups=3, **given):
    """A matmul of 8 rows in bfloat16, or beside it in fp8."""
    is_gmm = name in ("gmm", "gmm_quantized", "lhs")
    lhs = torch.ones(8, 32, dtype=BFLOAT16)
    rhs = torch.ones((groups, 32, 16) if is_gmm else (8, 16), dtype=BFLOAT16)
    given |= {} if is_gmm else {"num_actual_groups": groups}
    if name in ("gmm", "tgmm"):
        return getattr(gmm, name)(lhs, rhs, SIZES, **given)
    rhs = rhs.to(E4M3)
    if name.endswith("quantized"):
        scale = torch.ones((min(groups, 1), 1, 1) if is_gmm else (1, 1))
        return getattr(quantized_gmm, name)(lhs, None, rhs, scale, SIZES, **given)
    scale = torch.full((groups, 1, 16) if is_gmm else (1, 16), 127, dtype=torch.uint8).view(torch.float8_e8m0fnu)
    return grouped_gemm.grouped_gemm(lhs, rhs, SIZES, rhs_scale=scale, ragged=name, **given)


NAMES = ["gmm", "tgmm", "gmm_quantized", "tgmm_quantized", "lhs", "contracting"]


@interpreted
@pytest.mark.gpu
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("mended", [True, False])
def test_bfloat16_is_widened_only_where_it_cannot_be_multiplied(name, mended):
    seen = []
    with emulated() if mended else nullcontext(), intercepted(lambda launch, run: (seen.append(launch), run())):
        got = call(name)
    matmul = seen[-1].arguments
    assert matmul["lhs"].data.dtype == matmul["task"].out.dtype == (BFLOAT16 if mended else FLOAT32)
    assert "SCALING" not in matmul or matmul["SCALING"].dot == ("bfloat16" if mended else "float32")
    assert got.dtype == BFLOAT16


@interpreted
@pytest.mark.gpu
@pytest.mark.parametrize(("target", "path"), [("sm_90", "bfloat16"), ("sm_100", "block_scaled")])
@pytest.mark.parametrize("mended", [True, False])
def test_mxfp8_is_multiplied_in_float32_only_where_nobody_mended_the_interpreter(target, path, mended, monkeypatch):
    seen = []
    monkeypatch.setattr(grouped_gemm, "architecture", lambda device: target)
    codes = torch.ones(8, 32, dtype=E4M3)
    scale = torch.full((1, 32), 127, dtype=torch.uint8).view(torch.float8_e8m0fnu)
    options = dict(lhs_scale=scale, rhs_scale=scale, ragged="contracting", preferred_element_type=FLOAT32)
    with emulated() if mended else nullcontext(), intercepted(lambda launch, run: (seen.append(launch), run())):
        grouped_gemm.grouped_gemm(codes, codes, SIZES, **options)
    assert seen[-1].arguments["SCALING"].dot == (path if mended else "float32")


@interpreted
@pytest.mark.gpu
def test_fp8_is_multiplied_as_it_is_where_the_interpreter_knows_its_nan():
    for mended, dtype in ((True, "fp8"), (False, "float16")):
        with emulated() if mended else nullcontext():
            assert quantized_gmm.dot_path(E4M3, E4M3, FLOAT32, None).dtype == dtype


@interpreted
@pytest.mark.gpu
@pytest.mark.parametrize("name", ["gmm", "gmm_quantized", "lhs"])
def test_a_shard_of_no_groups_has_nothing_to_launch(name):
    seen = []
    with emulated(), intercepted(lambda launch, run: (seen.append(launch.name), run())):
        assert not call(name, groups=0).any()
        existing = torch.arange(128).reshape(16, 8).t().to(BFLOAT16).repeat(1, 1)
        got = call(name, groups=0, existing_out=existing)
    assert {*seen} <= {"_bfloat16_probe_kernel"}
    assert torch.equal(got, existing)
    assert got.is_contiguous()
    assert got.data_ptr() != existing.data_ptr()
