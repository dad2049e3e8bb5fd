"""The `parity` command, on somebody else's project and on this one's ledger."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]


def parity(*arguments, folder=ROOT):
    command = [sys.executable, "-m", "parity", *arguments]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=300)


def test_list_counts_the_matrix_and_shows_cases_with_their_contracts():
    done = parity("list")
    assert done.returncode == 0
    assert "gmm " in done.stdout
    assert "tgmm " in done.stdout
    cases = parity("list", "-k", "tgmm and mixtral and not f32").stdout.splitlines()
    assert len(cases) == 1
    assert "Mixtral-8x7B  tpu: native/float32/bfloat16  gpu: native/float32/bfloat16" in cases[0]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["run", "-k", "no_such_case"], "-k must match a case of a model's shape"),
        (["run", "--seeds", "0"], "must be a positive integer, got 0"),
        (["list", "-k", "gmm and"], "-k 'gmm and'"),
        (["--root", "/nowhere", "list"], "must be a folder"),
        (["show", "gmm-nothing-s0"], "case must be in the ledger"),
        (["diff", "--", "--hard", "HEAD"], "--hard"),
        ([], "COMMAND"),
    ],
)
def test_wrong_usage_is_one_line_and_exit_code_2(arguments, message):
    done = parity(*arguments)
    assert done.returncode == 2
    assert message in done.stderr
    assert "Traceback" not in done.stderr


def test_a_framework_that_is_not_installed_is_one_line_and_exit_code_2():
    without = "import sys; sys.modules['triton'] = None; from parity import cli; cli.main(sys.argv[1:])"
    case = "gmm-M300_K200_N160_G6-f32-tiling64x128x128-zipf-s0"
    command = [sys.executable, "-c", without, "explain", case, "--backend", "gpu"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 2
    assert "error: triton is needed and not installed here: " in done.stderr
    assert "Traceback" not in done.stderr


def test_show_prints_what_was_recorded_on_both_backends():
    done = parity("show", "gmm-M300_K200_N160_G6-f32-tiling64x128x128-zipf-s0")
    assert done.returncode == 0, done.stderr
    assert "8 AGREES" in done.stdout
    assert "ieee/float32/float32" in done.stdout
    assert "bf16x6/float32/float32" in done.stdout


def test_a_ledger_does_not_differ_from_itself():
    done = parity("diff", "records", "records", "--fail-on-regression")
    assert done.returncode == 0, done.stderr
    assert "worse" not in done.stdout


def test_diff_names_the_kernel_that_made_it_worse(project, tmp_path):
    run = project()
    run("-q", "--parity-record", "-k", "test_agrees")
    (tmp_path / "records").rename(tmp_path / "before")
    kernels = tmp_path / "kernels.py"
    kernels.write_text(kernels.read_text().replace("return x + x", "return x + x * (1 + 2**-23)", 1))
    run("-q", "--parity-record", "-k", "test_agrees")
    done = parity("diff", "before", "records", "--fail-on-regression", folder=tmp_path)
    assert done.returncode == 1
    assert "who moved: kernel" in done.stdout, done.stdout
    found = json.loads(parity("diff", "before", "records", "--json", folder=tmp_path).stdout)
    assert "worse" in json.dumps(found)


def test_the_table_has_a_line_for_each_model_and_a_crash_costs_its_line_alone(project, tmp_path):
    project()
    matrix = tmp_path / "matrix.py"
    matrix.write_text(
        matrix.read_text().replace(
            "OPS =",
            "TINY = _DOUBLE.grid([dict(M=8, N=4)], dtype=['float32', 'bfloat16'], model='Tiny')\n"
            "DOUBLE = _DOUBLE.with_cases(TINY)\nOPS =",
        )
    )
    good = parity("run", "--seeds", "2", "-j", "1", folder=tmp_path)
    assert good.returncode == 0, good.stdout + good.stderr
    assert good.stdout.count("Tiny") == 2
    assert "2 passed, 0 failed" in good.stdout
    kernels = tmp_path / "kernels.py"
    kernels.write_text("def good(x):\n    raise RuntimeError('no such instruction')\n")
    broken = parity("run", "--seeds", "2", "-j", "1", folder=tmp_path)
    assert broken.returncode == 1
    assert "CRASH RuntimeError: no such instruction" in broken.stdout
    assert "0 passed, 2 failed" in broken.stdout
