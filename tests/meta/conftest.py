"""Somebody else's project, to run pytest and `parity` in; and what a test of a backend needs."""

from functools import partial

import pytest

from tests.support.functions import FRAMEWORKS
from tests.support.projects import Project


@pytest.fixture
def project(tmp_path):
    """Makes it in the test's folder; of which kernel, is the argument."""
    return partial(Project, tmp_path)


@pytest.fixture(scope="session")
def ledger(tmp_path_factory):
    """What the project records."""
    run = Project(tmp_path_factory.mktemp("project"))
    done = run("-q", "--parity-record")
    assert "records: 4 written" in done.stdout, done.stdout
    assert [*(run.folder / "records").glob("*/*/*.jsonl")] == [run.folder / run.ledger]
    return (run.folder / run.ledger).read_text()


@pytest.fixture
def recorded(project, ledger):
    """The project after it was recorded."""
    run = project()
    (run.folder / run.ledger).parent.mkdir(parents=True)
    run.write(run.ledger, ledger)
    return run


@pytest.fixture(autouse=True)
def framework(request):
    """Skip a test of a backend whose framework is not here."""
    for backend in ("tpu", "gpu"):
        if request.node.get_closest_marker(backend):
            pytest.importorskip(FRAMEWORKS[backend])


@pytest.fixture(autouse=True)
def no_options(monkeypatch):
    """Keep this pytest's PYTEST_ADDOPTS from what a test runs."""
    monkeypatch.delenv("PYTEST_ADDOPTS", raising=False)
