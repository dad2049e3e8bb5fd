"""The quantised ops through the real TPU compiler, for every chip: they compile, and multiply what they declare."""

from importlib.util import find_spec

import pytest

from parity.compilers.mosaic import Abstract, Compilation, compile_for_tpu
from tests.matrix.models import DEEPSEEK_V3
from tests.matrix.programs import scale
from tests.matrix.quantized_gmm import BF16, E4M3, E5M2, I8, PLAIN

pytestmark = pytest.mark.skipif(
    find_spec("libtpu") is None, reason="the TPU compiler is not installed: pip install libtpu"
)

GENERATIONS = {"v4": 4, "v5e": 5, "v5p": 5, "v6e": 6, "tpu7x": 7}
PATHS = {"fp8": "fp8", "int8": "int8", "bfloat16": "bf16"}  # `matmul_path`'s words and the compiler's report's
M, K, N, G = 8192, 2048, 512, 8
HIDDEN, INTERMEDIATE = DEEPSEEK_V3.hidden, DEEPSEEK_V3.intermediate


def gmm(chip, lhs, lhs_blocks, rhs, rhs_blocks, k=K, n=N, transpose_rhs=False):
    weights = (G, n, k) if transpose_rhs else (G, k, n)
    return compilation(chip, "gmm", (M, k), lhs, lhs_blocks, weights, rhs, rhs_blocks, transpose_rhs=transpose_rhs)


def tgmm(chip, lhs, lhs_blocks, rhs, rhs_blocks, k=K, n=N):
    return compilation(chip, "tgmm", (M, k), lhs, lhs_blocks, (M, n), rhs, rhs_blocks, num_actual_groups=G)


def compilation(chip, op, lhs_shape, lhs, lhs_blocks, rhs_shape, rhs, rhs_blocks, **options):
    arguments = {
        "lhs": Abstract(lhs_shape, lhs),
        "lhs_scale": scale(lhs_blocks, lhs_shape),
        "rhs": Abstract(rhs_shape, rhs),
        "rhs_scale": scale(rhs_blocks, rhs_shape),
        "group_sizes": Abstract((4 * G,), "int32"),
        "group_offset": Abstract((), "int32"),
        "interpret": False,
    }
    return Compilation(f"tpu_kernels.quantized_gmm:{op}_quantized", chip, (), arguments | options)


def matmuls(chip):
    """By name, with the dtypes of its operands."""
    return {
        "gmm-per_channel": ((E4M3, E4M3), gmm(chip, E4M3, "1xK", E4M3, "1xKx1")),
        "gmm-block512": ((E4M3, E5M2), gmm(chip, E4M3, "1x512", E5M2, "1x512x1")),
        "gmm-DeepSeek_V3": (
            (E4M3, E4M3),
            gmm(chip, E4M3, "1x128", E4M3, "1x128x128", HIDDEN, INTERMEDIATE, transpose_rhs=True),
        ),
        "gmm-int8": ((I8, I8), gmm(chip, I8, "1xK", I8, "1xKx1")),
        "gmm-w8a16": ((BF16, I8), gmm(chip, BF16, PLAIN, I8, "1x128x1")),
        "tgmm-per_channel": ((E4M3, E4M3), tgmm(chip, E4M3, "Mx1", E4M3, "Mx1")),
        "tgmm-DeepSeek_V3": ((E4M3, E4M3), tgmm(chip, E4M3, "128x1", E4M3, "128x1", HIDDEN, INTERMEDIATE)),
        "tgmm-int8": ((I8, I8), tgmm(chip, I8, "Mx1", I8, "256x1")),
    }


def others(chip):
    static = {"interpret": False}
    x, q, s = Abstract((M, K), BF16), Abstract((M, K), E4M3), Abstract((M, K // 128), "float32")
    dense = (Abstract((M, K), BF16), Abstract((G, K, N), BF16), Abstract((G,), "int32"), Abstract((M, N), BF16))
    quantised = {"quantize": True, "bwd_quantize": True}
    return {
        "fp8_quantize": Compilation("tpu_kernels.quantize:fp8_quantize", chip, (x,), {"axis": 1} | static),
        "int8_quantize": Compilation(
            "tpu_kernels.quantize:int8_quantize", chip, (x,), {"axis": 0, "block_size": None} | static
        ),
        "fp8_dual_quantize": Compilation("tpu_kernels.quantize:fp8_dual_quantize", chip, (x,), static),
        "fp8_dequantize": Compilation("tpu_kernels.quantize:fp8_dequantize", chip, (q, s), static),
        "grouped_dense_bwd": Compilation(
            "tpu_kernels.grouped_dense:grouped_dense_bwd", chip, dense, quantised | static
        ),
    }


REPRESENTATIVE = ("gmm-block512", "gmm-int8", "gmm-w8a16", "tgmm-per_channel", "fp8_quantize", "fp8_dual_quantize")


@pytest.mark.parametrize("chip", GENERATIONS)
def test_compiles(chip):
    check(chip, REPRESENTATIVE)


@pytest.mark.full
@pytest.mark.parametrize("chip", GENERATIONS)
def test_all_of_it_compiles(chip):
    check(chip, (*matmuls(chip), *others(chip)))


def check(chip, names):
    from tpu_kernels._lib.chip import matmul_path

    named = {name: matmul for name, matmul in matmuls(chip).items() if name in names}
    programs = {name: program for name, (_, program) in named.items()}
    programs |= {name: program for name, program in others(chip).items() if name in names}
    compiled = dict(zip(programs, compile_for_tpu(list(programs.values()), schedule=True), strict=True))
    assert {name: result.error for name, result in compiled.items() if not result.ok} == {}
    for name, (dtypes, _) in named.items():
        path, reason = matmul_path(*dtypes, GENERATIONS[chip])
        emitted = {passes.emitted_as for kernel in compiled[name].kernels for passes in kernel.passes}
        assert emitted == {PATHS[path]}, f"{name}: {reason}"
