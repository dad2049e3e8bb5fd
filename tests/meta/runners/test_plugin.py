"""The pytest plugin as its users meet it: selection, summary, failures, xdist, other people's matrices."""

import re

import pytest

from tests.support.projects import COMPARED, KERNELS


def test_a_good_day_is_quiet(project):
    run = project()("-q")
    assert run.returncode == 0, run.stdout
    assert "8 passed" in run.stdout
    summary = re.search(r"double +tpu emulated +8 +0\.00 +–  4 AGREES  4 EXACT", run.stdout)
    assert summary, run.stdout
    assert len(run.stdout.splitlines()) < 12


@pytest.mark.parametrize(
    ("arguments", "count"),
    [
        pytest.param(["-m", "smoke"], 2, marks=pytest.mark.full),
        (["--parity-tier=smoke"], 2),
        pytest.param([], 8, marks=pytest.mark.full),
        (["--parity-tier=full"], 10),
        pytest.param(["-m", "full"], 2, marks=pytest.mark.full),
    ],
)
def test_tiers(project, arguments, count):
    run = project()("-q", *arguments)
    assert f"{count} passed" in run.stdout, run.stdout


def test_the_case_id_alone_selects_the_case(project):
    run = project()("-q", "-k", "double-M3_N5-bf16-s0")
    assert "1 passed" in run.stdout, run.stdout


def test_an_exact_id_runs_whatever_its_tier(project):
    run = project()
    run.write("test_mine.py", "import pytest\n\n@pytest.mark.full\ndef test_mine():\n    pass\n")
    done = run("-q", "test_mine.py::test_mine", "test_double.py::test_agrees[double-M99_N40-f32-s0]")
    assert "2 passed" in done.stdout, done.stdout


@pytest.mark.full
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
    rerun = re.search(r"rerun: pytest -n0 '(.+)'", text)
    assert rerun, text
    again = project(kernel="bad")("-q", "-n0", rerun[1])
    assert "1 failed" in again.stdout, again.stdout


@pytest.mark.parametrize("declared", [False, True])
def test_an_op_without_a_twin_keeps_its_verdicts(project, declared):
    run = project()
    run.replace("matrix.py", "return 2.0 *", "return (2.0 + 2**-40) *")
    if declared:
        run.replace("matrix.py", "defaults={},", "defaults={}, twin=False,")
    done = run("-q")
    assert ("4 failed, 4 passed" if not declared else "4 passed, 1 skipped") in done.stdout, done.stdout
    exact = re.search(r"NO INTEGER TWIN  G2: golden must be exact on integer data, AGREES .*twin=False", done.stdout)
    assert bool(exact) is not declared


@pytest.fixture
def losing(project):
    """A project whose TPU kernel errs in float32 and whose GPU kernel does not; a failure is declared by `where`."""

    def make(where):
        run = project()
        declared = f"defaults={{}}, expected=(Expected(lambda c: {where}, 'LOSS', 'rounds twice'),),"
        run.replace("matrix.py", "import Array,", "import Array, Expected,")
        run.replace("matrix.py", "defaults={},", declared)
        run.replace("matrix.py", 'tpu="kernels:good"', 'tpu="kernels:losing"')
        run.write("kernels.py", KERNELS + "\ndef losing(x):\n    return x + x * (1 + 2**-23)\n")
        run.write("test_double.py", COMPARED)
        return run

    return make


def test_a_declared_loss_is_an_xfail_that_must_not_pass(losing):
    done = losing("c.M == 3")("-q", "-rx")
    assert "2 failed, 1 passed, 1 xfailed" in done.stdout, done.stdout
    counts = "1 EXPECTED LOSS  1 LOSS  1 TIE  1 UNEXPECTED PASS"
    assert re.search(rf"double +tpu emulated .*  {counts}", done.stdout), done.stdout
    expected = r"XFAIL .*M3_N5-f32-s0\] - (reason: )?EXPECTED LOSS: ε .* τ=0; rounds twice"
    assert re.search(expected, done.stdout), done.stdout
    assert re.search(r"UNEXPECTED PASS  G5: TIE ε 1× .* declared LOSS: rounds twice .*M3_N5-bf16-s0", done.stdout)
    assert re.search(r"^LOSS  G5: ε .* τ=0   double-M8_N40-f32-s0", done.stdout, re.MULTILINE)


def test_what_passes_passes_where_losses_are_explained(losing):
    run = losing("c.dtype == 'bfloat16'")
    run.replace("matrix.py", "'rounds twice')", "'rounds twice', explained=True)")
    done = run("-q")
    assert "2 failed, 2 passed in" in done.stdout, done.stdout


def test_a_declaration_that_matches_no_case_is_refused(losing):
    done = losing("c.M == 7")("-q")
    assert done.returncode != 0
    assert "Traceback" not in done.stdout + done.stderr
    assert "double.expected[0] must match a case, matches none: rounds twice" in done.stdout + done.stderr


def test_the_header_says_what_is_emulated(project):
    run = project()()
    assert "parity: tpu emulated · gpu emulated · goldens float64" in run.stdout


def test_another_seed_is_another_case(project):
    run = project()("--parity-seed=3", "--collect-only", "-q")
    assert "double-M3_N5-bf16-s3" in run.stdout
    assert "-s0" not in run.stdout


def test_data_that_no_op_has_are_refused_where_tests_are_collected(project):
    run = project()
    run.replace("test_double.py", 'data="integers"', 'data="intgers"')
    done = run("--collect-only", "-q")
    assert re.search(r"op double, case double-.*-intgers-s0: data must be .*\(nearest: integers\)", done.stdout)
    assert "Traceback" not in done.stdout and "plugin.py" not in done.stdout


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
def test_a_missing_matrix_is_named(project, pyproject, message):
    run = project()
    run.write("pyproject.toml", pyproject + '[tool.pytest.ini_options]\npythonpath = ["."]\n')
    done = run("-q")
    assert done.returncode != 0
    assert message in done.stdout + done.stderr
    assert "Traceback" not in done.stdout + done.stderr
