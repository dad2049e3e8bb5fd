"""Faults have a place to be planted in: asked of all of them at once, where most are planted in the full tier alone."""

import subprocess
import sys

import pytest

from tests.meta.debugging import test_explain, test_stages_command, test_stages_layer
from tests.meta.faults.answers import FILES
from tests.meta.faults.planting import OP, places, planted, sources_with
from tests.meta.judging import test_bit_exact
from tests.quantized_gmm import test_quantized_gmm_stages

PARAMETERS = {
    "explain of bits": [test_bit_exact.PLANTED],
    "stages": [test_stages_command.LOSSES, test_stages_command.FAULTS],
    "stages of layers": [test_stages_layer.LOSSES, test_stages_layer.FAULTS, test_stages_layer.FAULTS_OF_DENSE],
    "stages of quantised": [
        test_quantized_gmm_stages.LOSSES, test_quantized_gmm_stages.FAULTS, test_quantized_gmm_stages.MISQUANTISED,
    ],
}  # fmt: skip


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.__name__.rpartition(".")[2])
def test_each_fault_has_one_place(file):
    assert_one_place(file.FAULTS)


def test_each_fault_has_names_that_are_known(tmp_path):
    """A kernel that crashes is not one that errs; most faults are planted in the full tier alone."""
    names = {}
    for n, fault in enumerate(planted()):
        (source,) = sources_with(fault).values()
        (tmp_path / f"{n}.py").write_text(source)
        names[f"{n}.py"] = fault.name
    check = [sys.executable, "-m", "ruff", "check", "--isolated", "--select=F821", "--output-format=concise", "."]
    found = subprocess.run(check, cwd=tmp_path, capture_output=True, text=True)
    unknown = [line for line in found.stdout.splitlines() if "F821" in line]
    assert [(names[line.partition(":")[0]], line) for line in unknown] == []
    assert found.returncode == 0, found.stdout + found.stderr


@pytest.mark.parametrize("asked", PARAMETERS)
def test_each_fault_that_a_command_is_asked_of_has_one_place(asked):
    assert_one_place([parameters.values[0] for faults in PARAMETERS[asked] for parameters in faults])


def test_each_loss_that_explain_is_asked_of_has_a_place():
    losses = [(getattr(OP[loss.op], loss.backend), old) for loss in test_explain.LOSSES for old in loss.edits]
    assert [(target, old) for target, old in losses if not places(target, old)] == []


def assert_one_place(faults):
    found = {(fault.ops[0], fault.old): len(places(getattr(OP[fault.ops[0]], fault.backend), fault.old, fault.within))
             for fault in faults}  # fmt: skip
    assert {old: count for old, count in found.items() if count != 1} == {}
