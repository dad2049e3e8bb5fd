"""Bisections of a small repository find the planted commit, after a kill too, and leave the user's files alone."""

import json
import shutil
import signal
import subprocess
import sys
from dataclasses import asdict

import numpy as np
import pytest
from filelock import FileLock

from parity.debugging.bisect import Bisector, Revision, packages
from parity.judging.metrics import Scale, measure
from tests.support.commands import git, run_module

CASE = "double-M8_N40-f32-s0"
GOOD = "def good(x):\n    return x + x{comment}\n"
BAD = "def good(x):\n    return (x + x).at[5:, 7].set(0){comment}\n"


@pytest.fixture
def repository(project, tmp_path):
    """A project of nine commits: the sixth breaks the kernel, the fifth cannot be imported, two touch no kernel."""
    project("good")
    commits = []
    git(tmp_path, "init", "-q")
    kernels = [GOOD.format(comment=f"  # {n}") for n in range(3)] + [None, "import nothing_of_that_name\n"]
    for kernel in [*kernels, *(BAD.format(comment=f"  # {n}") for n in range(3)), None]:
        name, text = ("kernels.py", kernel) if kernel else ("notes", f"{len(commits)}")
        commits.append(commit(tmp_path, name, text, f"commit {len(commits)}"))
    hook = tmp_path / ".git" / "hooks" / "post-checkout"
    hook.parent.mkdir(exist_ok=True)
    hook.write_text(f"#!/bin/sh\ntouch {tmp_path}/hooked\n")
    hook.chmod(0o755)
    return commits


def commit(folder, name, text, message):
    """The commit of a file with this text."""
    (folder / name).write_text(text)
    git(folder, "add", "-A")
    git(folder, "commit", "-q", "-m", message)
    return git(folder, "rev-parse", "HEAD")


def snapshot(folder):
    return {
        p: (p.stat().st_mtime_ns, p.read_bytes()) for p in folder.rglob("*") if p.is_file() and ".git" not in p.parts
    }


@pytest.mark.full
@pytest.mark.tpu
def test_the_first_bad_commit_is_found_also_after_a_kill(repository, tmp_path, tmp_path_factory, monkeypatch):
    commits = repository
    (tmp_path / "kernels.py").write_text("def good(x):\n    raise RuntimeError('the working tree is not judged')\n")
    (tmp_path / "new").write_text("of the user\n")
    cache = tmp_path_factory.mktemp("cache")
    monkeypatch.setenv("PYTHONDONTWRITEBYTECODE", "1")
    before, status = snapshot(tmp_path), git(tmp_path, "status", "--porcelain")
    command = ["bisect", "HEAD~8", "HEAD", CASE, "--cache", str(cache)]

    whole = [sys.executable, "-m", "parity", *command]
    with subprocess.Popen(whole, cwd=tmp_path, stdout=subprocess.PIPE, text=True) as killed:
        first = [killed.stdout.readline() for _ in range(2)]
        killed.send_signal(signal.SIGKILL)
    assert [line.split()[0] for line in first] == ["AGREES", "LOGIC"]
    (state,) = cache.glob("*.json")
    known = json.loads(state.read_text())
    assert 2 <= len(known) < 6

    done = run_module("parity", tmp_path, *command)
    assert done.returncode == 1, done.stderr
    assert f"first bad commit: one of {commits[4]}, {commits[5]}: others cannot be judged" in done.stdout
    assert f"good {commits[2][:12]}  AGREES" in done.stdout
    assert f"bad  {commits[5][:12]}  LOGIC FAULT" in done.stdout
    assert "a logic fault" in done.stdout
    resumed = json.loads(state.read_text())
    assert {sha: resumed[sha] for sha in known} == known
    assert set(resumed) - set(known) <= {*commits[1:6]}

    assert snapshot(tmp_path) == before
    assert git(tmp_path, "status", "--porcelain") == status
    assert len(git(tmp_path, "worktree", "list").splitlines()) == 1
    assert {path.suffix for path in cache.iterdir()} <= {".json", ".lock"}


def test_commits_are_those_that_touch_the_kernel(repository, tmp_path):
    commits = repository
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
        text = git(self.root, "show", f"{commit}:kernels.py")
        outcome = "UNBUILDABLE" if "nothing" in text else "LOGIC FAULT" if "set(0)" in text else "AGREES"
        return Revision(commit, outcome, outcome == "AGREES", "")

    def attribution(self, commit):
        return ""


@pytest.mark.parametrize("spoilt", ["side", "merge"])
def test_of_a_merge_the_commit_is_found_that_it_brought(repository, tmp_path, spoilt):
    """The trunk is good, merges a branch (of which one commit is bad, or nothing but the merge itself), and goes on."""
    commits, brought, of_side = repository, [], BAD if spoilt == "side" else GOOD
    git(tmp_path, "checkout", "-q", "-b", "side", commits[1])
    for n, text in enumerate([GOOD, GOOD, of_side, of_side]):
        brought.append(commit(tmp_path, "kernels.py", text.format(comment=f"  # side {n}"), f"side {n}"))
    git(tmp_path, "checkout", "-q", "-b", "trunk", commits[2])
    git(tmp_path, "merge", "-q", "--no-ff", "--no-commit", "-s", "ours", "side")
    merge, *_ = [commit(tmp_path, "kernels.py", BAD.format(comment=f"  # merged {n}"), f"merged {n}") for n in range(3)]
    found = Reader(tmp_path, CASE, "tpu", 1, tmp_path / "cache").run(commits[0], "HEAD")
    good, bad = (brought[1], brought[2]) if spoilt == "side" else (commits[2], merge)
    assert (found.good.commit, found.bad.commit, found.between) == (good, bad, ())


@pytest.mark.parametrize(
    "left", ["worktree", *(pytest.param(x, marks=pytest.mark.full) for x in ("its folder", "its registration"))]
)
def test_a_killed_runs_worktree_goes_and_none_of_the_users(left, repository, tmp_path):
    unbuildable = repository[4]
    bisector = Bisector(tmp_path, CASE, "tpu", 1, tmp_path / "cache")
    tree, others = bisector.cache / f"{bisector.state.stem}-{unbuildable[:12]}", tmp_path / "on another disk"
    for path in (tree, others):
        git(tmp_path, "worktree", "add", "--detach", "--lock", "-q", str(path))
    git(tmp_path, "worktree", "unlock", str(others))
    shutil.rmtree(others)
    if left == "its folder":
        shutil.rmtree(next(path for path in (tmp_path / ".git" / "worktrees").iterdir() if tree.name in path.name))
    if left == "its registration":
        shutil.rmtree(tree)
    assert bisector.judge(unbuildable).outcome == "UNBUILDABLE"
    assert not tree.exists()
    listed = git(tmp_path, "worktree", "list", "--porcelain")
    assert str(others) in listed and str(tree) not in listed


def test_two_bisections_of_one_case_do_not_share_their_worktrees(repository, tmp_path):
    bisector = Reader(tmp_path, CASE, "tpu", 1, tmp_path / "cache")
    other = FileLock(bisector.state.with_suffix(".lock"))
    with other, pytest.raises(ValueError, match=f"one bisection of {CASE} must run at a time"):
        bisector.run("HEAD~8", "HEAD")


def test_the_next_start_removes_what_killed_bisections_have_left(repository, tmp_path):
    bisector = Reader(tmp_path, CASE, "tpu", 1, tmp_path / "cache")
    trees = [bisector.cache / f"{stem}-{commit[:12]}" for stem in (bisector.state.stem, "0" * 16, "1" * 16)
             for commit in repository[:1]]  # fmt: skip
    for tree in trees:
        git(tmp_path, "worktree", "add", "--detach", "-q", str(tree))
    with FileLock(bisector.cache / f"{'1' * 16}.lock"):  # another bisection, which is under way
        bisector.run(repository[0], "HEAD")
    assert [tree.exists() for tree in trees] == [False, False, True]
    listed = git(tmp_path, "worktree", "list", "--porcelain")
    assert [str(tree) in listed for tree in trees] == [False, False, True]


@pytest.mark.parametrize("content", ["{", "[1]", '{"x": {"outcome": "AGREES"}}', "\udcff", "[" * 100_000, '{"x": 1}'])
def test_a_spoilt_state_is_named(content, repository, tmp_path):
    bisector = Reader(tmp_path, CASE, "tpu", 1, tmp_path / "cache")
    bisector.state.write_bytes(content.encode(errors="surrogateescape"))
    with pytest.raises(ValueError, match=r"[0-9a-f]{16}\.json must be as a bisection writes it; remove it: "):
        bisector.run(repository[0], "HEAD")


def test_another_version_judges_anew(repository, tmp_path, monkeypatch):
    bisector = Bisector(tmp_path, CASE, "tpu", 1, tmp_path / "cache")
    before = bisector.state
    assert bisector.state == before
    monkeypatch.setattr("parity.debugging.bisect.installed", lambda backend, real: {"jax": "another"})
    assert bisector.state != before


def test_a_process_that_was_killed_says_nothing_of_its_commit(repository, tmp_path, monkeypatch):
    (tmp_path / "killed.py").write_text("import os\nos.kill(os.getpid(), 9)\n")
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    (tmp_path / "sitecustomize.py").write_text("import killed\n")
    bisector = Bisector(tmp_path, CASE, "tpu", 1, tmp_path / "cache")
    with pytest.raises(ValueError, match="must end by itself, signal 9 ended it"):
        bisector.judge(repository[0])
    assert not bisector.known()


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
