"""Tests that take their process along: reported as CRASH, OOM or TIMEOUT, with the command that reruns them.

Every process that runs tests keeps a log in a folder that its parent made: one line when a test begins, whatever
`faulthandler` has to say when the process dies, nothing else. A pytest-xdist worker that dies is replaced; the
controller reads what it left, and the case is reported with it. An accelerator whose context is lost fails every
later test of its process, so a worker that meets such an error ends itself.

Without workers a project's tests run in a child of the process that was started (`supervision`): a test that ends it
ends the run, which says so and is never exit code 0.
"""

from __future__ import annotations

import contextlib
import faulthandler
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

import pytest

from parity import matrix, projects
from parity.guard import OUT_OF_MEMORY
from parity.runners import items, supervision
from parity.words import said, shown

LOST_CONTEXT = re.compile(
    r"illegal memory access|device-side assert|unspecified launch failure|misaligned address|illegal instruction"
    r"|CUDA_ERROR_(ILLEGAL_ADDRESS|ASSERT|LAUNCH_FAILED|MISALIGNED_ADDRESS|ILLEGAL_INSTRUCTION)"
)
"""Errors after which CUDA refuses everything else in the process (CUDA Runtime API, `cudaError_t`: "This leaves the
process in an inconsistent state")."""
LOST_CONTEXT_STATUS = 70
LINES = 25
"""Lines of a dead worker's log that its report shows: the innermost calls come first."""
RESTARTS = 1000
"""Workers that may be replaced in one run; pytest-xdist's four for each is used up by one bad kernel."""
_LOGS = "parity-logs-"
_LIMITING = ("parity-casualties", "parity-witness")
_SESSION = pytest.StashKey[pytest.Session]()
_CHILD = pytest.StashKey[supervision.Child]()


@dataclass(frozen=True)
class Casualty:
    """How a worker died."""

    outcome: str  # CRASH, OOM or TIMEOUT
    reason: str
    log: str
    entry: dict[str, Any]  # of the case that was running, as `Judgement.summary`; empty where it was none of the matrix
    nodeid: str = ""  # of the test that was running


def pytest_addoption(parser: pytest.Parser) -> None:
    """The options."""
    parser.getgroup("parity").addoption(
        "--parity-timeout",
        type=float,
        metavar="SECONDS",
        help="end the process of a test that runs longer, and report it as TIMEOUT (default: never)",
    )


@pytest.hookimpl(tryfirst=True)
def pytest_cmdline_main(config: pytest.Config) -> int | None:
    """Let pytest-xdist replace as many workers as there may be bad cases; without workers, go on in a child."""
    if getattr(config.option, "maxworkerrestart", "") is None:
        config.option.maxworkerrestart = str(RESTARTS)
    child = supervision.inherited()
    if child is None and _is_supervised(config):
        with _logs() as folder:
            split = supervision.split(str(folder))
            if isinstance(split, supervision.End):
                return _told(split, folder, config)
            child = split
    if child is not None:
        config.stash[_CHILD] = child
    return None


def _has_workers(config: pytest.Config) -> bool:
    return bool(getattr(config.option, "tx", None) or getattr(config.option, "numprocesses", None))


def _is_supervised(config: pytest.Config) -> bool:
    """Whether this process is pytest and nothing else, for a project with a matrix, without workers and debuggers."""
    name, given = Path(sys.argv[0]), config.invocation_params
    alone = (name.name in ("pytest", "py.test") or name.parts[-2:] == ("pytest", "__main__.py")) and not given.plugins
    if not alone or tuple(map(str, given.args)) != tuple(sys.argv[1:]) or hasattr(config, "workerinput"):
        return False
    debugged = any(getattr(config.option, name, False) for name in ("usepdb", "trace"))
    if _has_workers(config) or debugged or not supervision.can_split():
        return False
    try:
        return any(matrix.module(project) for project in projects.near(items.paths(config)))
    except (ValueError, OSError):  # none, or what cannot be read: it is said where it is needed
        return False


@contextlib.contextmanager
def _logs() -> Iterator[Path]:
    """A folder for logs, gone in the end; also those that killed processes have left."""
    for left in Path(tempfile.gettempdir()).glob(f"{_LOGS}*"):
        process = left.name.removeprefix(_LOGS).partition("-")[0]
        with contextlib.suppress(OSError):
            if process.isdigit() and left.stat().st_uid == os.getuid() and not _lives(int(process)):
                shutil.rmtree(left, ignore_errors=True)
    owner = os.getpid()
    folder = Path(tempfile.mkdtemp(prefix=f"{_LOGS}{owner}-"))
    try:
        yield folder
    finally:
        if os.getpid() == owner:
            shutil.rmtree(folder, ignore_errors=True)


def _lives(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    return True


def _told(end: supervision.End, folder: Path, config: pytest.Config) -> int:
    """The exit code of a run whose child has ended; of one that has died, after what is known of it."""
    log = folder / "main.log"
    found = examine(log.read_text(encoding="utf-8", errors="replace") if log.exists() else "", end.status)
    if end.said is None and (end.status <= 0 or found.nodeid):
        where = items.from_start(config, found.nodeid) if found.nodeid else "pytest"
        print(f"\n{items.message(found.outcome, found.reason, where, found.log)}")
        print("parity: the run ended there, without a summary; with -n 1 (pytest-xdist) the other tests run as well")
        return 1  # whatever status the kernel chose: of pytest's own, 5 says that there was no test
    return end.code


@pytest.hookimpl(trylast=True)  # after pytest's own faulthandler, whose place this one's takes
def pytest_configure(config: pytest.Config) -> None:
    """A folder of logs in the controller, a log in every process that runs tests."""
    worker, child = getattr(config, "workerinput", None), config.stash.get(_CHILD, None)
    if worker is None and child is None:
        if _has_workers(config):
            config.pluginmanager.register(_Controller(), "parity-casualties")
        return
    folder, name = (worker["parity_logs"], worker["workerid"]) if worker else (child.note if child else "", "main")
    log = (Path(folder) / f"{name}.log").open("w", encoding="utf-8")
    config.pluginmanager.register(_Witness(config, log), "parity-witness")
    faulthandler.enable(log)


def pytest_sessionstart(session: pytest.Session) -> None:
    """Remember the session: it has the exit status in the end."""
    session.config.stash[_SESSION] = session


def pytest_runtestloop(session: pytest.Session) -> None:
    """Refuse a limit that nobody keeps."""
    config = session.config
    if config.getoption("--parity-timeout") and not any(map(config.pluginmanager.hasplugin, _LIMITING)):
        raise pytest.UsageError("--parity-timeout ends the process of a test: it needs -n, or a run without a debugger")


@pytest.hookimpl(trylast=True)
def pytest_unconfigure(config: pytest.Config) -> None:
    """Say to the parent with which status the run ends."""
    if child := config.stash.get(_CHILD, None):
        session = config.stash.get(_SESSION, None)
        child.finish(int(session.exitstatus) if session else 0)


class _Witness:
    """In a worker: writes down which test runs, and ends the process where nothing after it could be trusted."""

    def __init__(self, config: pytest.Config, log: TextIO) -> None:
        self._log = log
        self._timeout: float | None = config.getoption("--parity-timeout")

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Iterator[None]:
        self._log.seek(0)
        self._log.truncate()
        self._write(json.dumps({"nodeid": item.nodeid, "entry": items.entry(item)}))
        if self._timeout:
            faulthandler.dump_traceback_later(self._timeout, exit=True, file=self._log)
        try:
            return (yield)
        finally:
            faulthandler.cancel_dump_traceback_later()
            self._log.seek(0)
            self._log.truncate()

    @pytest.hookimpl(tryfirst=True)  # before there is a report of it: the dead worker's takes its place
    def pytest_runtest_makereport(self, item: pytest.Item, call: pytest.CallInfo[Any]) -> None:
        error = call.excinfo.value if call.excinfo else None
        reasons = [said(error)] if isinstance(error, Exception) else []
        reasons += [str(entry["reason"]) for name, entry in item.user_properties
                    if name == "parity" and isinstance(entry, dict) and "reason" in entry]  # fmt: skip
        if lost := next(filter(LOST_CONTEXT.search, reasons), None):
            self._write(lost)
            os._exit(LOST_CONTEXT_STATUS)

    def _write(self, line: str) -> None:
        self._log.write(f"{line}\n")
        self._log.flush()


class _Controller:
    """In the controller: tells workers where to keep their logs, and reads those of the dead."""

    def __init__(self) -> None:
        self._held = contextlib.ExitStack()
        self._logs = self._held.enter_context(_logs())

    @pytest.hookimpl(optionalhook=True)
    def pytest_configure_node(self, node: Any) -> None:
        """pytest-xdist's: what a worker is told before it starts."""
        node.workerinput["parity_logs"] = str(self._logs)

    @pytest.hookimpl(optionalhook=True)
    def pytest_handlecrashitem(self, crashitem: str, report: Any) -> None:
        """pytest-xdist's: the report of a test whose worker died."""
        worker = report.node
        log = self._logs / f"{worker.gateway.id}.log"
        casualty = examine(log.read_text(encoding="utf-8", errors="replace"), _status(worker))
        nodeid = items.from_start(worker.config, crashitem)
        report.longrepr = items.message(casualty.outcome, casualty.reason, nodeid, casualty.log)
        if casualty.entry:
            report.user_properties.append(("parity", casualty.entry))

    def pytest_unconfigure(self) -> None:
        self._held.close()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[Any]) -> Iterator[None]:
    """A test that ran out of memory and lived to say so."""
    report: Any = yield
    error = call.excinfo.value if call.excinfo else None
    if isinstance(error, MemoryError) or (isinstance(error, Exception) and OUT_OF_MEMORY.search(str(error))):
        reason = said(error)
        report.longrepr = items.message("OOM", reason, items.from_start(item.config, item.nodeid))
        if entry := items.entry(item):
            report.user_properties.append(("parity", items.failed(entry, "OOM", reason)))
    return report


def examine(log: str, status: int | None) -> Casualty:
    """How a worker died, from its log and its exit status (negative: the signal that killed it)."""
    first, _, rest = log.partition("\n")
    running: dict[str, Any] = json.loads(first or "{}")
    entry, lines = running.get("entry", {}), "\n".join(map(shown, rest.splitlines()[:LINES]))
    if "Timeout (" in rest:
        outcome, reason = "TIMEOUT", "ran longer than --parity-timeout"
    elif OUT_OF_MEMORY.search(rest):
        outcome, reason = "OOM", "out of memory"
    elif status == LOST_CONTEXT_STATUS:
        outcome, reason = "CRASH", "the accelerator's context is lost"
    elif status is not None and status < 0:
        outcome, reason = "CRASH", f"killed by {signal.Signals(-status).name}"
        if -status == signal.SIGKILL:
            reason += ", as the system does when memory runs out"
    else:
        outcome, reason = "CRASH", f"ended with status {status}" if status is not None else "ended"
    found = items.failed(entry, outcome, reason) if entry else {}
    return Casualty(outcome, reason, lines, found, running.get("nodeid", ""))


def _status(worker: Any) -> int | None:
    """The exit status of a worker's process; None where it is not this process's child."""
    process = getattr(worker.gateway._io, "popen", None)
    if process is None:
        return None
    with contextlib.suppress(subprocess.TimeoutExpired):
        return int(process.wait(timeout=10))
    return None
