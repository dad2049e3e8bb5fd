"""Ops whose outputs differ in dtype and in the length of their sums, and whose kernels can take several ways."""

from dataclasses import replace

import ml_dtypes
import numpy as np
import pytest

from parity.dtypes import round_to
from parity.judging.judge import judge, measure_contract
from parity.judging.spread import runs
from parity.judging.stages import emulate
from parity.op import Contract, Op
from parity.trial import Trial
from tests.matrix.gla import CHUNK_SIMPLE_GLA
from tests.matrix.quantize import FP8_QUANTIZE
from tests.support.tiny import tiny

FORWARD, BACKWARD = CHUNK_SIMPLE_GLA
CASE = next(c for c in FORWARD.cases if c.tier == "smoke" and c.dtype == "bfloat16")


def kernel(spoil=lambda o, ht: (o, ht)):
    """The golden in the dtypes of the contract, with something done to its outputs."""

    def run(precision, fused, **arguments):
        tensors = {name: np.asarray(x) for name, x in arguments.items() if hasattr(x, "shape")}
        golden = FORWARD.golden(**arguments | tensors)
        o, ht = spoil(round_to(golden.o, "bfloat16"), round_to(golden.ht, "float32"))
        return type(golden)(o, ht)

    return run


def test_a_contract_has_the_dtype_of_each_output():
    contract = Contract("native", "bfloat16", outs={"ht": "float32"})
    assert (contract.dtype("o"), contract.dtype("ht")) == ("bfloat16", "float32")
    assert (contract.is_narrow("o"), contract.is_narrow("ht")) == (True, False)
    assert contract.name == replace(contract, outs={}).name == "native/float32/bfloat16"
    with pytest.raises(ValueError, match=r"outs\['ht'\] must be one of .*, got 'float31'"):
        Contract("native", "bfloat16", outs={"ht": "float31"})


def test_every_output_is_judged_in_its_own_dtype():
    judged = judge(Trial(FORWARD, CASE, "tpu", kernel()))
    assert judged.verdict.outcome == "AGREES"
    assert set(judged.outputs) == {"o", "ht"}
    wide = judge(Trial(FORWARD, CASE, "tpu", kernel(lambda o, ht: (o.astype(np.float32), ht))))
    assert (wide.verdict.outcome, wide.output) == ("WRONG DTYPE", "o")
    narrow = judge(Trial(FORWARD, CASE, "tpu", kernel(lambda o, ht: (o, ht.astype(o.dtype)))))
    assert (narrow.verdict.outcome, narrow.output) == ("WRONG DTYPE", "ht")
    rounded = judge(Trial(FORWARD, CASE, "tpu", kernel(lambda o, ht: (o, ht.astype(o.dtype).astype(ht.dtype)))))
    assert (rounded.verdict.outcome, rounded.output) == ("OUT OF BOUND", "ht")


def test_a_trial_has_the_floors_that_its_outputs_are_measured_with():
    trial = Trial(FORWARD, CASE, "tpu", kernel())
    assert trial.floors == {name: metrics.floor for name, metrics in judge(trial).outputs.items()}
    assert trial.floors["o"] > trial.floors["ht"] > 0
    assert Trial(FP8_QUANTIZE, tiny(FP8_QUANTIZE), "tpu").floors == {}


@pytest.mark.parametrize(("error", "share", "count"), [(1e-6, 1, 4), (5e-5, 1, 16), (1, 0.1, 64)])
def test_runs_are_taken_until_every_output_fits(error, share, count, monkeypatch):
    """o has no error at all. What is wrong in a few elements may be a quantiser's choice near a tie: some runs show."""
    drawn = []
    monkeypatch.setattr(
        "parity.trial.runs", lambda *given, **how: (drawn.append(run) or run for run in runs(*given, **how))
    )

    def off(o, ht):
        wrong = np.arange(ht.size).reshape(ht.shape) < share * ht.size
        return o, np.where(wrong, ht * (1 + error), ht).astype(np.float32)

    judged = judge(Trial(FORWARD, CASE, "tpu", kernel(off)))
    assert (len(drawn), judged.verdict.passed) == (count, count == 4)


@pytest.mark.parametrize(("o_ulps", "ht_ulps", "decides"), [(3, 0, "o"), (0, 2000, "ht"), (3, 2000, "o")])
def test_the_output_that_is_furthest_from_its_contract_decides(o_ulps, ht_ulps, decides):
    def spoil(o, ht):
        for y, ulps in ((o, o_ulps), (ht, ht_ulps)):
            y.flat[0] *= 1 + ulps * float(ml_dtypes.finfo(y.dtype).eps)
        return o, ht

    judged = judge(Trial(FORWARD, CASE, "tpu", kernel(spoil)))
    assert (judged.verdict.outcome, judged.output) == ("OUT OF BOUND", decides)
    assert judged.verdict.reason.startswith(f"{decides}: ") and judged.worst.index == (0, 0, 0, 0)
    assert judged.load == max(fit.load for fit in judged.fits.values()) > 1


def test_an_output_that_is_not_finite_decides_before_one_that_is_far_off():
    judged = judge(Trial(FORWARD, CASE, "tpu", kernel(lambda o, ht: (np.full_like(o, np.nan), 2 * ht))))
    assert (judged.verdict.outcome, judged.output, judged.load) == ("NON-FINITE", "o", np.inf)


def test_integer_data_are_exact_where_every_output_holds_its_golden():
    def thirds(**arguments):
        golden = FORWARD.golden(**arguments)
        return golden._replace(ht=golden.ht / 3)

    integers = CASE.with_data("integers")
    assert Trial(FORWARD, integers, "tpu").exact
    assert not Trial(replace(FORWARD, golden=thirds), integers, "tpu").exact


def test_a_contract_is_emulated_in_each_outputs_own_dtype():
    emulated = emulate(Trial(FORWARD, CASE, "tpu"))
    assert {name: str(y.dtype) for name, y in emulated.items()} == {"o": "bfloat16", "ht": "float32"}
    measured = measure_contract(Trial(FORWARD, CASE, "tpu"))
    assert measured["o"].epsilon > 100 * measured["ht"].epsilon > 0


def test_two_pieces_of_bfloat16_hold_sixteen_digits():
    x = np.random.default_rng(0).standard_normal(10_000)
    lost = np.abs(round_to(x, "bf16x2") - x) / np.abs(x)
    assert 2.0**-18 < lost.max() <= 2.0**-16
    for exact in (np.arange(-(2.0**15), 2.0**15), round_to(x, "bfloat16").astype(np.float64)):
        assert np.array_equal(round_to(exact, "bf16x2"), exact)


def test_a_route_is_the_kernels_alone():
    case = next(c for c in FORWARD.cases if c.route == "unfused")
    taken = []

    def route_taken(fused, **arguments):
        taken.append(fused)
        return kernel()(fused=fused, **arguments)

    judge(Trial(FORWARD, case, "tpu", route_taken))
    assert set(taken) == {False}


def test_an_op_that_says_nothing_compares_the_errors_of_all_its_cases_and_allows_none_to_be_larger():
    assert Op.representative(CASE)
    assert Op.tau == 0
