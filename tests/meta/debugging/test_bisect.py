"""Bisections of a small repository find the planted commit, after a kill too, and leave the user's files alone."""

import json
import os
import shutil
import signal
import subprocess
import sys
from dataclasses import asdict

import numpy as np
import pytest

from parity.debugging.bisect import Bisector, Revision, packages
from parity.judging.metrics import Scale, measure

CASE = "double-M8_N40-f32-s0"
GOOD = "def good(x):\n    return x + x{comment}\n"
BAD = "def good(x):\n    return (x + x).at[5:, 7].set(0){comment}\n"


@pytest.fixture
def repository(project, tmp_path):
    """A project of nine commits: the sixth breaks the kernel, the fifth cannot be imported, two touch no kernel."""
    project("good")

    def git(*words):
        identity = ["-c", "user.name=a", "-c", "user.email=a@b", "-c", "commit.gpgsign=false"]
        done = subprocess.run(["git", *identity, *words], cwd=tmp_path, capture_output=True, text=True, check=True)
        return done.stdout.strip()

    def commit(text=None):
        if text:
            (tmp_path / "kernels.py").write_text(text)
        else:
            (tmp_path / "notes").write_text(f"{len(commits)}")
        git("add", "-A")
        git("commit", "-q", "-m", f"commit {len(commits)}")
        commits.append(git("rev-parse", "HEAD"))

    commits = []
    git("init", "-q")
    for n in range(3):
        commit(GOOD.format(comment=f"  # {n}"))
    commit()
    commit("import nothing_of_that_name\n")
    for n in range(3):
        commit(BAD.format(comment=f"  # {n}"))
    commit()
    hook = tmp_path / ".git" / "hooks" / "post-checkout"
    hook.parent.mkdir(exist_ok=True)
    hook.write_text(f"#!/bin/sh\ntouch {tmp_path}/hooked\n")
    hook.chmod(0o755)
    return git, commits


def snapshot(folder):
    return {
        p: (p.stat().st_mtime_ns, p.read_bytes()) for p in folder.rglob("*") if p.is_file() and ".git" not in p.parts
    }


def command(folder, cache):
    words = ["bisect", "HEAD~8", "HEAD", CASE, "--cache", str(cache)]
    return [sys.executable, "-m", "parity", *words]


@pytest.mark.tpu
def test_the_first_bad_commit_is_found_also_after_a_kill(repository, tmp_path, tmp_path_factory):
    pytest.importorskip("jax")
    git, commits = repository
    (tmp_path / "kernels.py").write_text("def good(x):\n    raise RuntimeError('the working tree is not judged')\n")
    (tmp_path / "new").write_text("of the user\n")
    cache = tmp_path_factory.mktemp("cache")
    environment = {**os.environ, "PYTHONDONTWRITEBYTECODE": "1"}
    before, status = snapshot(tmp_path), git("status", "--porcelain")

    with subprocess.Popen(
        command(tmp_path, cache), cwd=tmp_path, stdout=subprocess.PIPE, text=True, env=environment
    ) as killed:
        first = [killed.stdout.readline() for _ in range(2)]
        killed.send_signal(signal.SIGKILL)
    assert [line.split()[0] for line in first] == ["AGREES", "LOGIC"]
    (state,) = cache.glob("*.json")
    known = json.loads(state.read_text())
    assert 2 <= len(known) < 6

    done = subprocess.run(
        command(tmp_path, cache), cwd=tmp_path, capture_output=True, text=True, timeout=300, env=environment
    )
    assert done.returncode == 1, done.stderr
    assert f"first bad commit: one of {commits[4]}, {commits[5]}: others cannot be judged" in done.stdout
    assert f"good {commits[2][:12]}  AGREES" in done.stdout
    assert f"bad  {commits[5][:12]}  LOGIC FAULT" in done.stdout
    assert "a logic fault" in done.stdout
    resumed = json.loads(state.read_text())
    assert {sha: resumed[sha] for sha in known} == known
    assert set(resumed) - set(known) <= {*commits[1:6]}

    assert snapshot(tmp_path) == before
    assert git("status", "--porcelain") == status
    assert len(git("worktree", "list").splitlines()) == 1
    assert {path.suffix for path in cache.iterdir()} <= {".json", ".lock"}


def test_commits_are_those_that_touch_the_kernel(repository, tmp_path):
    _, commits = repository
    bisector = Bisector(tmp_path, CASE, "tpu", 1, tmp_path)
    assert bisector.commits(commits[0], commits[8]) == [commits[n] for n in (1, 2, 4, 5, 6, 7)]
    assert bisector.commits(commits[0], "HEAD~6") == [commits[n] for n in (1, 2)]


@pytest.mark.parametrize(
    ("good", "bad", "message"),
    [
        ("HEAD", "HEAD~3", "GOOD must be an ancestor of BAD"),
        ("HEAD~1", "HEAD", "a commit between HEAD~1 and HEAD must touch kernels.py"),
        ("nowhere", "HEAD", "GOOD and BAD must be commits"),
        ("--all", "HEAD", "GOOD and BAD must be commits"),
    ],
)
def test_what_cannot_be_bisected_is_refused(repository, tmp_path, good, bad, message):
    with pytest.raises(ValueError, match=message):
        Bisector(tmp_path, CASE, "tpu", 1, tmp_path).commits(good, bad)


class Reader(Bisector):
    """Judges a commit by what its kernel's text says, in no time."""

    def judge(self, commit):
        text = self._git("show", f"{commit}:kernels.py")
        outcome = "UNBUILDABLE" if "nothing" in text else "LOGIC FAULT" if "set(0)" in text else "AGREES"
        return Revision(commit, outcome, outcome == "AGREES", "")

    def _ask(self, commit, what):
        return {}


@pytest.mark.parametrize("spoilt", ["side", "merge"])
def test_of_a_merge_the_commit_is_found_that_it_brought(repository, tmp_path, spoilt):
    """The trunk is good, merges a branch (of which one commit is bad, or nothing but the merge itself), and goes on."""
    git, commits = repository
    git("checkout", "-q", "-b", "side", commits[1])
    brought = []
    for n, text in enumerate([GOOD, GOOD, BAD if spoilt == "side" else GOOD, BAD if spoilt == "side" else GOOD]):
        (tmp_path / "kernels.py").write_text(text.format(comment=f"  # side {n}"))
        git("commit", "-q", "-a", "-m", f"side {n}")
        brought.append(git("rev-parse", "HEAD"))
    git("checkout", "-q", "-b", "trunk", commits[2])
    git("merge", "-q", "--no-ff", "--no-commit", "-s", "ours", "side")
    for n in range(3):
        (tmp_path / "kernels.py").write_text(BAD.format(comment=f"  # merged {n}"))
        git("commit", "-q", "-a", "-m", f"merged {n}")
    found = Reader(tmp_path, CASE, "tpu", 1, tmp_path / "cache").run(commits[0], "HEAD")
    good, bad = (brought[1], brought[2]) if spoilt == "side" else (commits[2], git("rev-parse", "HEAD~2"))
    assert (found.good.commit, found.bad.commit, found.between) == (good, bad, ())


@pytest.mark.parametrize("left", ["worktree", "its folder", "its registration"])
def test_what_a_killed_run_left_goes_and_no_worktree_of_the_users(left, repository, tmp_path):
    git, _ = repository
    bisector = Bisector(tmp_path, CASE, "tpu", 1, tmp_path / "cache")
    tree, others = bisector.cache / "tree", tmp_path / "on another disk"
    for path in (tree, others):
        git("worktree", "add", "--detach", "--lock", "-q", str(path))
    git("worktree", "unlock", str(others))
    shutil.rmtree(others)
    if left == "its folder":
        shutil.rmtree(next(path for path in (tmp_path / ".git" / "worktrees").iterdir() if "tree" in path.name))
    if left == "its registration":
        shutil.rmtree(tree)
    bisector._remove(tree)
    assert not tree.exists()
    listed = git("worktree", "list", "--porcelain")
    assert str(others) in listed and str(tree) not in listed


def test_two_bisections_of_one_case_do_not_share_their_worktrees(repository, tmp_path):
    bisector = Reader(tmp_path, CASE, "tpu", 1, tmp_path / "cache")
    with bisector._alone(), pytest.raises(ValueError, match=f"one bisection of {CASE} must run at a time"):
        bisector.run("HEAD~8", "HEAD")


def test_another_version_judges_anew(repository, tmp_path, monkeypatch):
    bisector = Bisector(tmp_path, CASE, "tpu", 1, tmp_path / "cache")
    before = bisector._state
    assert bisector._state == before
    monkeypatch.setattr("parity.debugging.bisect.installed", lambda backend, real: {"jax": "another"})
    assert bisector._state != before


def test_a_process_that_was_killed_says_nothing_of_its_commit(repository, tmp_path, monkeypatch):
    _, commits = repository
    (tmp_path / "killed.py").write_text("import os\nos.kill(os.getpid(), 9)\n")
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    (tmp_path / "sitecustomize.py").write_text("import killed\n")
    bisector = Bisector(tmp_path, CASE, "tpu", 1, tmp_path / "cache")
    with pytest.raises(ValueError, match="must end by itself, signal 9 ended it"):
        bisector.judge(commits[0])
    assert not bisector._known()


def test_packages_are_what_the_kernel_imports_of_the_project(tmp_path):
    (tmp_path / "kernels").mkdir()
    (tmp_path / "kernels" / "a.py").write_text("import numpy\nfrom common.b import c\n")
    (tmp_path / "common").mkdir()
    (tmp_path / "common" / "b.py").write_text("import single, parity\n")
    (tmp_path / "single.py").write_text("")
    (tmp_path / "unrelated.py").write_text("")
    assert packages(tmp_path, "kernels.a:f") == ["kernels", "common", "single.py"]


def test_a_larger_error_within_the_bound_is_bad_only_by_epsilon(tmp_path):
    golden = np.linspace(1, 2, 4096)
    scale = Scale(golden, 2.0**-24, 8)

    def revision(size):
        noise = np.random.default_rng(0).normal(size=golden.size) * size * 2.0**-24 * golden
        metrics = measure((golden + noise).astype(np.float32), golden, scale)
        return Revision("sha", "AGREES", True, "", ({"out": metrics},))

    small, same, large = revision(1), revision(1.01), revision(4)
    assert json.loads(json.dumps(asdict(small)))["outcome"] == "AGREES"
    for by_epsilon in (False, True):
        bisector = Bisector(tmp_path, CASE, "tpu", 1, tmp_path, by_epsilon)
        assert not bisector.is_bad(same, small)
        assert bisector.is_bad(large, small) == by_epsilon
    assert not bisector.is_bad(small, large)
