"""The pytest plugin as its users meet it: selection, summary, failures, xdist, other people's matrices."""

import re

import pytest


def test_a_good_day_is_quiet(project):
    run = project()("-q")
    assert run.returncode == 0, run.stdout
    assert "8 passed, 2 deselected" in run.stdout
    summary = re.search(r"double +tpu emulated +8 +0\.00 +–  4 AGREES  4 EXACT", run.stdout)
    assert summary, run.stdout
    assert len(run.stdout.splitlines()) < 12


@pytest.mark.parametrize(
    ("arguments", "count"),
    [(["-m", "smoke"], 2), (["--parity-tier=smoke"], 2), ([], 8), (["--parity-tier=full"], 10), (["-m", "full"], 2)],
)
def test_tiers(project, arguments, count):
    run = project()("-q", *arguments)
    assert f"{count} passed" in run.stdout, run.stdout


def test_the_case_id_alone_selects_the_case(project):
    run = project()("-q", "-k", "double-M3_N5-bf16-s0")
    assert "1 passed" in run.stdout, run.stdout


def test_xdist_gives_the_same_result(project):
    run = project(kernel="bad")
    alone, together = run("-q"), run("-q", "-n", "2")

    def outcome(done):
        table = done.stdout[done.stdout.index("op    ") :].split("====")[0]
        failed = sorted(line.split(" - ")[0] for line in done.stdout.splitlines() if line.startswith("FAILED"))
        return table.strip().splitlines()[:2], failed, done.returncode

    assert outcome(alone) == outcome(together)
    assert outcome(alone)[2] == 1


def test_a_failure_fits_on_a_screen_and_can_be_acted_on(project):
    run = project(kernel="bad")("-q", "-k", "test_agrees and M8_N40 and f32 and not integers")
    assert run.returncode == 1
    text = run.stdout[run.stdout.index("____") : run.stdout.index("short test summary")]
    assert len(text.splitlines()) <= 27, text  # a title above, a rule below
    assert "LOGIC FAULT  G3" in text
    assert re.search(r"worst out\[\d, 7\]: golden \S+  got 0  bound ±\S+", text), text
    assert "3 elements beyond the bound, all within [5-7, 7-7]" in text
    assert "integer twin: fails too" in text
    rerun = re.search(r'rerun: pytest -n0 "(.+)"', text)
    assert rerun, text
    again = project(kernel="bad")("-q", "-n0", rerun[1])
    assert "1 failed" in again.stdout, again.stdout


def test_the_header_says_what_is_emulated(project):
    run = project()()
    assert "parity: tpu emulated · gpu emulated · goldens float64" in run.stdout


def test_another_seed_is_another_case(project):
    run = project()("--parity-seed=3", "--collect-only", "-q")
    assert "double-M3_N5-bf16-s3" in run.stdout
    assert "-s0" not in run.stdout


def test_help_and_markers_are_documented(project):
    run = project()("--help")
    assert "--parity-tier" in run.stdout
    assert "smoke:" in project()("--markers").stdout


@pytest.mark.parametrize(
    ("pyproject", "message"),
    [
        ("", "must name a module of ops"),
        ('[tool.parity]\nmatrix = "kernels"\n', "must define OPS, a tuple of parity.Op, got none"),
    ],
)
def test_a_missing_matrix_is_named(project, tmp_path, pyproject, message):
    run = project()
    (tmp_path / "pyproject.toml").write_text(pyproject + '[tool.pytest.ini_options]\npythonpath = ["."]\n')
    done = run("-q")
    assert done.returncode != 0
    assert message in done.stdout + done.stderr
    assert "Traceback" not in done.stdout + done.stderr
