"""What tests cost in seconds of a processor, whatever else the machine does: recorded, limited, and used to deal files.

A pytest plugin. `durations.json` has the seconds of every file in the default tier, and of every test that is slow:
pytest-xdist's workers are given whole files (`--dist loadfile`), the longest first. `pytest --record-durations` writes
it; `tests/meta/test_durations.py` holds it to the limits here.
"""

import json
import resource
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.commands import the_forks

RECORDED = Path(__file__).parents[1] / "durations.json"
TEST, FILE = 10.0, 60.0
"""Seconds that a test, and a file of tests, may take in the default tier without a reason."""
COMPILES = "programs of many shapes and options, each of which XLA compiles for a second or more"
INTERPRETS = "Triton's interpreter takes a tenth of a second or more for each launch"
REASONS = {
    "tests/gla/test_gla_laws.py": COMPILES,
    "tests/families/test_families_options_tpu.py": COMPILES,
    "tests/gla/test_gla_tpu.py": COMPILES,
    "tests/gmm/test_gmm_tpu.py": COMPILES,
    "tests/quantized_gmm/test_quantized_gmm_tpu.py": COMPILES,
    "tests/moe/test_moe_tpu.py": COMPILES,
    "tests/delta_rule/test_delta_rule_tpu.py": COMPILES,
    "tests/delta_rule/test_delta_rule_gpu.py": INTERPRETS,
    "tests/gmm/test_gmm_gpu.py": INTERPRETS,
    "tests/gla/test_gla_compile_tpu.py::test_compiles": "as gmm's, of six kernels",
    "tests/gla/test_gla_compile_gpu.py::test_compiles": "ptxas, of kernels with many dots",
    "tests/delta_rule/test_delta_rule_compile_gpu.py::test_compiles": "ptxas, of kernels with many dots",
    "tests/meta/runners/test_workflows.py::test_ledgers_of_a_tpu_and_a_gpu_host_are_joined_and_judged": "three hosts",
    "tests/gla/test_gla_gpu.py": INTERPRETS,
    "tests/gmm/test_gmm_compile_tpu.py::test_compiles": "the TPU's compiler, and the schedules that it dumps",
    "tests/gmm/test_gmm_compile_gpu.py::test_compiles": "ptxas and LLVM, of every kernel that four calls launch",
    "tests/quantized_gmm/test_quantized_gmm_compile_tpu.py::test_compiles": "as gmm's",
    "tests/quantized_gmm/test_quantized_gmm_compile_gpu.py::test_compiles": "as gmm's",
    "tests/families/test_families_schedule_tpu.py::test_a_representative_program": "production shapes, compiled",
    "tests/moe/test_moe_expert_parallel_tpu.py::test_several_devices_give_what_one_does": "devices, and one",
    "tests/meta/cli/test_cli.py::test_the_table_has_a_line_for_each_model_whatever_crashes": "every model's line",
    "tests/meta/faults/test_faults_moe.py::test_a_planted_fault_is_caught": "a layer's kernels, each traced anew",
    "tests/meta/debugging/test_shrink.py::test_a_planted_fault_is_reduced_and_its_script_shows_it": "a whole reduction",
    "tests/meta/ledger/test_ledger.py::test_a_killed_worker_loses_nothing_that_was_recorded_before": "two workers",
    "tests/meta/runners/test_crashes.py::test_a_dying_case_costs_that_case_alone": "six processes that end, and others",
    "tests/meta/runners/test_long_runs.py::test_a_killed_run_is_resumed": "four runs with workers",
    "tests/meta/test_examples.py::test_example": "a virtual environment, and a pytest in it",
}
"""Why a file, or a test function of one, takes longer."""
SECONDS = "processor_seconds"
"""The property of a test's report, which is in JUnit's XML too."""

_BEGAN = pytest.StashKey[float]()


def used() -> float:
    """Processor seconds of this process and of those that it has waited for, and of commands that were forked."""
    both = (resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    forked = the_forks().seconds if the_forks.cache_info().currsize else 0.0
    return sum(part.ru_utime + part.ru_stime for part in both) + forked


def recorded() -> dict[str, float]:
    """The recorded seconds of each file of tests, by its path from the root of the project, and of each slow test."""
    return json.loads(RECORDED.read_text()) if RECORDED.exists() else {}


def without_reason(seconds: dict[str, float]) -> list[str]:
    """The tests and files that take too long, in a line each. seconds: as `recorded`."""
    found = []
    for name, took in seconds.items():
        kind, limit = ("test", TEST) if "::" in name else ("file", FILE)
        if took > limit and not {name.partition("[")[0], name.partition("::")[0]} & REASONS.keys():
            found.append(f"{name} took {took:.0f} s of a processor: a {kind} over {limit:.0f} s must say why")
    return found


def summed(seconds: dict[str, float]) -> dict[str, float]:
    """The sum for each file, and the slow tests. seconds: of each test, by its id."""
    total: dict[str, float] = {}
    for name, took in seconds.items():
        file = name.partition("::")[0]
        total[file] = total.get(file, 0.0) + took
    slow = {name: took for name, took in seconds.items() if took > TEST}
    return {name: round(took, 1) for name, took in sorted((total | slow).items())}


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--record-durations", action="store_true", help=f"write {RECORDED.name}")


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The files that take longest first, so that workers end together."""
    seconds = recorded()
    items.sort(key=lambda item: -seconds.get(item.nodeid.partition("::")[0], 0.0))


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    item.stash[_BEGAN] = used()
    return (yield)


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[Any]) -> None:
    if call.when == "teardown":
        item.user_properties.append((SECONDS, round(used() - item.stash[_BEGAN], 2)))


def pytest_configure(config: pytest.Config) -> None:
    # Or pytest-xdist deals out those first that have most tests, and last the one long test of a file.
    config.option.loadscopereorder = False
    if not hasattr(config, "workerinput"):
        config.pluginmanager.register(_Clock(config))


class _Clock:
    """In the process that hears of every test: adds up, holds to the limits, records."""

    def __init__(self, config: pytest.Config) -> None:
        self._config = config
        self._seconds: dict[str, float] = {}
        self._slow: list[str] = []

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        for name, took in report.user_properties:
            if name == SECONDS:
                self._seconds[report.nodeid] = took  # type: ignore[assignment]

    @pytest.hookimpl(tryfirst=True)
    def pytest_sessionfinish(self) -> None:
        took = summed(self._seconds)
        in_default = self._config.getoption("--parity-tier") in (None, "default") and not self._config.option.markexpr
        self._slow = without_reason(took) if in_default else []
        if self._config.getoption("--record-durations"):
            kept = {name: s for name, s in recorded().items() if name.partition("::")[0] not in took}
            RECORDED.write_text(json.dumps(kept | took, indent=0, sort_keys=True) + "\n")

    def pytest_terminal_summary(self, terminalreporter: Any) -> None:
        for line in self._slow:
            terminalreporter.write_line(line, red=True)
        terminalreporter.write_line(f"{sum(self._seconds.values()) / 60:.1f} minutes of a processor in tests")
