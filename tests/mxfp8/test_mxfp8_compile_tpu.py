"""The MXFP8 ops through the real TPU compiler, for every chip: they compile, and multiply bfloat16."""

from importlib.util import find_spec

import pytest

from op_arguments.mxfp8 import E8M0, swizzled_shape
from parity.compilers.mosaic import Abstract, Compilation, compile_for_tpu
from tests.matrix.models import GPT_OSS_120B
from tests.matrix.mxfp8 import with_blocks
from tests.matrix.quantized_gmm import BF16, E4M3, E5M2

pytestmark = pytest.mark.skipif(
    find_spec("libtpu") is None, reason="the TPU compiler is not installed: pip install libtpu"
)

CHIPS = ("v4", "v5e", "v5p", "v6e", "tpu7x")
M, K, N, G = 8192, 2048, 512, 8
STATIC = {"interpret": False}


def gemm(chip, lhs=E4M3, rhs=E4M3, k=K, n=N, ragged="lhs", transpose_rhs=False, swizzled=False):
    if ragged == "contracting":
        shapes, axes, options = ((M, k), (M, n)), (0, 0), {"num_actual_groups": G}
    else:
        shapes, axes = ((M, k), (G, n, k) if transpose_rhs else (G, k, n)), (1, 2 if transpose_rhs else 1)
        options = {"transpose_rhs": transpose_rhs}
    arguments = {"group_sizes": Abstract((4 * G,), "int32"), "group_offset": Abstract((), "int32"), "ragged": ragged}
    for name, dtype, shape, axis in zip(("lhs", "rhs"), (lhs, rhs), shapes, axes, strict=True):
        arguments[name] = Abstract(shape, dtype)
        if dtype != BF16:
            scale = with_blocks(shape, axis)
            if swizzled:
                scale = swizzled_shape((*scale[:axis], *scale[axis + 1 :], scale[axis]))
            arguments[f"{name}_scale"] = Abstract(scale, E8M0)
    options["scale_layout"] = "swizzled" if swizzled else "plain"
    return Compilation("tpu_kernels.grouped_gemm:grouped_gemm", chip, (), arguments | options | STATIC)


def matmuls(chip):
    hidden = GPT_OSS_120B.hidden
    return {
        "forward": gemm(chip),
        "data gradient": gemm(chip, E5M2, E4M3, transpose_rhs=True),
        "weight gradient": gemm(chip, E4M3, E5M2, ragged="contracting"),
        "gpt-oss-120b": gemm(chip, k=hidden, n=hidden),
        "gpt-oss-120b weight gradient": gemm(chip, k=hidden, n=hidden, ragged="contracting"),
        "bfloat16 activations": gemm(chip, BF16, E4M3),
        "swizzled": gemm(chip, swizzled=True),
    }


def others(chip):
    x, q = Abstract((M, K), BF16), Abstract((M, K), E4M3)
    module = "tpu_kernels.mxfp8"
    return {
        "rows": Compilation(f"{module}:mxfp8_quantize", chip, (x,), {"axis": 1} | STATIC),
        "columns": Compilation(f"{module}:mxfp8_quantize", chip, (x,), {"axis": 0, "dtype": E5M2} | STATIC),
        "dual": Compilation(f"{module}:mxfp8_dual_quantize", chip, (x,), {"scale_rounding": "floor"} | STATIC),
        "dequantize": Compilation(f"{module}:mxfp8_dequantize", chip, (q, Abstract((M, K // 32), E8M0)), STATIC),
    }


@pytest.mark.full  # a minute for each chip
@pytest.mark.parametrize("chip", CHIPS)
def test_compiles(chip):
    named = matmuls(chip)
    programs = named | others(chip)
    compiled = dict(zip(programs, compile_for_tpu(list(programs.values()), schedule=True), strict=True))
    assert {name: result.error for name, result in compiled.items() if not result.ok} == {}
    for name in named:
        emitted = {passes.emitted_as for kernel in compiled[name].kernels for passes in kernel.passes}
        assert emitted == {"bf16"}, name
