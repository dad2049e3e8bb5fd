"""Faults have a place to be planted in: asked of all of them at once, where most are planted in the full tier alone."""

import pytest

from tests.meta.debugging import test_explain, test_stages_command
from tests.meta.faults import test_faults_delta_rule, test_faults_delta_rule_gpu, test_faults_delta_rule_tpu
from tests.meta.faults.answers import FILES
from tests.meta.faults.planting import OP, places

DELTA_RULES = (test_faults_delta_rule, test_faults_delta_rule_gpu, test_faults_delta_rule_tpu)


@pytest.mark.parametrize("file", [*FILES, *DELTA_RULES], ids=lambda file: file.__name__.rpartition(".")[2])
def test_each_fault_has_one_place(file):
    assert_one_place(file.FAULTS)


def test_each_fault_that_stages_are_asked_of_has_one_place():
    lists = (test_stages_command.LOSSES, test_stages_command.FAULTS)
    assert_one_place([parameters.values[0] for faults in lists for parameters in faults])


def test_each_loss_that_explain_is_asked_of_has_a_place():
    losses = [(getattr(OP[loss.op], loss.backend), old) for loss in test_explain.LOSSES for old in loss.edits]
    assert [(target, old) for target, old in losses if not places(target, old)] == []


def assert_one_place(faults):
    found = {fault.old: len(places(getattr(OP[fault.ops[0]], fault.backend), fault.old, fault.within))
             for fault in faults}  # fmt: skip
    assert {old: count for old, count in found.items() if count != 1} == {}
