"""Several projects in one run of pytest, and the commands that are printed of them."""

import os
import re
import subprocess
import sys

import pytest

from tests.support.commands import git, run_module, run_pytest
from tests.support.projects import Project


@pytest.fixture
def monorepo(tmp_path):
    """Two projects beside each other: their modules and their ops have the same names, b's kernel is wrong."""
    for name, kernel in (("a", "good"), ("b", "bad")):
        (tmp_path / name).mkdir()
        Project(tmp_path / name, kernel)
    return tmp_path


@pytest.mark.parametrize("workers", ["-n0", pytest.param("-n2", marks=pytest.mark.full)])
def test_each_project_has_its_own_kernels_summary_records_and_report(monorepo, workers):
    given = ("-q", workers, "--parity-record", "--parity-report=report.html", "-k", "agrees and M8_N40 and f32")
    done = run_pytest(monorepo, *given)
    assert "1 failed, 1 passed" in done.stdout, done.stdout + done.stderr
    for project, outcome in (("a", "AGREES"), ("b", "LOGIC FAULT")):
        assert re.search(rf"double \({project}\) +tpu emulated +1 .* 1 {outcome}", done.stdout), done.stdout
        assert f"records: 1 written to {monorepo / project / 'records'}" in done.stdout, done.stdout
        (ledger,) = (monorepo / project / "records").glob("*/*/*.jsonl")
        assert f'"verdict":"{outcome}"' in ledger.read_text()
        assert f"double ({project})" in (monorepo / "report.html").read_text()
    rerun = re.search(r"rerun: pytest -n0 '(b/test_double.py::.+)'", done.stdout)
    assert rerun, done.stdout
    assert "1 failed" in run_pytest(monorepo, "-q", "-n0", rerun[1]).stdout


@pytest.mark.full
def test_each_project_has_its_own_history_in_the_report(monorepo):
    given = ("-q", "-n0", "-k", "agrees and M8_N40 and f32")
    run_pytest(monorepo, *given, "--parity-record")
    git(monorepo, "init", "-q")
    for name in "ab":
        git(monorepo, "add", f"{name}/records")
        git(monorepo, "commit", "-q", "-m", f"ledger of {name}")
    run_pytest(monorepo, *given, "--parity-report=report.html")
    page = (monorepo / "report.html").read_text()
    histories = page[page.index('<section id="history">') : page.index('<section id="schedules">')]
    of = dict(zip("ab", re.split("<h3>[ab]</h3>", histories)[1:], strict=True))
    assert all(set(re.findall("ledger of .", of[name])) == {f"ledger of {name}"} for name in "ab"), histories
    assert all("double-M8_N40-f32-s0" in of[name] for name in "ab"), histories


def test_a_rerun_command_is_for_the_folder_that_pytest_was_started_in(monorepo):
    (monorepo / "pyproject.toml").write_text("[tool.pytest.ini_options]\n")
    (monorepo / "b" / "pyproject.toml").write_text('[tool.parity]\nmatrix = "matrix"\n')
    done = run_pytest(monorepo / "b", "-q", "-k", "agrees and M8_N40 and f32", "-c", "../pyproject.toml")
    assert "rerun: pytest -n0 'test_double.py::test_agrees[double-M8_N40-f32-s0]'" in done.stdout, done.stdout


def test_a_folder_of_records_is_of_one_project(monorepo):
    done = run_pytest(monorepo, "-q", "--parity-record", "--parity-records=both")
    assert "--parity-records takes one project at a time with --parity-record, got" in done.stderr


def test_a_mistyped_id_names_the_nearest(monorepo):
    done = run_pytest(monorepo, "a/test_double.py::test_agrees[double-M8_N40-f23-s0]")
    assert done.returncode == 4
    assert "double-M8_N40-f23-s0 (nearest: double-M8_N40-f32-s0)" in done.stderr


@pytest.mark.full
def test_the_command_finds_the_project_from_a_folder_below(monorepo):
    (monorepo / "a" / "deep").mkdir()
    assert "double" in run_module("parity", monorepo / "a" / "deep", "list").stdout
    wrong = run_module("parity", monorepo / "a" / "deep", "explain", "double-M8_N40-f23-s0")
    assert "(nearest: double-M8_N40-f32-s0)" in wrong.stderr


def test_a_run_without_the_plugin_says_so(monorepo):
    done = run_pytest(monorepo / "a", "-q", "-p", "no:parity")
    assert "parity.cases needs pytest's plugin parity, which this run lacks: leave out -p no:parity" in done.stdout


def test_frameworks_are_prepared_before_a_conftest_loads_them(monorepo):
    conftest = 'import os\n\nassert os.environ["TRITON_INTERPRET"] == "1" and "JAX_PLATFORMS" in os.environ\n'
    (monorepo / "a" / "conftest.py").write_text(conftest)
    kept = {name: os.environ[name] for name in ("PATH", "HOME") if name in os.environ} | {"CUDA_VISIBLE_DEVICES": ""}
    collect = [sys.executable, "-m", "pytest", "-q", "--collect-only"]
    for folder, below in ((monorepo, ["a"]), (monorepo / "a", [])):
        done = subprocess.run([*collect, *below], cwd=folder, env=kept, capture_output=True, text=True)
        assert done.returncode == 0, done.stdout + done.stderr
