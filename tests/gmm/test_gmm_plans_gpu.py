# ruff: noqa: E402 (frameworks may be missing, and are asked for before they are imported)
"""How the grouped matmuls are launched on a GPU, which no result shows: tiles, programs, warps, stages, routes."""

from contextlib import nullcontext

import pytest

pytest.importorskip("triton")
torch = pytest.importorskip("torch")

from gpu_reference import gmm, grouped_gemm, quantized_gmm
from gpu_reference._lib.launch import Launch, launch_options
from gpu_reference._lib.tiles import Tile, block_of, first_filled, fitted
from gpu_reference._lib.visits import metadata_launch
from op_arguments.gmm import Problem
from op_arguments.quantized_gmm import QuantizedProblem
from parity.backends.emulation.tensor_core import emulated
from tests.support.interpreter import interpreted

pytestmark = pytest.mark.smoke

E4M3, E5M2, INT8 = torch.float8_e4m3fn, torch.float8_e5m2, torch.int8
FLOAT32, BFLOAT16, FLOAT16 = torch.float32, torch.bfloat16, torch.float16
POWERS = (16, 32, 64, 128)
DOTS = [(rows, depth, columns) for rows in POWERS for depth in POWERS for columns in POWERS]


def meta(*shape, dtype=torch.int32):
    return torch.empty(*shape, dtype=dtype, device="meta")


def pair(shape, dtype, blocks):
    """An operand, and its scales where it has any: of MXFP8 where `blocks` is an axis."""
    if dtype.itemsize > 1 or blocks is None:
        return meta(*shape, dtype=dtype), None
    if isinstance(blocks, int):
        scale = [-(-size // 32) if axis == blocks else size for axis, size in enumerate(shape)]
        return meta(*shape, dtype=dtype), meta(*scale, dtype=torch.float8_e8m0fnu)
    return meta(*shape, dtype=dtype), meta(*(s // b for s, b in zip(shape, blocks, strict=True)), dtype=FLOAT32)


def launched(name, tile, m=1000, k=256, n=200, groups=4, lhs=E4M3, rhs=E4M3, dot="float16", block=None):
    """The launch of a matmul of these sizes; `block` is the length of a block of scales, by default the whole axis."""
    problem, tile = Problem(m, k, n, groups, 6, ""), Tile(*tile)
    is_gmm, of_sum = "tgmm" not in name and "wgrad" not in name, k
    shapes = ((m, k), (groups, k, n))
    metadata = gmm.GroupMetadata(meta(7), meta(9), meta(9), meta(1))
    if is_gmm:
        rest = None, meta(m, n, dtype=FLOAT32), metadata, meta(1)
    else:
        shapes, of_sum = ((m, k), (m, n)), m
        rest = None, meta(groups, k, n, dtype=FLOAT32), meta(6), meta(1)
    if name in ("gmm", "tgmm"):
        return getattr(gmm, f"{name}_launch")(problem, tile, *(meta(*s, dtype=FLOAT32) for s in shapes), *rest)
    axes = (1, 1) if is_gmm else (0, 0)
    if name in ("grouped_gemm", "grouped_wgrad"):
        pairs = (pair(shape, dtype, axis) for shape, dtype, axis in zip(shapes, (lhs, rhs), axes, strict=True))
        return getattr(grouped_gemm, f"{name}_launch")(problem, tile, dot, *pairs, False, *rest)
    block = block or of_sum
    blocks = [
        tuple(block if a == axis else 1 for a in range(len(shape))) for shape, axis in zip(shapes, axes, strict=True)
    ]
    problem = QuantizedProblem(*problem, block, *blocks)
    pairs = (pair(shape, dtype, b) for shape, dtype, b in zip(shapes, (lhs, rhs), blocks, strict=True))
    path = quantized_gmm.DotPath(dot, "")
    return getattr(quantized_gmm, f"{name}_launch")(problem, tile, path, *pairs, *rest)


OF_ROWS, OF_GROUPS = ("gmm", "gmm_quantized", "grouped_gemm"), ("tgmm", "tgmm_quantized", "grouped_wgrad")


def dot_of(name):
    return "float32" if "grouped" in name else "float16"


@pytest.mark.parametrize("name", OF_ROWS)
@pytest.mark.parametrize(("m", "n", "groups"), [(1000, 200, 4), (1024, 256, 8), (1, 1, 1), (0, 64, 3), (128, 64, 7)])
def test_there_is_a_program_for_every_visit_that_may_be_and_column_tile_in_bands_of_8(name, m, n, groups):
    """A tile more for every group is the most that boundaries can cost."""
    launch = launched(name, (128, 64, 64), m=m, n=n, groups=groups, dot=dot_of(name))
    visits = -(-m // 128) + groups
    assert launch.grid == (-(-visits // 8) * 8 * -(-n // 64),)


@pytest.mark.parametrize("name", OF_GROUPS)
@pytest.mark.parametrize(("k", "n", "groups"), [(256, 200, 4), (130, 64, 1), (1, 1, 3)])
def test_there_is_a_program_for_every_tile_of_every_group(name, k, n, groups):
    launch = launched(name, (64, 128, 64), k=k, n=n, groups=groups, dot=dot_of(name))
    assert launch.grid == (groups * -(-k // 128) * -(-n // 64),)


@pytest.mark.parametrize("cover", ["tiles", "groups"])
@pytest.mark.parametrize(("m", "tm", "groups"), [(40, 8, 3), (2048, 16, 0), (2048, 16, 1), (4000, 16, 9), (0, 16, 0)])
def test_metadata_have_a_program_for_every_128_visits_and_one_for_none(cover, m, tm, groups):
    metadata = gmm.GroupMetadata(*(meta(1) for _ in gmm.GroupMetadata._fields))
    launch = metadata_launch(meta(9), meta(1), metadata, m, tm, groups, cover)
    visits = -(-m // tm) + groups
    assert launch.arguments["visits"] == visits
    assert launch.grid == (max(1, -(-visits // 128)),)
    assert launch.options == {"num_warps": 4}


@pytest.mark.parametrize("name", OF_ROWS)
@pytest.mark.parametrize("k", [32, 64, 128, 160, 192])
def test_steps_are_masked_where_the_last_is_not_whole_and_nowhere_else(name, k):
    assert launched(name, (64, 64, 64), k=k, dot=dot_of(name)).arguments["EVEN_K"] == (k % 64 == 0)


def operand_bytes(path):
    return {"fp8": 1, "int8": 1, "float32": 4}.get(path, 2)


@pytest.mark.parametrize("path", ["fp8", "int8", "float16", "float32"])
def test_tiles_in_flight_are_as_many_as_fit_in_the_least_shared_memory(path):
    """99 KiB (sm_120), 3 of which are left for what else a kernel keeps there; more than four are of no use."""
    size = operand_bytes(path)
    for rows, depth, columns in DOTS:
        options = quantized_gmm._options(rows, depth, columns, quantized_gmm.DotPath(path, ""))
        assert options["num_stages"] == launch_options(rows, depth, columns, size)["num_stages"]
        stages, stage = options["num_stages"], (rows + columns) * depth * size
        assert stages >= 1
        assert stages == 1 or stages * stage <= 96 * 1024
        assert stages == 4 or (stages + 1) * stage > 96 * 1024
        assert options["enable_fp_fusion"] is True  # a chain of FMAs has one rounding a step


def warps_for(amount, each):
    """The least of 4 and 8 warps that have no more than `each`, 8 where none has."""
    return 4 if amount <= 4 * each else 8


def test_a_thread_holds_the_sums_in_its_registers():
    """A warp has 4 KiB of the tile in the operands' dtype: 64 registers of sums a thread, or 32 of float32's."""
    for rows, depth, columns in DOTS:
        tile = rows * columns
        for size in (2, 4):
            assert launch_options(rows, depth, columns, size)["num_warps"] == warps_for(tile * size, 4096)
        for path in ("fp8", "int8", "float16", "float32"):
            options = quantized_gmm._options(rows, depth, columns, quantized_gmm.DotPath(path, ""))
            # Of 8 bits too there are the sums, and what a step adds to them.
            assert options["num_warps"] == warps_for(tile * max(operand_bytes(path), 2), 4096)
        for dot in ("block_scaled", "bfloat16"):
            assert grouped_gemm._options(rows, depth, columns, dot)["num_warps"] == warps_for(tile, 2048)
        assert grouped_gemm._options(rows, depth, columns, "float32")["num_warps"] == 8  # long chains of FMAs


@pytest.mark.parametrize("name", OF_ROWS + OF_GROUPS)
def test_a_launch_is_planned_for_its_own_dot(name):
    """[rows, depth] @ [depth, columns]: of a gradient the rows are lhs's columns, and the depth its rows."""
    tm, tk, tn = tile = (16, 64, 128)
    rows, depth = (tm, tk) if name in OF_ROWS else (tk, tm)
    got = launched(name, tile, dot=dot_of(name)).options
    if "quantized" in name:
        assert got == quantized_gmm._options(rows, depth, tn, quantized_gmm.DotPath("float16", ""))
    elif "grouped" in name:
        assert got == grouped_gemm._options(rows, depth, tn, "float32")
    else:
        assert got == launch_options(rows, depth, tn, 4)


def test_a_block_is_the_power_of_two_that_holds_its_elements_and_16_at_least():
    sizes = {0: 16, 1: 16, 15: 16, 16: 16, 17: 32, 31: 32, 33: 64, 64: 64, 65: 128, 129: 256}
    assert {size: block_of(size) for size in sizes} == sizes


@pytest.mark.parametrize(
    ("tile", "sizes", "expected"),
    [
        ((128, 64, 128), (4096, 1024, 1024), (128, 64, 128)),
        ((512, 512, 512), (4096, 1024, 1024), (128, 128, 128)),
        ((100, 17, 8), (4096, 1024, 1024), (128, 32, 16)),
        ((128, 64, 128), (20, 1, 65), (32, 16, 128)),
    ],
)
def test_tiles_are_powers_of_two_not_far_beyond_the_sizes(tile, sizes, expected):
    assert fitted(tile, Problem(*sizes, 4, 4, "")) == expected


@pytest.mark.parametrize(
    ("m", "groups", "row_tile"),
    [(256, 2, 128), (255, 2, 64), (128, 1, 128), (127, 1, 64), (96, 0, 64), (128, 2, 64), (64, 2, 32), (63, 2, 16),
     (8, 4, 16)],
)  # fmt: skip
def test_a_tile_has_no_more_rows_than_an_average_group_but_the_least_tile(m, groups, row_tile):
    tiles = tuple((tm, 16, 32) for tm in (128, 64, 32, 16))
    assert first_filled(tiles, Problem(m, 64, 64, groups, 8, ""))(m, 64, 64) == (row_tile, 16, 32)


LARGE = (4096, 1024, 1024, 8, 8, "")


@pytest.mark.parametrize(("path", "size"), [("fp8", 1), ("int8", 1), ("float16", 2), ("bfloat16", 2), ("float32", 4)])
def test_large_problems_have_the_first_tile_of_what_the_dot_multiplies(path, size):
    dot, whole = quantized_gmm.DotPath(path, ""), QuantizedProblem(*LARGE, 4096, (1, 1), (1, 1))
    assert quantized_gmm.gmm_quantized_tile(whole, dot) == quantized_gmm.GMM_QUANTIZED_TILES[size][0]
    assert quantized_gmm.tgmm_quantized_tile(whole, dot) == quantized_gmm.TGMM_QUANTIZED_TILES[size][0]
    if size > 1:
        assert gmm.gmm_tile(Problem(*LARGE), size) == gmm.GMM_TILES[size][0]
        assert gmm.tgmm_tile(Problem(*LARGE), size) == gmm.TGMM_TILES[size][0]
    if path in ("bfloat16", "float32"):
        for ragged, tiles in (
            ("lhs", grouped_gemm.GROUPED_GEMM_TILES),
            ("contracting", grouped_gemm.GROUPED_WGRAD_TILES),
        ):
            assert grouped_gemm.grouped_gemm_tile(Problem(*LARGE), path, ragged, None, "sm_90") == tiles[size][0]
    for ragged, tiles in (
        ("lhs", grouped_gemm.GROUPED_GEMM_TILES),
        ("contracting", grouped_gemm.GROUPED_WGRAD_TILES),
    ):
        block_scaled = grouped_gemm.grouped_gemm_tile(Problem(*LARGE), "block_scaled", ragged, None, "sm_100")
        assert block_scaled == tiles[1][0]


@pytest.mark.parametrize(
    ("path", "block", "size", "tile", "step"),
    [
        ("fp8", 512, 512, 16, 32),  # the least depth of a dot of 8 bits
        ("int8", 512, 512, 16, 32),
        ("fp8", 512, 512, 64, 64),
        ("float16", 512, 512, 16, 16),
        ("float32", 512, 512, 16, 16),
        ("fp8", 32, 512, 128, 32),
        ("float16", 64, 512, 128, 64),
        ("float16", 128, 512, 64, 64),
        ("float16", 96, 96, 128, 128),  # one block: no scale changes
        ("float16", 96, 80, 128, 128),
    ],
)
def test_a_step_is_deep_enough_for_its_dot_and_no_longer_than_a_block(path, block, size, tile, step):
    assert quantized_gmm._step(tile, quantized_gmm.DotPath(path, ""), block, size) == step


def test_sums_are_int32_where_no_scale_changes_and_the_largest_cannot_overflow():
    """-128 times -128 is 2^14: 2^17 of them are 2^31, one more than int32 holds."""

    def in_int32(path, block, size):
        return quantized_gmm._sums_in_int32(quantized_gmm.DotPath(path, ""), block, size)

    assert in_int32("int8", 2**17 - 1, 2**17 - 1)
    assert not in_int32("int8", 2**17, 2**17)
    assert in_int32("int8", 512, 256)
    assert not in_int32("int8", 128, 256)
    assert not in_int32("fp8", 256, 256)


@pytest.mark.parametrize("name", ["gmm_quantized", "tgmm_quantized"])
def test_scales_that_do_not_change_along_the_sum_multiply_it_once(name):
    length = 256 if name == "gmm_quantized" else 1024
    for block, expected in ((length // 2, length // 2), (length, 0)):
        given = launched(name, (64, 64, 64), m=1024, block=block, lhs=INT8, rhs=INT8, dot="int8").arguments
        assert given["SCALING"].lhs_block == given["SCALING"].rhs_block == expected
        assert given["SCALING"].in_int32 == (block == length)
    wide = launched(name, (64, 64, 64), m=1024, block=64, lhs=BFLOAT16, dot="bfloat16").arguments
    assert (wide["SCALING"].lhs_block, wide["SCALING"].rhs_block) == (0, 64)


@pytest.mark.parametrize("name", ["gmm_quantized", "tgmm_quantized"])
def test_only_what_the_dot_does_not_multiply_is_decoded(name):
    for dtype, path in ((E4M3, "fp8"), (INT8, "int8")):
        given = launched(name, (64, 64, 64), lhs=dtype, rhs=dtype, dot=path).arguments
        assert (given["SCALING"].lhs_format, given["SCALING"].rhs_format) == ("", "")
        assert given["lhs"].data.dtype == given["rhs"].data.dtype == dtype
    given = launched(name, (64, 64, 64), lhs=FLOAT16, rhs=E5M2, dot="float16").arguments
    assert (given["SCALING"].lhs_format, given["SCALING"].rhs_format) == ("", "float8_e5m2")
    assert (given["lhs"].data.dtype, given["rhs"].data.dtype) == (FLOAT16, torch.uint8)


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
def test_bfloat16_is_widened_only_where_it_cannot_be_multiplied(name, mended, monkeypatch):
    launches, run = [], Launch.run
    monkeypatch.setattr(Launch, "run", lambda launch, device: (launches.append(launch), run(launch, device)))
    with emulated() if mended else nullcontext():
        got = call(name)
    matmul = launches[-1].arguments
    assert matmul["lhs"].data.dtype == matmul["out"].dtype == (BFLOAT16 if mended else FLOAT32)
    assert "SCALING" not in matmul or matmul["SCALING"].dot == ("bfloat16" if mended else "float32")
    assert got.dtype == BFLOAT16


@interpreted
@pytest.mark.gpu
@pytest.mark.parametrize(("target", "path"), [("sm_90", "bfloat16"), ("sm_100", "block_scaled")])
@pytest.mark.parametrize("mended", [True, False])
def test_mxfp8_is_multiplied_in_float32_only_where_nobody_mended_the_interpreter(target, path, mended, monkeypatch):
    launches = []
    monkeypatch.setattr(Launch, "run", lambda launch, device: launches.append(launch))
    monkeypatch.setattr(grouped_gemm, "architecture", lambda device: target)
    codes = torch.ones(8, 32, dtype=E4M3)
    scale = torch.full((1, 32), 127, dtype=torch.uint8).view(torch.float8_e8m0fnu)
    options = dict(lhs_scale=scale, rhs_scale=scale, ragged="contracting", preferred_element_type=FLOAT32)
    with emulated() if mended else nullcontext():
        grouped_gemm.grouped_gemm(codes, codes, SIZES, **options)
    assert launches[0].arguments["SCALING"].dot == (path if mended else "float32")


@interpreted
@pytest.mark.gpu
def test_fp8_is_multiplied_as_it_is_where_the_interpreter_knows_its_nan():
    for mended, dtype in ((True, "fp8"), (False, "float16")):
        with emulated() if mended else nullcontext():
            assert quantized_gmm.dot_path(E4M3, E4M3, FLOAT32, None).dtype == dtype


@interpreted
@pytest.mark.gpu
@pytest.mark.parametrize("name", ["gmm", "gmm_quantized", "lhs"])
def test_a_shard_of_no_groups_has_nothing_to_launch(name, monkeypatch):
    monkeypatch.setattr(Launch, "run", lambda launch, device: pytest.fail("launched"))
    with emulated():
        assert not call(name, groups=0).any()
        existing = torch.arange(128).reshape(16, 8).t().to(BFLOAT16).repeat(1, 1)
        got = call(name, groups=0, existing_out=existing)
    assert torch.equal(got, existing)
    assert got.is_contiguous()
    assert got.data_ptr() != existing.data_ptr()
