# ruff: noqa: E402 (frameworks may be missing, and are asked for before they are imported)
"""Every tile, chunk and block that a caller may ask for fits every GPU: a kernel that is refused at its launch is none.

Of gmm and tgmm each tile is compiled in tests/gmm. Here it is the largest of each kernel that has a `tiling`: shared
memory holds tiles of both operands, and smaller ones need less.
"""

import itertools
from collections.abc import Iterable
from functools import partial

import pytest

pytest.importorskip("triton")
torch = pytest.importorskip("torch")

from triton.runtime.errors import OutOfResources

from gpu_reference.gmm import gmm
from gpu_reference.quantize import fp8_quantize
from op_arguments.gla import LARGEST_CHUNK
from parity.compilers.gpu_code import LIMITS
from parity.compilers.launches import intercepted
from parity.compilers.ptx import Compiled
from parity.dtypes import numpy_dtype
from parity.op import Case, Op
from tests.matrix.delta_rule import DELTA_RULES
from tests.matrix.gla import BF16, F32, GATED_LINEAR_ATTENTION
from tests.matrix.gmm import GMM, TGMM, sums_rows
from tests.matrix.mxfp8 import GROUPED_GEMM
from tests.matrix.ops import F16
from tests.matrix.quantize import FP8_DEQUANTIZE, FP8_DUAL_QUANTIZE, FP8_QUANTIZE, INT8_DEQUANTIZE, INT8_QUANTIZE
from tests.matrix.quantized_gmm import E4M3, E5M2, GMM_QUANTIZED, I8, PLAIN, TGMM_QUANTIZED
from tests.support import calls, gpu_code
from tests.support.interpreter import DEVICE
from tests.support.tiny import tiny

SIZES = dict(M=4096, K=2048, N=1536, G=8)
LARGE = list(itertools.product((64, 128), repeat=3))
GROUPED = [
    (GMM, F32, {}),
    (TGMM, BF16, {}),
    (GMM_QUANTIZED, (E4M3, BF16), dict(lhs_blocks="1x128", rhs_blocks="1x128x128")),
    (GMM_QUANTIZED, (E5M2, F32), dict(rhs_dtype=E4M3, lhs_blocks="1x32", rhs_blocks="1x32x1")),
    (GMM_QUANTIZED, (I8, BF16), dict(lhs_blocks="1xK", rhs_blocks="1xKx1")),
    (GMM_QUANTIZED, (F16, BF16), dict(rhs_dtype=I8, lhs_blocks=PLAIN, rhs_blocks="1xKx1")),
    (GMM_QUANTIZED, (F32, F32), dict(rhs_dtype=E4M3, lhs_blocks=PLAIN, rhs_blocks="1x128x128")),
    (TGMM_QUANTIZED, (E4M3, BF16), dict(rhs_dtype=E5M2, lhs_blocks="128x1", rhs_blocks="128x1")),
    (TGMM_QUANTIZED, (I8, BF16), dict(lhs_blocks="Mx1", rhs_blocks="Mx1")),
    (GROUPED_GEMM, (E4M3, BF16), {}),
    (GROUPED_GEMM, (E4M3, F32), dict(rhs_dtype=F32)),
    (GROUPED_GEMM, (E5M2, BF16), dict(rhs_dtype=E4M3, ragged="contracting")),
    (GROUPED_GEMM, (E4M3, F32), dict(rhs_dtype=F32, ragged="contracting")),
]
QUANTISED = GROUPED[2:]
USUAL = ("chunk_kda_bwd", "fused_recurrent_gla_fwd")


def grouped(kinds: Iterable[tuple[Op, object, dict]], tiling: tuple[int, int, int]) -> list[tuple[Op, Case]]:
    """A call of each kind with a tile."""
    return [(op, calls.point(op, dtype, **SIZES, tiling=tiling, **options)) for op, dtype, options in kinds]


def scans(chunk: int, **sizes: int) -> list[tuple[Op, Case]]:
    """Both passes of both kinds of gates, by both routes and in both dtypes."""
    sizes = dict(B=2, T=4096, H=16, K=128, V=128) | sizes
    return [
        calls.scan("chunk", direction, gates, dtype, chunk=chunk, route=route, h0=True, ht=True, **sizes)
        for direction in ("fwd", "bwd")
        for gates in ("g", "gk")
        for route in ("fused", "unfused")
        for dtype in (F32, BF16)
    ]


def refused(found: Iterable[tuple[Op, Case]], target: str) -> dict[str, str]:
    """What the compiler or the chip says of each kernel that it does not take; spilled or not."""
    kernels = gpu_code.kernels(found, target)
    return {name: kernel.result.error for name, kernel in kernels.items() if kernel.result.error is not None}


def matrix_instructions(result: Compiled) -> set[str]:
    """Names of a kernel's instructions of the matrix unit."""
    return {name for name in result.instructions if "MMA" in name or "mfma" in name}


@gpu_code.some_targets("sm_120", "gfx942")
def test_a_pipelines_operands_fit_shared_memory(target):
    """Of a pipeline's steps all on NVIDIA's, all but one on AMD's; operands in the wider dtype of the two."""
    room = LIMITS[target].block_shared_bytes
    for tiling in LARGE:
        for op, case in grouped(GROUPED, tiling):
            (kernel,) = (x for x in calls.launched(op, case, target) if x.name != "_metadata_kernel")
            m, k, n = (kernel.constants[f"TILE.{axis}"] for axis in ("m", "k", "n"))
            depth, across = (m, k + n) if sums_rows(case) else (k, m + n)
            dtypes = {case.dtype, dict(case.options).get("rhs_dtype") or case.dtype}
            width = max(numpy_dtype(name).itemsize for name in dtypes)
            steps = max(kernel.options["num_stages"] - target.startswith("gfx"), 1)
            assert steps * depth * across * width <= room, (case.id, kernel.options)


@pytest.mark.parametrize(
    ("kernel", "refusal"),
    [
        (lambda x: gmm(x, x[None], torch.tensor([8], dtype=torch.int32), tiling=(128, 128, 128)), "tiling must"),
        (lambda x: fp8_quantize(x, axis=-1, block_size=8), "block_size must"),
    ],
)
def test_what_a_device_has_no_memory_for_is_refused_by_name(kernel, refusal):
    """Triton finds out when it has compiled a kernel, before it launches it."""

    def launch(found, run):
        if found.name == "_metadata_kernel":
            return run()
        raise OutOfResources(131072, 101376, "shared memory")

    expected = rf"^{refusal} be smaller: _\w+_kernel needs 131072 bytes of shared memory, and the device has 101376$"
    with torch.device(DEVICE), intercepted(launch), pytest.raises(ValueError, match=expected):
        kernel(torch.ones(8, 8))


@pytest.mark.parametrize(("dtype", "gates", "largest"), [(BF16, "g", 1024), (BF16, "gk", 512), (F32, "g", 512)])
def test_a_key_that_some_gpu_has_no_memory_for_is_refused(dtype, gates, largest):
    """The compiler finds 131,072 bytes of sm_120's 101,376 in half a minute; a backward pass has tiles of K."""
    call = partial(calls.scan, "chunk", gates=gates, dtype=dtype, B=1, T=64, H=1, V=16)
    assert calls.launched(*call("fwd", K=largest), "sm_90")
    with pytest.raises(ValueError, match=rf"^q must have K <= {largest}, got {largest + 1}$"):
        calls.launched(*call("fwd", K=largest + 1), "sm_90")
    assert calls.launched(*call("bwd", K=largest + 1), "sm_90")


@pytest.mark.parametrize("direction", ["fwd", "bwd"])
def test_all_chunk_sizes_make_blocks_of_two_sizes(direction):
    """So that the kernels of two of them are those of all."""

    def blocks(chunk):
        found = calls.launched(
            *calls.scan("chunk", direction, "g", BF16, chunk=chunk, B=2, T=512, H=2, K=64, V=64), "sm_90"
        )
        return tuple((x.constants["ROWS"], x.constants["BK"], x.constants["BV"]) for x in found)

    assert {blocks(chunk) for chunk in range(16, LARGEST_CHUNK + 1, 16)} == {blocks(16), blocks(64)}


@pytest.mark.parametrize(
    "op",
    [
        pytest.param(op, id=op.name, marks=[pytest.mark.full] * (op.name not in USUAL))
        for op in (*GATED_LINEAR_ATTENTION, *DELTA_RULES)
    ],
)
@gpu_code.some_targets("sm_90")
def test_a_part_of_a_sequence_takes_the_kernels_of_the_whole(op, target):
    """So that a sequence that is cut, at the border of a chunk, has the bits that it has whole."""
    route = dict(route="fused") if "route" in op.defaults else {}

    def kernels(T):
        case = tiny(op, (BF16, BF16), T=T, N=1, K=64, V=64, **route)
        return [(launch.name, launch.constants, launch.options) for launch in calls.launched(op, case, target)]

    assert kernels(1) == kernels(64) == kernels(8192)


@pytest.mark.full
@pytest.mark.parametrize(
    "op", [pytest.param(op, id=op.name) for op in (*GATED_LINEAR_ATTENTION, *DELTA_RULES) if "chunk" in op.name]
)
@gpu_code.EACH_TARGET
def test_a_part_of_a_sequence_takes_the_matrix_instructions_of_the_whole(op, target):
    """Whether 16 divides a length, and one of 1, is compiled in: the same kernel is other machine code, of the same
    dots, or where there is one step of fewer."""
    route = dict(route="fused") if "route" in op.defaults else {}

    def instructions(T):
        calls = [(op, tiny(op, (BF16, BF16), T=T, N=1, K=64, V=64, **route))]
        return [matrix_instructions(kernel.result) for kernel in gpu_code.kernels(calls, target).values()]

    whole = instructions(8192)
    assert any(whole) and instructions(1000) == whole
    assert all(one <= all_ for one, all_ in zip(instructions(1), whole, strict=True))


@pytest.mark.full
@pytest.mark.parametrize("tiling", [pytest.param(tile, id="x".join(map(str, tile))) for tile in LARGE])
@gpu_code.EACH_TARGET
def test_every_large_tile_of_quantised_operands_fits(target, tiling):
    assert refused(grouped(QUANTISED, tiling), target) == {}


@pytest.mark.full
@pytest.mark.parametrize(("chunk", "K", "V"), [(16, 512, 128), (256, 16, 512), (256, 512, 512)])
@gpu_code.EACH_TARGET
def test_every_chunk_and_width_of_a_scan_fits(target, chunk, K, V):
    assert refused(scans(chunk, K=K, V=V), target) == {}


@pytest.mark.full
@gpu_code.EACH_TARGET
def test_the_largest_key_of_all_fits(target):
    sizes = dict(B=2, T=4096, H=16, K=1024, V=128, chunk=64, route="fused")
    assert refused([calls.scan("chunk", "fwd", "g", BF16, **sizes)], target) == {}


@pytest.mark.full
@gpu_code.EACH_TARGET
def test_every_block_of_a_quantiser_or_dequantiser_fits(target):
    sizes = dict(M=4096, K=2048)
    found = [
        (op, calls.point(op, dtype, **sizes, **options))
        for op, dtype, ways in [
            (FP8_QUANTIZE, (BF16, E4M3), dict(axis=[-1, 0, (0, 1)])),
            (INT8_QUANTIZE, (F32, I8), dict(axis=[-1, 0])),
            (FP8_DUAL_QUANTIZE, (F32, E5M2), {}),
        ]
        for axis in ways.get("axis", [None])
        for block in (None, 1, 32, 1024, 2048)
        for options in [dict(block_size=block) | ({} if axis is None else dict(axis=axis))]
    ]
    found += [
        (op, calls.point(op, dtype, **sizes, blocks=f"{rows}x{columns}"))
        for op, dtype in [(FP8_DEQUANTIZE, (E4M3, F32)), (INT8_DEQUANTIZE, (I8, F32))]
        for rows, columns in [*itertools.product((1, 32, 1024), repeat=2), (1, "K"), ("M", 1), ("M", "K")]
    ]
    assert refused(found, target) == {}
