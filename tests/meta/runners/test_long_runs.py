"""Long runs: dealt out to machines and joined again, killed and resumed, watched, ended at the first bad verdict."""

import json
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from parity.runners.long_runs import deal
from tests.support.commands import git, run_module
from tests.support.records import contents

SECONDS = st.floats(0.001, 100)
WITH_AND_WITHOUT_WORKERS = pytest.mark.parametrize(
    "workers", [(), pytest.param(("-n", "1"), marks=pytest.mark.full)], ids=["here", "in a worker"]
)


@pytest.mark.full
@given(st.dictionaries(st.text(min_size=1), SECONDS, min_size=1), st.integers(1, 6))
def test_shards_are_balanced_within_a_third(weights, count):
    dealt = deal(weights, count)
    assert dealt.keys() == weights.keys()
    loads = [sum(weights[unit] for unit in weights if dealt[unit] == part) for part in range(count)]
    best = max(max(weights.values()), sum(weights.values()) / count)
    assert max(loads) <= 4 / 3 * best * (1 + 1e-9) or len(weights) > count  # Graham's bound is on the true optimum
    assert max(loads) - min(loads) <= max(weights.values()) * (1 + 1e-9)


@pytest.mark.full
def test_shards_together_are_the_whole(project, tmp_path):
    run = project()
    whole = run("-q", "--parity-record")
    assert "8 passed" in whole.stdout, whole.stdout
    undisturbed = contents(tmp_path / "records")
    selected = []
    for shard in ("1/2", "2/2"):
        folder = f"shard{shard[0]}"
        done = run("-v", f"--parity-shard={shard}", "--parity-record", f"--parity-records={folder}")
        passed = re.findall(r"^(\S+::\S+) PASSED", done.stdout, re.MULTILINE)
        assert f"{len(passed)} passed" in done.stdout and len(passed) in (3, 4, 5), done.stdout
        assert re.search(rf"parity shard {shard} of dealing [0-9a-f]{{12}}: {len(passed)} of 8 tests", done.stdout)
        selected += passed
    assert len(selected) == len(set(selected)) == 8
    merged = run.parity("merge", "shard1", "shard2", "--records", "joined")
    assert merged.stdout == "4 records written to joined; of each case and seed the newest stays\n", merged.stderr
    assert contents(tmp_path / "joined") == undisturbed


@pytest.mark.full
def test_shards_are_balanced_by_what_is_recorded(recorded, tmp_path):
    run, slow = recorded, "double-M3_N5-bf16-s0"
    lines = list(map(json.loads, (tmp_path / run.ledger).read_text().splitlines()))
    for line in (line for line in lines if "case" in line):
        line["seconds"] = 100.0 if line["case"] == slow else 1.0
    run.write(run.ledger, "".join(f"{json.dumps(line)}\n" for line in lines))
    git(tmp_path, "init", "-q")
    git(tmp_path, "add", "-A")
    git(tmp_path, "commit", "-q", "-m", "recorded")
    run.write(run.ledger, "")  # what is not committed, as what another shard records, moves nothing
    parts = [run("-v", "-k", "test_agrees", f"--parity-shard={n}/2").stdout for n in (1, 2)]
    assert sorted(part.count("PASSED") for part in parts) == [1, 3], "the slow one alone"
    assert any(f"test_agrees[{slow}] PASSED" in part and part.count("PASSED") == 1 for part in parts)


@pytest.mark.parametrize("shard", ["0/2", "3/2", "2", "a/b"])
def test_a_shard_that_cannot_be_is_refused(project, shard):
    done = project()("-q", f"--parity-shard={shard}")
    assert done.returncode == 4
    assert f"must be I/N with 1 ≤ I ≤ N, got {shard}" in done.stderr


KILLER = """
import os, signal
from pathlib import Path

def good(x):
    if x.shape == (3, 5) and Path("lethal").exists():
        Path("lethal").unlink()
        os.kill(os.getpid() if "PYTEST_XDIST_WORKER" not in os.environ else os.getppid(), signal.SIGKILL)
    return x + x
"""


def test_a_killed_run_is_resumed(project, tmp_path):
    project()
    (tmp_path / "kernels.py").write_text(KILLER)

    def run(*arguments):
        options = ["-p", "no:hypothesispytest", "-v", "--parity-record"]
        return run_module("pytest", tmp_path, *options, *arguments)

    def passed(done):
        return set(re.findall(r"^(?=.*PASSED).*?(test_double\S+)", done.stdout, re.MULTILINE))

    everything = passed(run())
    undisturbed = contents(tmp_path / "records")
    assert len(everything) == 8
    (tmp_path / "records").rename(tmp_path / "undisturbed")
    (tmp_path / "lethal").touch()
    killed = run("-n", "1")
    assert killed.returncode < 0
    (journal,) = (tmp_path / ".pytest_cache").rglob("parity-runs/*.jsonl")
    # Not from what it printed, of which a pipe may have lost the end.
    before = {json.loads(line)[0] for line in journal.read_text().splitlines()[1:]}
    assert before < everything
    resumed = run("-n", "1", "--parity-resume")
    assert resumed.returncode == 0, resumed.stdout
    assert passed(resumed) | before == everything
    assert not passed(resumed) & before
    assert contents(tmp_path / "records") == undisturbed
    assert len({json.loads(line)["provenance"]["utc"] for path in (tmp_path / "records").rglob("*.jsonl")
                for line in path.read_text().splitlines() if '"id"' in line}) == 1, "one run"  # fmt: skip


STOPPING = """
import os, signal
from pathlib import Path

def good(x):
    if x.shape == (3, 5) and Path("stop").exists():
        Path("stop").unlink()
        os.kill(os.getpid(), signal.SIGINT)
        os.kill(os.getpid(), signal.SIGINT)
    return x + x
"""


@pytest.mark.full
def test_an_interrupted_run_is_resumed_with_what_is_still_as_it_was(project, tmp_path):
    project().write("kernels.py", STOPPING)

    def run(*arguments):
        return run_module("pytest", tmp_path, "-p", "no:hypothesispytest", "-q", "-k", "test_agrees", *arguments)

    def stopped():
        (tmp_path / "stop").touch()
        assert run().returncode == 2
        (journal,) = (tmp_path / ".pytest_cache").rglob("parity-runs/*.jsonl")
        assert len(journal.read_text().splitlines()) == 3
        return journal

    stopped()
    assert "2 passed, 6 deselected" in (done := run("--parity-resume")).stdout, done.stdout
    assert "4 passed" in run("--parity-resume").stdout, "it ran to its end: nothing to resume"
    stopped()
    (tmp_path / "kernels.py").write_text(STOPPING.replace("x + x", "2 * x"))
    assert "4 passed" in run("--parity-resume").stdout, "an edited kernel runs again, where there is no git"
    stopped().write_bytes(b"spoilt \xff\n")
    done = run("--parity-resume")
    assert "4 passed" in done.stdout
    assert "parity: warning: nothing is resumed: " in done.stderr


def test_without_a_place_for_its_journal_a_run_goes_on(project, tmp_path):
    (tmp_path / ".pytest_cache").write_text("no folder can be made here, as in a checkout that is only to be read")
    project()
    done = run_module("pytest", tmp_path, "-p", "no:hypothesispytest", "-q", "-k", "test_agrees and M3")
    assert done.returncode == 0 and "2 passed" in done.stdout, done.stdout + done.stderr
    assert "parity: warning: --parity-resume will find nothing of this run: " in done.stderr


def test_a_raising_kernel_ends_a_run_that_is_to_end_at_a_crash(project, tmp_path):
    run = project()
    run.replace("kernels.py", "x + x", "1 / 0")
    done = run("-q", "-k", "test_agrees", "--parity-fail-fast-on=CRASH", "--junitxml=junit.xml")
    assert "--parity-fail-fast-on: CRASH of double-M8_N40-f32-s0" in done.stdout, done.stdout
    properties = dict(re.findall(r'<property name="(\w+)" value="([^"]*)"', (tmp_path / "junit.xml").read_text()))
    assert properties["verdict"] == "CRASH"
    assert properties["rerun"] == "pytest -n0 'test_double.py::test_agrees[double-M8_N40-f32-s0]'"


@WITH_AND_WITHOUT_WORKERS
def test_the_first_bad_verdict_can_end_the_run(project, workers):
    done = project(kernel="bad")("-q", *workers, "--parity-fail-fast-on=out of,logic")
    assert "--parity-fail-fast-on: LOGIC FAULT of double-M8_N40-" in done.stdout, done.stdout
    assert done.returncode == 2


def test_a_verdict_that_is_not_named_ends_no_run(project):
    assert "4 failed, 4 passed" in project(kernel="bad")("-q", "--parity-fail-fast-on=LOSS").stdout


@WITH_AND_WITHOUT_WORKERS
def test_a_long_run_says_how_far_it_is(project, tmp_path, workers):
    run = project()
    (tmp_path / "conftest.py").write_text(
        "import itertools, types\n"
        "from parity.runners import long_runs\n"
        "long_runs.time = types.SimpleNamespace(monotonic=itertools.count(step=60).__next__)  # a minute a test\n"
    )
    lines = re.findall(r"^parity: (\d) of 8 · 0 failed · (\d) min left", run("-q", *workers).stdout, re.MULTILINE)
    assert lines == [(str(n), str(8 - n)) for n in range(1, 9)]


def test_junit_has_the_verdict(project, tmp_path):
    project(kernel="bad")("-q", "--junitxml=junit.xml", "-k", "test_agrees and M8_N40-f32")
    properties = dict(re.findall(r'<property name="(\w+)" value="([^"]*)"', (tmp_path / "junit.xml").read_text()))
    assert properties["verdict"] == "LOGIC FAULT"
    assert float(properties["eta"]) > float(properties["bound"])
    assert properties["rerun"] == "pytest -n0 'test_double.py::test_agrees[double-M8_N40-f32-s0]'"
