"""`parity stages` of the block-scaled matmuls: a lost bit is its line's, a fault of logic enters at the sums.

The marks leave nothing in what is lowered.
"""

import ast

import pytest

from parity.backends import load_kernel
from parity.judge import reference
from parity.lines import rank, statement
from parity.lines.walk import walk
from tests.matrix.mxfp8 import GROUPED_GEMM
from tests.matrix.quantized_gmm import E4M3, F32, GMM_QUANTIZED, TGMM_QUANTIZED
from tests.meta import test_stages_command as stages
from tests.meta.test_faults import ROOT, Fault, plant

OPS = {op.name: op for op in (GMM_QUANTIZED, TGMM_QUANTIZED, GROUPED_GEMM)}


def smoke(op):
    return next(case for case in op.cases if case.tier == "smoke" and (case.dtype, case.out) == (E4M3, F32))


def planted(backend, op, old, new, *marks):
    fault = Fault(f"{new} for {old}", backend, (op,), old, new, module="quantized_gmm")
    return pytest.param(fault, id=f"{backend}-{op}", marks=[getattr(pytest.mark, backend), *marks])


FULL = pytest.mark.full
BF16 = ".astype(jnp.bfloat16).astype(jnp.float32)"
ADDED = "total = sums if total is None else total + sums"
SCALED = "tl.load(b_scales + at_row // RHS_BLOCK * rhs_scale_stride_m, mask=in_columns, other=0)"

LOSSES = [
    planted("tpu", "gmm_quantized", ADDED, f"total = sums if total is None else (total + sums){BF16}"),
    planted("tpu", "tgmm_quantized", "acc[rows, columns] = before + sums",
            f"acc[rows, columns] = (before + sums){BF16}", FULL),
    planted("tpu", "grouped_gemm", ADDED, f"total = sums if total is None else (total + sums){BF16}", FULL),
    planted("gpu", "tgmm_quantized", f"partial *= {SCALED}", f"partial *= {SCALED}.to(tl.bfloat16).to(tl.float32)",
            FULL),
]  # fmt: skip
FAULTS = [
    planted("tpu", "gmm_quantized", ADDED, "total = sums if total is None else sums", FULL),
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
    ranking = rank(stages.traced(op, case, loss.backend, kernel), expected.golden, expected.magnitude)
    first = ranking.shares[0]
    assert statement(first.line).startswith(loss.new[:99]), [(statement(s.line), s.share) for s in ranking.shares[:3]]
    assert first.share > 0.9
    last = walk(op, case, loss.backend, expected, ranking)[-1]
    assert (last.site, last.is_off, last.wrong) == ("acc", True, 0)


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_of_logic_is_found_at_the_sums(fault, tmp_path):
    pytest.importorskip("jax" if fault.backend == "tpu" else "triton")
    op = OPS[fault.ops[0]]
    found, _ = stages.walked(op, smoke(op), fault.backend, getattr(plant(fault, tmp_path), op.name))
    assert (found[-1].site, found[-1].wrong > 0) == ("acc", True), found


@pytest.mark.full
@pytest.mark.parametrize("backend", [pytest.param(b, marks=getattr(pytest.mark, b)) for b in ("tpu", "gpu")])
@pytest.mark.parametrize("op", OPS.values(), ids=list(OPS))
def test_a_right_kernel_has_both_stages(op, backend):
    pytest.importorskip("jax" if backend == "tpu" else "triton")
    found, _ = stages.walked(op, smoke(op), backend)
    assert [(stage.site, stage.is_off, stage.wrong) for stage in found] == [("acc", False, 0), ("out", False, 0)]


@pytest.mark.tpu
@pytest.mark.parametrize("op", OPS.values(), ids=list(OPS))
def test_the_debug_argument_leaves_nothing_in_what_is_lowered(op, tmp_path):
    jax = pytest.importorskip("jax")
    case, source = smoke(op), (ROOT / "tpu_kernels" / "quantized_gmm.py").read_text()
    stripped = ast.unparse(stages._Without().visit(ast.parse(source)))
    assert "debug('" not in stripped
    fault = Fault("", "tpu", (op.name,), source, stripped, module="quantized_gmm")
    inputs = {
        key: jax.ShapeDtypeStruct(x.shape, x.dtype) for key, x in reference(op, case).inputs.items() if x is not None
    }
    lowered = {
        jax.jit(lambda given, k=kernel: k(**given, **stages.arguments(op, case))).lower(inputs).as_text()
        for kernel in (load_kernel(op.tpu), getattr(plant(fault, tmp_path), op.name))
    }
    assert len(lowered) == 1


def test_a_triton_kernel_debugs_only_where_it_is_asked_to():
    stages.test_a_triton_kernel_debugs_only_where_it_is_asked_to("quantized_gmm")
