"""Ops whose outputs differ in dtype and in the length of their sums, and whose kernels can take several ways."""

from dataclasses import replace

import numpy as np
import pytest

from parity.dtypes import round_to
from parity.judging.judge import judge, measure_contract
from parity.judging.reference import reference
from parity.judging.stages import emulate
from parity.op import Contract, Op
from parity.trial import Trial
from tests.matrix.gla import CHUNK_SIMPLE_GLA
from tests.matrix.gmm import GMM

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


def test_the_output_nearest_to_its_own_bound_decides():
    op = replace(
        FORWARD,
        chain=lambda c, inputs: {"o": 1_000_000, "ht": 1},
        contract=lambda c, backend: replace(FORWARD.contract(c, backend), sites={}),  # bounds that are derived, alone
    )
    bounds = {name: op.contract(CASE, "tpu").bound(n) for name, n in (("o", 1_000_000), ("ht", 1))}
    golden = reference(op, CASE)
    unit = {name: golden.magnitude[name] * 2.0**-24 for name in golden.golden}

    def off(**eta):
        """o and ht off by so many roundoffs of their magnitudes, o far beyond half a unit in its last place."""
        exact = {name: golden.golden[name] + n * unit[name] for name, n in eta.items()}
        return lambda o, ht: (round_to(exact["o"], "bfloat16"), round_to(exact["ht"], "float32"))

    within = judge(Trial(op, CASE, "tpu", kernel(off(o=bounds["o"] * 0.9, ht=bounds["ht"] * 0.5))))
    assert (within.verdict.outcome, within.output, within.bound) == ("AGREES", "o", bounds["o"])
    nearer = judge(Trial(op, CASE, "tpu", kernel(off(o=bounds["o"] * 0.5, ht=bounds["ht"] * 0.9))))
    assert (nearer.verdict.outcome, nearer.output) == ("AGREES", "ht")  # however much larger the η of o
    beyond = judge(Trial(op, CASE, "tpu", kernel(off(o=bounds["o"] * 0.5, ht=bounds["ht"] * 1.2))))
    assert (beyond.verdict.outcome, beyond.output, beyond.bound) == ("LOGIC FAULT", "ht", bounds["ht"])
    assert beyond.worst.allowed == pytest.approx(bounds["ht"] * unit["ht"][beyond.worst.index])


def test_one_chain_is_that_of_every_output():
    case = next(c for c in GMM.cases if c.tier == "smoke")
    assert reference(GMM, case).chain == {"out": case.K}


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
    assert Op.representative(GMM.cases[0])
    assert Op.tau == 0
