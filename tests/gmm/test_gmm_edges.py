"""Groups that begin or end at the first or the last row of a tile, and beside them: a kernel has a shorter way where a
group has a whole tile, and no pattern of the matrix need have a group that misses one by a row."""

import importlib

import ml_dtypes
import numpy as np
import pytest

from cpu_golden import gmm as golden
from parity.interop import to_jax, to_numpy, to_torch

TM = 512  # two blocks of rows on the TPU; the GPU makes 128 of it
SIZES = np.array([1, 511, 511, 1, 0, 512, 2, 509, 1, 0, 512], np.int32)
M, K, N, G = int(SIZES.sum()), 128, 128, len(SIZES)


@pytest.mark.parametrize("quantised", [False, True], ids=["wide", "quantised"])
@pytest.mark.parametrize("name", ["gmm", "tgmm"])
@pytest.mark.parametrize(
    ("package", "convert"),
    [
        pytest.param("tpu_kernels", to_jax, marks=pytest.mark.tpu),
        pytest.param("gpu_reference", to_torch, marks=pytest.mark.gpu),
    ],
)
def test_groups_at_the_edges_of_tiles_are_exact_on_integers(package, convert, name, quantised):
    pytest.importorskip("jax" if package == "tpu_kernels" else "triton")
    shape = (G, K, N) if name == "gmm" else (M, N)
    lhs, rhs = (np.random.default_rng(seed).integers(-4, 5, s) for seed, s in enumerate([(M, K), shape]))
    expected = getattr(golden, name)(lhs.astype(np.float32), rhs.astype(np.float32), SIZES)
    lhs, rhs = (convert(x.astype(ml_dtypes.float8_e4m3fn if quantised else np.float32)) for x in (lhs, rhs))
    options = dict(preferred_element_type="float32", tiling=(TM, K, N))
    if quantised:
        one = [convert(np.ones([1] * ndim, np.float32)) for ndim in (2, len(shape))]
        kernel = getattr(importlib.import_module(f"{package}.quantized_gmm"), f"{name}_quantized")
        got = kernel(lhs, one[0], rhs, one[1], convert(SIZES), **options)
    else:
        got = getattr(importlib.import_module(f"{package}.gmm"), name)(lhs, rhs, convert(SIZES), **options)
    assert np.array_equal(to_numpy(got), expected)
