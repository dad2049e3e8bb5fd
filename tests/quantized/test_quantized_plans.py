"""What the grouped matmuls plan by the chip and by the sizes, where no case of the matrix would tell one plan from
another: what a dot multiplies, the tiles, and blocks of scales that are larger than a tile."""

from contextlib import contextmanager

import ml_dtypes
import numpy as np
import pytest

from cpu_golden import quantize as golden
from parity.interop import to_jax, to_numpy, to_torch

pytestmark = pytest.mark.smoke


@contextmanager
def on(kind):
    """As if for a TPU of this kind."""
    jax = pytest.importorskip("jax")
    device = jax.sharding.AbstractDevice(device_kind=kind, num_cores=1, platform="tpu")
    with jax.sharding.use_abstract_mesh(jax.sharding.AbstractMesh((1,), ("x",), abstract_device=device)):
        yield


@pytest.mark.parametrize(
    ("kind", "dtype", "multiplied"),
    [
        ("TPU v5e", "float8_e4m3fn", "bfloat16"),
        ("TPU v6e", "float8_e4m3fn", "bfloat16"),
        ("TPU7x", "float8_e4m3fn", "float8_e4m3fn"),
        ("TPU v4", "int8", "bfloat16"),
        ("TPU v5e", "int8", "int8"),
        ("TPU7x", "int8", "bfloat16"),
    ],
)
def test_a_dot_is_of_what_the_chip_multiplies(kind, dtype, multiplied):
    jax = pytest.importorskip("jax")
    from tpu_kernels.quantized_gmm import _product

    x = jax.ShapeDtypeStruct((32, 32), dtype)
    with on(kind):
        traced = jax.make_jaxpr(lambda a, b: _product(a, b, (1, 0)))(x, x)
    (dot,) = [equation for equation in traced.eqns if equation.primitive.name == "dot_general"]
    assert [str(operand.aval.dtype) for operand in dot.invars] == [multiplied] * 2


@pytest.mark.parametrize("kind", ["TPU v5e", "TPU7x"])
@pytest.mark.parametrize("wide", ["float32", "bfloat16"])
def test_beside_a_wide_operand_a_narrow_one_is_multiplied_as_that(kind, wide):
    jax = pytest.importorskip("jax")
    from tpu_kernels.quantized_gmm import _product_path

    x, narrow = jax.ShapeDtypeStruct((32, 32), wide), jax.ShapeDtypeStruct((32, 32), "float8_e4m3fn")
    with on(kind):
        assert _product_path(x, narrow) == _product_path(narrow, x) == wide


@pytest.mark.parametrize(
    ("kind", "small", "k", "n", "gmm_tile", "tgmm_tile"),
    [
        ("TPU v5e", True, 2048, 512, (256, 2048, 512), (512, 1024, 512)),
        ("TPU v5e", True, 7168, 2048, (512, 1024, 512), (512, 512, 1024)),
        ("TPU v6e", True, 512, 2048, (1024, 512, 2048), (1024, 512, 1024)),
        ("TPU7x", True, 2048, 512, (512, 2048, 512), (1024, 1024, 512)),
        ("TPU7x", True, 2048, 768, (512, 2048, 768), (1024, 1024, 768)),
        ("TPU7x", True, 2880, 2880, (256, 2880, 512), (1024, 1024, 1024)),
        ("TPU7x", True, 4096, 14336, (1024, 512, 2048), (1024, 1024, 1024)),
        ("TPU7x", False, 4096, 14336, (512, 1024, 1024), (1024, 512, 1024)),
    ],
)
def test_tiles_of_bfloat16(kind, small, k, n, gmm_tile, tgmm_tile):
    jax = pytest.importorskip("jax")
    from tpu_kernels.gmm import _gmm_tiles, _tgmm_tiles

    with on(kind):
        assert _gmm_tiles(jax.numpy.bfloat16, small, 8192, k, n) == gmm_tile
        assert _tgmm_tiles(jax.numpy.bfloat16, small, 8192, k, n) == tgmm_tile


@pytest.mark.parametrize(
    ("kind", "narrow", "small", "k", "n", "tile"),
    [
        ("TPU v5e", True, True, 4096, 4096, (512, 512, 512)),
        ("TPU v6e", True, False, 512, 4096, (1024, 512, 2048)),
        ("TPU v6e", False, False, 513, 512, (512, 2048, 512)),
        ("TPU7x", True, False, 513, 2880, (1024, 1024, 1024)),
        ("TPU7x", True, True, 513, 2880, (1024, 1024, 1536)),
        ("TPU7x", True, False, 513, 513, (1024, 1024, 513)),
        ("TPU7x", True, False, 513, 1024, (1024, 1024, 1024)),
        ("TPU7x", True, False, 513, 1025, (1024, 1024, 768)),
        ("TPU7x", True, True, 513, 2048, (1024, 1024, 2048)),
        ("TPU7x", True, True, 513, 2049, (1024, 1024, 1280)),
    ],
)
def test_tiles_of_tgmm(kind, narrow, small, k, n, tile):
    pytest.importorskip("jax")
    from tpu_kernels.quantized_gmm import _tgmm_tiles

    with on(kind):
        assert _tgmm_tiles(narrow, small, 4096, k, n) == tile


@pytest.mark.parametrize(
    ("kind", "block", "small", "mxfp8", "k", "n", "tile"),
    [
        ("TPU v5e", 128, True, False, 7168, 2048, (256, 1024, 512)),
        ("TPU v5e", 32, True, False, 7168, 2048, (256, 512, 512)),
        ("TPU7x", 128, True, False, 2048, 512, (1024, 2048, 512)),
        ("TPU7x", 128, True, False, 7168, 2048, (1024, 1024, 2048)),
        ("TPU7x", 128, False, False, 7168, 2048, (512, 1792, 512)),
        ("TPU7x", 512, True, False, 7168, 2048, (1024, 2048, 1024)),  # of whole blocks
        ("TPU7x", 7168, True, False, 7168, 2048, (1024, 1792, 1024)),
        ("TPU v6e", 7168, True, False, 7168, 2048, (1024, 1792, 1024)),
        ("TPU7x", 32, True, False, 300, 2880, (1024, 300, 1536)),
        ("TPU7x", 2880, True, True, 2880, 2880, (1024, 1024, 1024)),
        ("TPU7x", 2880, False, True, 2880, 2880, (512, 1536, 512)),
        # At the edges: of few scales, of columns that ask for longer steps or fit into one, of steps along K.
        ("TPU v6e", 256, True, False, 2048, 2048, (1024, 2048, 1024)),
        ("TPU v6e", 128, True, False, 2048, 2048, (512, 1024, 2048)),
        ("TPU7x", 128, True, False, 2048, 513, (1024, 1024, 513)),
        ("TPU7x", 128, True, False, 2048, 2049, (1024, 1024, 1280)),
        ("TPU7x", 2048, False, False, 2048, 513, (512, 2048, 512)),
        ("TPU7x", 2049, True, False, 2049, 1026, (1024, 1280, 1026)),
        ("TPU7x", 2048, True, False, 2048, 1026, (1024, 2048, 768)),
        ("TPU7x", 1025, True, True, 1025, 513, (1024, 768, 513)),
    ],
)
def test_tiles_of_gmm(kind, block, small, mxfp8, k, n, tile):
    """Even steps: the matrix unit multiplies all of the last one too."""
    pytest.importorskip("jax")
    from tpu_kernels.quantized_gmm import _gmm_tiles

    with on(kind):
        assert _gmm_tiles(block, small, mxfp8, 4096, k, n) == tile


@pytest.mark.parametrize(
    ("shape", "axis"), [((300, 130), 0), ((2, 150, 140), (-2, -1)), ((2, 16400), 1)], ids=["columns", "planes", "rows"]
)
@pytest.mark.parametrize("dtype", [np.float32, ml_dtypes.bfloat16], ids=["f32", "bf16"])
def test_blocks_larger_than_a_tile_have_each_its_own_scale(shape, axis, dtype):
    """On the GPU a kernel of its own finds their largest magnitudes; in the matrix there is one such block at most."""
    pytest.importorskip("triton")
    from gpu_reference.quantize import fp8_quantize

    x = (np.random.default_rng(0).standard_normal(shape) * np.arange(1, shape[-1] + 1)).astype(dtype)
    got, expected = fp8_quantize(to_torch(x), axis, None), golden.fp8_quantize(x, axis, None)
    for ours, theirs in zip(got, expected, strict=True):
        np.testing.assert_array_equal(to_numpy(ours).astype(np.float32), theirs.astype(np.float32))


@pytest.mark.parametrize(
    ("shape", "axis", "block"),
    [
        # No whole registers: on the TPU the elements of a block are laid one below the other.
        ((10, 48), 1, 24),
        ((20, 48), 0, 5),
        ((3, 10, 40), 0, None),
        ((4, 6, 40), (0, 2), 2),
        # Several to a register, or a register and a half; more tiles than one, the last of them not full.
        ((33, 272), 1, 16),
        ((1088, 40), 0, 64),
        ((8, 1152), 1, 384),
        ((40, 1100), 1, 1),
        # Longer than a tile, and walked in steps.
        ((4200, 140), 0, None),
        ((2, 530, 1100), (-2, -1), None),
    ],
    ids=str,
)
def test_blocks_that_the_matrix_has_none_of_have_each_its_own_scale(shape, axis, block):
    pytest.importorskip("jax")
    from tpu_kernels.quantize import fp8_dequantize, fp8_quantize

    x = (np.random.default_rng(0).standard_normal(shape) * np.arange(1, shape[-1] + 1)).astype(np.float32)
    got, expected = fp8_quantize(to_jax(x), axis, block), golden.fp8_quantize(x, axis, block)
    for ours, theirs in zip(got, expected, strict=True):
        np.testing.assert_array_equal(to_numpy(ours).astype(np.float32), theirs.astype(np.float32))
    np.testing.assert_array_equal(to_numpy(fp8_dequantize(*got)), golden.fp8_dequantize(*expected))


@pytest.mark.parametrize("name", ["float8_e4m3fn", "float8_e5m2", "int8"])
def test_a_scale_at_the_ends_of_what_is_normal_is_the_goldens(name):
    """Blocks whose largest element is subnormal, the smallest normal number, or at the limit of what is lifted."""
    pytest.importorskip("jax")
    from tpu_kernels import quantize as kernels

    tiny = np.finfo(np.float32).tiny
    largest = np.float32(127 if name == "int8" else ml_dtypes.finfo(name).max)
    ends = [tiny / 2, np.nextafter(tiny, 0), tiny, np.nextafter(tiny, 1), 2 * tiny, largest * tiny]
    ends += [np.float32(2.0**power) * factor for power in (-65, -64, -63) for factor in (1, largest)]
    ends = np.array(
        [f(end) for end in ends for f in (lambda x: np.nextafter(x, np.float32(0)), np.float32)], np.float32
    )
    parts = np.array([1, 0.5, 0.25, 1 / 3, 1 / largest, 0.9999999, 0.03125, 0, -0.0, -1, -0.7], np.float32)
    x = np.concatenate([ends[:, None] * parts, np.minimum(ends[:, None], [tiny, np.nextafter(tiny, 0)])], 1)
    function, options = ("int8_quantize", {}) if name == "int8" else ("fp8_quantize", {"dtype": name})
    got = getattr(kernels, function)(to_jax(x.astype(np.float32)), 1, None, **options)
    expected = getattr(golden, function)(x.astype(np.float32), 1, None, **options)
    for ours, theirs in zip(got, expected, strict=True):
        assert to_numpy(ours).tobytes() == theirs.tobytes()


AS_THEY_ARE = ((1, 32, 96, 512, 600), (1, 16, 32, 64, 128, 384, 1024, 2000))  # of 600 rows, of 2000 columns
TRANSPOSED = ((2, 16, 31, 33, 48, 63, 544), (2, 8, 15, 17, 31, 33, 63, 65, 127, 129, 192, 1152))


def test_blocks_are_transposed_where_they_are_no_whole_registers_nor_whole_axes():
    pytest.importorskip("jax")
    from tpu_kernels.quantize import Layout, _layout

    for r in (*AS_THEY_ARE[0], *TRANSPOSED[0]):
        for c in (*AS_THEY_ARE[1], *TRANSPOSED[1]):
            plain = r in AS_THEY_ARE[0] and c in AS_THEY_ARE[1]
            layout = _layout((3, 600, 2000), (1, r, c))
            assert (layout.split is None) == plain, (r, c)
            if plain:
                assert layout == Layout((3, 600, 2000), (r, c), None)
    assert _layout((4096,), (128,)) == Layout((1, 1, 4096), (1, 128), None)
    assert _layout((2, 3, 40, 50), (1, 1, 1, 50)) == Layout((6, 40, 50), (1, 50), None)
    # What shares all of the axes before goes into the rows.
    assert _layout((2, 3, 40, 50), (2, 3, 40, 1)) == Layout((1, 240, 50), (240, 1), None)
    assert _layout((2, 1, 40, 50), (2, 1, 40, 50)) == Layout((1, 80, 50), (80, 50), None)
    assert _layout((2, 40, 50), (2, 40, 50)) == Layout((1, 80, 50), (80, 50), None)
    assert _layout((4, 40, 60), (2, 40, 1)) == Layout((1, 80, 120), (80, 1), (2, 2, 1, 40, 60, 1))
    assert _layout((4, 40, 60), (4, 20, 30)) == Layout((1, 2400, 4), (2400, 1), (1, 4, 2, 20, 2, 30))


@pytest.mark.parametrize(
    ("shape", "blocks", "tiles"),
    [
        ((4096, 7168), [(1, 128)], (512, 1024, 1, 1)),
        ((4096, 7168), [(128, 1)], (512, 1024, 1, 1)),
        ((4096, 7168), [(128, 128)], (512, 1024, 1, 1)),
        ((4096, 7168), [(1, 128), (128, 1)], (512, 1024, 1, 1)),
        # Whole blocks only.
        ((4096, 1920), [(1, 384)], (512, 768, 1, 1)),
        ((4032, 7168), [(96, 1)], (480, 1024, 1, 1)),
        ((4096, 7168), [(1, 32)], (512, 1024, 1, 1)),
        # As many rows of whole axes as are as large together, up to 8 times as long as others; and columns.
        ((4096, 2048), [(1, 2048)], (256, 2048, 1, 1)),
        ((4096, 7168), [(1, 7168)], (64, 7168, 1, 1)),
        ((4096, 16384), [(1, 16384)], (64, 8192, 1, 2)),
        ((4096, 768), [(1, 768)], (512, 768, 1, 1)),
        ((2048, 7168), [(2048, 1)], (2048, 256, 1, 1)),
        ((4096, 7168), [(4096, 1)], (4096, 128, 1, 1)),
        ((4128, 7168), [(4128, 1)], (4096, 128, 2, 1)),
        ((300, 7168), [(300, 1)], (320, 1024, 1, 1)),
        # Whole axes both ways are walked in the steps of others.
        ((1000, 2000), [(1000, 2000)], (512, 1024, 2, 2)),
        ((4096, 768), [(1, 768), (4096, 1)], (512, 768, 8, 1)),
        ((512, 7168), [(1, 7168), (512, 1)], (512, 1024, 1, 7)),
        # What is smaller than a tile, in rows of whole registers.
        ((37, 96), [(37, 96)], (64, 96, 1, 1)),
        ((37, 96), [(1, 96)], (64, 96, 1, 1)),
        ((37, 96), [(37, 1)], (64, 96, 1, 1)),
        ((37, 96), [(1, 32)], (64, 96, 1, 1)),
        ((100, 300), [(1, 1)], (128, 300, 1, 1)),
    ],
    ids=str,
)
def test_tiles_of_the_quantisers_hold_whole_blocks_and_no_more_than_others(shape, blocks, tiles):
    pytest.importorskip("jax")
    from tpu_kernels._lib.chip import LANES
    from tpu_kernels.quantize import SUBLANES, Tiles, _tiles

    got = _tiles((3, *shape), blocks)
    assert got == Tiles(*tiles)
    assert got.rows % SUBLANES == 0 and (got.columns % LANES == 0 or got.columns == shape[1])
    assert got.rows * got.columns <= 512 * 1024
    walks = got.grid((3, *shape))
    assert walks[0] == 3
    for axis, (tile, steps, size) in enumerate(zip(tiles[:2], tiles[2:], shape, strict=True)):
        assert walks[1 + axis] == -(-size // (tile * steps))  # every element once
        for block in blocks:
            assert walks[1 + axis] == 1 if block[axis] == size > 1 else tile % block[axis] == 0
    visited = {
        got.at(0, i, j, step) for i in range(walks[1]) for j in range(walks[2]) for step in range(tiles[2] * tiles[3])
    }
    assert visited == {(0, i, j) for i in range(walks[1] * tiles[2]) for j in range(walks[2] * tiles[3])}


@pytest.mark.parametrize(
    ("width", "block", "scales", "step"),
    [
        (1024, 1, 1024, 256), (1024, 32, 32, 128), (1024, 128, 8, 128), (1024, 256, 4, 256), (768, 384, 2, 128),
        (1024, 512, 2, 256), (1024, 1024, 1, 256), (300, 300, 1, 256), (200, 1, 200, 256),
    ],
)  # fmt: skip
def test_columns_are_quantised_by_two_registers_or_one_where_blocks_end_between(width, block, scales, step):
    pytest.importorskip("jax")
    from tpu_kernels.quantize import _slices

    found = [(columns.start, columns.stop) for columns in _slices(width, block, scales)]
    assert found == [(first, min(first + step, width)) for first in range(0, width, step)]


@pytest.mark.parametrize("name", ["float8_e4m3fn", "float8_e5m2"])
@pytest.mark.parametrize("power", ["up", "floor"])
def test_the_power_of_two_that_is_shown_is_the_one_that_is_divided_by(name, power):
    """The kernels have its inverse; every exponent, from 2^-127, which is subnormal, on."""
    pytest.importorskip("jax")
    from tpu_kernels.quantize import FORMATS, _inverse_power, _true_scale

    target = FORMATS[name]._replace(power=power)
    most, two = np.float32(1.75), np.float32(2)  # the largest number of either format, and the power beyond it
    beside = np.array([1, np.nextafter(most, 1), most, np.nextafter(most, two), np.nextafter(two, most)], np.float32)
    absmax = np.ldexp(np.float32(1), np.arange(-126, 128)).astype(np.float32)[:, None] * beside
    absmax = np.concatenate([absmax, np.zeros((1, len(beside)), np.float32)])
    scale = to_numpy(_true_scale(_inverse_power(to_jax(absmax), target), target))
    largest = float(ml_dtypes.finfo(name).max)
    quotient = absmax.astype(np.float64) / scale.astype(np.float64)
    top = 2.0 ** np.floor(np.log2(largest))
    mantissa, _ = np.frexp(scale)
    assert (mantissa == 0.5).all()
    usual = scale > 2.0**-127
    if power == "up":
        assert (quotient <= largest).all() and (quotient[usual] > largest / 2).all()
    else:
        assert (quotient < 2 * top).all() and (quotient[usual] >= top).all()
    assert (scale >= 2.0**-127).all() and not usual[-1].any() and not usual[0].any()


@pytest.mark.parametrize(
    ("ragged", "path", "target", "tiling", "tile"),
    [
        ("lhs", "bfloat16", "sm_90", None, (128, 32, 128)),
        ("lhs", "bfloat16", "sm_90", (8, 16, 8), (16, 32, 16)),
        ("lhs", "block_scaled", "sm_100", (8, 16, 8), (128, 32, 16)),
        ("lhs", "block_scaled", "gfx950", (8, 64, 8), (16, 128, 16)),
        ("contracting", "bfloat16", "sm_90", None, (64, 128, 128)),
        ("contracting", "bfloat16", "sm_90", (16, 8, 8), (32, 16, 16)),
        ("contracting", "block_scaled", "sm_100", (16, 8, 8), (32, 128, 16)),
        ("contracting", "block_scaled", "gfx950", (64, 8, 8), (128, 16, 16)),
    ],
)
def test_tiles_of_mxfp8_on_the_gpu(ragged, path, target, tiling, tile):
    """No smaller than a block of 32 along the sum, and than what the matrix unit takes with its scales."""
    pytest.importorskip("triton")
    from gpu_reference.grouped_gemm import grouped_gemm_tile
    from op_arguments.gmm import Problem

    assert grouped_gemm_tile(Problem(4096, 1024, 1024, 8, 8, ""), path, ragged, tiling, target) == tile
