"""The pytest plugin: parametrises tests over the matrix, picks tiers, reports verdicts."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import pytest

from parity import matrix, text
from parity.backends import has_cuda, has_tpu
from parity.judge import compare, judge
from parity.op import BACKENDS, TIERS, Backend, Case, Op

Test = TypeVar("Test", bound=Callable[..., Any])

FRAMEWORK = {"tpu": "jax", "gpu": "triton"}
_OPS = pytest.StashKey[tuple[Op, ...]]()


def cases(*ops: Op, backend: Backend, data: str | None = None, compared: bool = False) -> Callable[[Test], Test]:
    """Run a test once for every case of `ops` on a backend, through its `run` argument.

    `data` replaces the cases' own distribution; cases that then coincide run once. `compared`: the test compares the
    backends, over many seeds; outside the full tier only the cases do that are `representative` of their op.
    """
    return pytest.mark.parity_cases(ops, backend=backend, data=data, compared=compared)


class Run:
    """One case on one backend: what a test of the matrix gets as `run`."""

    def __init__(self, op: Op, case: Case, backend: Backend, request: pytest.FixtureRequest) -> None:
        self.op, self.case, self.backend = op, case, backend
        self._request = request

    def agrees(self) -> None:
        """Fail unless every output agrees with the golden within the contract's bound (G1, G3)."""
        __tracebackhide__ = True
        self._judge()

    def is_exact(self) -> None:
        """Fail unless every output equals the golden, on integer data (G1, G2)."""
        __tracebackhide__ = True
        if self.case.data != "integers":
            raise ValueError(f"is_exact needs data='integers' in parity.cases, got {self.case.data!r}")
        self._judge()

    def is_no_worse(self) -> None:
        """Fail unless both backends agree with the golden and ε_TPU ≤ ε_GPU over paired seeds (G4 to G7)."""
        __tracebackhide__ = True
        compared = compare(self.op, self.case, self._request.config.getoption("--parity-seeds"))
        self._request.node.user_properties.append(("parity", compared.summary()))
        if not compared.comparison.verdict.passed:
            pytest.fail(text.comparison(compared, self._rerun()), pytrace=False)

    def _rerun(self) -> str:
        n0 = "-n0 " if self._request.config.pluginmanager.hasplugin("xdist") else ""
        return f'pytest {n0}"{self._request.node.nodeid}"'

    def _judge(self) -> None:
        __tracebackhide__ = True
        judged = judge(self.op, self.case, self.backend)
        self._request.node.user_properties.append(("parity", judged.summary()))
        if not judged.verdict.passed:
            twin = self.case.with_data("integers")
            twin_judged = None if twin == self.case else judge(self.op, twin, self.backend)
            pytest.fail(text.failure(judged, twin_judged, self._rerun()), pytrace=False)


@pytest.fixture
def run(request: pytest.FixtureRequest) -> Run:
    """The case that `parity.cases` chose."""
    op, case, backend = request.param
    pytest.importorskip(FRAMEWORK[backend], reason=f"{FRAMEWORK[backend]} is not installed here")
    return Run(op, case, backend, request)


def pytest_addoption(parser: pytest.Parser) -> None:
    """The options, all named --parity-…."""
    group = parser.getgroup("parity", "kernel parity")
    group.addoption(
        "--parity-tier",
        choices=TIERS,
        help="cases to run: smoke (under a minute), default, or full (everything); default: default, "
        "or full where -m names it",
    )
    group.addoption(
        "--parity-seed", type=int, default=0, metavar="N", help="draw the inputs of every case from seed N (default: 0)"
    )
    group.addoption(
        "--parity-seeds", type=int, default=8, metavar="S", help="paired seeds to compare the backends on (default: 8)"
    )


def pytest_configure(config: pytest.Config) -> None:
    """Register the markers and the reporter."""
    config.addinivalue_line("markers", "parity_cases(ops, backend, data): run over the matrix of ops; see parity.cases")
    config.addinivalue_line("markers", "smoke: the tier of cases that runs in under a minute")
    config.addinivalue_line("markers", "full: the tier of cases that runs only where asked for")
    config.addinivalue_line("markers", "tpu: runs Pallas kernels")
    config.addinivalue_line("markers", "gpu: runs Triton kernels")
    config.pluginmanager.register(_Reporter(), "parity-reporter")


def _matrix(config: pytest.Config) -> tuple[Op, ...]:
    if _OPS not in config.stash:
        try:
            config.stash[_OPS] = matrix.load(config.rootpath)
        except ValueError as error:
            raise pytest.UsageError(str(error)) from error
    return config.stash[_OPS]


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """One test per case where `cases` asks for it."""
    marker = metafunc.definition.get_closest_marker("parity_cases")
    if marker is None:
        return
    (ops,) = marker.args
    backend, data, compared = (marker.kwargs[name] for name in ("backend", "data", "compared"))
    if strangers := [op.name for op in ops if op not in _matrix(metafunc.config)]:
        raise pytest.UsageError(f"{metafunc.definition.nodeid}: {', '.join(strangers)} is not in the matrix's OPS")
    chosen: dict[str, Any] = {}
    for op in ops:
        for case in op.cases:
            drawn = case.with_seed(metafunc.config.getoption("--parity-seed"))
            drawn = drawn if data is None else drawn.with_data(data)
            tier = case.tier if not compared else "default" if op.representative(case) else "full"
            marks = [getattr(pytest.mark, name) for name in (backend, tier) if name != "default"]
            chosen.setdefault(drawn.id, pytest.param((op, drawn, backend), id=drawn.id, marks=marks))
    metafunc.parametrize("run", list(chosen.values()), indirect=True)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out what is beyond the chosen tier."""
    tier = config.getoption("--parity-tier") or ("full" if "full" in config.getoption("markexpr") else "default")
    if tier == "full":
        return
    kept: list[pytest.Item] = []
    dropped: list[pytest.Item] = []
    for item in items:
        wanted = item.get_closest_marker("smoke") if tier == "smoke" else not item.get_closest_marker("full")
        (kept if wanted else dropped).append(item)
    if dropped:
        config.hook.pytest_deselected(items=dropped)
        items[:] = kept


def pytest_report_header(config: pytest.Config) -> str:
    """Which backend is real and which is emulated."""
    real = {"tpu": has_tpu(), "gpu": has_cuda()}
    where = [f"{name} {'real' if real[name] else 'emulated'}" for name in BACKENDS]
    return " · ".join(["parity: " + where[0], *where[1:], "goldens float64"])


class _Reporter:
    """Collects the judgements that tests report, also through pytest-xdist, and prints their summary."""

    def __init__(self) -> None:
        self._judged: list[dict[str, Any]] = []

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when == "call":
            self._judged += [value for name, value in report.user_properties if name == "parity"]  # type: ignore[misc]

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        lines = text.summary(self._judged)
        if lines:
            terminalreporter.section("parity")
            for line in lines:
                terminalreporter.write_line(line)
