"""The `parity` command, on somebody else's project and on this one's ledger."""

import contextlib
import io
import json
import re
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from parity import cli
from parity.backends import EMULATED
from parity.cli import run
from parity.judging.verdict import Verdict
from parity.ledger.read import read
from parity.ledger.schema import ledger_path
from tests.matrix.gmm import GMM
from tests.support.records import keep

ROOT = Path(__file__).parents[3]
CASE = "gmm-M300_K200_N160_G6-f32-tiling64x128x128-zipf-s0"


@pytest.fixture
def printed(capsys):
    """What the command prints here, with exit code 0."""

    def run(*arguments):
        assert cli.main(["--root", str(ROOT), *arguments]) == 0
        return capsys.readouterr().out

    return run


@pytest.fixture
def refused(capsys):
    """What the command says of wrong usage."""

    def run(*arguments):
        with pytest.raises(SystemExit) as ended:
            cli.main(arguments)
        assert ended.value.code == 2
        return " ".join(capsys.readouterr().err.split())

    return run


def test_a_reader_that_has_seen_enough_is_no_fault_of_a_kernel(monkeypatch):
    class Closed(io.StringIO):
        def write(self, text):
            raise BrokenPipeError

    monkeypatch.setattr(cli.os, "dup2", lambda *descriptors: None)
    with contextlib.redirect_stdout(Closed()) as closed:
        closed.fileno = lambda: -1
        assert cli.main(["--root", str(ROOT), "runners"]) == 1
        assert cli.main(["--root", str(ROOT), "plans"]) == 1


def test_list_counts_the_matrix_and_shows_cases_with_contracts(printed):
    ops = [line.split()[0] for line in printed("list").splitlines() if line.split()]
    assert {"gmm", "tgmm"} <= {*ops}
    (case,) = printed("list", "-k", "tgmm and mixtral").splitlines()
    assert "Mixtral-8x7B  tpu: native/float32/float32  gpu: native/float32/float32" in case


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["run", "-k", "no_such_case"], "-k must match a case of a model's shape"),
        (["run", "--seeds", "0"], "must be a positive integer, got 0"),
        (["list", "-k", "gmm and"], "-k 'gmm and'"),
        (["--root", "/nowhere", "list"], "must be a folder"),
        (["show", "gmm-nothing-s0"], "case must be in the ledger"),
        (["diff", "--", "--hard", "HEAD"], "--hard"),
        (["contact", "--backend", "gpu", "--kind", "prob"], "--kind must be one of probe, "),
        ([], "COMMAND"),
    ],
)
def test_wrong_usage_is_one_line_and_exit_code_2(arguments, message, refused, monkeypatch):
    monkeypatch.chdir(ROOT)
    assert message in refused(*arguments)


def test_show_and_merge_say_what_a_project_without_a_ledger_lacks(refused, tmp_path):
    (tmp_path / "empty").mkdir()
    says = "case must be in the ledger, got a-M1-f32-s0 (record it: pytest --parity-record -k a-M1-f32-s0)"
    assert says in refused("--root", str(tmp_path), "show", "a-M1-f32-s0")
    assert "DIR must hold a ledger" in refused("--root", str(tmp_path), "merge", str(tmp_path / "empty"))
    assert not (tmp_path / "records").exists()


def test_run_says_how_a_case_gets_into_its_table(refused, monkeypatch):
    """A project's first `parity run`: none of its cases has the shape of a model."""
    cases = tuple(case for case in GMM.cases if not case.model)
    monkeypatch.setattr("parity.matrix.load", lambda root: (replace(GMM, cases=cases),))
    assert "Op.grid(…, model='NAME'), and the matrix has none; pytest judges them all" in refused("run")


def test_a_list_of_no_case_fails_and_says_so(capsys):
    assert cli.main(["--root", str(ROOT), "list", "-k", "no_such_case"]) == 1
    assert capsys.readouterr().err == "no case matches -k 'no_such_case'\n"


def test_a_missing_framework_is_one_line_and_exit_code_2(refused, monkeypatch):
    monkeypatch.setitem(sys.modules, "triton", None)
    for name in [name for name in sys.modules if name.startswith(("gpu_reference", "parity.backends."))]:
        monkeypatch.delitem(sys.modules, name)
    assert "error: triton is needed and not installed here: " in refused("explain", CASE, "--backend", "gpu")


def test_show_prints_what_was_recorded_on_both_backends(printed):
    shown = printed("show", "chunk_simple_gla_fwd-B2_T40_H1_K64_V48-f32-g-h0-ht-chunk16-s0")  # compared over seeds
    for expected in ("8 AGREES", "ieee/float32/float32", "bf16x3x3/float32/float32"):
        assert expected in shown
    of_emulated = shown.partition("gpu emulated")[2]  # those of a device may be in another unit, and not comparable
    seed, *_, ratio, verdict = of_emulated.partition("× its contract  verdict\n")[2].splitlines()[0].split()
    assert (seed, verdict) == ("0", "AGREES") and 0.8 < float(ratio) < 1.2


@pytest.mark.full
def test_a_ledger_does_not_differ_from_itself(printed, monkeypatch):
    monkeypatch.chdir(ROOT)
    assert "worse" not in printed("diff", "records", "records", "--fail-on-regression")


def test_diff_tells_how_many_times_its_contract_an_error_was_and_is(printed, monkeypatch, tmp_path):
    monkeypatch.chdir(ROOT)
    ledger = read(ledger_path(Path("records"), "tpu", EMULATED, "gmm"))
    record = next(r for r in ledger.values() if r.case == CASE and r.seed == 0)
    m = record.outputs["out"]
    larger = replace(m, epsilon=5 * m.epsilon, tiles=tuple(tuple(5 * x for x in row) for row in m.tiles))
    for name, metrics in (("before", m), ("now", larger)):
        keep(tmp_path / name, replace(record, outputs={"out": metrics}))
    shown = printed("diff", str(tmp_path / "before"), str(tmp_path / "now"))
    before, now = map(float, re.search(r"(\S+) → (\S+) × its contract", shown).groups())
    assert 0.8 < before < 1.2 and now == pytest.approx(5 * before, rel=0.01)


@pytest.mark.full
def test_diff_names_the_kernel_that_made_it_worse(project, tmp_path):
    run = project()
    run("-q", "--parity-record", "-k", "test_agrees")
    (tmp_path / "records").rename(tmp_path / "before")
    run.replace("kernels.py", "x + x", "x + x * (1 + 2**-23)")
    run("-q", "--parity-record", "-k", "test_agrees")
    done = run.parity("diff", "before", "records", "--fail-on-regression")
    assert done.returncode == 1
    assert "who moved: kernel" in done.stdout, done.stdout
    found = json.loads(run.parity("diff", "before", "records", "--json").stdout)
    assert "worse" in json.dumps(found)


DYING = """
import os

def good(x):
    if x.dtype == "bfloat16":
        os._exit(0)
    raise RuntimeError("no such [/b]")
"""


def test_a_table_that_is_interrupted_shows_what_is_done(capsys, monkeypatch):
    def each(work, jobs, processes, timeout):
        yield 0, run.Line(jobs[0].case, 2, {"tpu": 1e-9, "gpu": 1e-9}, 0.5, Verdict("TIE", "G5", "ε 1×"), None)
        raise KeyboardInterrupt

    monkeypatch.setattr(run.lanes, "each", each)
    assert cli.main(["--root", str(ROOT), "run", "-k", "tgmm and mixtral or gmm and mixtral"]) == cli.INTERRUPTED
    printed = capsys.readouterr().out
    assert "Mixtral-8x7B" in printed and "1 passed, 0 failed, 1 not run" in printed


def test_an_error_of_a_golden_says_where(project):
    run = project()
    run.replace("matrix.py", "    return 2.0", "    raise ValueError('odd rows')\n    return 2.0")
    done = run.parity("explain", "double-M8_N40-f32-s0")
    assert done.returncode == 2
    assert f"error: odd rows ({run.folder / 'matrix.py'}:6)" in done.stderr
    run.replace("matrix.py", "ValueError('odd rows')", "KeyError('odd')")
    done = run.parity("explain", "double-M8_N40-f32-s0")
    assert done.returncode == 2
    assert f"error: the project's code raised KeyError: 'odd' ({run.folder / 'matrix.py'}:6)" in done.stderr


@pytest.mark.full
def test_the_table_has_a_line_for_each_model_whatever_crashes(project):
    run = project()
    tiny = "_DOUBLE.grid([dict(M=8, N=4)], dtype=['float32', 'bfloat16'], model='Tiny')"
    run.replace("matrix.py", "OPS =", f"DOUBLE = _DOUBLE.with_cases({tiny})\nOPS =")
    good = run.parity("run", "--seeds", "2", "-j", "1")
    assert good.returncode == 0, good.stdout + good.stderr
    assert good.stdout.count("Tiny") == 2
    assert "2 passed, 0 failed" in good.stdout
    run.write("kernels.py", DYING)
    broken = run.parity("run", "--seeds", "2", "-j", "1")
    assert broken.returncode == 1
    assert "CRASH tpu, seed 0: RuntimeError: no such [/b]" in broken.stdout, broken.stdout + broken.stderr
    assert "CRASH ended with status 0" in broken.stdout
    assert "0 passed, 2 failed" in broken.stdout
