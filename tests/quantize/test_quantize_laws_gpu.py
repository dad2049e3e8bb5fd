# ruff: noqa: E402 (frameworks may be missing, and are asked for before they are imported)
"""The quantisers' kernels on the GPU where the matrix does not look: what lies around their arrays, quotients a hair
off a tie, blocks larger than a tile, what is shown to a probe, and how much work is planned."""

import math

import ml_dtypes
import numpy as np
import pytest

pytest.importorskip("triton")
torch = pytest.importorskip("torch")

from cpu_golden import mxfp8 as golden_mxfp8
from cpu_golden import quantize as golden
from cpu_golden.stages import Stages
from gpu_reference import mxfp8
from gpu_reference import quantize as gpu
from gpu_reference._lib.formats import NO_OUTPUT, Output
from op_arguments.probe import probing
from parity.interop import to_numpy, to_torch
from tests.support.formats import decode, nearest_code, quantise
from tests.support.functions import public
from tests.support.interpreter import DEVICE, interpreted

pytestmark = pytest.mark.gpu
AROUND = 512
LARGE = {torch.float32: 3e38, torch.uint8: 0x7B}
TILE = 128 * 128  # elements: 32 for each of the 512 threads of a program


def small(shape, seed=0):
    """Less than one in size, so that a largest one of anything else is seen."""
    return (np.random.default_rng(seed).standard_normal(shape) * 1e-3).astype(np.float32)


def on_device(x):
    return to_torch(x, device=DEVICE)


def bytes_of(x):
    return np.ascontiguousarray(to_numpy(x) if isinstance(x, torch.Tensor) else x).view(np.uint8)


class Guarded:
    """Tensors that lie among large numbers; none of those must be read as theirs, or written."""

    def __init__(self):
        self._wholes = []

    def __call__(self, x):
        whole = torch.full((AROUND + x.numel() + AROUND,), LARGE[x.dtype], dtype=x.dtype, device=DEVICE)
        inside = whole[AROUND:-AROUND].view(x.shape)
        self._wholes.append(whole)
        return inside.copy_(x)

    def empty(self, *shape, dtype=torch.uint8):
        return self(torch.zeros(shape, dtype=dtype))

    def check(self):
        for whole in self._wholes:
            around = torch.cat([whole[:AROUND], whole[-AROUND:]])
            assert (around == LARGE[whole.dtype]).all()


@pytest.mark.parametrize("blocks", [(1, 45), (38, 1), (38, 45), (1, 9), (19, 15), (1, 1)], ids=str)
def test_a_quantiser_keeps_to_its_arrays(blocks):
    """Tiles reach beyond the array on both sides, and the largest of a block is none of what lies there."""
    shape, x, of = (38, 45), small((38, 45)), Guarded()
    scales = tuple(n // block for n, block in zip(shape, blocks, strict=True))
    result = Output(of.empty(*shape), of.empty(*scales, dtype=torch.float32))
    (launch,) = gpu.quantize_launches(of(to_torch(x)), blocks, "float8_e4m3fn", result)
    launch.run(torch.device(DEVICE))
    codes, scale = quantise(x, scales, "float8_e4m3fn")
    np.testing.assert_array_equal(bytes_of(result.scale), scale.view(np.uint8))
    np.testing.assert_array_equal(bytes_of(result.qvalue), codes.view(np.uint8))
    wide = of.empty(*shape, dtype=torch.float32)
    gpu.dequantize_launch(result.qvalue, blocks, "float8_e4m3fn", result.scale, wide).run(torch.device(DEVICE))
    np.testing.assert_array_equal(to_numpy(wide), golden.fp8_dequantize(codes, scale))
    of.check()


@pytest.mark.parametrize("blocks", [(37, 45), (37, 9)], ids=str)
def test_the_dual_quantiser_keeps_to_its_arrays(blocks):
    shape, x, of = (37, 45), small((37, 45)), Guarded()
    scales = (37, 45 // blocks[1]), (37 // blocks[0], 45)
    results = [Output(of.empty(*shape), of.empty(*each, dtype=torch.float32)) for each in scales]
    (launch,) = gpu.quantize_launches(of(to_torch(x)), blocks, "float8_e5m2", *results)
    launch.run(torch.device(DEVICE))
    for result, each in zip(results, scales, strict=True):
        codes, scale = quantise(x, each, "float8_e5m2")
        np.testing.assert_array_equal(bytes_of(result.scale), scale.view(np.uint8))
        np.testing.assert_array_equal(bytes_of(result.qvalue), codes.view(np.uint8))
    of.check()


@pytest.mark.parametrize("shape", [(2, 37, 45), (1, 33, 300)], ids=str)
def test_the_mxfp8_quantiser_keeps_to_its_arrays(shape):
    """Both ways at once, each way alone, and back."""
    x, device = small(shape), torch.device(DEVICE)
    expected = golden_mxfp8.mxfp8_quantize(x, 2), golden_mxfp8.mxfp8_quantize(x, 1)
    for wanted in ((True, True), (True, False), (False, True)):
        of = Guarded()
        results = [
            Output(*(of.empty(*part.shape) for part in each)) if is_wanted else NO_OUTPUT
            for each, is_wanted in zip(expected, wanted, strict=True)
        ]
        mxfp8.mxfp8_quantize_launch(of(to_torch(x)), "float8_e4m3fn", "up", *results).run(device)
        for result, each, by_rows in zip(results, expected, (True, False), strict=True):
            if result is not NO_OUTPUT:
                for got, theirs in zip(result[:2], each, strict=True):
                    np.testing.assert_array_equal(to_numpy(got), theirs.view(np.uint8))
                wide = of.empty(*shape, dtype=torch.float32)
                mxfp8.mxfp8_dequantize_launch(result.qvalue, "float8_e4m3fn", result.scale, by_rows, wide).run(device)
                np.testing.assert_array_equal(to_numpy(wide), golden_mxfp8.mxfp8_dequantize(*each))
        of.check()


@pytest.mark.parametrize("name", ["float8_e4m3fn", "float8_e5m2"])
def test_a_quotient_a_hair_off_a_tie_is_rounded_to_the_nearer_side(name):
    """Of MXFP8, where the scale is one."""
    values = np.unique(np.abs(decode(name)[np.isfinite(decode(name))]))
    middles = ((values[1:] + values[:-1]) / 2).astype(np.float32)
    near = np.stack([np.nextafter(middles, np.float32(0)), middles, np.nextafter(middles, np.float32(np.inf))])
    beside = np.resize(near, (-(-near.size // 31), 31))  # beside the largest value, which makes the scale
    x = np.concatenate([np.full((len(beside), 1), values[-1], np.float32), beside], axis=1)
    got = mxfp8.mxfp8_quantize(on_device(x), 1, dtype=name)
    assert (bytes_of(got.scale) == 127).all()
    np.testing.assert_array_equal(bytes_of(got.qvalue), nearest_code(x, name))


@pytest.mark.parametrize(("name", "largest"), [("float8_e4m3fn", 448.0), ("float8_e5m2", 57344.0)])
def test_a_power_of_two_is_the_least_that_saturates_nothing_to_the_last_bit(name, largest):
    """absmax is the format's largest value times a power of two, or the float32 beside it on either side."""
    exponents = np.arange(-100, 100, 25)
    of_format = (largest * 2.0**exponents).astype(np.float32)
    x = np.stack([np.nextafter(of_format, np.float32(0)), of_format, np.nextafter(of_format, np.float32(np.inf))], 1)
    got = mxfp8.mxfp8_quantize(on_device(x.reshape(-1, 1)), 1, dtype=name)
    byte = 127 + exponents[:, None] + np.array([0, 0, 1])
    np.testing.assert_array_equal(bytes_of(got.scale).reshape(byte.shape), byte)


@pytest.mark.parametrize("dtype", [np.float32, ml_dtypes.bfloat16], ids=["f32", "bf16"])
@pytest.mark.parametrize(
    ("shape", "axis"), [((150, 140), 0), ((300, 130), 0), ((2, 150, 140), (-2, -1)), ((2, 16400), 1)], ids=str
)
def test_of_a_block_larger_than_a_tile_what_is_zero_has_a_scale_of_one(shape, axis, dtype):
    """Each block has its own scale. Subnormals count as zero; a part of the block whose elements are all zero says
    nothing of the others."""
    x = (small(shape) * np.arange(1, shape[-1] + 1)).astype(dtype)
    x[0] = 0
    x[..., 0] = 1e-40
    if isinstance(axis, int) and axis == 0:
        x[:, 1] = 0
    got, expected = gpu.fp8_quantize(on_device(x), axis, None), golden.fp8_quantize(x, axis, None)
    for ours, theirs in zip(got, expected, strict=True):
        np.testing.assert_array_equal(bytes_of(ours), bytes_of(theirs))
    assert (to_numpy(got.scale) == 1).any() and (to_numpy(got.scale) != 1).any()


@pytest.mark.parametrize("name", ["float8_e4m3fn", "float8_e5m2"])
def test_the_dual_quantiser_is_two_where_blocks_are_larger_than_a_tile(name):
    x = small((2, 150, 140))
    x[0, :, 3] = x[1, 5] = 0
    got, expected = gpu.fp8_dual_quantize(on_device(x), None, dtype=name), golden.fp8_dual_quantize(x, None, dtype=name)
    for ours, theirs in zip(got, expected, strict=True):
        np.testing.assert_array_equal(bytes_of(ours), bytes_of(theirs))


@pytest.mark.parametrize(
    ("shape", "axis", "block"),
    [((12, 6), 0, 2), ((12, 6), 1, 2), ((4, 6, 8), (0, 1, 2), 2), ((4, 6, 8), (0, 2), 2), ((48,), 0, 16),
     ((4, 3, 8, 5), (0, 2), 4), ((2, 3, 4, 6), (0, 1, 3), None), ((3, 8, 16), 2, 4), ((3, 8, 16), (1, 2), 4),
     ((3, 8, 16), (0, 1), None), ((3, 8, 16), (1, 2), None), ((3, 8, 16), (0, 1, 2), 1)],
)  # fmt: skip
def test_blocks_lie_where_the_axes_say(shape, axis, block):
    """Of two elements, along axes that are apart, along all; of each its own size."""
    x = (small(shape) * np.arange(1, 1 + math.prod(shape)).reshape(shape)).astype(np.float32)
    got, expected = gpu.int8_quantize(on_device(x), axis, block), golden.int8_quantize(x, axis, block)
    np.testing.assert_array_equal(to_numpy(got.scale), expected.scale)
    np.testing.assert_array_equal(to_numpy(got.qvalue), expected.qvalue)
    np.testing.assert_array_equal(to_numpy(gpu.int8_dequantize(*got)), golden.int8_dequantize(*expected))


QUANTISERS = {
    "fp8_quantize": dict(axis=1, block_size=15),
    "int8_quantize": dict(axis=(0, 1), block_size=15),
    "fp8_dual_quantize": dict(block_size=15),
    "mxfp8_quantize": dict(axis=1),
    "mxfp8_dual_quantize": dict(),
}


def with_odd_blocks(name):
    """Zero blocks, subnormal ones and, where the format has it, NaN."""
    x = small((30, 45))
    x[15:, :15] = x[:5] = 0
    x[5:10] = x[:, 20] = 1e-40
    if name != "int8_quantize":
        x[10:15, 30:] = x[-3:, 25:32] = x[:, 21] = np.nan
    return x


@pytest.mark.parametrize("name", [name for name in QUANTISERS if name != "int8_quantize"])
def test_nan_is_refused_by_no_format_that_has_it(name):
    x = with_odd_blocks(name)
    got, expected = (public(package)[name](given, **QUANTISERS[name])
                     for package, given in (("gpu_reference", on_device(x)), ("cpu_golden", x)))  # fmt: skip
    for ours, theirs in zip(got, expected, strict=True):
        np.testing.assert_array_equal(bytes_of(ours), bytes_of(theirs))


@interpreted
@pytest.mark.parametrize("way", [*QUANTISERS, "mxfp8_quantize-columns"])
def test_each_stage_is_shown_once_for_each_of_its_values(way):
    name, _, columns = way.partition("-")
    arguments = QUANTISERS[name] | (dict(axis=0) if columns else {})
    x, shown, expected = with_odd_blocks(name), {}, {}

    def shows(site, value, where):
        value, where = np.broadcast_arrays(value.handle.data, where.handle.data)
        shown.setdefault(site, []).append(value[where])
        return value

    def rounding(site, value):
        if site.rpartition("_")[2] in ("absmax", "scale", "spread"):
            expected[site] = value
        return value

    with probing(shows):
        public("gpu_reference")[name](on_device(x), **arguments)
    public("cpu_golden")[name](x, **arguments, stages=Stages(rounding))
    assert shown.keys() == expected.keys()
    for site, value in expected.items():
        np.testing.assert_array_equal(np.sort(np.concatenate(shown[site])), np.sort(value.ravel()), err_msg=site)


def meta(*shape, dtype=torch.uint8):
    return torch.empty(*shape, dtype=dtype, device="meta")


@pytest.mark.parametrize(
    ("shape", "blocks", "tile", "programs"),
    [
        ((256, 384), (1, 128), (128, 128), 2 * 3),
        ((256, 384), (1, 1), (32, 512), 8),  # whole rows, as many as a tile holds
        ((2, 40000), (1, 1), (1, TILE), 2 * 3),
        ((256, 384), (128, 1), (128, 128), 2 * 3),
        ((256, 384), (128, 128), (128, 128), 2 * 3),
        ((256, 384), (32, 1), (32, 128), 8 * 3),  # no wider: columns that are reduced are taken 128 at a time
        ((256, 384), (1, 32), (256, 32), 12),
        ((1000, 384), (1, 32), (512, 32), 2 * 12),
        ((256, 384), (2, 2), (2, 2), 128 * 192),
        ((37, 45), (37, 45), (64, 64), 1),
        ((3, 5), (1, 1), (4, 8), 1),
        ((2, TILE), (1, TILE), (1, TILE), 2),
        ((2, 2 * TILE), (1, 2 * TILE), (1, TILE), 2 * 2),
        ((256, 384), (256, 1), (128, 128), 2 * 3),
        ((512, 384), (256, 384), (128, 128), 2 * 2 * 3),
    ],
)
def test_a_tile_is_as_large_as_its_cell_and_no_program_is_without_work(shape, blocks, tile, programs):
    """A cell is a block, or the whole of an axis that has none; its tiles cover it, none lies beside it."""
    scale = meta(*(n // block for n, block in zip(shape, blocks, strict=True)), dtype=torch.float32)
    result = Output(meta(*shape), scale)
    quantise_it = gpu.quantize_launches(meta(*shape, dtype=torch.float32), blocks, "int8", result)
    back = gpu.dequantize_launch(meta(*shape), blocks, "int8", scale, meta(*shape, dtype=torch.float32))
    fits = all(block == 1 or block <= n for block, n in zip(blocks, tile, strict=True))
    assert len(quantise_it) == (1 if fits else 2)  # a block of several tiles has its largest found first
    assert (quantise_it[0].arguments["output"].qvalue is None) == (not fits)  # and no codes are stored until it is
    for launch in (*quantise_it, back):
        assert launch.arguments["TILE"][:2] == tile
        assert launch.grid == (programs,)
        assert math.prod(tile) <= TILE
        # Products that are compared are exact: fused or not, they have the same bits, and fused is less to do.
        assert launch.options["enable_fp_fusion"]


@pytest.mark.parametrize(
    ("shape", "axis"),
    [((3, 96, 160), 2), ((3, 96, 160), 1), ((3, 96, 160), 0), ((2, 33, 300), 1), ((40,), 0), ((6, 40, 1), 1)],
    ids=str,
)
def test_blocks_of_32_lie_along_any_axis(shape, axis):
    """Behind the axis there is something or nothing, and its last block is short or whole."""
    x = small(shape)
    got, expected = mxfp8.mxfp8_quantize(on_device(x), axis), golden_mxfp8.mxfp8_quantize(x, axis)
    for ours, theirs in zip(got, expected, strict=True):
        np.testing.assert_array_equal(bytes_of(ours), bytes_of(theirs))
    back = mxfp8.mxfp8_dequantize(*got), golden_mxfp8.mxfp8_dequantize(*expected)
    np.testing.assert_array_equal(to_numpy(back[0]), back[1])
