"""How kernels cut the programs of the matrix: as the plan ledger has it, and by the laws that hold for every plan.

No result depends on a plan, so that no comparison would notice one that is many times as slow, or does not fit. Where
one is meant to change: `parity plans --record`, and read the diff.
"""

from importlib.util import find_spec

import pytest

from parity.compilers import plans
from parity.compilers.chips import CHIPS
from parity.compilers.ptx import TARGETS
from tests.matrix.programs import PLANNED, PROGRAMS

pytestmark = [
    pytest.mark.skipif(find_spec("jax") is None, reason="TPU programs are traced by JAX"),
    pytest.mark.skipif(find_spec("triton") is None, reason="GPU programs are launched by Triton"),
]
ALL = (*PROGRAMS, *PLANNED)
MODELS = ("DeepSeek-V3", "gpt-oss-120b", "K1024_N1025", "K130_N96")
SHAPES = ("B2_T4096_H16_K128_V128-g", "B2_T100", "N5")
REPRESENTATIVE = tuple(p for p in ALL if p.name.startswith(MODELS) or any(s in p.name for s in SHAPES))
MIB = 2**20
LANES, MXU = 128, 256


@pytest.fixture(scope="module")
def recorded(pytestconfig):
    return plans.LEDGER.read(pytestconfig.rootpath)


def check(programs, chip, recorded, root):
    new = {plan.key: plan for plan in plans.plan_all(root, programs, [chip])}
    old = {key: plan for key, plan in recorded.items() if key in new}
    assert plans.differences(old, new) == [], "if it is meant: parity plans --record"


@pytest.mark.parametrize("chip", ["tpu7x", "v5e", "sm_90", "sm_100"])
def test_representative_programs_are_planned_as_recorded(chip, recorded, pytestconfig):
    check(REPRESENTATIVE, chip, recorded, pytestconfig.rootpath)


@pytest.mark.full
@pytest.mark.parametrize("chip", [*CHIPS, *TARGETS])
def test_all_programs_are_planned_as_recorded(chip, recorded, pytestconfig):
    check(ALL, chip, recorded, pytestconfig.rootpath)


def test_every_line_of_the_ledger_has_a_program(recorded):
    declared = {(chip, program.op, program.name) for program in ALL for chip in plans.chips_of(program)}
    assert recorded.keys() == declared
