"""Several projects in one run of pytest, and the commands that are printed of them."""

import os
import re
import subprocess
import sys

import pytest

from tests.support.commands import run_module, run_pytest
from tests.support.projects import Project


@pytest.fixture
def monorepo(tmp_path):
    """Two projects beside each other: their modules have the same names, their ops do not, b's kernel is wrong."""
    for name, kernel in (("a", "good"), ("b", "bad")):
        (tmp_path / name).mkdir()
        project = Project(tmp_path / name, kernel)
        for file in ("matrix.py", "test_double.py"):
            text = (tmp_path / name / file).read_text()
            project.write(file, text.replace("double", f"{name}_double").replace("DOUBLE", f"{name.upper()}_DOUBLE"))
    return tmp_path


def test_each_test_file_uses_its_own_projects_matrix_and_kernels(monorepo):
    done = run_pytest(monorepo, "-q", "-k", "agrees and M8_N40 and f32")
    assert "1 failed, 1 passed" in done.stdout, done.stdout + done.stderr
    assert re.search(r"a_double +tpu emulated +1 .* 1 AGREES", done.stdout), done.stdout
    assert re.search(r"b_double +tpu emulated +1 .* 1 LOGIC FAULT", done.stdout), done.stdout
    rerun = re.search(r"rerun: pytest -n0 '(b/test_double.py::.+)'", done.stdout)
    assert rerun, done.stdout
    assert "1 failed" in run_pytest(monorepo, "-q", "-n0", rerun[1]).stdout


def test_a_rerun_command_is_for_the_folder_that_pytest_was_started_in(monorepo):
    (monorepo / "pyproject.toml").write_text("[tool.pytest.ini_options]\n")
    (monorepo / "b" / "pyproject.toml").write_text('[tool.parity]\nmatrix = "matrix"\n')
    done = run_pytest(monorepo / "b", "-q", "-k", "agrees and M8_N40 and f32", "-c", "../pyproject.toml")
    assert "rerun: pytest -n0 'test_double.py::test_agrees[b_double-M8_N40-f32-s0]'" in done.stdout, done.stdout


def test_records_are_made_of_one_project_at_a_time(monorepo):
    done = run_pytest(monorepo, "-q", "--parity-record")
    assert "--parity-record takes one project at a time, got" in done.stderr


def test_a_mistyped_id_names_the_nearest(monorepo):
    done = run_pytest(monorepo, "a/test_double.py::test_agrees[a_double-M8_N40-f23-s0]")
    assert done.returncode == 4
    assert "a_double-M8_N40-f23-s0 (nearest: a_double-M8_N40-f32-s0)" in done.stderr


def test_the_command_finds_the_project_from_a_folder_below(monorepo):
    (monorepo / "a" / "deep").mkdir()
    assert "a_double" in run_module("parity", monorepo / "a" / "deep", "list").stdout
    wrong = run_module("parity", monorepo / "a" / "deep", "explain", "a_double-M8_N40-f23-s0")
    assert "(nearest: a_double-M8_N40-f32-s0)" in wrong.stderr


def test_a_run_without_the_plugin_says_so(monorepo):
    done = run_pytest(monorepo / "a", "-q", "-p", "no:parity")
    assert "parity.cases needs pytest's plugin parity, which this run lacks: leave out -p no:parity" in done.stdout


def test_frameworks_are_prepared_before_a_conftest_loads_them(monorepo):
    conftest = 'import os\n\nassert os.environ["TRITON_INTERPRET"] == "1" and "JAX_PLATFORMS" in os.environ\n'
    (monorepo / "a" / "conftest.py").write_text(conftest)
    kept = {name: os.environ[name] for name in ("PATH", "HOME") if name in os.environ}
    collect = [sys.executable, "-m", "pytest", "-q", "--collect-only"]
    for folder, below in ((monorepo, ["a"]), (monorepo / "a", [])):
        done = subprocess.run([*collect, *below], cwd=folder, env=kept, capture_output=True, text=True)
        assert done.returncode == 0, done.stdout + done.stderr
