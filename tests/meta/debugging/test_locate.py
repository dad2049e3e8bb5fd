"""`parity stages`: where a NaN is born, and which lines a logic fault is among."""

import linecache

import pytest

from parity.cli.stages import screen
from parity.debugging.attribution import program
from parity.debugging.attribution.locate import birthplace, locate
from parity.debugging.attribution.program import Births
from parity.trial import Trial
from tests.meta.faults.planting import OP, plant, planted_lines
from tests.meta.faults.test_faults import FAULTS
from tests.meta.faults.test_faults_gla import FAULTS as FAULTS_GLA

GLA = "chunk_simple_gla_fwd"


def trial_of(faults, name, backend, op, folder):
    """The first case that shows a fault, with the fault in its kernel; and the lines that were changed."""
    fault = next(f for f in faults if (f.backend, f.name) == (backend, name) and op in f.ops)
    case = next(case for case in OP[op].cases if case.tier != "full" and fault.where(case))
    return Trial(OP[op], case, backend, getattr(plant(fault, folder), op)), planted_lines(fault)


BACKENDS = [pytest.param(backend, marks=getattr(pytest.mark, backend)) for backend in ("tpu", "gpu")]


@pytest.mark.parametrize("backend", BACKENDS)
def test_the_statement_that_makes_an_infinity_is_named_with_its_operands(backend, tmp_path):
    trial, lines = trial_of(FAULTS_GLA, "the mask comes after exp", backend, GLA, tmp_path)
    found = birthplace(program(trial), trial.reference.golden)
    assert found.birth.place.line.number in lines and found.left == 0
    assert found.birth.result == float("inf") and found.birth.operands[0] > 88.7  # exp's limit in float32
    assert found.output in trial.reference.golden


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_kernel_whose_values_are_finite_has_no_birthplace(backend):
    op = OP["gmm"]
    case = next(case for case in op.cases if case.tier == "smoke")
    trial, births = Trial(op, case, backend), Births()
    of = program(trial)
    assert birthplace(of, trial.reference.golden) is None
    of.births(births)
    assert births.found == ()


@pytest.mark.tpu
def test_memory_that_nothing_is_stored_to_is_named_as_such(tmp_path):
    trial, _ = trial_of(FAULTS, "an empty group is left unwritten", "tpu", "tgmm", tmp_path)
    found = locate(trial, "out", frozenset())
    assert found.birthplace.birth is None and found.birthplace.left == 0
    assert "of memory that nothing is stored to" in screen(found, tmp_path).plain


REGIONS = [
    ("tpu", "chunk_gla_bwd", "the final state is missing from dgk", FAULTS_GLA, ""),
    ("tpu", "gmm", "a group boundary inside a tile is off by one", FAULTS, ""),
    ("tpu", GLA, "a tile overwrites what it should add to", FAULTS_GLA, "return decayed(state, "),
    ("gpu", "gmm", "a partial K tile is dropped", FAULTS, ""),
    ("gpu", "tgmm", "existing_out is overwritten, not added", FAULTS, "tl.store(out_tile, "),
]
"""The last: the call of the function with the fault, where that leaves the function nothing to compute."""
USUAL, FULL = (GLA, "tgmm"), [pytest.mark.full]


@pytest.mark.parametrize(
    ("backend", "op", "name", "faults", "call"),
    [
        pytest.param(*r, id="-".join(r[:3]), marks=[getattr(pytest.mark, r[0]), *FULL * (r[1] not in USUAL)])
        for r in REGIONS
    ],
)
def test_the_statements_between_right_and_wrong_have_the_fault(backend, op, name, faults, call, tmp_path):
    trial, lines = trial_of(faults, name, backend, op, tmp_path)
    found = locate(trial, next(iter(trial.reference.golden)), frozenset())
    if call:
        assert any(call in linecache.getline(line.file, line.number) for line in found.region.lines)
    else:
        listed = found.region.lines + found.region.shared
        planted = {line.number for line in listed if "planted_" in line.file}
        assert planted & set(lines)
    assert found.ranking is None and "explain" not in screen(found, tmp_path).plain
