"""A wrong output that is the golden's of another argument is told by that argument."""

from dataclasses import replace

import numpy as np
import pytest

from parity.debugging.instead import other_call
from parity.op import outputs
from parity.trial import Trial
from tests.matrix import OPS

OP = {op.name: op for op in OPS}


CASES = {
    "gmm_quantized": lambda c: c.scales == "steps" and c.transpose_rhs and c.rhs_blocks == "1x128x128" and c.K == c.N,
    "grouped_dense": lambda c: c.block_size == 64,
    "gmm": lambda c: bool(c.shard) and not c.model,
    "chunk_simple_gla_fwd": lambda c: c.B > 1 and c.h0 and c.tier == "smoke",
}
TAKEN = [
    ("gmm_quantized", "rhs_scale with its last two axes swapped", lambda c: {"rhs_scale": c["rhs_scale"].mT}),
    ("grouped_dense", "block_size None in the place of 64", lambda c: {"block_size": None}),
    ("gmm", "group_offset 2 in the place of 3", lambda c: {"group_offset": 2}),
    (
        "chunk_simple_gla_fwd",
        "initial_state with the first along axis 0 for all",
        lambda c: {"initial_state": np.broadcast_to(c["initial_state"][:1], c["initial_state"].shape)},
    ),
]


def called(name, changed=lambda call: {}):
    """A trial, the first output of its golden with some arguments changed, and the output's name."""
    op = OP[name]
    case = next(case for case in op.cases if case.tier != "full" and CASES[name](case))
    trial = Trial(op, case, "gpu")
    call = {**trial.inputs, **op.arguments(case)}
    found = outputs(op.golden(**{**call, **changed(call)}))
    output = next(iter(found))
    return trial, output, found[output].astype(np.float32)


@pytest.mark.parametrize(("name", "words", "changed"), TAKEN, ids=[name for name, *_ in TAKEN])
def test_the_argument_that_was_taken_for_another_is_named(name, words, changed):
    trial, output, y = called(name, changed)
    assert str(other_call(trial, output, y)) == f"it is the golden of {words}"


def test_an_output_that_is_an_argument_is_named_by_it():
    op = OP["grouped_dense_bwd"]
    case = next(case for case in op.cases if case.tier != "full" and case.existing_out and not case.shard)
    trial = Trial(op, case, "gpu")
    assert str(other_call(trial, "existing_out", trial.inputs["dout"])) == "it is dout, as that is given"


def test_nothing_is_said_of_a_right_output_or_of_any_other():
    trial, output, y = called("gmm")
    assert other_call(trial, output, y) is None
    assert other_call(trial, output, y + np.float32(1)) is None
    assert other_call(trial, output, np.full_like(y, np.nan)) is None


def test_a_golden_may_refuse_an_argument_in_any_way():
    """One that a user writes calls methods of what is not there."""
    trial, output, y = called("gmm")

    def golden(lhs, **given):
        lhs.shape  # noqa: B018
        return trial.op.golden(lhs, **given)

    written = replace(trial, op=replace(trial.op, golden=golden))
    assert other_call(written, output, y + np.float32(1)) is None
