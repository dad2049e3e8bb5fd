"""What VMEM cannot hold is refused by name before the TPU compiler sees it, and what the delta rules accept fits.

Tiles that may be asked for are all that there are; compiled are those where code differs: axes of less than a register,
of one, of odd numbers of registers, which leave a last block of one where blocks have two, of many, and of a whole one.
"""

import itertools
import re

import pytest

pytest.importorskip("jax")

from op_arguments.delta_rule import LARGEST_CHUNK, LARGEST_HEAD, DeltaProblem
from parity.compilers.mosaic import compile_for_tpu
from tests.matrix.gla import BF16, F32
from tests.matrix.gmm import GMM, TGMM
from tests.matrix.mxfp8 import GROUPED_GEMM
from tests.matrix.quantized_gmm import E4M3, GMM_QUANTIZED, I8, TGMM_QUANTIZED
from tests.support import calls, tpu_code
from tests.support.chips import on

PRODUCT = dict(M=8192, K=4096, N=4096, G=8)
COLUMNS = dict(rhs_dtype=E4M3, lhs_blocks="Mx1", rhs_blocks="Mx1")
SCALED = dict(lhs_blocks="1xK", rhs_blocks="1xKx1")
SCAN = dict(B=1, T=512, H=1)
TOO_LARGE = [
    ("TPU v5e", "tiling", (GMM, calls.point(GMM, BF16, **PRODUCT, tiling=(1024, 1024, 2048))), 16),
    ("TPU7x", "tiling", (GMM, calls.point(GMM, BF16, **PRODUCT, tiling=(2048, 2048, 2048))), 32),
    ("TPU v6e", "tiling", (TGMM, calls.point(TGMM, F32, **PRODUCT, tiling=(1024, 2048, 1024))), 32),
    (
        "TPU7x",
        "tiling",
        (GMM_QUANTIZED, calls.point(GMM_QUANTIZED, (E4M3, F32), **PRODUCT, **SCALED, tiling=(2048, 4096, 2048))),
        32,
    ),
    (
        "TPU v6e",
        "tiling",
        (TGMM_QUANTIZED, calls.point(TGMM_QUANTIZED, (E4M3, BF16), **PRODUCT, **COLUMNS, tiling=(2048, 2048, 2048))),
        32,
    ),
    ("TPU v5e", "tiling", (GROUPED_GEMM, calls.point(GROUPED_GEMM, (E4M3, F32), **PRODUCT, tiling=(2048,) * 3)), 16),
    ("TPU7x", "K, V or chunk_size", calls.scan("chunk", "fwd", "gk", F32, **SCAN, K=4096, V=4096, chunk=256), 56),
    ("TPU7x", "K, V or chunk_size", calls.scan("chunk", "bwd", "g", F32, **SCAN, K=2048, V=2048, chunk=64), 56),
    ("TPU7x", "K and V", calls.scan("fused_recurrent", "fwd", "gk", F32, **SCAN, K=2048, V=8192), 64),
]

TILES = [(8, 128, 128), (24, 256, 384), (64, 384, 640), (128, 640, 128), (128, 1024, 256), (256, 128, 1536), (512,) * 3]
GROUPED = [
    (GMM, BF16, {}),
    (GMM, F32, dict(transpose_rhs=True)),
    (TGMM, BF16, {}),
    (GMM_QUANTIZED, (E4M3, BF16), dict(lhs_blocks="1x128", rhs_blocks="1x128x128")),
    (GMM_QUANTIZED, (I8, BF16), dict(lhs_blocks="1xK", rhs_blocks="1xKx1")),
    (TGMM_QUANTIZED, (E4M3, BF16), dict(lhs_blocks="128x1", rhs_blocks="128x1")),
    (GROUPED_GEMM, (E4M3, BF16), {}),
    (GROUPED_GEMM, (E4M3, BF16), dict(ragged="contracting")),
]


@pytest.mark.full
@tpu_code.needs_compiler
@tpu_code.EACH_CHIP
def test_tiles_compile_or_are_refused_by_name(chip):
    sizes = dict(M=2048, K=1024, N=1536, G=8)
    asked = [
        (op, calls.point(op, dtype, **sizes, **options, tiling=tile))
        for tile in TILES
        for op, dtype, options in GROUPED
    ]
    results = compile_for_tpu([calls.compilation(*call, chip) for call in asked])
    errors = {case.id: result.error for (_, case), result in zip(asked, results, strict=True) if not result.ok}
    refused = {
        name for name, error in errors.items() if re.match("ValueError: tiling must (be smaller|have t[mkn])", error)
    }
    assert len(errors) < len(asked) / 4
    assert {name: error for name, error in errors.items() if name not in refused} == {}


@pytest.mark.parametrize(("kind", "argument", "call", "mebibytes"), TOO_LARGE)
def test_what_vmem_cannot_hold_is_refused_by_name(kind, argument, call, mebibytes):
    with on(kind), pytest.raises(ValueError, match=rf"^{argument} must be smaller: .* needs \d+ bytes") as refused:
        calls.traced(*call)
    assert str(refused.value).endswith(f" {mebibytes * 2**20}")


@pytest.mark.parametrize("kind", ["TPU v4", "TPU v5e", "TPU7x"])
def test_all_that_a_delta_rule_accepts_fits_vmem(kind):
    """On v4 it fits or is refused."""
    from tpu_kernels._lib.chunk_plan import vmem_budget, vmem_limit
    from tpu_kernels._lib.delta_plan import make_plan

    refused = 0
    with on(kind):
        for t, group, k, v, n, dtype, chunk, per_channel, backward in itertools.product(
            (1, 1 << 20), (1, 64), (16, LARGEST_HEAD), (16, LARGEST_HEAD), (1, 1000), (F32, BF16), (16, LARGEST_CHUNK),
            (False, True), (False, True),
        ):  # fmt: skip
            p = DeltaProblem(1, t, 2, 2 * group, k, v, n, 1.0, dtype, packed=n > 1, l2norm=True)
            try:
                plan = make_plan(p, per_channel, backward=backward, chunk_size=chunk)
                assert plan._replace(holds=False).vmem_bytes <= vmem_budget()
                assert plan.vmem_bytes < vmem_limit()
            except ValueError as error:
                assert re.fullmatch(
                    r"K, V or chunk_size must be smaller: .* needs \d+ bytes .* have 10569646", str(error)
                )
                refused += 1
    assert bool(refused) == (kind == "TPU v4")
