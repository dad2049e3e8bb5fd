"""What XLA's scheduler and the rooflines of `parity schedule` are told that a TPU kernel computes, reads and writes.

No result depends on it. A block is fetched as often as its index changes.
"""

import pytest

jax = pytest.importorskip("jax")

from parity.compilers.kernels import equations  # noqa: E402
from tpu_kernels._lib.visits import make_group_metadata  # noqa: E402
from tpu_kernels.gmm import gmm, tgmm  # noqa: E402
from tpu_kernels.grouped_gemm import grouped_gemm  # noqa: E402
from tpu_kernels.mxfp8 import mxfp8_dual_quantize, mxfp8_quantize  # noqa: E402
from tpu_kernels.quantize import fp8_dequantize, fp8_dual_quantize, fp8_quantize  # noqa: E402
from tpu_kernels.quantized_gmm import gmm_quantized, tgmm_quantized  # noqa: E402
from tpu_kernels.simple_gla import (  # noqa: E402
    chunk_simple_gla_bwd,
    chunk_simple_gla_fwd,
    fused_recurrent_simple_gla_bwd,
    fused_recurrent_simple_gla_fwd,
)

BF16, F32, E4M3, E8M0, I32 = "bfloat16", "float32", "float8_e4m3fn", "float8_e8m0fnu", "int32"
M, K, N, G = 512, 256, 384, 4
VISITS = M // 128 + G - 1
OF_ROWS, OF_WEIGHTS = dict(lhs=((M, K), BF16), rhs=((G, K, N), BF16)), dict(lhs=((M, K), BF16), rhs=((M, N), BF16))
SIZES = dict(group_sizes=((G,), I32))
NARROW_ROWS = dict(lhs=((M, K), E4M3), rhs=((G, K, N), E4M3))
NARROW_WEIGHTS = dict(lhs=((M, K), E4M3), rhs=((M, N), E4M3))
BLOCKS = dict(lhs_scale=((M, K // 128), F32), rhs_scale=((G, K // 128, N // 128), F32))
CHANNELS = dict(lhs_scale=((G, K), F32), rhs_scale=((G, N), F32))
POWERS = dict(lhs_scale=((M, K // 32), E8M0), rhs_scale=((G, K // 32, N), E8M0))
POWERS_OF_ROWS = dict(lhs_scale=((M // 32, K), E8M0), rhs_scale=((M // 32, N), E8M0))
TILES = dict(tiling=(128, 128, 128))
T, STEPS, D = 2048, 2 * 2048 * 4, 128  # of a sequence; of all sequences and heads; K and V
FORWARD = dict.fromkeys("qkv", ((2, T, 4, D), BF16)) | dict(g=((2, T, 4), F32))
BACKWARD = FORWARD | dict(do=((2, T, 4, D), BF16))
ROWS, GATES, KEPT = 2 * STEPS * D, 4 * STEPS, 4 * STEPS // 64 * D * D  # bytes; a gate is two numbers, its gradient too
PAIRS, STATES = STEPS * 64 * 2 * D, 2 * STEPS * D * D  # operations in chunks of 64 steps, and with a state
PRODUCTS = 2 * M * K * N
OF_LHS, OF_RHS, OF_OUT = N // 128 * VISITS * 128 * K, VISITS * K * N, M * N  # elements that gmm fetches and writes
LONG, WIDE = 2**15, 2**14
OF_TGMM = N // 128 * M * K + K // 128 * M * N
MEASURED = [("quantize", 2 * 64 * LONG, 2 * 64 * LONG + 2 * 4 * 64),
            ("encode", 40 * 64 * LONG, 3 * 64 * LONG + 3 * 4 * 64)]  # fmt: skip

# kernel, arrays, options; of each call that they make: its name, operations, and bytes
COSTS = [
    (gmm, OF_ROWS | SIZES, {}, [("gmm", PRODUCTS, 2 * (M * K + G * K * N + OF_OUT))]),
    (gmm, OF_ROWS | SIZES, TILES, [("gmm", PRODUCTS, 2 * (OF_LHS + OF_RHS + OF_OUT))]),
    (gmm, OF_ROWS | SIZES | dict(existing_out=((M, N), BF16)), TILES,
     [("gmm", PRODUCTS, 2 * (OF_LHS + OF_RHS + 2 * OF_OUT))]),
    (gmm, OF_ROWS | SIZES | dict(existing_out=((M, N), F32)), TILES | dict(preferred_element_type=F32),
     [("gmm", PRODUCTS, 2 * (OF_LHS + OF_RHS) + 4 * 2 * OF_OUT)]),
    (tgmm, OF_WEIGHTS | SIZES, TILES, [("tgmm", PRODUCTS, 2 * (OF_TGMM + G * K * N))]),
    (tgmm, OF_WEIGHTS | SIZES | dict(existing_out=((G, K, N), BF16)), TILES,
     [("tgmm", PRODUCTS, 2 * (OF_TGMM + 2 * G * K * N))]),
    (tgmm, OF_WEIGHTS | SIZES | dict(existing_out=((G, K, N), F32)), TILES | dict(preferred_element_type=F32),
     [("tgmm", PRODUCTS, 2 * OF_TGMM + 4 * 2 * G * K * N)]),
    (make_group_metadata, SIZES, dict(m=M, tm=128, num_groups=G, cover="tiles"),
     [("group_metadata", 0, 4 * (1 + G + (G + 1) + 2 * (VISITS + 1) + 1))]),
    (fp8_quantize, dict(x=((M, K), BF16)), dict(axis=1, block_size=128),
     [("quantize", 40 * M * K, 3 * M * K + 4 * M * K // 128)]),
    # Rows longer than a tile are measured first; both ways read x once, but for what is longer or transposed.
    (fp8_quantize, dict(x=((64, LONG), BF16)), dict(axis=1, block_size=None), MEASURED),
    (fp8_dual_quantize, dict(x=((M, K), BF16)), dict(block_size=128),
     [("quantize", 80 * M * K, 4 * M * K + 2 * 4 * M * K // 128)]),
    (fp8_dual_quantize, dict(x=((64, LONG), BF16)), dict(block_size=None),
     [*MEASURED, ("quantize", 40 * 64 * LONG, 3 * 64 * LONG + 4 * LONG)]),
    (fp8_dual_quantize, dict(x=((M, K), BF16)), dict(block_size=8),
     2 * [("quantize", 40 * M * K, 3 * M * K + 4 * M * K // 8)]),
    (mxfp8_quantize, dict(x=((M, K), BF16)), dict(axis=1), [("quantize", 40 * M * K, 3 * M * K + M * K // 32)]),
    (mxfp8_dual_quantize, dict(x=((M, K), BF16)), {}, [("quantize", 80 * M * K, 4 * M * K + 2 * M * K // 32)]),
    # Tiles of so many columns have fewer rows of scales than a register, and of bytes no single row can be stored.
    (mxfp8_dual_quantize, dict(x=((M, WIDE), BF16)), {},
     2 * [("quantize", 40 * M * WIDE, 3 * M * WIDE + M * WIDE // 32)]),
    (fp8_dequantize, dict(qvalue=((M, K), E4M3), scale=((M, K // 128), F32)), {},
     [("dequantize", 12 * M * K, 5 * M * K + 4 * M * K // 128)]),
    (gmm_quantized, NARROW_ROWS | BLOCKS | SIZES, dict(tiling=(128, K, 128)),
     [("gmm_quantized", PRODUCTS, N // 128 * M * K + G * K * N + 4 * (M + G * N) * K // 128 + 2 * OF_OUT)]),
    (gmm_quantized, NARROW_ROWS | BLOCKS | SIZES, TILES,
     [("gmm_quantized", PRODUCTS, OF_LHS + OF_RHS + 4 * (M + G * N) * K // 128 + 2 * OF_OUT)]),
    (tgmm_quantized, NARROW_WEIGHTS | CHANNELS | SIZES, TILES,
     [("tgmm_quantized", PRODUCTS, OF_TGMM + 4 * G * (K + N) + 2 * G * K * N)]),
    # Elements of two sizes.
    (gmm_quantized, OF_ROWS | dict(rhs=((G, K, N), E4M3), rhs_scale=((G, 1, N), F32)) | SIZES,
     TILES | dict(lhs_scale=None),
     [("gmm_quantized", PRODUCTS, 2 * OF_LHS + OF_RHS + 4 * G * N + 2 * OF_OUT)]),
    (tgmm_quantized, OF_WEIGHTS | dict(rhs=((M, N), E4M3), rhs_scale=((1, N), F32)) | SIZES,
     TILES | dict(lhs_scale=None),
     [("tgmm_quantized", PRODUCTS, 2 * (N // 128) * M * K + K // 128 * M * N + 4 * N + 2 * G * K * N)]),
    (grouped_gemm, NARROW_ROWS | POWERS | SIZES, TILES, [
        ("powers_in_lanes", 4 * M * K // 32, M * K // 32 + M * 128),
        ("powers_in_rows", 4 * G * K // 32 * N, 5 * G * K // 32 * N),
        ("gmm_quantized", PRODUCTS, OF_LHS + OF_RHS + M * 128 + 4 * G * K // 32 * N + 2 * OF_OUT),
    ]),
    (grouped_gemm, NARROW_WEIGHTS | POWERS_OF_ROWS | SIZES, TILES | dict(ragged="contracting", num_actual_groups=G), [
        ("powers_in_rows", 4 * M // 32 * K, 5 * M // 32 * K),
        ("powers_in_rows", 4 * M // 32 * N, 5 * M // 32 * N),
        ("tgmm_quantized", PRODUCTS, OF_TGMM + 4 * M // 32 * (K + N) + 2 * G * K * N),
    ]),
    (chunk_simple_gla_fwd, FORWARD, dict(fused=True), [("chunk_fwd", 2 * PAIRS + 2 * STATES, 4 * ROWS + 2 * GATES)]),
    # It walks forward for the states, through all blocks but the last, of two: k, v and the decays are fetched anew.
    (chunk_simple_gla_bwd, BACKWARD, dict(fused=True),
     [("chunk_bwd", 5 * PAIRS + 6 * STATES, (7 + 2 * 0.5) * ROWS + (4 + 2 * 0.5) * GATES)]),
    (chunk_simple_gla_fwd, FORWARD, dict(fused=False), [
        ("chunk_states", STATES, 2 * ROWS + 2 * GATES + KEPT),
        ("chunk_outputs", 2 * PAIRS + STATES, 4 * ROWS + 2 * GATES + KEPT),
    ]),
    (chunk_simple_gla_bwd, BACKWARD, dict(fused=False), [
        ("chunk_states", STATES, 2 * ROWS + 2 * GATES + KEPT),
        ("chunk_dstates", STATES, 2 * ROWS + 2 * GATES + KEPT),
        ("chunk_grads", 5 * PAIRS + 3 * STATES, 7 * ROWS + 4 * GATES + 2 * KEPT),
    ]),
    (fused_recurrent_simple_gla_fwd, FORWARD, {},
     [("fused_recurrent_fwd", 15 * STEPS * D * D, 4 * ROWS + 4 * GATES)]),
    # k, v, the gates and their decays are fetched twice; before each of the visits of 128 steps a state is kept.
    (fused_recurrent_simple_gla_bwd, BACKWARD, {}, [
        ("fused_recurrent_bwd", 50 * STEPS * D * D, (7 + 2) * ROWS + 9 * GATES + 8 * (2 * T // 128 + 2) * 4 * D * D),
    ]),
]  # fmt: skip


@pytest.mark.tpu
@pytest.mark.parametrize(("kernel", "arrays", "options", "expected"), COSTS)
def test_a_kernel_costs_what_it_computes_reads_and_writes(kernel, arrays, options, expected):
    shapes = {name: jax.ShapeDtypeStruct(*array) for name, array in arrays.items()}
    traced = jax.make_jaxpr(lambda given: kernel(**given, **options))(shapes)
    calls = [call.params for call, _ in equations(traced.jaxpr, "pallas_call", "mpmd_map")]
    if not kernel.__module__.endswith("gla"):
        assert not any(call["cost_estimate"].transcendentals for call in calls)
    for call in calls:
        semantics = getattr(call["compiler_params"], "dimension_semantics", None)
        assert semantics is None or len(semantics) == len(call["grid_mapping"].grid)
    found = [(call["name"], call["cost_estimate"].flops, call["cost_estimate"].bytes_accessed) for call in calls]
    if kernel is not make_group_metadata:
        found = [cost for cost in found if cost[0] != "group_metadata"]
    assert found == expected
