"""Groups at every edge of a tile, sizes of one, and sums that end inside a step beside weights that are NaN.

A kernel has a shorter way where a group has a whole tile, and none of the matrix's patterns need have a group that
misses one by a row.
"""

import importlib

import ml_dtypes
import numpy as np
import pytest

from cpu_golden import gmm as golden
from parity.interop import to_jax, to_numpy, to_torch

TM = 512  # two blocks of rows on the TPU; the GPU makes 128 of it
EDGES = [1, 511, 511, 1, 512]
E4M3, E8M0 = ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e8m0fnu


def multiply(package, convert, name, operands, k, n, sizes):
    """gmm or tgmm of integers, float32 or in one of the two narrow formats with scales of 1, and what it must be.

    The weights of groups without rows are NaN.
    """
    sizes = np.array(sizes, np.int32)
    m, groups = int(sizes.sum()), len(sizes)
    of_rhs = (groups, k, n) if name == "gmm" else (m, n)
    lhs, rhs = (
        np.random.default_rng(seed).integers(1, 5, shape).astype(np.float32)
        for seed, shape in enumerate([(m, k), of_rhs])
    )
    if name == "gmm":
        rhs[sizes == 0] = np.nan
    expected = getattr(golden, name)(lhs, rhs, sizes)
    options = dict(preferred_element_type="float32", tiling=(TM, 128, 128))
    if operands == "float32":
        kernel = getattr(importlib.import_module(f"{package}.gmm"), name)
        got = kernel(convert(lhs), convert(rhs), convert(sizes), **options)
        return to_numpy(got), expected
    module = importlib.import_module(f"{package}.{'quantized_gmm' if operands == 'fp8' else 'grouped_gemm'}")
    lhs, rhs = convert(lhs.astype(E4M3)), convert(rhs.astype(E4M3))
    if operands == "fp8":
        one = [convert(np.ones([1] * ndim, np.float32)) for ndim in (2, len(of_rhs))]
        got = getattr(module, f"{name}_quantized")(lhs, one[0], rhs, one[1], convert(sizes), **options)
        return to_numpy(got), expected
    steps = -(-(k if name == "gmm" else m) // 32)
    shapes = ((m, steps), (groups, steps, n)) if name == "gmm" else ((steps, k), (steps, n))
    scales = dict(zip(("lhs_scale", "rhs_scale"), (convert(np.ones(s, E8M0)) for s in shapes), strict=True))
    if name == "tgmm":
        options |= dict(ragged="contracting", num_actual_groups=groups)
    return to_numpy(module.grouped_gemm(lhs, rhs, convert(sizes), **scales, **options)), expected


@pytest.mark.parametrize("operands", ["float32", "fp8", "mxfp8"])
@pytest.mark.parametrize(
    ("package", "convert"),
    [
        pytest.param("tpu_kernels", to_jax, marks=pytest.mark.tpu),
        pytest.param("gpu_reference", to_torch, marks=pytest.mark.gpu),
    ],
)
@pytest.mark.parametrize(
    ("name", "k", "n", "sizes"),
    [
        ("gmm", 128, 128, EDGES),
        ("tgmm", 128, 128, EDGES),
        ("gmm", 1, 1, [1]),
        ("tgmm", 1, 1, [1]),
        ("gmm", 160, 24, [20, 0, 12, 0]),
    ],
    ids=["gmm-edges", "tgmm-edges", "gmm-ones", "tgmm-ones", "gmm-rest"],
)
def test_no_row_is_missed_and_none_too_many(package, convert, name, operands, k, n, sizes):
    pytest.importorskip("jax" if package == "tpu_kernels" else "triton")
    got, expected = multiply(package, convert, name, operands, k, n, sizes)
    assert np.array_equal(got, expected)
