"""The pytest plugin: parametrises tests over the matrix, picks tiers, reports verdicts."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Generator, Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, TypeVar

import pytest

from parity import matrix, projects
from parity.backends import free_compiled_programs, has_cuda, has_tpu, is_here, prepare_environment, runner
from parity.declared import DeclarationError
from parity.inputs import DISTRIBUTIONS, specs_of
from parity.judging import goldens
from parity.judging.judge import Judgement, compare, judge, twin_of
from parity.judging.verdict import Verdict
from parity.ledger.book import Book
from parity.ledger.write import Merged, Recorder, check, merge
from parity.op import BACKENDS, TIERS, Backend, Case, Op
from parity.report import entries, text
from parity.runners import items
from parity.runners.items import rerun, shared
from parity.trial import Trial
from parity.words import command, nearest, one_of, said

pytest_plugins = ("parity.runners.workers", "parity.runners.crashes", "parity.runners.long_runs")

Test = TypeVar("Test", bound=Callable[..., Any])

FRAMEWORK = {"tpu": "jax", "gpu": "triton"}
_OPS = pytest.StashKey[dict[Path, tuple[Op, ...]]]()
_BOOKS = pytest.StashKey[dict[Path, Book]]()
_RECORDERS = pytest.StashKey[dict[Path, Recorder]]()
_ENTRY = "parity-report"
_REGISTERED: list[pytest.Parser] = []
"""Whose options this plugin has added to: none where pytest runs without it."""
DECLARED = "twin=False in the op says that it is not"


def cases(
    *ops: Op,
    backend: Backend,
    data: str | None = None,
    where: Callable[[Case], bool] | None = None,
    compared: bool = False,
) -> Callable[[Test], Test]:
    """Run a test once for every case of `ops` on a backend, through its `run` argument.

    `data` replaces the cases' own distribution; cases that then coincide run once, and data `integers` leave out the
    ops without a twin. `where`: the other cases run in the
    full tier alone. `compared`: the test compares the backends, over many seeds; outside the full tier only the cases
    do that are `representative` of their op.
    """
    if "PYTEST_VERSION" in os.environ and not _REGISTERED:
        raise pytest.Collector.CollectError(
            "parity.cases needs pytest's plugin parity, which this run lacks: leave out -p no:parity and "
            "PYTEST_DISABLE_PLUGIN_AUTOLOAD, or say -p parity.runners.plugin"
        )
    if backend not in BACKENDS:
        raise ValueError(f"backend of parity.cases {one_of(BACKENDS, backend)}")
    return pytest.mark.parity_cases(ops, backend=backend, data=data, where=where, compared=compared)


class Run:
    """One case on one backend: what a test of the matrix gets as `run`."""

    def __init__(self, op: Op, case: Case, backend: Backend, request: pytest.FixtureRequest) -> None:
        self.op, self.case, self.backend = op, case, backend
        self._request = request
        self._unrecorded = ""  # why

    def agrees(self) -> None:
        """Fail unless every output agrees with the golden within the contract's bound (G1, G3)."""
        __tracebackhide__ = True
        self._judge()

    def is_exact(self) -> None:
        """Fail unless every output equals the golden, on integer data (G1, G2)."""
        __tracebackhide__ = True
        if self.case.data != "integers":
            raise ValueError(f"is_exact needs data='integers' in parity.cases, got {self.case.data!r}")
        self._judge(exact=True)

    def is_no_worse(self) -> None:
        """Fail unless both backends agree with the golden and ε_TPU ≤ ε_GPU over paired seeds (G4 to G7).

        A TPU is compared with a GPU, an emulated TPU with an emulated GPU: with the one at hand, or its records.
        A failure that the op expects is pytest's xfail, and strict.
        """
        __tracebackhide__ = True
        seeds = self._request.config.getoption("--parity-seeds")
        real = runner("tpu").real
        recorded: dict[Backend, list[Judgement]] = {}
        if not is_here("gpu", real=real):
            recorded["gpu"] = []
            for entry in self._book.seeds(Trial(self.op, self.case, "gpu"), seeds, real=real):
                if isinstance(entry, Verdict):
                    missing = {"op": self.op.name, "case": self.case.id, "backend": "tpu", "real": real, "bound": 0.0}
                    where = "on a GPU runner" if real else "where there is no GPU"
                    record = {"record": entry.outcome, "record_of": "gpu", "where": where}
                    self._report(missing | asdict(entry) | record)
                    cases = {self.op.name: {self.case.id}}
                    command = text.record_command(_recording(self._request.config), "gpu", cases)
                    pytest.skip(f"{entry.outcome}: {entry.reason}; {where}: {command}")
                recorded["gpu"].append(entry)
        compared = compare(self.op, self.case, seeds, recorded)
        for judged in compared.judged["tpu"] if recorded else compared.everything:
            if judged.case.seed < self.case.seed + seeds:
                self._record(Trial(self.op, judged.case, judged.backend), judged)
        self._report(compared.summary())
        if self._reports:
            self._add(entries.of_comparison(self.op, compared, self._rerun()))
        decided = compared.comparison.verdict
        if not decided.passed:
            pytest.fail(text.comparison(compared, self._rerun()), pytrace=False)
        self._check_recorded()
        if decided.outcome.startswith("EXPECTED"):
            pytest.xfail(f"{decided.outcome}: {decided.reason}")

    def _compared_elsewhere(self) -> Iterator[Case]:
        """The case's further seeds where the other backend, on another host, is to be compared with records of them."""
        config = self._request.config
        (other,) = {*BACKENDS} - {self.backend}
        here = is_here(other, real=runner(self.backend).real)
        if not here and (_tier(config) == "full" or self.op.representative(self.case)):
            for n in range(1, config.getoption("--parity-seeds")):
                yield self.case.with_seed(self.case.seed + n)

    @property
    def _book(self) -> Book:
        return _book(self._request.config, items.project(self._request.config, self._request.node.path))

    @property
    def _recorder(self) -> Recorder | None:
        config, root = self._request.config, self._book.root
        if not config.getoption("--parity-record"):
            return None
        return config.stash[_RECORDERS].setdefault(root, Recorder(root))

    @property
    def _reports(self) -> bool:
        return bool(self._request.config.getoption("--parity-report"))

    def _report(self, entry: dict[str, Any]) -> None:
        properties = self._request.node.user_properties
        properties.append(("parity", entry))
        # Each on its own too, for JUnit's XML.
        named = {"verdict": "outcome", "epsilon": "epsilon", "eta": "eta_max", "bound": "bound", "ratio": "ratio"}
        properties += [(name, entry[key]) for name, key in named.items() if key in entry]
        properties.append(("rerun", self._rerun()))

    def _add(self, entry: entries.Entry) -> None:
        self._request.node.user_properties.append((_ENTRY, entry.plain()))

    def _rerun(self) -> str:
        return _rerun(self._request.node)

    def _judge(self, *, exact: bool = False) -> None:
        __tracebackhide__ = True
        trial = Trial(self.op, self.case, self.backend)
        judged = judge(trial)
        if exact and judged.verdict.passed and not trial.exact:
            reason = f"golden must be exact on integer data, {judged.verdict.outcome} by its contract ({DECLARED})"
            judged = replace(judged, verdict=Verdict("NO INTEGER TWIN", "G2", reason))
        status: dict[str, str] = {}
        if self.case.data != "integers" and not judged.ended:
            if self._recorder:
                self._record(trial, judged)
                for other in map(trial.with_case, self._compared_elsewhere()):
                    self._record(other, judge(other))
            elif self._book.root.exists():
                strict = self._request.config.getoption("--parity-strict-records")
                judged, record = self._book.check(trial, judged, strict=strict)
                status = {"record": record, "record_of": self.backend}
        self._report(judged.summary() | status)
        if self._reports:
            self._add(entries.of_judgement(self.op, judged, self._rerun(), status.get("record", "")))
        if not judged.verdict.passed:
            pytest.fail(text.failure(judged, twin_of(trial, judged), self._rerun()), pytrace=False)
        self._check_recorded()

    def _record(self, trial: Trial, judged: Judgement) -> None:
        """Write a judgement where records are wanted; nothing of a kernel that came to no result."""
        if (recorder := self._recorder) and not judged.ended:
            try:
                recorder.write(self._book.record(trial, judged))
            except OSError as error:
                self._unrecorded = said(error)

    def _check_recorded(self) -> None:
        """Fail where the disk did not take a record."""
        __tracebackhide__ = True
        if self._unrecorded:
            pytest.fail(f"NOT RECORDED: {self._unrecorded}\nrerun: {self._rerun()}", pytrace=False)


@pytest.fixture
def run(request: pytest.FixtureRequest) -> Run:
    """The case that `parity.cases` chose."""
    op, case, backend = request.param
    pytest.importorskip(FRAMEWORK[backend], reason=f"{FRAMEWORK[backend]} is not installed here")
    return Run(op, case, backend, request)


def pytest_addoption(parser: pytest.Parser) -> None:
    """The options, all named --parity-…."""
    _REGISTERED.append(parser)
    group = parser.getgroup("parity", "kernel parity")
    group.addoption(
        "--parity-tier",
        choices=TIERS,
        help="cases to run: smoke (under two minutes), default, or full (everything); default: default, "
        "or full where -m names it",
    )
    group.addoption(
        "--parity-seed", type=int, default=0, metavar="N", help="draw the inputs of every case from seed N (default: 0)"
    )
    group.addoption(
        "--parity-seeds",
        type=int,
        default=8,
        metavar="S",
        help="paired seeds to compare the backends on (default: 8), before 64 where it fails",
    )
    group.addoption(
        "--parity-records", type=Path, default=None, metavar="DIR", help="the ledger's folder (default: records)"
    )
    group.addoption("--parity-record", action="store_true", help="write what is measured into the ledger")
    group.addoption("--parity-strict-records", action="store_true", help="fail where a record is stale")
    group.addoption(
        "--parity-report",
        type=Path,
        default=None,
        metavar="FILE",
        help="write everything that is judged as an HTML page",
    )
    group.addoption(
        "--parity-golden-cache",
        metavar="URL",
        help="share goldens that take long to compute: a folder, or a URL that fsspec knows (default: none are)",
    )
    group.addoption(
        "--parity-golden-cache-gb",
        type=float,
        default=goldens.DEFAULT_GB,
        metavar="GB",
        help=f"the size of that cache in gigabytes; what was used longest ago goes (default: {goldens.DEFAULT_GB:g})",
    )


def pytest_configure(config: pytest.Config) -> None:
    """Register the markers and the reporter."""
    config.addinivalue_line("markers", "parity_cases(ops, backend, data): run over the matrix of ops; see parity.cases")
    config.addinivalue_line("markers", "smoke: the tier of cases that runs in under two minutes")
    config.addinivalue_line("markers", "full: the tier of cases that runs only where asked for")
    config.addinivalue_line("markers", "tpu: runs Pallas kernels")
    config.addinivalue_line("markers", "gpu: runs Triton kernels")
    _share_goldens(config)
    found = config.stash[items.PROJECTS] = projects.near(items.paths(config))
    if len(found) > 1 and config.getoption("--parity-record") and config.getoption("--parity-records"):
        several = ", ".join(map(str, sorted(found)))
        raise pytest.UsageError(f"--parity-records takes one project at a time with --parity-record, got {several}")
    config.stash[items.HOME] = next(iter(found)) if len(found) == 1 else config.rootpath
    config.stash[_OPS], config.stash[_BOOKS], config.stash[_RECORDERS] = {}, {}, {}
    config.pluginmanager.register(_Reporter(config), "parity-reporter")


def _share_goldens(config: pytest.Config) -> None:
    """Say in the environment, which processes below this one have too, where goldens are shared."""
    url = config.getoption("--parity-golden-cache")
    if url is None:
        return
    environment = pytest.MonkeyPatch()
    config.add_cleanup(environment.undo)
    environment.setenv(goldens.URL, url if "://" in url else str(Path(url).resolve()))
    environment.setenv(goldens.LIMIT, str(config.getoption("--parity-golden-cache-gb")))
    try:
        goldens.of_environment()
    except ValueError as error:
        raise pytest.UsageError(str(error)) from None


def _book(config: pytest.Config, project: Path) -> Book:
    """The ledger of a project, or the one that the command line names."""
    from parity.runners.long_runs import began  # not before pytest has loaded it as a plugin

    root = config.getoption("--parity-records") or project / "records"
    return config.stash[_BOOKS].setdefault(root, Book(root, began(config)))


def _matrix(config: pytest.Config, project: Path) -> tuple[Op, ...]:
    if project not in config.stash[_OPS]:
        try:
            config.stash[_OPS][project] = matrix.load(project)
        except ValueError as error:
            raise pytest.Collector.CollectError(str(error)) from error
    return config.stash[_OPS][project]


@pytest.hookimpl(tryfirst=True)
def pytest_load_initial_conftests(early_config: pytest.Config) -> None:
    """Set what the frameworks read when they load, before a conftest may load one, where there is a project."""
    given = early_config.known_args_namespace.file_or_dir
    if projects.near([early_config.rootpath, *items.located(early_config, given)]):
        prepare_environment()


@pytest.hookimpl(tryfirst=True)
def pytest_pycollect_makemodule(module_path: Path) -> None:
    """Let a test file import its own project's modules."""
    if project := projects.of(module_path):
        prepare_environment()
        projects.enter(project, module_path.parent)


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Let a kernel import its own project's modules, when it is loaded as well."""
    if project := projects.of(item.path):
        projects.enter(project, item.path.parent)


@pytest.hookimpl(wrapper=True)
def pytest_collection(session: pytest.Session) -> Generator[None, object, object]:
    """Say of a case that no test has which is nearest."""
    try:
        return (yield)
    except pytest.UsageError as error:
        ids = [case.id for ops in session.config.stash[_OPS].values() for op in ops for case in op.cases]
        named = [argument.partition("[")[2].removesuffix("]") for argument in session.config.args if "[" in argument]
        near = [f"{name}{found}" for name in named if name not in ids and (found := nearest(ids, name))]
        raise pytest.UsageError(*error.args, *near) from None


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """One test per case where `cases` asks for it; and for each that a node id of the command line spells."""
    marker = metafunc.definition.get_closest_marker("parity_cases")
    if marker is None:
        return
    (ops,) = marker.args
    backend, data, where, compared = (marker.kwargs[name] for name in ("backend", "data", "where", "compared"))
    known = _matrix(metafunc.config, items.project(metafunc.config, metafunc.definition.path))
    if strangers := [op.name for op in ops if op not in known]:
        twin = " (an op of that name is: with_cases makes another)" if {*strangers} & {op.name for op in known} else ""
        what = f"{metafunc.definition.nodeid}: {', '.join(strangers)} is not in the matrix's OPS{twin}"
        raise pytest.Collector.CollectError(what)
    chosen: dict[str, Any] = {}
    beyond: dict[str, Any] = {}
    if data == "integers":
        ops = tuple(op for op in ops if op.twin)
    for op in ops:
        for case in op.cases:
            drawn = case.with_seed(metafunc.config.getoption("--parity-seed"))
            drawn = drawn if data is None else drawn.with_data(data)
            if data not in (None, *DISTRIBUTIONS):
                _check_data(op, drawn)
            tier = case.tier if where is None or where(case) else "full"
            if compared and tier != "full":
                tier = "default" if op.representative(case) else "full"
            marks = [getattr(pytest.mark, name) for name in (backend, tier) if name != "default"]
            wanted = chosen if TIERS.index(tier) <= TIERS.index(_tier(metafunc.config)) else beyond
            wanted.setdefault(drawn.id, pytest.param((op, drawn, backend), id=drawn.id, marks=marks))
    for case_id in _named(metafunc):
        with contextlib.suppress(ValueError):  # pytest says which node ids there are not
            op, drawn = matrix.find(ops, case_id)
            if data in (None, drawn.data):
                marks = [getattr(pytest.mark, backend)]
                chosen.setdefault(drawn.id, pytest.param((op, drawn, backend), id=drawn.id, marks=marks))
    # Where no case is wanted one stands for them, and is left out by its tier: of none pytest makes a skipped test.
    metafunc.parametrize("run", list(chosen.values()) or list(beyond.values())[:1], indirect=True)


def _check_data(op: Op, case: Case) -> None:
    """Raise CollectError for data that there is not, and that the op has no inputs of its own for."""
    try:
        specs_of(op, case)
    except DeclarationError as error:
        raise pytest.Collector.CollectError(str(error)) from error


def _named(metafunc: pytest.Metafunc) -> Iterator[str]:
    """The case ids in node ids of this test that were given on the command line."""
    for argument in metafunc.config.args:
        path, *names = argument.split("::")
        test, bracket, case_id = "".join(names[-1:]).partition("[")
        if bracket and test == metafunc.definition.name and Path(path).resolve() == metafunc.definition.path:
            yield case_id.removesuffix("]")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out what is beyond the chosen tier and not asked for by its id, and put together what shares a compiled
    kernel."""
    tier = _tier(config)
    if tier != "full":
        kept: list[pytest.Item] = []
        dropped: list[pytest.Item] = []
        for item in items:
            wanted = item.get_closest_marker("smoke") if tier == "smoke" else not item.get_closest_marker("full")
            (kept if wanted or _is_asked_for(item) else dropped).append(item)
        if dropped:
            config.hook.pytest_deselected(items=dropped)
            items[:] = kept
    # Neighbours mostly go to the same pytest-xdist worker: a case and its other data then compile once.
    place: dict[Any, int] = {}
    items.sort(key=lambda item: place.setdefault(shared(item), len(place)))


def _is_asked_for(item: pytest.Item) -> bool:
    """Whether the command line has the node id of a test."""
    for argument in item.config.args:
        path, *names = argument.split("::")
        if names and Path(path).resolve() == item.path and "::".join(names) == item.nodeid.partition("::")[2]:
            return True
    return False


def _tier(config: pytest.Config) -> str:
    named = "full" if "full" in config.getoption("markexpr") else "default"
    tier: str = config.getoption("--parity-tier") or named
    return tier


def _recording(config: pytest.Config) -> str:
    """The command that records the cases of this run: its own options, as far as they say which these are."""
    words = ["pytest", "--parity-record"]
    if _tier(config) != "default":
        words.append(f"--parity-tier={_tier(config)}")
    for option, default in (("--parity-seed", 0), ("--parity-seeds", 8), ("--parity-records", None)):
        if config.getoption(option) != default:
            words.append(f"{option}={config.getoption(option)}")
    return command(*words)


def _rerun(item: pytest.Item) -> str:
    """The command that runs a test alone."""
    n0 = ["-n0"] if item.config.pluginmanager.hasplugin("xdist") else []
    return command("pytest", *n0, items.from_start(item.config, item.nodeid))


def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> None:
    """Free what JAX compiled, before it is too much for one process."""
    free_compiled_programs(finished=nextitem is None or nextitem.path != item.path)


def pytest_report_header(config: pytest.Config) -> str:
    """Which backend is real and which is emulated."""
    where = _devices()
    return " · ".join(["parity: " + where[0], *where[1:], "goldens float64"])


def _devices() -> tuple[str, ...]:
    real = {"tpu": has_tpu(), "gpu": has_cuda()}
    return tuple(f"{name} {'real' if real[name] else 'emulated'}" for name in BACKENDS)


def _told(report: pytest.TestReport, name: str) -> list[dict[str, Any]]:
    return [value for key, value in report.user_properties if key == name]  # type: ignore[misc]


class _Reporter:
    """Collects what tests report, also through pytest-xdist, prints its summary, and writes the report."""

    def __init__(self, config: pytest.Config) -> None:
        self._config = config
        self._judged: dict[Path, list[dict[str, Any]]] = {}
        self._merged: dict[Path, Merged] = {}
        self._lost: list[str] = []
        self._entries: dict[Path, list[entries.Entry]] = {}
        self._written = ""
        self._problems: list[str] = []  # what did not come to be where it was to be written

    def pytest_sessionstart(self) -> None:
        """Read the ledgers that are to be written before hours are spent on what goes into them."""
        if self._config.getoption("--parity-record") and not hasattr(self._config, "workerinput"):
            for root in items.ledgers(self._config):
                try:
                    check(root)
                except (OSError, ValueError) as error:
                    raise pytest.UsageError(f"--parity-record cannot write {root}: {said(error)}") from None

    @pytest.hookimpl(trylast=True)
    def pytest_sessionfinish(self, session: pytest.Session, exitstatus: int) -> None:
        for recorder in self._config.stash[_RECORDERS].values():
            recorder.close()
        if hasattr(self._config, "workerinput"):
            return
        for root in items.ledgers(self._config) if self._config.getoption("--parity-record") else ():
            try:
                self._merged[root] = merge(root)
            except (OSError, ValueError) as error:
                kept = f"what was recorded is in {root / '.parts'}, for {command('parity', 'merge', root)}"
                self._problems.append(f"records: not written: {said(error)}; {kept}")
        if self._config.getoption("--parity-report") and not self._config.option.collectonly:
            try:
                self._written = self._write(interrupted=exitstatus == pytest.ExitCode.INTERRUPTED)
            except (OSError, ValueError) as error:
                self._problems.append(f"report: not written: {said(error)}")
        if self._problems and session.exitstatus == pytest.ExitCode.OK:
            session.exitstatus = pytest.ExitCode.TESTS_FAILED

    def _write(self, interrupted: bool) -> str:
        from parity.report import page

        notices = [f"A worker died of {nodeid}." for nodeid in self._lost]
        judged: list[entries.Entry] = []
        if interrupted:
            notices.append("The run was interrupted: what it had not come to is not here, and no error is explained.")
        twice = text.in_several((entry.op, str(project)) for project, of in self._entries.items() for entry in of)
        for project, of_project in self._entries.items():
            found = of_project
            if not interrupted:
                projects.enter(project)
                found = list(entries.attribute(_matrix(self._config, project), found))
            where = f" ({items.spelled(self._config, project)})"
            judged += [replace(entry, op=entry.op + where) if entry.op in twice else entry for entry in found]
        words = command("pytest", *self._config.invocation_params.args)
        about = page.Run(words, _devices(), _book(self._config, self._config.rootpath).utc or "", tuple(notices))
        ran = self._entries or [self._config.stash[items.HOME]]
        of = {items.spelled(self._config, project): project for project in ran}
        return str(page.write(self._config.getoption("--parity-report"), judged, about, of))

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(
        self, item: pytest.Item, call: pytest.CallInfo[None]
    ) -> Generator[None, pytest.TestReport, pytest.TestReport]:
        """A case whose test ended otherwise than by its verdict is in the report as well."""
        report = yield
        if call.excinfo and isinstance(call.excinfo.value, DeclarationError):
            report.longrepr = f"{call.excinfo.value}\nrerun: {_rerun(item)}"
        marker, trial = item.get_closest_marker("parity_cases"), items.chosen(item)
        wanted = self._config.getoption("--parity-report") and call.when != "teardown"
        if wanted and marker and trial and call.excinfo:
            _, case, backend = trial
            side = entries.COMPARED if marker.kwargs["compared"] else backend
            told = [entry["passed"] for entry in _told(report, _ENTRY)]
            reason = call.excinfo.exconly(tryshort=True).splitlines()[0]
            if (report.failed and False not in told) or (report.skipped and not told):
                failed = [entry["outcome"] for entry in _told(report, "parity") if entry.get("passed") is False]
                outcome = "SKIPPED" if report.skipped else next(iter(failed), "CRASH")
                missing = entries.without_judgement(case.op, case.id, side, outcome, reason, _rerun(item))
                report.user_properties.append((_ENTRY, missing.plain()))
        return report

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        told, noted = _told(report, "parity"), _told(report, _ENTRY)
        if not (told or noted or str(report.when) == "???"):
            return
        project = items.project_of(self._config, report.nodeid)
        found_entries = self._entries.setdefault(project, [])
        if str(report.when) == "???":  # pytest-xdist's word for what a worker was at when it died
            self._lost.append(report.nodeid)
            found_entries += [
                entries.without_judgement(
                    found["op"], found["case"], found["backend"], found["outcome"], found["reason"],
                    rerun(items.from_start(self._config, report.nodeid)),
                )
                for found in told
            ]  # fmt: skip
        if report.when in ("call", "???"):
            self._judged.setdefault(project, []).extend(told)
        if report.when == "call" or (report.when == "setup" and not report.passed):
            found_entries += map(entries.Entry.from_plain, noted)

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        judged = [entry for of_project in self._judged.values() for entry in of_project]
        if len(self._judged) > 1:
            named = {project: items.spelled(self._config, project) for project in self._judged}
            judged = [entry | {"project": named[of]} for of, found in self._judged.items() for entry in found]
        lines = text.summary(judged, _recording(self._config))
        if lines:
            terminalreporter.section("parity")
            for line in lines:
                terminalreporter.write_line(line)
        if self._written:
            terminalreporter.write_line(f"report: {self._written}")
        for problem in self._problems:
            terminalreporter.write_line(problem, red=True)
        for root, merged in self._merged.items():
            older = f", {merged.older} are older than what is there" if merged.older else ""
            terminalreporter.write_line(f"records: {merged.written} written to {root}{older}")
            for line in merged.lost_lines:
                terminalreporter.write_line(f"records: lost {line}", red=True)
        if self._merged:
            for nodeid in self._lost:
                again = rerun(items.from_start(self._config, nodeid), "--parity-record")
                terminalreporter.write_line(
                    f"records: nothing of {nodeid}, whose worker died: {again}",
                    red=True,
                )
