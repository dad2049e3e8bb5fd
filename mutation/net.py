"""The net: which test of the default tier runs which lines, and how long it takes."""

from __future__ import annotations

import json
import re
import signal
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random
from statistics import fmean
from typing import Any

import coverage
import pytest

from mutation.server import OURS, cpu_seconds

QUICK_S = 0.25
"""Processor seconds up to which a test takes no time."""


SLACK = 10
"""How many times its processor time a test may take beside a fault, before the fault is caught for that."""
STARTING_S = 20.0
"""Processor seconds that it may take beyond that: others may have compiled for it what it now does itself."""
UNMEASURED_S = 120.0
"""Processor seconds that a test may take which was not measured."""


class Watcher:
    """Measures the tests of a run: each one's processor seconds, and the lines of the project that it runs."""

    def __init__(self, tree: Path) -> None:
        self._tree = tree
        watched = [str(tree / package) for package in OURS if package != "tests"]
        self._coverage = coverage.Coverage(data_file=None, config_file=False, source=watched, messages=False)
        self._coverage.start()
        self._seconds: dict[str, float] = {}
        self._failed: set[str] = set()

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Iterator[None]:
        """Everything up to the next test is this one's."""
        self._coverage.switch_context(item.nodeid)
        before = cpu_seconds()
        result = yield
        self._seconds[item.nodeid] = cpu_seconds() - before
        return result

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Only a test that passes can catch a fault by failing."""
        if not report.passed:
            self._failed.add(report.nodeid)

    def answer(self) -> dict[str, Any]:
        """Seconds by test, and tests by line by file."""
        self._coverage.stop()
        data = self._coverage.get_data()
        lines: dict[str, dict[int, list[str]]] = {}
        for path in data.measured_files():
            by_line = {
                line: [name for name in names if name in self._seconds and name not in self._failed]
                for line, names in data.contexts_by_lineno(path).items()
            }
            lines[Path(path).relative_to(self._tree).as_posix()] = {n: names for n, names in by_line.items() if names}
        seconds = {name: each for name, each in self._seconds.items() if name not in self._failed}
        return {"seconds": seconds, "lines": lines}


@dataclass(frozen=True)
class Net:
    """seconds: of each test. lines: of each file, the tests that run each of its lines."""

    seconds: Mapping[str, float]
    lines: Mapping[str, Mapping[int, Sequence[str]]]

    @classmethod
    def read(cls, folder: Path) -> Net:
        """What was measured, one file of tests after the other."""
        seconds: dict[str, float] = {}
        lines: dict[str, dict[int, list[str]]] = {}
        for path in sorted(folder.glob("*.json")):
            measured = json.loads(path.read_text())
            seconds |= measured["seconds"]
            for name, by_line in measured["lines"].items():
                for line, tests in by_line.items():
                    lines.setdefault(name, {}).setdefault(int(line), []).extend(tests)
        return cls(_alone(seconds), lines)

    def judges(self, path: str, first: int, last: int) -> list[str]:
        """The tests that may notice a fault in these lines, the likeliest and the quickest before the others.

        Those that run the lines, then those that run anything of the file: a compiled kernel is traced by the first
        test that needs it, and run by all. Of each kind those that take no time come first, and of the others the
        quickest of every test function before any second.
        """
        exact = self.exact(path, first, last)
        others = {test for tests in self.lines.get(path, {}).values() for test in tests} - exact
        return [*self._varied(exact), *self._varied(others)]

    def exact(self, path: str, first: int, last: int) -> set[str]:
        """The tests that run these lines."""
        return {test for line, tests in self.lines.get(path, {}).items() if first <= line <= last for test in tests}

    def _varied(self, tests: set[str]) -> list[str]:
        rank: dict[str, int] = {}
        place = {}
        for test in sorted(tests, key=lambda test: (self.seconds[test], test)):
            function = _function(test)
            rank[function] = rank.get(function, 0) + 1
            place[test] = (self.seconds[test] > QUICK_S, rank[function], self.seconds[test], test)
        return sorted(tests, key=place.__getitem__)


def _alone(seconds: Mapping[str, float]) -> dict[str, float]:
    """What each test takes by itself, whatever others have compiled for it.

    No less than its like on average, nor than its case in another test of the file, be it on its integer twin.
    """
    alike: dict[str, list[float]] = {}
    of_case: dict[tuple[str, str], float] = {}
    for test, each in seconds.items():
        alike.setdefault(_function(test), []).append(each)
        of_case[_case(test)] = max(each, of_case.get(_case(test), 0.0))
    return {test: max(fmean(alike[_function(test)]), of_case[_case(test)]) for test in seconds}


BACKENDS = {"tpu_kernels": "tpu", "gpu_reference": "gpu", "cpu_golden": "cpu"}
"""What tests call the packages of kernels."""


def likeliest(tests: Iterable[str], path: str, exact: Collection[str], ops: Collection[str]) -> list[str]:
    """Tests that were not measured, the likeliest to notice a fault in the file `path` before the others.

    Tests of the ops of those that run the fault's lines, `exact`, and of no op by name come before the other ops',
    and compilations after all else. Test functions and ops take turns, those of `exact` before others, each with its
    cases in an order drawn once. Tests that name another backend than the file's are left out, but a golden's: it
    serves all.
    """
    functions, concerned = {_function(test) for test in exact}, {_op(test, ops) for test in exact} or {*ops}
    backend = BACKENDS.get(path.split("/")[0], "")
    shuffled = sorted(tests)
    Random(0).shuffle(shuffled)
    turns: dict[tuple[str, str], int] = {}
    place: dict[str, tuple[bool, bool, bool, int, bool]] = {}
    for test in shuffled:
        kind = _function(test), _op(test, ops)
        named = _words(test) & {*BACKENDS.values()}
        foreign = bool(backend and named) and backend not in named
        if foreign and backend != "cpu":
            continue
        turns[kind] = turns.get(kind, 0) + 1
        of_others = kind[1] not in {*concerned, ""}
        place[test] = ("compile" in _words(test), foreign, of_others, turns[kind], kind[0] not in functions)
    return sorted(place, key=lambda test: (place[test], test))


def _words(test: str) -> set[str]:
    """Of the name of its file, and of its parameters."""
    file, _, rest = test.partition("::")
    return set(re.findall(r"[a-z0-9]+", Path(file).stem + " " + rest.partition("[")[2]))


def _op(test: str, ops: Collection[str]) -> str:
    return next((word for word in re.split(r"[-\[\]]", test.partition("[")[2]) if word in ops), "")


def _case(test: str) -> tuple[str, str]:
    return test.partition("::")[0], test.partition("[")[2].replace("-integers", "") or test


def _function(test: str) -> str:
    return re.sub(r"\[.*", "", test)


class Judges:
    """Runs the tests that are named, in the order in which they are, and says which failed first."""

    def __init__(self, tests: Sequence[str], seconds: Mapping[str, float]) -> None:
        self._place = {test: n for n, test in enumerate(tests)}
        self._seconds = seconds
        self._run = 0
        self._failed = ""

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, config: pytest.Config, items: list[pytest.Item]) -> None:
        """Leave out what is not named."""
        items[:] = sorted((i for i in items if i.nodeid in self._place), key=lambda item: self._place[item.nodeid])

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Iterator[None]:
        """End this process with a test that takes many times its time: with what others had compiled for it, and more.

        By a signal that nothing handles: a compiled loop would not notice an exception.
        """
        signal.setitimer(signal.ITIMER_PROF, SLACK * self._seconds[item.nodeid] + STARTING_S)
        result = yield
        signal.setitimer(signal.ITIMER_PROF, 0)
        return result

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Count the tests, and remember the first that failed."""
        self._run += report.when == "call"
        if report.failed and not self._failed:
            self._failed = report.nodeid

    def answer(self) -> dict[str, Any]:
        """How many tests ran, and the one that failed."""
        return {"run": self._run, "by": self._failed}


class Others:
    """Runs tests that were not measured, the likeliest to notice a fault first, until the budget is spent.

    exact: the tests that run the fault's lines. done: what is not run again.
    """

    def __init__(self, path: str, exact: Collection[str], done: Collection[str], budget_s: float) -> None:
        self._path, self._exact, self._done, self._budget_s = path, exact, done, budget_s
        self._began = 0.0
        self._there = self._run = 0
        self._failed = ""

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        """Put them in order."""
        ops = {item.callspec.params["run"][0].name for item in items if item.get_closest_marker("parity_cases")}  # type: ignore[attr-defined]
        by_name = {item.nodeid: item for item in items if item.nodeid not in self._done}
        items[:] = [by_name[name] for name in likeliest(by_name, self._path, self._exact, ops)]
        self._there, self._began = len(items), cpu_seconds()

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_protocol(self) -> bool | None:
        """Leave out what is beyond the budget, and end this process with a test that takes far too long."""
        if cpu_seconds() - self._began > self._budget_s:
            return True
        signal.setitimer(signal.ITIMER_PROF, UNMEASURED_S)
        return None

    def pytest_runtest_logfinish(self) -> None:
        """The next one has as much time."""
        signal.setitimer(signal.ITIMER_PROF, 0)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Count the tests, and remember the first that failed."""
        self._run += report.when == "call"
        if report.failed and not self._failed:
            self._failed = report.nodeid

    def answer(self) -> dict[str, Any]:
        """How many tests there are, how many ran, and the one that failed."""
        return {"there": self._there, "run": self._run, "by": self._failed}
