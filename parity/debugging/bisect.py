"""`parity bisect GOOD BAD CASE`: the first commit whose kernel fails a case that it passed before.

Old kernels are judged by today's instrument: matrix, golden, contract and gates are those of the project as it is, and
of a commit only the kernel is taken, with what it imports. So a verdict moves with the kernel alone, and cases that are
younger than the fault find it too. Every commit is checked out into a git worktree in a cache folder and judged in a
process of its own; the user's files are never written. What was judged is kept there: a bisection that was cut off goes
on where it was. Where the first bad commit is a merge, the search goes on among the commits that it brought.
"""

from __future__ import annotations

import ast
import hashlib
import importlib
import inspect
import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from parity import git, matrix
from parity.backends import has_cuda, has_tpu, prepare_environment
from parity.debugging.explain import explain
from parity.judging import verdict
from parity.judging.judge import judge
from parity.judging.metrics import Metrics
from parity.ledger.provenance import installed
from parity.op import BACKENDS, Backend
from parity.runners.supervision import end_with_parent
from parity.trial import Trial
from parity.words import said, shown

UNBUILDABLE = "UNBUILDABLE"
"""The outcome of a commit whose kernel cannot be imported, or called as the matrix calls it: it is skipped."""
JUDGING_SECONDS = 1800
MARK = "parity bisect: "
"""Begins the line of a child's output that is its answer."""


@dataclass(frozen=True)
class Revision:
    """What today's instrument says of a commit's kernel. outputs: the metrics of each output, by seed."""

    commit: str
    outcome: str
    passed: bool
    reason: str
    outputs: tuple[Mapping[str, Metrics], ...] = ()
    narrow: tuple[str, ...] = ()  # outputs narrower than the sums
    title: str = ""  # the first line of its message

    @property
    def epsilon(self) -> float:
        """The largest ε of an output and a seed; NaN where nothing could be compared."""
        return max((m.epsilon for measured in self.outputs for m in measured.values()), default=float("nan"))

    def regressed(self, good: Revision) -> bool:
        """Whether the error of an output is larger than `good`'s, on the same inputs, by more than sampling does."""
        return any(
            verdict.regression(now[name], then[name], narrow_output=name in self.narrow) is not None
            for now, then in zip(self.outputs, good.outputs, strict=False)
            for name in now.keys() & then.keys()
        )


@dataclass(frozen=True)
class Bisection:
    """The first bad revision and the good one before it; or, of commits that cannot be judged, several that may be it.

    attribution: what `parity explain` concludes of the first bad one, "" where it says nothing.
    """

    good: Revision
    bad: Revision
    between: tuple[str, ...]  # unbuildable commits after `good` and before `bad`
    attribution: str
    judged: int  # in this run: others were known


@dataclass(frozen=True)
class Bisector:
    """A case on a backend, judged at commits of the repository at `root`; `cache` keeps the state and the worktrees."""

    root: Path
    case: str
    backend: Backend
    seeds: int
    cache: Path
    by_epsilon: bool = False
    done: Callable[[Revision], None] = field(default=lambda revision: None)

    def run(self, good: str, bad: str) -> Bisection:
        """Search the first-parent commits after `good`, up to `bad`, that touch the kernel.

        Raises ValueError where one of them is no commit, `good` is no ancestor, no commit touches the kernel, the
        verdicts are not good and bad, or another process is searching for the same.
        """
        with self._alone():
            self._clean()
            commits = self.commits(good, bad)
            before = len(self.known())
            first, last = self.judge(self._commit(good)), self.judge(commits[-1])
            if not first.passed:
                raise ValueError(f"GOOD must pass, got {first.outcome} at {good}: {first.reason}")
            if not self.is_bad(last, first):
                raise ValueError(f"BAD must {self._wanted}, got {last.outcome} at {bad}: {last.reason}")
            better, worse, between = self._search(commits, first, last, first)
            while not between and (brought := self._brought_by(worse, first)):
                better, worse, between = self._search(*brought, first)
            attribution = "" if worse.outcome == "CRASH" else self.attribution(worse.commit)
            return Bisection(better, worse, between, attribution, len(self.known()) - before)

    def _search(
        self, commits: Sequence[str], better: Revision, worse: Revision, good: Revision
    ) -> tuple[Revision, Revision, tuple[str, ...]]:
        """The last revision that is not bad, the first that is, the last of `commits` at most, and what is between."""
        low, high = -1, len(commits) - 1
        skipped: set[int] = set()
        while left := [n for n in range(low + 1, high) if n not in skipped]:
            n = min(left, key=lambda n: abs(2 * n - low - high))  # the nearest to the middle
            revision = self.judge(commits[n])
            if revision.outcome == UNBUILDABLE:
                skipped.add(n)
            elif self.is_bad(revision, good):
                high, worse = n, revision
            else:
                low, better = n, revision
        return better, worse, tuple(commits[low + 1 : high])

    def _brought_by(self, merge: Revision, good: Revision) -> tuple[list[str], Revision, Revision] | None:
        """The commits that a merge brought, between a revision that is not bad and one that is; None where none are."""
        parents = self._git("rev-parse", f"{merge.commit}^@").split()
        for parent in parents[1:]:
            try:
                base = self._git("merge-base", parents[0], parent)
                commits = self.commits(base, parent)
            except ValueError:  # histories that share nothing, or a kernel that no commit touches
                continue
            last = self.judge(commits[-1])
            if self.is_bad(last, good):
                first = self.judge(base)
                if first.outcome != UNBUILDABLE and not self.is_bad(first, good):
                    return commits, first, last
        return None

    @property
    def _wanted(self) -> str:
        return "fail, or err more than GOOD beyond noise" if self.by_epsilon else "fail (--epsilon: or err more)"

    def is_bad(self, revision: Revision, good: Revision) -> bool:
        """Whether a revision fails, or with `by_epsilon` errs more than GOOD."""
        if revision.outcome == UNBUILDABLE:
            return False
        return not revision.passed or (self.by_epsilon and revision.regressed(good))

    def commits(self, good: str, bad: str) -> list[str]:
        """The commits after `good`, up to `bad`, oldest first, that touch the kernel or what it imports."""
        first, last = self._commit(good), self._commit(bad)
        if self._git("merge-base", first, last) != first:
            raise ValueError(f"GOOD must be an ancestor of BAD, {good} is none of {bad}")
        op, _ = matrix.find(matrix.load(self.root), self.case)
        paths = packages(self.root, getattr(op, self.backend))
        found = self._git("rev-list", "--first-parent", "--reverse", f"{first}..{last}", "--", *paths).split()
        if not found:
            raise ValueError(f"a commit between {good} and {bad} must touch {', '.join(paths)}, none does")
        return found

    def judge(self, commit: str) -> Revision:
        """The revision, from the state if it is there."""
        known = self.known()
        if commit not in known:
            known[commit] = self._ask(commit, "judge")
            partial = self.state.with_suffix(".partial")
            partial.write_text(json.dumps(known))
            partial.replace(self.state)
        answer = known[commit]
        outcome, passed, reason = answer["outcome"], answer["passed"], shown(answer["reason"])
        narrow, title = tuple(answer.get("narrow", ())), shown(self._git("log", "-1", "--format=%s", commit))
        revision = Revision(commit, outcome, passed, reason, _outputs(answer), narrow, title)
        self.done(revision)
        return revision

    def attribution(self, commit: str) -> str:
        """What `parity explain` concludes of a commit's kernel."""
        conclusion: str = self._ask(commit, "explain").get("conclusion", "")
        return conclusion

    @contextmanager
    def _alone(self) -> Iterator[None]:
        """While no other process searches for the same: it has the same worktrees."""
        lock = FileLock(self.state.with_suffix(".lock"), timeout=0)
        try:
            lock.acquire()
        except Timeout:
            raise ValueError(
                f"one bisection of {self.case} must run at a time, another one holds {lock.lock_file}"
            ) from None
        try:
            yield
        finally:
            lock.release()

    def known(self) -> dict[str, dict[str, Any]]:
        """What was judged already, by commit."""
        try:
            known: dict[str, dict[str, Any]] = json.loads(self.state.read_bytes())
            for answer in known.values():
                Revision("", str(answer["outcome"]), bool(answer["passed"]), str(answer["reason"]), _outputs(answer))
        except FileNotFoundError:
            return {}
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
            raise ValueError(f"{self.state} must be as a bisection writes it; remove it: {said(error)}") from None
        return known

    def _clean(self) -> None:
        """Remove the worktrees of bisections that were killed: those whose lock nobody holds."""
        registered = (Path(line[9:]) for line in self._git("worktree", "list", "--porcelain").splitlines()
                      if line.startswith("worktree "))  # fmt: skip
        for tree in {*self.cache.glob("*-*"), *(tree for tree in registered if tree.parent == self.cache)}:
            lock = FileLock(self.cache / f"{tree.name.partition('-')[0]}.lock", timeout=0)
            if tree.name.startswith(f"{self.state.stem}-"):
                self._remove(tree)
            else:
                with suppress(Timeout), lock:
                    self._remove(tree)

    @property
    def state(self) -> Path:
        """One file for every repository, case, device and instrument: what was judged by another one is not known."""
        is_real = has_tpu() if self.backend == "tpu" else has_cuda()
        here = [is_real, installed(self.backend, is_real), instrument(self.root)]
        key = [str(self.root), self.case, self.backend, str(self.seeds), *here]
        self.cache.mkdir(parents=True, exist_ok=True)
        return self.cache / f"{hashlib.sha256(json.dumps(key).encode()).hexdigest()[:16]}.json"

    def _ask(self, commit: str, what: str) -> dict[str, Any]:
        """The answer of a process of its own, with the commit in a worktree."""
        tree = self.cache / f"{self.state.stem}-{commit[:12]}"
        self._remove(tree)  # of a run that was killed
        # No hook of the user's runs for it.
        self._git("-c", "core.hooksPath=/dev/null", "worktree", "add", "--detach", "--quiet", str(tree), commit)
        try:
            prefix = self._git("rev-parse", "--show-prefix")
            words = [str(self.root), str(tree / prefix), self.case, self.backend, str(self.seeds), what]
            code = "from parity.debugging.bisect import answer; answer()"
            environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
            child = subprocess.run(
                [sys.executable, "-c", code, *words],
                capture_output=True, text=True, check=False, timeout=JUDGING_SECONDS, env=environment, cwd=self.cache,
            )  # fmt: skip
        except subprocess.TimeoutExpired:
            return _failed(UNBUILDABLE, f"no verdict in {JUDGING_SECONDS} seconds")
        finally:
            self._remove(tree)
        for line in child.stdout.splitlines():
            if line.startswith(MARK):
                answer: dict[str, Any] = json.loads(line.removeprefix(MARK))
                return answer
        if -child.returncode in (signal.SIGINT, signal.SIGTERM, signal.SIGKILL):
            raise ValueError(
                f"the process that judges {commit} must end by itself, signal {-child.returncode} ended it"
            )
        if child.returncode < 0:
            return _failed("CRASH", f"the kernel's process died of signal {-child.returncode}")
        raise RuntimeError(f"a process must judge {commit}, it ended with {child.returncode}: {child.stderr[-2000:]}")

    def _remove(self, tree: Path) -> None:
        # No `worktree prune`: a worktree of the user's may lie on a disk that is not there just now.
        if f"worktree {tree}" in self._git("worktree", "list", "--porcelain").splitlines():
            self._git("worktree", "remove", "--force", "--force", str(tree))
        shutil.rmtree(tree, ignore_errors=True)

    def _commit(self, revision: str) -> str:
        try:
            return git.commit(self.root, revision)
        except ValueError:
            raise ValueError(
                f"GOOD and BAD must be commits of the repository at {self.root}, got {revision!r}"
            ) from None

    def _git(self, *words: str) -> str:
        try:
            return git.run(self.root, *words, timeout=300).decode().strip()
        except subprocess.CalledProcessError as error:
            said = error.stderr.decode().strip()
            raise ValueError(f"git {' '.join(words)} must succeed at {self.root}, got: {said}") from None


def _outputs(answer: Mapping[str, Any]) -> tuple[Mapping[str, Metrics], ...]:
    return tuple({n: Metrics(**m) for n, m in measured.items()} for measured in answer.get("outputs", ()))


def packages(root: Path, target: str) -> list[str]:
    """The top-level packages and modules of the project that the kernel "module:function" needs, parity left out."""
    found: list[str] = []
    wanted = [target.partition(":")[0].partition(".")[0]]
    while wanted:
        name = wanted.pop()
        paths = sorted((root / name).rglob("*.py")) or [root / f"{name}.py"]
        if name in found or name == "parity" or not paths[0].exists():
            continue
        found.append(name if (root / name).is_dir() else f"{name}.py")
        for node in (node for path in paths for node in ast.walk(ast.parse(path.read_bytes()))):
            if isinstance(node, ast.Import):
                wanted += [alias.name.partition(".")[0] for alias in node.names]
            elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
                wanted.append(node.module.partition(".")[0])
    return found


def _package(root: Path) -> str:
    """The top-level name of the project's matrix."""
    return matrix.module(root).partition(".")[0]


def instrument(root: Path) -> str:
    """SHA-256 of the sources that judge: parity's and the project's own, but for the kernels, which may change."""
    ops = matrix.load(root)
    names = {op.golden.__module__.partition(".")[0] for op in ops} | {_package(root)}
    folders = [Path(__file__).parent, *(root / name for name in sorted(names))]
    paths = [path for folder in folders for path in sorted(folder.rglob("*.py")) or [folder.with_suffix(".py")]]
    return hashlib.sha256(b"".join(path.read_bytes() for path in paths if path.exists())).hexdigest()


# --- in the process of a commit ---


def answer() -> None:
    """Judge or explain the kernel of a worktree, as the command line says, and print the answer as JSON."""
    end_with_parent()
    prepare_environment()
    root, tree, case_id, backend, seeds, what = sys.argv[1:]
    op, case = matrix.find(matrix.load(Path(root)), case_id)
    _import_from(Path(tree), keep={"parity", _package(Path(root))})
    side = next(known for known in BACKENDS if known == backend)
    try:
        trial = Trial(op, case, side)
        file = Path(inspect.getfile(inspect.unwrap(trial.kernel)))
        if not file.is_relative_to(tree):
            raise ImportError(f"{file} is not of the commit")
        given = [name for name, spec in op.inputs(case).items() if spec is not None]
        inspect.signature(trial.kernel).bind(**dict.fromkeys(given), **trial.arguments)
    except Exception as error:  # whatever importing an old module raises
        found = _failed(UNBUILDABLE, said(error))
    else:
        found = _explain(trial) if what == "explain" else _judge(trial, int(seeds))
    print(f"{MARK}{json.dumps(found)}")


def _import_from(tree: Path, keep: set[str]) -> None:
    """Let what is imported from now on come from `tree`, whatever is installed: its folder is looked in first."""
    names = {path.stem for path in tree.iterdir()} - keep
    for module in [module for module in sys.modules if module.partition(".")[0] in names]:
        del sys.modules[module]
    sys.path.insert(0, str(tree))
    importlib.invalidate_caches()


def _judge(trial: Trial, seeds: int) -> dict[str, Any]:
    try:
        judged = [judge(trial.with_seed(trial.case.seed + n)) for n in range(seeds)]
    except ImportError:
        raise
    except Exception as error:  # whatever a broken kernel raises
        return _failed("CRASH", said(error))
    worst = max(judged, key=lambda j: (not j.verdict.passed, j.load))
    return {
        "outcome": worst.verdict.outcome,
        "passed": worst.verdict.passed,
        "reason": worst.verdict.reason,
        "outputs": [{name: asdict(m) for name, m in j.outputs.items()} for j in judged],
        "narrow": [name for name in worst.outputs if trial.contract.is_narrow(name)],
    }


def _explain(trial: Trial) -> dict[str, Any]:
    try:
        return {"conclusion": explain(trial).conclusion}
    except Exception as error:  # an attribution that fails must not hide the commit
        return {"conclusion": f"no attribution: {error}"}


def _failed(outcome: str, reason: str) -> dict[str, Any]:
    return {"outcome": outcome, "passed": False, "reason": reason}
