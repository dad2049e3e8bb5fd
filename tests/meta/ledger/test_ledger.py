"""The ledger in use: recording, what a record is worth later, regressions, other machines, killed workers."""

import json
import re
import shlex
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest

from parity.judging.judge import judge
from parity.ledger.book import Book
from parity.ledger.diff import diff, load
from parity.ledger.write import Recorder, merge
from parity.trial import Trial
from tests.matrix.gmm import GMM, representative
from tests.support import projects
from tests.support.projects import COMPARED, TESTS

ROOT = Path(__file__).parents[3]
RECORD = ("-q", "--parity-record")


def test_what_is_recorded_is_valid_afterwards(recorded):
    again = recorded("-q")
    assert again.returncode == 0
    assert "NO-RECORD" not in again.stdout


def content(text):
    """A ledger's records, without when and how fast they were made."""
    lines = [json.loads(line) for line in text.splitlines()]
    return [{k: v for k, v in line.items() if k not in ("seconds", "provenance", "id")} for line in lines]


@pytest.mark.full  # that of a killed worker holds it too
def test_xdist_records_the_same(project, tmp_path, ledger):
    run = project()
    run(*RECORD, "-n", "2")
    text = (tmp_path / run.ledger).read_text()
    assert content(text) == content(ledger)
    assert sum("id" in json.loads(line) for line in text.splitlines()) == 1  # one run, one provenance


def fixes(run, done, line):
    """Run the command that a line of the summary names; how many records it wrote."""
    named = re.search(rf"^  {line}: pytest (.+)$", done.stdout, re.MULTILINE)
    assert named, done.stdout
    wrote = run("-q", *shlex.split(named[1]))
    return int(re.search(r"records: (\d+) written", wrote.stdout)[1])


def forget(path, *cases):
    """Take the records of some cases out of a ledger."""
    lines = path.read_text().splitlines(keepends=True)
    path.write_text("".join(line for line in lines if not any(f'"{case}"' in line for case in cases)))


@pytest.mark.full
def test_no_record_is_counted_with_the_command_that_makes_one(project, tmp_path):
    (tmp_path / "records").mkdir()
    run = project()
    options = ("--parity-tier=full", "--parity-seed=3")
    done = run("-q", *options)
    assert "records: 5 NO-RECORD\n" in done.stdout, done.stdout
    assert all(option in done.stdout for option in options), done.stdout
    assert fixes(run, done, "NO-RECORD  5 of double on tpu") == 5


@pytest.mark.full
def test_the_command_records_no_case_but_those_that_need_it(recorded, tmp_path):
    forget(tmp_path / recorded.ledger, "double-M3_N5-f32-s0", "double-M3_N5-bf16-s0")
    done = recorded("-q")
    assert "records: 2 NO-RECORD  2 VALID\n" in done.stdout, done.stdout
    assert fixes(recorded, done, "NO-RECORD  2 of double on tpu") == 2
    assert "records:" not in recorded("-q").stdout


@pytest.mark.full
def test_a_worse_kernel_is_a_regression_and_names_what_moved(recorded):
    recorded.replace("kernels.py", "x + x", "x + x * (1 + 2**-23)")
    worse = recorded("-q")
    assert worse.returncode == 1
    assert "REGRESSION" in worse.stdout
    assert "moved since: kernel" in worse.stdout, worse.stdout
    for command in ("explain", "shrink"):
        done = recorded.parity(command, "double-M8_N40-f32-s0")
        assert done.returncode == 1 and "REGRESSION  G5: out: ε is " in done.stdout, done.stdout + done.stderr
    recorded(*RECORD)  # accepted
    assert recorded("-q").returncode == 0


def test_a_changed_kernel_of_the_same_figures_is_valid(recorded):
    recorded.replace("kernels.py", "x + x", "2 * x")
    done = recorded("-q", "--parity-strict-records")
    assert done.returncode == 0 and "records:" not in done.stdout, done.stdout


@pytest.mark.full
def test_other_figures_are_stale_and_fail_only_if_strict(project):
    run = project()
    run.replace("kernels.py", "x + x", "x + x * (1 + 2**-23)")
    run(*RECORD)
    run.replace("kernels.py", "x + x * (1 + 2**-23)", "x + x")
    stale = run("-q")
    assert stale.returncode == 0
    assert "STALE  2 of double on tpu: pytest --parity-record -m tpu -k" in stale.stdout, stale.stdout
    strict = run("-q", "--parity-strict-records")
    assert strict.returncode == 1
    assert "STALE  G0: kernel" in strict.stdout, strict.stdout


def test_records_of_other_inputs_are_invalid_and_not_compared(recorded, tmp_path):
    path = tmp_path / recorded.ledger
    path.write_text(re.sub(r'"x":"[0-9a-f]{64}"', f'"x":"{"0" * 64}"', path.read_text()))
    done = recorded("-q")
    command = "pytest --parity-record -m tpu -k '[double-'"
    assert f"records: 4 INVALID\n  INVALID  4 of double on tpu: {command}\n" in done.stdout, done.stdout
    assert done.returncode == 0


@pytest.mark.parametrize("spoil", ["a conflict", "a link", "no room"])
def test_a_ledger_that_cannot_be_written_is_said_before_the_run(spoil, recorded, tmp_path):
    if spoil == "a conflict":
        (tmp_path / recorded.ledger).write_text("<<<<<<< HEAD\n" + (tmp_path / recorded.ledger).read_text())
    elif spoil == "a link":
        (tmp_path / "records" / "tpu").rename(tmp_path / "elsewhere")
        (tmp_path / "records" / "tpu").symlink_to(tmp_path / "elsewhere")
    else:
        (tmp_path / "records" / ".parts").write_text("in the place of a folder")
    done = recorded(*RECORD)
    assert done.returncode == 4
    assert "--parity-record cannot write" in done.stderr and "Traceback" not in done.stdout + done.stderr
    assert "passed" not in done.stdout


FULL = """
import errno, os
from pathlib import Path

def replace(self, target, replaced=Path.replace):
    if str(target).endswith("double.jsonl"):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    return replaced(self, target)

Path.replace = replace
"""


def test_a_merge_that_fails_in_the_end_is_one_line_and_keeps_what_was_recorded(project, tmp_path):
    run = project()
    run.write("conftest.py", FULL)
    done = run(*RECORD)
    assert done.returncode == 1
    assert "records: not written: OSError: [Errno 28] No space left on device; what was recorded is in" in done.stdout
    assert "4 AGREES" in done.stdout and "Traceback" not in done.stdout + done.stderr
    (tmp_path / "conftest.py").unlink()
    assert "4 records written" in run.parity("merge", "records").stdout


def test_a_broken_ledger_is_one_clear_error(recorded, tmp_path):
    path = tmp_path / recorded.ledger
    path.write_text(path.read_text()[:-40])
    done = recorded("-q", "-x")
    assert done.returncode != 0
    assert re.search(r"double\.jsonl:\d+: ", done.stdout), done.stdout


DOT = "lax.dot_general(a, b, axes, precision=precision, preferred_element_type=jnp.float32)"


@pytest.mark.tpu
@pytest.mark.parametrize(
    ("old", "new", "outcome"),
    [
        pytest.param(DOT, f"{DOT}.astype(jnp.bfloat16)", "OUT OF BOUND", marks=pytest.mark.full),
        pytest.param("lax.Precision.HIGHEST if", "lax.Precision.HIGH if", "OUT OF BOUND", marks=pytest.mark.full),
        (DOT, f"lax.reduce_precision({DOT}, 8, 22)", "OFF CONTRACT"),
    ],
    ids=["bfloat16 sums", "half the passes", "sums of 23 bits"],
)
def test_a_precision_regression_of_a_kernel_fails_and_is_named(old, new, outcome, tmp_path, monkeypatch):
    products = (ROOT / "tpu_kernels/_lib/products.py").read_text()
    assert products.count(old) == 1
    module = f"planted_{tmp_path.name}"  # of every test its own
    (tmp_path / f"{module}_products.py").write_text(products.replace(old, new))
    kernel = (ROOT / "tpu_kernels/gmm.py").read_text()
    (tmp_path / f"{module}.py").write_text(kernel.replace("tpu_kernels._lib.products", f"{module}_products"))
    monkeypatch.syspath_prepend(tmp_path)
    case = next(c for c in GMM.cases if representative(c) and c.dtype == "float32")

    def record(op, judged, folder):
        with Recorder(folder) as recorder:
            recorder.write(Book(folder).record(Trial(op, judged.case, judged.backend), judged))
        merge(folder)

    record(GMM, judge(Trial(GMM, case, "tpu")), tmp_path / "before")
    planted = replace(GMM, tpu=f"{module}:gmm")
    judged = judge(Trial(planted, case, "tpu"))
    held, _ = Book(tmp_path / "before").check(Trial(planted, case, "tpu"), judged, strict=False)
    assert held.verdict.outcome == outcome
    record(planted, judged, tmp_path / "after")
    (of_op,) = diff(load(str(tmp_path / "before"), tmp_path), load(str(tmp_path / "after"), tmp_path))
    assert (of_op.counts, of_op.cause) == ({"worse": 1}, "kernel")


KILLER = """
import os, signal
import pytest

@pytest.fixture(autouse=True)
def die(request):
    yield
    if "M3_N5-bf16-s0" in request.node.name and os.environ.get("PYTEST_XDIST_WORKER"):
        os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.full
def test_a_killed_worker_loses_nothing_that_was_recorded_before(project, tmp_path, ledger):
    run = project()
    (tmp_path / "conftest.py").write_text(KILLER)
    done = run("-q", "-n", "2", "--parity-record", "-k", "test_agrees")
    assert done.returncode == 1
    assert "CRASH  G1: killed by SIG" in done.stdout
    assert re.search(
        r"records: nothing of \S+M3_N5-bf16-s0\], whose worker died: pytest -n0 --parity-record", done.stdout
    )
    assert content((tmp_path / run.ledger).read_text()) == content(ledger)


@pytest.fixture
def hosts(project):
    """Two hosts that share a ledger: one with a TPU (pretended), one with a GPU (pretended), as functions."""
    run = project()
    run.write("test_double.py", TESTS.replace('"tpu"', '"gpu"'))
    run.write("test_compared.py", COMPARED)

    def host(of, *arguments):
        run.write("conftest.py", of)
        return run("-q", "--parity-seeds=2", *arguments)

    return partial(host, projects.tpu_host()), partial(host, projects.gpu_host())


def test_a_tpu_is_judged_against_the_records_of_a_gpu(hosts, tmp_path):
    tpu_host, gpu_host = hosts
    done = tpu_host("test_compared.py", "-rs")
    assert "4 skipped" in done.stdout, done.stdout
    assert "NO-RECORD: no gpu has recorded double-M8_N40-f32-s0; on a GPU runner: pytest --parity-record" in done.stdout
    assert re.search(r"double +tpu .* 4 NO-RECORD", done.stdout), done.stdout

    # The command that it names records every seed that a TPU is compared on.
    assert fixes(gpu_host, done, "NO-RECORD  4 of double on gpu, on a GPU runner") == 8
    (path,) = (tmp_path / "records").glob("*/*/*.jsonl")
    assert path == tmp_path / "records/gpu/NVIDIA_Pretended/double.jsonl"

    # To read what a GPU has recorded takes neither a GPU nor its framework.
    (tmp_path / "test_compared.py").write_text(f"import sys\nsys.modules['torch'] = None\n{COMPARED}")
    done = tpu_host("test_compared.py")
    assert "4 passed" in done.stdout, done.stdout
    assert re.search(r"double +tpu +4 .* 4 TIE", done.stdout), done.stdout

    lines = path.read_text().splitlines(keepends=True)
    path.write_text("".join(x for x in lines if not ('"double-M8_N40-f32-s0"' in x and '"seed":1' in x)))
    done = tpu_host("test_compared.py", "-rs")
    assert "3 passed, 1 skipped" in done.stdout, done.stdout
    assert "no gpu has recorded double-M8_N40-f32-s1; on a GPU runner: " in done.stdout
    assert "-m gpu -k '[double-M8_N40-f32-s0]'" in done.stdout
