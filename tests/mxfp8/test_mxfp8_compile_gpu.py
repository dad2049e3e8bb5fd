# ruff: noqa: E402 (frameworks may be missing, and are asked for before they are imported)
"""MXFP8 quantisers and matmuls compile for real GPUs, as they would be launched; they fit the chip, and the matrix unit
takes the block scales where it can: codes that are multiplied as fp8 have their scales nowhere else to go."""

import pytest

pytest.importorskip("triton")
torch = pytest.importorskip("torch")

from gpu_reference import grouped_gemm as gpu
from gpu_reference import mxfp8
from gpu_reference._lib.formats import Output
from op_arguments.gmm import GroupMetadata, Problem
from op_arguments.mxfp8 import swizzled_shape
from parity.compilers.ptx import TARGETS, case_of, compile_kernels

M, K, N, GROUPS, EXPERTS = 4096, 2048, 1536, 8, 64
E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
FLOAT32, BFLOAT16 = torch.float32, torch.bfloat16
SPILL_BYTES = 64  # as in test_quantized_gmm_compile_gpu
BLOCK_SCALED = ("sm_100", "sm_120", "gfx950")


def meta(*shape, dtype=torch.int32):
    return torch.empty(*shape, dtype=dtype, device="meta")


def pair(shape, dtype, axis, swizzled):
    if dtype.itemsize > 1:
        return meta(*shape, dtype=dtype), None
    rest, blocks = (*shape[:axis], *shape[axis + 1 :]), -(-shape[axis] // 32)
    scales = swizzled_shape((*rest, blocks)) if swizzled else (*shape[:axis], blocks, *shape[axis + 1 :])
    return meta(*shape, dtype=dtype), meta(*scales, dtype=torch.float8_e8m0fnu)


def launch(target, lhs=E4M3, rhs=E4M3, ragged="lhs", swizzled=False, transpose=False, out=BFLOAT16):
    problem = Problem(M, K, N, GROUPS, EXPERTS, "")
    path = gpu.grouped_gemm_support(lhs, rhs, target=target).path
    tile = gpu.grouped_gemm_tile(problem, path, ragged, None, target)
    if ragged == "contracting":
        operands = pair((M, K), lhs, 0, swizzled), pair((M, N), rhs, 0, swizzled)
        gradient = meta(GROUPS, K, N, dtype=out)
        return gpu.grouped_wgrad_launch(
            problem, tile, path, *operands, swizzled, None, gradient, meta(EXPERTS), meta(1)
        )
    weights, scale = pair((GROUPS, K, N), rhs, 1, swizzled)
    if transpose:
        weights, scale = (x.transpose(1, 2) for x in pair((GROUPS, N, K), rhs, 2, False))
    visits = -(-M // tile[0]) + GROUPS
    metadata = GroupMetadata(meta(EXPERTS + 1), meta(visits), meta(visits), meta(1))
    operands = pair((M, K), lhs, 1, swizzled), (weights, scale)
    return gpu.grouped_gemm_launch(
        problem, tile, path, *operands, swizzled, None, meta(M, N, dtype=out), metadata, meta(1)
    )


def quantize_launch(name="float8_e4m3fn", by_rows=True, by_columns=True, rounding="up", dtype=BFLOAT16):
    codes = meta(M, K, dtype=torch.uint8)
    rowwise = Output(codes, meta(M, K // 32, dtype=torch.uint8)) if by_rows else None
    columnwise = Output(codes, meta(M // 32, K, dtype=torch.uint8)) if by_columns else None
    return mxfp8.mxfp8_quantize_launch(meta(1, M, K, dtype=dtype), name, rounding, rowwise, columnwise)


def dequantize_launch(by_rows):
    codes, scales = meta(1, M, K, dtype=torch.uint8), meta(M, K // 32, dtype=torch.uint8)
    return mxfp8.mxfp8_dequantize_launch(codes, "float8_e5m2", scales, by_rows, meta(M, K, dtype=BFLOAT16))


def expected_path(target, options):
    dtypes = {options.get("lhs", E4M3), options.get("rhs", E4M3)}
    if FLOAT32 in dtypes:
        return "float32"
    return "block_scaled" if target in BLOCK_SCALED and BFLOAT16 not in dtypes else "bfloat16"


def check_dots(result, target, options):
    operands = result.dot_operands
    path = expected_path(target, options)
    if path == "block_scaled":
        dtypes = {options.get("lhs", E4M3), options.get("rhs", E4M3)}
        assert operands == {str(dtype).removeprefix("torch.") for dtype in dtypes}
        # AMD's other instruction for fp8 has no scales, and another name.
        names = [name for name in result.instructions if "mfma" in name]
        assert all(name.startswith("v_mfma_scale_") for name in names)
        assert bool(names) == (target == "gfx950")
    elif path == "bfloat16":
        assert operands == {"bfloat16"}
    else:
        assert operands == ({"float32"} if target.startswith("gfx") else set())  # NVIDIA's is a chain of FMAs
        assert operands or result.dot_kinds["fma"] > 0


def check(matmuls, quantisers):
    """(target, options) of matmuls and (target, launch) of quantisers, all by one compiler."""
    cases = [case_of(launch(target, **options), target) for target, options in matmuls]
    cases += [case_of(quantiser, target) for target, quantiser in quantisers]
    results = compile_kernels(cases)
    for one, result in zip(cases, results, strict=True):
        assert result.error is None, f"{one}: {result.error}"
        assert result.spill_bytes <= SPILL_BYTES, f"{one}: {result}"
    for (target, options), result in zip(matmuls, results, strict=False):
        check_dots(result, target, options)


def test_each_gpu_multiplies_as_it_should():
    forward = [(target, {}) for target in ("sm_90", "sm_100", "sm_120", "gfx950")]
    check([*forward, ("sm_100", dict(ragged="contracting", rhs=E5M2))], [("sm_90", quantize_launch())])


MATMULS = {
    "forward": {},
    "transposed": dict(transpose=True),
    "swizzled": dict(swizzled=True),
    "mixed": dict(lhs=BFLOAT16),
    "mixed-float32": dict(rhs=FLOAT32, out=FLOAT32, ragged="contracting"),
    "e5m2": dict(lhs=E5M2, out=FLOAT32),
    "wgrad": dict(ragged="contracting"),
    "wgrad-swizzled": dict(ragged="contracting", swizzled=True, rhs=E5M2),
}
OTHERS = {
    "quantize": quantize_launch(),
    "quantize-rows": quantize_launch("float8_e5m2", by_columns=False, rounding="floor"),
    "quantize-columns": quantize_launch(by_rows=False, dtype=FLOAT32),
    "dequantize": dequantize_launch(True),
    "dequantize-columns": dequantize_launch(False),
}


@pytest.mark.full
@pytest.mark.parametrize("target", TARGETS)
def test_every_variant_compiles(target):
    check([(target, options) for options in MATMULS.values()], [(target, launch) for launch in OTHERS.values()])


@pytest.mark.parametrize(
    ("target", "path", "reason"),
    [
        ("sm_80", "bfloat16", "sm_80 takes no block scales"),
        ("sm_90", "bfloat16", "sm_90 takes no block scales"),
        ("gfx942", "bfloat16", "gfx942 takes no block scales"),
        *((target, "block_scaled", f"{target} takes codes and their block scales") for target in BLOCK_SCALED),
    ],
)
def test_which_path_serves_which_gpu(target, path, reason):
    support = gpu.grouped_gemm_support(E4M3, E5M2, target=target)
    assert support.path == path
    assert reason in support.reason
    assert support.fallback == (path == "bfloat16")  # what strict=True refuses
    assert gpu.grouped_gemm_support(BFLOAT16, E5M2, target=target).path == "bfloat16"
    assert gpu.grouped_gemm_support(FLOAT32, FLOAT32, target=target).path == "unquantised"
