"""Tests that take their process along: reported as CRASH, OOM or TIMEOUT, with the command that reruns them.

Every pytest-xdist worker keeps a log in a folder that the controller made: one line when a test begins, whatever
`faulthandler` has to say when the process dies, nothing else. A worker that dies is replaced by pytest-xdist; the
controller reads what it left, and the case is reported with it. An accelerator whose context is lost fails every
later test of its process, so a worker that meets such an error ends itself.
"""

from __future__ import annotations

import contextlib
import faulthandler
import json
import os
import re
import signal
import subprocess
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

import pytest

from parity.runners import items

LOST_CONTEXT = re.compile(
    r"illegal memory access|device-side assert|unspecified launch failure|misaligned address|illegal instruction"
    r"|CUDA_ERROR_(ILLEGAL_ADDRESS|ASSERT|LAUNCH_FAILED|MISALIGNED_ADDRESS|ILLEGAL_INSTRUCTION)"
)
"""Errors after which CUDA refuses everything else in the process (CUDA Runtime API, `cudaError_t`: "This leaves the
process in an inconsistent state")."""
OUT_OF_MEMORY = re.compile(r"RESOURCE_EXHAUSTED|[Oo]ut of memory|OutOfMemoryError|can't allocate memory|std::bad_alloc")
LOST_CONTEXT_STATUS = 70
LINES = 25
"""Lines of a dead worker's log that its report shows: the innermost calls come first."""
RESTARTS = 1000
"""Workers that may be replaced in one run; pytest-xdist's four for each is used up by one bad kernel."""


@dataclass(frozen=True)
class Casualty:
    """How a worker died."""

    outcome: str  # CRASH, OOM or TIMEOUT
    reason: str
    log: str
    entry: dict[str, Any]  # of the case that was running, as `Judgement.summary`; empty where it was none of the matrix


def pytest_addoption(parser: pytest.Parser) -> None:
    """The options."""
    parser.getgroup("parity").addoption(
        "--parity-timeout",
        type=float,
        metavar="SECONDS",
        help="end the process of a test that runs longer, and report it as TIMEOUT (default: never)",
    )


@pytest.hookimpl(tryfirst=True)
def pytest_cmdline_main(config: pytest.Config) -> None:
    """Let pytest-xdist replace as many workers as there may be bad cases."""
    if getattr(config.option, "maxworkerrestart", "") is None:
        config.option.maxworkerrestart = str(RESTARTS)


@pytest.hookimpl(trylast=True)  # after pytest's own faulthandler, whose place this one's takes
def pytest_configure(config: pytest.Config) -> None:
    """A folder of logs in the controller, a log in every worker."""
    worker = getattr(config, "workerinput", None)
    if worker is None:
        config.pluginmanager.register(_Controller(), "parity-casualties")
    else:
        log = (Path(worker["parity_logs"]) / f"{worker['workerid']}.log").open("w", encoding="utf-8")
        config.pluginmanager.register(_Witness(config, log), "parity-witness")
        faulthandler.enable(log)


class _Witness:
    """In a worker: writes down which test runs, and ends the process where nothing after it could be trusted."""

    def __init__(self, config: pytest.Config, log: TextIO) -> None:
        self._log = log
        self._timeout: float | None = config.getoption("--parity-timeout")

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Iterator[None]:
        self._log.seek(0)
        self._log.truncate()
        self._write(json.dumps(items.entry(item)))
        if self._timeout:
            faulthandler.dump_traceback_later(self._timeout, exit=True, file=self._log)
        try:
            return (yield)
        finally:
            faulthandler.cancel_dump_traceback_later()

    @pytest.hookimpl(tryfirst=True)  # before there is a report of it: the dead worker's takes its place
    def pytest_runtest_makereport(self, call: pytest.CallInfo[Any]) -> None:
        error = call.excinfo.value if call.excinfo else None
        if isinstance(error, Exception) and LOST_CONTEXT.search(str(error)):
            self._write(f"{type(error).__name__}: {error}")
            os._exit(LOST_CONTEXT_STATUS)

    def _write(self, line: str) -> None:
        self._log.write(f"{line}\n")
        self._log.flush()


class _Controller:
    """In the controller: tells workers where to keep their logs, and reads those of the dead."""

    def __init__(self) -> None:
        self._logs = tempfile.TemporaryDirectory(prefix="parity-logs-")

    @pytest.hookimpl(optionalhook=True)
    def pytest_configure_node(self, node: Any) -> None:
        """pytest-xdist's: what a worker is told before it starts."""
        node.workerinput["parity_logs"] = self._logs.name

    @pytest.hookimpl(optionalhook=True)
    def pytest_handlecrashitem(self, crashitem: str, report: Any) -> None:
        """pytest-xdist's: the report of a test whose worker died."""
        worker = report.node
        log = Path(self._logs.name) / f"{worker.gateway.id}.log"
        casualty = examine(log.read_text(encoding="utf-8", errors="replace"), _status(worker))
        report.longrepr = items.message(casualty.outcome, casualty.reason, crashitem, casualty.log)
        if casualty.entry:
            report.user_properties.append(("parity", casualty.entry))

    def pytest_unconfigure(self) -> None:
        self._logs.cleanup()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[Any]) -> Iterator[None]:
    """A test that ran out of memory and lived to say so."""
    report: Any = yield
    error = call.excinfo.value if call.excinfo else None
    if isinstance(error, MemoryError) or (isinstance(error, Exception) and OUT_OF_MEMORY.search(str(error))):
        reason = f"{type(error).__name__}: {error}".splitlines()[0]
        report.longrepr = items.message("OOM", reason, item.nodeid)
        if entry := items.entry(item):
            report.user_properties.append(("parity", items.failed(entry, "OOM", reason)))
    return report


def examine(log: str, status: int | None) -> Casualty:
    """How a worker died, from its log and its exit status (negative: the signal that killed it)."""
    first, _, rest = log.partition("\n")
    entry: dict[str, Any] = json.loads(first or "{}")
    shown = "\n".join(rest.splitlines()[:LINES])
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
    return Casualty(outcome, reason, shown, items.failed(entry, outcome, reason) if entry else {})


def _status(worker: Any) -> int | None:
    """The exit status of a worker's process; None where it is not this process's child."""
    process = getattr(worker.gateway._io, "popen", None)
    if process is None:
        return None
    with contextlib.suppress(subprocess.TimeoutExpired):
        return int(process.wait(timeout=10))
    return None
