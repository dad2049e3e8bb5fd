"""The contracts of the delta rules hold whatever the keys, and what this year's kernels got wrong breaks them.

Here the golden is the kernel: rounded to nearest wherever and as its contract says, and judged as a kernel is.
"""

from itertools import islice

import numpy as np
import pytest

from benchmarks.delta_rule_schemes import by_newton, by_powers
from parity.dtypes import round_to
from parity.judging.fit import RUNS
from parity.judging.rounding import on_unit
from parity.judging.spread import allowances
from parity.judging.stages import by_contract, emulate, staged
from parity.op import BACKENDS
from parity.trial import Trial
from tests.matrix.delta_rule import CHUNK_GATED_DELTA_RULE, CHUNK_KDA, DELTA_RULES, F32, SMALL, is_usual
from tests.matrix.memories import RHOS
from tests.support.interpreter import INTERPRETED
from tests.support.stages import walked

HARD = dict(decay=["zero"], beta=["near1"], h0=[True], ht=[True])


def corners(op):
    """Of the ladder: both ends and every third case between, in float32."""
    of_ladder = [case for case in op.cases if case.dtype == F32 and case.h0 and not case.l2norm and case.T <= 70
                 and (case.recall is not None or case.beta != "gated") and not case.model]  # fmt: skip
    return [*of_ladder[:1], *of_ladder[2:-1:9], *of_ladder[-1:]]


def fits(trial, found):
    explained = allowances(list(islice(trial.runs(), RUNS[1])), trial.reference.golden, trial.contract.roundoff)
    return {name: of.fit(name, found[name], trial.axes(name)) for name, of in explained.items()}


def check_fits(trial):
    for name, fit in fits(trial, emulate(trial)).items():
        assert fit.verdict() is None, (name, str(fit.verdict()))


def rounded(trial, **steps):
    """As `emulate`, in steps that are otherwise."""
    found = staged(trial, by_contract(trial.contract), **on_unit(trial.contract), **steps)
    return {name: round_to(y, trial.contract.dtype(name)) for name, y in found.items()}


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(
    ("op", "case"),
    [
        pytest.param(
            op, case, id=case.id, marks=[pytest.mark.full] * (op not in CHUNK_GATED_DELTA_RULE[:1] or case.dtype != F32)
        )
        for op in DELTA_RULES
        for case in op.cases
        if case.tier == "smoke"
    ],
)
def test_a_kernel_that_keeps_its_contract_fits_it(op, case, backend):
    check_fits(Trial(op, case, backend))


@pytest.mark.full
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(("op", "case"), [pytest.param(op, case, id=case.id) for op in DELTA_RULES
                                          for case in corners(op)])  # fmt: skip
def test_contracts_hold_whatever_the_keys(op, case, backend):
    check_fits(Trial(op, case, backend))


@pytest.mark.parametrize("backend", [pytest.param("tpu", marks=pytest.mark.full), "gpu"])
def test_an_inverse_by_powers_is_off_contract(backend):
    """Of keys apart it is not: random keys do not show it."""
    found = {}
    for rho in (RHOS[0], RHOS[2]):
        (case,) = CHUNK_GATED_DELTA_RULE[0].grid([SMALL], dtype=[F32], rho=[rho], **HARD)
        trial = Trial(CHUNK_GATED_DELTA_RULE[0], case, backend)
        fit = fits(trial, rounded(trial, inverse=by_powers))["o"]
        found[rho] = fit.verdict()
        check_fits(trial)
    assert found[0.0] is None
    assert found[1.0] is not None


@pytest.mark.parametrize(
    "backend", [pytest.param("gpu", marks=INTERPRETED["gpu"]), pytest.param("tpu", marks=pytest.mark.full)]
)
def test_an_inverse_rounds_where_the_contract_says(backend):
    """A GPU takes a row from those below by FMAs. Equal keys leave little of a row: where products were rounded by
    themselves, T was off by 1.9 times its contract."""
    pytest.importorskip("jax" if backend == "tpu" else "triton")
    op = CHUNK_KDA[0]
    case = next(c for c in op.cases if (c.dtype, c.rho, c.beta) == (F32, "equal", "near1"))
    stages, _ = walked(op, case, backend)
    (of_inverse,) = (stage for stage in stages if stage.site == "T")
    assert of_inverse.error < 1.3 * of_inverse.expected


@pytest.mark.parametrize("op", [CHUNK_GATED_DELTA_RULE[0], CHUNK_KDA[0]], ids=lambda op: op.name)
def test_a_newton_round_too_few_is_off_contract(op):
    (case,) = op.grid([SMALL], dtype=[F32], rho=[0.5], **HARD)
    trial = Trial(op, case, "gpu")
    assert fits(trial, rounded(trial, inverse=by_newton(3)))["o"].verdict() is not None


@pytest.mark.parametrize("op", [pytest.param(op, id=op.name, marks=[pytest.mark.full] * ("kda_bwd" in op.name))
                                for op in DELTA_RULES])  # fmt: skip
def test_integer_data_are_exact_under_the_contract(op):
    """What the twin of a kernel rests on: no product or sum of it needs more digits than it is rounded to."""
    usual = [case.with_data("integers") for case in op.cases if is_usual(case)]
    asked = [case for case in usual if case.tier != "full"] or usual[:1]
    assert asked
    for trial in (Trial(op, case, backend) for case in asked for backend in BACKENDS):
        for name, y in emulate(trial).items():
            np.testing.assert_array_equal(y.astype(np.float64), trial.reference.golden[name], err_msg=trial.case.id)
            assert trial.reference.golden[name].any() or not y.size
