"""`parity stages`: where a NaN is born, and which lines a logic fault is among."""

import linecache
import sys
from types import SimpleNamespace

import numpy as np
import pytest

from cpu_golden.stages import exact
from parity.cli.stages import screen
from parity.debugging.attribution import Ranking, Share, program
from parity.debugging.attribution.locate import birthplace, locate, own_rounding
from parity.debugging.attribution.program import Births, Line, Run
from parity.dtypes import round_to
from parity.op import Array, Contract, Op
from parity.trial import Trial
from tests.meta.faults.planting import OP, trial_of
from tests.meta.faults.test_faults import FAULTS
from tests.meta.faults.test_faults_gla import FAULTS as FAULTS_GLA
from tests.support.interpreter import INTERPRETED

GLA = "chunk_simple_gla_fwd"


BACKENDS = [pytest.param(backend, marks=INTERPRETED[backend]) for backend in ("tpu", "gpu")]


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


def twice(x, stages=exact):
    return stages("out", 2 * x.astype(np.float64))


TWICE = Op(
    "twice",
    golden=twice,
    tpu="twice_kernel:kernel",
    gpu="",
    inputs=lambda case: {"x": Array((case.M,), "float32")},
    contract=lambda case, backend: Contract(sites={"out": "float32"}),
)


@pytest.mark.tpu
def test_of_two_operations_that_each_make_a_nan_the_first_is_named(tmp_path, monkeypatch):
    kernel = "def kernel(x):\n    low = x - float('inf')\n    a = low - low\n    return x + x + a + low * 0\n"
    (tmp_path / "twice_kernel.py").write_text(kernel)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "twice_kernel", raising=False)
    (case,) = TWICE.grid([dict(M=8)], dtype=["float32"])
    trial = Trial(TWICE, case, "tpu")
    found = birthplace(program(trial), trial.reference.golden)
    assert (found.birth.place.line.number, found.others, found.left) == (3, 1, 0)
    printed = screen(locate(trial, "out", frozenset()), tmp_path).plain
    assert "NaN is born at twice_kernel.py:3" in printed and "without it and 1 more, 0 of 8 are left" in printed


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
    [pytest.param(*r, id="-".join(r[:3]), marks=[*INTERPRETED[r[0]], *FULL * (r[1] not in USUAL)]) for r in REGIONS],
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


@pytest.mark.tpu
def test_a_string_names_an_argument_too(tmp_path):
    name = "the gates of a channel are those of the first"
    trial, lines = trial_of(FAULTS_GLA, name, "tpu", "chunk_gla_fwd", tmp_path)
    found = locate(trial, "o", frozenset()).region
    assert found.instead.arguments == ("gk",)
    assert {line.number for line in found.readers if "planted_" in line.file} & set(lines)


@pytest.mark.parametrize(("error", "is_own"), [(0.0, True), (2.0**-26, True), (2.0**-12, False)])
@pytest.mark.parametrize(("dtype", "rest"), [("bfloat16", 0.3), ("bfloat16", 0.01), ("float32", 0.3)])
def test_a_line_does_as_promised_that_rounds_an_output_to_its_dtype_alone(error, is_own, dtype, rest):
    x = np.random.default_rng(0).normal(size=1000)
    rounded = round_to(x, "bfloat16").astype(np.float64) * (1 + error)
    run, lines = Run({"o": x}, {}), (Line("a.py", 1), Line("a.py", 2))
    ranking = Ranking(tuple(map(Share, lines, (1 - rest, rest))), 1.0, 0.0, run, run)
    of = SimpleNamespace(run=lambda active: Run({"o": rounded}, {}))
    found = own_rounding(of, ranking, "o", Contract(out=dtype), frozenset())
    assert found == (ranking.shares[:1] if is_own and dtype == "bfloat16" and rest > 0.05 else ())


def test_lines_that_each_round_a_part_of_an_output_do_as_promised():
    """As the two stores of a rotary embedding."""
    x = np.random.default_rng(0).normal(size=1000)
    rounded, half = round_to(x, "bfloat16").astype(np.float64), np.arange(1000) < 500
    run, lines = Run({"o": x}, {}), tuple(Line("a.py", n) for n in (1, 2, 3))
    ranking = Ranking(tuple(map(Share, lines, (0.4, 0.35, 0.25))), 1.0, 0.0, run, run)
    parts = {lines[0]: np.where(half, rounded, x), lines[1]: np.where(half, x, rounded), lines[2]: x * (1 + 2.0**-12)}

    def of(active):
        return Run({"o": next(parts[line] for line in lines if active(SimpleNamespace(line=line)))}, {})

    found = own_rounding(SimpleNamespace(run=of), ranking, "o", Contract(out="bfloat16"), frozenset())
    assert found == ranking.shares[:2]
