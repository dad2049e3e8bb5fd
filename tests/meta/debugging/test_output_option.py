"""`--output NAME`: explain, stages and shrink look at the output that is asked for, else at the one furthest off."""

import pytest

from parity.backends import load_kernel
from parity.cli import main
from parity.debugging.attribution.locate import locate
from parity.debugging.explain import explain
from parity.debugging.shrink import shrink
from parity.trial import Trial
from tests.matrix import OPS
from tests.meta.faults.planting import ROOT

OP = next(op for op in OPS if op.name == "fused_recurrent_simple_gla_fwd")
CASE = next(c for c in OP.cases if c.tier == "smoke" and c.ht and c.dtype == "float32")


def both_wrong(**given):
    """The op's kernel with o three times and ht twice what they are."""
    found = load_kernel(OP.tpu)(**given)
    return found._replace(o=3 * found.o, ht=2 * found.ht)


def trial():
    pytest.importorskip("jax")
    return Trial(OP, CASE, "tpu", both_wrong)


@pytest.mark.tpu
@pytest.mark.parametrize(("asked", "output", "factor"), [("", "o", 3), ("ht", "ht", 2)])
def test_explain_looks_at_the_output_that_is_asked_for(asked, output, factor):
    found = explain(trial(), output=asked)
    assert found.judged.output == output and found.alike == f"it is {factor} times the golden"


@pytest.mark.tpu
@pytest.mark.full
@pytest.mark.parametrize("output", ["o", "ht"])
def test_stages_rank_the_lines_of_the_output_that_is_asked_for(output):
    right = locate(Trial(OP, CASE, "tpu"), output, frozenset())
    assert right.output == output and right.ranking.error > 0
    assert right.ranking.none.outputs.keys() >= {"o", "ht"}


@pytest.mark.full
@pytest.mark.tpu
@pytest.mark.parametrize("output", ["o", "ht"])
def test_shrink_keeps_the_verdict_of_the_output_that_is_asked_for(output):
    found = shrink(trial(), output=output)
    assert found.judged.output == output and not found.judged.verdict.passed


@pytest.mark.tpu
@pytest.mark.parametrize("command", ["explain", "stages", "shrink"])
def test_an_output_that_the_op_does_not_have_is_refused_by_name(command, capsys):
    with pytest.raises(SystemExit):
        main(["--root", str(ROOT), command, CASE.id, "--output", "out"])
    assert "output must be one of o, ht, got 'out'" in capsys.readouterr().err


@pytest.mark.tpu
@pytest.mark.parametrize("command", ["explain", pytest.param("stages", marks=pytest.mark.full)])
def test_the_commands_say_which_output_they_look_at(command, capsys):
    assert main(["--root", str(ROOT), command, CASE.id, "--output", "ht"]) == 0
    out = capsys.readouterr().out
    assert "[ht]" in out if command == "explain" else "most of the error of ht is made by" in out
