"""The programs of the matrix under the TPU compiler: as declared, and no worse than the schedule ledger has them."""

from importlib.util import find_spec

import pytest

from parity.compilers import schedule
from parity.compilers.chips import CHIPS
from tests.matrix.programs import PROGRAMS

pytestmark = pytest.mark.skipif(
    find_spec("libtpu") is None, reason="the TPU compiler is not installed: pip install libtpu"
)

REPRESENTATIVE = {"tpu7x": "gmm_quantized-DeepSeek-V3-e4m3-block128"}


def check(programs, chip, root):
    compiled = schedule.compile_all(programs, [chip])
    by_id = {program.id: program for program in programs}
    lines = [schedule.line(by_id[name], chip, result) for (name, _), result in compiled.items() if result.ok]
    assert schedule.surprises(programs, compiled) == []
    assert schedule.regressions(schedule.LEDGER.read(root), lines) == [], "if it is meant: parity schedule --record"


@pytest.mark.parametrize("chip", REPRESENTATIVE)
def test_a_representative_program(chip, pytestconfig):
    check([program for program in PROGRAMS if program.id == REPRESENTATIVE[chip]], chip, pytestconfig.rootpath)


@pytest.mark.full
@pytest.mark.parametrize("chip", CHIPS)
def test_all_programs(chip, pytestconfig):
    check(PROGRAMS, chip, pytestconfig.rootpath)


def test_every_line_of_the_ledger_has_a_program(pytestconfig):
    declared = {(chip, program.op, program.name) for program in PROGRAMS for chip in program.chips}
    assert schedule.LEDGER.read(pytestconfig.rootpath).keys() - declared == set()
