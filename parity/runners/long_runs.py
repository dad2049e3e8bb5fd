"""Runs that are too long for one sitting or one machine: in shards, resumed, watched, ended early."""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import heapq
import json
import statistics
import subprocess
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from parity import git
from parity.ledger.provenance import now
from parity.ledger.read import read_all
from parity.ledger.schema import RecordError
from parity.op import BACKENDS
from parity.runners.items import chosen

EVERY = 60.0
"""Seconds between two lines of progress."""


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
        kept &= {n for n, item in enumerate(items) if item.nodeid not in passed}
    if len(kept) < len(items):
        config.hook.pytest_deselected(items=[item for n, item in enumerate(items) if n not in kept])
        items[:] = [item for n, item in enumerate(items) if n in kept]


def _in_shard(config: pytest.Config, items: Sequence[pytest.Item], index: int, count: int) -> set[int]:
    seconds = _recorded_seconds(config)
    known = [seconds[key] for item in items if (key := _measured(item)) in seconds]
    usual = statistics.median(known) if known else 1.0
    weights = {item.nodeid: seconds.get(_measured(item), usual) for item in items}
    dealt = deal(weights, count)
    return {n for n, item in enumerate(items) if dealt[item.nodeid] == index - 1}


def _recorded_seconds(config: pytest.Config) -> dict[tuple[str, str], float]:
    """How long each case took, by backend and case id without its seed; nothing where there is no sound ledger."""
    root = config.getoption("--parity-records") or config.rootpath / "records"
    found: dict[tuple[str, str], float] = {}
    with contextlib.suppress(RecordError):
        for backend in BACKENDS:
            for ledger in read_all(root, backend).values():
                found |= {(backend, record.case): record.seconds for record in ledger.values()}
    return found


def _measured(item: pytest.Item) -> tuple[str, str]:
    if (trial := chosen(item)) is None:
        return "", ""
    _, case, backend = trial
    return backend, case.with_seed(0).id


# --- resumed ---


@dataclass
class _Journal:
    """What this command has passed so far, on this state of the sources; gone once it ran to its end.

    Its first line is when the first attempt began: all attempts together leave the records of one run.
    """

    path: Path | None  # None: nowhere to keep it
    utc: str
    passed: frozenset[str] = frozenset()

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
            return _Journal(None, worker["parity_utc"], frozenset(worker["parity_passed"]))
        cache = getattr(config, "cache", None)
        if cache is None:
            return _Journal(None, now())
        path = cache.mkdir("parity-runs") / f"{_state(config)}.jsonl"
        if config.getoption("--parity-resume") and path.exists():
            utc, *finished = path.read_text(encoding="utf-8").split("\n")
            # A line that was being written when the run was killed has no end, and is not among these.
            return _Journal(path, utc, frozenset(finished[:-1]))
        begun = now()
        path.write_text(f"{begun}\n", encoding="utf-8")
        return _Journal(path, begun)

    def add(self, nodeid: str) -> None:
        if self.path:
            with self.path.open("a", encoding="utf-8") as file:
                file.write(f"{nodeid}\n")

    def close(self) -> None:
        if self.path:
            self.path.unlink(missing_ok=True)


def began(config: pytest.Config) -> str:
    """When this run began, or the interrupted one that it resumes: the `utc` of its records."""
    return _Journal.of(config).utc


def _state(config: pytest.Config) -> str:
    """A name for this command on this state of the sources."""
    words = [word for word in map(str, config.invocation_params.args) if word != "--parity-resume"]
    parts = [json.dumps(words).encode()]
    for command in (["rev-parse", "HEAD"], ["diff", "HEAD"]):
        with contextlib.suppress(OSError, subprocess.SubprocessError):
            parts.append(git.run(config.rootpath, *command))
    return hashlib.sha256(b"\0".join(parts)).hexdigest()[:16]


# --- watched ---


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
        self._session: pytest.Session | None = None

    @pytest.hookimpl(optionalhook=True)
    def pytest_configure_node(self, node: Any) -> None:
        """pytest-xdist's: what a worker is told before it starts."""
        node.workerinput["parity_utc"] = self._journal.utc
        node.workerinput["parity_passed"] = sorted(self._journal.passed)

    def pytest_sessionstart(self, session: pytest.Session) -> None:
        self._session = session

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            self._failed.add(report.nodeid)
        for name, entry in report.user_properties:
            if name == "parity" and report.when != "teardown":
                self._look_at(entry)  # type: ignore[arg-type]
        if report.when == "teardown" and report.nodeid not in self._failed:
            self._journal.add(report.nodeid)
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

    def pytest_sessionfinish(self, exitstatus: int | pytest.ExitCode) -> None:
        if exitstatus in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED):
            self._journal.close()
