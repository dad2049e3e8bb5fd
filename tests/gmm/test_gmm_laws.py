"""Groups at every edge of a tile, sizes of one, and sums that end inside a step beside weights that are NaN.

A kernel has a shorter way where a group has a whole tile, and none of the matrix's patterns need have a group that
misses one by a row.
"""

import numpy as np
import pytest

from cpu_golden import gmm as golden
from parity.interop import to_numpy
from tests.support.bad_input import E4M3, E8M0, call
from tests.support.functions import BACKENDS, run

TM = 512  # two blocks of rows on the TPU; the GPU makes 128 of it
EDGES = [1, 511, 511, 1, 512]


def multiply(package, name, operands, k, n, sizes):
    """gmm or tgmm of integers, float32 or in one of the two narrow formats with scales of 1, and what it must be.

    The weights of groups without rows are NaN.
    """
    sizes = np.array(sizes, np.int32)
    m, groups = int(sizes.sum()), len(sizes)
    lhs, rhs = (
        np.random.default_rng(seed).integers(1, 5, shape).astype(np.float32)
        for seed, shape in enumerate([(m, k), (groups, k, n) if name == "gmm" else (m, n)])
    )
    if name == "gmm":
        rhs[sizes == 0] = np.nan
    expected = getattr(golden, name)(lhs, rhs, sizes)
    given = dict(lhs=lhs, rhs=rhs, group_sizes=sizes, preferred_element_type="float32", tiling=(TM, 128, 128))
    function = name
    if operands != "float32":
        given |= dict(lhs=lhs.astype(E4M3), rhs=rhs.astype(E4M3))
    if operands == "fp8":
        function = f"{name}_quantized"
        given |= {f"{side}_scale": np.ones([1] * given[side].ndim, np.float32) for side in ("lhs", "rhs")}
    elif operands == "mxfp8":
        function, steps = "grouped_gemm", -(-(k if name == "gmm" else m) // 32)
        shapes = ((m, steps), (groups, steps, n)) if name == "gmm" else ((steps, k), (steps, n))
        given |= dict(zip(("lhs_scale", "rhs_scale"), (np.ones(shape, E8M0) for shape in shapes), strict=True))
        given |= {} if name == "gmm" else dict(ragged="contracting", num_actual_groups=groups)
    return to_numpy(call(package, function, given)), expected


@pytest.mark.parametrize("operands", ["float32", "fp8", "mxfp8"])
@pytest.mark.parametrize(
    "package",
    [pytest.param("tpu_kernels", marks=pytest.mark.tpu), pytest.param("gpu_reference", marks=pytest.mark.gpu)],
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
def test_no_row_is_missed_and_none_too_many(package, name, operands, k, n, sizes):
    got, expected = multiply(package, name, operands, k, n, sizes)
    assert np.array_equal(got, expected)


BFLOAT16_TIES = [[256.0] * 8, [2.0 * n for n in range(8)], [1.0] * 8]
FLOAT16_TIES = [[2048.0] * 8, [2.0 * n for n in range(7)] + [65504.0], [1.0] * 8]
"""What is summed: 257, 259, … are as far from one bfloat16 as from the next; the last float16 is infinite."""


@pytest.mark.parametrize(
    ("terms", "dtype", "out"),
    [
        (BFLOAT16_TIES, "bfloat16", "bfloat16"),
        (FLOAT16_TIES, "float16", "float16"),
        (BFLOAT16_TIES, E4M3, "bfloat16"),
    ],
    ids=["bfloat16", "float16", "fp8"],
)
@pytest.mark.parametrize("name", ["gmm", "tgmm"])
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.filterwarnings("ignore:overflow encountered")  # by Triton's interpreter
def test_a_sum_between_two_results_goes_to_the_even_one(backend, name, terms, dtype, out):
    """Those of the matrix's data, integers as well, are next to never as far from one as from the other."""
    terms = np.array(terms, dtype)
    lhs = np.ones((16, 3) if name == "gmm" else (3, 16), dtype)
    given = dict(lhs=lhs, rhs=terms[None] if name == "gmm" else terms, group_sizes=np.array([len(lhs)], np.int32))
    function = name if dtype != E4M3 else f"{name}_quantized"
    if function != name:
        given |= {f"{side}_scale": np.ones([1] * given[side].ndim, np.float32) for side in ("lhs", "rhs")}
    got = run(backend, function, given, preferred_element_type=out)
    with np.errstate(over="ignore"):
        expected = terms.astype(np.float64).sum(0).astype(out)
    np.testing.assert_array_equal(got.reshape(16, 8), np.tile(expected, (16, 1)))
