"""What holds for every plan of gmm and tgmm on the TPU: tiles, the dots of a step, and which blocks of rows are
multiplied. No result depends on it; the choices themselves are recorded (`parity plans`)."""

import numpy as np
import pytest

jax = pytest.importorskip("jax")

from parity.compilers.kernels import kernels as kernels_of  # noqa: E402
from parity.interop import to_jax  # noqa: E402
from tests.matrix.gmm import GMM, TGMM  # noqa: E402
from tests.support.calls import point, traced  # noqa: E402
from tests.support.chips import on  # noqa: E402
from tpu_kernels import gmm as kernels  # noqa: E402
from tpu_kernels._lib import products  # noqa: E402

pytestmark = pytest.mark.tpu

VMEM = {"TPU v4": 16, "TPU v5e": 16, "TPU v6e": 32, "TPU7x": 32}  # MiB that a kernel has by default
SIZES = [(1, 1), (512, 2048), (513, 1025), (2049, 1024), (3073, 2880), (7168, 7168)]
MXU, LANES, SUBLANES = 256, 128, 16  # of bfloat16 a register has 16 rows


def planned(name, k, n, m=8192, dtype="bfloat16", out=None, **options):
    """The kernel of a grouped matmul as it is traced."""
    op = {"gmm": GMM, "tgmm": TGMM}[name]
    jaxpr = traced(op, point(op, (dtype, out or dtype), M=m, K=k, N=n, G=3, **options))
    (found,) = (kernel for kernel in kernels_of(jaxpr, places=False) if kernel.name == name)
    return found


@pytest.mark.parametrize("out", ["bfloat16", "float32"])
@pytest.mark.parametrize("kind", VMEM)
@pytest.mark.parametrize("name", ["gmm", "tgmm"])
def test_tiles_are_of_whole_blocks_or_axes_and_fit_twice(name, kind, out):
    """The matrix unit multiplies blocks of 256: what is more than that in a tile is multiplied as a whole one."""
    for k, n in SIZES:
        with on(kind):
            found = planned(name, k, n, out=out)
        for block in (*found.inputs, *found.outputs):
            for size, whole in zip(block.shape[-2:], block.array[-2:], strict=True):
                assert size == whole or size % MXU == 0, (k, n, block)
        held = 2 * sum(block.nbytes for block in (*found.inputs, *found.outputs))
        sums = 4 * found.outputs[0].shape[-2] * found.outputs[0].shape[-1]
        assert held + sums <= VMEM[kind] * 2**20, (k, n, found)


@pytest.mark.parametrize("kind", VMEM)
def test_steps_of_gmm_along_the_columns_are_even(kind):
    """No step has a block of 256 more than it needs: the last one is about as full as the others."""
    for k, n in SIZES:
        with on(kind):
            found = planned("gmm", k, n)
        steps = -(-n // found.outputs[0].shape[-1])
        assert found.outputs[0].shape[-1] * steps - n < MXU * steps, (k, n, found)


@pytest.mark.parametrize("name", ["gmm", "tgmm"])
@pytest.mark.parametrize("tiling", [(100, 100, 100), (128, 129, 1), (16, 256, 384), (1, 1, 1)])
@pytest.mark.parametrize(("m", "k", "n"), [(1000, 1000, 1000), (96, 1000, 1), (15, 127, 127), (17, 129, 129)])
def test_a_tile_is_of_whole_registers_or_of_the_whole_axis(name, tiling, m, k, n):
    found = planned(name, k, n, m=m, tiling=tiling)
    for block in (*found.inputs, *found.outputs):
        (rows, columns), (all_rows, all_columns) = block.shape[-2:], block.array[-2:]
        assert columns == all_columns or columns % LANES == 0, block
        assert rows == all_rows or rows % SUBLANES == 0, block


def test_where_there_is_no_tpu_it_is_planned_for_the_newest():
    if jax.default_backend() == "tpu":
        pytest.skip("needs a host without a TPU")
    for name in ("gmm", "tgmm"):
        with on("TPU7x"):
            newest = planned(name, 640, 640)
        assert planned(name, 640, 640) == newest


# ------------------------------------------------------------------------------------------------ dots of a step


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("kind", VMEM)
@pytest.mark.parametrize(
    ("name", "tiling"), [("gmm", (512, 1024, 512)), ("gmm", (256, 1024, 768)), ("tgmm", (512, 512, 768))]
)
def test_dots_cover_a_tile_once_and_256_of_its_rows_once_more(name, tiling, kind, dtype):
    """Of gmm's tile of 256 rows there is one program: masks cost less than a second one."""
    tm, tk, tn = tiling
    with on(kind):
        found = planned(name, 1024, 1536, m=1024, dtype=dtype, tiling=tiling)
    covered = sum(dot.rows * dot.depth * dot.columns * dot.count for dot in found.dots)
    assert covered == (tm + (MXU if tm > MXU else 0)) * tk * tn


@pytest.mark.parametrize("transpose_rhs", [False, True])
def test_a_sum_over_nothing_is_one_over_a_single_zero(transpose_rhs):
    found = planned("gmm", 0, 24, m=40, transpose_rhs=transpose_rhs)
    assert [block.array for block in found.inputs] == [(40, 1), (3, 24, 1) if transpose_rhs else (3, 1, 24)]
    for block in (*found.inputs, *found.outputs):
        assert block.shape[-2:] == block.array[-2:]  # as Mosaic asks where they are of no whole registers


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
    (dot,) = (equation for equation in traced.eqns if equation.primitive.name == "dot_general")
    assert [str(operand.aval.dtype) for operand in dot.invars] == [fed] * 2
    highest = jax.lax.Precision.HIGHEST if fed == "float32" else jax.lax.Precision.DEFAULT
    assert dot.params["precision"] == (highest, highest)
    assert str(dot.outvars[0].aval.dtype) == "float32"


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
    (m, k, n), seen = (sum(sizes), 136, 24), []
    assert m == 5 * 512

    def dot_general(a, b, axes, **options):
        jax.debug.callback(lambda: seen.append(a.shape[0]))
        return plain(a, b, axes, **options)

    plain = jax.lax.dot_general
    monkeypatch.setattr(jax.lax, "dot_general", dot_general)
    rhs = (len(sizes), k, n) if name == "gmm" else (m, n)
    operands = [to_jax(np.ones(shape, np.float32)) for shape in ((m, k), rhs)]
    getattr(kernels, name)(*operands, to_jax(np.array(sizes, np.int32)), tiling=(512, 256, 128))
    jax.effects_barrier()
    assert sorted(seen) == sorted(blocks_of_rows(sizes, 512))
