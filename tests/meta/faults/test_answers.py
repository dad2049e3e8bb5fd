"""What `explain` and `stages` answer of planted faults: two here, all by `tests.meta.faults.answers`."""

import pytest

from tests.meta.faults.answers import RIGHT, ask, faults

HELD = [
    ("tpu", "the accumulator is bfloat16"),
    ("tpu", "two groups are swapped"),
]


@pytest.mark.tpu
@pytest.mark.parametrize(("backend", "name"), HELD, ids=["-".join(held) for held in HELD])
def test_the_tools_name_what_was_planted(backend, name, tmp_path):
    fault, op = next((f, op) for f, op in faults() if (f.backend, f.name) == (backend, name))
    found = ask(fault, op, tmp_path)
    assert found.kind in RIGHT, found


def test_there_are_enough_faults_to_ask_of():
    kinds = {(fault.backend, op.name) for fault, op in faults()}
    assert len(list(faults())) >= 80 and len(kinds) >= 20
