"""The staged goldens in use: values at the sites, shares of the error, kernels predicted from their contract."""

from dataclasses import replace

import numpy as np
import pytest

from cpu_golden.stages import Stages
from parity.backends import EMULATED
from parity.inputs import draw
from parity.judging import stages
from parity.judging.judge import judge, measure_contract
from parity.op import TIERS, Contract
from parity.trial import Trial
from tests.matrix import OPS
from tests.matrix.delta_rule import DELTA_RULES
from tests.matrix.gmm import GMM, TGMM, representative
from tests.support.agreement import in_turn

CASES = [pytest.param(op, case, id=case.id) for op in (GMM, TGMM) for case in op.cases
         if representative(case) and case.tier == "smoke"]  # fmt: skip
SITES = {"lhs", "rhs", "partial", "acc", "out"}


@pytest.mark.parametrize("op", [GMM, TGMM], ids=["gmm", "tgmm"])
def test_values_at_every_site_in_the_kernels_steps(op):
    case = next(c for c in op.cases if representative(c) and c.dtype == "bfloat16")
    inputs = draw(op, case)
    seen = stages.values(Trial(op, case, "gpu"))
    assert set(seen) == SITES
    np.testing.assert_allclose(seen["out"][-1], op.golden(**inputs, **op.arguments(case)), rtol=1e-12, atol=1e-12)
    depth = op.contract(case, "gpu").depth
    summed = [case.K] * len(seen["lhs"]) if op is GMM else [x.shape[1] for x in seen["lhs"]]
    assert len(seen["partial"]) == len(seen["acc"]) == sum(-(-n // depth) for n in summed)
    # What is accumulated is the running sum of what is produced.
    np.testing.assert_allclose(seen["acc"][1], seen["partial"][0] + seen["partial"][1], rtol=1e-12, atol=1e-12)


def test_the_budget_is_shared_by_the_sites_that_cause_it():
    case = next(c for c in GMM.cases if representative(c) and c.dtype == "bfloat16")
    share = stages.budget(Trial(GMM, case, "gpu"))
    assert set(share) == SITES
    assert sum(share.values()) == pytest.approx(1)
    # Operands and partial sums of independent terms weigh the same; the running sum is rounded at each of 13 steps,
    # with (j/13) of the final variance behind it: (1 + … + 13) / 13 = 7 times the weight of rounding the output.
    assert share["lhs"] == pytest.approx(share["rhs"], rel=0.03)
    assert share["acc"] == pytest.approx(7 * share["out"], rel=0.1)


@pytest.mark.parametrize(("op", "case", "backend"), in_turn({case.id: case.values for case in CASES}))
def test_a_contract_predicts_the_error_of_the_interpreted_kernel(op, case, backend):
    predicted = measure_contract(Trial(op, case, backend))["out"]
    measured = judge(Trial(op, case, backend)).metrics
    if backend == "gpu":
        assert measured.epsilon == pytest.approx(predicted.epsilon, rel=0.05)
    else:
        # G4's range: six passes are six roundings of which the contract knows one, and tgmm's row tiles, which do not
        # start where groups do, are more steps than the contract's (1.69 of the predicted ε in float32).
        assert 0.5 < measured.epsilon / predicted.epsilon < 2


def test_one_pass_of_bfloat16_is_predicted_as_well():
    """The contract that nobody here makes: what numerics.md calls 'emulated kernel under a contract'."""
    case = next(c for c in GMM.cases if representative(c) and c.dtype == "float32")
    sites = {"lhs": "bfloat16", "rhs": "bfloat16", "acc": "float32"}
    one_pass = replace(GMM, contract=lambda c, b: Contract(dot="bf16x1", out="float32", depth=128, sites=sites))
    tf32_sites = {"lhs": "tf32", "rhs": "tf32", "acc": "float32"}
    tf32 = replace(GMM, contract=lambda c, b: Contract(dot="tf32", out="float32", depth=8, sites=tf32_sites))
    ieee, bf16, tf = (measure_contract(Trial(op, case, "gpu"))["out"].epsilon for op in (GMM, one_pass, tf32))
    assert 1e3 * ieee < tf < bf16
    assert bf16 == pytest.approx(8 * tf, rel=0.1)  # three digits fewer


def test_a_contract_that_says_no_depth_rounds_every_sum():
    case = next(c for c in GMM.cases if representative(c) and c.dtype == "float32")
    found = stages.values(Trial(replace(GMM, contract=lambda c, b: Contract(sites={"acc": "float32"})), case, "gpu"))
    assert len(found["acc"]) == sum(x.shape[1] for x in found["lhs"])


def test_sums_of_tiles_are_rounded_once_for_each_and_at_last():
    """Of 1, 10, … 10^5 in tiles of two, in steps of one: at acc each tile's and the last, at tiles those between."""
    seen = []
    summed = Stages(lambda site, x: seen.append((site, float(x[0, 0]))) or x, depth=1, tile=2)
    summed.dot(10.0 ** np.arange(6)[None], np.ones((6, 1)))
    of_tiles = [(site, x) for site, x in seen if site in ("acc", "tiles")]
    first, second, third = ([("acc", a), ("acc", 11 * a)] for a in (1.0, 100.0, 10000.0))
    assert of_tiles == [*first, *second, ("tiles", 1111.0), *third, ("tiles", 111111.0), ("acc", 111111.0)]


STAGED = [op for op in OPS if not op.bit_exact]
USUAL = ("tgmm", "moe_layer", "chunk_simple_gla_bwd", "causal_conv1d_bwd")


@pytest.mark.parametrize(("backend", "device"), [("tpu", EMULATED), ("gpu", EMULATED), ("gpu", "NVIDIA H200")])
@pytest.mark.parametrize("op", STAGED, ids=[op.name for op in STAGED])
def test_every_op_has_the_sites_of_its_contract(op, backend, device):
    case = min((c for c in op.cases if c.data == "normal"), key=lambda c: TIERS.index(c.tier))
    trial = Trial(op, case, backend, device=device)
    assert trial.contract.sites.keys() - {"tiles"} <= stages.values(trial).keys()  # those are of a matrix unit


RESULT = {
    **dict.fromkeys(("softplus_gate", "bounded_gate"), "g"),
    **dict.fromkeys(("softplus_gate_bwd", "bounded_gate_bwd"), "da"),
    "causal_conv1d": "y",
    "causal_conv1d_bwd": "dx",
    **{op.name: "dq" if op.name.endswith("_bwd") else "o" for op in DELTA_RULES},
}
"""The site of an op's result where it is not `out`."""


@pytest.mark.parametrize(
    "op", [pytest.param(op, id=op.name, marks=[pytest.mark.full] * (op.name not in USUAL)) for op in STAGED]
)
def test_every_op_has_a_budget_over_its_sites(op):
    case = min((c for c in op.cases if c.data == "normal"), key=lambda c: TIERS.index(c.tier))
    share = stages.budget(Trial(op, case, "gpu"))
    assert share.keys() == stages.values(Trial(op, case, "gpu")).keys()
    assert sum(share.values()) == pytest.approx(1)
    assert share[RESULT.get(op.name, "out")] > 0
