"""`parity stages` of whole layers, whose stages lie between kernels: in either pass, whoever writes the second one."""

import numpy as np
import pytest

from parity.backends import load_kernel
from parity.cli.stages import conclusion
from parity.debugging.attribution import lines_compared_bit_for_bit, rank, statement
from parity.debugging.attribution.locate import locate
from parity.debugging.attribution.walk import Evaluation, walk
from parity.judging.reference import reference
from parity.trial import Trial
from tests.matrix import OPS
from tests.meta.faults.planting import Fault, plant
from tests.support.interpreter import INTERPRETED, interpreted
from tests.support.stages import check_a_probe_leaves_nothing, traced, walked

OP = {op.name: op for op in OPS}
FORWARD = ["logits", "weights", "gate", "up", "hidden", "rows"]
BACKWARD = ["dhidden", "dweights", "dgate", "dup", "drows", "dexperts", "dlogits", "drouter"]
GRADIENTS = ["x", "w_router", "w_gate", "w_up", "w_down"]
PLAIN = "moe_layer-T60_D128_F128_E4_k2-bf16-s0"
MXFP8 = "moe_layer-T60_D128_F128_E4_k2-bf16-mxfp8-capacity20-s0"
FP8_BWD = "moe_layer_bwd-T60_D128_F128_E4_k2-bf16-fp8-capacity20-s0"
F32_BWD = "moe_layer_bwd-T9_D72_F40_E12_k2-f32-poison-s0"
DENSE = "grouped_dense-M200_K256_N128_G4-bf16-tiling64x128x128-short-s0"
DENSE_BWD = DENSE.replace("dense-", "dense_bwd-")
WIDE_BWD = DENSE_BWD.replace("tiling", "quantizeFalse-bwd_quantizeFalse-tiling").replace("short", "zipf")
OF_GMM = {"tpu": ["partial", "acc", "out"], "gpu": ["acc", "out"]}
FULL = pytest.mark.full
# Half a gigabyte of memory on the GPU; and on the TPU the other backward pass stands for both.
ELSEWHERE = [("gpu", PLAIN), ("gpu", MXFP8), ("gpu", FP8_BWD), ("tpu", F32_BWD)]
BF16 = {"tpu": ".astype(jnp.bfloat16).astype(jnp.float32)", "gpu": ".bfloat16().float()"}


def case_of(case_id):
    op = OP[case_id.partition("-")[0]]
    return op, next(case for case in op.cases if case.id == case_id)


RIGHT = [
    pytest.param(
        backend,
        case,
        sites,
        marks=[*INTERPRETED[backend], *[FULL] * ((backend, case) in ELSEWHERE)],
        id=f"{backend}-{case}",
    )
    for backend in ("tpu", "gpu")
    for case, sites in [
        (PLAIN, [*FORWARD, "out"]),
        (MXFP8, [*FORWARD, "out"]),
        (FP8_BWD, [*FORWARD, *BACKWARD, *GRADIENTS]),
        (F32_BWD, [*FORWARD, *BACKWARD, *GRADIENTS]),
        (DENSE, ["acc", "out"]),
        (DENSE.replace("tiling", "quantizeFalse-tiling").replace("short", "straddle"), OF_GMM[backend]),
        (DENSE_BWD, ["dlhs", "drhs", "lhs", "rhs"]),
        (WIDE_BWD, ["dlhs", "drhs", "lhs", "rhs"]),
    ]
]


@pytest.mark.parametrize(("backend", "case_id", "sites"), RIGHT)
def test_no_stage_of_a_right_layer_is_off(backend, case_id, sites):
    op, case = case_of(case_id)
    stages, _ = walked(op, case, backend, load_kernel(getattr(op, backend)))
    assert [stage.site for stage in stages] == sites
    assert not any(stage.is_off for stage in stages), stages


def planted(backend, case_id, old, new, site, *marks):
    """`old` becomes `new` in the layer, and `site` is the stage that must be named."""
    fault = Fault(f"{new} for {old}", backend, (case_id.partition("-")[0],), old, new)
    return pytest.param(
        fault, case_id, site, id=f"{backend}-{fault.ops[0]}-{site}", marks=[*INTERPRETED[backend], *marks]
    )


TAKEN = "take(weights.reshape(-1, 1), plan."
FAULTS = [
    planted("tpu", PLAIN, '(("gate", of_gate), ("up", of_up))', '(("gate", of_up), ("up", of_gate))', "gate"),
    planted("tpu", PLAIN, TAKEN, TAKEN.replace("weights", "weights[:, ::-1]"), "hidden", FULL),
    planted("tpu", F32_BWD, "sigmoid * (1 + gate * (1 - sigmoid))", "sigmoid * (1 + gate * sigmoid)", "dgate", FULL),
    planted("tpu", F32_BWD, "sum_of(drows, None, plan.", "2 * sum_of(drows, None, plan.", "dexperts", FULL),
    planted("gpu", PLAIN, '(("gate", of_gate), ("up", of_up))', '(("gate", of_up), ("up", of_gate))', "gate", FULL),
    planted("gpu", PLAIN, TAKEN, TAKEN.replace("weights", "weights.flip(1)"), "hidden", FULL),
    planted("gpu", F32_BWD, "sigmoid * (1 + gate * (1 - sigmoid))", "sigmoid * (1 + gate * sigmoid)", "dgate", FULL),
    planted("gpu", F32_BWD, "return _sum_of(drows, None, slots).to(drows.dtype), None, None",
            "return 2 * _sum_of(drows, None, slots).to(drows.dtype), None, None", "dexperts", FULL),
]  # fmt: skip


@pytest.mark.parametrize(("fault", "case_id", "site"), FAULTS)
def test_a_fault_of_logic_is_found_where_it_enters(fault, case_id, site, tmp_path):
    op, case = case_of(case_id)
    stages, found = walked(op, case, fault.backend, getattr(plant(fault, tmp_path), op.name))
    sites = [*FORWARD, *(BACKWARD if case_id == F32_BWD else [])]
    assert [stage.site for stage in stages] == sites[: sites.index(site) + 1]
    assert stages[-1].wrong and not any(stage.is_off for stage in stages[:-1]), stages
    assert conclusion(found, tmp_path).partition(" (wrong)")[0].endswith(site)


OF_DLHS, OF_DRHS = "product(by_rows, rhs", "weight_product(left, right"
FAULTS_OF_DENSE = [
    planted(backend, case, old, old.replace(part, f"{part}._replace(qvalue=2 * {part}.qvalue)"), site, FULL)
    for backend in ("tpu", "gpu")
    for case, old, part, site in [(WIDE_BWD, OF_DLHS, "by_rows", "dlhs"), (WIDE_BWD, OF_DRHS, "right", "drhs")]
]


@pytest.mark.parametrize(("fault", "case_id", "site"), FAULTS_OF_DENSE)
def test_a_fault_of_a_backward_matmul_is_found_in_its_own_sums(fault, case_id, site, tmp_path):
    op, case = case_of(case_id)
    stages, _ = walked(op, case, fault.backend, getattr(plant(fault, tmp_path), op.name))
    assert [stage.site for stage in stages] == (["dlhs"] if site == "dlhs" else ["dlhs", "drhs"])
    assert stages[-1].wrong and not any(stage.is_off for stage in stages[:-1]), stages


HIDDEN = {
    "tpu": "weights * jax.nn.silu(gate) * up",
    "gpu": "weights * _silu(gate.float()) * up.float()",
}
DUP = "dup = dhidden * weights * silu"
LOSSES = [
    planted("tpu", F32_BWD, "precision=lax.Precision.HIGHEST)\n    logits = ",
            "precision=lax.Precision.DEFAULT)\n    logits = ", "logits", FULL),
    planted("tpu", MXFP8, f"({HIDDEN['tpu']},)", f"(({HIDDEN['tpu']}){BF16['tpu']},)", "hidden", FULL),
    planted("tpu", F32_BWD, DUP, f"dup = (dhidden * weights * silu){BF16['tpu']}", "dup", FULL),
    planted("gpu", F32_BWD, "gmm(x.float(), w_router", f"gmm(x.float(), w_router{BF16['gpu']}", "logits", FULL),
    planted("gpu", MXFP8, f"({HIDDEN['gpu']})", f"({HIDDEN['gpu']}){BF16['gpu']}", "hidden", FULL),
    planted("gpu", F32_BWD, DUP, f"dup = (dhidden * weights * silu){BF16['gpu']}", "dup", FULL),
]  # fmt: skip


@pytest.mark.parametrize(("loss", "case_id", "site"), LOSSES)
def test_a_loss_of_precision_is_found_at_its_stage_and_line(loss, case_id, site, tmp_path):
    op, case = case_of(case_id)
    expected, kernel = reference(op, case), getattr(plant(loss, tmp_path), op.name)
    fixed = lines_compared_bit_for_bit(OPS, op, loss.backend)
    ranking = rank(traced(op, case, loss.backend, kernel), expected.golden, expected.magnitude, fixed=fixed)
    stages = walk(Evaluation.of_runs(Trial(op, case, loss.backend), ranking.none, ranking.all))
    assert (stages[-1].site, stages[-1].wrong, stages[-1].is_off) == (site, 0, True), stages
    assert not any(stage.is_off for stage in stages[:-1])
    line = next(row.strip() for row in loss.new.splitlines() if row.strip())
    assert line in statement(ranking.shares[0].line), [(statement(s.line), s.share) for s in ranking.shares[:3]]


@FULL
@pytest.mark.gpu
@interpreted
def test_the_line_named_is_of_the_stage_off_not_of_the_result(tmp_path):
    """In bfloat16 what the matmuls hand on is most of the result's error: a router in bfloat16 hides behind that."""
    op, case = case_of(PLAIN)
    loss = Fault("", "gpu", (op.name,), "gmm(x.float(), w_router", f"gmm(x.float(), w_router{BF16['gpu']}")
    kernel = getattr(plant(loss, tmp_path), op.name)
    found = locate(Trial(op, case, "gpu", kernel), "out", lines_compared_bit_for_bit(OPS, op, "gpu"))
    assert "w_router" not in statement(found.ranking.shares[0].line)
    said = conclusion(found, tmp_path)
    assert said.startswith("precision is lost at logits; most of it by planted_gpu.py:") and "w_router" in said


@pytest.mark.tpu
@pytest.mark.parametrize("case_id", [PLAIN, pytest.param(FP8_BWD, marks=FULL)])
def test_a_probe_leaves_nothing_where_there_is_none(case_id, tmp_path):
    check_a_probe_leaves_nothing(*case_of(case_id), ["moe"], tmp_path, probe="_watched")


def test_a_new_tensor_has_no_number_of_one_that_lay_there(monkeypatch):
    """Memory is used again, and what it held may round to what it holds now, to 8 bits above all."""
    torch = pytest.importorskip("torch")
    pytest.importorskip("triton")
    from parity.debugging.attribution.gpu_frames import Errors
    from parity.debugging.attribution.gpu_memory import Memory, addresses_of
    from parity.debugging.attribution.gpu_tensors import Between

    memory = Memory()
    old = torch.full((8,), 3.0, dtype=torch.float8_e4m3fn)
    memory.store(addresses_of(old), np.full(8, 3.01))
    assert memory.of(old).tolist() == [3.01] * 8
    forgotten = []
    with monkeypatch.context() as patch, Between(Errors(lambda place: False), memory):
        patch.setattr(memory, "forget", lambda x: forgotten.append(x.data_ptr()))
        view, new = old[2:], torch.zeros(8)
        both = torch.frexp(new)
        new += 1
    assert forgotten == [new.data_ptr(), both[0].data_ptr(), both[1].data_ptr()]
    assert memory.of(view).tolist() == [3.01] * 6
    memory.forget(old[2:])
    assert memory.of(old).tolist() == [3.0] * 8
