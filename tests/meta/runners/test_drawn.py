"""Cases that no one chose, of every op on both backends, judged like those of the matrix, and compiled for TPUs."""

import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, Phase, assume, given, settings
from hypothesis import strategies as st

from parity import matrix
from parity.debugging.shrink import shrink
from parity.dtypes import round_to
from parity.judging.judge import judge
from parity.report import text
from parity.runners import drawn
from parity.trial import Trial
from tests.matrix import OPS
from tests.matrix.delta_rule import CAUSAL_CONV1D, DELTA_RULES, GATES
from tests.matrix.gla import GATED_LINEAR_ATTENTION
from tests.matrix.gmm import GMM, TGMM
from tests.matrix.moe import GROUPED_DENSE, GROUPED_DENSE_BWD, MOE_LAYERS
from tests.matrix.mxfp8 import GROUPED_GEMM, MXFP8_QUANTIZERS
from tests.matrix.quantize import QUANTIZERS
from tests.matrix.quantized_gmm import GMM_QUANTIZED, TGMM_QUANTIZED
from tests.meta.faults.planting import plant
from tests.meta.faults.test_faults import FAULTS
from tests.support import tpu_code
from tests.support.agreement import in_turn
from tests.support.commands import run_pytest

OP = {op.name: op for op in OPS}
FAMILIES = {
    "gmm/test_gmm": (GMM, TGMM),
    "quantized/test_quantized": (GMM_QUANTIZED, TGMM_QUANTIZED, GROUPED_DENSE, GROUPED_DENSE_BWD, *QUANTIZERS),
    "quantized/test_mxfp8": (GROUPED_GEMM, *MXFP8_QUANTIZERS),
    "moe/test_moe": MOE_LAYERS,
    "gla/test_gla": GATED_LINEAR_ATTENTION,
    "delta_rule/test_delta_rule": DELTA_RULES,
    "delta_rule/test_delta_rule_gates": GATES,
    "delta_rule/test_delta_rule_conv": CAUSAL_CONV1D,
}
"""The tests that run an op's cases, without the backend."""
EXAMPLES = {"tpu": 100, "gpu": 50}
"""For how many examples of an ordinary property one run of a kernel stands: interpreted, a TPU's compiles first."""

COMPILED = 8
"""Cases of an op that a chip's compiler is given, in one process: the first is the smallest that there is."""


class Failing(Exception):
    """A case that fails."""


def falsify(ops, tests, backend, examples, kernel=None):
    """Fail with what hypothesis finds to fail, if it does, reduced by `parity shrink`: hypothesis's own way of reducing
    knows no sizes, and takes minutes."""

    @settings(
        max_examples=examples,
        phases=[Phase.explicit, Phase.reuse, Phase.generate],
        suppress_health_check=[HealthCheck.filter_too_much, HealthCheck.too_slow],
        report_multiple_bugs=False,
    )
    @given(st.sampled_from([op.name for op in ops]).flatmap(lambda name: drawn.cases(OP[name])))
    def all_pass(case):
        op = OP[case.op]
        for same in (case,) if op.bit_exact else (case, case.with_data("integers")):
            assume(drawn.is_case(op, same))
            verdict = judge(Trial(op, same, backend, kernel)).verdict
            # A case so small that a wrong output could pass it says nothing.
            assume(verdict.outcome != "MISTRUSTED")
            if not verdict.passed:
                raise Failing(same)

    try:
        all_pass()
    except Failing as found:
        op = OP[found.args[0].op]
        judged = shrink(Trial(op, found.args[0], backend, kernel)).judged
        test = "test_has_the_goldens_bits" if op.bit_exact else "test_agrees_with_golden"
        rerun = f'pytest -n0 "tests/{tests}_{backend}.py::{test}[{judged.case.id}]"'
        pytest.fail(text.failure(judged, None, rerun), pytrace=False)


@pytest.mark.parametrize(("tests", "backend"), in_turn({tests: (tests,) for tests in FAMILIES}))
def test_drawn_cases_pass(tests, backend):
    falsify(FAMILIES[tests], tests, backend, max(settings().max_examples // EXAMPLES[backend], 1))


@pytest.mark.full
@tpu_code.needs_compiler
@tpu_code.EACH_CHIP
@pytest.mark.parametrize("op", [op for op in OPS if op.name not in tpu_code.WITHOUT_KERNELS], ids=lambda op: op.name)
def test_drawn_cases_compile(op, chip):
    """No chip took `gmm_quantized` of 200 rows, a size that no program of the matrix has."""
    found = []

    @settings(max_examples=COMPILED, phases=[Phase.generate], suppress_health_check=list(HealthCheck))
    @given(drawn.cases(op))
    def collect(case):
        found.append((op, case))

    collect()
    tpu_code.compiled(found, chip)


def test_every_op_is_drawn():
    assert sorted(op.name for ops in FAMILIES.values() for op in ops) == sorted(op.name for op in OPS)


@given(st.sampled_from(sorted(OP)).flatmap(lambda name: drawn.cases(OP[name])))
@settings(max_examples=15, suppress_health_check=[HealthCheck.filter_too_much, HealthCheck.too_slow])
def test_a_drawn_case_is_read_back_from_its_id(case):
    assert matrix.parse(OP[case.op], case.id) == case
    assert matrix.find(OPS, case.id)[1].id == case.id


@pytest.mark.full
def test_every_case_of_the_matrix_is_read_back_from_its_id():
    for op in OPS:
        for case in op.cases[:: max(len(op.cases) // 15, 1)]:
            for same in (case.with_seed(3), case.with_data("integers")):
                assert matrix.parse(op, same.id) == replace(same, tier="default", model="")


@pytest.mark.parametrize(
    "spelled",
    [
        "gmm-M2_K3-f32-zipf-s0", "gmm-M2_K3_N4_G1-f31-zipf-s0", "gmm-M2_K3_N4_G1-f32-zipf-loud-s0",
        "gmm-M2_K3_N4_G1-f32-s0", "gmm-M2_K3_N4_G1-f32-groups3-zipf-s0", "gmm-M2_K3_N4_G1-f32-zipf-existing_out-s0",
        "gmm-M2_K3_N4_G1-f32-zipf-s", "tgmm-M2_K3_N4_G1-f32-transpose_rhs-zipf-s0",
    ],
)  # fmt: skip
def test_what_spells_no_case_is_none(spelled):
    assert matrix.parse(GMM if spelled.startswith("gmm") else TGMM, spelled) is None
    with pytest.raises(ValueError, match="must be the id of a case"):
        matrix.find(OPS, spelled)


def rerun_of(failed):
    """The test and the case id of the command that a failure ends with."""
    return re.search(r'rerun: pytest -n0 "(\S+?)\[(\S+)\]"$', str(failed.value)).groups()


@pytest.mark.full
@pytest.mark.tpu
def test_a_fault_is_found_and_shrunk_to_an_id_that_reruns_alone():

    def kernel(preferred_element_type, tiling, **arguments):
        """Loses what lies beyond row 20 and column 33."""
        tensors = {name: np.asarray(x) for name, x in arguments.items() if hasattr(x, "shape")}
        out = round_to(GMM.golden(**arguments | tensors), preferred_element_type)
        out[20:, 33:] = 0
        return out

    with pytest.raises(pytest.fail.Exception) as failed:
        falsify((GMM,), "gmm/test_gmm", "tpu", 100, kernel)
    test, case_id = rerun_of(failed)
    op, case = matrix.find(OPS, case_id)
    assert test == "tests/gmm/test_gmm_tpu.py::test_agrees_with_golden"
    assert not judge(Trial(op, case, "tpu", kernel)).verdict.passed
    assert (case.M, case.K, case.N, case.G) == (21, 1, 34, 1)
    assert not (case.existing_out or case.transpose_rhs or case.shard)


@pytest.mark.full
@pytest.mark.gpu
def test_a_fault_planted_in_a_kernel_is_found(tmp_path):
    fault = next(f for f in FAULTS if (f.name, f.backend) == ("a group boundary inside a tile is ignored", "gpu"))
    kernel = plant(fault, tmp_path).gmm
    with pytest.raises(pytest.fail.Exception) as failed:
        falsify((GMM,), "gmm/test_gmm", "gpu", 100, kernel)
    _, case_id = rerun_of(failed)
    op, case = matrix.find(OPS, case_id)
    assert not judge(Trial(op, case, "gpu", kernel)).verdict.passed
    assert judge(Trial(op, case, "gpu")).verdict.passed
    assert case.M * case.K * case.N * case.G <= 8


@pytest.mark.full
@pytest.mark.tpu
def test_a_node_id_of_a_case_that_the_matrix_does_not_have_runs():
    root, test = Path(__file__).parents[3], "tests/gmm/test_gmm_tpu.py::test_agrees_with_golden"
    case = "tgmm-M9_K5_N7_G3-f32-tiling16x128x128-ones-s5"
    done = run_pytest(root, "-n0", "-q", f"{test}[{case}]")
    assert done.returncode == 0, done.stdout
    assert "1 passed" in done.stdout
    assert "not found" in run_pytest(root, "-n0", "-q", f"{test}[{case.replace('ones', 'nones')}]").stderr
