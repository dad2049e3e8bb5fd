"""`parity stages` of the block-scaled matmuls and of the quantisers, which are compared bit for bit.

In a matmul a lost bit is its line's, a fault of logic enters at the sums; of a quantiser the first value that is not
the golden's is found. The marks leave nothing in what is lowered.
"""

import numpy as np
import pytest

from parity.cli.stages import screen_of_bits
from parity.debugging.attribution import rank, statement
from parity.debugging.attribution.bits import lacking, walk_bits
from parity.debugging.attribution.program import Mark
from parity.debugging.attribution.walk import Evaluation, walk
from parity.judging.reference import reference
from parity.trial import Trial
from tests.matrix.mxfp8 import GROUPED_GEMM, MXFP8_QUANTIZERS
from tests.matrix.quantize import QUANTIZERS
from tests.matrix.quantized_gmm import E4M3, F32, GMM_QUANTIZED, TGMM_QUANTIZED
from tests.meta.faults.planting import Fault, plant
from tests.meta.judging import test_bit_exact as bits
from tests.support.interpreter import INTERPRETED, interpreted, shown
from tests.support.stages import check_a_probe_leaves_nothing, traced, walked

OPS = {op.name: op for op in (GMM_QUANTIZED, TGMM_QUANTIZED, GROUPED_GEMM)}


def smoke(op):
    return next(case for case in op.cases if case.tier == "smoke" and (case.dtype, case.out) == (E4M3, F32))


def planted(backend, op, old, new, *marks):
    fault = Fault(f"{new} for {old}", backend, (op,), old, new)
    return pytest.param(fault, id=f"{backend}-{op}", marks=[*INTERPRETED[backend], *marks])


FULL = pytest.mark.full
BF16 = ".astype(jnp.bfloat16).astype(jnp.float32)"
STORED = "self.acc[rows, columns] = total"
ADDED = "return sums if total is None else total + sums"
SCALED = "tl.load(scales, mask=region.in_columns, other=0)"

LOSSES = [
    planted("tpu", "gmm_quantized", ADDED, f"return sums if total is None else (total + sums){BF16}"),
    planted("tpu", "tgmm_quantized", STORED, f"{STORED}{BF16}", FULL),
    planted("tpu", "grouped_gemm", ADDED, f"return sums if total is None else (total + sums){BF16}", FULL),
    planted("gpu", "tgmm_quantized", f"partial *= {SCALED}", f"partial *= {SCALED}.to(tl.bfloat16).to(tl.float32)",
            FULL),
]  # fmt: skip
FAULTS = [
    planted("tpu", "gmm_quantized", ADDED, "return sums", FULL),
    planted("tpu", "grouped_gemm", "spread = []", "first, spread = 0, []", FULL),
    planted("gpu", "tgmm_quantized", f"partial *= {SCALED}", f"partial += {SCALED}"),
    planted("gpu", "grouped_gemm", "sums = tl.dot_scaled(a, a_scales, A, b, b_scales, B, sums)",
            "sums = tl.dot_scaled(a, a_scales, A, b, b_scales, B, tl.zeros_like(sums))", FULL),
]  # fmt: skip


@pytest.mark.parametrize("loss", LOSSES)
def test_the_line_that_loses_precision_is_the_first(loss, tmp_path):
    pytest.importorskip("jax" if loss.backend == "tpu" else "triton")
    op = OPS[loss.ops[0]]
    case, kernel = smoke(op), getattr(plant(loss, tmp_path), op.name)
    expected = reference(op, case)
    ranking = rank(traced(op, case, loss.backend, kernel), expected.golden, expected.magnitude)
    first = ranking.shares[0]
    planted_line = loss.new.partition("\n")[0][:99]
    assert statement(first.line).startswith(planted_line), [(statement(s.line), s.share) for s in ranking.shares[:3]]
    assert first.share > 0.9
    last = walk(Evaluation.of_runs(Trial(op, case, loss.backend), ranking.none, ranking.all))[-1]
    assert (last.site, last.is_off, last.wrong) == ("acc", True, 0)


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_of_logic_is_found_at_the_sums(fault, tmp_path):
    pytest.importorskip("jax" if fault.backend == "tpu" else "triton")
    op = OPS[fault.ops[0]]
    found, _ = walked(op, smoke(op), fault.backend, getattr(plant(fault, tmp_path), op.name))
    assert (found[-1].site, found[-1].wrong > 0) == ("acc", True), found


@pytest.mark.full
@pytest.mark.parametrize("backend", [pytest.param(b, marks=INTERPRETED[b]) for b in ("tpu", "gpu")])
@pytest.mark.parametrize("op", OPS.values(), ids=list(OPS))
def test_a_right_kernel_has_both_stages(op, backend):
    pytest.importorskip("jax" if backend == "tpu" else "triton")
    found, _ = walked(op, smoke(op), backend)
    assert [(stage.site, stage.is_off, stage.wrong) for stage in found] == [("acc", False, 0), ("out", False, 0)]


QUANTISERS = {op.name: op for op in (*QUANTIZERS, *MXFP8_QUANTIZERS) if op.name.endswith("_quantize")}
DUAL = "mxfp8_dual_quantize"
QUICK = (("gpu", DUAL), ("tpu", "fp8_quantize"))
SITES = ["absmax", "scale", "spread"]
OF_BOTH = [f"{way}_{site}" for way in ("rowwise", "columnwise") for site in SITES]


def smallest(op):
    return min((case for case in op.cases if case.dims[0][1]), key=lambda case: reference(op, case).inputs["x"].size)


@pytest.mark.parametrize(
    ("backend", "name"),
    [
        pytest.param(b, name, marks=[*INTERPRETED[b], *([] if (b, name) in QUICK else [FULL])])
        for b in ("tpu", "gpu")
        for name in QUANTISERS
    ],
)
def test_every_stage_of_a_right_quantiser_is_the_goldens(backend, name):
    """In a case that leaves a last tile half empty."""
    pytest.importorskip("jax" if backend == "tpu" else "triton")
    op = QUANTISERS[name]
    case = smallest(op)
    found = walk_bits(Trial(op, case, backend))
    assert [s.site for s in found] == [*(OF_BOTH if "dual" in name else SITES), *reference(op, case).golden]
    assert not any(stage.wrong for stage in found) and all(stage.numbers for stage in found)


@pytest.mark.tpu
def test_every_stage_of_every_tile_is_the_goldens():
    """Two tiles, the second not full."""
    op = QUANTISERS["fp8_quantize"]
    (case,) = op.grid([dict(M=40, K=1100)], dtype=[(F32, E4M3)], axis=[0], block_size=[None])
    found = walk_bits(Trial(op, case, "tpu"))
    assert [(stage.site, stage.wrong) for stage in found] == [(site, 0) for site in (*SITES, "qvalue", "scale")]
    assert all(stage.numbers for stage in found)


@pytest.mark.tpu
@pytest.mark.parametrize("rounding", ["up", "floor"])
def test_the_power_of_two_that_is_shown_is_the_goldens(rounding):
    """The kernel has its inverse; of zero blocks, subnormal ones, the smallest and the largest."""
    op = QUANTISERS["mxfp8_quantize"]
    for case in op.grid([dict(M=40, K=64)], dtype=[(F32, E4M3)], data=["ranges", "bits"], rounding=[rounding]):
        found = walk_bits(Trial(op, case, "tpu"))
        assert [(stage.site, stage.wrong) for stage in found] == [(site, 0) for site in (*SITES, "qvalue", "scale")]


def misquantised(backend, op, old, new, site, *marks):
    fault = Fault(f"{new} for {old}", backend, (op,), old, new)
    return pytest.param(fault, site, id=f"{backend}-{op}-{site}", marks=[*INTERPRETED[backend], *marks])


MISQUANTISED = [
    misquantised("gpu", "mxfp8_quantize", bits.LARGEST_OF, bits.LARGEST_OF.replace("exponent + 2", "exponent + 1"),
                 "scale"),
    misquantised("gpu", DUAL, bits.STORE, bits.ACROSS + bits.STORE, "rowwise", FULL),
    misquantised("gpu", "fp8_quantize", "probe(RESULT + \"spread\", tl.broadcast_to(block_scale, in_tile.shape)",
                 "probe(RESULT + \"spread\", tl.broadcast_to(2 * block_scale, in_tile.shape)", "spread", FULL),
    misquantised("tpu", "mxfp8_quantize", bits.CONVERTED,
                 f"float_of(bits_of(y.astype(jnp.float32)) + 1){bits.CONVERTED[1:]}", "qvalue", FULL),
    misquantised("tpu", "mxfp8_quantize", "return float_of((254 +", "return float_of((253 +", "scale", FULL),
    misquantised("tpu", "fp8_quantize", "b = _over(columns.start, c) + start // c", "b = start // c", "spread", FULL),
    misquantised("tpu", "fp8_dual_quantize", "values = jnp.abs(values)",
                 "values = jnp.abs(values) * (1 - 2.0**-8)", "rowwise_absmax", FULL),
]  # fmt: skip


@pytest.mark.parametrize(("fault", "site"), MISQUANTISED)
def test_the_first_value_that_is_not_the_goldens_is_found(fault, site, tmp_path):
    pytest.importorskip("jax" if fault.backend == "tpu" else "triton")
    op = QUANTISERS[fault.ops[0]]
    case = next(case for case in op.cases if case.tier == "smoke")
    found = walk_bits(Trial(op, case, fault.backend, getattr(plant(fault, tmp_path), op.name)))
    assert found[-1].site == site and found[-1].wrong and not any(stage.wrong for stage in found[:-1]), found
    shown = screen_of_bits(found, None, tmp_path).plain
    assert f"the golden's bits are lost at {found[-1].name}" in shown and "← first" in shown
    assert (found[-1].line is None) == (site in reference(op, case).golden and site != "scale")
    if found[-1].line:
        word = site.rpartition("_")[2]
        assert f".py:{found[-1].line.number}  " in shown and f'"{word}"' in shown


def test_a_value_that_the_golden_has_more_often_is_lacking():
    marks = [Mark("scale", np.array([1.0, np.nan, 2.0]), ()), Mark("scale", np.array([4.0]), ())]
    assert lacking(np.array([1.0, 2.0, 4.0]), marks) == 0
    assert lacking(np.array([1.0, 2.0, 2.0, 3.0]), marks) == 2
    assert lacking(np.array([1.0]), [Mark("scale", np.array([np.nan]), ())]) == 1


@pytest.mark.tpu
@pytest.mark.parametrize("op", OPS.values(), ids=list(OPS))
def test_a_probe_leaves_nothing_in_what_is_lowered(op, tmp_path):
    module = "_lib.scaled_tgmm" if op is TGMM_QUANTIZED else "_lib.scaled_gmm"
    check_a_probe_leaves_nothing(op, smoke(op), [module], tmp_path)


@pytest.mark.tpu
@pytest.mark.parametrize("name", [DUAL, *(pytest.param(name, marks=FULL) for name in QUANTISERS if name != DUAL)])
def test_nor_does_that_of_a_quantiser(name, tmp_path):
    op = QUANTISERS[name]
    case = next(case for case in op.cases if case.tier == "smoke")
    check_a_probe_leaves_nothing(op, case, ["_lib.blocks"], tmp_path)


@pytest.mark.gpu
@interpreted
def test_the_sums_that_are_shown_are_those_of_the_results_elements():
    """Two groups, and a last tile of both axes that is not full."""
    pytest.importorskip("triton")
    torch = pytest.importorskip("torch")
    from gpu_reference.quantized_gmm import gmm_quantized

    lhs, rhs = (torch.ones(shape, dtype=torch.int8) for shape in ((21, 32), (2, 32, 20)))
    scales, sizes = (torch.ones(21, 1), torch.ones(2, 1, 20)), torch.tensor([9, 12], dtype=torch.int32)
    with shown() as counts:
        gmm_quantized(lhs, scales[0], rhs, scales[1], sizes, tiling=(16, 32, 16))
    assert counts["acc"] == 21 * 20
