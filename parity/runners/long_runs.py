"""Runs that are too long for one sitting or one machine: in shards, resumed, watched, ended early."""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import heapq
import inspect
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Generator, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from datetime import datetime
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from parity import git
from parity.ledger import shards
from parity.ledger.provenance import installed, now
from parity.ledger.read import parse
from parity.ledger.schema import TIME
from parity.ledger.sources import identity, identity_of
from parity.op import BACKENDS, Backend, Op
from parity.runners.items import chosen, ledgers
from parity.words import said

EVERY = 60.0
"""Seconds between two lines of progress."""
_SHARD = pytest.StashKey[shards.Shards]()


def pytest_addoption(parser: pytest.Parser) -> None:
    """The options."""
    group = parser.getgroup("parity")
    group.addoption(
        "--parity-shard", metavar="I/N", type=_shard_of, help="run the I-th of N parts, balanced by recorded durations"
    )
    group.addoption(
        "--parity-resume", action="store_true", help="run only what the last, interrupted run has not passed"
    )
    group.addoption(
        "--parity-fail-fast-on",
        metavar="OUTCOMES",
        default="",
        help="stop at the first verdict that begins with one of these words: LOGIC,CRASH,…",
    )


def _shard_of(text: str) -> tuple[int, int]:
    index, _, count = text.partition("/")
    if not (index.isdigit() and count.isdigit() and 1 <= int(index) <= int(count)):
        raise argparse.ArgumentTypeError(f"must be I/N with 1 ≤ I ≤ N, got {text}")
    return int(index), int(count)


def deal(weights: Mapping[str, float], count: int) -> dict[str, int]:
    """Which of `count` parts each unit belongs to: the heaviest first, each to the part with the least so far.

    Longest processing time first (Graham 1969): within 4/3 of the best split, and the same on every machine.
    """
    parts = [(0.0, n) for n in range(count)]
    dealt: dict[str, int] = {}
    for unit in sorted(weights, key=lambda name: (-weights[name], name)):
        load, part = heapq.heappop(parts)
        dealt[unit] = part
        heapq.heappush(parts, (load + weights[unit], part))
    return dealt


@pytest.hookimpl(trylast=True)  # after -k, -m and the tier: of what is selected
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave what other shards run, and what an interrupted run has passed."""
    kept = set(range(len(items)))
    if shard := config.getoption("--parity-shard"):
        kept &= _in_shard(config, items, *shard)
    if config.getoption("--parity-resume"):
        passed = _Journal.of(config).passed
        kept &= {n for n, item in enumerate(items) if passed.get(item.nodeid) != _identity(item)}
    if len(kept) < len(items):
        config.hook.pytest_deselected(items=[item for n, item in enumerate(items) if n not in kept])
        items[:] = [item for n, item in enumerate(items) if n in kept]


def _in_shard(config: pytest.Config, items: Sequence[pytest.Item], index: int, count: int) -> set[int]:
    seconds = _committed_seconds(config)
    known = [seconds[key] for item in items if (key := _measured(item)) in seconds]
    usual = statistics.median(known) if known else 1.0
    weights = {item.nodeid: seconds.get(_measured(item), usual) for item in items}
    dealt = deal(weights, count)
    mine = {n for n, item in enumerate(items) if dealt[item.nodeid] == index - 1}
    dealing = hashlib.sha256(json.dumps(sorted(dealt.items())).encode()).hexdigest()[:12]
    config.stash[_SHARD] = shards.Shards(dealing, count, len(items), {str(index): len(mine)})
    return mine


def _committed_seconds(config: pytest.Config) -> dict[tuple[str, str], float]:
    """How long each case took, by backend and case id without its seed, in the ledger of HEAD.

    Not in the ledger as it is: shards that record would each be dealt from what the others have written. Nothing where
    there is no sound ledger in git.
    """
    root = config.rootpath
    found: dict[tuple[str, str], float] = {}
    for records in ledgers(config):
        with contextlib.suppress(OSError, ValueError, subprocess.SubprocessError):
            committed = git.ledgers_in(root, "HEAD", records.resolve().relative_to(root).as_posix())
            for path, blob in sorted(committed.items()):
                if any(backend in path.parts for backend in BACKENDS):
                    for record in parse(git.content(root, blob), str(path)).values():
                        found[record.provenance.backend, record.case] = record.seconds
    return found


def _measured(item: pytest.Item) -> tuple[str, str]:
    if (trial := chosen(item)) is None:
        return "", ""
    _, case, backend = trial
    return backend, case.with_seed(0).id


# --- resumed ---


@dataclass
class _Journal:
    """What this command has passed so far, by what ran; gone once it ran to its end.

    Its first line is when the first attempt began: all attempts together leave the records of one run. Each line after
    it is a test that has passed, with a hash of the code that it ran.
    """

    path: Path | None  # None: nowhere to keep it
    utc: str
    passed: Mapping[str, str] = field(default_factory=dict)

    KEY = pytest.StashKey["_Journal"]()

    @staticmethod
    def of(config: pytest.Config) -> _Journal:
        if _Journal.KEY not in config.stash:
            config.stash[_Journal.KEY] = _Journal._open(config)
        return config.stash[_Journal.KEY]

    @staticmethod
    def _open(config: pytest.Config) -> _Journal:
        worker = getattr(config, "workerinput", None)
        if worker is not None:  # also one that replaces another: it must select what the first ones did
            return _Journal(None, worker["parity_utc"], worker["parity_passed"])
        cache = getattr(config, "cache", None)
        if cache is None:
            return _Journal(None, now())
        try:
            path = cache.mkdir("parity-runs") / f"{_command(config)}.jsonl"
            if config.getoption("--parity-resume") and path.exists():
                try:
                    return _Journal._read(path)
                except (ValueError, TypeError) as error:
                    _warn(f"nothing is resumed: {path} cannot be read: {said(error)}")
            journal = _Journal(path, now())
            path.write_text(f"{journal.utc}\n", encoding="utf-8")
        except OSError as error:
            _warn(f"--parity-resume will find nothing of this run: {said(error)}")
            return _Journal(None, now())
        return journal

    @staticmethod
    def _read(path: Path) -> _Journal:
        """Raises ValueError, OSError for what is no journal. A line that a kill has cut off is not among those read."""
        utc, *lines = path.read_text(encoding="utf-8").split("\n")
        if datetime.strptime(utc, TIME).strftime(TIME) != utc:
            raise ValueError(f"must begin with a time, got {utc[:40]!r}")
        return _Journal(path, utc, dict(map(json.loads, lines[:-1])))

    def add(self, nodeid: str, identity: str) -> None:
        if self.path:
            with contextlib.suppress(OSError), self.path.open("a", encoding="utf-8") as file:
                file.write(f"{json.dumps([nodeid, identity])}\n")

    def close(self) -> None:
        if self.path:
            with contextlib.suppress(OSError):
                self.path.unlink(missing_ok=True)


def _warn(words: str) -> None:
    print(f"parity: warning: {words}", file=sys.stderr)


def began(config: pytest.Config) -> str:
    """When this run began, or the interrupted one that it resumes: the `utc` of its records."""
    return _Journal.of(config).utc


def _command(config: pytest.Config) -> str:
    """A name for this command."""
    words = [word for word in map(str, config.invocation_params.args) if word != "--parity-resume"]
    return hashlib.sha256(json.dumps([*words, str(config.invocation_params.dir)]).encode()).hexdigest()[:16]


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, Any, Any]:
    """Tell the journal, which may be in another process, what the test ran."""
    report = yield
    if report.when == "teardown":
        report.parity_identity = _identity(item)
    return report


def _identity(item: pytest.Item) -> str:
    """A hash of what a test runs: of the matrix its file, kernels, golden, matrix and versions, else all sources."""
    if trial := chosen(item):
        op, *_ = trial
        matrix = inspect.unwrap(op.contract).__code__.co_filename
        parts: list[Any] = [_content(item.path), _content(Path(matrix)), *(_of_op(op, b) for b in BACKENDS)]
    else:
        parts = [_tree(item.config.rootpath)]
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:16]


@cache
def _content(path: Path) -> str:
    return hashlib.sha256(path.read_bytes() if path.is_file() else b"").hexdigest()


@cache
def _tree(root: Path) -> str:
    """A hash of all Python files below a folder, but for those in hidden folders and in environments."""
    whole = hashlib.sha256()
    for path in _sources(root):
        whole.update(f"{path}\0{_content(path)}\n".encode())
    return whole.hexdigest()


def _sources(root: Path) -> Iterator[Path]:
    for folder, inner, names in os.walk(root):
        inner[:] = sorted(n for n in inner if n[0] != "." and not Path(folder, n, "pyvenv.cfg").exists())
        yield from (Path(folder, name) for name in sorted(names) if name.endswith(".py"))


@cache
def _of_op(op: Op, backend: Backend) -> list[Any]:
    """Of an op on a backend: the code of kernel and golden, and the versions. Of a kernel without sources its name."""
    found: list[Any] = [installed(backend, False), getattr(op, backend)]
    with contextlib.suppress(ImportError, AttributeError, ValueError, SyntaxError):
        found += [identity(getattr(op, backend)), identity_of(inspect.unwrap(op.golden))]
    return found


# --- watched ---


def pytest_sessionfinish(session: pytest.Session) -> None:
    """In a worker: tell the controller which shard it is of."""
    output, shard = getattr(session.config, "workeroutput", None), session.config.stash.get(_SHARD, None)
    if output is not None and shard:
        output["parity_shard"] = asdict(shard)


def pytest_configure(config: pytest.Config) -> None:
    """Watch, in the process that hears of every test."""
    if not hasattr(config, "workerinput"):
        config.pluginmanager.register(_Watcher(config), "parity-watcher")


class _Watcher:
    """Says how far a long run is and which case was worst so far; ends it early if asked to."""

    def __init__(self, config: pytest.Config) -> None:
        self._config = config
        self._journal = _Journal.of(config)
        words = config.getoption("--parity-fail-fast-on").upper().split(",")
        self._fatal = tuple(filter(None, (word.strip() for word in words)))
        self._began = self._said = time.monotonic()
        self._finished: set[str] = set()
        self._failed: set[str] = set()
        self._worst = (0.0, "")
        self._passed = False
        self._session: pytest.Session | None = None

    @pytest.hookimpl(optionalhook=True)
    def pytest_configure_node(self, node: Any) -> None:
        """pytest-xdist's: what a worker is told before it starts."""
        node.workerinput["parity_utc"] = self._journal.utc
        node.workerinput["parity_passed"] = dict(self._journal.passed)

    def pytest_sessionstart(self, session: pytest.Session) -> None:
        self._session = session

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            self._failed.add(report.nodeid)
        for name, entry in report.user_properties:
            if name == "parity" and report.when != "teardown":
                self._look_at(entry)  # type: ignore[arg-type]
        if report.when == "teardown" and report.nodeid not in self._failed:
            self._journal.add(report.nodeid, getattr(report, "parity_identity", ""))
            self._passed = True
        if report.when in ("teardown", "???"):
            self._finished.add(report.nodeid)
            self._say()

    def _look_at(self, entry: Mapping[str, Any]) -> None:
        if "load" in entry:
            self._worst = max(self._worst, (entry["load"], entry["case"]))
        failed = not entry.get("passed", True)  # there is no verdict where the record to compare with is missing
        if failed and self._fatal and entry["outcome"].startswith(self._fatal):
            reason = f"--parity-fail-fast-on: {entry['outcome']} of {entry['case']}"
            # pytest-xdist's controller has a loop of its own, which looks at its own flag.
            for loop in (self._session, self._config.pluginmanager.getplugin("dsession")):
                if loop is not None and not loop.shouldstop:
                    loop.shouldstop = reason

    def _say(self) -> None:
        at, done = time.monotonic(), len(self._finished)
        total = self._session.testscollected if self._session else 0
        reporter = self._config.pluginmanager.getplugin("terminalreporter")
        if at - self._said < EVERY or reporter is None or not total:
            return
        self._said = at
        left = (at - self._began) / done * (total - done)
        worst = f" · worst error/bound {self._worst[0]:.2f} {self._worst[1]}" if self._worst[1] else ""
        reporter.write_line(
            f"\nparity: {done:,} of {total:,} · {len(self._failed)} failed · {left / 60:.0f} min left{worst}"
        )

    @pytest.hookimpl(tryfirst=True)
    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        # By what has run: the exit status of a run that is interrupted twice is that of one that failed.
        complete = len(self._finished) >= session.testscollected
        if complete or not (self._passed or self._journal.passed):
            self._journal.close()
        if complete:
            self._note_shard()

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node: Any) -> None:
        """pytest-xdist's: what a worker has to say when it has ended."""
        if told := getattr(node, "workeroutput", {}).get("parity_shard"):
            self._config.stash[_SHARD] = shards.Shards(**told)

    def _note_shard(self) -> None:
        shard = self._config.stash.get(_SHARD, None)
        if shard and self._config.getoption("--parity-record"):
            for root in ledgers(self._config):
                with contextlib.suppress(OSError):  # which the recorder has met as well, and says so
                    shards.note(root, shard)

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        """Which dealing a shard is of."""
        if shard := self._config.stash.get(_SHARD, None):
            ((number, tests),) = shard.tests.items()
            of = f"{tests} of {shard.all} tests"
            terminalreporter.write_line(f"parity shard {number}/{shard.count} of dealing {shard.dealing}: {of}")
