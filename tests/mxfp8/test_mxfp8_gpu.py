# ruff: noqa: E402 (frameworks may be missing, and are asked for before they are imported)
"""The MXFP8 quantisers and grouped_gemm on the GPU, or its emulation, against the golden; the matmuls on both paths:
block scales in the matrix unit, and in registers."""

import ml_dtypes
import numpy as np
import pytest

pytest.importorskip("triton")
torch = pytest.importorskip("torch")

from cpu_golden.grouped_gemm import grouped_gemm as golden
from cpu_golden.swizzle import swizzle_scales as golden_swizzle_scales
from gpu_reference import grouped_gemm as gpu
from gpu_reference.mxfp8 import mxfp8_quantize
from gpu_reference.swizzle import swizzle_scales
from parity.backends import runner
from parity.backends.emulation import tensor_core
from parity.interop import to_numpy, to_torch
from tests.matrix.mxfp8 import GROUPED_GEMM, MXFP8_QUANTIZERS
from tests.support.agreement import agree, are_exact
from tests.support.interpreter import DEVICE, interpreted

pytestmark = pytest.mark.gpu

E4M3, E5M2 = ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e5m2
SIZES = np.array([33, 0, 1, 31, 40], np.int32)
ROWS = 128  # sum(SIZES) is 105: the tail is poison
PATHS = {"block_scaled": "sm_100", "bfloat16": "sm_90"}
needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


test_has_the_goldens_bits = agree(*MXFP8_QUANTIZERS, backend="gpu")
test_agrees_with_golden = agree(GROUPED_GEMM, backend="gpu")
test_is_exact_on_integers = are_exact(GROUPED_GEMM, backend="gpu")


@pytest.fixture
def path(request, monkeypatch):
    """Kernels interpreted as on a GPU that takes this path."""
    monkeypatch.setattr(gpu, "architecture", lambda device=None: PATHS[request.param])
    with tensor_core.emulated():
        yield request.param


def draw(shape, axis, dtype=E4M3, seed=0):
    """Small integers with powers of two from block to block: every product and every sum below is exact."""
    rng = np.random.default_rng(seed)
    codes = rng.integers(-3, 4, shape).astype(dtype)
    blocks = [*shape]
    blocks[axis] = -(-shape[axis] // 32)
    return codes, rng.integers(126, 129, blocks).astype(np.uint8).view(ml_dtypes.float8_e8m0fnu)


def swizzled(scale, axis):
    return golden_swizzle_scales(np.ascontiguousarray(np.moveaxis(scale, axis, -1)))


def on_gpu(*arrays, **arguments):
    tensors = [to_torch(x, device=DEVICE) for x in arrays]
    scales = {name: to_torch(x, device=DEVICE) for name, x in arguments.items() if isinstance(x, np.ndarray)}
    return to_numpy(gpu.grouped_gemm(*tensors, **arguments | scales, preferred_element_type=torch.float32))


@interpreted
@pytest.mark.parametrize("path", PATHS, indirect=True)
@pytest.mark.parametrize("layout", ["plain", "swizzled"])
@pytest.mark.parametrize("ragged", ["lhs", "contracting"])
def test_both_paths_are_exact_on_integers_whatever_the_groups(path, ragged, layout):
    """Nothing of the tail is read, nor a scale of the rows of other groups. Swizzled scales lie in several tiles."""
    k, n = 144, 136
    if ragged == "lhs":
        (lhs, lhs_scale), (rhs, rhs_scale), axes = draw((ROWS, k), 1), draw((5, k, n), 1, E5M2, seed=1), (1, 1)
        poisoned = [(lhs.view(np.uint8), SIZES.sum(), 0x7F), (lhs_scale.view(np.uint8), SIZES.sum(), 0xFF)]
    else:
        (lhs, lhs_scale), (rhs, rhs_scale), axes = draw((ROWS, k), 0), draw((ROWS, n), 0, E5M2, seed=1), (0, 0)
        # Rows from 105 on belong to no group; blocks from 128 on have none of any.
        lhs_scale, rhs_scale = (np.concatenate([x, x]) for x in (lhs_scale, rhs_scale))
        lhs, rhs = (np.concatenate([x, x]) for x in (lhs, rhs))
        poisoned = [(x.view(np.uint8), SIZES.sum(), 0x7F) for x in (lhs, rhs)]
        poisoned += [(x.view(np.uint8), ROWS // 32, 0xFF) for x in (lhs_scale, rhs_scale)]
    arguments = dict(ragged=ragged, lhs_scale=lhs_scale, rhs_scale=rhs_scale)
    expected = golden(lhs, rhs, SIZES, **arguments, preferred_element_type="float32")
    for bytes_of, first, poison in poisoned:
        bytes_of[first:] = poison
    if layout == "swizzled":
        arguments |= dict(lhs_scale=swizzled(lhs_scale, axes[0]), rhs_scale=swizzled(rhs_scale, axes[1]))
    got = on_gpu(lhs, rhs, SIZES, **arguments, scale_layout=layout)
    np.testing.assert_array_equal(got, expected)
    assert np.count_nonzero(got) > got.size // 3


@interpreted
@pytest.mark.filterwarnings("ignore:(overflow|invalid value) encountered:RuntimeWarning")  # at the ends, on purpose
@pytest.mark.parametrize(
    ("path", "name"),
    [
        ("block_scaled", "float8_e4m3fn"),
        ("block_scaled", "float8_e5m2"),
        ("bfloat16", "float8_e4m3fn"),
        ("bfloat16", "float8_e5m2"),
    ],
    indirect=["path"],
)
def test_every_code_times_every_scale_is_exact(path, name):
    """256 x 256 products, picked out by an identity; but those beyond 2^127 or below 2^-126."""
    values = np.arange(256, dtype=np.uint8).view(getattr(ml_dtypes, name)).astype(np.float64)
    codes = np.where(np.isfinite(values), np.arange(256), 0).astype(np.uint8)
    lhs = np.tile(codes, (256, 1)).view(getattr(ml_dtypes, name))
    scale = np.repeat(np.arange(256, dtype=np.uint8)[:, None], 8, axis=1).view(ml_dtypes.float8_e8m0fnu)
    one = np.full((1, 8, 256), 127, np.uint8).view(ml_dtypes.float8_e8m0fnu)
    sizes = np.array([256], np.int32)
    got = on_gpu(lhs, np.eye(256, dtype=E4M3)[None], sizes, lhs_scale=scale, rhs_scale=one)
    exact = lhs.astype(np.float64) * np.exp2(np.arange(256) - 127.0)[:, None]
    exact[255] = np.nan  # the scale 0xFF
    fits = np.abs(exact).max(axis=1) < 2.0**128
    normal = fits[:, None] & ((exact == 0) | (np.abs(exact) >= 2.0**-126))
    np.testing.assert_array_equal(got[normal], exact[normal])
    assert normal.sum() > 220 * 256
    assert np.isnan(got[255]).all()
    # Half a quantum of a bfloat16's subnormals.
    below = fits[:, None] & ~normal
    assert np.abs(got[below] - exact[below]).max() <= 2.0**-134
    assert np.isinf(got).any() or np.isnan(got[~fits]).any()


@interpreted
def test_without_emulation_it_is_right_as_well(monkeypatch):
    (lhs, lhs_scale), (rhs, rhs_scale) = draw((ROWS, 64), 1), draw((5, 64, 48), 1)
    expected = golden(lhs, rhs, SIZES, lhs_scale=lhs_scale, rhs_scale=rhs_scale)
    for target in PATHS.values():
        monkeypatch.setattr(gpu, "architecture", lambda device=None, target=target: target)
        scales = dict(lhs_scale=to_torch(lhs_scale), rhs_scale=to_torch(rhs_scale))
        got = gpu.grouped_gemm(to_torch(lhs), to_torch(rhs), to_torch(SIZES), **scales)
        assert got.dtype == torch.bfloat16
        np.testing.assert_array_equal(to_numpy(got), expected.astype(ml_dtypes.bfloat16))


def test_strided_and_expanded_operands_are_read_where_they_are():
    (lhs, lhs_scale), (rhs, rhs_scale) = draw((ROWS, 64), 1), draw((1, 48, 64), 2)
    expected = golden(
        lhs, np.repeat(rhs, 5, 0), SIZES, lhs_scale=lhs_scale, rhs_scale=np.repeat(rhs_scale, 5, 0), transpose_rhs=True
    )

    def spread(x):
        every_other = torch.zeros(*x.shape[:-1], 2 * x.shape[-1], dtype=torch.uint8, device=DEVICE)[..., ::2]
        every_other.copy_(to_torch(x.view(np.uint8), device=DEVICE))
        return every_other.view(to_torch(x).dtype)

    weights, scale = spread(rhs).expand(5, 48, 64), spread(rhs_scale).expand(5, 48, 2)
    assert not any(x.is_contiguous() for x in (weights, scale, spread(lhs), spread(lhs_scale)))
    with tensor_core.emulated():
        got = gpu.grouped_gemm(
            spread(lhs),
            weights,
            to_torch(SIZES, device=DEVICE),
            lhs_scale=spread(lhs_scale),
            rhs_scale=scale,
            transpose_rhs=True,
        )
    np.testing.assert_array_equal(to_numpy(got), expected.astype(ml_dtypes.bfloat16))


@needs_cuda
@pytest.mark.parametrize("ragged", ["lhs", "contracting"])
def test_a_captured_graph_follows_new_group_sizes(ragged):
    """Nothing waits for the host: a CUDA graph of quantising and multiplying is replayed with other groups."""
    axis = 1 if ragged == "lhs" else 0
    x = to_torch(draw((ROWS, 64), axis)[0].astype(np.float32), device="cuda").bfloat16()
    w_shape = (5, 64, 96) if ragged == "lhs" else (ROWS, 96)
    w = to_torch(draw(w_shape, axis, seed=1)[0].astype(np.float32), device="cuda").bfloat16()
    sizes = to_torch(SIZES, device="cuda")

    def step():
        a, b = mxfp8_quantize(x, axis), mxfp8_quantize(w, axis)
        return gpu.grouped_gemm(a.qvalue, b.qvalue, sizes, lhs_scale=a.scale, rhs_scale=b.scale, ragged=ragged)

    step()  # compiles
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = step()
    for new in ([105, 0, 0, 0, 0], [0, 64, 32, 31, 1], [20, 21, 22, 23, 0]):
        sizes.copy_(torch.tensor(new, dtype=torch.int32))
        graph.replay()
        torch.cuda.synchronize()
        assert torch.equal(out, step())


def test_swizzled_scales_of_any_strides_are_the_same():
    scale = to_torch(draw((300, 160), 1)[1])
    assert torch.equal(
        swizzle_scales(scale.t().contiguous().t()).view(torch.uint8), swizzle_scales(scale).view(torch.uint8)
    )


def test_the_runner_takes_the_path_of_its_gpu():
    """The matrix is judged on the path that this host's GPU, or the interpreter, would take."""
    for rhs in (torch.float8_e4m3fn, torch.float8_e5m2):
        support = gpu.grouped_gemm_support(torch.float8_e4m3fn, rhs)
        if runner("gpu").real:
            assert support.path in PATHS
        else:
            assert (support.path, support.fallback) == ("block_scaled", False)
            assert "interpreted" in support.reason


@interpreted
def test_a_fallback_is_refused_where_it_is_to_be_strict(monkeypatch):
    monkeypatch.setattr(gpu, "architecture", lambda device=None: "sm_90")
    codes, scale = torch.zeros(1, 1, 32, dtype=torch.float8_e5m2), torch.zeros(1, 1, 1, dtype=torch.float8_e8m0fnu)
    with pytest.raises(ValueError, match="strict must be False for a fallback, bfloat16: the matrix unit of sm_90"):
        gpu.grouped_gemm(
            codes[0], codes, torch.ones(1, dtype=torch.int32), lhs_scale=scale[0], rhs_scale=scale,
            transpose_rhs=True, strict=True,
        )  # fmt: skip
