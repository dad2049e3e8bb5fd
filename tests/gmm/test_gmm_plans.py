"""What gmm and tgmm plan on the TPU, by the chip and by the sizes: tiles, the dots of a step, and which blocks of rows
are multiplied, masked or copied. No result depends on it, so that no comparison would notice a plan that is many times
as slow, or does not fit."""

import numpy as np
import pytest

jax = pytest.importorskip("jax")

from parity.compilers.kernels import _equations  # noqa: E402
from parity.compilers.kernels import kernels as kernels_of  # noqa: E402
from parity.interop import to_jax  # noqa: E402
from tests.quantized_gmm.test_quantized_gmm_plans import on  # noqa: E402
from tpu_kernels import gmm as kernels  # noqa: E402
from tpu_kernels._lib import products, tiles, visits  # noqa: E402

pytestmark = pytest.mark.tpu

VMEM = {"TPU v4": 16, "TPU v5e": 16, "TPU v6e": 32, "TPU7x": 32}  # MiB that a kernel has by default
KS = (0, 1, 512, 513, 1024, 1025, 2048, 2049, 3072, 3073, 7168)
NS = (0, 1, 512, 1024, 1025, 2048, 2880, 7168)
BF16 = jax.numpy.bfloat16


@pytest.mark.parametrize("small", [False, True])
@pytest.mark.parametrize("kind", VMEM)
def test_tiles_are_of_whole_blocks_or_axes_and_fit_twice(kind, small):
    """The matrix unit multiplies blocks of 256: what is more than that in a tile is multiplied as a whole one."""
    width = 2 if small else 4
    with on(kind):
        for k in KS:
            for n in NS:
                for plan in (kernels._gmm_tiles, kernels._tgmm_tiles):
                    tile = plan(BF16, small, 8192, k, n)
                    for step, axis in zip(tile, (8192, k, n), strict=True):
                        assert step == max(axis, 1) or (step and step % 256 == 0), (plan, k, n, tile)
                    tm, tk, tn = tile
                    blocks = [(tm, tk, 2), (tk, tn, 2), (tm, tn, width)]
                    if plan is kernels._tgmm_tiles:
                        blocks = [(tm, tk, 2), (tm, tn, 2), (tk, tn, width)]
                    sums = 4 * blocks[2][0] * blocks[2][1]
                    held = 2 * sum(rows * columns * size for rows, columns, size in blocks) + sums
                    assert held <= VMEM[kind] * 2**20, (plan, k, n, tile)


@pytest.mark.parametrize(
    ("kind", "small", "k", "n", "tile"),
    [
        # All of K in a step, up to 2048; the weights of a step are 1 Mi numbers, 2 Mi beside a small result.
        ("TPU v5e", False, 512, 4096, (256, 512, 2048)),
        ("TPU v5e", False, 512, 2049, (256, 512, 1280)),
        ("TPU v5e", False, 512, 2048, (256, 512, 2048)),
        ("TPU v5e", False, 513, 1536, (256, 513, 1536)),
        ("TPU v5e", False, 513, 2048, (256, 513, 1024)),
        ("TPU v5e", False, 1024, 1025, (256, 1024, 768)),
        ("TPU v5e", False, 2048, 513, (256, 2048, 512)),
        ("TPU v5e", True, 2048, 1024, (256, 2048, 512)),  # nothing is small there
        ("TPU v4", True, 2048, 1024, (256, 2048, 512)),
        ("TPU v6e", True, 2048, 1024, (1024, 2048, 1024)),
        ("TPU v6e", True, 512, 2048, (1024, 512, 2048)),
        ("TPU v6e", True, 512, 2049, (1024, 512, 1280)),
        ("TPU v6e", True, 513, 1024, (1024, 513, 1024)),
        ("TPU v6e", True, 513, 1025, (1024, 513, 768)),
        ("TPU7x", False, 2048, 512, (512, 2048, 512)),
        # Up to 3072 in a step as well, of half the rows.
        ("TPU v5e", False, 2049, 1024, (256, 2049, 512)),
        ("TPU v6e", False, 2049, 1024, (512, 2049, 512)),
        ("TPU7x", True, 3072, 1024, (256, 3072, 512)),
        # Beyond it in steps: a small result has more of itself in memory, where it is wide enough.
        ("TPU7x", True, 3073, 1025, (1024, 512, 1025)),
        ("TPU7x", True, 3073, 2049, (1024, 512, 1280)),
        ("TPU7x", True, 3073, 2048, (1024, 512, 2048)),
        ("TPU7x", True, 3073, 1024, (512, 1024, 1024)),
        ("TPU v6e", False, 3073, 4096, (1024, 1024, 1024)),
        ("TPU v6e", True, 3073, 4096, (1024, 512, 2048)),
        ("TPU v5e", True, 3073, 4096, (512, 1024, 512)),
    ],
)
def test_tiles_of_gmm_on_both_sides_of_every_limit(kind, small, k, n, tile):
    with on(kind):
        assert kernels._gmm_tiles(BF16, small, 8192, k, n) == tile


@pytest.mark.parametrize(
    ("kind", "small", "k", "n", "tile"),
    [
        # A small result's tiles are large along both axes, where both are wide enough.
        ("TPU v6e", True, 513, 513, (1024, 513, 513)),
        ("TPU v6e", True, 512, 1280, (512, 512, 1024)),
        ("TPU v6e", True, 1024, 1025, (1024, 1024, 768)),
        ("TPU v6e", True, 1025, 1024, (1024, 768, 1024)),
        ("TPU v5e", True, 1024, 1024, (512, 512, 1024)),
        # The longer side is to rhs where that has it; more rows where no tile is partly empty.
        ("TPU v6e", False, 512, 1024, (1024, 512, 1024)),
        ("TPU v6e", False, 1024, 1023, (512, 1024, 512)),
        ("TPU v6e", False, 1024, 512, (1024, 1024, 512)),
        ("TPU v6e", False, 513, 1024, (512, 512, 1024)),
        ("TPU v6e", False, 512, 1025, (512, 512, 1024)),
        ("TPU v5e", False, 1024, 1024, (512, 512, 1024)),
        ("TPU7x", False, 1024, 1024, (1024, 512, 1024)),
    ],
)
def test_tiles_of_tgmm_on_both_sides_of_every_limit(kind, small, k, n, tile):
    with on(kind):
        assert kernels._tgmm_tiles(BF16, small, 8192, k, n) == tile


def test_other_dtypes_have_tiles_of_their_own():
    """Six passes for each product: their multiplication takes longer than their way, whatever the tile."""
    for kind in VMEM:
        with on(kind):
            for dtype in ("float32", "float16"):
                assert kernels._gmm_tiles(dtype, False, 8192, 64, 4096) == (256, 512, 512)
                assert kernels._tgmm_tiles(dtype, False, 8192, 64, 4096) == (256, 512, 512)


def test_where_there_is_no_tpu_it_is_planned_for_the_newest():
    if jax.default_backend() == "tpu":
        pytest.skip("needs a host without a TPU")
    with on("TPU7x"):
        newest = kernels._gmm_tiles(BF16, False, 1, 64, 64), kernels._tgmm_tiles(BF16, True, 1, 640, 640)
        depth = products.dot_depth()
    assert newest == (kernels._gmm_tiles(BF16, False, 1, 64, 64), kernels._tgmm_tiles(BF16, True, 1, 640, 640))
    assert depth == products.dot_depth()


@pytest.mark.parametrize(
    ("size", "longest", "step"),
    [
        (0, 512, 1),
        (1, 512, 1),
        (512, 512, 512),
        (513, 512, 512),
        (700, 512, 512),
        (1200, 1024, 768),
        (2881, 1024, 1024),
    ],
)
def test_steps_are_even_and_as_few_as_may_be(size, longest, step):
    assert tiles.even_step(size, longest) == step
    assert step <= longest and -(-size // step) == -(-size // longest)


@pytest.mark.parametrize(
    ("tile", "sizes", "fitted"),
    [
        ((100, 100, 100), (1000, 1000, 1000), (112, 128, 128)),
        ((128, 256, 384), (1000, 1000, 1000), (128, 256, 384)),
        ((128, 129, 1), (100, 1000, 1), (100, 256, 1)),
        ((16, 128, 128), (15, 127, 127), (15, 127, 127)),
        ((1, 1, 1), (17, 129, 129), (16, 128, 128)),
    ],
)
def test_a_tile_is_of_whole_registers_or_of_the_whole_axis(tile, sizes, fitted):
    problem = kernels.Problem(*sizes, groups=2, experts=2, out_dtype="float32")
    assert tiles.fit_tile(tile, problem, BF16) == fitted


def test_a_result_is_small_where_it_has_16_bits_and_nothing_is_added_to():
    small = {dtype: tiles.is_small(None, dtype) for dtype in ("float32", "bfloat16", "float16")}
    assert small == {"float32": False, "bfloat16": True, "float16": True}
    assert not tiles.is_small(jax.numpy.zeros((1, 1), BF16), "bfloat16")


# ------------------------------------------------------------------------------------------------ dots of a step


def dots(kernel, *shapes, tiling, dtype="bfloat16"):
    """(M, K, N) of every dot that a kernel is made of: float32 sums over K, over M in tgmm."""
    arrays = [jax.ShapeDtypeStruct(shape, dtype) for shape in shapes]
    sizes = jax.ShapeDtypeStruct((3,), "int32")
    traced = jax.make_jaxpr(lambda a, b, s: kernel(a, b, s, tiling=tiling))(*arrays, sizes)
    found = [[operand.aval.shape for operand in dot.invars] for dot, _ in _equations(traced.jaxpr, "dot_general")]
    return [(lhs[0], lhs[1], rhs[1]) for lhs, rhs in found]


@pytest.mark.parametrize(("kind", "depth"), [("TPU v4", 256), ("TPU v5e", 256), ("TPU v6e", 512), ("TPU7x", 1024)])
def test_dots_of_gmm_are_as_deep_as_registers_allow(kind, depth):
    """Of a whole tile and of 256 of its rows, by 256 columns: wider ones spill. tpu7x adds up in the matrix unit."""
    with on(kind):
        found = dots(kernels.gmm, (1024, 1024), (3, 1024, 512), tiling=(512, 1024, 512))
        assert sorted(found) == sorted(2 * (1024 // depth) * [(256, depth, 256), (512, depth, 256)])
        # One program where there is a single block of rows: masks cost less than a second one.
        found = dots(kernels.gmm, (1024, 1024), (3, 1024, 512), tiling=(256, 1024, 512))
        assert found == 2 * (1024 // depth) * [(256, depth, 256)]


@pytest.mark.parametrize("transpose_rhs", [False, True])
def test_a_sum_over_nothing_is_one_over_a_single_zero(transpose_rhs):
    rhs = (3, 24, 0) if transpose_rhs else (3, 0, 24)
    arrays = [jax.ShapeDtypeStruct(shape, BF16) for shape in ((40, 0), rhs)]
    traced = jax.make_jaxpr(lambda a, b, s: kernels.gmm(a, b, s, transpose_rhs=transpose_rhs))(
        *arrays, jax.ShapeDtypeStruct((3,), "int32")
    )
    (found,) = (kernel for kernel in kernels_of(traced) if kernel.name == "gmm")
    assert [block.array for block in found.inputs] == [(40, 1), (3, 24, 1) if transpose_rhs else (3, 1, 24)]
    for block in (*found.inputs, *found.outputs):
        assert block.shape[-2:] == block.array[-2:]  # as Mosaic asks where they are of no whole registers


@pytest.mark.parametrize("kind", VMEM)
def test_dots_of_tgmm_are_as_deep_as_registers_allow(kind):
    """lhs is transposed in registers, which tpu7x alone has enough of for more than 256 rows."""
    with on(kind):
        found = dots(kernels.tgmm, (1024, 1024), (1024, 1536), tiling=(512, 1024, 1536))
    whole = [(512, 512, 512)] if kind == "TPU7x" else 2 * [(256, 512, 512)]
    assert sorted(found) == sorted(6 * [*whole, (256, 512, 512)])


@pytest.mark.parametrize(
    ("dtype", "contract", "rows", "fed"),
    [
        ("bfloat16", (1, 1), 1, "float32"),  # a matrix-vector product, which Pallas cannot lower to float32
        ("bfloat16", (1, 1), 2, "bfloat16"),
        ("bfloat16", (1, 0), 32, "bfloat16"),
        ("bfloat16", (0, 0), 1, "bfloat16"),
        ("float32", (1, 1), 2, "float32"),
    ],
)
def test_a_dot_is_fed_what_it_is_given_but_for_a_single_transposed_row(dtype, contract, rows, fed):
    depth = 32 if contract == (1, 1) else rows
    a = jax.ShapeDtypeStruct((8, depth) if contract[0] else (depth, 8), dtype)
    b = jax.ShapeDtypeStruct((rows, depth) if contract[1] else (depth, 1), dtype)
    traced = jax.make_jaxpr(lambda a, b: products.dot(a, b, contract))(a, b)
    (dot,) = _equations(traced.jaxpr, "dot_general")
    assert [str(operand.aval.dtype) for operand in dot[0].invars] == [fed] * 2
    highest = jax.lax.Precision.HIGHEST if fed == "float32" else jax.lax.Precision.DEFAULT
    assert dot[0].params["precision"] == (highest, highest)
    assert str(dot[0].outvars[0].aval.dtype) == "float32"


# ----------------------------------------------------------------------------------------- what a visit multiplies


def blocks_of_rows(sizes, tm):
    """The rows of every dot that is needed: a tile within a group whole, else its blocks of 256 that hold rows."""
    rows, first = [], 0
    for size in sizes:
        end = first + size
        for tile in range(first // tm, -(-end // tm) if size else 0):
            start, stop = max(first - tile * tm, 0), min(end - tile * tm, tm)
            rows += [tm] if stop - start == tm else [256] * (-(-stop // 256) - start // 256)
        first = end
    return rows


@pytest.mark.parametrize("name", ["gmm", "tgmm"])
def test_a_visit_multiplies_the_blocks_that_hold_rows_of_its_group_and_no_others(monkeypatch, name):
    sizes = [1, 511, 512, 256, 300, 0, 980]
    (m, k, n), seen, masked = (sum(sizes), 136, 24), [], []
    assert m == 5 * 512

    def dot(a, b, contract):
        jax.debug.callback(lambda: seen.append(a.shape[0]))
        return plain_dot(a, b, contract)

    def is_own_row(first_row, shape, start, end):
        masked.append(shape[0])
        return plain_mask(first_row, shape, start, end)

    plain_dot, plain_mask = products.dot, visits.is_own_row
    monkeypatch.setattr(kernels, "dot", dot)
    for module in (kernels, visits):
        monkeypatch.setattr(module, "is_own_row", is_own_row)
    rhs = (len(sizes), k, n) if name == "gmm" else (m, n)
    operands = [to_jax(np.ones(shape, np.float32)) for shape in ((m, k), rhs)]
    getattr(kernels, name)(*operands, to_jax(np.array(sizes, np.int32)), tiling=(512, 256, 128))
    jax.effects_barrier()
    assert sorted(seen) == sorted(blocks_of_rows(sizes, 512))
    # A whole tile is stored as it is; copies go by the 32 rows of a packed 8-bit register.
    assert set(masked) == ({256} if name == "gmm" else {32})


@pytest.mark.parametrize(("tm", "height"), [(64, 32), (48, 48), (16, 16)])
def test_copies_go_by_whole_registers_where_they_can(monkeypatch, tm, height):
    masked, plain = set(), visits.is_own_row
    monkeypatch.setattr(visits, "is_own_row", lambda *given: masked.add(given[1][0]) or plain(*given))
    dots(kernels.tgmm, (96, 8), (96, 9), tiling=(tm, 128, 128))
    assert masked == {height}
