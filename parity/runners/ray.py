"""`parity run --ray`: the tests of a project as the tasks of a Ray cluster.

The driver is pytest with another loop: it collects, and reports what it is told, as in any run. Tests that share
compiled kernels go together into a task, which asks for the accelerator that its tests are marked with. Ray sends it to
a node with the project's folder; there it runs pytest with one pytest-xdist worker, so that a test that takes its
process along is reported as everywhere else, and streams what each test reported and recorded, in order. When a worker
or a node is lost, Ray runs the task again elsewhere; the driver hears nothing twice.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import logging
import math
import os
import select
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from collections import deque
from collections.abc import Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from parity.ledger.provenance import here
from parity.ledger.schema import Record
from parity.ledger.write import Follower, Recorder
from parity.runners import items

RETRIES = 3
"""How often Ray runs a task again whose worker or node was lost."""
GROUPS = 4
"""Tasks for each slot of the cluster: so many that slots finish together, and so few that pytest seldom starts."""
LEAST, MOST = 8, 64
"""Tests in a task: of the fewer, starting pytest takes longest; of the more, a lost worker costs too many."""
QUIET = 10
"""Seconds without an outcome after which the driver looks whether the cluster still has what tests wait for."""
AHEAD = 2
"""Tasks that are submitted for each slot: one runs, one waits, and of a million none is a burden to Ray."""
LINES = 25
"""Lines of a node's output that are shown where pytest ended there without having run its tests."""

NOT_SENT = [
    *(".git/", ".venv/", "venv/", "node_modules/", "build/", "dist/"),
    *("__pycache__/", ".*_cache/", ".hypothesis/", "*.egg-info/", ".parts/"),
]
"""What nodes do not get of the project's folder, besides what git ignores."""

HIDDEN = {
    "TPU": {"TPU_VISIBLE_CHIPS": "", "JAX_PLATFORMS": "cpu"},
    "GPU": {"CUDA_VISIBLE_DEVICES": ""},
}
"""The environment of a task that did not ask for an accelerator which its node may have."""

Outcome = tuple[str, list[dict[str, Any]], list[Record], str]
"""What a test came to: the node, the reports as pytest serialises them (none: pytest ended before it), what was
recorded, and the end of the output where there is no report."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments of `parity run` that are about Ray."""
    parser.add_argument(
        "--ray", nargs="?", const="", metavar="ADDRESS",
        help="run the tests of the matrix with pytest on this Ray cluster (default: RAY_ADDRESS, else that of this "
        "machine, else a new one); -k is then pytest's own",
    )  # fmt: skip
    parser.add_argument(
        "pytest_arguments", nargs="*", metavar="-- ARGUMENTS", help="with --ray: paths and options for pytest"
    )


def command(given: argparse.Namespace) -> int:
    """`parity run --ray`; the exit code is pytest's. Raises ValueError where there is no such cluster."""
    try:
        import ray
    except ModuleNotFoundError as error:
        raise ValueError(f"--ray needs the extra 'ray': pip install 'kernel-parity[ray]' ({error})") from None
    if given.jobs:
        raise ValueError(f"-j must be left out with --ray, which knows what fits its nodes, got {given.jobs}")
    address = given.ray or None
    _check(address or os.environ.get("RAY_ADDRESS", ""))
    root = Path(given.root).resolve()
    os.environ.setdefault("RAY_task_oom_retries", str(RETRIES))  # where a node runs out of memory; Ray's own: for ever
    folder = {"working_dir": str(root), "excludes": NOT_SENT}
    try:
        ray.init(address, runtime_env=folder, log_to_driver=False, logging_level=logging.ERROR)
    except Exception as error:  # a node that does not start in time is one of no narrower class
        raise ValueError(f"--ray cannot connect to {address or 'a cluster'}: {' '.join(str(error).split())}") from None
    own = ["-n0", "-Wignore::pytest.PytestAssertRewriteWarning", f"--parity-seeds={given.seeds}"]
    chosen = ["-k", given.k] if given.k else []
    report = [f"--parity-report={given.report.resolve()}"] if given.report else []
    arguments = [*own, *chosen, *report, *given.pytest_arguments, f"--rootdir={root}"]
    try:
        with contextlib.chdir(root):
            return int(pytest.main(arguments, [_Driver()]))
    finally:
        ray.shutdown()


def _check(address: str) -> None:
    """Raises ValueError for an address that nobody listens at: Ray would try for minutes, and end the process."""
    if "://" in address:
        raise ValueError(
            f"--ray must be HOST:PORT of a cluster that this machine belongs to, got {address}: "
            "Ray's client cannot stream"
        )
    host, _, port = address.rpartition(":")
    if not address or address in ("auto", "local"):
        return
    if not host or not port.isdigit():
        raise ValueError(f"--ray must be HOST:PORT, got {address}")
    try:
        socket.create_connection((host, int(port)), timeout=10).close()
    except OSError as error:
        raise ValueError(f"--ray cannot connect to {address}: {error}") from None


# --- the driver ---


@dataclass
class _Task:
    """Tests that Ray runs. left: those that it has not reported yet."""

    need: str
    left: deque[pytest.Item]
    recorder: Recorder  # of the tests' project
    stream: Any  # ray.ObjectRefGenerator of an Outcome each


class _Driver:
    """pytest's loop, on a cluster."""

    _config: pytest.Config

    def __init__(self) -> None:
        import ray

        self._ray = ray
        found = ray.cluster_resources()
        self._slots = {need: int(found.get(need, 0)) for need in ("TPU", "GPU", "CPU")}
        self._nodes = sum(node["Alive"] for node in ray.nodes())
        self._streaming = False
        self._lacking = ""

    @pytest.hookimpl(trylast=True)  # pytest-xdist has read its options
    def pytest_configure(self, config: pytest.Config) -> None:
        self._config = config
        if getattr(config.option, "tx", None):
            raise pytest.UsageError("-n must be left out with --ray, which knows what fits its nodes")

    def pytest_report_header(self) -> str:
        where = [
            f"{backend}: {f'{slots} {need}' if (slots := self._slots[need]) else 'emulated'}"
            for backend, need in (("tpu", "TPU"), ("gpu", "GPU"))
        ]
        cluster = f"Ray {self._ray.__version__}, {self._nodes} nodes, {self._slots['CPU']} CPUs"
        return " · ".join([f"parity on {cluster}", *where])

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtestloop(self, session: pytest.Session) -> bool | None:
        options = self._config.option
        if options.collectonly or (session.testsfailed and not options.continue_on_collection_errors):
            return None  # pytest's own loop knows what to say
        from parity.runners.long_runs import began  # not before pytest has loaded it as a plugin

        utc, arguments = began(self._config), _for_nodes(self._config)
        ledgers = {path: _ledger(self._config, path) for path in {item.path for item in session.items}}
        self._config.pluginmanager.getplugin("terminalreporter").flush()
        waiting = {
            need: deque(tasks([item for item in session.items if self._need(item) == need], max(slots, 1)))
            for need, slots in self._slots.items()
        }
        running: dict[Any, _Task] = {}
        with contextlib.ExitStack() as stack, _progress(len(session.items)) as progress:
            recorders = {ledger: stack.enter_context(Recorder(ledger)) for ledger in set(ledgers.values())}
            try:
                while running or any(waiting.values()):
                    for need, groups in waiting.items():
                        free = AHEAD * max(self._slots[need], 1) - sum(task.need == need for task in running.values())
                        for _ in range(min(len(groups), free)):
                            group = groups.popleft()
                            ledger = ledgers[group[0].path]
                            stream = self._submit(need, group, arguments, ledger)
                            running[stream] = _Task(need, deque(group), recorders[ledger], stream)
                    streams = list(running)
                    while not self._ray.wait(streams, timeout=QUIET)[0]:  # for any, and then for no other
                        self._say_what_is_lacking(progress.console)
                    ready, _ = self._ray.wait(streams, num_returns=len(streams), timeout=0)
                    for stream in ready:
                        task = running[stream]
                        if not self._hear(task, utc, progress):
                            del running[stream]
                            if task.left:  # the rest of what a lost worker had
                                waiting[task.need].appendleft(list(task.left))
                        if session.shouldfail:
                            raise session.Failed(session.shouldfail)
                        if session.shouldstop:
                            raise session.Interrupted(session.shouldstop)
            finally:
                for stream in running:
                    self._ray.cancel(stream, force=True)
        return True

    def _say_what_is_lacking(self, console: Console) -> None:
        """Say once where tests wait for a device that no node has any more."""
        left = self._ray.cluster_resources()
        lacking = " or ".join(need for need, slots in self._slots.items() if slots and not left.get(need))
        if lacking and lacking != self._lacking:
            rest = "the run waits for one; Ctrl-C ends it, and --parity-resume goes on from there"
            console.print(f"no node with a {lacking} is left: {rest}", markup=False, highlight=False, soft_wrap=True)
        self._lacking = lacking

    def _need(self, item: pytest.Item) -> str:
        """The resource of the cluster that a test asks for."""
        marked = (need for need in HIDDEN if self._slots[need] and item.get_closest_marker(need.lower()))
        return next(marked, "CPU")

    def _submit(self, need: str, tests: Sequence[pytest.Item], arguments: Sequence[str], ledger: Path) -> Any:
        hidden = {name: value for device, names in HIDDEN.items() if device != need for name, value in names.items()}
        asked: dict[str, dict[str, Any]] = {"TPU": {"resources": {"TPU": 1}}, "GPU": {"num_gpus": 1}, "CPU": {}}
        remote: Any = self._ray.remote(run_tests).options(num_cpus=1, max_retries=RETRIES, **asked[need])
        records = str(ledger.relative_to(self._config.rootpath))
        return remote.remote([item.nodeid for item in tests], arguments, records, hidden)

    def _hear(self, task: _Task, utc: str, progress: Progress) -> bool:
        """What the next test of a task came to; whether there may be more of it."""
        try:
            heard = next(task.stream)
        except StopIteration:
            return False
        item = task.left.popleft()
        node, reports, more = "", [], True
        try:
            outcome: Outcome = self._ray.get(heard)
        except self._ray.exceptions.RayError as error:
            reports, more = [self._lost(item, error)], False
        else:
            node, serialised, records, output = outcome
            for record in records:  # before the run's journal has it that the test passed
                task.recorder.write(_of_this_run(record, item, utc))
            hook = self._config.hook.pytest_report_from_serializable
            reports = [hook(config=self._config, data=data) for data in serialised]
            if not reports:
                reports = [_casualty(item, "CRASH", "pytest ended before this test did", output)]
            for report in reports:
                report.user_properties.append(("ray_node", node))
        self._tell(reports, node, progress.console)
        progress.update(progress.task_ids[0], advance=1, description=item.name)
        return more

    def _lost(self, item: pytest.Item, error: Exception) -> pytest.TestReport:
        """A test that was running whenever its task's worker was lost; raises what is not about one test."""
        exceptions = self._ray.exceptions
        if isinstance(error, exceptions.RayTaskError | exceptions.RuntimeEnvSetupError):
            raise pytest.UsageError(f"the nodes cannot run tests: {error}") from None
        outcome = "OOM" if isinstance(error, exceptions.OutOfMemoryError) else "CRASH"
        return _casualty(item, outcome, f"Ray lost its worker {RETRIES + 1} times: {type(error).__name__}", str(error))

    def _tell(self, reports: Sequence[pytest.TestReport], node: str, console: Console) -> None:
        """Reports to every plugin, and a line of them to the terminal; with -q only where something is wrong."""
        self._streaming = True
        for report in reports:
            self._config.hook.pytest_runtest_logreport(report=report)
        self._streaming = False
        hook = self._config.hook.pytest_report_teststatus
        status = [hook(report=report, config=self._config)[0] for report in reports]
        if self._config.get_verbosity() >= 0 or any(report.failed for report in reports):
            words = [
                next(filter(None, reversed(status)), ""),
                reports[0].nodeid,
                _verdict(reports),
                f"[{node[:8]}]" if node else "",
            ]
            console.print(" ".join(filter(None, words)), markup=False, highlight=False, soft_wrap=True)

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_report_teststatus(self) -> Generator[None, tuple[Any, ...], tuple[Any, ...]]:
        """Of pytest's own dots and lines none between those of `_tell`."""
        category, *shown = yield
        return (category, "", "") if self._streaming else (category, *shown)


def _progress(total: int) -> Progress:
    progress = Progress(
        TextColumn("parity"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(),
        TextColumn("{task.description}"), transient=True,
    )  # fmt: skip
    progress.add_task("", total=total)
    return progress


def tasks(tests: Sequence[pytest.Item], slots: int) -> Iterator[list[pytest.Item]]:
    """Tests in groups of one file each, in order; those that share a compiled kernel stay together."""
    count = len(tests)
    size = min(MOST, math.ceil(count / slots), max(LEAST, math.ceil(count / slots / GROUPS)))
    found: list[pytest.Item] = []
    for _, family in itertools.groupby(tests, items.shared):
        together = list(family)
        if found and (len(found) + len(together) > size or found[0].path != together[0].path):
            yield found
            found = []
        found += together
    if found:
        yield found


def _ledger(config: pytest.Config, test_file: Path) -> Path:
    """The folder of the records of a file's project. Raises UsageError where nodes would not get it."""
    path = (config.getoption("--parity-records") or items.project(config, test_file) / "records").resolve()
    if not path.is_relative_to(config.rootpath):
        raise pytest.UsageError(f"--parity-records must lie in {config.rootpath}, which the nodes get, got {path}")
    return path


def _for_nodes(config: pytest.Config) -> list[str]:
    """The options of this run, without what says which tests it has: a task names them."""
    words = [word for word in map(str, config.invocation_params.args) if not word.startswith("@")]
    for path in reversed(config.option.file_or_dir):
        if path in words:
            del words[len(words) - 1 - words[::-1].index(path)]
    selecting = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    selecting.add_argument("--parity-shard")
    return selecting.parse_known_args(words)[1]


def _of_this_run(record: Record, item: pytest.Item, utc: str) -> Record:
    """A node's record as this run's, which began at `utc`: of the commit here where the node had the same sources."""
    then = record.provenance
    chosen = items.chosen(item)
    mine = _provenance(chosen[0], then.backend, then.device_kind, then.real, utc) if chosen else then
    if (then.kernel, then.golden) == (mine.kernel, mine.golden):
        then = replace(then, commit=mine.commit, dirty=mine.dirty)
    return replace(record, provenance=replace(then, utc=utc))


_provenance = cache(here)


def _casualty(item: pytest.Item, outcome: str, reason: str, log: str) -> pytest.TestReport:
    """The report of a test that no node reported."""
    message = items.message(outcome, reason, items.from_start(item.config, item.nodeid), log)
    when: Any = "???"  # pytest-xdist's word for what a worker was at when it died
    report = pytest.TestReport(item.nodeid, item.location, {}, "failed", message, when)
    if entry := items.entry(item):
        report.user_properties.append(("parity", items.failed(entry | {"real": False}, outcome, reason)))
    return report


def _verdict(reports: Sequence[pytest.TestReport]) -> str:
    """What was judged, in a few words."""
    told: list[Any] = [value for report in reports for name, value in report.user_properties if name == "parity"]
    if not told:
        return ""
    entry: Mapping[str, Any] = told[-1]
    return " ".join([entry["outcome"], *([f"error {entry['load']:.2g} of its bound"] if "load" in entry else [])])


# --- a node ---


def run_tests(
    nodeids: Sequence[str], arguments: Sequence[str], ledger: str, environment: Mapping[str, str]
) -> Iterator[Outcome]:
    """What each test in turn comes to, in the project's folder on a node: the task that Ray runs.

    arguments: options for pytest. ledger: the folder of the records, in the project's.
    """
    import ray

    node = ray.get_runtime_context().get_node_id()
    with tempfile.TemporaryDirectory(prefix="parity-ray-") as name:
        folder = Path(name)
        if Path(ledger).exists():  # a copy: this task's records are told from those of the node's other tasks
            shutil.copytree(ledger, folder / "records", ignore=shutil.ignore_patterns(".*"))
        (folder / "tests").write_text("".join(f"{nodeid}\n" for nodeid in nodeids), encoding="utf-8")
        finished: dict[str, tuple[list[dict[str, Any]], list[Record]]] = {}
        with _pytest(folder, arguments, environment) as results:
            for nodeid in nodeids:
                while nodeid not in finished:
                    try:
                        told, *came_to = results.recv()
                    except EOFError:
                        break
                    finished[told] = came_to
                if nodeid in finished:
                    yield node, *finished.pop(nodeid), ""
                else:
                    output = (folder / "output").read_text(encoding="utf-8", errors="replace").splitlines()
                    yield node, [], [], "\n".join(output[-LINES:])
            with contextlib.suppress(EOFError):
                results.recv()  # until pytest has put everything away


@contextlib.contextmanager
def _pytest(folder: Path, arguments: Sequence[str], environment: Mapping[str, str]) -> Iterator[Connection]:
    """pytest on the tests that `folder` names, in a session of its own, which ends with this process."""
    reading, writing = os.pipe()
    own = [f"--parity-records={folder / 'records'}", f"--basetemp={folder / 'tmp'}", f"-ocache_dir={folder / 'cache'}"]
    with Connection(reading, writable=False) as results, (folder / "output").open("wb") as output:
        process = subprocess.Popen(
            [
                *(sys.executable, "-c", f"from {__name__} import _serve; import sys; _serve(*sys.argv[1:])"),
                *(str(writing), str(folder)),
                *(*arguments, *own, "-n1", "--dist=load", "--junitxml=", "--rootdir=.", f"@{folder / 'tests'}"),
            ],
            env={**os.environ, **environment}, pass_fds=[writing], start_new_session=True,
            stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT,
        )  # fmt: skip
        os.close(writing)
        try:
            yield results
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def _serve(writing: str, folder: str, *arguments: str) -> None:
    """Run pytest, and write to a pipe what each test came to."""
    os.set_inheritable(int(writing), False)
    threading.Thread(target=_end_with_reader, args=(int(writing), folder), daemon=True).start()
    with Connection(int(writing), readable=False) as results:
        pytest.main([*arguments], [_Teller(results, Path(folder) / "records")])


def _end_with_reader(writing: int, folder: str) -> None:
    """Kill pytest and its worker as soon as nobody reads what they write: the accelerator is the next task's."""
    poll = select.poll()
    poll.register(writing, 0)
    poll.poll()  # for an error: the other end is closed
    shutil.rmtree(folder, ignore_errors=True)
    os.killpg(0, signal.SIGKILL)


class _Teller:
    """Passes on what pytest-xdist's controller hears of each test, with what the test recorded."""

    _config: pytest.Config

    def __init__(self, results: Connection, records: Path) -> None:
        self._results = results
        self._records = Follower(records)
        self._reports: dict[str, list[dict[str, Any]]] = {}

    def pytest_configure(self, config: pytest.Config) -> None:
        self._config = config

    @pytest.hookimpl(trylast=True)
    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        data = self._config.hook.pytest_report_to_serializable(config=self._config, report=report)
        del data["node"]  # pytest-xdist's, of this process
        self._reports.setdefault(report.nodeid, []).append(data)
        if report.when in ("teardown", "???"):
            self._results.send((report.nodeid, self._reports.pop(report.nodeid), self._records.new()))

    @pytest.hookimpl(tryfirst=True)
    def pytest_sessionfinish(self) -> None:
        self._config.option.parity_report = None  # the driver's to write
